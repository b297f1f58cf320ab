"""Archives by import path."""

from pathlib import Path

import numpy as np
import pytest
from pyspark.sql import SparkSession

from conf.load import load
from jobs.prepare import configured_archive, prepare
from pipelines.dataset.read.reader import SplitReader
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


def test_score_does_not_see_a_value_that_is_no_number() -> None:
    archive = configured_archive(load("smoke", [setting("Heights", "{number: 5}")]))
    (part,) = archive_source(archive, samples_per_file=9).parts
    (batch,) = part.batches(8)
    assert (batch.known["id"].to_pylist(), batch.images["height"][:4].max(axis=(1, 2, 3)).tolist()) == (
        list("1234"),
        [1, 2, 3, 4],
    )
    assert batch.rejected == [
        {"id": "0", "file": "0, band metres of height", "reason": "NaN", "detail": "4 of 4 pixels"}
    ]
    assert not part.can_read_any(["0"])


@pytest.mark.spark
def test_an_archive_of_somebody_else_is_prepared_by_tasks_without_values_that_are_no_numbers(
    spark: SparkSession, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    spark.sparkContext.addPyFile(str(tmp_path / "somebodys_archive.py"))  # as --py-files does
    settings = [setting("Heights", "{number: 5}"), f"dataset.path={tmp_path}/out"]
    with pytest.raises(
        ValueError, match=r"1 of 5 samples are bad \(NaN 1\).*; the first: 0, band metres of height: NaN"
    ):
        prepare(load("smoke", settings))
    config = load("smoke", [*settings, "prepare.max_rejected_fraction=0.2"])
    manifest = prepare(config)
    assert (manifest.skipped, manifest.statistics["height"].mean) == ({"NaN": 1}, (2.5,))
    assert (manifest.archive, manifest.class_names, manifest.splits["train"].rows) == ("heights", ("a", "b"), 4)
    samples = SplitReader(tmp_path / "out", "train").gather(np.arange(4))
    assert sorted(int(image.max()) for image in samples.images["height"]) == [1, 2, 3, 4]
    capsys.readouterr()
    assert prepare(config) == manifest
    assert "is finished already; left as it is" in capsys.readouterr().out
