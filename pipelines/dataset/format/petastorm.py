"""Petastorm's metadata of a split, made without Petastorm.

Petastorm stores a pickle of its `Unischema` in `_common_metadata`. We only write that pickle and never read one. We
write it instruction by instruction: Python's pickler would import the classes that it names, and packages such as
dill change its output. The bytes equal those of `pickle.dumps` for Petastorm's own objects with PySpark 4.

Source: the instructions of protocol 4, Python's `pickletools` and PEP 3154.
"""

import json
import pickle
from collections.abc import Callable, Hashable, Mapping, Sequence
from functools import partial
from pathlib import PurePosixPath

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from pipelines.dataset.format.columns import ID_FIELD
from pipelines.dataset.format.manifest import Shard
from pipelines.dataset.format.rows import arrow_schema, fixed_fields
from pipelines.sample import ImageGroup
from pipelines.storage.folder import Location

UNISCHEMA_KEY = b"dataset-toolkit.unischema.v1"
"""Key in the Parquet metadata under which Petastorm looks for its schema."""
ROW_GROUPS_PER_FILE_KEY = b"dataset-toolkit.num_row_groups_per_file.v1"
"""Key under which Petastorm looks for the number of row groups in each file, as JSON."""
_UNISCHEMA, _CODECS, _SPARK = "petastorm.unischema", "petastorm.codecs", "pyspark.sql.types"
_METHODS = frozenset(
    ("as_spark_schema", "create_schema_view", "fields", "from_arrow_schema", "make_namedtuple", "make_namedtuple_tf")
)
"""Names that `Unischema` uses itself: a field with such a name does not become an attribute."""
_LARGEST_FRAME = 64 * 1024


class _Pickle:
    """The instructions of one pickle; each value follows the values that it contains."""

    def __init__(self) -> None:
        self._code = bytearray()
        self._memory: list[Hashable] = []
        """Keys of the values in the pickle's memory; None for a value without a key."""

    def data(self) -> bytes:
        """Return the whole pickle."""
        code = bytes(self._code) + pickle.STOP
        if len(code) >= _LARGEST_FRAME:  # a pickler starts another frame there
            raise ValueError(f"the schema takes {len(code)} bytes, too many for Petastorm's metadata")
        return pickle.PROTO + bytes([4]) + pickle.FRAME + len(code).to_bytes(8, "little") + code

    def write(self, *instructions: bytes) -> None:
        """Add instructions."""
        self._code += b"".join(instructions)

    def remember(self, value: Hashable = None) -> None:
        """Store the value on top of the stack in the pickle's memory; with a key, `recall` finds it again."""
        self.write(pickle.MEMOIZE)
        self._memory.append(value)

    def recall(self, value: Hashable) -> bool:
        """Refer to a remembered value; return whether the pickle remembers it."""
        if value not in self._memory:
            return False
        place = self._memory.index(value)
        if place < 256:
            self.write(pickle.BINGET, bytes([place]))
        else:
            self.write(pickle.LONG_BINGET, place.to_bytes(4, "little"))
        return True

    def text(self, value: str) -> None:
        """Write a text."""
        if self.recall(("text", value)):
            return
        encoded = value.encode()
        if len(encoded) < 256:
            self.write(pickle.SHORT_BINUNICODE, bytes([len(encoded)]), encoded)
        else:
            self.write(pickle.BINUNICODE, len(encoded).to_bytes(4, "little"), encoded)
        self.remember(("text", value))

    def name(self, module: str, name: str) -> None:
        """Write the name of a class; the reader imports it."""
        if self.recall(("class", module, name)):
            return
        self.text(module)
        self.text(name)
        self.write(pickle.STACK_GLOBAL)
        self.remember(("class", module, name))

    def instance(self, module: str, name: str, attributes: Mapping[str, Callable[[], None]]) -> None:
        """Write an object without arguments, and then its attributes, if it has any."""
        self.name(module, name)
        self.write(pickle.EMPTY_TUPLE, pickle.NEWOBJ)
        self.remember()
        if attributes:
            self.write(pickle.EMPTY_DICT)
            self.remember()
            self.items(attributes)
            self.write(pickle.BUILD)

    def items(self, values: Mapping[str, Callable[[], None]]) -> None:
        """Fill the mapping on top of the stack; each value is a function that writes it."""
        several = len(values) > 1
        if several:
            self.write(pickle.MARK)
        for key, write in values.items():
            self.text(key)
            write()
        self.write(pickle.SETITEMS if several else pickle.SETITEM)

    def integers(self, values: tuple[int, ...]) -> None:
        """Write a tuple of numbers from 0."""
        if not values:
            self.write(pickle.EMPTY_TUPLE)
            return
        if len(values) > 3:
            self.write(pickle.MARK)
        for value in values:
            code, width = next(kind for kind in _INTEGERS if value < 1 << (8 * kind[1] - (kind[1] == 4)))
            self.write(code, value.to_bytes(width, "little"))
        self.write({1: pickle.TUPLE1, 2: pickle.TUPLE2, 3: pickle.TUPLE3}.get(len(values), pickle.TUPLE))
        self.remember()


_INTEGERS = ((pickle.BININT1, 1), (pickle.BININT2, 2), (pickle.BININT, 4))
"""Instructions for whole numbers, and their width in bytes."""


def pickled_schema(groups: Sequence[ImageGroup], class_count: int) -> bytes:
    """Pickle Petastorm's schema of the id and the arrays; its readers ignore columns that the schema lacks.

    Args:
        groups: The image groups of the dataset.
        class_count: Length of the label vector.

    Raises:
        ValueError: There are too many groups.
    """
    written = _Pickle()

    def field(name: str, dtype: type[np.generic], shape: tuple[int, ...], codec: Callable[[], None]) -> None:
        if written.recall(("field", name)):
            return
        written.name(_UNISCHEMA, "UnischemaField")
        written.write(pickle.MARK)
        written.text(name)
        written.name("numpy", dtype.__name__)
        written.integers(shape)
        codec()
        written.write(pickle.NEWFALSE, pickle.TUPLE)  # not nullable
        written.remember()
        written.write(pickle.NEWOBJ)
        written.remember(("field", name))

    collation = {"collation": partial(written.text, "UTF8_BINARY")}
    string_type = {"_spark_type": partial(written.instance, _SPARK, "StringType", collation)}
    string_codec = partial(written.instance, _CODECS, "ScalarCodec", string_type)
    array_codec = partial(written.instance, _CODECS, "NdarrayCodec", {})
    fields: dict[str, Callable[[], None]] = {
        ID_FIELD: partial(field, ID_FIELD, np.str_, (), string_codec),
        **{
            name: partial(field, name, dtype.type, shape, array_codec)
            for name, (shape, dtype) in fixed_fields(groups, class_count).items()
        },
    }

    def ordered_fields() -> None:
        written.name("collections", "OrderedDict")
        written.write(pickle.EMPTY_TUPLE, pickle.REDUCE)
        written.remember()
        written.items(fields)

    attributes = {name: write for name, write in fields.items() if name not in _METHODS}
    name = partial(written.text, "Sample")
    written.instance(_UNISCHEMA, "Unischema", {"_name": name, "_fields": ordered_fields, **attributes})
    return written.data()


def write_petastorm_metadata(
    folder: Location,
    shards: Sequence[Shard],
    groups: Sequence[ImageGroup],
    class_count: int,
    kept: Sequence[pa.Field] = (),
) -> None:
    """Write Petastorm's schema and the row groups per file, which the writer already knows.

    `petastorm.etl.materialize_dataset` would read every footer again in its own Spark job.
    """
    row_groups = {PurePosixPath(shard.file).name: len(shard.row_groups) for shard in shards}
    metadata = {
        # Petastorm's reader unpickles this value with a list of allowed classes. Our reader never reads it.
        UNISCHEMA_KEY: pickled_schema(groups, class_count),
        ROW_GROUPS_PER_FILE_KEY: json.dumps(row_groups).encode(),
    }
    with folder.new_file("_common_metadata") as path:
        pq.write_metadata(arrow_schema(groups, class_count, kept).with_metadata(metadata), path)
