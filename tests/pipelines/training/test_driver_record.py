"""What the driver writes to a run, in a real store."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest
from mlflow import MlflowClient

from conf.load import load
from conf.schema import RunConfig
from pipelines.dataset.manifest import Manifest
from pipelines.launch.runner import Attempt
from pipelines.sample import ImageGroup
from pipelines.tracking import runs
from pipelines.tracking.journal import rank_journal
from pipelines.tracking.store import TrackedRun, TrackingError
from pipelines.tracking.writer import RunWriter
from pipelines.training.driver_record import DriverRecord, newest_resumable, recorded_run, settings_of
from pipelines.training.results import TrainingSummary

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


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> str:
    return f"sqlite:///{tmp_path_factory.mktemp('store') / 'mlflow.db'}"


@pytest.fixture(autouse=True)
def mlflow_store(store: str, monkeypatch: pytest.MonkeyPatch) -> str:
    """One store for all tests of this module: making one takes seconds."""
    monkeypatch.setenv("MLFLOW_TRACKING_URI", store)
    return store


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
    mlflow_store: str, tmp_path: Path, artifact_text: Callable[[str, str, str], str]
) -> None:
    run = record(config(tmp_path))
    stored = MlflowClient(mlflow_store).get_run(run.run_id)
    parameters = stored.data.params
    assert {name: value for name, value in parameters.items() if name.startswith(("archive.", "prepare."))} == {
        "archive.kind": "eurosat_rgb",
        "archive.source_fingerprint": "abc",
        "prepare.seed": "7",
    }
    assert (stored.info.status, stored.data.tags["attempt"]) == ("FINISHED", "1")
    text = artifact_text(mlflow_store, run.run_id, "config.yaml")
    assert "bigearthnet_v2" not in text
    assert text.startswith("# dataset of archive eurosat_rgb, source fingerprint abc\n")
    file = tmp_path / "again.yaml"
    file.write_text(text)
    assert load(str(file)).model_copy(update={"archive": None}) == config(tmp_path).model_copy(update={"archive": None})


def test_what_a_resumed_run_changes_is_recorded_with_its_step(
    mlflow_store: str, tmp_path: Path, artifact_text: Callable[[str, str, str], str]
) -> None:
    run = record(config(tmp_path))
    resumed = ("exchange.codec=fp16", f"training.resume_run={run.run_id}")
    write_checkpoint(tmp_path / run.run_id, 8)
    assert record(config(tmp_path, *resumed)) == run
    write_checkpoint(tmp_path / run.run_id, 16)
    record(config(tmp_path, *resumed, "optimizer.learning_rate_per_256=0.5"))
    record(config(tmp_path, *resumed, "optimizer.learning_rate_per_256=0.5"))
    before = settings_of(config(tmp_path), MANIFEST)
    table = json.loads(artifact_text(mlflow_store, run.run_id, "settings_history.json"))
    rows = [dict(zip(table["columns"], row, strict=True)) for row in table["data"]]
    changed = {(row["step"], row["setting"], row["before"], row["after"]) for row in rows}
    rate = "optimizer.learning_rate_per_256"
    assert {
        (8, "exchange.codec.name", before["exchange.codec.name"], "fp16"),
        (16, rate, before[rate], "0.5"),
    } <= changed
    assert len(rows) == len(changed)
    stored = MlflowClient(mlflow_store).get_run(run.run_id)
    assert stored.data.tags[f"changed.{rate}"] == "0.5 from step 16"
    assert stored.data.params[rate] == before[rate]
    assert "learning_rate_per_256: 0.5" in artifact_text(mlflow_store, run.run_id, "config.yaml")


def test_a_run_of_an_earlier_version_is_compared_with_its_parameters(mlflow_store: str, tmp_path: Path) -> None:
    run = record(config(tmp_path))
    (tmp_path / run.run_id / "settings.json").unlink()
    record(config(tmp_path, "training.checkpoint_every_steps=3", f"training.resume_run={run.run_id}"))
    tags = MlflowClient(mlflow_store).get_run(run.run_id).data.tags
    assert tags["changed.training.checkpoint_every_steps"] == "3 from step 0"


@pytest.mark.parametrize(("error", "status"), [(KeyboardInterrupt(), "KILLED"), (RuntimeError("lost"), "FAILED")])
def test_a_run_ends_as_its_training_does_and_a_resumed_one_finishes(
    mlflow_store: str, tmp_path: Path, error: BaseException, status: str
) -> None:
    client = MlflowClient(mlflow_store)

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
        driver.finish(SUMMARY)
    assert client.get_run(run_id).info.status == "FINISHED"


def test_a_training_that_could_not_be_recorded_says_how_to_finish_it(mlflow_store: str, tmp_path: Path) -> None:
    unrecorded = TrainingSummary("", [{}], "step-00000008.npz", 1, "no answer within 5 s")
    with pytest.raises(
        TrackingError,
        match=r"(?s)has not taken all of it \(no answer within 5 s\).*step-00000008.*--set training\.resume_run=\w{32}",
    ):
        record(config(tmp_path, "tracking.experiment=unrecorded"), unrecorded)
    assert runs.unfinished_runs("unrecorded")[0].status == "FAILED"


def test_latest_is_the_newest_unfinished_run_with_checkpoints(mlflow_store: str, tmp_path: Path) -> None:
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


def test_the_settings_of_a_run_are_kept_beside_its_checkpoints(mlflow_store: str, tmp_path: Path) -> None:
    run = record(config(tmp_path))
    kept = json.loads((tmp_path / run.run_id / "settings.json").read_text())
    assert kept == {"now": settings_of(config(tmp_path), MANIFEST), "changes": []}
    assert not (tmp_path / run.run_id / "journal").exists()
