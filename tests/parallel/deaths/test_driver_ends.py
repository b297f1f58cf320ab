"""The driver of `groundswell train` is killed or interrupted at several places; resuming the run finishes it."""

import json
import os
import signal
import sqlite3
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, suppress
from pathlib import Path

import pytest
from mlflow import MlflowClient

from tests.patience import patient, wait_until

pytestmark = [pytest.mark.spark, pytest.mark.parallel, pytest.mark.long, pytest.mark.timeout(600)]

Hold = Callable[[str, list[str]], AbstractContextManager[subprocess.Popen[str]]]
COMMAND = Path(sys.executable).parent / "groundswell"
EPOCHS = [4, 8]  # optimizer steps at the end of each: 32 samples, 8 a step

# `groundswell train`, but rank 0 stops at one place, writes its process id to a file, and goes no further.
DRIVER = """
import sys
from jobs.shell import cli
from pipelines.training import entry

place, mark, *arguments = sys.argv[1:]

def training_that_waits(config, run, checkpoints):
    import os, time
    from pathlib import Path
    from mlflow import MlflowClient
    from pipelines.training import epochs, worker

    def wait():
        Path(f"{mark}.part").write_text(str(os.getpid()))
        Path(f"{mark}.part").rename(mark)
        time.sleep(600)

    if os.environ["HOROVOD_RANK"] == "0":
        train_epoch, upload = epochs.train_epoch, MlflowClient.log_model_artifacts

        def train_one_epoch(*args, **settings):
            if place == "second epoch" and settings["first_step"] > 0:
                wait()
            return train_epoch(*args, **settings)

        def upload_model(*args):
            upload(*args)
            if place == "the model":
                wait()  # its files are in the store, which does not know yet that they are complete

        epochs.train_epoch, MlflowClient.log_model_artifacts = train_one_epoch, upload_model
    return worker.train_worker(config, run, checkpoints)

entry.train = training_that_waits
sys.exit(cli.execute(["train", *arguments]))
"""


@pytest.fixture
def held(project: Path, tmp_path: Path) -> Hold:
    """A driver from the moment at which its rank 0 has reached a place; afterwards, none of its ranks is left."""

    @contextmanager
    def hold(place: str, arguments: list[str]) -> Iterator[subprocess.Popen[str]]:
        mark = tmp_path / "mark"
        mark.unlink(missing_ok=True)
        driver = subprocess.Popen(
            [sys.executable, "-c", DRIVER, place, str(mark), *arguments],
            env={**os.environ, "PYTHONPATH": str(project)},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,  # as a terminal does, which signals the whole group
        )
        try:
            wait_until(lambda: mark.exists() or driver.poll() is not None, 200)
            assert mark.exists(), driver.communicate()
            yield driver
            driver.wait(patient(60))
            wait_until(lambda: not Path("/proc", mark.read_text()).exists())
        finally:
            driver.kill()
            driver.wait()

    return hold


def test_a_run_whose_driver_ends_again_and_again_is_finished_by_resuming_it(
    held: Hold, small_dataset: Path, small_network: str, tmp_path: Path, mlflow_store: str
) -> None:
    arguments = [
        *("--config", "smoke", "--set", f"dataset.path={small_dataset}", "--set", small_network),
        *("--set", f"training.output={tmp_path / 'out'}"),
    ]
    resuming, client = [*arguments, "--set", "training.resume_run=latest"], MlflowClient(mlflow_store)

    with held("second epoch", arguments) as driver:
        driver.kill()
    assert driver.returncode == -signal.SIGKILL
    (folder,) = (path for path in (tmp_path / "out").iterdir() if (path / "checkpoints").is_dir())
    run_id = folder.name
    wait_until(lambda: client.get_run(run_id).info.status == "FAILED")  # its driver's guard says so

    with held("second epoch", resuming) as driver:
        os.killpg(driver.pid, signal.SIGINT)
        output, _ = driver.communicate(timeout=patient(100))
    assert (driver.returncode, f"resuming the newest unfinished run, {run_id}" in output) == (130, True), output
    assert "Traceback" not in output
    assert output.endswith(f"--set training.resume_run={run_id}\n")
    assert client.get_run(run_id).info.status == "KILLED"

    with held("the model", resuming) as driver:
        driver.kill()
    wait_until(lambda: client.get_run(run_id).info.status == "FAILED")
    assert [metric.step for metric in client.get_metric_history(run_id, "train/loss")] == EPOCHS

    # As where the disk with the journal was lost before the first epoch was delivered: the checkpoint has it too.
    with sqlite3.connect(mlflow_store.removeprefix("sqlite:///")) as database:
        database.execute("delete from metrics where step = 4 and key not in (select key from metrics where step = 3)")
    assert [metric.step for metric in client.get_metric_history(run_id, "train/loss")] == EPOCHS[1:]
    # As where it had died before it could draw.
    pictures = Path(client.get_run(run_id).info.artifact_uri.removeprefix("file://"))
    for picture in pictures.glob("*.png"):
        picture.unlink()

    done = subprocess.run([COMMAND, "train", *resuming], capture_output=True, text=True, timeout=patient(200))
    assert done.returncode == 0, done.stdout + done.stderr
    assert "compiling the training step" not in done.stdout, "all epochs were done"
    run = client.get_run(run_id)
    assert run.info.status == "FINISHED"
    assert [model.status for model in client.search_logged_models([run.info.experiment_id])] == ["READY"]
    for name, steps in (("train/loss", EPOCHS), ("val/loss", EPOCHS), ("train/step_loss", list(range(8)))):
        assert sorted(metric.step for metric in client.get_metric_history(run_id, name)) == steps, name
    assert not (folder / "journal").exists(), "everything is delivered"
    assert {path.name for path in pictures.glob("*.png")} == {
        "confusion_validation.png",
        "learning_curves.png",
        "learning_rate.png",
        "per_class_validation.png",
        "precision_recall_validation.png",
        "predictions_validation.png",
        "where_the_step_goes.png",
    }
    table = json.loads((pictures / "where_the_step_goes.json").read_text())
    assert [row[:2] for row in table["data"]] == [[1, 0], [1, 1], [2, 0], [2, 1]]
    again = subprocess.run([COMMAND, "train", *resuming], capture_output=True, text=True, timeout=patient(100))
    assert again.returncode == 2
    assert "no run to resume in" in again.stderr


def test_sigterm_to_the_driver_writes_a_checkpoint(
    small_dataset: Path, small_network: str, mlflow_store: str, tmp_path: Path
) -> None:
    """As Kubernetes and YARN end a job, and as `timeout`, SLURM and systemd, which signal its whole process group."""
    result = tmp_path / "result.json"
    settings = [
        f"dataset.path={small_dataset}",
        f"training.output={tmp_path / 'out'}",
        "training.epochs=500",
        small_network,
        "training.mode={name: local, every_steps: 2}",
    ]
    command = [str(COMMAND), "train", "--config", "smoke", "--result", str(result)]
    with subprocess.Popen(
        [*command, *(word for setting in settings for word in ("--set", setting))],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        cwd=tmp_path,
        env={**os.environ, "PYTHONUNBUFFERED": "1"},
        start_new_session=True,
    ) as driver:
        try:
            assert driver.stdout is not None
            shown = [driver.stdout.readline()]
            while shown[-1] and not shown[-1].startswith("epoch 2/"):
                shown.append(driver.stdout.readline())
            known = json.loads(result.read_text())
            assert known["continue_with"] == ["--set", f"training.resume_run={known['run_id']}"]
            os.killpg(driver.pid, signal.SIGTERM)
            output = "".join(shown) + driver.communicate(timeout=patient(200))[0]
        finally:
            with suppress(ProcessLookupError):
                os.killpg(driver.pid, signal.SIGKILL)
    assert driver.returncode == 130, output
    assert "the driver received SIGTERM" in output
    assert "groundswell train: to continue: groundswell train --config smoke" in output
    checkpoint, run_id = (json.loads(result.read_text())[name] for name in ("checkpoint", "run_id"))
    assert MlflowClient(mlflow_store).get_run(run_id).info.status == "KILLED"
    step = int(Path(checkpoint).name.removeprefix("step-").removesuffix(".npz"))
    assert step >= EPOCHS[1]
    assert step % 2 == 0, "where all ranks have the same weights"
