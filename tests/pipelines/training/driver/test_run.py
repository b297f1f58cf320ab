"""What the driver writes to a run, in a real store."""

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NoReturn

import pytest
from mlflow import MlflowClient

from conf.load import load
from conf.schema import RunConfig
from models.compression.exchange.figures import ExchangeFigures
from pipelines.comparison.run import compared_run
from pipelines.launch.driver.failure import Outcome, WorkerError
from pipelines.launch.runner import Attempt
from pipelines.storage.folder import StorageError
from pipelines.tracking.journal.journal import rank_journal
from pipelines.tracking.journal.local_run import update_local_run
from pipelines.tracking.journal.sync import DRIVER_DIED, sync, unsynced
from pipelines.tracking.journal.writer import RunWriter
from pipelines.tracking.store import queries, revision, runs
from pipelines.tracking.store.recorded import recorded_training
from pipelines.tracking.store.store import TrackedRun, TrackingError
from pipelines.training.driver.resumable import newest_resumable, with_stored_run
from pipelines.training.driver.run import DriverRecorder, recorded_run
from pipelines.training.ranks.results import TrainingSummary
from pipelines.training.record.run_recorder import RunRecorder
from pipelines.training.setup.description import settings_of
from tests.pipelines.training.manifests import rgb_manifest

pytestmark = pytest.mark.usefixtures("module_mlflow_store")

MANIFEST = rgb_manifest(archive="eurosat_rgb", settings={"seed": 7})
SUMMARY = TrainingSummary("runs:/1/model", [{"train/loss": 0.5}], "step-00000008.npz", 1)


@pytest.fixture(autouse=True)
def _training_output(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Runs have their folders in the test's."""
    monkeypatch.chdir(tmp_path)


def config(*settings: str) -> RunConfig:
    return load("smoke", ["archive.kind=bigearthnet_v2", f"training.output={Path.cwd()}", *settings])


def newest(*settings: str) -> Any:
    """The run that `training.resume_run=latest` continues."""
    chosen = config(*settings)
    return newest_resumable(chosen.training.output, chosen.tracking)


def resuming(run_id: str) -> str:
    return f"training.resume_run={run_id}"


@contextmanager
def recorded(*settings: str, tags: dict[str, str] | None = None) -> Iterator[DriverRecorder]:
    with recorded_run(config(*settings), MANIFEST, lambda news, reason: None, tags) as driver:
        yield driver


def record(*settings: str, summary: TrainingSummary | None = SUMMARY) -> str:
    """Record a training of one attempt; its run's identifier."""
    with recorded(*settings) as driver:
        driver.attempt(Attempt(1, 2))
        driver.finish(summary)
    return driver.run.run_id


def fail(error: BaseException, *settings: str, tags: dict[str, str] | None = None) -> str:
    """Record a training that ends with an error; its run's identifier."""
    with pytest.raises(type(error)), recorded(*settings, tags=tags) as driver:
        raise error
    return driver.run.run_id


def write_checkpoint(folder: Path, step: int) -> None:
    (folder / "checkpoints").mkdir(parents=True, exist_ok=True)
    (folder / "checkpoints" / f"step-{step:08d}.npz").touch()


def test_what_ran_is_recorded_and_not_the_configured_archive(
    client: MlflowClient, tmp_path: Path, artifact_text: Callable[[str, str, str], str]
) -> None:
    run_id = record()
    stored = client.get_run(run_id)
    assert {name: value for name, value in stored.data.params.items() if name.startswith(("archive.", "prepare."))} == {
        "archive.kind": "eurosat_rgb",
        "archive.source_fingerprint": "abc",
        "prepare.seed": "7",
    }
    assert (stored.info.status, stored.data.tags["attempt"]) == ("FINISHED", "1")
    text = artifact_text(client.tracking_uri, run_id, "config.yaml")
    first, others = text.split("\n", 1)
    assert (first, "bigearthnet_v2" in others) == ("# dataset of archive eurosat_rgb, source fingerprint abc", False)
    (tmp_path / "again.yaml").write_text(text)
    again, before = (each.model_copy(update={"archive": None}) for each in (load(f"{tmp_path}/again.yaml"), config()))
    assert again == before
    # Its settings are kept beside its checkpoints, and nothing is left of its journal.
    kept = {"version": revision.package_version(), "now": settings_of(config(), MANIFEST), "changes": []}
    assert (json.loads(Path(run_id, "settings.json").read_text()), Path(run_id, "journal").exists()) == (kept, False)


def test_what_a_resumed_run_changes_is_recorded_with_its_step(
    client: MlflowClient, artifact_text: Callable[[str, str, str], str]
) -> None:
    run_id = record()
    codec, rate = "exchange.codec=fp16", "optimizer.learning_rate_per_256"
    for step, settings in ((8, [codec]), (16, [codec, f"{rate}=0.5"]), (16, [codec, f"{rate}=0.5"])):
        write_checkpoint(Path(run_id), step)
        assert record(*settings, resuming(run_id)) == run_id
    before = settings_of(config(), MANIFEST)
    table = json.loads(artifact_text(client.tracking_uri, run_id, "settings_history.json"))
    rows = [dict(zip(table["columns"], row, strict=True)) for row in table["data"]]
    changed = {(row["step"], row["setting"], row["before"], row["after"]) for row in rows}
    assert len(rows) == len(changed)
    assert changed >= {
        (8, "exchange.codec.name", before["exchange.codec.name"], "fp16"),
        (16, rate, before[rate], "0.5"),
    }
    stored = client.get_run(run_id)
    # What is found by the tag of the codec is what holds now.
    assert (stored.data.tags, stored.data.params[rate]) == (
        stored.data.tags | {f"changed.{rate}": "0.5 from step 16", "codec": "fp16"},
        before[rate],
    )
    assert "learning_rate_per_256: 0.5" in artifact_text(client.tracking_uri, run_id, "config.yaml")
    # A codec brings settings of its own, and takes them away; a value that was changed back is told too.
    for step, settings in ((24, ["exchange.codec=powersgd", "exchange.codec.rank=2"]), (32, [codec])):
        write_checkpoint(Path(run_id), step)
        record(*settings, resuming(run_id))
    tags = client.get_run(run_id).data.tags
    assert tags == tags | {
        "changed.exchange.codec.rank": "2 from step 24, not set from step 32",
        "changed.exchange.codec.name": "fp16 from step 8, powersgd from step 24, fp16 from step 32",
        f"changed.{rate}": f"0.5 from step 16, {before[rate]} from step 24",
    }


def test_an_attempt_on_fewer_workers_is_recorded_with_its_step(
    client: MlflowClient, artifact_text: Callable[[str, str, str], str]
) -> None:
    with recorded("training.global_batch_size=8", "training.batch_size_per_worker=4") as driver:
        driver.attempt(Attempt(1, 2))
        write_checkpoint(driver.folder, 8)
        driver.attempt(Attempt(2, 1, "lost: executor 1"))
        write_checkpoint(driver.folder, 16)
        driver.attempt(Attempt(3, 2, "slots are back", grown=1))
        driver.attempt(Attempt(4, 1, "lost: executor 2", grown=1))
        driver.finish(SUMMARY)
    tags = client.get_run(driver.run.run_id).data.tags
    assert {name: value for name, value in tags.items() if "workers" in name or "changed" in name} == {
        "workers": "1",
        "attempt_1_workers": "2",
        "attempt_2_workers": "1",
        "attempt_3_workers": "2",
        "attempt_4_workers": "1",
        "changed.launch.num_workers": "1 from step 8",  # again on one worker after step 16, with no step on two
        "changed.micro_batches_per_step": "2 from step 8",
    }
    table = json.loads(artifact_text(client.tracking_uri, driver.run.run_id, "settings_history.json"))
    assert [row for row in table["data"] if "launch.num_workers" in row] == [
        [8, "launch.num_workers", "2", "1"],
        [16, "launch.num_workers", "1", "2"],
        [16, "launch.num_workers", "2", "1"],
    ]


def test_a_value_that_no_step_was_taken_with_is_not_told(client: MlflowClient) -> None:
    run_id = record()
    write_checkpoint(Path(run_id), 8)
    for smoothing in ("0.1", "0.2"):
        record(f"training.label_smoothing={smoothing}", resuming(run_id))
    # What only another version of the package has is no change.
    file = Path(run_id, "settings.json")
    known = json.loads(file.read_text())
    del known["now"]["training.seed"]
    file.write_text(json.dumps({**known, "version": "0.0.1"}))
    record("training.label_smoothing=0.2", resuming(run_id))
    tags = client.get_run(run_id).data.tags
    assert tags["changed.training.label_smoothing"] == "0.2 from step 8"
    assert "changed.training.seed" not in tags


def test_a_run_without_its_description_is_not_continued(client: MlflowClient) -> None:
    run_id = record()
    Path(run_id, "run.json").unlink()
    with pytest.raises(ValueError, match=rf"{run_id} has no run\.json, as every run's folder has: start a new run"):
        record(resuming(run_id))
    assert client.get_run(run_id).info.status == "FINISHED"


@pytest.mark.parametrize(("error", "status"), [(KeyboardInterrupt(), "KILLED"), (RuntimeError("lost"), "FAILED")])
def test_a_run_ends_as_its_training_does_and_a_resumed_one_finishes(
    client: MlflowClient, error: BaseException, status: str
) -> None:
    def dies_in_rank_0(driver: DriverRecorder) -> None:
        # Rank 0 leaves a journal; the steps after its checkpoint are to be repeated.
        rank = RunWriter(driver.run, rank_journal(driver.folder))
        rank.metrics({"train/loss": 0.5}, step=8, after_step=8)
        rank.checkpointed(8)
        rank.metrics({"train/loss": 0.4}, step=16, after_step=16)
        driver.finish(None)
        raise error

    with pytest.raises(type(error)), recorded() as driver:
        dies_in_rank_0(driver)
    run_id = driver.run.run_id
    assert (
        client.get_run(run_id).info.status,
        [metric.step for metric in client.get_metric_history(run_id, "train/loss")],
    ) == (status, [8])
    with recorded(resuming(run_id)) as driver:
        resumed = client.get_run(run_id).info
        assert (resumed.status, resumed.run_name) == ("RUNNING", driver.name)
        assert driver.name != run_id
        driver.finish(SUMMARY)
    assert client.get_run(run_id).info.status == "FINISHED"


@pytest.mark.parametrize("is_resumed", [False, True])
def test_two_drivers_cannot_train_one_run(client: MlflowClient, is_resumed: bool) -> None:
    settings = [resuming(record())] if is_resumed else []
    with recorded(*settings) as driver:
        run_id = driver.run.run_id
        with pytest.raises(ValueError, match=rf"run {run_id} is being trained or written by process \d+ on"):
            record(resuming(run_id))
        assert client.get_run(run_id).info.status == "RUNNING", "the second one does not end the run of the first"
        driver.finish(SUMMARY)
    assert client.get_run(run_id).info.status == "FINISHED"


def lost_by(message: str) -> WorkerError:
    """The end of a training where rank 0 fails, and rank 1 stops for it."""
    return WorkerError([Outcome(0, "here", "exception", message, 1), Outcome(1, "here", "stopped", "stopped")])


def test_a_diverged_run_says_so_and_a_new_run_takes_tags(client: MlflowClient) -> None:
    diverged = lost_by("FloatingPointError: the loss is nan at step 7\nthe rest")
    stored = client.get_run(fail(diverged, tags={"mlflow.parentRunId": "parent"}))
    told = {"diverged": "FloatingPointError: the loss is nan at step 7", "mlflow.parentRunId": "parent"}
    assert (stored.data.tags, stored.info.status) == (stored.data.tags | told, "FAILED")
    assert "diverged" not in client.get_run(fail(lost_by("ValueError: no"))).data.tags
    # Where it goes on, it is told as its latest attempt ends.
    run_id = stored.info.run_id
    for error, tag in ((KeyboardInterrupt(), ""), (diverged, told["diverged"])):
        fail(error, resuming(run_id))
        assert (
            client.get_run(run_id).data.tags["diverged"],
            compared_run(recorded_training(run_id, groups=(), metrics=()), "groundswell").is_diverged,
        ) == (tag, bool(tag))


@pytest.mark.parametrize("told_by", ["store", "folder"])
def test_a_resumed_run_does_not_keep_the_tag_of_a_driver_that_died(told_by: str, client: MlflowClient) -> None:
    run_id = record()
    record(resuming(run_id))
    assert "driver" not in client.get_run(run_id).data.tags, "it ended its run itself"
    if told_by == "store":
        runs.set_tags(TrackedRun(client.tracking_uri, run_id), DRIVER_DIED)
    else:
        update_local_run(Path(run_id), status="RUNNING")
    with recorded(resuming(run_id)) as driver:
        assert client.get_run(run_id).data.tags["driver"] == ""
        driver.finish(SUMMARY)


@pytest.mark.parametrize(("has_diverged", "steps"), [(True, [0, 1, 2]), (False, [])])  # else they are trained again
def test_steps_that_led_to_another_ranks_divergence_are_recorded_and_those_to_its_death_are_not(
    client: MlflowClient, has_diverged: bool, steps: list[int]
) -> None:
    with recorded() as driver:
        rank = RunRecorder(driver.run, driver.checkpoints, lambda step: 0.1, start_step=0)
        for step in range(3):
            rank.write_step(step, 0.5, ExchangeFigures(0, 1, 0, 0, 0, 0))
        rank.write_unsaved_steps()
        driver.finish(None, has_diverged=has_diverged)
    assert [point.step for point in client.get_metric_history(driver.run.run_id, "train/step_loss")] == steps


def test_a_training_that_could_not_be_recorded_says_how_to_finish_it() -> None:
    with pytest.raises(
        TrackingError,
        match=r"(?s)has not taken all of it \(no answer within 5 s\).*step-00000008.*--set training\.resume_run=\w{32}",
    ):
        record("tracking.experiment=unrecorded", summary=unrecorded("no answer within 5 s"))
    (failed,) = queries.unfinished_runs("unrecorded")
    synced = sync(Path(failed.run_id), lambda folder, run: "runs:/1/model")
    assert (failed.status, synced.status, synced.model_uri) == ("FAILED", "FINISHED", "runs:/1/model")


def unrecorded(reason: str) -> TrainingSummary:
    return TrainingSummary("", [{}], "step-00000008.npz", 1, reason)


def test_a_run_without_mlflow_is_kept_resumed_and_written_later(
    client: MlflowClient, tmp_path: Path, artifact_text: Callable[[str, str, str], str]
) -> None:
    offline = ["tracking.offline=true", "tracking.experiment=offline"]
    lost = fail(RuntimeError("lost"), *offline)
    write_checkpoint(Path(lost), 8)
    assert newest(*offline).run_id == lost
    more = [*offline[:1], resuming(lost), "training.seed=5"]
    assert (
        record(*more, summary=unrecorded("tracking.offline=true")),
        [path.name for path in tmp_path.iterdir()],
        client.get_experiment_by_name("offline"),
    ) == (lost, [lost], None)

    # Continued with MLflow: it gets the run first.
    run_id = str(with_stored_run(config(resuming(lost))).training.resume_run)
    assert (run_id == lost, Path(run_id, "checkpoints").is_dir(), record(resuming(run_id))) == (False, True, run_id)
    stored = client.get_run(run_id)
    assert (stored.info.status, stored.data.tags["changed.training.seed"]) == ("FINISHED", "0 from step 8")
    assert "seed: 0" in artifact_text(client.tracking_uri, run_id, "config.yaml")
    assert (with_stored_run(config()), unsynced(tmp_path)) == (config(), [])


def test_latest_is_the_newest_unfinished_run_with_checkpoints() -> None:
    with pytest.raises(ValueError, match=r"resume_run=latest: no run to resume in .* 'latest' \(0\)"):
        newest("tracking.experiment=latest")
    older, newer = (runs.start_run("latest", None, {}, {}) for _ in range(2))
    runs.end_run(newer, "KILLED")
    finished = record("tracking.experiment=latest")
    with pytest.raises(ValueError, match=r"latest: no run to resume in .* unfinished runs of experiment .* \(2\)"):
        newest("tracking.experiment=latest")
    write_checkpoint(Path(finished), 4)
    # A driver that was killed by SIGKILL leaves its run as running.
    for run, status in ((older, "RUNNING"), (newer, "KILLED")):
        write_checkpoint(Path(run.run_id), 4)
        found = newest("tracking.experiment=latest")
        assert (found.run_id, found.status) == (run.run_id, status)


def test_a_run_whose_folder_cannot_be_held_does_not_stay_running(
    client: MlflowClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    def away(place: object) -> NoReturn:
        raise StorageError("the storage is away")

    monkeypatch.setattr("pipelines.training.driver.run.locked_run", away)
    with pytest.raises(StorageError, match="the storage is away"):
        record("tracking.experiment=held")
    experiment: Any = client.get_experiment_by_name("held")
    assert [run.info.status for run in client.search_runs([experiment.experiment_id])] == ["FAILED"]


def test_latest_passes_over_a_run_whose_description_cannot_be_read(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    run_id = fail(RuntimeError("on its way"), "tracking.offline=true")
    write_checkpoint(Path(run_id), 4)
    for name in ("damaged", "unreadable/run.json"):
        (tmp_path / name).mkdir(parents=True)  # the latter as another user's is, but for root
    (tmp_path / "damaged" / "run.json").write_text('{"run_id": ')
    assert (newest("tracking.offline=true").run_id, caplog.text.count("passed over: ")) == (run_id, 2)
