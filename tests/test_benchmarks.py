"""Every benchmark runs, tiny, and its last line has what that of a full run has."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPTS = sorted((Path(__file__).parent / "benchmarks").glob("*.py"))
KEYS = {
    "compression": {"methods"},
    "convergence": {"methods", "failed"},
    "gpu": {"gpu", "reason"},
    "launch": {
        "seconds_launch",
        "ratio_vs_torch_distributor",
        "ratio_vs_horovod_spark",
        "seconds_launch_by_ranks",
        "cores",
        "machine",
    },
    "lars_rate": {"accuracy"},
    "prepare": {
        "patches_per_second",
        "ratio_vs_rows",
        "rows_patches_per_second",
        "peak_executor_mib",
        "patches",
        "cores",
    },
    "reader": {
        "rows_per_second",
        "ratio_vs_petastorm",
        "ratio_vs_limit",
        "ratio_vs_tfrecord",
        "ratio_always_vs_never",
        "ratio_always_vs_petastorm",
        "input_wait_fraction",
        "two_processes_ratio_vs_petastorm",
        "two_processes_ratio_vs_limit",
        "cold_rows_per_second",
        "cold_ratio_vs_petastorm_warm",
        "rows_per_second_of",
        "memory_mib_by_epoch",
        "class_entropy_bits",
        "rows",
        "cores",
    },
    "schedules": {"peaks"},
    "train": {
        "images_per_second",
        "images_per_second_two_ranks",
        "images_per_second_keras_fit",
        "images_per_second_bf16",
        "images_per_second_bf16_two_ranks",
        "images_per_second_bf16_keras_fit",
        "ratio_vs_keras_fit",
        "ratio_vs_keras_fit_two_ranks",
        "ratio_bf16_vs_keras_fit",
        "ratio_bf16_vs_keras_fit_two_ranks",
        "ratio_bf16_vs_keras_fit_float32",
        "ratio_bf16_vs_keras_fit_float32_two_ranks",
        "bf16_isa",
        "batch_size",
        "cores",
        "machine",
    },
}
COMPRESSION_KEYS = {"unshaped", "mbit_50", "sent_bytes", "payload_bytes", "wire_over_payload", "encode_decode_ms"}


def test_every_benchmark_is_known_and_make_lists_it(project: Path) -> None:
    assert {script.stem for script in SCRIPTS} == set(KEYS)
    # What makes the environment is not what is tested.
    command = ["make", "bench", f"READY={__file__}"]
    listed = subprocess.run(command, cwd=project, capture_output=True, text=True, check=True).stdout
    assert re.findall(r"^NAME=(\w+)  +\w", listed, re.MULTILINE) == [script.stem for script in SCRIPTS]
    wrong = subprocess.run([*command, "NAME=trian"], cwd=project, capture_output=True, text=True, check=False)
    assert wrong.returncode != 0
    assert "no benchmark 'trian': NAME=... is one of compression convergence gpu lars_rate launch" in wrong.stderr


@pytest.mark.long
@pytest.mark.timeout(900)
@pytest.mark.parametrize("script", SCRIPTS, ids=lambda script: script.stem)
def test_smoke(script: Path, project: Path, tmp_path: Path) -> None:
    environment = {name: value for name, value in os.environ.items() if not name.startswith("GROUNDSWELL_")}
    environment |= {"PYSPARK_PYTHON": sys.executable, "PYTHONPATH": str(project), "TMPDIR": str(tmp_path)}
    before = git_status(project)
    # A minute on an idle machine: what is asserted is that it ends, not how fast.
    done = subprocess.run(
        [sys.executable, str(script), "--smoke"],
        env=environment,
        cwd=project,
        capture_output=True,
        text=True,
        timeout=840,
        check=False,
    )
    assert done.returncode == 0, f"{done.stdout[-3000:]}\n{done.stderr[-5000:]}"
    last = json.loads(done.stdout.splitlines()[-1])
    assert KEYS[script.stem] <= set(last)
    if script.stem == "compression":
        assert set(last["methods"]) == {"Horovod fp32", "Horovod fp16", "none", "onebit", "topk"}
        for figures in last["methods"].values():
            assert set(figures) >= COMPRESSION_KEYS
        assert last["methods"]["onebit"]["encode_decode_ms"] > 0
    # The recorded results are those of full runs.
    assert git_status(project) == before


def git_status(project: Path) -> str:
    command = ["git", "status", "--porcelain", "--", "tests/benchmarks"]
    return subprocess.run(command, cwd=project, capture_output=True, text=True, check=False).stdout
