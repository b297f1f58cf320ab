"""Archives by import path."""

from pathlib import Path

import numpy as np
import pytest
from pyspark.sql import SparkSession

from conf.load import load
from jobs.prepare import configured_archive, prepare
from pipelines.archives.archive import read_sample
from pipelines.dataset.reader import SplitReader
from pipelines.scoring.source import archive_source

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

class Heights(Greys):
    description = ArchiveDescription(
        "heights", "single_label", ("a", "b"), (ImageGroup("height", (2, 2, 1), "float32", ("metres",)),))

    def read(self, paths, out):
        out["height"][...] = int(paths[0]) or float("nan")  # the first one is unknown
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


def test_score_does_not_see_a_value_that_is_no_number() -> None:
    archive = configured_archive(load("smoke", [setting("Heights", "{number: 5}")]))
    (part,) = archive_source(archive, samples_per_file=9).parts
    (batch,) = part.batches(8)
    assert batch.known["id"].to_pylist() == list("1234")
    assert batch.images["height"][:4].max(axis=(1, 2, 3)).tolist() == [1, 2, 3, 4]
    assert batch.rejected == [
        {"id": "0", "file": "0, band metres of height", "reason": "NaN", "detail": "4 of 4 pixels"}
    ]
    assert not part.can_read_any(["0"])


@pytest.mark.spark
def test_a_value_that_is_no_number_is_a_bad_record_and_not_in_the_statistics(
    spark: SparkSession, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    spark.sparkContext.addPyFile(str(tmp_path / "somebodys_archive.py"))
    settings = [setting("Heights", "{number: 5}"), f"dataset.path={tmp_path}/out"]
    with pytest.raises(
        ValueError, match=r"1 of 5 samples are bad \(NaN 1\).*; the first: 0, band metres of height: NaN"
    ):
        prepare(load("smoke", settings))
    config = load("smoke", [*settings, "prepare.max_rejected_fraction=0.2"])
    manifest = prepare(config)
    assert manifest.skipped == {"NaN": 1}
    assert manifest.statistics["height"].mean == (2.5,)
    assert manifest.splits["train"].rows == 4
    capsys.readouterr()
    assert prepare(config) == manifest
    assert "is finished already; left as it is" in capsys.readouterr().out
