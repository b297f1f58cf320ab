"""Preparation where it is killed after any step, and where the world changes between two runs. No JVM is needed.

The archive is one small file per sample, and the tasks run in this process: so hundreds of runs take seconds.
"""

import errno
import json
import shutil
import subprocess
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from numpy.typing import NDArray

from pipelines.archives.archive import (
    INDEX_SCHEMA,
    REJECTED_SCHEMA,
    ArchiveDescription,
    ArchiveIndex,
    BadRecordError,
)
from pipelines.dataset.format.files import check_apart
from pipelines.dataset.format.manifest import Manifest
from pipelines.dataset.prepare import preparation, spark_job, staging, writer
from pipelines.dataset.prepare.identity import index_digest, read_index
from pipelines.dataset.prepare.shard import ShardPlan
from pipelines.dataset.prepare.spark_job import PrepareProgress
from pipelines.dataset.prepare.writer import prepare_dataset
from pipelines.sample import ImageGroup
from pipelines.spark import tasks as spark_tasks
from pipelines.spark.tasks import LostWorkerError
from pipelines.storage import lease
from pipelines.storage.folder import Location
from pipelines.storage.lock import hold
from tests.pipelines.dataset.files import content

GROUP = ImageGroup("pixels", (256, 32, 3), "float32", ("red", "green", "blue"))  # ten rows per MiB


@dataclass(frozen=True)
class Numbers:
    """An archive of one folder per sample with a number in it, and a list that names splits and labels."""

    root: str
    column: str | None = None

    @property
    def description(self) -> ArchiveDescription:
        return ArchiveDescription("numbers", "single_label", ("even", "odd"), (GROUP,))

    @property
    def read_settings(self) -> dict[str, str | None]:
        return {} if self.column is None else {"column": self.column}

    def index(self) -> ArchiveIndex:
        rows = json.loads(Path(self.root, "list.json").read_text())
        samples = [
            {"id": name, "split": split, "labels": [label], "paths": [name], "size": None}
            for name, (split, label) in sorted(rows.items())
        ]
        unusable = [
            {"id": name, "file": f"{self.root}/{name}", "reason": "missing folder", "detail": ""}
            for name in rows
            if not Path(self.root, name).is_dir()
        ]
        return ArchiveIndex(
            pa.Table.from_pylist(samples, INDEX_SCHEMA),
            REJECTED_SCHEMA.empty_table(),
            pa.Table.from_pylist(unusable, REJECTED_SCHEMA),
        )

    def read(self, paths: Sequence[str], out: Mapping[str, NDArray[Any]]) -> None:
        file = Path(self.root, paths[0], "number")
        try:
            out["pixels"][...] = int(file.read_text())
        except FileNotFoundError:
            raise BadRecordError(file, "missing file") from None
        except ValueError:
            raise BadRecordError(file, "damaged") from None


@dataclass(frozen=True)
class Labelled(Numbers):
    """An archive whose labels are in the folders of the samples, as those of BigEarthNet v1.0."""

    def index(self) -> ArchiveIndex:
        found = super().index()
        gone = set(found.unusable["id"].to_pylist())
        rows = [{**row, "labels": [] if row["id"] in gone else row["labels"]} for row in found.samples.to_pylist()]
        return replace(found, samples=pa.Table.from_pylist(rows, INDEX_SCHEMA))


class Killed(BaseException):
    """Ends a run as a signal would: nothing handles it."""


class Tasks:
    """Runs the tasks of the Spark job here, and remembers the shards."""

    def __init__(self) -> None:
        self.shards: list[str] = []
        self.before: Callable[[str], None] = lambda file: None

    def __call__(
        self, spark: object, items: list[Any], function: Callable[[Any], Any], *, files: list[str], **_: Any
    ) -> list[Any]:
        results = []
        for item, file in zip(items, files, strict=True):
            self.before(file)
            results.append(function(item))
            if isinstance(item, ShardPlan):
                self.shards.append(file)
        return results


@contextmanager
def tasks_in_this_process() -> Iterator[Tasks]:
    run = Tasks()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(lease, "DEAD_SECONDS", -1.0)  # a process that was killed is this one
        for module in (spark_tasks, spark_job):
            patch.setattr(module, "run_tasks", run)
        patch.setattr(
            preparation,
            "write_report",
            lambda dataset, made, *_: dataset.write("report.html", made.fingerprint.encode()),
        )
        yield run


class World:
    """An archive of 60 samples in six shards, and where it is prepared to."""

    def __init__(self, folder: Path, tasks: Tasks) -> None:
        self.archive, self.tasks, self.lines = folder / "archive", tasks, list[str]()
        self.dataset: str | Path = folder / "dataset"
        self.kind: type[Numbers] = Numbers
        for number in range(60):
            (self.archive / f"s{number:03d}").mkdir(parents=True)
            mend(self, f"s{number:03d}")
        self.write_list({f"s{number:03d}": ("train" if number < 40 else "test", number % 2) for number in range(60)})

    def write_list(self, rows: dict[str, tuple[str, int]]) -> None:
        (self.archive / "list.json").write_text(json.dumps(rows))

    def rows(self) -> dict[str, tuple[str, int]]:
        return json.loads((self.archive / "list.json").read_text())

    @property
    def incomplete(self) -> Path:
        """Where a dataset on a disk is written."""
        return Path(f"{self.dataset}.incomplete")

    @property
    def shards(self) -> list[str]:
        """The shards that the last run wrote."""
        return self.tasks.shards

    def prepare(self, column: str | None = None, **settings: Any) -> Manifest:
        self.lines.clear()
        self.shards.clear()
        values = {"row_group_mib": 1, "row_groups_per_shard": 1, "seed": 3, "max_rejected_fraction": 0.2, **settings}
        archive = self.kind(str(self.archive), column)
        return prepare_dataset(None, archive, self.dataset, say=self.lines.append, **values)  # type: ignore[arg-type]

    def prepared(self, **settings: Any) -> dict[str, str]:
        """Prepare; what is there then."""
        self.prepare(**settings)
        return content(self.dataset)

    def said(self, text: str) -> bool:
        return any(text in line for line in self.lines)

    def is_finished(self, **settings: Any) -> bool:
        """Prepare, where nothing should be left to do."""
        self.prepare(**settings)
        return self.shards == [] and self.said("is finished already; left as it is")


def ids(dataset: str | Path | Location) -> list[str]:
    folder = Location.at(dataset)
    names = [name for name in folder.files() if Path(name).name.startswith("part-")]
    return sorted(
        sample for name in names for sample in pq.read_table(pa.BufferReader(folder.read(name)))["id"].to_pylist()
    )


def refused(world: World, message: str, error: type[Exception] = ValueError, **settings: Any) -> None:
    """The command ends with an error, and changes nothing."""
    before = [content(folder) for folder in (world.archive.parent, world.dataset)]
    with pytest.raises(error, match=message):
        world.prepare(**settings)
    assert [content(folder) for folder in (world.archive.parent, world.dataset)] == before


def damage(world: World, name: str) -> None:
    (world.archive / name / "number").write_text("?")


def mend(world: World, name: str) -> None:
    (world.archive / name / "number").write_text(str(int(name[1:])))


def hide(world: World, *names: str) -> None:
    for name in names:
        (world.archive / name).rename(world.archive.parent / f"hidden-{name}")


def bring_back(world: World, *names: str) -> None:
    for name in names:
        (world.archive.parent / f"hidden-{name}").rename(world.archive / name)


Loss = Callable[[World, str], None]
LOSSES: dict[type[Numbers], tuple[Loss, Loss]] = {Numbers: (damage, mend), Labelled: (hide, bring_back)}
"""How a sample becomes a bad one of which less is known, and a good one again."""


def change_labels(world: World, *, but: Sequence[str] = ()) -> None:
    """Give all samples the other label, but those that are written already."""
    world.write_list(
        {name: (split, label if name in but else 1 - label) for name, (split, label) in world.rows().items()}
    )


@pytest.fixture
def world(tmp_path: Path) -> Iterator[World]:
    with tasks_in_this_process() as tasks:
        yield World(tmp_path, tasks)


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """What a job that nothing disturbed writes."""
    with tasks_in_this_process() as tasks:
        whole = World(tmp_path_factory.mktemp("undisturbed"), tasks).prepared()
    assert sum("part-" in name for name in whole) == 6
    return whole


@pytest.fixture
def url(tmp_path: Path) -> Iterator[str]:
    """A folder behind a URL, without the requests of an object store."""
    folder = Location.at(f"memory://{tmp_path.name}")
    yield folder.url
    folder.remove()


def place(world: World, storage: str, request: pytest.FixtureRequest) -> None:
    """Have the dataset on this disk, or behind a URL."""
    if storage != "disk":
        world.dataset = request.getfixturevalue(storage)


@pytest.fixture
def _placed(world: World, storage: str, request: pytest.FixtureRequest) -> None:
    """The dataset is on this disk, or behind a URL."""
    place(world, storage, request)


class Kill:
    """Raises before or after the n-th operation on files, and then at every other: the process is gone."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.left, self.after = -1, False
        for owner, names in (
            (Location, ("write", "remove", "make")),
            (preparation, ("write_index", "write_petastorm_metadata", "link_shard", "write_note")),
            (staging, ("swap_folders",)),
            (spark_tasks, ("run_tasks",)),
            (Path, ("rename", "rmdir")),
        ):
            for name in names:
                monkeypatch.setattr(owner, name, self._wrapped(getattr(owner, name)))

    def _wrapped(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def wrapped(*args: Any, **kwargs: Any) -> Any:
            if threading.current_thread().name == "groundswell-lease":  # how often it writes depends on the machine
                return original(*args, **kwargs)
            if self.left == 0:
                raise Killed
            self.left -= 1
            if self.left == 0 and not self.after:
                raise Killed
            value = original(*args, **kwargs)
            if self.left == 0:
                raise Killed
            return value

        return wrapped

    def run(self, world: World, number: int, after: bool, **settings: Any) -> bool:
        """Prepare, killed at an operation; whether it was."""
        self.left, self.after = number, after
        try:
            world.prepare(**settings)
            return False
        except Killed:
            return True
        finally:
            self.left = -1

    def at_every(
        self, every: int, world: World, before: Callable[[], None], check: Callable[[], None], **settings: Any
    ) -> int:
        """Kill runs at every n-th operation, until one ends by itself; the number of its operations, at least."""
        number, killed = 0, True
        while killed:
            number += every
            killed = False
            for after in (False, True):
                before()
                killed = self.run(world, number, after, **settings) or killed
                print("killed", "after" if after else "before", "operation", number)
                check()
        return number


SCENES = [("fresh", True), ("repair", True), ("repair", False), ("overwrite", True), ("overwrite", False)]


@pytest.mark.parametrize(
    ("scene", "exchanges", "every"),
    [
        *(("fresh", True, 13), ("repair", True, 13), ("overwrite", False, 13)),
        *(pytest.param(*scene, 3 if scene[0] == "overwrite" else 1, marks=pytest.mark.long) for scene in SCENES),
    ],
)
def test_killed_after_any_step_the_same_command_continues(
    world: World,
    undisturbed: dict[str, str],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    scene: str,
    exchanges: bool,
    every: int,
) -> None:
    """Whole shards are kept, also where the folder is about to be put in its place."""
    if not exchanges:
        monkeypatch.setattr("ctypes.CDLL", lambda *_, **__: object())
    dataset, old = tmp_path / "dataset", tmp_path / "old"
    world.prepare(seed=9 if scene == "overwrite" else 3)
    if scene == "repair":
        (dataset / "train" / "part-00001.parquet").unlink()
    shutil.copytree(dataset, old)
    settings = {"overwrite": True} if scene == "overwrite" else {}

    def ground() -> None:
        shutil.rmtree(dataset, ignore_errors=True)
        if scene != "fresh":
            shutil.copytree(old, dataset)

    def check() -> None:
        there = len(list(tmp_path.glob("dataset*/*/part-*.parquet")))
        assert world.prepared(**settings) == undisturbed
        if scene == "fresh":  # the last one may have no note yet
            assert len(world.shards) <= 6 - there + 1
        assert {path.name for path in tmp_path.iterdir()} == {"archive", "dataset", "old"}

    assert Kill(monkeypatch).at_every(every, world, ground, check, **settings) > 20


def test_a_repeat_removes_what_a_job_that_was_killed_at_its_end_has_left(world: World, tmp_path: Path) -> None:
    world.prepare()
    dataset, mark = tmp_path / "dataset", "0" * 32
    ours = [dataset / f".report.html.{mark}", tmp_path / ".dataset.incomplete.lock"]
    others = [dataset / f".mine.html.{mark}", dataset / ".report.html.0123"]
    for path in (*ours, *others):
        path.touch()
    with hold(Location.at(dataset)):
        world.prepare()
        assert [path for path in ours if not path.exists()] == [], "they may be of the job that holds the dataset"
    ours[1].touch()
    world.prepare()
    assert [path for path in (*ours, *others) if path.exists()] == others


@pytest.mark.parametrize("scene", ["fresh", "repair", "overwrite"])
@pytest.mark.parametrize(
    ("storage", "every"),
    [("url", 29), pytest.param("s3_folder", 7, marks=[pytest.mark.long, pytest.mark.timeout(1200)])],
)
@pytest.mark.usefixtures("_placed")
def test_killed_after_any_step_behind_a_url(
    world: World, undisturbed: dict[str, str], monkeypatch: pytest.MonkeyPatch, scene: str, every: int
) -> None:
    folder = Location.at(world.dataset)
    world.prepare(seed=9 if scene == "overwrite" else 3)
    if scene == "repair":
        folder.remove("train/part-00001.parquet")
    old = {name: folder.read(name) for name in folder.files()} if scene != "fresh" else {}
    settings = {"overwrite": True} if scene == "overwrite" else {}

    def ground() -> None:
        folder.remove()
        for name, data in old.items():
            folder.make(str(Path(name).parent))
            folder.write(name, data)

    def check() -> None:
        assert world.prepared(**settings) == undisturbed

    Kill(monkeypatch).at_every(every, world, ground, check, **settings)


def test_overwriting_behind_a_url_takes_the_manifest_away_first(
    world: World, url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    world.dataset = url
    world.prepare()
    removed, remove = [], Location.remove
    monkeypatch.setattr(Location, "remove", lambda self, name="": (removed.append(name), remove(self, name))[1])
    killed_at(world, "finish", overwrite=True)
    assert (removed[0], Location.at(url).exists("dataset.json")) == ("dataset.json", False)


@pytest.mark.parametrize("dataset", ["", "/archive", "/archive/dataset"])
def test_archive_and_dataset_may_not_contain_each_other_behind_urls(s3_folder: str, dataset: str) -> None:
    folder = Location.at(f"{s3_folder}/archive")
    folder.write("list.json", b"{}")
    with pytest.raises(ValueError, match=r"dataset\.path .* the archive"):
        prepare_dataset(None, Numbers(str(folder)), f"{s3_folder}{dataset}", overwrite=True)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"dataset\.path .* the archive"):
        check_apart(str(folder).replace("s3://", "s3a://"), Location.at(f"{s3_folder}{dataset}"))
    assert folder.names() == ["list.json"]


def killed(world: World, **settings: Any) -> None:
    with pytest.raises(Killed):
        world.prepare(**settings)


def killed_at(world: World, step: str, **settings: Any) -> None:
    """Prepare, killed where this function of the preparation begins."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(preparation, step, Mock(side_effect=Killed))
        killed(world, **settings)


def interrupted(world: World, count: int, **settings: Any) -> None:
    """Prepare, killed when so many shards are written."""

    def before(file: str) -> None:
        if len(world.shards) == count:
            raise Killed

    world.tasks.before = before
    killed(world, **settings)
    world.tasks.before = lambda file: None


NOT_WRITTEN = "is not written again, as samples of it would be lost: 1 cannot be read any more"


def neighbour(world: World, bad: str) -> str:
    """A sample whose row is in the shard in which the row of a bad one is missing."""
    tables = [pq.read_table(path) for path in Path(f"{world.dataset}").parent.glob("dataset*/*/part-*.parquet")]
    (shard,) = [table["id"].to_pylist() for table in tables if len(table) == 10 - 1]
    assert bad not in shard
    return str(shard[0])


AFTER_THE_SHARDS = "write_rejected"
"""The step at which all shards are written, and are not in their place."""


@pytest.mark.parametrize("state", ["finished", "unfinished"])
@pytest.mark.parametrize("kind", [Numbers, Labelled])
def test_a_mended_sample_does_not_cost_the_rows_whose_folders_are_gone(
    world: World,
    undisturbed: dict[str, str],
    caplog: pytest.LogCaptureFixture,
    kind: type[Numbers],
    state: str,
) -> None:
    """With labels that were in its folder, the shard is one of other samples."""
    world.kind, (lose, find) = kind, LOSSES[kind]
    lose(world, "s001")
    if state == "finished":
        world.prepare()
    else:
        killed_at(world, AFTER_THE_SHARDS)
    names, other = ids(world.dataset if state == "finished" else world.incomplete), neighbour(world, "s001")
    hide(world, other)
    if kind is Numbers:  # it is bad for another reason now
        hide(world, "s001")
        world.prepare()
        assert ids(world.dataset) == names
        bring_back(world, "s001")
    find(world, "s001")
    world.prepare()
    assert (world.shards, ids(world.dataset)) == ([], names)
    assert world.is_finished()
    assert NOT_WRITTEN in caplog.text
    bring_back(world, other)
    assert (world.prepared(), len(world.shards)) == (undisturbed, 1)


@pytest.mark.parametrize(
    ("kind", "state", "storage"),
    [
        (Numbers, "finished", "disk"),
        (Labelled, "finished", "url"),
        (Numbers, "stopped", "url"),
        (Labelled, "stopped", "disk"),
        (Numbers, "stopped twice", "disk"),
        (Labelled, "stopped twice", "disk"),
    ],
)
def test_files_that_vanish_within_their_folders_do_not_cost_rows(
    world: World,
    undisturbed: dict[str, str],
    caplog: pytest.LogCaptureFixture,
    request: pytest.FixtureRequest,
    kind: type[Numbers],
    state: str,
    storage: str,
) -> None:
    """Only the task that writes the shard again finds out; also where a repair was stopped before.

    Where the first preparation was stopped, the shard that is to be written again lies where the new one is written.
    """
    world.kind, (lose, find) = kind, LOSSES[kind]
    lose(world, "s001")
    killed_at(world, AFTER_THE_SHARDS)
    other, names = neighbour(world, "s001"), ids(world.incomplete)
    place(world, storage, request)
    if state != "stopped twice":
        world.prepare()
    find(world, "s001")
    if state != "finished":
        interrupted(world, 0)
    damage(world, other)
    for _ in range(2):
        world.prepare()
        assert (ids(world.dataset), NOT_WRITTEN in caplog.text) == (names, True), caplog.text
        caplog.clear()
    mend(world, other)
    assert world.prepared() == undisturbed
    assert not world.incomplete.exists() or storage != "disk"


@pytest.mark.parametrize(
    ("kind", "storage", "every"),
    [
        (Numbers, "disk", 13),
        (Labelled, "url", 13),
        *(
            pytest.param(kind, storage, 1, marks=[pytest.mark.long, pytest.mark.timeout(1200)])
            for kind in LOSSES
            for storage in ("disk", "url")
        ),
    ],
)
def test_a_repair_that_is_killed_after_any_step_loses_no_row_of_samples_that_are_gone_then(
    world: World,
    undisturbed: dict[str, str],
    monkeypatch: pytest.MonkeyPatch,
    request: pytest.FixtureRequest,
    kind: type[Numbers],
    storage: str,
    every: int,
) -> None:
    world.kind, (lose, find) = kind, LOSSES[kind]
    lose(world, "s001")
    world.prepare()
    other = neighbour(world, "s001")
    find(world, "s001")
    shutil.rmtree(world.dataset)
    place(world, storage, request)
    folder = Location.at(world.dataset)

    def ground() -> None:
        folder.remove()
        lose(world, "s001")
        world.prepare()
        find(world, "s001")

    def check() -> None:
        damage(world, other)
        world.prepare()
        assert other in ids(folder)
        mend(world, other)
        world.prepare()
        # The thread of the killed job lives on in this process, and may keep its lease.
        assert {name: digest for name, digest in content(folder).items() if "/lease-" not in name} == undisturbed

    Kill(monkeypatch).at_every(every, world, ground, check)


def test_a_repaired_shard_that_is_not_in_its_place_yet_is_not_replaced_by_the_old_one(
    world: World, undisturbed: dict[str, str]
) -> None:
    damage(world, "s001")
    world.prepare()
    mend(world, "s001")
    killed_at(world, AFTER_THE_SHARDS)
    damage(world, "s001")
    Path(world.dataset, "test/part-00000.parquet").unlink()  # else the old dataset is left as it is
    assert (world.prepared(), world.shards) == (undisturbed, [])


CHANGES = {
    "removed": (lambda rows: rows.pop("s001"), "0 samples added, 1 removed, 0 changed, for example s001"),
    "added": (lambda rows: rows.update(s900=("train", 0)), "1 samples added, 0 removed, 0 changed, for example s900"),
    "moved": (lambda rows: rows.update(s004=("test", 0)), "0 samples added, 0 removed, 1 changed, for example s004"),
    "labels": (
        lambda rows: rows.update({name: (split, 1 - label) for name, (split, label) in rows.items()}),
        r"0 samples added, 0 removed, \d+ changed",
    ),
}


@pytest.mark.parametrize(
    ("state", "lost", "change"),
    [
        *(("unfinished", [], change) for change in CHANGES),
        *(("finished", [], change) for change in CHANGES),
        *(("finished", ["_notes.json.gz"], change) for change in ("removed", "labels")),
        ("finished", ["_index.parquet"], "removed"),
        ("finished", ["_index.parquet", "_notes.json.gz"], "removed"),
    ],
)
def test_a_changed_archive_is_refused_with_counts_and_the_command(
    world: World, state: str, lost: list[str], change: str
) -> None:
    folder, setting = Path(world.dataset), "overwrite"
    if state == "unfinished":
        interrupted(world, 3)
        folder, setting = world.incomplete, "restart"
    else:
        world.prepare()
    for name in lost:
        (folder / name).unlink()
    rows = world.rows()
    make, counts = CHANGES[change]
    make(rows)
    world.write_list(rows)
    said = rf"was written: .*--set prepare\.{setting}=true"
    if "_index.parquet" not in lost:
        said = rf"was written \({counts}.*--set prepare\.{setting}=true"
    refused(world, rf"the archive changed since .* {said}")
    world.prepare(**{setting: True})
    assert ids(world.dataset) == sorted(name for name in rows if (world.archive / name).is_dir())
    assert not folder.exists() or folder == world.dataset


@pytest.mark.parametrize("lost", [[], ["_notes.json.gz"], ["_index.parquet", "_notes.json.gz"]])
def test_images_of_another_column_do_not_replace_a_dataset(world: World, lost: list[str]) -> None:
    whole = world.prepared(column="thumbnail")
    for name in lost:
        Path(world.dataset, name).unlink()
    refused(world, r"column thumbnail there, full asked for.*--set prepare\.overwrite=true", column="full")
    assert world.prepared(column="thumbnail") == whole


def test_a_run_that_dies_between_its_mark_and_its_index_writes_the_index_later(world: World) -> None:
    interrupted(world, 2)
    change_labels(world, but=ids(world.incomplete))
    killed_at(world, "write_index")
    manifest, kept = world.prepare(), read_index(Location.at(world.dataset))
    assert kept is not None
    assert index_digest(kept) == manifest.source_fingerprint


@pytest.mark.parametrize("storage", ["disk", "url"])
@pytest.mark.usefixtures("_placed")
def test_a_shard_that_is_lost_is_written_again_whatever_its_note_says(
    world: World, undisturbed: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A worker dies in the same run, so what its tasks have finished is found by their notes."""
    monkeypatch.setattr(spark_tasks, "is_local_mode", lambda spark: True)
    interrupted(world, 4)
    staging.staging_of(Location.at(world.dataset)).remove("test/part-00001.parquet")
    died: list[str] = []

    def die_once(file: str) -> None:
        if not died:
            died.append(file)
            raise LostWorkerError("a Python worker died")

    world.tasks.before = die_once
    assert (world.prepared(), len(world.shards)) == (undisturbed, 3)
    assert world.said("a Python worker died; what is not finished is tried again, attempt 2 of 4")


@pytest.mark.parametrize("overwrite", [False, True])
def test_labels_of_samples_that_are_not_written_yet_may_change(world: World, overwrite: bool) -> None:
    """Also where the dataset replaces another one: its shards are not discarded."""
    if overwrite:
        world.prepare(seed=4)
    interrupted(world, 4, overwrite=overwrite)
    change_labels(world, but=ids(world.incomplete))
    after = world.prepared(overwrite=overwrite)
    assert 1 <= len(world.shards) <= 3
    shutil.rmtree(world.dataset)
    assert (world.prepared(), ids(world.dataset)) == (after, sorted(world.rows()))


@pytest.mark.parametrize("setting", ["restart", "overwrite"])
def test_our_own_staging_is_discarded_only(world: World, undisturbed: dict[str, str], setting: str) -> None:
    interrupted(world, 3, seed=4)
    refused(world, r"incomplete .* \(seed 4 there, 3 asked for\).*discard the unfinished work with --set")
    foreign = world.incomplete / "train" / "thesis.txt"
    foreign.write_text("x")
    refused(world, r"holds train/thesis\.txt, which is not part of the dataset", **{setting: True})
    foreign.unlink()
    assert world.prepared(**{setting: True}) == undisturbed


@pytest.mark.parametrize(
    ("name", "message"),
    [
        *(
            (name, r"plan\.json is damaged \(removing .*, which is no file of this folder")
            for name in ("../precious", "/precious", "train/../../precious", "", "s3://bucket/precious")
        ),
        ("precious", r"holds precious/thesis\.txt, which is not part of the dataset"),
    ],
)
def test_a_mark_of_somebody_else_removes_nothing(world: World, name: str, message: str, tmp_path: Path) -> None:
    files = [folder / "precious" / "thesis.txt" for folder in (tmp_path, world.incomplete)]
    for file in (*files, world.incomplete / "_progress" / "plan.json"):
        file.parent.mkdir(parents=True)
        file.write_text(
            json.dumps({"identity": {}, "splits": ["train"], "removing": [name], "replaced": None, "is_new": False})
        )
    with pytest.raises(ValueError, match=message):
        world.prepare(restart=True)
    assert all(file.exists() for file in files)


@pytest.mark.parametrize("settings", [{}, {"restart": True}, {"overwrite": True}])
def test_a_folder_in_the_way_of_the_unfinished_dataset_is_refused(world: World, settings: dict[str, bool]) -> None:
    world.incomplete.mkdir()
    (world.incomplete / "mine.txt").write_text("x")
    refused(world, r"dataset\.incomplete is in the way and is not ours", **settings)


def test_mended_files_redo_only_their_shards(world: World, undisturbed: dict[str, str]) -> None:
    damage(world, "s001")
    hide(world, "s002")
    damage(world, "s050")
    assert world.prepare().skipped == {"damaged": 2, "missing folder": 1}
    assert world.is_finished()
    mend(world, "s001")
    world.prepare()
    assert world.said("1 shards with rejected records that can be read now")
    assert (len(world.shards), "s001" in ids(world.dataset)) == (1, True)
    mend(world, "s050")
    bring_back(world, "s002")
    assert world.prepared() == undisturbed
    assert len(world.shards) <= 3


def test_above_the_limit_mended_files_let_the_same_command_succeed(world: World, undisturbed: dict[str, str]) -> None:
    for name in ("s010", "s020"):
        damage(world, name)
    for shards in (6, 0):
        with pytest.raises(ValueError, match=r"2 of 60 samples are bad \(damaged 2\).*the same command continues"):
            world.prepare(max_rejected_fraction=0.0)
        assert len(world.shards) == shards
    mend(world, "s010")
    mend(world, "s020")
    assert world.prepared(max_rejected_fraction=0.0) == undisturbed
    assert 1 <= len(world.shards) <= 2


def check_begun_again(world: World) -> None:
    """Overwriting with corrected samples, of the same names, gives what a job writes that nothing disturbed."""
    dataset, world.dataset = world.dataset, world.archive.with_name("corrected")
    for name in world.rows():
        (world.archive / name / "number").write_text(str(100 + int(name[1:])))
    whole, world.dataset = world.prepared(), dataset
    assert (world.prepared(overwrite=True), len(world.shards)) == (whole, 6)


@pytest.mark.parametrize("storage", ["disk", "url"])
@pytest.mark.usefixtures("_placed")
def test_a_repair_that_was_interrupted_is_no_part_of_a_replacement(world: World) -> None:
    """Its shards are those of the dataset that is to be replaced."""
    world.prepare()
    Location.at(world.dataset).remove("test/part-00001.parquet")
    interrupted(world, 0)
    assert len(ids(staging.staging_of(Location.at(world.dataset)))) == 50
    check_begun_again(world)


def test_overwriting_continues_a_first_preparation_and_what_continued_it(world: World) -> None:
    interrupted(world, 3)
    interrupted(world, 1)
    world.prepare(overwrite=True)
    assert len(world.shards) == 2


def test_a_replacement_that_a_repair_continued_is_begun_again(world: World) -> None:
    """The repair has put shards of the old dataset between those of the replacement."""
    world.prepare()
    interrupted(world, 3, overwrite=True)
    Path(world.dataset, "train/part-00003.parquet").unlink()
    interrupted(world, 0)
    check_begun_again(world)


def test_a_mount_point_is_refused_before_anything_is_written(world: World) -> None:
    world.prepare()
    folder = Path(world.dataset).with_name("a folder")
    folder.mkdir()
    subprocess.run(["mount", "--bind", world.dataset, folder], check=False, capture_output=True)
    if not (folder / "dataset.json").exists():
        pytest.skip("a folder cannot be mounted here")
    try:
        world.dataset = folder
        assert world.is_finished()
        (folder / "train/part-00000.parquet").unlink()
        for overwrite in (False, True):
            refused(world, r"a folder is a mount point.*choose a dataset\.path inside of it", overwrite=overwrite)
        assert world.shards == []
    finally:
        subprocess.run(["umount", folder], check=True)


def test_the_beginning_of_a_mark_is_ours(world: World, undisturbed: dict[str, str]) -> None:
    begun = world.incomplete / "_progress" / f".plan.json.{'0' * 32}"
    begun.parent.mkdir(parents=True)
    begun.write_text("{")  # the process was killed before the file got its name
    assert (world.prepared(), begun.exists()) == (undisturbed, False)


def truncate(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:100])


@pytest.mark.parametrize(
    ("what", "harm", "shards"),
    [
        ("train/part-00002.parquet", Path.unlink, 1),
        ("test/part-00000.parquet", truncate, 1),
        ("train/_common_metadata", Path.unlink, 0),
        ("_index.parquet", Path.unlink, 0),
        ("_rejected.parquet", Path.unlink, 0),
        ("_notes.json.gz", Path.unlink, 6),
        ("_notes.json.gz", truncate, 6),
        ("report.html", Path.unlink, 0),
    ],
)
def test_what_is_lost_is_made_again_and_nothing_else(
    world: World, undisturbed: dict[str, str], what: str, harm: Callable[[Path], None], shards: int
) -> None:
    world.prepare()
    harm(Path(world.dataset, what))
    assert (world.prepared(), len(world.shards)) == (undisturbed, shards)
    assert world.is_finished()


DAMAGED = "train/part-00001.parquet"


def flip_a_bit(dataset: Location) -> tuple[str, str]:
    """Damage a row in the middle of a shard; its sample, and another one of the shard."""
    data = bytearray(dataset.read(DAMAGED))
    data[len(data) // 2] ^= 1
    dataset.write(DAMAGED, bytes(data))
    found = pq.read_table(pa.BufferReader(bytes(data)))["id"].to_pylist()
    damaged = found[len(found) // 2]
    return damaged, next(name for name in found if name != damaged)


def test_damaged_rows_are_found_when_asked_for(world: World, undisturbed: dict[str, str]) -> None:
    world.prepare()
    flip_a_bit(Location.at(world.dataset))
    assert world.is_finished()
    assert (world.prepared(verify=True), world.shards) == (undisturbed, [DAMAGED])
    assert world.said(f"{DAMAGED} has 1 damaged rows of 10")
    assert world.is_finished(verify=True)


@pytest.mark.parametrize(("storage", "lose", "find"), [("disk", damage, mend), ("url", hide, bring_back)])
@pytest.mark.usefixtures("_placed")
def test_a_damaged_shard_is_not_replaced_at_the_cost_of_good_rows(
    world: World,
    undisturbed: dict[str, str],
    lose: Callable[[World, str], None],
    find: Callable[[World, str], None],
) -> None:
    world.prepare()
    damaged, good = flip_a_bit(Location.at(world.dataset))
    lose(world, good)
    message = rf"1 damaged shards .*, the first is {DAMAGED}: 1 good rows would be lost, .* such as {good}"
    for _ in range(2):
        refused(world, message + r" .*put their files back, and the same command", RuntimeError, verify=True)
        assert world.said(f"{DAMAGED} has 1 damaged rows of 10: 5 (sample {damaged})")
    find(world, good)
    assert world.prepared(verify=True) == undisturbed


def test_a_damaged_row_whose_sample_is_gone_does_not_keep_its_shard_damaged(world: World) -> None:
    world.prepare()
    damage(world, flip_a_bit(Location.at(world.dataset))[0])
    world.prepare(verify=True)
    assert (world.shards, len(ids(world.dataset))) == ([DAMAGED], 59)
    assert world.is_finished(verify=True)


def write_another_note(folder: Path, shard: str) -> None:
    note = folder / "_progress" / f"{shard.replace('/', '-')}.json"
    note.write_text(json.dumps({**json.loads(note.read_text()), "digest": "that of another job"}))


@pytest.mark.parametrize("interfere", [write_another_note, lambda folder, shard: truncate(folder / shard)])
def test_what_another_job_has_written_meanwhile_is_told_and_written_again(
    world: World, undisturbed: dict[str, str], interfere: Callable[[Path, str], None]
) -> None:
    """An executor of a job that has lost its lease may still write."""

    def before(file: str) -> None:
        if len(world.shards) == 5:
            interfere(world.incomplete, world.shards[2])

    world.tasks.before = before
    message = r"another job or task has written 1 shards at the same time, the first is t.*: the same command continues"
    with pytest.raises(RuntimeError, match=message):
        world.prepare()
    harmed = world.shards[2]
    world.tasks.before = lambda file: None
    assert (world.prepared(), world.shards) == (undisturbed, [harmed])


def test_who_has_an_old_file_open_goes_on_reading_it(world: World) -> None:
    damage(world, "s001")
    world.prepare()
    mend(world, "s001")
    before = {path: path.read_bytes() for path in Path(world.dataset).rglob("part-*")}
    files = {path: path.open("rb") for path in before}
    starts = {path: file.read(1000) for path, file in files.items()}
    world.prepare()
    for path, file in files.items():
        with file:
            assert starts[path] + file.read() == before[path]
    assert [
        str(path.relative_to(world.dataset)) for path in before if path.read_bytes() != before[path]
    ] == world.shards


@pytest.mark.parametrize("overwrite", [False, True])
def test_a_dataset_of_another_format_is_refused(world: World, overwrite: bool) -> None:
    world.prepare()
    path = Path(world.dataset, "dataset.json")
    path.write_text(json.dumps({**json.loads(path.read_text()), "format_version": 1}))
    refused(world, r"format version 1.* remove the dataset and run `groundswell prepare` again$", overwrite=overwrite)


@pytest.mark.parametrize(
    ("storage", "name", "settings"),
    [
        ("disk", "train/notes.txt", {}),
        ("disk", "train/notes.txt", {"overwrite": True}),
        ("disk", "train/notes.txt", {"restart": True}),
        ("disk", "train/part-00077.parquet", {"overwrite": True}),
        ("url", "model.bin", {"overwrite": True}),
        ("url", "train/x/notes.txt", {"overwrite": True}),
    ],
)
@pytest.mark.usefixtures("_placed")
def test_a_foreign_file_stops_what_would_remove_it(world: World, name: str, settings: dict[str, bool]) -> None:
    world.prepare()
    folder = Location.at(world.dataset)
    folder.make(str(Path(name).parent))
    folder.write(name, b"precious")
    before = content(folder)
    if settings.get("overwrite"):
        refused(world, rf"holds {name}, which is not part of the dataset.*nothing was", **settings)
    else:
        assert world.is_finished(**settings)  # a finished dataset is left alone, whatever else is in the folder
        assert content(folder) == before
    folder.remove("train/part-00000.parquet")
    refused(world, rf"holds {name}", **settings)


@pytest.mark.parametrize("where", ["archive", "archive/inside", "."])
def test_archive_and_dataset_may_not_contain_each_other(world: World, where: str, tmp_path: Path) -> None:
    before = content(world.archive)
    (tmp_path / "link").symlink_to(tmp_path)
    for path in (tmp_path / where, tmp_path / "link" / where):
        world.dataset = path
        with pytest.raises(ValueError, match=r"dataset\.path .* (is|is in|contains) the archive"):
            world.prepare(overwrite=True)
    assert content(world.archive) == before


@pytest.mark.parametrize("overwrite", [False, True])
@pytest.mark.parametrize("storage", ["disk", "url"])
@pytest.mark.usefixtures("_placed")
def test_a_folder_of_somebody_else_is_refused(world: World, overwrite: bool) -> None:
    folder = Location.at(world.dataset)
    folder.make()
    folder.write("thesis.txt", b"x")
    refused(world, "exists and is not a dataset", overwrite=overwrite)
    folder.write("dataset.json", b'{"mine": 1}')
    refused(world, r"dataset\.json is damaged", overwrite=overwrite)


def test_a_dataset_that_is_a_link_stays_one(world: World, undisturbed: dict[str, str], tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to(tmp_path / "dataset")
    world.dataset = tmp_path / "link"
    world.prepare()
    (tmp_path / "dataset" / "train" / "part-00000.parquet").unlink()
    world.prepare()
    assert ((tmp_path / "link").is_symlink(), content(tmp_path / "dataset")) == (True, undisturbed)


def test_where_there_are_no_hard_links_shards_are_copied(
    world: World, undisturbed: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    world.prepare()
    Path(world.dataset, "train", "part-00000.parquet").unlink()
    monkeypatch.setattr("os.link", Mock(side_effect=PermissionError(1, "not permitted")))
    assert (world.prepared(), world.shards) == (undisturbed, ["train/part-00000.parquet"])


def test_a_full_disk_names_the_folder_and_the_same_command_continues(
    world: World, undisturbed: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    full = OSError(errno.ENOSPC, "No space left on device", f"{world.incomplete}/_notes.json.gz")
    with monkeypatch.context() as patch:
        patch.setattr(preparation, "write_all_notes", Mock(side_effect=full))
        with pytest.raises(RuntimeError, match=r"_notes\.json\.gz: No space left on device: make room.*same command"):
            world.prepare()
    assert (world.prepared(), world.shards) == (undisturbed, [])


def test_a_folder_that_cannot_be_written_is_named(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    def read_only(self: Path, *_: object, **__: object) -> None:
        raise OSError(errno.EROFS, "Read-only file system", str(self))

    monkeypatch.setattr(Path, "mkdir", read_only)
    with pytest.raises(ValueError, match=r"dataset cannot be written \(.*: Read-only file system\): choose another"):
        world.prepare()


def test_a_dataset_below_a_file_is_named(world: World, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("x")
    world.dataset = tmp_path / "file" / "dataset"
    with pytest.raises((ValueError, NotADirectoryError, FileExistsError), match="file"):
        world.prepare()


def test_a_job_whose_place_another_one_took_leaves_the_others_files(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    removed: list[str] = []
    check_owner = Mock(side_effect=RuntimeError("another job took over"))
    monkeypatch.setattr(writer, "hold", lambda dataset: nullcontext(check_owner))
    monkeypatch.setattr(staging, "remove_files", lambda folder, names, last=None: removed.extend(names))
    damage(world, "s001")
    with pytest.raises(RuntimeError, match="another job took over"):
        world.prepare()
    names = set(Location.at(world.incomplete).files())
    assert sum("part-" in name and name.endswith(".parquet") for name in names) == 6
    assert not names & {"_rejected.parquet", "dataset.json"}
    assert removed == []


def test_what_a_resumed_run_found_is_told_apart(world: World) -> None:
    interrupted(world, 4)
    seen: list[PrepareProgress] = []
    world.prepare(progress=seen.append)
    assert seen[-1] == PrepareProgress(60, 60, 0, 40)


@pytest.mark.parametrize(("split", "bad"), [("train", range(40)), ("test", range(40, 60))])
def test_a_split_without_a_good_sample_is_refused(world: World, split: str, bad: range) -> None:
    """However few samples of the archive it has: training would end after its first epoch."""
    for number in bad:
        damage(world, f"s{number:03d}")
    with pytest.raises(ValueError, match=rf"^every sample of the split '{split}' is bad"):
        world.prepare(max_rejected_fraction=1.0)


@pytest.mark.parametrize(
    "settings", [{"restart": True}, {"overwrite": True, "seed": 9}, {"overwrite": True, "seed": 4}]
)
def test_killed_while_folders_exchange_names_the_old_dataset_is_not_lost(
    world: World, monkeypatch: pytest.MonkeyPatch, settings: dict[str, Any]
) -> None:
    """On file systems that cannot exchange them at once."""

    def killed_between(first: Path, second: Path, aside: Path) -> None:
        second.rename(aside)
        raise Killed

    before = world.prepared()
    monkeypatch.setattr("ctypes.CDLL", lambda *_, **__: object())
    with monkeypatch.context() as patch:
        patch.setattr("pipelines.dataset.prepare.staging.swap_folders", killed_between)
        killed(world, overwrite=True, seed=4)
    assert not Path(world.dataset).exists()
    assert (world.prepared(**settings) == before) is ("restart" in settings)
    world.prepare(overwrite=True, seed=5)  # nothing is in the way of the next exchange
    assert [path for path in Path(world.dataset).parent.iterdir() if path.name.startswith(".")] == []
