"""`groundswell estimate` as a user meets it: a file of measurements, and a recorded training."""

import csv
import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from jobs.shell import cli
from tests.patience import patient

FILE, WEAK = ["estimate", "--measurements", "measured.json"], ["--batch-size-per-worker", "8"]


@pytest.fixture(autouse=True)
def folder(folder: Path, scaling_measurements: Callable[..., dict[str, Any]]) -> Path:
    (folder / "measured.json").write_text(json.dumps(scaling_measurements(noise=0.01)))
    (folder / "taken").touch()
    return folder


def test_a_file_becomes_a_table_a_picture_and_a_result(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = [
        *("--link", "1Gbit/s", *WEAK, "--global-batch-size", "512", "--workers", "1,2,8,1024"),
        *("--images", "10000", "--epochs", "2", "--price", "1.5", "--result", "result.json"),
    ]
    assert cli.execute([*FILE, *arguments]) == 0
    output = capsys.readouterr().out.splitlines()
    assert output[0].startswith("predicted by a model, not measured")
    assert "batches of 64 to 512 per worker lie outside of those measured, 4 to 16" in output
    assert [line for line in output if "scaling, predicted:" in line] == [
        f"{kind} scaling, predicted: a network, 1 Gbit/s, buckets of 8.0 MiB" for kind in ("strong", "weak")
    ]
    (line,) = (line for line in output if line.startswith("fastest at 1,024 workers, predicted: exchange.codec="))
    assert " exchange.bucket_mib=" in line
    rows = list(csv.DictReader((folder / "estimate" / "estimate.csv").open()))
    # Strong scaling of 512 images ends before 1,024 workers.
    assert [row["workers"] for row in rows if row["codec"] == "none"] == ["1", "2", "8", "1", "2", "8", "1024"]
    assert all(float(row["predicted_step_seconds_low"]) <= float(row["predicted_step_seconds_high"]) for row in rows)
    assert (folder / "estimate" / "estimate.png").read_bytes().startswith(b"\x89PNG")
    assert set(json.loads((folder / "result.json").read_text())["metrics"]) == {
        "predicted/step_seconds",
        "predicted/images_per_second",
    }


def test_hosts_with_several_workers_share_a_link(folder: Path) -> None:
    seconds, arguments = [], [*FILE, "--link", "100Mbit/s", *WEAK, "--workers", "8", "--codec", "none"]
    for more in ([], ["--workers-per-host", "8", "--local-link", "100Gbit/s,5us"]):
        assert cli.execute([*arguments, *more]) == 0
        (row,) = csv.DictReader((folder / "estimate" / "estimate.csv").open())
        seconds.append(float(row["predicted_step_seconds"]))
    assert seconds[1] < seconds[0] / 4


def test_a_recorded_training_needs_no_file(
    record: Callable[..., str], module_mlflow_store: str, capsys: pytest.CaptureFixture[str]
) -> None:
    from mlflow import MlflowClient
    from mlflow.entities import Metric

    run, client = record("estimated", "launch.num_workers=2"), MlflowClient(module_mlflow_store)
    seconds = {"compute": 0.4, "encode": 0.0, "wire": 0.2, "decode": 0.0, "optimizer": 0.1, "waiting": 0.01}
    points = {f"time/step_{name}_seconds": value for name, value in seconds.items()}
    points |= {"exchange/payload_bytes": 4e6, "summary/parameters": 1e6}
    client.log_batch(
        run, metrics=[Metric(name, value, 1000, step) for name, value in points.items() for step in (4, 8)]
    )
    capsys.readouterr()
    assert cli.execute(["estimate", "--run", run, *WEAK, "--workers", "2"]) == 0
    output = capsys.readouterr().out
    assert [
        part
        for part in (
            "link of the recorded trainings",
            "one batch was measured",
            "predicted: exchange.codec=none, ",  # it knows no buckets
            "; --measurements tells which size of buckets too",
        )
        if part not in output
    ] == []
    assert (
        cli.execute(["estimate", "--run", run, *FILE[1:], "--link", "100Mbit/s", *WEAK]),
        cli.execute(["estimate", "--run", run, "--link", "1Gbit/s", *WEAK]),
    ) == (0, 2)
    assert "the link's latency is not known, as no link was measured" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("", "nothing to predict from: name --measurements FILE (make bench NAME=network) or --run ID"),
        ("--measurements absent.json", "--measurements absent.json cannot be read: No such file"),
        ("--measurements taken", "--measurements taken is no file of `make bench NAME=network`"),
        ("--measurements measured.json", "--link is missing: say what is between the hosts, such as 1Gbit/s"),
        ("--measurements measured.json --link fast", "argument --link: should be a speed above 0"),
        ("--measurements measured.json --link 1Gbit/s", "no batch: name --global-batch-size (strong scaling)"),
        ("@ --workers 2,x", "argument --workers: should be a whole number above 0, got 'x'"),
        ("@ --workers 0", "argument --workers: should be a whole number above 0, got '0'"),
        ("@ --codec onebit", "--codec onebit was not measured: expected one of none, small"),
        ("@ --bucket-mib 0", "argument --bucket-mib: should be a number above 0, got '0'"),
        ("@ --images 100", "--images and --epochs belong together"),
        ("@ --price 2", "--price has no effect without --images and --epochs"),
        ("@ --price free", "argument --price: should be a number above 0, got 'free'"),
        ("@ --workers-per-host 4", "--workers-per-host above 1 and --local-link belong together"),
        ("@ --local-link 1Gbit/s", "--workers-per-host above 1 and --local-link belong together"),
        ("@ --output taken", "--output taken cannot be made: File exists"),
        (
            "--measurements measured.json --link 1Gbit/s --global-batch-size 4 --workers 8",
            "--workers 8 are more than the images of --global-batch-size 4: nothing to predict",
        ),
    ],
)
def test_mistakes_are_one_line(arguments: str, message: str, error_line: Callable[..., str]) -> None:
    given = arguments.replace("@", "--measurements measured.json --link 1Gbit/s --batch-size-per-worker 8")
    assert message in error_line("estimate", *given.split())


def test_a_file_needs_neither_mlflow_nor_spark_nor_tensorflow(folder: Path, project: Path) -> None:
    code = (
        "import sys; from jobs.shell import cli; code = cli.execute(sys.argv[1:]);"
        "heavy = {'mlflow', 'pyspark', 'tensorflow'} & set(sys.modules); sys.exit(str(heavy) if heavy else code)"
    )
    command = [sys.executable, "-c", code, *FILE, "--link", "1Gbit/s", *WEAK, "--workers", "2"]
    environment = {"PYTHONPATH": str(project)}
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=patient(120))
    assert done.returncode == 0, done.stderr
