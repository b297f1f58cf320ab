"""What the driver writes to a run, in a real store."""

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest
from mlflow import MlflowClient

from conf.load import load
from conf.schema import RunConfig
from models.compression.exchange.exchange import METRICS
from pipelines.comparison.run import compared_run
from pipelines.dataset.manifest import Manifest
from pipelines.launch.failure import Outcome, WorkerError
from pipelines.launch.runner import Attempt
from pipelines.sample import ImageGroup
from pipelines.storage import StorageError
from pipelines.tracking import revision, runs
from pipelines.tracking.journal import rank_journal
from pipelines.tracking.local_run import update_local_run
from pipelines.tracking.recorded import recorded_training
from pipelines.tracking.store import TrackedRun, TrackingError
from pipelines.tracking.sync import DRIVER_DIED, sync, unsynced
from pipelines.tracking.writer import RunWriter
from pipelines.training.description import settings_of
from pipelines.training.driver_record import DriverRecord, newest_resumable, recorded_run, with_stored_run
from pipelines.training.record import Record
from pipelines.training.results import TrainingSummary

pytestmark = pytest.mark.usefixtures("module_mlflow_store")

MANIFEST = Manifest(
    archive="eurosat_rgb",
    task="single_label",
    class_names=("water", "land"),
    groups=(ImageGroup("rgb", (32, 32, 3), "uint8", ("red", "green", "blue")),),
    splits={},
    statistics={},
    settings={"seed": 7},
    source_fingerprint="abc",
)
SUMMARY = TrainingSummary("runs:/1/model", [{"train/loss": 0.5}], "step-00000008.npz", 1)


def config(output: Path, *settings: str) -> RunConfig:
    return load("smoke", ["archive.kind=bigearthnet_v2", f"training.output={output}", *settings])


def ignore(news: str, reason: str) -> None:
    pass


def record(chosen: RunConfig, summary: TrainingSummary | None = SUMMARY) -> TrackedRun:
    with recorded_run(chosen, MANIFEST, ignore) as driver:
        driver.attempt(Attempt(1, 2))
        driver.finish(summary)
    return driver.run


def write_checkpoint(folder: Path, step: int) -> None:
    (folder / "checkpoints").mkdir(parents=True, exist_ok=True)
    (folder / "checkpoints" / f"step-{step:08d}.npz").touch()


def test_what_ran_is_recorded_and_not_the_configured_archive(
    module_mlflow_store: str, tmp_path: Path, artifact_text: Callable[[str, str, str], str]
) -> None:
    run = record(config(tmp_path))
    stored = MlflowClient(module_mlflow_store).get_run(run.run_id)
    parameters = stored.data.params
    assert {name: value for name, value in parameters.items() if name.startswith(("archive.", "prepare."))} == {
        "archive.kind": "eurosat_rgb",
        "archive.source_fingerprint": "abc",
        "prepare.seed": "7",
    }
    assert (stored.info.status, stored.data.tags["attempt"]) == ("FINISHED", "1")
    text = artifact_text(module_mlflow_store, run.run_id, "config.yaml")
    assert "bigearthnet_v2" not in text
    assert text.startswith("# dataset of archive eurosat_rgb, source fingerprint abc\n")
    file = tmp_path / "again.yaml"
    file.write_text(text)
    assert load(str(file)).model_copy(update={"archive": None}) == config(tmp_path).model_copy(update={"archive": None})


def test_what_a_resumed_run_changes_is_recorded_with_its_step(
    module_mlflow_store: str, tmp_path: Path, artifact_text: Callable[[str, str, str], str]
) -> None:
    run = record(config(tmp_path))
    resumed = ("exchange.codec=fp16", f"training.resume_run={run.run_id}")
    write_checkpoint(tmp_path / run.run_id, 8)
    assert record(config(tmp_path, *resumed)) == run
    write_checkpoint(tmp_path / run.run_id, 16)
    record(config(tmp_path, *resumed, "optimizer.learning_rate_per_256=0.5"))
    record(config(tmp_path, *resumed, "optimizer.learning_rate_per_256=0.5"))
    before = settings_of(config(tmp_path), MANIFEST)
    table = json.loads(artifact_text(module_mlflow_store, run.run_id, "settings_history.json"))
    rows = [dict(zip(table["columns"], row, strict=True)) for row in table["data"]]
    changed = {(row["step"], row["setting"], row["before"], row["after"]) for row in rows}
    rate = "optimizer.learning_rate_per_256"
    assert {
        (8, "exchange.codec.name", before["exchange.codec.name"], "fp16"),
        (16, rate, before[rate], "0.5"),
    } <= changed
    assert len(rows) == len(changed)
    stored = MlflowClient(module_mlflow_store).get_run(run.run_id)
    assert stored.data.tags[f"changed.{rate}"] == "0.5 from step 16"
    assert stored.data.tags["codec"] == "fp16", "what is found by the tag is what holds now"
    assert stored.data.params[rate] == before[rate]
    assert "learning_rate_per_256: 0.5" in artifact_text(module_mlflow_store, run.run_id, "config.yaml")
    # A codec brings settings of its own, and takes them away; a value that was changed back is told too.
    write_checkpoint(tmp_path / run.run_id, 24)
    record(config(tmp_path, "exchange.codec=powersgd", "exchange.codec.rank=2", resumed[1]))
    write_checkpoint(tmp_path / run.run_id, 32)
    record(config(tmp_path, *resumed))
    tags = MlflowClient(module_mlflow_store).get_run(run.run_id).data.tags
    assert tags["changed.exchange.codec.rank"] == "2 from step 24, not set from step 32"
    assert tags["changed.exchange.codec.name"] == "fp16 from step 8, powersgd from step 24, fp16 from step 32"
    assert tags[f"changed.{rate}"] == f"0.5 from step 16, {before[rate]} from step 24"


def test_an_attempt_on_fewer_workers_is_recorded_with_its_step(
    module_mlflow_store: str, tmp_path: Path, artifact_text: Callable[[str, str, str], str]
) -> None:
    chosen = config(tmp_path, "training.global_batch_size=8", "training.batch_size_per_worker=4")
    with recorded_run(chosen, MANIFEST, ignore) as driver:
        driver.attempt(Attempt(1, 2))
        write_checkpoint(driver.folder, 8)
        driver.attempt(Attempt(2, 1, "lost: executor 1"))
        write_checkpoint(driver.folder, 16)
        driver.attempt(Attempt(3, 2, "slots are back", grown=1))
        driver.attempt(Attempt(4, 1, "lost: executor 2", grown=1))
        driver.finish(SUMMARY)
    stored = MlflowClient(module_mlflow_store).get_run(driver.run.run_id)
    tags = {name: value for name, value in stored.data.tags.items() if "workers" in name or "changed" in name}
    assert tags == {
        "workers": "1",
        "attempt_1_workers": "2",
        "attempt_2_workers": "1",
        "attempt_3_workers": "2",
        "attempt_4_workers": "1",
        "changed.launch.num_workers": "1 from step 8",  # again on one worker after step 16, with no step on two
        "changed.micro_batches_per_step": "2 from step 8",
    }
    table = json.loads(artifact_text(module_mlflow_store, driver.run.run_id, "settings_history.json"))
    rows = [row for row in table["data"] if "launch.num_workers" in row]
    assert rows == [
        [8, "launch.num_workers", "2", "1"],
        [16, "launch.num_workers", "1", "2"],
        [16, "launch.num_workers", "2", "1"],
    ]


def test_a_value_that_no_step_was_taken_with_is_not_told(module_mlflow_store: str, tmp_path: Path) -> None:
    run = record(config(tmp_path))
    write_checkpoint(tmp_path / run.run_id, 8)
    for smoothing in ("0.1", "0.2"):
        record(config(tmp_path, f"training.label_smoothing={smoothing}", f"training.resume_run={run.run_id}"))
    tags = MlflowClient(module_mlflow_store).get_run(run.run_id).data.tags
    assert tags["changed.training.label_smoothing"] == "0.2 from step 8"
    # What only another version of the package has is no change.
    file = tmp_path / run.run_id / "settings.json"
    known = json.loads(file.read_text())
    del known["now"]["training.seed"]
    file.write_text(json.dumps({**known, "version": "0.0.1"}))
    record(config(tmp_path, "training.label_smoothing=0.2", f"training.resume_run={run.run_id}"))
    tags = MlflowClient(module_mlflow_store).get_run(run.run_id).data.tags
    assert "changed.training.seed" not in tags


def test_a_run_of_an_earlier_version_is_compared_with_its_parameters(module_mlflow_store: str, tmp_path: Path) -> None:
    run = record(config(tmp_path))
    (tmp_path / run.run_id / "settings.json").unlink()
    record(config(tmp_path, "training.label_smoothing=0.1", f"training.resume_run={run.run_id}"))
    tags = MlflowClient(module_mlflow_store).get_run(run.run_id).data.tags
    assert tags["changed.training.label_smoothing"] == "0.1 from step 0"


@pytest.mark.parametrize(("error", "status"), [(KeyboardInterrupt(), "KILLED"), (RuntimeError("lost"), "FAILED")])
def test_a_run_ends_as_its_training_does_and_a_resumed_one_finishes(
    module_mlflow_store: str, tmp_path: Path, error: BaseException, status: str
) -> None:
    client = MlflowClient(module_mlflow_store)

    def dies_in_rank_0(driver: DriverRecord) -> None:
        # Rank 0 leaves a journal; the steps after its checkpoint are to be repeated.
        rank = RunWriter(driver.run, rank_journal(driver.folder))
        rank.metrics({"train/loss": 0.5}, step=8, after_step=8)
        rank.hold(8)
        rank.metrics({"train/loss": 0.4}, step=16, after_step=16)
        try:
            raise error
        finally:
            driver.finish(None)

    with pytest.raises(type(error)), recorded_run(config(tmp_path), MANIFEST, ignore) as driver:
        dies_in_rank_0(driver)
    run_id = driver.run.run_id
    assert client.get_run(run_id).info.status == status
    assert [metric.step for metric in client.get_metric_history(run_id, "train/loss")] == [8]
    with recorded_run(config(tmp_path, f"training.resume_run={run_id}"), MANIFEST, ignore) as driver:
        assert client.get_run(run_id).info.status == "RUNNING"
        assert driver.name == client.get_run(run_id).info.run_name != run_id
        driver.finish(SUMMARY)
    assert client.get_run(run_id).info.status == "FINISHED"


def test_two_drivers_cannot_train_one_run(module_mlflow_store: str, tmp_path: Path) -> None:
    client = MlflowClient(module_mlflow_store)
    with recorded_run(config(tmp_path), MANIFEST, ignore) as driver:
        run_id = driver.run.run_id
        resumed = config(tmp_path, f"training.resume_run={run_id}")
        with pytest.raises(ValueError, match=rf"run {run_id} is being trained or written by process \d+ on"):
            record(resumed)
        assert client.get_run(run_id).info.status == "RUNNING", "the second driver does not end the run of the first"
        driver.finish(SUMMARY)
    with recorded_run(resumed, MANIFEST, ignore) as driver:
        with pytest.raises(ValueError, match=rf"run {run_id} is being trained"):
            record(resumed)
        driver.finish(SUMMARY)
    assert client.get_run(run_id).info.status == "FINISHED"


def test_a_diverged_run_says_so_and_a_new_run_takes_tags(module_mlflow_store: str, tmp_path: Path) -> None:
    outcomes = [
        Outcome(0, "here", "exception", "FloatingPointError: the loss is nan at step 7\nthe rest", 1),
        Outcome(1, "here", "stopped", "stopped"),
    ]
    with (
        pytest.raises(WorkerError),
        recorded_run(config(tmp_path), MANIFEST, ignore, {"mlflow.parentRunId": "parent"}) as driver,
    ):
        raise WorkerError(outcomes)
    stored = MlflowClient(module_mlflow_store).get_run(driver.run.run_id)
    assert stored.data.tags["diverged"] == "FloatingPointError: the loss is nan at step 7"
    assert stored.data.tags["mlflow.parentRunId"] == "parent"
    assert stored.info.status == "FAILED"
    other = WorkerError([Outcome(0, "here", "exception", "ValueError: no", 1)])
    with pytest.raises(WorkerError), recorded_run(config(tmp_path), MANIFEST, ignore) as driver:
        raise other
    assert "diverged" not in MlflowClient(module_mlflow_store).get_run(driver.run.run_id).data.tags


def test_a_run_that_goes_on_after_a_divergence_is_told_as_its_latest_attempt_ends(
    module_mlflow_store: str, tmp_path: Path
) -> None:
    diverged = WorkerError([Outcome(0, "here", "exception", "FloatingPointError: the loss is nan at step 7", 1)])
    client = MlflowClient(module_mlflow_store)

    def tag_after(error: BaseException, *settings: str) -> tuple[str, str | None]:
        with pytest.raises(type(error)), recorded_run(config(tmp_path, *settings), MANIFEST, ignore) as driver:
            raise error
        return driver.run.run_id, client.get_run(driver.run.run_id).data.tags.get("diverged")

    run_id, tag = tag_after(diverged)
    assert tag == "FloatingPointError: the loss is nan at step 7"
    resumed = f"training.resume_run={run_id}"
    assert tag_after(KeyboardInterrupt(), resumed) == (run_id, "")
    assert not compared_run(recorded_training(run_id, groups=(), metrics=()), "groundswell").is_diverged
    assert tag_after(diverged, resumed) == (run_id, "FloatingPointError: the loss is nan at step 7")


@pytest.mark.parametrize("told_by", ["store", "folder"])
def test_a_resumed_run_does_not_keep_the_tag_of_a_driver_that_died(
    told_by: str, module_mlflow_store: str, tmp_path: Path
) -> None:
    client = MlflowClient(module_mlflow_store)
    run = record(config(tmp_path))
    resumed = config(tmp_path, f"training.resume_run={run.run_id}")
    record(resumed)
    assert "driver" not in client.get_run(run.run_id).data.tags, "it ended its run itself"
    if told_by == "store":
        runs.set_tags(run, DRIVER_DIED)
    else:
        update_local_run(tmp_path / run.run_id, status="RUNNING")
    with recorded_run(resumed, MANIFEST, ignore) as driver:
        assert client.get_run(run.run_id).data.tags["driver"] == ""
        driver.finish(SUMMARY)


def test_steps_that_led_to_another_ranks_divergence_are_recorded_and_those_to_its_death_are_not(
    module_mlflow_store: str, tmp_path: Path
) -> None:
    client = MlflowClient(module_mlflow_store)

    def steps_after(*, has_diverged: bool) -> list[int]:
        with recorded_run(config(tmp_path), MANIFEST, ignore) as driver:
            rank = Record(driver.run, tmp_path / driver.run.run_id / "checkpoints", lambda step: 0.1, start_step=0)
            for step in range(3):
                rank.write_step(step, 0.5, np.zeros(len(METRICS)))
            rank.write_unsaved_steps()
            driver.finish(None, has_diverged=has_diverged)
        points = client.get_metric_history(driver.run.run_id, "train/step_loss")
        return [point.step for point in points]

    assert steps_after(has_diverged=True) == [0, 1, 2]
    assert steps_after(has_diverged=False) == [], "they are trained again"


def test_a_training_that_could_not_be_recorded_says_how_to_finish_it(module_mlflow_store: str, tmp_path: Path) -> None:
    unrecorded = TrainingSummary("", [{}], "step-00000008.npz", 1, "no answer within 5 s")
    with pytest.raises(
        TrackingError,
        match=r"(?s)has not taken all of it \(no answer within 5 s\).*step-00000008.*--set training\.resume_run=\w{32}",
    ):
        record(config(tmp_path, "tracking.experiment=unrecorded"), unrecorded)
    failed = runs.unfinished_runs("unrecorded")[0]
    assert failed.status == "FAILED"
    synced = sync(tmp_path / failed.run_id, lambda folder, run: "runs:/1/model")
    assert (synced.status, synced.model_uri) == ("FINISHED", "runs:/1/model")


def test_a_run_without_mlflow_is_kept_resumed_and_written_later(
    module_mlflow_store: str, tmp_path: Path, artifact_text: Callable[[str, str, str], str]
) -> None:
    offline = config(tmp_path, "tracking.offline=true", "tracking.experiment=offline")
    unrecorded = TrainingSummary("", [{}], "step-00000008.npz", 1, "tracking.offline=true")

    def train(chosen: RunConfig, summary: TrainingSummary | None = unrecorded) -> TrackedRun:
        with recorded_run(chosen, MANIFEST, ignore) as driver:
            assert driver.run.is_offline
            driver.attempt(Attempt(1, 2))
            if summary is None:
                raise RuntimeError("lost")
            driver.finish(summary)
        return driver.run

    with pytest.raises(RuntimeError, match="lost"):
        train(offline, None)
    (folder,) = tmp_path.iterdir()
    write_checkpoint(folder, 8)
    assert newest_resumable(offline).run_id == folder.name
    resuming = f"training.resume_run={folder.name}"
    assert train(config(tmp_path, "tracking.offline=true", resuming, "training.seed=5")).run_id == folder.name
    assert MlflowClient(module_mlflow_store).get_experiment_by_name("offline") is None

    # Continued with MLflow: it gets the run first.
    online = with_stored_run(config(tmp_path, resuming))
    run_id = str(online.training.resume_run)
    assert run_id != folder.name
    assert (tmp_path / run_id / "checkpoints").is_dir()
    assert record(online).run_id == run_id
    stored = MlflowClient(module_mlflow_store).get_run(run_id)
    assert (stored.info.status, stored.data.tags["changed.training.seed"]) == ("FINISHED", "0 from step 8")
    assert "seed: 0" in artifact_text(module_mlflow_store, run_id, "config.yaml")
    assert with_stored_run(config(tmp_path)) == config(tmp_path)
    assert unsynced(tmp_path) == []


def test_latest_is_the_newest_unfinished_run_with_checkpoints(module_mlflow_store: str, tmp_path: Path) -> None:
    chosen = config(tmp_path, "tracking.experiment=latest")
    with pytest.raises(ValueError, match="resume_run=latest: 0 runs of experiment 'latest'"):
        newest_resumable(chosen)
    made = [runs.start_run("latest", None, {}, {}) for _ in range(2)]
    runs.end_run(made[1], "KILLED")
    finished = record(chosen).run_id
    with pytest.raises(ValueError, match=r"latest: 2 runs of experiment .* and none has checkpoints under"):
        newest_resumable(chosen)
    for run_id in (made[0].run_id, finished):
        write_checkpoint(tmp_path / run_id, 4)
    # A driver that was killed by SIGKILL leaves its run as running.
    found = newest_resumable(chosen)
    assert (found.run_id, found.status) == (made[0].run_id, "RUNNING")
    write_checkpoint(tmp_path / made[1].run_id, 4)
    assert newest_resumable(chosen).run_id == made[1].run_id


def test_the_settings_of_a_run_are_kept_beside_its_checkpoints(module_mlflow_store: str, tmp_path: Path) -> None:
    run = record(config(tmp_path))
    kept = json.loads((tmp_path / run.run_id / "settings.json").read_text())
    assert kept == {
        "version": revision.package_version(),
        "now": settings_of(config(tmp_path), MANIFEST),
        "changes": [],
    }
    assert not (tmp_path / run.run_id / "journal").exists()


def test_a_run_whose_folder_cannot_be_held_does_not_stay_running(
    module_mlflow_store: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    @contextmanager
    def away(place: object) -> Iterator[None]:
        raise StorageError("the storage is away")
        yield

    monkeypatch.setattr("pipelines.training.driver_record.held_run", away)
    with pytest.raises(StorageError, match="the storage is away"):
        record(config(tmp_path, "tracking.experiment=held"))
    client = MlflowClient(module_mlflow_store)
    experiment = client.get_experiment_by_name("held")
    assert experiment is not None
    assert [run.info.status for run in client.search_runs([experiment.experiment_id])] == ["FAILED"]


def test_latest_passes_over_a_run_whose_description_cannot_be_read(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    chosen = config(tmp_path, "tracking.offline=true")

    def fail() -> None:
        with recorded_run(chosen, MANIFEST, ignore) as driver:
            write_checkpoint(driver.folder, 4)
            raise RuntimeError("on its way")

    with pytest.raises(RuntimeError, match="on its way"):
        fail()
    (folder,) = tmp_path.iterdir()
    (tmp_path / "damaged").mkdir()
    (tmp_path / "damaged" / "run.json").write_text('{"run_id": ')
    (tmp_path / "unreadable" / "run.json").mkdir(parents=True)  # as another user's is, but for root
    assert newest_resumable(chosen).run_id == folder.name
    assert caplog.text.count("passed over: ") == 2
