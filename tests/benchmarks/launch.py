"""Seconds from `.run` to the first line of the user's function on the last rank, beside two other launchers of Spark.

A trivial function without TensorFlow, a warm session on `local-cluster[N,1,1024]`, the launchers in turn, several
rounds, medians. Eight ranks are ours alone: the others' take longer than all the rest. TorchDistributor needs PyTorch,
which is no dependency of ours: `GROUNDSWELL_TORCH=<folder>` names one with torch and what it imports; without it that
ratio is null. Its figure contains torch's own import.
"""

import json
import os
import platform
import statistics
import sys
import time
from collections.abc import Callable
from typing import Any

import cloudpickle
from pyspark.sql import SparkSession

from jobs.session import spark_session
from pipelines.launch.runner import BarrierRunner

ROUNDS = {2: 5, 4: 3, 8: 3}
MOST_COMPARED_RANKS = 4
TORCH = os.environ.get("GROUNDSWELL_TORCH")
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

    return float(TorchDistributor(num_processes=ranks, local_mode=False, use_gpu=False).run(first_line))


def measure(ranks: int, launchers: dict[str, Launcher]) -> dict[str, list[float]]:
    """Seconds of every round after one to get warm."""
    seconds: dict[str, list[float]] = {name: [] for name in launchers}
    with spark_session("benchmark", f"local-cluster[{ranks},1,1024]") as spark:
        spark.sparkContext.setLogLevel("ERROR")
        for number in range(ROUNDS[ranks] + 1):
            for name, launcher in launchers.items():
                started = time.time()
                took = launcher(spark, ranks) - started
                print(f"{ranks} ranks, round {number} of {ROUNDS[ranks]}: {name} {took:.2f} s", file=sys.stderr)
                if number:  # the first makes warm
                    seconds[name].append(took)
    return seconds


def main() -> None:
    """Print a line for each number of ranks, then the JSON line of two ranks."""
    cloudpickle.register_pickle_by_value(sys.modules[__name__])
    launchers: dict[str, Launcher] = {"BarrierRunner": barrier_runner, "horovod.spark.run": horovod_spark}
    if TORCH:
        os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [os.environ.get("PYTHONPATH"), TORCH]))
        launchers["TorchDistributor"] = torch_distributor
    medians: dict[int, dict[str, float]] = {}
    for ranks in ROUNDS:
        chosen = launchers if ranks <= MOST_COMPARED_RANKS else {"BarrierRunner": barrier_runner}
        seconds = measure(ranks, chosen)
        medians[ranks] = {name: statistics.median(values) for name, values in seconds.items()}
        texts = (
            f"{name} {statistics.median(values):.2f} ({min(values):.2f} to {max(values):.2f})"
            for name, values in seconds.items()
        )
        print(f"{ranks} ranks, seconds: {', '.join(texts)}", flush=True)
    two: dict[str, Any] = medians[2]
    ours = two["BarrierRunner"]
    torch = two.get("TorchDistributor")
    result = {
        "seconds_launch": round(ours, 3),
        "ratio_vs_torch_distributor": round(torch / ours, 2) if torch else None,
        "ratio_vs_horovod_spark": round(two["horovod.spark.run"] / ours, 2),
        "seconds_launch_by_ranks": {str(ranks): round(values["BarrierRunner"], 3) for ranks, values in medians.items()},
        "cores": os.cpu_count(),
        "machine": platform.machine(),
    }
    print(json.dumps(result))


if __name__ == "__main__":
    main()
