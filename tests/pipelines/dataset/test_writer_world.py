"""Preparation where it is killed after any step, and where the world changes between two runs. No JVM is needed.

The archive is one small file per sample, and the tasks run in this process: so hundreds of runs take seconds.
"""

import errno
import hashlib
import json
import shutil
import subprocess
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from numpy.typing import NDArray

from pipelines import tasks as spark_tasks
from pipelines.archives.archive import (
    INDEX_SCHEMA,
    REJECTED_SCHEMA,
    ArchiveDescription,
    ArchiveIndex,
    BadRecordError,
)
from pipelines.dataset import lease, spark_job, staging, stock, writer
from pipelines.dataset.files import check_apart
from pipelines.dataset.index import _digest_of_bytes, index_digest, read_index
from pipelines.dataset.manifest import Manifest, write_manifest
from pipelines.dataset.shard import ShardPlan
from pipelines.dataset.spark_job import PrepareProgress
from pipelines.dataset.staging import read_mark
from pipelines.dataset.swap import _rename_both
from pipelines.dataset.writer import prepare_dataset
from pipelines.sample import ImageGroup
from pipelines.storage import Folder
from pipelines.tasks import LostWorkerError

GROUP = ImageGroup("pixels", (256, 128, 3), "uint8", ("red", "green", "blue"))  # ten rows per MiB


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
        missing = [name for name in rows if not Path(self.root, name).is_dir()]
        samples = [
            {"id": name, "split": split, "labels": [label], "paths": [name], "size": None}
            for name, (split, label) in sorted(rows.items())
        ]
        unusable = [
            {"id": name, "file": f"{self.root}/{name}", "reason": "missing folder", "detail": ""} for name in missing
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


class World:
    """An archive of 60 samples in six shards, and where it is prepared to."""

    def __init__(self, root: Path, dataset: str | Path) -> None:
        self.archive, self.dataset, self.lines = root, dataset, list[str]()
        self.kind = Numbers
        names = {f"s{number:03d}": number for number in range(60)}
        splits = {name: "train" if number < 40 else "test" for name, number in names.items()}
        for name, number in names.items():
            (root / name).mkdir(parents=True)
            (root / name / "number").write_text(str(number))
        self.write_list({name: (splits[name], number % 2) for name, number in names.items()})

    def write_list(self, rows: dict[str, tuple[str, int]]) -> None:
        (self.archive / "list.json").write_text(json.dumps(rows))

    def list(self) -> dict[str, tuple[str, int]]:
        rows: dict[str, tuple[str, int]] = json.loads((self.archive / "list.json").read_text())
        return rows

    def prepare(self, column: str | None = None, **settings: Any) -> Manifest:
        self.lines.clear()
        values = {"row_group_mib": 1, "row_groups_per_shard": 1, "seed": 3, "max_rejected_fraction": 0.2, **settings}
        archive = self.kind(str(self.archive), column)
        return prepare_dataset(None, archive, self.dataset, say=self.lines.append, **values)  # type: ignore[arg-type]

    def said(self, text: str) -> bool:
        return any(text in line for line in self.lines)


def content(dataset: str | Path) -> dict[str, str]:
    """Digest of every file of a dataset."""
    folder = Folder.at(dataset)
    return {name: hashlib.sha256(folder.read(name)).hexdigest() for name in sorted(folder.files())}


def ids(dataset: str | Path) -> list[str]:
    folder = Folder.at(dataset)
    names = [name for name in folder.files() if Path(name).name.startswith("part-")]
    return sorted(
        sample for name in names for sample in pq.read_table(pa.BufferReader(folder.read(name)))["id"].to_pylist()
    )


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


@pytest.fixture
def tasks(monkeypatch: pytest.MonkeyPatch) -> Tasks:
    run = Tasks()
    for module in (spark_tasks, spark_job):
        monkeypatch.setattr(module, "run_tasks", run)

    def page(dataset: Folder, manifest: Manifest, *_: object) -> None:
        dataset.write("report.html", manifest.fingerprint.encode())

    monkeypatch.setattr(writer, "write_report", page)
    return run


@pytest.fixture
def world(tasks: Tasks, tmp_path: Path) -> World:
    return World(tmp_path / "archive", tmp_path / "dataset")


@pytest.fixture
def undisturbed(world: World, tmp_path: Path) -> dict[str, str]:
    """What a job that nothing disturbed writes."""
    world.prepare()
    whole = content(world.dataset)
    shutil.rmtree(world.dataset)
    assert sum("part-" in name for name in whole) == 6
    return whole


class Killed(BaseException):
    """Ends a run as a signal would: nothing handles it."""


class Kill:
    """Raises before or after the n-th operation on files, and then at every other: the process is gone."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.left, self.count, self.after = -1, 0, False
        for name in ("write", "remove", "make"):
            self._wrap(monkeypatch, Folder, name)
        for module, name in ((writer, "write_index"), (writer, "write_petastorm_metadata"), (writer, "link_shard")):
            self._wrap(monkeypatch, module, name)
        for module, name in ((staging, "swap_folders"), (spark_tasks, "run_tasks"), (writer, "write_note")):
            self._wrap(monkeypatch, module, name)
        self._wrap(monkeypatch, Path, "rename")
        self._wrap(monkeypatch, Path, "rmdir")

    def _wrap(self, monkeypatch: pytest.MonkeyPatch, owner: Any, name: str) -> None:
        original = getattr(owner, name)

        def wrapped(*args: Any, **kwargs: Any) -> Any:
            if self.left == 0:
                raise Killed
            self.count += 1
            self.left -= 1
            if self.left == 0 and not self.after:
                raise Killed
            value = original(*args, **kwargs)
            if self.left == 0:
                raise Killed
            return value

        monkeypatch.setattr(owner, name, wrapped)

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


SCENES = [("fresh", True), ("repair", True), ("repair", False), ("overwrite", True), ("overwrite", False)]


@pytest.mark.parametrize(
    ("scene", "exchanges", "every"),
    [
        *((*scene, 13) for scene in SCENES),
        *(pytest.param(*scene, 3 if scene[0] == "overwrite" else 1, marks=pytest.mark.long) for scene in SCENES),
    ],
)
def test_killed_after_any_step_the_same_command_continues(
    world: World,
    tasks: Tasks,
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
    dataset = tmp_path / "dataset"
    world.prepare()
    if scene == "repair":
        (dataset / "train" / "part-00001.parquet").unlink()
    old = tmp_path / "old"
    if scene == "overwrite":
        shutil.rmtree(dataset)
        world.prepare(seed=9)
    shutil.copytree(dataset, old)

    def ground() -> None:
        shutil.rmtree(dataset, ignore_errors=True)
        if scene != "fresh":
            shutil.copytree(old, dataset)

    def check(number: int, after: bool) -> None:
        assert content(dataset) == undisturbed, (number, after)
        left = {path.name for path in tmp_path.iterdir()}
        assert left == {"archive", "dataset", "old"}, (number, after, left)

    kill = Kill(monkeypatch)
    settings = {"overwrite": True} if scene == "overwrite" else {}
    number = every
    killed = True
    while killed:
        killed = False
        for after in (False, True):
            ground()
            killed = kill.run(world, number, after, **settings) or killed
            there = len(list(tmp_path.glob("dataset*/*/part-*.parquet")))
            tasks.shards.clear()
            world.prepare(**settings)
            if scene == "fresh":  # the last one may have no note yet
                assert len(tasks.shards) <= 6 - there + 1, (number, after)
            check(number, after)
        number += every
    assert number > 20


@pytest.mark.parametrize("scene", ["fresh", "repair", "overwrite"])
@pytest.mark.parametrize("every", [29, pytest.param(7, marks=[pytest.mark.long, pytest.mark.timeout(1200)])])
def test_killed_after_any_step_behind_a_url(
    world: World, undisturbed: dict[str, str], monkeypatch: pytest.MonkeyPatch, s3_folder: str, scene: str, every: int
) -> None:
    world.dataset = s3_folder
    folder = Folder.at(s3_folder)
    world.prepare(seed=9 if scene == "overwrite" else 3)
    if scene == "repair":
        folder.remove("train/part-00001.parquet")
    old = {name: folder.read(name) for name in folder.files()}
    kill = Kill(monkeypatch)
    monkeypatch.setattr(lease, "_ended", lambda owner: True)  # the killed process is this one
    settings = {"overwrite": True} if scene == "overwrite" else {}
    number, killed = every, True
    while killed:
        killed = False
        for after in (False, True):
            kill.left = -1
            folder.remove()
            if scene != "fresh":
                for name, data in old.items():
                    folder.write(name, data)
            killed = kill.run(world, number, after, **settings) or killed
            world.prepare(**settings)
            assert content(folder) == undisturbed, (number, after)
        number += every


def test_only_our_own_objects_are_removed_behind_a_url(world: World, s3_folder: str) -> None:
    folder = Folder.at(s3_folder)
    world.dataset = f"{s3_folder}/project"
    world.prepare()
    folder.write("project/model.bin", b"precious")
    folder.write("project/train/x/y.txt", b"precious")
    before = content(folder)
    with pytest.raises(ValueError, match=r"holds model\.bin and 1 more files, which are not part of the dataset"):
        world.prepare(seed=4, overwrite=True)
    assert content(folder) == before


@pytest.mark.parametrize("dataset", ["", "/archive", "/archive/dataset"])
def test_archive_and_dataset_may_not_contain_each_other_behind_urls(s3_folder: str, dataset: str) -> None:
    folder = Folder.at(f"{s3_folder}/archive")
    folder.write("list.json", b"{}")
    with pytest.raises(ValueError, match=r"dataset\.path .* the archive"):
        prepare_dataset(None, Numbers(str(folder)), f"{s3_folder}{dataset}", overwrite=True)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"dataset\.path .* the archive"):
        check_apart(str(folder).replace("s3://", "s3a://"), Folder.at(f"{s3_folder}{dataset}"))
    assert folder.names() == ["list.json"]


def stop_after(tasks: Tasks, count: int) -> None:
    """Stop the next run when so many shards are written."""
    tasks.shards.clear()

    def before(file: str) -> None:
        if len(tasks.shards) == count:
            raise Killed

    tasks.before = before


def interrupted(world: World, tasks: Tasks, count: int, **settings: Any) -> None:
    stop_after(tasks, count)
    with pytest.raises(Killed):
        world.prepare(**settings)
    tasks.before = lambda file: None
    tasks.shards.clear()


def hide(world: World, *names: str) -> None:
    for name in names:
        (world.archive / name).rename(world.archive.parent / f"hidden-{name}")


def bring_back(world: World, *names: str) -> None:
    for name in names:
        (world.archive.parent / f"hidden-{name}").rename(world.archive / name)


def test_folders_that_are_extracted_between_two_runs_are_neither_lost_nor_doubled(
    world: World, undisturbed: dict[str, str], tasks: Tasks
) -> None:
    names = sorted(world.list())
    hide(world, "s003", "s017", "s055")
    interrupted(world, tasks, 4)
    bring_back(world, "s003", "s017", "s055")
    world.prepare()
    assert ids(world.dataset) == names
    assert content(world.dataset) == undisturbed
    assert len(tasks.shards) < 6  # shards that had all their samples are kept


def test_folders_that_are_removed_between_two_runs_keep_their_rows(
    world: World, undisturbed: dict[str, str], tasks: Tasks
) -> None:
    interrupted(world, tasks, 6 - 1)
    finished = ids(f"{world.dataset}.incomplete")
    hide(world, finished[0], *sorted(set(world.list()) - set(finished))[:1])
    world.prepare()
    assert len(ids(world.dataset)) == 59
    assert finished[0] in ids(world.dataset)
    bring_back(world, *[path.name.removeprefix("hidden-") for path in world.archive.parent.glob("hidden-*")])
    world.prepare()
    assert content(world.dataset) == undisturbed


def test_a_shard_keeps_rows_whose_folders_are_gone_whatever_becomes_of_its_bad_records(
    world: World, tasks: Tasks, caplog: pytest.LogCaptureFixture
) -> None:
    damage(world, "s001")
    world.prepare()
    names = ids(world.dataset)
    tables = [pq.read_table(path) for path in Path(world.dataset).glob("*/part-*.parquet")]
    (shard,) = [table["id"].to_pylist() for table in tables if len(table) == 10 - 1]
    hide(world, "s001")  # bad for another reason now
    hide(world, shard[0])
    world.prepare()
    assert ids(world.dataset) == names
    bring_back(world, "s001")
    mend(world, "s001")
    tasks.shards.clear()
    world.prepare()
    assert tasks.shards == []
    assert "is not written again, as samples of it would be lost: 1 cannot be read any more" in caplog.text
    bring_back(world, shard[0])
    world.prepare()
    assert len(ids(world.dataset)) == 60


NOT_WRITTEN = "is not written again, as samples of it would be lost: 1 cannot be read any more"


def neighbour(world: World, bad: str) -> str:
    """A sample whose row is in the shard in which the row of a bad one is missing."""
    tables = [pq.read_table(path) for path in Path(f"{world.dataset}").parent.glob("dataset*/*/part-*.parquet")]
    (shard,) = [table["id"].to_pylist() for table in tables if len(table) == 10 - 1]
    assert bad not in shard
    return str(shard[0])


def killed_at_the_end(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """All shards are written, and are not in their place."""
    with monkeypatch.context() as patch:
        patch.setattr(writer, "write_rejected", lambda *_: (_ for _ in ()).throw(Killed))
        with pytest.raises(Killed):
            world.prepare()


@pytest.mark.parametrize("state", ["finished", "unfinished"])
def test_labels_of_a_mended_folder_do_not_cost_the_rows_whose_folders_are_gone(
    world: World,
    undisturbed: dict[str, str],
    tasks: Tasks,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
    state: str,
) -> None:
    """With the labels the shard is one of other samples."""
    world.kind = Labelled
    hide(world, "s001")
    if state == "finished":
        world.prepare()
    else:
        killed_at_the_end(world, monkeypatch)
    names = ids(world.dataset if state == "finished" else f"{world.dataset}.incomplete")
    other = neighbour(world, "s001")
    hide(world, other)
    bring_back(world, "s001")
    tasks.shards.clear()
    for _ in range(2):
        world.prepare()
        assert tasks.shards == []
        assert ids(world.dataset) == names
    assert world.said("finished already")
    assert NOT_WRITTEN in caplog.text
    bring_back(world, other)
    world.prepare()
    assert len(tasks.shards) == 1
    assert content(world.dataset) == undisturbed


@pytest.mark.parametrize("storage", ["disk", "s3"])
@pytest.mark.parametrize("state", ["finished", "stopped"])
@pytest.mark.parametrize("kind", [Numbers, Labelled])
def test_files_that_vanish_within_their_folders_do_not_cost_rows(
    world: World,
    undisturbed: dict[str, str],
    tasks: Tasks,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
    request: pytest.FixtureRequest,
    tmp_path: Path,
    kind: type[Numbers],
    state: str,
    storage: str,
) -> None:
    """Only the task that writes the shard again finds out; also where a repair was stopped before."""
    monkeypatch.setattr(lease, "_ended", lambda owner: True)  # the stopped process is this one
    world.kind = kind
    (hide if kind is Labelled else damage)(world, "s001")
    world.prepare()
    other = neighbour(world, "s001")
    if storage == "s3":
        shutil.rmtree(world.dataset)
        world.dataset = request.getfixturevalue("s3_folder")
        world.prepare()
    names = ids(world.dataset)
    (bring_back if kind is Labelled else mend)(world, "s001")
    if state == "stopped":
        interrupted(world, tasks, 0)
    damage(world, other)
    for _ in range(2):
        world.prepare()
        assert ids(world.dataset) == names
        assert NOT_WRITTEN in caplog.text
        caplog.clear()
    mend(world, other)
    world.prepare()
    assert content(world.dataset) == undisturbed
    assert not Path(f"{world.dataset}.incomplete").exists()


@pytest.mark.parametrize("kind", [Numbers, Labelled])
@pytest.mark.parametrize("storage", ["disk", "s3"])
@pytest.mark.parametrize("every", [13, pytest.param(1, marks=[pytest.mark.long, pytest.mark.timeout(1200)])])
def test_a_repair_that_is_killed_after_any_step_loses_no_row_of_samples_that_are_gone_then(
    world: World,
    undisturbed: dict[str, str],
    monkeypatch: pytest.MonkeyPatch,
    request: pytest.FixtureRequest,
    kind: type[Numbers],
    storage: str,
    every: int,
) -> None:
    monkeypatch.setattr(lease, "_ended", lambda owner: True)  # the killed process is this one
    world.kind = kind
    lose, find = (hide, bring_back) if kind is Labelled else (damage, mend)
    lose(world, "s001")
    world.prepare()
    other = neighbour(world, "s001")
    shutil.rmtree(world.dataset)
    folder = Folder.at(request.getfixturevalue("s3_folder") if storage == "s3" else world.dataset)
    world.dataset = folder.url
    kill = Kill(monkeypatch)
    number, killed = every, True
    while killed:
        killed = False
        for after in (False, True):
            world.prepare()
            find(world, "s001")
            killed = kill.run(world, number, after) or killed
            damage(world, other)
            world.prepare()
            assert other in ids(folder), (number, after)
            mend(world, other)
            world.prepare()
            # The thread of the killed job lives on in this process, and may keep its lease.
            found = {name: digest for name, digest in content(folder).items() if "/lease-" not in name}
            assert found == undisturbed, (number, after)
            lose(world, "s001")
            folder.remove()
        number += every


@pytest.mark.parametrize("kind", [Numbers, Labelled])
def test_a_first_preparation_that_was_stopped_twice_loses_no_row(
    world: World, undisturbed: dict[str, str], tasks: Tasks, monkeypatch: pytest.MonkeyPatch, kind: type[Numbers]
) -> None:
    """The shard that is to be written again lies where the new one is written."""
    world.kind = kind
    (hide if kind is Labelled else damage)(world, "s001")
    killed_at_the_end(world, monkeypatch)
    other = neighbour(world, "s001")
    (bring_back if kind is Labelled else mend)(world, "s001")
    interrupted(world, tasks, 0)
    damage(world, other)
    world.prepare()
    assert other in ids(world.dataset)
    mend(world, other)
    world.prepare()
    assert content(world.dataset) == undisturbed


def test_a_repaired_shard_that_is_not_in_its_place_yet_is_not_replaced_by_the_old_one(
    world: World, undisturbed: dict[str, str], tasks: Tasks, monkeypatch: pytest.MonkeyPatch
) -> None:
    damage(world, "s001")
    world.prepare()
    mend(world, "s001")
    killed_at_the_end(world, monkeypatch)
    damage(world, "s001")
    Path(world.dataset, "test/part-00000.parquet").unlink()  # else the old dataset is left as it is
    tasks.shards.clear()
    world.prepare()
    assert tasks.shards == []
    assert content(world.dataset) == undisturbed


@pytest.mark.parametrize("state", ["unfinished", "finished", "without notes"])
@pytest.mark.parametrize(
    ("change", "counts"),
    [
        (lambda rows: rows.pop("s001"), "0 samples added, 1 removed, 0 changed, for example s001"),
        (lambda rows: rows.update(s900=("train", 0)), "1 samples added, 0 removed, 0 changed, for example s900"),
        (lambda rows: rows.update(s004=("test", 0)), "0 samples added, 0 removed, 1 changed, for example s004"),
        (
            lambda rows: rows.update({name: (split, 1 - label) for name, (split, label) in rows.items()}),
            r"0 samples added, 0 removed, \d+ changed",
        ),
    ],
    ids=["removed", "added", "moved", "labels"],
)
def test_a_changed_archive_is_refused_with_counts_and_the_command(
    world: World, tasks: Tasks, state: str, change: Callable[[dict[str, tuple[str, int]]], None], counts: str
) -> None:
    if state == "unfinished":
        interrupted(world, tasks, 3)
        folder, advice = Path(f"{world.dataset}.incomplete"), r"--set prepare\.restart=true"
    else:
        world.prepare()
        folder, advice = Path(world.dataset), r"--set prepare\.overwrite=true"
    if state == "without notes":
        (folder / "_notes.json.gz").unlink()
    before = content(folder)
    rows = world.list()
    change(rows)
    world.write_list(rows)
    with pytest.raises(ValueError, match=rf"the archive changed since .* was written \({counts}.*{advice}"):
        world.prepare()
    assert content(folder) == before
    setting = {"restart": True} if state == "unfinished" else {"overwrite": True}
    world.prepare(**setting)
    known = [name for name in rows if (world.archive / name).is_dir()]
    assert ids(world.dataset) == sorted(known)
    assert not folder.exists() or folder == world.dataset


@pytest.mark.parametrize("lost", [["_index.parquet"], ["_index.parquet", "_notes.json.gz"]])
def test_a_changed_archive_does_not_replace_a_dataset_without_its_index(world: World, lost: list[str]) -> None:
    world.prepare()
    for name in lost:
        Path(world.dataset, name).unlink()
    before, rows = content(world.dataset), world.list()
    rows.pop("s001")
    world.write_list(rows)
    with pytest.raises(ValueError, match=r"the archive changed since .* was written: .*--set prepare\.overwrite=true"):
        world.prepare()
    assert content(world.dataset) == before


@pytest.mark.parametrize("lost", [[], ["_notes.json.gz"], ["_index.parquet", "_notes.json.gz"]])
def test_images_of_another_column_do_not_replace_a_dataset(world: World, lost: list[str]) -> None:
    world.prepare("thumbnail")
    whole = content(world.dataset)
    for name in lost:
        Path(world.dataset, name).unlink()
    before = content(world.dataset)
    with pytest.raises(ValueError, match=r"column thumbnail there, full asked for.*--set prepare\.overwrite=true"):
        world.prepare("full")
    assert content(world.dataset) == before
    world.prepare("thumbnail")
    assert content(world.dataset) == whole


def test_a_dataset_that_does_not_tell_the_column_is_left_as_it_is(world: World) -> None:
    manifest = world.prepare("thumbnail")
    write_manifest(manifest.model_copy(update={"read_settings": None}), world.dataset)
    before = content(world.dataset)
    world.prepare("thumbnail")
    assert world.said("finished already")
    assert content(world.dataset) == before


def test_a_run_that_dies_between_its_mark_and_its_index_writes_the_index_later(
    world: World, tasks: Tasks, monkeypatch: pytest.MonkeyPatch
) -> None:
    interrupted(world, tasks, 2)
    finished = ids(f"{world.dataset}.incomplete")
    rows = {name: (split, label if name in finished else 1 - label) for name, (split, label) in world.list().items()}
    world.write_list(rows)

    def die(*_: object) -> None:
        raise Killed

    with monkeypatch.context() as patch:
        patch.setattr(writer, "write_index", die)
        with pytest.raises(Killed):
            world.prepare()
    manifest, kept = world.prepare(), read_index(Folder.at(world.dataset))
    assert kept is not None
    assert index_digest(kept) == manifest.source_fingerprint


@pytest.mark.parametrize("storage", ["disk", "s3"])
def test_a_shard_that_is_lost_is_written_again_whatever_its_note_says(
    world: World,
    tasks: Tasks,
    undisturbed: dict[str, str],
    monkeypatch: pytest.MonkeyPatch,
    request: pytest.FixtureRequest,
    storage: str,
) -> None:
    """A worker dies in the same run, so what its tasks have finished is found by their notes."""
    monkeypatch.setattr(spark_tasks, "is_local_mode", lambda spark: True)
    monkeypatch.setattr(lease, "_ended", lambda owner: True)  # the stopped process is this one
    if storage == "s3":
        world.dataset = request.getfixturevalue("s3_folder")
    interrupted(world, tasks, 4)
    staging.staging_of(Folder.at(world.dataset)).remove("test/part-00001.parquet")
    died: list[str] = []

    def die_once(file: str) -> None:
        if not died:
            died.append(file)
            raise LostWorkerError("a Python worker died")

    tasks.before = die_once
    world.prepare()
    assert world.said("a Python worker died; what is not finished is tried again, attempt 2 of 4")
    assert len(tasks.shards) == 3
    assert content(world.dataset) == undisturbed


@pytest.fixture
def values_under_nulls(monkeypatch: pytest.MonkeyPatch) -> None:
    """The index is the same, with other bytes."""
    index = Numbers.index

    def with_values(archive: Numbers) -> ArchiveIndex:
        found = index(archive)
        rows, place = len(found.samples), INDEX_SCHEMA.get_field_index("flags")
        offsets = pa.array(range(rows + 1), pa.int32()).buffers()[1]
        validity, values = pa.py_buffer(bytes(rows)), pa.array(["snow"] * rows)
        flags = pa.Array.from_buffers(INDEX_SCHEMA.field(place).type, rows, [validity, offsets], children=[values])
        return replace(found, samples=found.samples.set_column(place, INDEX_SCHEMA.field(place), flags))

    monkeypatch.setattr(Numbers, "index", with_values)


def test_what_lies_under_nulls_of_the_index_is_no_change(
    world: World, undisturbed: dict[str, str], values_under_nulls: None
) -> None:
    damage(world, "s001")
    world.prepare()
    mend(world, "s001")
    world.prepare()
    assert world.said("1 shards with rejected records that can be read now")
    assert content(world.dataset) == undisturbed


def test_a_dataset_with_a_digest_of_earlier_versions_keeps_it(
    world: World, tasks: Tasks, values_under_nulls: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Runs know the dataset by its fingerprint, which covers the digest."""
    with monkeypatch.context() as patch:
        patch.setattr(stock, "index_digest", _digest_of_bytes)
        interrupted(world, tasks, 4)
        before = read_mark(Folder.at(f"{world.dataset}.incomplete"))
    manifest = world.prepare()
    assert len(tasks.shards) == 2
    assert before is not None
    assert before.identity.index != index_digest(Numbers(str(world.archive)).index().samples)
    assert manifest.source_fingerprint == before.identity.index
    whole = content(world.dataset)
    world.prepare()
    assert world.said("finished already")
    Path(world.dataset, "train/part-00001.parquet").unlink()
    world.prepare()
    assert content(world.dataset) == whole


def test_labels_of_samples_that_are_not_written_yet_may_change(world: World, tasks: Tasks) -> None:
    interrupted(world, tasks, 2)
    finished = ids(f"{world.dataset}.incomplete")
    rows = {name: (split, label if name in finished else 1 - label) for name, (split, label) in world.list().items()}
    world.write_list(rows)
    world.prepare()
    after = content(world.dataset)
    shutil.rmtree(world.dataset)
    world.prepare()
    assert content(world.dataset) == after
    assert ids(world.dataset) == sorted(rows)


def test_restart_leaves_a_finished_dataset_alone(world: World, undisturbed: dict[str, str]) -> None:
    world.prepare()
    world.prepare(restart=True)
    assert world.said("finished already")
    assert content(world.dataset) == undisturbed


def test_restart_discards_our_own_staging_only(world: World, tasks: Tasks, undisturbed: dict[str, str]) -> None:
    interrupted(world, tasks, 3, seed=4)
    staging_folder = Path(f"{world.dataset}.incomplete")
    with pytest.raises(ValueError, match=r"seed 4 there, 3 asked for.*discard the unfinished work with --set prepare"):
        world.prepare()
    (staging_folder / "train" / "thesis.txt").write_text("x")
    for settings in ({"restart": True}, {"overwrite": True}):
        with pytest.raises(ValueError, match=r"holds train/thesis\.txt, which is not part of the dataset"):
            world.prepare(**settings)
    assert len(list(staging_folder.rglob("part-*.parquet"))) == 3
    (staging_folder / "train" / "thesis.txt").unlink()
    world.prepare(restart=True)
    assert content(world.dataset) == undisturbed


@pytest.mark.parametrize("name", ["../precious", "/precious", "train/../../precious", "", "s3://bucket/precious"])
def test_a_mark_of_somebody_else_removes_nothing_outside(world: World, name: str, tmp_path: Path) -> None:
    precious = tmp_path / "precious"
    precious.mkdir()
    (precious / "thesis.txt").write_text("x")
    mark = Path(f"{world.dataset}.incomplete", "_progress", "plan.json")
    mark.parent.mkdir(parents=True)
    mark.write_text(json.dumps({"identity": {}, "splits": ["train"], "removing": [name], "replaced": None}))
    with pytest.raises(ValueError, match=r"plan\.json is damaged \(removing .*, which is no file of this folder"):
        world.prepare()
    assert (precious / "thesis.txt").exists()


def test_a_mark_removes_no_folder(world: World) -> None:
    staging_folder = Path(f"{world.dataset}.incomplete")
    mark = staging_folder / "_progress" / "plan.json"
    mark.parent.mkdir(parents=True)
    (staging_folder / "mine").mkdir()
    (staging_folder / "mine" / "thesis.txt").write_text("x")
    mark.write_text(json.dumps({"identity": {}, "splits": ["train"], "removing": ["mine"], "replaced": None}))
    with pytest.raises(ValueError, match=r"holds mine/thesis\.txt, which is not part of the dataset"):
        world.prepare(restart=True)
    assert (staging_folder / "mine" / "thesis.txt").exists()


def test_a_folder_in_the_way_of_the_unfinished_dataset_is_refused(world: World) -> None:
    other = Path(f"{world.dataset}.incomplete")
    other.mkdir()
    (other / "mine.txt").write_text("x")
    for settings in ({}, {"restart": True}, {"overwrite": True}):
        with pytest.raises(ValueError, match=r"dataset\.incomplete is in the way and is not ours"):
            world.prepare(**settings)
    assert (other / "mine.txt").exists()


def damage(world: World, name: str) -> None:
    (world.archive / name / "number").write_text("?")


def mend(world: World, name: str) -> None:
    (world.archive / name / "number").write_text(str(int(name[1:])))


def test_mended_files_redo_only_their_shards(world: World, undisturbed: dict[str, str], tasks: Tasks) -> None:
    damage(world, "s001")
    hide(world, "s002")
    damage(world, "s050")
    assert world.prepare().skipped == {"damaged": 2, "missing folder": 1}
    tasks.shards.clear()
    world.prepare()
    assert world.said("finished already")
    assert tasks.shards == []
    mend(world, "s001")
    world.prepare()
    assert world.said("1 shards with rejected records that can be read now")
    assert len(tasks.shards) == 1
    assert "s001" in ids(world.dataset)
    mend(world, "s050")
    bring_back(world, "s002")
    world.prepare()
    assert len(tasks.shards) <= 3
    assert content(world.dataset) == undisturbed


def test_above_the_limit_mended_files_let_the_same_command_succeed(
    world: World, undisturbed: dict[str, str], tasks: Tasks
) -> None:
    for name in ("s010", "s020"):
        damage(world, name)
    with pytest.raises(ValueError, match=r"2 of 60 samples are bad \(damaged 2\).*the same command continues"):
        world.prepare(max_rejected_fraction=0.0)
    tasks.shards.clear()
    with pytest.raises(ValueError, match="2 of 60"):
        world.prepare(max_rejected_fraction=0.0)
    assert tasks.shards == []
    mend(world, "s010")
    mend(world, "s020")
    world.prepare(max_rejected_fraction=0.0)
    assert 1 <= len(tasks.shards) <= 2
    assert content(world.dataset) == undisturbed


def test_other_labels_of_unwritten_samples_do_not_discard_the_shards_of_a_replacement(
    world: World, tasks: Tasks
) -> None:
    world.prepare(seed=4)
    interrupted(world, tasks, 4, overwrite=True)
    written = ids(f"{world.dataset}.incomplete")
    rows = {name: (split, label if name in written else 0) for name, (split, label) in world.list().items()}
    assert rows != world.list()
    world.write_list(rows)
    world.prepare(overwrite=True)
    assert 1 <= len(tasks.shards) <= 3
    assert ids(world.dataset) == sorted(rows)


def correct(world: World) -> None:
    """Give the samples other pixels, under the same names."""
    for name in world.list():
        (world.archive / name / "number").write_text(str(100 + int(name[1:])))


def check_begun_again(world: World, tasks: Tasks, tmp_path: Path) -> None:
    """Overwriting with corrected samples gives what a job writes that nothing disturbed."""
    dataset, world.dataset = world.dataset, tmp_path / "corrected"
    correct(world)
    world.prepare()
    whole, world.dataset = content(world.dataset), dataset
    tasks.shards.clear()
    world.prepare(overwrite=True)
    assert len(tasks.shards) == 6
    assert content(world.dataset) == whole


@pytest.mark.parametrize("storage", ["disk", "s3"])
@pytest.mark.parametrize("version", ["this", "earlier"])
def test_a_repair_that_was_interrupted_is_no_part_of_a_replacement(
    world: World,
    tasks: Tasks,
    monkeypatch: pytest.MonkeyPatch,
    request: pytest.FixtureRequest,
    tmp_path: Path,
    storage: str,
    version: str,
) -> None:
    """Its shards are those of the dataset that is to be replaced; a mark of an earlier version does not tell them."""
    monkeypatch.setattr(lease, "_ended", lambda owner: True)  # the stopped process is this one
    if storage == "s3":
        world.dataset = request.getfixturevalue("s3_folder")
    world.prepare()
    Folder.at(world.dataset).remove("test/part-00001.parquet")
    interrupted(world, tasks, 0)
    unfinished = staging.staging_of(Folder.at(world.dataset))
    assert len(ids(unfinished.url)) == 50
    if version == "earlier":
        mark = json.loads(unfinished.read("_progress/plan.json"))
        del mark["is_new"]
        unfinished.write("_progress/plan.json", json.dumps(mark).encode())
    check_begun_again(world, tasks, tmp_path)


def test_overwriting_continues_a_first_preparation_and_what_continued_it(world: World, tasks: Tasks) -> None:
    interrupted(world, tasks, 3)
    interrupted(world, tasks, 1)
    world.prepare(overwrite=True)
    assert len(tasks.shards) == 2


def test_a_replacement_that_a_repair_continued_is_begun_again(world: World, tasks: Tasks, tmp_path: Path) -> None:
    """The repair has put shards of the old dataset between those of the replacement."""
    world.prepare()
    interrupted(world, tasks, 3, overwrite=True)
    Path(world.dataset, "train/part-00003.parquet").unlink()
    interrupted(world, tasks, 0)
    check_begun_again(world, tasks, tmp_path)


def test_a_mount_point_is_refused_before_anything_is_written(world: World, tasks: Tasks) -> None:
    world.prepare()
    before = content(world.dataset)
    folder = Path(world.dataset).with_name("a folder")
    folder.mkdir()
    subprocess.run(["mount", "--bind", world.dataset, folder], check=False, capture_output=True)
    if not (folder / "dataset.json").exists():
        pytest.skip("a folder cannot be mounted here")
    try:
        world.dataset = folder
        world.prepare()
        assert world.said("finished already")
        (folder / "train/part-00000.parquet").unlink()
        tasks.shards.clear()
        for settings in ({}, {"overwrite": True}):
            with pytest.raises(ValueError, match=r"a folder is a mount point.*choose a dataset\.path inside of it"):
                world.prepare(**settings)
        assert tasks.shards == []
        assert {name for name in before if name not in content(folder)} == {"train/part-00000.parquet"}
        assert not Path(f"{folder}.incomplete").exists()
    finally:
        subprocess.run(["umount", folder], check=True)


def test_the_beginning_of_a_mark_is_ours(world: World, undisturbed: dict[str, str]) -> None:
    begun = Path(f"{world.dataset}.incomplete", "_progress", f".plan.json.{'0' * 32}")
    begun.parent.mkdir(parents=True)
    begun.write_text("{")  # the process was killed before the file got its name
    world.prepare()
    assert content(world.dataset) == undisturbed
    assert not begun.exists()


def truncate(path: Path) -> None:
    with path.open("r+b") as file:
        file.truncate(100)


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
    world: World, undisturbed: dict[str, str], tasks: Tasks, what: str, harm: Callable[[Path], None], shards: int
) -> None:
    world.prepare()
    harm(Path(world.dataset, what))
    tasks.shards.clear()
    world.prepare()
    assert len(tasks.shards) == shards
    assert content(world.dataset) == undisturbed
    world.prepare()
    assert world.said("finished already")


def flip_a_bit(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


def test_damaged_rows_are_found_when_asked_for(world: World, undisturbed: dict[str, str], tasks: Tasks) -> None:
    world.prepare()
    flip_a_bit(Path(world.dataset, "train/part-00001.parquet"))
    world.prepare()
    assert world.said("finished already")
    tasks.shards.clear()
    world.prepare(verify=True)
    assert world.said("train/part-00001.parquet has 1 damaged rows of 10")
    assert tasks.shards == ["train/part-00001.parquet"]
    assert content(world.dataset) == undisturbed
    world.prepare(verify=True)
    assert world.said("finished already")


@pytest.mark.parametrize("lose", [hide, damage])
@pytest.mark.parametrize("storage", ["disk", "s3"])
def test_a_damaged_shard_is_not_replaced_at_the_cost_of_good_rows(
    world: World,
    undisturbed: dict[str, str],
    tasks: Tasks,
    request: pytest.FixtureRequest,
    storage: str,
    lose: Callable[[World, str], None],
) -> None:
    if storage == "s3":
        world.dataset = request.getfixturevalue("s3_folder")
    world.prepare()
    folder, name = Folder.at(world.dataset), "train/part-00001.parquet"
    data = bytearray(folder.read(name))
    data[len(data) // 2] ^= 1
    folder.write(name, bytes(data))
    before = content(folder)
    found = pq.read_table(pa.BufferReader(bytes(data)))["id"].to_pylist()
    damaged = found[len(found) // 2]
    good = next(name for name in found if name != damaged)
    lose(world, good)
    message = rf"1 damaged shards are not replaced, the first is {name}: 1 good rows would be lost, .* such as {good}"
    for _ in range(2):
        with pytest.raises(RuntimeError, match=message + r" .*put their files back, and the same command"):
            world.prepare(verify=True)
        assert world.said(f"{name} has 1 damaged rows of 10: 5 (sample {damaged})")
        assert content(folder) == before
    bring_back(world, good) if lose is hide else mend(world, good)
    world.prepare(verify=True)
    assert content(folder) == undisturbed


def test_a_damaged_row_whose_sample_is_gone_does_not_keep_its_shard_damaged(world: World, tasks: Tasks) -> None:
    world.prepare()
    name = "train/part-00001.parquet"
    flip_a_bit(Path(world.dataset, name))
    found = pq.read_table(Path(world.dataset, name))["id"].to_pylist()
    damage(world, found[len(found) // 2])
    tasks.shards.clear()
    world.prepare(verify=True)
    assert tasks.shards == [name]
    assert len(ids(world.dataset)) == 59
    world.prepare(verify=True)
    assert world.said("finished already")


def write_another_note(folder: Path, shard: str) -> None:
    note = folder / "_progress" / f"{shard.replace('/', '-')}.json"
    note.write_text(json.dumps({**json.loads(note.read_text()), "digest": "that of another job"}))


@pytest.mark.parametrize("interfere", [write_another_note, lambda folder, shard: truncate(folder / shard)])
def test_what_another_job_has_written_meanwhile_is_told_and_written_again(
    world: World, undisturbed: dict[str, str], tasks: Tasks, interfere: Callable[[Path, str], None]
) -> None:
    """An executor of a job that has lost its lease may still write."""

    def before(file: str) -> None:
        if len(tasks.shards) == 5:
            interfere(Path(f"{world.dataset}.incomplete"), tasks.shards[2])

    tasks.shards.clear()
    tasks.before = before
    message = r"another job or task has written 1 shards meanwhile, the first is t.*: the same command continues"
    with pytest.raises(RuntimeError, match=message):
        world.prepare()
    harmed = tasks.shards[2]
    tasks.before = lambda file: None
    tasks.shards.clear()
    world.prepare()
    assert tasks.shards == [harmed]
    assert content(world.dataset) == undisturbed


def test_who_has_an_old_file_open_goes_on_reading_it(world: World, undisturbed: dict[str, str]) -> None:
    damage(world, "s001")
    world.prepare()
    name = next(
        str(path.relative_to(world.dataset))
        for path in Path(world.dataset).rglob("part-*")
        if hashlib.sha256(path.read_bytes()).hexdigest() not in undisturbed.values()
    )
    before = Path(world.dataset, name).read_bytes()
    with Path(world.dataset, name).open("rb") as file:
        start = file.read(1000)
        mend(world, "s001")
        world.prepare()
        assert start + file.read() == before
    assert Path(world.dataset, name).read_bytes() != before


def test_a_dataset_of_format_1_is_left_or_replaced(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    world.prepare()
    dataset = Path(world.dataset)
    values = json.loads((dataset / "dataset.json").read_text())
    values.pop("digest", None)
    for split in values["splits"].values():
        for shard in split["shards"]:
            shard.pop("content_digest", None)
    (dataset / "dataset.json").write_text(json.dumps({**values, "format_version": 1}))
    for name in ("_notes.json.gz", "_index.parquet"):
        (dataset / name).unlink()
    before = content(dataset)
    world.prepare()
    assert world.said("finished already")
    with pytest.raises(ValueError, match="seed 3 there, 5 asked for"):
        world.prepare(seed=5)
    rows = world.list()
    world.write_list({name: row for name, row in rows.items() if name != "s001"})
    with pytest.raises(ValueError, match=r"the archive has 59 samples, .* was made of 60.*prepare\.overwrite=true"):
        world.prepare()
    world.write_list(rows)
    assert content(dataset) == before
    truncate(dataset / "train/part-00000.parquet")
    with pytest.raises(ValueError, match=r"1 shards are missing or of another size.*cannot be repaired.*overwrite"):
        world.prepare()
    world.prepare(overwrite=True)
    assert ids(dataset) == sorted(rows)


@pytest.mark.parametrize("settings", [{}, {"overwrite": True}, {"restart": True}])
def test_a_foreign_file_stops_what_would_remove_it(world: World, settings: dict[str, bool]) -> None:
    world.prepare()
    precious = Path(world.dataset, "train", "notes.txt")
    precious.write_text("precious")
    before = content(world.dataset)
    if settings.get("overwrite"):
        with pytest.raises(ValueError, match=r"holds train/notes\.txt, which is not part of the dataset.*nothing was"):
            world.prepare(**settings)
    else:
        world.prepare(**settings)  # a finished dataset is left alone, whatever else is in the folder
    assert content(world.dataset) == before
    Path(world.dataset, "train", "part-00000.parquet").unlink()
    with pytest.raises(ValueError, match=r"holds train/notes\.txt"):
        world.prepare(**settings)
    assert precious.read_text() == "precious"
    assert {path.name for path in world.archive.parent.iterdir()} == {"archive", "dataset"}


def test_a_shard_that_the_manifest_does_not_list_is_foreign(world: World) -> None:
    world.prepare()
    shutil.copy(Path(world.dataset, "train", "part-00000.parquet"), Path(world.dataset, "train", "part-00077.parquet"))
    with pytest.raises(ValueError, match=r"holds train/part-00077\.parquet"):
        world.prepare(overwrite=True)


@pytest.mark.parametrize("where", ["archive", "archive/inside", "."])
def test_archive_and_dataset_may_not_contain_each_other(world: World, where: str, tmp_path: Path) -> None:
    before = content(world.archive)
    (tmp_path / "link").symlink_to(tmp_path)
    for path in (tmp_path / where, tmp_path / "link" / where):
        world.dataset = path
        for settings in ({}, {"overwrite": True}):
            with pytest.raises(ValueError, match=r"dataset\.path .* (is|is in|contains) the archive"):
                world.prepare(**settings)
    assert content(world.archive) == before


@pytest.mark.parametrize("overwrite", [False, True])
def test_a_folder_of_somebody_else_is_refused(world: World, overwrite: bool) -> None:
    Path(world.dataset).mkdir()
    Path(world.dataset, "thesis.txt").write_text("x")
    with pytest.raises(ValueError, match="exists and is not a dataset"):
        world.prepare(overwrite=overwrite)
    Path(world.dataset, "dataset.json").write_text('{"mine": 1}')
    with pytest.raises(ValueError, match=r"dataset\.json is damaged"):
        world.prepare(overwrite=overwrite)
    assert Path(world.dataset, "thesis.txt").exists()


def test_a_dataset_that_is_a_link_stays_one(world: World, undisturbed: dict[str, str], tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to(tmp_path / "dataset")
    world.dataset = tmp_path / "link"
    world.prepare()
    (tmp_path / "dataset" / "train" / "part-00000.parquet").unlink()
    world.prepare()
    assert (tmp_path / "link").is_symlink()
    assert content(tmp_path / "dataset") == undisturbed


def test_a_dataset_of_elsewhere_in_the_same_place(world: World, undisturbed: dict[str, str], tmp_path: Path) -> None:
    """The folder is replaced between two runs by a dataset of other settings."""
    world.prepare(seed=9)
    Path(world.dataset).rename(tmp_path / "other")
    world.prepare()
    shutil.rmtree(world.dataset)
    (tmp_path / "other").rename(world.dataset)
    with pytest.raises(ValueError, match=r"seed 9 there, 3 asked for"):
        world.prepare()
    world.prepare(overwrite=True)
    assert content(world.dataset) == undisturbed


def test_where_there_are_no_hard_links_shards_are_copied(
    world: World, undisturbed: dict[str, str], monkeypatch: pytest.MonkeyPatch, tasks: Tasks
) -> None:
    world.prepare()
    Path(world.dataset, "train", "part-00000.parquet").unlink()
    monkeypatch.setattr("os.link", lambda *_: (_ for _ in ()).throw(PermissionError(1, "not permitted")))
    tasks.shards.clear()
    world.prepare()
    assert tasks.shards == ["train/part-00000.parquet"]
    assert content(world.dataset) == undisturbed


def test_a_full_disk_names_the_folder_and_the_same_command_continues(
    world: World, undisturbed: dict[str, str], monkeypatch: pytest.MonkeyPatch, tasks: Tasks
) -> None:
    with monkeypatch.context() as patch:

        def full(*_: object) -> None:
            raise OSError(errno.ENOSPC, "No space left on device", f"{world.dataset}.incomplete/_notes.json.gz")

        patch.setattr(writer, "write_all_notes", full)
        with pytest.raises(RuntimeError, match=r"_notes\.json\.gz: No space left on device: make room.*same command"):
            world.prepare()
    tasks.shards.clear()
    world.prepare()
    assert tasks.shards == []
    assert content(world.dataset) == undisturbed


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
    @contextmanager
    def lost(dataset: Folder) -> Iterator[Callable[[], None]]:
        def still_held() -> None:
            raise RuntimeError("another job took over")

        yield still_held

    def remove(folder: Folder, names: list[str], last: list[str] | None = None) -> None:
        removed.extend(names)

    removed: list[str] = []
    monkeypatch.setattr(writer, "hold", lost)
    monkeypatch.setattr(staging, "remove_files", remove)
    damage(world, "s001")
    with pytest.raises(RuntimeError, match="another job took over"):
        world.prepare()
    names = set(Folder.at(f"{world.dataset}.incomplete").files())
    assert sum("part-" in name and name.endswith(".parquet") for name in names) == 6
    assert not names & {"_rejected.parquet", "dataset.json"}
    assert removed == []


def test_what_a_resumed_run_found_is_told_apart(world: World, tasks: Tasks) -> None:
    interrupted(world, tasks, 4)
    seen: list[PrepareProgress] = []
    world.prepare(progress=seen.append)
    assert seen[-1] == PrepareProgress(60, 60, 0, 40)


@pytest.mark.parametrize(("split", "bad"), [("train", range(40)), ("test", range(40, 60))])
def test_a_split_without_a_good_sample_is_refused(world: World, split: str, bad: range) -> None:
    """However few samples of the archive it has: training would end after its first epoch."""
    for number in bad:
        (world.archive / f"s{number:03d}" / "number").write_text("damaged")
    with pytest.raises(ValueError, match=rf"^every sample of the split '{split}' is bad"):
        world.prepare(max_rejected_fraction=1.0)


@pytest.mark.parametrize(
    "settings", [{"restart": True}, {"overwrite": True, "seed": 9}, {"overwrite": True, "seed": 4}]
)
def test_killed_while_folders_exchange_names_the_old_dataset_is_not_lost(
    world: World, monkeypatch: pytest.MonkeyPatch, settings: dict[str, Any]
) -> None:
    """On file systems that cannot exchange them at once."""
    world.prepare()
    before = content(world.dataset)

    def killed_between(first: Path, second: Path, aside: Path) -> None:
        second.rename(aside)
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr("pipelines.dataset.staging.swap_folders", killed_between)
        with pytest.raises(KeyboardInterrupt):
            world.prepare(overwrite=True, seed=4)
    assert not Path(world.dataset).exists()
    monkeypatch.setattr("pipelines.dataset.staging.swap_folders", _rename_both)
    world.prepare(**settings)
    assert (content(world.dataset) == before) is ("restart" in settings)
    world.prepare(overwrite=True, seed=5)  # nothing is in the way of the next exchange
    assert [path for path in Path(world.dataset).parent.iterdir() if path.name.startswith(".")] == []
