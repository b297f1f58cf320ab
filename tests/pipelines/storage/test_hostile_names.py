"""Names in files of others, and links in their folders, that lead to files which no job may read, write or remove.

Those in a journal, in `dataset.json` and in the mark of an unfinished dataset have tests of their own.
"""

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from unittest.mock import Mock

import pytest

from conf.sections.launch import TrackingConfig
from pipelines.sample import ImageGroup
from pipelines.scoring.output.ground import read_ground
from pipelines.storage.folder import Location
from pipelines.storage.lock import hold
from pipelines.tracking.journal.local_run import Description, LocalRun, locked
from pipelines.tracking.journal.sync import sync
from pipelines.tracking.store import runs
from pipelines.tracking.store.store import TrackedRun
from pipelines.training.driver.output import checkpoints_of
from pipelines.training.driver.resumable import newest_resumable


def run_of(output: Path, run_id: str, folder: str = "run", *, is_stored: bool = True) -> Path:
    LocalRun(run_id, Description("tests", None, {}, {}), 1, is_stored, "FAILED").write(output / folder)
    return output / folder


READERS: dict[str, Callable[[Path, str], object]] = {
    "run.json, delivered": lambda output, name: sync(run_of(output, name), Mock()),
    "run.json, resumed": lambda output, name: (
        run_of(output, name),
        newest_resumable(str(output), TrackingConfig(experiment="tests", offline=True)),
    ),
    "a server, delivered": lambda output, name: sync(run_of(output, "local", is_stored=False), Mock()),
    "a server, resumed": lambda output, name: checkpoints_of(str(output), name),
    "predictions.json": lambda output, name: (
        (output / "predictions.json").write_text(json.dumps({"class_names": ["a"], "parts": [{"file": name}]})),
        read_ground(Location.at(output), (ImageGroup("bands_10m", (120, 120, 1), "uint16", ("B02",)),)),
    ),
}


@pytest.fixture
def output(tmp_path: Path) -> Iterator[Path]:
    """An empty folder beside that of another run, which stays as it is."""
    victim = run_of(tmp_path, "victim", "victim")
    before = (victim / "run.json").read_bytes()
    (tmp_path / "ours").mkdir()
    yield tmp_path / "ours"
    assert {path.name: path.read_bytes() for path in victim.iterdir()} == {"run.json": before}


@pytest.mark.parametrize("name", ["../victim", "a/../../victim", "{victim}", "file://{victim}", "..", "", "a\0b"])
@pytest.mark.parametrize("reader", READERS)
def test_a_name_that_leads_elsewhere_is_one_line(
    output: Path, reader: str, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    name = name.format(victim=output.with_name("victim"))
    monkeypatch.setattr(runs, "store_run", lambda local: TrackedRun("", name))
    with pytest.raises(ValueError, match=r"^[^\n]*(must be a path inside|is damaged|resume_run=latest)[^\n]*$"):
        READERS[reader](output, name)


LINKS = ("driver.lock", "run.json", "config.yaml", "logs", "logs/rank-0.log", "checkpoints", ".dataset.incomplete.lock")


@pytest.mark.parametrize("link", LINKS)
def test_a_link_in_place_of_a_file_or_folder_is_one_line(output: Path, link: str) -> None:
    place = output / "run" / link
    place.parent.mkdir(parents=True)
    place.symlink_to(output.with_name("victim") / ("run.json" if "." in link else ""))
    holds = hold(Location.at(place.with_name("dataset"))) if "dataset" in link else locked(output / "run")
    with pytest.raises(ValueError, match=rf"^.*{link} is a link, which no .* contains: remove it$"), holds:
        pass
