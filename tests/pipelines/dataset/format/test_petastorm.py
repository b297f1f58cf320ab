"""The schema that we write for Petastorm is Petastorm's own, byte for byte."""

import pickle
import subprocess
import sys
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import pytest

from pipelines.dataset.format.petastorm import ROW_GROUPS_PER_FILE_KEY, UNISCHEMA_KEY, pickled_schema
from pipelines.sample import ImageGroup
from tests.patience import patient

GROUPS = (
    ImageGroup("bands_10m", (120, 120, 4), "uint16", ("B02", "B03", "B04", "B08")),
    ImageGroup("bands_20m", (60, 60, 2), "uint16", ("B05", "B06")),
    ImageGroup("image", (32, 32, 3), "uint8", ("R", "G", "B")),
    ImageGroup("height", (8, 8, 1), "float32", ("H",)),
    ImageGroup("fields", (300, 70000, 1), "uint8", ("X",)),
)


@pytest.mark.filterwarnings("ignore::DeprecationWarning:petastorm")
@pytest.mark.filterwarnings("ignore:Can not create dynamic property fields:UserWarning")
@pytest.mark.parametrize("count", [0, 1, 2, 5])
def test_the_bytes_are_those_of_petastorms_own_objects(count: int) -> None:
    from petastorm.codecs import NdarrayCodec, ScalarCodec
    from petastorm.etl import dataset_metadata, legacy
    from petastorm.unischema import Unischema, UnischemaField
    from pyspark.sql.types import StringType

    fields = [
        UnischemaField("id", np.str_, (), ScalarCodec(StringType()), False),
        UnischemaField("labels", np.uint8, (19,), NdarrayCodec(), False),
        *(
            UnischemaField(sys.intern(group.name), np.dtype(group.dtype).type, group.shape, NdarrayCodec(), False)
            for group in GROUPS[:count]
        ),
    ]
    expected, written = Unischema("Sample", fields), pickled_schema(GROUPS[:count], 19)
    assert (written, pickle.DEFAULT_PROTOCOL) == (pickle.dumps(expected, protocol=4), 4)
    # Its reader allows few classes.
    read = legacy.restricted_loads(written)
    assert (list(read.fields.values()), [str(field.codec) for field in read.fields.values()]) == (
        list(expected.fields.values()),
        [str(field.codec) for field in fields],
    )
    assert (dataset_metadata.UNISCHEMA_KEY, dataset_metadata.ROW_GROUPS_PER_FILE_KEY) == (
        UNISCHEMA_KEY,
        ROW_GROUPS_PER_FILE_KEY,
    )


def test_names_that_were_read_from_a_file_give_the_same_bytes() -> None:
    group = ImageGroup("".join(["bands", "_10m"]), (120, 120, 4), "uint16", ("B02", "B03", "B04", "B08"))
    assert pickled_schema([group], 19) == pickled_schema(GROUPS[:1], 19)


@pytest.mark.spark
def test_a_split_holds_the_schema_of_its_arrays(small_dataset: Path) -> None:
    from pipelines.dataset.format.manifest import read_manifest

    manifest = read_manifest(small_dataset)
    metadata = pq.read_schema(small_dataset / "train" / "_common_metadata").metadata
    assert metadata[UNISCHEMA_KEY] == pickled_schema(manifest.groups, 19)


_WITHOUT = """
import sys
for name in ("petastorm", "pyspark", "tensorflow", "horovod"):
    sys.modules[name] = None
from pipelines.dataset.format.petastorm import pickled_schema
from pipelines.sample import ImageGroup
group = ImageGroup("bands_10m", (120, 120, 4), "uint16", ("B02", "B03", "B04", "B08"))
sys.stdout.buffer.write(pickled_schema([group], 19))
"""


def test_neither_petastorm_nor_spark_is_needed(project: Path) -> None:
    done = subprocess.run([sys.executable, "-c", _WITHOUT], cwd=project, capture_output=True, timeout=patient(60))
    assert done.returncode == 0, done.stderr
    assert done.stdout == pickled_schema(GROUPS[:1], 19)
