"""Scoring that ends at each of its writes in turn, on disk and behind a URL: each sample is predicted exactly once.

Everything is in this process and the model is a stand-in, so that every place can be tried. `test_kills` kills real
processes.
"""

import json
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest

from pipelines.dataset.files import LEASE_PREFIX
from pipelines.dataset.manifest import read_manifest
from pipelines.dataset.reader import ReaderSettings, SplitReader
from pipelines.scoring.job import ScoreSettings, score
from pipelines.scoring.model import ModelDescription, ModelInput
from pipelines.scoring.source import Source, dataset_source
from pipelines.storage import Folder

pytestmark = [pytest.mark.spark, pytest.mark.timeout(280)]
SETTINGS = ScoreSettings(8, (0.5,) * 19, 1, "keras", None, as_delta=True)


class DiedError(Exception):
    """The driver or a task ends here."""


@pytest.fixture
def model(small_dataset: Path, _without_spark: None) -> ModelDescription:
    manifest = read_manifest(small_dataset)
    inputs = tuple(ModelInput(group.name, group.shape, group.dtype, group.bands) for group in manifest.groups)
    return ModelDescription("models:/fake/1", "m-1", "fake/1", manifest.task, manifest.class_names, inputs)


class Ending:
    """Ends at the n-th of the steps that change the folder: before a file is written, before it is there, a removal."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.left = -1
        new_file, remove = Folder.new_file, Folder.remove

        @contextmanager
        def ending_file(folder: Folder, name: str, **settings: Any) -> Iterator[Path]:
            self._step(name)
            with new_file(folder, name, **settings) as path:
                yield path
                self._step(name)

        def ending_remove(folder: Folder, name: str = "") -> None:
            self._step(name)
            remove(folder, name)

        monkeypatch.setattr(Folder, "new_file", ending_file)
        monkeypatch.setattr(Folder, "remove", ending_remove)

    def _step(self, name: str) -> None:
        if LEASE_PREFIX not in name:  # a job that is killed leaves its lease for a while, which other tests are about
            self.left -= 1
            if self.left == 0:
                raise DiedError


def check(output: Folder, expected: dict[str, float]) -> None:
    """Assert that a folder holds what an undisturbed job leaves, and nothing else."""
    manifest = json.loads(output.read("predictions.json"))
    files = [part["file"] for part in manifest["parts"]]
    log = "_delta_log/00000000000000000000.json"
    assert set(output.files()) == {*files, "predictions.json", "_rejected.parquet", log}
    named = [json.loads(line)["add"]["path"] for line in output.read(log).splitlines() if b'"add"' in line]
    assert sorted(named) == sorted(files)
    rows = []
    for name in files:
        with output.open(name) as file:
            rows += pq.read_table(file, columns=["id", "probabilities"]).to_pylist()
    assert sorted(row["id"] for row in rows) == sorted(expected)
    for row in rows:
        assert row["probabilities"][0] == pytest.approx(expected[row["id"]], rel=1e-5)


def expected_of(dataset: Path) -> dict[str, float]:
    found = {}
    for split in read_manifest(dataset).splits:
        reader = SplitReader(dataset, split)
        means = reader.gather(np.arange(len(reader))).images["bands_10m"].mean((1, 2, 3)) / 65535
        found |= dict(zip(reader.ids(), means.tolist(), strict=True))
    return found


def survive(model: ModelDescription, source: Source, folder: Callable[[int], Folder], ending: Ending, step: int) -> int:
    """End at every `step`-th place, each time in a new folder, and then do it again; return the number of places."""
    expected = expected_of(Path(source.where))
    place = 1
    while True:
        output, ending.left = folder(place), place
        try:
            score(None, model, b"", source, output, SETTINGS)  # type: ignore[arg-type]  # no task needs Spark here
        except DiedError:
            ending.left = place + 3  # once more, a little later
            try:
                score(None, model, b"", source, output, SETTINGS)  # type: ignore[arg-type]
            except DiedError:
                ending.left = -1
                score(None, model, b"", source, output, SETTINGS)  # type: ignore[arg-type]
            ending.left = -1
            check(output, expected)
            place += step
            continue
        check(output, expected)
        return place


def test_a_job_may_end_at_any_of_its_writes(
    model: ModelDescription, small_dataset: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = dataset_source(Folder.at(small_dataset), ReaderSettings())
    places = survive(model, source, lambda place: Folder.at(tmp_path / str(place)), Ending(monkeypatch), 1)
    assert places > 5 * len(source.parts), "each part has a file, a note, and the removal of the note"


def test_a_job_may_end_at_its_writes_behind_a_url(
    model: ModelDescription, small_dataset: Path, s3_folder: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = dataset_source(Folder.at(small_dataset), ReaderSettings())
    places = survive(model, source, lambda place: Folder.at(f"{s3_folder}/{place}"), Ending(monkeypatch), 3)
    assert places > 4 * len(source.parts)


def test_a_dataset_is_known_by_its_content_in_another_place(
    model: ModelDescription, small_dataset: Path, tmp_path: Path
) -> None:
    def opened(name: str) -> Source:
        return dataset_source(Folder.at(tmp_path / name), ReaderSettings())

    shutil.copytree(small_dataset, tmp_path / "dataset")
    output = Folder.at(tmp_path / "predictions")
    score(None, model, b"", opened("dataset"), output, SETTINGS)  # type: ignore[arg-type]
    (tmp_path / "dataset").rename(tmp_path / "moved")
    moved = opened("moved")
    assert score(None, model, b"", moved, output, SETTINGS).new == 0  # type: ignore[arg-type]
    lost = moved.parts[0]
    output.remove(lost.file)
    another = replace(moved, fingerprint="abc")
    message = r"other predictions \(input .*/dataset there, .*/moved asked for; input_fingerprint .* abc asked for\)"
    with pytest.raises(ValueError, match=message):
        score(None, model, b"", another, output, SETTINGS)  # type: ignore[arg-type]
    assert score(None, model, b"", moved, output, SETTINGS).new == lost.rows  # type: ignore[arg-type]
    check(output, expected_of(tmp_path / "moved"))
    assert json.loads(output.read("predictions.json"))["identity"]["input"] == str(tmp_path / "moved")
