"""One rank of a run is asked to stop: all ranks stop after the same step, with a checkpoint."""

import os
import re
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import cloudpickle
import pytest
from mlflow import MlflowClient
from pyspark.sql import SparkSession

from conf.load import load
from jobs.train import TrainedRun, train
from pipelines.launch.driver.failure import RankLostError
from pipelines.launch.rank.report import attempt, stop_requested
from pipelines.storage.folder import Location
from pipelines.training import entry
from pipelines.training.checkpoint.state import newest_state

pytestmark = [pytest.mark.spark, pytest.mark.parallel, pytest.mark.long, pytest.mark.timeout(500)]


@pytest.fixture(scope="module", autouse=True)
def _by_value() -> None:
    cloudpickle.register_pickle_by_value(sys.modules[__name__])


def training_with_a_signal(config: Any, run: Any, checkpoints: Any, signal_once: Callable[[], None]) -> Any:
    """`entry.train`, but in the first attempt rank 1 calls a function before its first step."""
    from pipelines.training.worker import train_worker

    def ask_once(_: Any, step: int) -> None:
        if step == 0 and attempt() == 1 and os.environ["HOROVOD_RANK"] == "1":
            signal_once()
        if config.training.mode.name == "parameter_server":
            time.sleep(0.2)  # workers that do not wait for each other could end the epoch before they hear of it

    return train_worker(config, run, checkpoints, before_step=ask_once)


def training_that_is_asked_to_stop(config: Any, run: Any, checkpoints: Any) -> Any:
    """The process of rank 1 receives SIGTERM."""

    def end() -> None:
        os.kill(os.getpid(), signal.SIGTERM)
        while not stop_requested():
            time.sleep(0.01)

    return training_with_a_signal(config, run, checkpoints, end)


@pytest.mark.parametrize(
    ("mode", "step"),
    # The first step announces it, its sum is read in the second: all ranks stop after that one. Workers that do not
    # wait for each other stop after a step that none of them has done yet.
    [("synchronous", "2"), ("{name: parameter_server, synchrony: async}", r"(?:[4-9]|1\d)")],
    ids=["synchronous", "async"],
)
def test_all_ranks_stop_after_the_same_step(
    mode: str,
    step: str,
    train_small: Callable[..., TrainedRun],
    tmp_path: Path,
    mlflow_store: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    batches = ["training.batch_size_per_worker=1"] if "server" in mode else []
    monkeypatch.setattr(entry, "train", training_that_is_asked_to_stop)
    text = rf"stopped after step ({step}); continue from .*step-0+\1.npz with training.resume_run=\w+"
    with pytest.raises(RankLostError, match=text):
        train_small("training.epochs=1", f"training.mode={mode}", *batches)
    (folder,) = (path for path in (tmp_path / "out").iterdir() if path.is_dir())
    assert MlflowClient(mlflow_store).get_run(folder.name).info.status == "KILLED"
    state = newest_state(Location.at(folder / "checkpoints"))[1]
    assert state.is_within_an_epoch
    assert state.epoch_seconds > 0
    assert state.epoch_payload_bytes > 0


def training_that_is_killed(config: Any, run: Any, checkpoints: Any) -> Any:
    """The process of rank 1 is killed, as the kernel does where memory is short."""
    return training_with_a_signal(config, run, checkpoints, lambda: os.kill(os.getpid(), signal.SIGKILL))


def test_what_memory_a_killed_rank_needs_is_said(
    train_small: Callable[..., TrainedRun], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(entry, "train", training_that_is_killed)
    with pytest.raises(RankLostError):
        train_small("training.epochs=1")
    (line,) = [line for line in capsys.readouterr().out.splitlines() if "was killed" in line]
    assert line.startswith("rank 1 was killed; if memory was short (")
    assert re.search(r"training\.batch_size_per_worker=4 \(weights .* MiB, gradients .* MiB, optimizer .* MiB, ", line)
    assert line.endswith("or let `groundswell find-batch` find the largest that fits")


def training_whose_executor_is_decommissioned(config: Any, run: Any, checkpoints: Any) -> Any:
    """The executor of rank 1 receives SIGPWR, as from Spark's own `decommission-worker.sh` and Kubernetes."""

    def decommission() -> None:
        pid = os.getppid()
        while b"CoarseGrainedExecutorBackend" not in Path(f"/proc/{pid}/cmdline").read_bytes():
            pid = int(Path(f"/proc/{pid}/status").read_text().split("PPid:")[1].split()[0])
        os.kill(pid, signal.SIGPWR)
        while not stop_requested():
            time.sleep(0.05)

    return training_with_a_signal(config, run, checkpoints, decommission)


def train_while_an_executor_is_decommissioned(dataset: str, output: str, network: str) -> tuple[str, str]:
    """The run and its folder."""
    entry.train = training_whose_executor_is_decommissioned
    settings = [f"dataset.path={dataset}", f"training.output={output}", "launch.retries=1", network]
    builder = SparkSession.builder.master("local-cluster[3,1,1024]").config("spark.ui.enabled", "false")
    spark = builder.config("spark.decommission.enabled", "true").getOrCreate()
    try:
        trained = train(load("smoke", settings))
        return trained.run.run_id, str(trained.folder)
    finally:
        spark.stop()


@pytest.mark.usefixtures("new_interpreters")
def test_a_decommissioned_executor_costs_no_step(
    in_fresh_process: Callable[..., Any], small_dataset: Path, small_network: str, tmp_path: Path, mlflow_store: str
) -> None:
    arguments = (str(small_dataset), str(tmp_path), small_network)
    run_id, folder = in_fresh_process(train_while_an_executor_is_decommissioned, *arguments)
    run = MlflowClient(mlflow_store).get_run(run_id)
    assert run.info.status == "FINISHED"
    assert "stopped on request: stopped after step 2" in run.data.tags["attempt_2_after"]
    first, second = Path(folder, "logs", "rank-0.log").read_text().split("--- attempt 2, after: ")
    assert "rank 0 of 2: 32 training samples" in first
    assert "step-00000002.npz: epoch 1, step 2" in second
    rates = MlflowClient(mlflow_store).get_metric_history(run_id, "train/learning_rate")
    assert [metric.step for metric in rates] == list(range(8))
