"""Training whose output is in an object store: resumed and exported where nothing of it is on the disk."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from mlflow import MlflowClient

from pipelines.storage.folder import Location
from tests.patience import patient


def groundswell(folder: Path, *arguments: str) -> None:
    """Run a verb as a machine does that has an empty temporary folder."""
    folder.mkdir()
    environment = {**os.environ, "TMPDIR": str(folder), "PYSPARK_PYTHON": sys.executable}
    command = [sys.executable, "-m", "jobs.shell.cli", *arguments]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=patient(280))
    assert done.returncode == 0, f"{done.stdout[-3000:]}\n{done.stderr[-5000:]}"
    assert not list(folder.glob("groundswell-*")), "nothing is left on the disk"


@pytest.mark.spark
@pytest.mark.parallel
@pytest.mark.long
@pytest.mark.timeout(800)
def test_training_writes_there_and_is_resumed_and_exported_from_there(
    s3_folder: str, small_dataset: Path, small_network: str, mlflow_store: str, tmp_path: Path
) -> None:
    result, output = tmp_path / "result.json", f"{s3_folder}/outputs"
    # A codec with a residual: every rank writes a part of its own.
    codec = ("exchange.codec=powersgd", "exchange.dense_below=0")
    settings = (f"dataset.path={small_dataset}", f"training.output={output}", small_network, *codec)
    train = ["train", "--config", "smoke", "--result", str(result), *(w for each in settings for w in ("--set", each))]
    groundswell(tmp_path / "first", *train, "--set", "training.epochs=1")
    first = json.loads(result.read_text())
    place, name = Location(output) / first["run_id"], first["checkpoint"].rpartition("/")[2]
    assert first["checkpoint"] == f"{place}/checkpoints/{name}"
    parts = [f"checkpoints/{name.replace('.npz', part)}" for part in (".npz", ".rank-00000.npz", ".rank-00001.npz")]
    records = ["config.yaml", "dataset.json", "logs/rank-0.log", "logs/rank-1.log", "run.json", "settings.json"]
    assert sorted(place.files()) == sorted([*parts, *records, "checkpoints/phases.json"])

    groundswell(
        tmp_path / "second", *train, "--set", f"training.resume_run={first['run_id']}", "--set", "training.epochs=2"
    )
    second = json.loads(result.read_text())
    assert second["run_id"] == first["run_id"]
    assert second["checkpoint"] > first["checkpoint"]
    assert json.loads(place.read("run.json"))["status"] == "FINISHED"
    assert len(MlflowClient(mlflow_store).get_metric_history(first["run_id"], "train/loss")) == 2, (
        "every epoch is recorded once"
    )

    groundswell(tmp_path / "third", "export", "--run", first["run_id"], "--output", output, "--result", str(result))
    assert json.loads(result.read_text())["model_uri"].startswith(f"runs:/{first['run_id']}/")
