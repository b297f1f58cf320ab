"""The documented API of Databricks' HorovodRunner."""

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import numpy
import pytest
from pyspark.sql import SparkSession

from pipelines.launch.horovod_runner import HorovodRunner, log_to_driver
from pipelines.launch.runner import BarrierRunner, WorkerError

pytestmark = [pytest.mark.spark, pytest.mark.parallel, pytest.mark.timeout(180)]


@pytest.mark.parametrize(("np", "size"), [(2, 2), (0, 2), (-3, 3)])
def test_ranks(spark: SparkSession, np: int, size: int, capfd: pytest.CaptureFixture[str]) -> None:
    def main(base: int) -> tuple[str, int]:
        log_to_driver(f"rank {os.environ['HOROVOD_RANK']} is here")
        print("this is shown where the processes are the driver's own")
        return os.environ["HOROVOD_SIZE"], base

    assert HorovodRunner(np=np).run(main, base=5) == (str(size), 5)
    lines = [f"[{rank}] rank {rank} is here" for rank in range(size)]
    if np < 0:
        lines += [f"[{rank}] this is shown where the processes are the driver's own" for rank in range(size)]
    assert sorted(capfd.readouterr().out.split("\n")) == sorted(["", *lines])


def test_all_output_is_shown_where_asked(spark: SparkSession, capfd: pytest.CaptureFixture[str]) -> None:
    HorovodRunner(np=2, driver_log_verbosity="all").run(lambda: print("this is shown"))
    assert sorted(capfd.readouterr().out.split("\n")) == ["", "[0] this is shown", "[1] this is shown"]


def test_arguments_may_have_any_name_and_the_function_may_be_given_by_its_name() -> None:
    runner, names = HorovodRunner(np=-1), ["args", "function", "main", "self"]
    assert runner.run(lambda **names: sorted(names), self=1, main=2, function=3, args=4) == names
    assert runner.run(main=lambda base: base + 1, base=5) == 6
    for wrong in ({"base": 5}, {"main": 5}):
        with pytest.raises(TypeError, match=r"run\(\) takes one function, main, and its arguments by name"):
            runner.run(**wrong)


def test_the_gpu_at_the_local_rank_is_the_own_one(monkeypatch: pytest.MonkeyPatch) -> None:
    # Functions for HorovodRunner set `gpus[hvd.local_rank()]` as their only device.
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,7")

    def seen() -> tuple[str, str]:
        return os.environ["HOROVOD_LOCAL_RANK"], os.environ["CUDA_VISIBLE_DEVICES"]

    assert HorovodRunner(np=-2).run(seen) == ("0", "4,7")
    both = BarrierRunner(None, 2, gpus_per_worker=1, picks_gpu=True, log_to_driver="none").run_all(seen)
    assert (both, BarrierRunner(None, 2, gpus_per_worker=1, log_to_driver="none").run_all(seen)) == (
        [("0", "4,7"), ("1", "4,7")],
        [("0", "4"), ("1", "7")],
    )


def test_a_script_that_ends_itself_with_success_has_succeeded() -> None:
    assert HorovodRunner(np=-2).run(lambda: sys.exit(0 if os.environ["HOROVOD_RANK"] == "0" else None)) is None


@pytest.mark.parametrize(
    ("main", "error"),
    [
        (lambda: sys.exit(3), "SystemExit: 3"),
        (lambda: os.environ["LOST"], r"rank 0 on 127\.0\.0\.1 failed: KeyError: 'LOST'"),
    ],
)
def test_a_failure_of_local_processes_is_the_same_error(main: Callable[[], object], error: str) -> None:
    with pytest.raises(WorkerError, match=error):
        HorovodRunner(np=-1).run(main)


def test_arguments() -> None:
    with pytest.raises(TypeError):
        HorovodRunner(2)  # type: ignore[call-arg]
    with pytest.raises(ValueError, match="driver_log_verbosity='some' is not one of all, log_callback_only"):
        HorovodRunner(np=1, driver_log_verbosity="some")  # type: ignore[arg-type]


def test_a_driver_that_imports_it_has_no_keras(project: Path) -> None:
    code = "import sys; import pipelines.launch.horovod_runner; sys.exit('keras' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], cwd=project).returncode == 0


def test_the_callback_says_where_training_is(capfd: pytest.CaptureFixture[str]) -> None:
    import keras

    from pipelines.launch.horovod_runner import LogCallback

    model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])
    model.compile("sgd", "mse")
    callbacks = [LogCallback(per_batch_log=True)]
    model.fit(numpy.ones((4, 2)), numpy.ones(4), batch_size=2, epochs=2, verbose=0, callbacks=callbacks)
    shown = capfd.readouterr().out.splitlines()
    assert [line.split(":")[0].split(" after")[0] for line in shown] == [
        f"epoch {epoch}{event}" for epoch in (1, 2) for event in (" begins", ", batch 1", ", batch 2", " ends")
    ]
    assert "loss" in shown[-1]


def test_variables_of_the_driver_reach_the_ranks(spark: SparkSession, monkeypatch: pytest.MonkeyPatch) -> None:
    """The executors' own environment was fixed when Spark started."""
    names = ("NCCL_DEBUG", "HOROVOD_CYCLE_TIME", "TF_USE_LEGACY_KERAS", "MLFLOW_TRACKING_URI", "DATABRICKS_TOKEN")
    for name in names:
        monkeypatch.setenv(name, f"the driver's {name}")
    monkeypatch.setenv("HOROVOD_RANK", "77")
    found = HorovodRunner(np=2).run(lambda: [os.environ[name] for name in (*names, "HOROVOD_RANK")])
    assert found == [*(f"the driver's {name}" for name in names), "0"]
