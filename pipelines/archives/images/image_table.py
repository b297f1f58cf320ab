"""Images in a column of Parquet files, in the layout of Hugging Face and Spark.

```
<root>/*.parquet, <root>/<folder>/*.parquet, or one file        e.g. data/train-00000-of-00002.parquet, split=train/*
  image: struct<bytes: binary, ...> or binary                    JPEG or PNG
  label: int or string (single label), list of them or of 0 and 1 for each class (multi label)
  split: string                                                  if `archive.split` names such a column, or folders
  a key, further columns                                         if `archive.id` and `archive.keep` name them
```
"""

import functools
import re
import textwrap
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import KW_ONLY, dataclass
from types import MappingProxyType
from typing import Any, Literal, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.types as types
from numpy.typing import NDArray

from conf.sections.archives import TableConfig
from pipelines.archives.archive import (
    INDEX_SCHEMA,
    REJECTED_SCHEMA,
    ArchiveDescription,
    ArchiveIndex,
    BadRecordError,
    index_table,
)
from pipelines.archives.files import MISSING_FILE, refuse_outage
from pipelines.archives.images.class_folders import SPLIT_OF_NAME
from pipelines.archives.images.kept import kept_schema, refuse_repeated, travelling
from pipelines.archives.images.parquet_files import ParquetRows, list_parquet_files, open_parquet, path_of
from pipelines.archives.pixels.rgb_image import common_size, read_rgb, upright_size
from pipelines.archives.stratified import assign_splits, check_split
from pipelines.machine.json_text import parse_json
from pipelines.sample import (
    ID_SETTING,
    KEPT_SETTING,
    TRAINING_SPLIT,
    VALIDATION_SPLIT,
    ImageGroup,
    SettingValue,
    Task,
)

KIND = "table"
GROUP = "rgb"
_ROWS = ParquetRows()


class _LabelKind(NamedTuple):
    """What the column of labels holds, whatever its width."""

    is_list: bool
    of: Literal["text", "integer", "boolean"]


class _Rows(NamedTuple):
    """All rows of all files."""

    files: list[str]
    """File of each row, relative to the root."""
    numbers: list[int]
    """Number of each row in its file."""
    sizes: list[int]
    """Size in bytes of each row's file."""
    labels: list[Any]
    """Values of the label column: a value, a list of values, or None."""
    splits: list[str | None]
    """Split of each row; None where it is unknown."""
    label_kind: _LabelKind
    names: list[str] | None
    """Names of integer labels, if the files contain them."""
    kept: list[pa.Table]
    """The key and the columns to keep, file by file."""


@dataclass(frozen=True)
class ImageTable:
    """Parquet files with one image per row; each object lists them and reads their labels once."""

    root: str
    """Folder of the files, or one file."""
    _: KW_ONLY
    image: str = TableConfig.default("image")
    """Column of encoded images."""
    label: str = TableConfig.default("label")
    """Column of labels. Rows whose label is null, an empty list or a negative number are rejected."""
    labels: Literal["auto", "indices", "multi_hot"] = TableConfig.default("labels")
    """Whether a list of integers has the numbers of classes, or 1 and 0 for each class."""
    split: str | None = TableConfig.default("split")
    """Column of the splits' names."""
    id: str | None = TableConfig.default("id")
    """Column whose values are the ids of the samples, and decide the splits that are drawn; None: file and row."""
    keep: Sequence[str] = tuple(TableConfig.default("keep"))
    """Further columns that travel to the dataset and the predictions."""
    image_size: int | None = TableConfig.default("image_size")
    """Side in pixels: the shorter side is scaled to it and the centre is cut out. None: the size of most images, and
    images of other sizes are bad records."""
    seed: int = TableConfig.default("seed")
    """Seed of the splits, if the table has none."""
    split_fractions: Sequence[float] = tuple(TableConfig.default("split_fractions"))
    """Fractions of train, validation and test, if no split is given."""
    validation_fraction: float = TableConfig.default("validation_fraction")
    """Part of train that becomes validation, if other splits exist but not validation; 0: no validation split."""

    def __post_init__(self) -> None:
        # A process caches open files and their rows: another object must read the current files.
        object.__setattr__(self, "_opened_as", uuid.uuid4().hex)
        object.__setattr__(self, "split_fractions", check_split(self.split_fractions))

    def __getstate__(self) -> dict[str, Any]:
        """Leave the rows out of the pickle for an executor, but keep the description."""
        return {name: value for name, value in vars(self).items() if name not in ("_rows", "_position")}

    @functools.cached_property
    def description(self) -> ArchiveDescription:
        """Classes by name, and the group `rgb` of `image_size`, or of the size of most images.

        The classes are the names of integers in Hugging Face's metadata, else all values in their order.

        Raises:
            FileNotFoundError: The folder does not exist.
            ValueError: It has no Parquet files or rows, or a column is missing or of another type. Or a key is null or
                in several rows. Or the images have different sizes and `image_size` is not set.
        """
        rows = self._rows
        task: Task = "multi_label" if rows.label_kind.is_list else "single_label"
        height, width = (
            (self.image_size, self.image_size)
            if self.image_size
            else common_size(
                self.root, len(rows.files), lambda row: upright_size(*self._image(rows.files[row], rows.numbers[row]))
            )
        )
        group = ImageGroup(GROUP, (height, width, 3), "uint8", ("red", "green", "blue"))
        classes = tuple(rows.names or map(str, self._position))
        return ArchiveDescription(KIND, task, classes, (group,))

    def index(self) -> ArchiveIndex:
        """List every row, by file and number.

        Raises:
            FileNotFoundError: The folder does not exist.
            ValueError: `description` fails, or a split has an unknown name, or the training split is missing.
        """
        rows = self._rows
        labels = [self._positions(value) for value in rows.labels]
        labelled = [row for row, found in enumerate(labels) if found]
        kept = pa.concat_tables(rows.kept)
        ids = (
            [f"{file or GROUP}#{number}" for file, number in zip(rows.files, rows.numbers, strict=True)]
            if self.id is None
            else kept[self.id].cast(pa.string()).to_pylist()
        )
        rejected = [
            {"id": ids[row], "file": path_of(self.root, rows.files[row]), "reason": "no label", "detail": repr(label)}
            for row, label in enumerate(rows.labels)
            if not labels[row]
        ]
        kept = kept.take(pa.array(labelled, pa.int64())).select(travelling(self.id, self.keep))
        samples = {
            "id": [ids[row] for row in labelled],
            "split": self._splits(labelled, ids, [labels[row][0] for row in labelled]),
            "labels": [labels[row] for row in labelled],
            "paths": [[rows.files[row], str(rows.numbers[row])] for row in labelled],
            "size": [rows.sizes[row] for row in labelled],
            **{name: kept[name] for name in kept.column_names},
        }
        table = index_table(samples, pa.schema([*INDEX_SCHEMA, *kept.schema]))
        return ArchiveIndex(table, pa.Table.from_pylist(rejected, REJECTED_SCHEMA))

    @property
    def read_settings(self) -> dict[str, SettingValue]:
        """Columns of images, ids and kept values, and the side to which images are scaled; None: unchanged."""
        # Unset ones are left out: they would change the digests of earlier datasets.
        chosen: dict[str, SettingValue] = {ID_SETTING: self.id, KEPT_SETTING: travelling(self.id, self.keep)}
        return {
            "image_size": self.image_size,
            "image_column": self.image,
            **{name: value for name, value in chosen.items() if value},
        }

    def read(self, paths: Sequence[str], out: Mapping[str, NDArray[Any]]) -> None:
        """Decode one image: `rgb`, uint8.

        Raises:
            BadRecordError: The file is missing or damaged, or the image is null, damaged, animated, of another format
                or of the wrong size.
        """
        name, data = self._image(paths[0], int(paths[1]))
        read_rgb(name, out[GROUP], fit=self.image_size is not None, data=data)

    def _image(self, file: str, row: int) -> tuple[str, bytes]:
        """Return the name of an image, for messages, and its encoded bytes."""
        path = path_of(self.root, file)
        try:
            value = _ROWS.value(path, row, self.image, opened_as=vars(self)["_opened_as"])
        except FileNotFoundError as error:
            raise BadRecordError(path, MISSING_FILE) from error
        except (OSError, pa.ArrowException, LookupError, StopIteration) as error:
            refuse_outage(path, error)
            raise BadRecordError(path, "not a readable Parquet file", " ".join(str(error).split())) from error
        data = value.get("bytes") if isinstance(value, Mapping) else value
        if not data:
            raise BadRecordError(f"{path} row {row}", "no image bytes", "images in files of their own are not read")
        return f"{path} row {row}", data

    @functools.cached_property
    def _rows(self) -> _Rows:
        files = list_parquet_files(self.root)
        found = _Rows([], [], [], [], [], _LabelKind(False, "text"), None, [])
        for file, size in files:
            path = path_of(self.root, file)
            try:
                with open_parquet(path) as parquet:
                    schema = parquet.schema_arrow
                    kind = self.check_columns(path, schema, _folder_values(file))
                    travels = kept_schema(path, schema, self.id, self.keep, GROUP)
                    columns = [self.label, *([self.split] if self.split in schema.names else []), *travels.names]
                    table = parquet.read(columns=[*dict.fromkeys(columns)])
                    kept = table.select(travels.names).cast(travels)
            except (OSError, pa.ArrowException) as error:
                refuse_outage(path, error)
                raise ValueError(f"{path}: its columns cannot be read ({' '.join(str(error).split())})") from None
            others = [self.label] if found.files and kind != found.label_kind else []
            others += [field.name for field in travels if found.kept and field not in list(found.kept[0].schema)]
            if others:
                raise ValueError(f"{path}: column {others[0]!r} is of another type than in {files[0][0]}")
            names = _names(schema, self.label)
            if found.files and names != found.names:
                raise ValueError(
                    f"{path}: the classes of column {self.label!r} are {_words(names)}, and in {files[0][0]} they are "
                    f"{_words(found.names)}: write the files with one list of names"
                )
            found = found._replace(label_kind=kind, names=names)
            found.files.extend([file] * len(table))
            found.numbers.extend(range(len(table)))
            found.sizes.extend([size] * len(table))
            found.labels.extend(table[self.label].to_pylist())
            found.splits.extend(self._named_splits(path, file, table))
            found.kept.extend([kept] if len(table) else [])
        if not found.files:
            raise ValueError(f"{self.root}: its Parquet files have no rows")
        if self.id is not None:
            counts = pc.value_counts(pa.concat_tables(found.kept)[self.id])
            repeated = counts.filter(pc.or_(pc.is_null(counts.field(0)), pc.greater(counts.field(1), 1)))
            refuse_repeated(self.root, self.id, [(row["values"], row["counts"]) for row in repeated[:1].to_pylist()])
        return self._from_multi_hot(found) if self._is_multi_hot(found) else found

    def _is_multi_hot(self, rows: _Rows) -> bool:
        """Return whether the labels have 1 or 0 for each class.

        Raises:
            ValueError: They may be that or the numbers of classes, and nothing says which; or they cannot be that.
        """
        lists = [labels for labels in rows.labels if labels is not None]
        if not rows.label_kind.is_list or rows.label_kind.of == "text":
            if self.labels == "multi_hot":
                raise ValueError(f"{self.root}: column {self.label!r} has no lists of integers: drop archive.labels")
            return False
        if self.labels == "auto" and rows.label_kind.of == "integer":
            lengths = {len(labels) for labels in lists}
            if len(lengths) == 1 and lengths != {1} and {0, 1} >= {value for labels in lists for value in labels}:
                raise ValueError(
                    f"{self.root}: every list of column {self.label!r} has {min(lengths)} numbers, which are 0 or 1: "
                    "set archive.labels=multi_hot if there is one for each class, or archive.labels=indices if they "
                    "are the numbers of classes"
                )
        return self.labels == "multi_hot" or rows.label_kind.of == "boolean"

    def _from_multi_hot(self, rows: _Rows) -> _Rows:
        """Return the rows with the numbers of classes as labels.

        Raises:
            ValueError: A list has another length, or a number that is neither 0 nor 1.
        """
        classes = len(rows.names or next((labels for labels in rows.labels if labels), []))
        for row, labels in enumerate(rows.labels):
            if labels is not None and (len(labels) != classes or not {0, 1} >= set(labels)):
                raise ValueError(
                    f"{path_of(self.root, rows.files[row])} row {rows.numbers[row]}: column {self.label!r} has "
                    f"{textwrap.shorten(str(labels), 80)}, expected 0 or 1 for each of {classes} classes"
                )
        chosen = [labels and [number for number, value in enumerate(labels) if value] for labels in rows.labels]
        return rows._replace(labels=chosen, names=rows.names or [str(number) for number in range(classes)])

    def check_columns(
        self, where: str, schema: pa.Schema, folders: Mapping[str, str] = MappingProxyType({})
    ) -> _LabelKind:
        """Check that the columns exist and have the types that are read.

        Args:
            where: Name of what has the columns, for the message.
            schema: Schema of the columns.
            folders: Columns whose values are in the names of folders.

        Returns:
            What the column of labels holds.

        Raises:
            ValueError: A column is missing, or of another type.
        """
        columns = [("image", self.image), ("label", self.label), ("split", self.split), ("id", self.id)]
        for setting, column in [*columns, *(("keep", name) for name in self.keep)]:
            known = {*schema.names, *(folders if setting == "split" else ())}
            if column is not None and column not in known:
                raise ValueError(
                    f"{where}: has no column {column!r} (archive.{setting}); its columns are {', '.join(schema.names)}"
                )
        image, label = schema.field(self.image).type, schema.field(self.label).type
        if types.is_struct(image) and image.get_field_index("bytes") >= 0:
            image = image.field("bytes").type
        if not (types.is_binary(image) or types.is_large_binary(image)):
            raise ValueError(f"{where}: column {self.image!r} (archive.image) is {image}, expected the bytes of images")
        kind = _label_kind(label)
        if kind is None:
            raise ValueError(
                f"{where}: column {self.label!r} (archive.label) is {label}, expected a text, an integer, or a list"
            )
        kept_schema(where, schema, self.id, self.keep, GROUP)
        return kind

    def _named_splits(self, path: str, file: str, table: pa.Table) -> list[str | None]:
        """Return the split of each row: that of its column, or of a folder or file name such as `train-00000-of-1`."""
        if self.split is not None:
            in_column = self.split in table.column_names
            names = table[self.split].to_pylist() if in_column else [_folder_values(file)[self.split]] * len(table)
            unknown = [name for name in names if str(name).lower() not in SPLIT_OF_NAME]
            if unknown:
                raise ValueError(
                    f"{path}: column {self.split!r} (archive.split) has {unknown[0]!r}, expected "
                    f"{', '.join(SPLIT_OF_NAME)}"
                )
            return [SPLIT_OF_NAME[str(name).lower()] for name in names]
        parts = [re.split(r"[^a-z]", part.lower().rpartition("=")[2])[0] for part in file.split("/")]
        return [next((SPLIT_OF_NAME[part] for part in parts if part in SPLIT_OF_NAME), None)] * len(table)

    @functools.cached_property
    def _position(self) -> dict[Any, int]:
        """Index of the class of each value."""
        found = {value for labels in self._rows.labels for value in _as_list(labels) if _is_label(value)}
        values = range(len(self._rows.names)) if self._rows.names else sorted(found)
        return {value: position for position, value in enumerate(values)}

    def _positions(self, labels: Any) -> list[int]:
        """Return the class indices of one row, ascending; empty if it has no label or an unknown one."""
        found = [self._position.get(value, -1) for value in _as_list(labels)]
        return [] if -1 in found else sorted(set(found))

    def _splits(self, labelled: list[int], ids: list[str], first_labels: list[int]) -> NDArray[np.str_]:
        """Return the split of each labelled row."""
        files, numbers = self._rows.files, self._rows.numbers
        keys = [f"{files[row]}#{numbers[row]}" if self.id is None else ids[row] for row in labelled]
        named = [self._rows.splits[row] for row in labelled]
        if any(named) and None in named:
            file = self._rows.files[labelled[named.index(None)]]
            raise ValueError(
                f"{self.root}: the name of {file} says no split, those of other files do; set archive.split"
            )
        if any(named) and TRAINING_SPLIT not in named:
            raise ValueError(f"{self.root}: has no split train, only {', '.join(sorted(set(map(str, named))))}")
        # With several labels, stratifying by one of them is no worse than by none.
        classes = np.array(first_labels, np.int32)
        return assign_splits(self, named, keys, classes, has_validation=VALIDATION_SPLIT in named)


def _folder_values(file: str) -> dict[str, str]:
    """Return the values in a file's folder names, `column=value`, which Spark writes for partitioned tables."""
    return {name: value for name, _, value in (part.partition("=") for part in file.split("/")[:-1]) if value}


def _names(schema: pa.Schema, column: str) -> list[str] | None:
    """Return the names of the classes in Hugging Face's metadata: `ClassLabel`, or a sequence of it."""
    try:
        features = parse_json((schema.metadata or {})[b"huggingface"])["info"]["features"]
        feature = features[column]
        feature = feature[0] if isinstance(feature, list) else feature.get("feature", feature)
        return [str(name) for name in feature["names"]]
    except (KeyError, ValueError, TypeError, IndexError, AttributeError):  # missing, or of another version
        return None


def _words(names: list[str] | None) -> str:
    return "without names" if names is None else textwrap.shorten(", ".join(names), 200, placeholder=", ...")


def _label_kind(column: pa.DataType) -> _LabelKind | None:
    """Return what a column of labels holds; None if it has no labels."""
    is_list = bool(types.is_list(column) or types.is_large_list(column) or types.is_fixed_size_list(column))
    value = column.value_type if is_list else column
    if types.is_dictionary(value):  # a category of pandas, or an enum
        value = value.value_type
    kinds = {
        _LabelKind(is_list, "integer"): types.is_integer(value),
        _LabelKind(is_list, "boolean"): types.is_boolean(value) and is_list,
        _LabelKind(is_list, "text"): types.is_string(value) or types.is_large_string(value),
    }
    return next((kind for kind, fits in kinds.items() if fits), None)


def _as_list(labels: Any) -> list[Any]:
    return labels if isinstance(labels, list) else [labels]


def _is_label(value: Any) -> bool:
    """Return whether a value is a class; -1 means no label in tables with secret test labels."""
    return value is not None and not (isinstance(value, int) and value < 0)
