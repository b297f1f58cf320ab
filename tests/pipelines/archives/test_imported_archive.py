"""Archives by import path."""

from pathlib import Path

import numpy as np
import pytest
from pyspark.sql import SparkSession

from conf.load import load
from jobs.prepare import configured_archive, prepare
from pipelines.archives.archive import read_sample
from pipelines.dataset.reader import SplitReader

MODULE = """
from dataclasses import dataclass
from pipelines.archives.archive import ArchiveDescription, ArchiveIndex, REJECTED_SCHEMA, index_table
from pipelines.sample import ImageGroup

@dataclass(frozen=True)
class Greys:
    number: int
    root = ""
    read_settings = {}
    description = ArchiveDescription(
        "greys", "single_label", ("a", "b"), (ImageGroup("grey", (2, 2, 1), "uint8", ("grey",)),))

    def index(self):
        names = [str(number) for number in range(self.number)]
        columns = {"id": names, "split": ["train"] * self.number, "labels": [[0]] * self.number,
                   "paths": [[name] for name in names]}
        return ArchiveIndex(index_table(columns), REJECTED_SCHEMA.empty_table())

    def read(self, paths, out):
        out["grey"][...] = int(paths[0])

class NoArchive:
    root = ""
"""


@pytest.fixture(autouse=True)
def module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(tmp_path))
    (tmp_path / "somebodys_archive.py").write_text(MODULE)


def setting(name: str, settings: str = "{}") -> str:
    return f"archive={{kind: import, path: 'somebodys_archive:{name}', settings: {settings}}}"


def test_an_archive_of_somebody_else_is_opened_from_the_configuration() -> None:
    archive = configured_archive(load("smoke", [setting("Greys", "{number: 5}")]))
    assert archive.index().samples["id"].to_pylist() == list("01234")
    np.testing.assert_array_equal(read_sample(archive, ["3"])["grey"], np.full((2, 2, 1), 3))


@pytest.mark.parametrize(
    ("name", "settings", "message"),
    [
        ("Greys", "{}", r"it raised TypeError: .*missing 1 required positional argument: 'number'$"),
        ("NoArchive", "{}", r"it returned a NoArchive, which has no description, index, read_settings, read: see "),
        ("Whites", "{}", r"somebodys_archive has no Whites$"),
    ],
)
def test_what_is_no_archive_is_one_line(name: str, settings: str, message: str) -> None:
    with pytest.raises(ValueError, match=rf"^archive\.path=somebodys_archive:{name}: {message}") as caught:
        configured_archive(load("smoke", [setting(name, settings)]))
    assert "\n" not in str(caught.value)


@pytest.mark.spark
def test_an_archive_of_somebody_else_is_prepared_by_tasks(spark: SparkSession, tmp_path: Path) -> None:
    spark.sparkContext.addPyFile(str(tmp_path / "somebodys_archive.py"))  # as --py-files does
    manifest = prepare(load("smoke", [setting("Greys", "{number: 5}"), f"dataset.path={tmp_path}/out"]))
    assert (manifest.archive, manifest.class_names, manifest.splits["train"].rows) == ("greys", ("a", "b"), 5)
    samples = SplitReader(tmp_path / "out", "train").gather(np.arange(5))
    assert sorted(int(image.max()) for image in samples.images["grey"]) == [0, 1, 2, 3, 4]
