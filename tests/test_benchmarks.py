"""Every benchmark runs, tiny, and its last line has what that of a full run has."""

import importlib
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from pipelines.launch.rank.fork_server import FORK_SERVER_VARIABLE
from tests.patience import VARIABLE as PATIENCE_VARIABLE
from tests.patience import patient

SCRIPTS = sorted((Path(__file__).parent / "benchmarks").glob("*.py"))
RIVALS = {"launch", "peers", "prepare", "reader", "score", "train"}
"""Benchmarks whose subject is a rival: they run in `make test-release`, where their inputs have changed."""
KEYS = {
    "compression": {"methods"},
    "convergence": {"methods", "failed"},
    "equalities": {"accumulation", "batch_norm", "precision"},
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
    "large_batch": {"best", "claim", "changes", "trained"},
    "memory": {"cases", "cores"},
    "modes": {
        "bytes_local_h8",
        "speedup_local_h8_100mbit",
        "seconds_in_place_recovery",
        "seconds_restart",
        "steps",
        "methods",
    },
    "network": {"file", "cores", "seconds_fixed", "seconds_per_image", "straggler_deviation", "links"},
    "peers": {
        "cpu_per_row_vs_best_peer",
        "best_peer",
        "cpu_per_row_vs_gather",
        "cpu_seconds_per_1000_rows",
        "rows_per_second",
        "cold_rows_per_second",
        "mixing_entropy",
        "resume_bit_equal",
        "state_bytes",
        "link_steps",
        "link_ratio_peer_to_ours",
        "parameters",
        "recovery",
        "cores",
    },
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
    "relaxed": {
        "shard_bytes_per_parameter",
        "shard_bytes_formula",
        "shard_optimizers",
        "pipeline_idle_share",
        "pipeline_idle_formula",
        "ssp_speedup_with_straggler",
        "async_speedup_with_straggler",
        "backup_speedup_with_straggler",
        "ssp_speedup_with_passing_stragglers",
        "async_speedup_with_passing_stragglers",
        "backup_speedup_with_passing_stragglers",
        "ranks",
        "cores",
    },
    "resolution": {
        "speedup_cifar",
        "speedup_resnet50",
        "compile_seconds_cifar",
        "compile_seconds_resnet50",
        "cores",
    },
    "scaling": {"mean_error", "worst_error", "tables", "reasons"},
    "schedules": {"peaks"},
    "score": {
        "ratio_keras_vs_predict",
        "ratio_best_vs_predict",
        "best_runtime",
        "ratio_vs_spark_udf",
        "ratio_vs_predict_batch_udf",
        "patches_per_second",
        "patches_per_second_of",
        "acceptance",
        "worker_mib",
        "hours_549k_extrapolated",
        "patches",
        "cores",
    },
    "trace": {"codecs"},
    "tracking": {"cost_fraction", "outages"},
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


def test_every_benchmark_is_known_and_make_lists_it(project: Path, tmp_path: Path) -> None:
    assert {script.stem for script in SCRIPTS} == set(KEYS)
    # A mark newer than everything: the environment in which other tests run now must not be made anew.
    ready = tmp_path / "ready"
    ready.touch()
    command = ["make", "bench", f"READY={ready}"]
    listed = subprocess.run(command, cwd=project, capture_output=True, text=True, check=True).stdout
    assert re.findall(r"^NAME=(\w+)  +\w", listed, re.MULTILINE) == [script.stem for script in SCRIPTS]
    wrong = subprocess.run([*command, "NAME=trian"], cwd=project, capture_output=True, text=True, check=False)
    assert wrong.returncode != 0
    assert "no benchmark 'trian': NAME=... is one of compression convergence equalities gpu large_batch" in wrong.stderr


def test_the_picture_of_the_schedules_is_that_of_the_recipes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(Path(__file__).parent / "benchmarks"))
    schedules = importlib.import_module("schedules")
    drawn = json.loads((schedules.RESULTS / "schedules.json").read_text())
    assert drawn == {name: schedules.recorded(config) for name, config in schedules.recipes().items()}, (
        "a recipe has changed: draw the picture again with `make bench NAME=schedules`, look at it and commit it"
    )


@pytest.mark.long
@pytest.mark.timeout(900)
@pytest.mark.parametrize(
    "script",
    [pytest.param(each, marks=[pytest.mark.release] * (each.stem in RIVALS), id=each.stem) for each in SCRIPTS],
)
def test_smoke(script: Path, project: Path, tmp_path: Path) -> None:
    environment = {
        name: value
        for name, value in os.environ.items()
        if name in (FORK_SERVER_VARIABLE, PATIENCE_VARIABLE) or not name.startswith("GROUNDSWELL_")
    }
    environment |= {"PYSPARK_PYTHON": sys.executable, "PYTHONPATH": str(project), "TMPDIR": str(tmp_path)}
    before = git_status(project)
    # A minute on an idle machine: what is asserted is that it ends, not how fast.
    done = subprocess.run(
        [sys.executable, str(script), "--smoke"],
        env=environment,
        cwd=project,
        capture_output=True,
        text=True,
        timeout=patient(840),
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
    if script.stem == "score":
        assert set(last["worker_mib"]) == {"quarter", "all"}
        assert all(mib > 0 for mib in last["worker_mib"].values())
        assert last["best_runtime"] in {"keras", *last["acceptance"]}
        for figures in last["acceptance"].values():
            assert set(figures) == {"f1_macro", "f1_macro_keras", "same_labels"}
    if script.stem == "network":
        assert set(last["links"]) == {"mbit_100", "mbit_1000", "unshaped"}
        assert last["seconds_per_image"] > 0
    if script.stem == "tracking":
        assert set(last["outages"]) == {"down_at_start", "restarted", "slow", "error_500", "down_to_end"}
        assert {(row["outage"], row["moment"]) for row in last["table"]} == {
            ("slow", "start"),
            ("restarted", "middle"),
            ("error_500", "end"),
            ("down_to_end", "to the end"),
        }
        for outage in [*last["outages"].values(), *last["table"]]:
            assert [outage[f"points_{what}"] for what in ("lost", "doubled", "out_of_order")] == [0, 0, 0], outage
            assert outage["lines_told"] <= 2, "once that it is away, and once that it is back"
    # The recorded results are those of full runs.
    assert git_status(project) == before


def git_status(project: Path) -> str:
    command = ["git", "status", "--porcelain", "--", "tests/benchmarks"]
    return subprocess.run(command, cwd=project, capture_output=True, text=True, check=False).stdout
