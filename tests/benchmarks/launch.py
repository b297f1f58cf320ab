"""Seconds from `.run` to the first line of the user's function on the last rank, beside two other launchers of Spark.

A trivial function without TensorFlow runs in a warm session on `local-cluster[N,1,1024]`. The launchers take turns, for
several rounds, and the medians are compared. Eight ranks are ours alone: the others take longer than all the rest.

TorchDistributor needs PyTorch, which the project does not depend on. The first run makes an environment for it in
`~/.cache/groundswell` (or below `XDG_CACHE_HOME`), which takes some minutes. Its figure contains the import of torch.

`--smoke` launches two ranks once, in less than a minute and without the other launchers, whose ratios are null.
"""

import json
import os
import platform
import statistics
import subprocess
import sys
import time
import venv
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyspark
from pyspark.sql import SparkSession

from jobs.shell.session import spark_session
from pipelines.launch.runner import BarrierRunner
from tests.benchmarks.parts.command import is_smoke

ROUNDS = {2: 5, 4: 3, 8: 3}
SMOKE_ROUNDS = {2: 1}
MOST_COMPARED_RANKS = 4
TORCH = "2.13.0"
Launcher = Callable[[SparkSession, int], float]


def first_line() -> float:
    """When the function began, in seconds since 1970."""
    import time

    return time.time()


def barrier_runner(spark: SparkSession, ranks: int) -> float:
    """When the last rank began."""
    return float(max(BarrierRunner(spark, ranks, log_to_driver="none").run_all(first_line)))


def horovod_spark(spark: SparkSession, ranks: int) -> float:
    """When the last rank began."""
    import horovod.spark

    return float(max(horovod.spark.run(first_line, num_proc=ranks, verbose=0)))


def torch_distributor(spark: SparkSession, ranks: int) -> float:
    """When rank 0 began: it returns no other rank's value."""
    from pyspark.ml.torch.distributor import TorchDistributor

    began: Any = TorchDistributor(num_processes=ranks, local_mode=False, use_gpu=False).run(first_line)
    return float(began)


def rivals_packages() -> Path:
    """The folder of packages of an environment with PyTorch, which is made where it is missing."""
    cache = Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache"))
    folder = cache / "groundswell" / f"launch-rivals-torch-{TORCH}-pyspark-{pyspark.__version__}"
    done = folder / "done"
    if not done.exists():
        print(f"making {folder} for TorchDistributor", file=sys.stderr)
        venv.create(folder, clear=True, with_pip=True)
        packages = [f"torch=={TORCH}", f"pyspark=={pyspark.__version__}"]
        subprocess.run([folder / "bin" / "python", "-m", "pip", "install", "--quiet", *packages], check=True)
        done.touch()
    return folder / "lib" / f"python{sys.version_info.major}.{sys.version_info.minor}" / "site-packages"


def measure(ranks: int, rounds: int, launchers: dict[str, Launcher], *, warm: bool) -> dict[str, list[float]]:
    """Seconds of every round; where `warm`, one round comes before them and is not counted."""
    seconds: dict[str, list[float]] = {name: [] for name in launchers}
    with spark_session("benchmark", f"local-cluster[{ranks},1,1024]") as spark:
        spark.sparkContext.setLogLevel("ERROR")
        for number in range(0 if warm else 1, rounds + 1):
            for name, launcher in launchers.items():
                started = time.time()
                took = launcher(spark, ranks) - started
                print(f"{ranks} ranks, round {number} of {rounds}: {name} {took:.2f} s", file=sys.stderr)
                if number:
                    seconds[name].append(took)
    return seconds


def main() -> None:
    """Print a line for each number of ranks, then the JSON line of two ranks."""
    smoke = is_smoke(__doc__, "two ranks once, in less than a minute")
    ours: dict[str, Launcher] = {"BarrierRunner": barrier_runner}
    all_launchers = dict(ours)
    if not smoke:
        all_launchers |= {"horovod.spark.run": horovod_spark, "TorchDistributor": torch_distributor}
        # Executors inherit this; the driver itself needs no torch.
        paths = [os.environ.get("PYTHONPATH"), str(rivals_packages())]
        os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, paths))
    medians: dict[int, dict[str, float]] = {}
    for ranks, rounds in (SMOKE_ROUNDS if smoke else ROUNDS).items():
        chosen = all_launchers if ranks <= MOST_COMPARED_RANKS else ours
        seconds = measure(ranks, rounds, chosen, warm=not smoke)
        medians[ranks] = {name: statistics.median(values) for name, values in seconds.items()}
        texts = (
            f"{name} {statistics.median(values):.2f} ({min(values):.2f} to {max(values):.2f})"
            for name, values in seconds.items()
        )
        print(f"{ranks} ranks, seconds: {', '.join(texts)}", flush=True)
    two = medians[2]

    def ratio(rival: str) -> float | None:
        return round(two[rival] / two["BarrierRunner"], 2) if rival in two else None

    result: dict[str, Any] = {
        "seconds_launch": round(two["BarrierRunner"], 3),
        "ratio_vs_torch_distributor": ratio("TorchDistributor"),
        "ratio_vs_horovod_spark": ratio("horovod.spark.run"),
        "seconds_launch_by_ranks": {str(ranks): round(values["BarrierRunner"], 3) for ranks, values in medians.items()},
        "cores": os.cpu_count(),
        "machine": platform.machine(),
    }
    print(json.dumps(result))


if __name__ == "__main__":
    main()
