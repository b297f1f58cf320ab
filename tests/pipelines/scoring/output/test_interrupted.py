"""Scoring that ends at each of its writes in turn, on disk and behind a URL: each sample is predicted exactly once.

Everything is in this process and the model is a stand-in, so that every place can be tried. `test_kills` kills real
processes.
"""

import io
import json
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest

from pipelines.dataset.format.manifest import read_manifest
from pipelines.dataset.read.reader import ReaderSettings, SplitReader
from pipelines.scoring.identity import ScoreSettings
from pipelines.scoring.job import Scored, score
from pipelines.scoring.predict.model import ModelDescription
from pipelines.scoring.source import Source, dataset_source
from pipelines.storage.folder import Location
from pipelines.storage.lease import LEASE_PREFIX

pytestmark = [pytest.mark.spark, pytest.mark.timeout(280)]
SETTINGS = ScoreSettings(8, (0.5,) * 19, 1, "keras", None, as_delta=True)


class DiedError(Exception):
    """The driver or a task ends here."""


class Ending:
    """Ends at the n-th of the steps that change the folder: before a file is written, before it is there, a removal."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.left = -1
        new_file, remove = Location.new_file, Location.remove

        @contextmanager
        def ending_file(folder: Location, name: str, **settings: Any) -> Iterator[Path]:
            self._step(name)
            with new_file(folder, name, **settings) as path:
                yield path
                self._step(name)

        def ending_remove(folder: Location, name: str = "") -> None:
            self._step(name)
            remove(folder, name)

        monkeypatch.setattr(Location, "new_file", ending_file)
        monkeypatch.setattr(Location, "remove", ending_remove)

    def _step(self, name: str) -> None:
        if LEASE_PREFIX not in name:  # a job that is killed leaves its lease for a while, which other tests are about
            self.left -= 1
            if self.left == 0:
                raise DiedError


def check(output: Location, expected: dict[str, float]) -> None:
    """Assert that a folder holds what an undisturbed job leaves, and nothing else."""
    files = [part["file"] for part in json.loads(output.read("predictions.json"))["parts"]]
    log = "_delta_log/00000000000000000000.json"
    assert (
        set(output.files()),
        sorted(json.loads(line)["add"]["path"] for line in output.read(log).splitlines() if b'"add"' in line),
    ) == ({*files, "predictions.json", "_rejected.parquet", log}, sorted(files))
    rows = [row for name in files for row in pq.read_table(io.BytesIO(output.read(name))).to_pylist()]
    assert len(rows) == len(expected), "each sample once"
    assert {row["id"]: row["probabilities"][0] for row in rows} == pytest.approx(expected, rel=1e-5)


def expected_of(dataset: Path) -> dict[str, float]:
    readers = [SplitReader(dataset, split) for split in read_manifest(dataset).splits]
    means = [reader.gather(np.arange(len(reader))).images["bands_10m"].mean((1, 2, 3)) / 65535 for reader in readers]
    return dict(zip(chain(*(reader.ids() for reader in readers)), np.concatenate(means).tolist(), strict=True))


Run = Callable[[Source, Location], Scored]


@pytest.fixture
def run(small_model: ModelDescription) -> Run:
    """Scores in this process."""
    return lambda source, output: score(None, small_model, b"", source, output, SETTINGS)  # type: ignore[arg-type]


def survive(run: Run, source: Source, folder: Callable[[int], Location], ending: Ending, step: int) -> int:
    """End at every `step`-th place, each time in a new folder, and then do it again; return the number of places."""
    expected, place = expected_of(Path(source.where)), 1
    while True:
        output, ends = folder(place), 0
        for left in (place, place + 3, -1):  # once more, a little later
            ending.left = left
            try:
                run(source, output)
            except DiedError:
                ends += 1
            else:
                break
        ending.left = -1
        check(output, expected)
        if not ends:
            return place
        place += step


@pytest.mark.long
@pytest.mark.parametrize("is_behind_a_url", [False, True])
def test_a_job_may_end_at_any_of_its_writes(
    is_behind_a_url: bool,
    run: Run,
    small_dataset: Path,
    tmp_path: Path,
    request: pytest.FixtureRequest,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    source = dataset_source(Location.at(small_dataset), ReaderSettings())
    base, step = (request.getfixturevalue("s3_folder"), 3) if is_behind_a_url else (tmp_path, 1)
    places = survive(run, source, lambda place: Location.at(f"{base}/{place}"), Ending(monkeypatch), step)
    # Each part has a file, a note, and the removal of the note.
    assert places > (4 if is_behind_a_url else 5) * len(source.parts)


def test_a_dataset_is_known_by_its_content_in_another_place(run: Run, small_dataset: Path, tmp_path: Path) -> None:
    def opened(name: str) -> Source:
        return dataset_source(Location.at(tmp_path / name), ReaderSettings())

    shutil.copytree(small_dataset, tmp_path / "dataset")
    output = Location.at(tmp_path / "predictions")
    run(opened("dataset"), output)
    (tmp_path / "dataset").rename(tmp_path / "moved")
    moved = opened("moved")
    killed = [tmp_path / ".predictions.incomplete.lock", output.path / f".predictions.json.{'0' * 32}"]
    for path in killed:
        path.touch()
    assert run(moved, output).new == 0
    assert [path for path in killed if path.exists()] == [], "a job that was killed at its end has left them"
    lost = moved.parts[0]
    output.remove(lost.file)
    message = r"other predictions \(input .*/dataset there, .*/moved asked for; input_fingerprint .* abc asked for\)"
    with pytest.raises(ValueError, match=message):
        run(replace(moved, fingerprint="abc"), output)
    assert run(moved, output).new == lost.rows
    check(output, expected_of(tmp_path / "moved"))
    assert json.loads(output.read("predictions.json"))["identity"]["input"] == str(tmp_path / "moved")
