"""What a task holds in memory while it writes predictions; without Spark and TensorFlow."""

import tracemalloc
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from numpy.typing import NDArray

from pipelines.archives.archive import REJECTED_SCHEMA, RESERVED_NAMES, ArchiveDescription, ArchiveIndex, index_table
from pipelines.dataset.format.rows import arrow_schema
from pipelines.sample import ImageGroup
from pipelines.scoring.output.output import begin
from pipelines.scoring.output.write import PREDICTION_SCHEMA, Scorer, as_lists
from pipelines.scoring.predict.model import ModelDescription
from pipelines.scoring.predict.predictor import SentModel, predictor
from pipelines.scoring.source import archive_source
from pipelines.storage.folder import Location

GROUP = ImageGroup("image", (64, 64, 4), "uint16", ("B02", "B03", "B04", "B08"))
NAMES, IMAGE_BYTES = ("Pastures", "Sea"), 64 * 64 * 4 * 2
BATCH_SIZE, ROWS_OF_A_PART = 16, 64


@dataclass(frozen=True)
class Numbered:
    """An archive without files, whose images are filled with the number of their sample."""

    samples: int
    root: str = ""

    @property
    def description(self) -> ArchiveDescription:
        return ArchiveDescription("numbered", "multi_label", NAMES, (GROUP,))

    def index(self) -> ArchiveIndex:
        ids = [f"sample {number}" for number in range(self.samples)]
        columns = {
            "id": ids,
            "split": ["test"] * self.samples,
            "labels": [[0]] * self.samples,
            "paths": [[str(number)] for number in range(self.samples)],
        }
        return ArchiveIndex(index_table(columns), REJECTED_SCHEMA.empty_table())

    @property
    def read_settings(self) -> dict[str, int | None]:
        return {}

    def read(self, paths: Sequence[str], out: Mapping[str, NDArray[Any]]) -> None:
        out["image"][:] = int(paths[0])


@contextmanager
def peak_bytes() -> Iterator[dict[str, int]]:
    """Measures the largest memory of Python and numpy, and that of Arrow, beyond what was there before."""
    found, pool = {}, pa.default_memory_pool()
    counted = pa.proxy_memory_pool(pool)  # its peak begins here
    pa.set_memory_pool(counted)
    tracemalloc.start()
    try:
        yield found
        found |= {"Python": tracemalloc.get_traced_memory()[1], "Arrow": counted.max_memory()}
    finally:
        tracemalloc.stop()
        pa.set_memory_pool(pool)


@pytest.mark.timeout(120)
def test_the_memory_of_a_task_does_not_depend_on_the_number_of_samples(tmp_path: Path) -> None:
    def predict(images: Mapping[str, NDArray[np.generic]]) -> NDArray[np.float32]:
        mean = images["image"].mean(axis=(1, 2, 3), dtype=np.float32) / 10_000
        return np.stack([mean, 1 - mean], axis=1)

    model = ModelDescription(
        "runs:/1/model",
        "m-memory",
        "m-1",
        "multi_label",
        NAMES,
        (GROUP,),
    )
    predictor(model.model_id, lambda: predict, BATCH_SIZE, 1)  # so that the file is not read

    def score(parts: int) -> dict[str, int]:
        output = Location.at(tmp_path / f"{parts} parts")
        begin(output, {})
        sent = SentModel(model, SimpleNamespace(value=None), BATCH_SIZE, 1)
        scorer = Scorer(sent, "keras", None, "", output, (0.5, 0.5))
        source = archive_source(Numbered(parts * ROWS_OF_A_PART), samples_per_file=ROWS_OF_A_PART)
        assert len(source.parts) == parts
        with peak_bytes() as found:
            for part in source.parts:
                assert scorer.write(part).rows == ROWS_OF_A_PART
        return found

    score(1)  # imports, and caches of a fixed size
    few, many = score(2), score(32)
    for where, peak in many.items():
        assert peak < 1.5 * few[where] + 64 * 1024, (where, few, many)
    assert many["Python"] < 32 * ROWS_OF_A_PART * IMAGE_BYTES / 10
    assert few["Python"] > BATCH_SIZE * IMAGE_BYTES, "the images of a batch are counted"


@pytest.mark.parametrize("columns", [1, 3])
def test_each_row_is_a_list(columns: int) -> None:
    values = np.arange(2 * columns, dtype=np.float32).reshape(2, columns)
    assert as_lists(values, pa.list_(pa.float32())).to_pylist() == values.tolist()


def test_the_names_of_our_columns_are_reserved() -> None:
    assert {*arrow_schema((), 2).names, *PREDICTION_SCHEMA.names} <= RESERVED_NAMES
