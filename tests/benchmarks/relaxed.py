"""What a sharded optimizer and a pipeline save and cost, and how fast a parameter server is beside a slow worker.

    make bench NAME=relaxed
    make bench NAME=relaxed ARGS=--smoke

Sharded optimizer: two ranks of one core each train a ResNet-50 of 12 bands, with LARS (one moment) and with AdamW
(two), with `training.mode={name: synchronous, shard_optimizer: true}` and without. Bytes are those of the variables of
model and optimizer, as they lie in memory on the rank with the most, and 4 for a float32 gradient; the formula beside
them is 8 + 4/N for each moment. The peak is that of the process's resident memory. Pipeline: see
`relaxed_parts/pipeline.py`. Slow workers: see `relaxed_parts/server.py`. Rounds in turn; medians. `--smoke` takes tiny
networks and one round.

The last line is JSON.
"""

import json
import os
from dataclasses import dataclass

from relaxed_parts.pipeline import pipeline_figures
from relaxed_parts.server import straggler_figures

from tests.benchmarks.parts.command import is_smoke
from tests.benchmarks.parts.figures import largest, medians
from tests.benchmarks.parts.ranks import each_on_ranks

RANKS = 2
MOMENTS = {"lars": 1, "adamw": 2}


@dataclass(frozen=True)
class Size:
    """What is trained, and how long."""

    network: str = "{name: resnet}"
    batch_size: int = 8
    side: int = 60
    """Pixels on each side."""
    steps: int = 8
    rounds: int = 3


SMOKE = Size("{name: resnet_cifar, depth: 2, width_factor: 0.5}", batch_size=1, side=12, steps=1, rounds=1)


def train(size: Size, optimizer: str, sharded: bool) -> dict[str, float]:
    """Take some steps on this rank; its time is the median of all steps but the first two."""
    import statistics

    import keras
    import numpy as np

    from conf.load import resolve
    from pipelines.training.collective import HorovodCollective
    from pipelines.training.finders.memory import resident_peak
    from tests.benchmarks.parts import training

    mode = f"training.mode={{name: synchronous, shard_optimizer: {str(sharded).lower()}}}"
    config = resolve("smoke", [mode, f"model={size.network}", f"optimizer={optimizer}"])
    collective = HorovodCollective()
    keras.utils.set_random_seed(0)
    groups = [training.image_group("image", size.side, 12)]
    model = training.network(groups, config.model, 19)
    trained = training.configured_training(config, model, collective, "multi_label", size.steps)
    trained.optimizer.learning_rate = 1e-3
    batch = training.noise(groups, size.batch_size, 19, collective.rank)
    seconds = training.timed(trained.step, *batch, steps=2 + size.steps)
    parameters = training.elements(model)
    variables = [*model.trainable_variables, *trained.optimizer.variables]
    held = sum(np.asarray(variable).nbytes for variable in variables) + 4 * parameters
    return {
        "bytes_per_parameter": held / parameters,
        "peak_mib": resident_peak() / training.MIB,
        "seconds_per_step": statistics.median(seconds[2:]),
    }


def measure(size: Size, *, together: bool) -> dict[str, dict[str, dict[str, float]]]:
    """Figures by optimizer, with and without sharding: medians over the rounds of the rank with the most."""
    cases = [(size, optimizer, sharded) for optimizer in MOMENTS for sharded in (False, True)]
    found: dict[tuple[str, bool], list[dict[str, float]]] = {
        (optimizer, sharded): [] for _, optimizer, sharded in cases
    }
    for number in range(size.rounds):
        for (optimizer, sharded), ranks in zip(
            found, each_on_ranks(RANKS, train, cases, together=together), strict=True
        ):
            most = largest(ranks)
            found[optimizer, sharded].append(most)
            print(
                f"{optimizer}, round {number + 1}, {'sharded' if sharded else 'synchronous':11} "
                f"{most['bytes_per_parameter']:.3f} bytes a parameter, peak {most['peak_mib']:,.0f} MiB, "
                f"{most['seconds_per_step']:.3f} s a step",
                flush=True,
            )
    return {
        optimizer: {
            "synchronous": medians(found[optimizer, False]),
            "sharded": medians(found[optimizer, True]),
            "bytes_formula": 8 + 4 * moments / RANKS,
        }
        for optimizer, moments in MOMENTS.items()
    }


def main() -> None:
    """Measure, and print the JSON line."""
    smoke = is_smoke(__doc__, "one round with a tiny network")
    optimizers = measure(SMOKE if smoke else Size(), together=smoke)
    figures = {
        "shard_bytes_per_parameter": optimizers["lars"]["sharded"]["bytes_per_parameter"],
        "shard_bytes_formula": optimizers["lars"]["bytes_formula"],
        "shard_optimizers": optimizers,
        **pipeline_figures(smoke=smoke),
        **straggler_figures(smoke=smoke),
        "ranks": RANKS,
        "cores": os.cpu_count(),
    }
    print(json.dumps(figures))


if __name__ == "__main__":
    main()
