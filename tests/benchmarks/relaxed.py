"""What a sharded optimizer and a pipeline save and cost, and how fast a parameter server is beside a slow worker.

    make bench NAME=relaxed
    make bench NAME=relaxed ARGS=--smoke

Sharded optimizer: two ranks of one core each train a ResNet-50 of 12 bands, with LARS (one moment) and with AdamW
(two), with `training.mode={name: synchronous, shard_optimizer: true}` and without. Bytes are those of the variables of
model and optimizer in memory, on the rank with the most, and 4 for a float32 gradient. The formula beside them is 8 +
4/N for each moment. The peak is that of the process's resident memory.

Pipeline of two stages, beside two data-parallel ranks: both train a ResNet-50 on two ranks of one thread each. The
global batch and its micro-batches are the same. They run in processes of their own, whose peak of resident memory is
theirs alone. Memory is that of the rank that takes most, less what a rank holds before it makes the network.

Slow workers, with a parameter server and in lock step: three ranks train a small network (a ResNet-20 for CIFAR-10, 2
samples each). Each step also sleeps: there are fewer cores than ranks, and sleeping stands for the computing of
machines of their own. One rank always sleeps 5 times as long (`straggler`), or in every step one rank does, which is
another one each time (`passing`). All train for about the same time. A step is one update by all workers, or as many
pushes as there are workers. Gradients that were dropped do not count.

Rounds in turn; medians. `--smoke` takes tiny networks and one round.

The last line is JSON.
"""

import json
import os
import statistics
from dataclasses import dataclass
from typing import Any

from pipelines.training.modes.ticks import idle_formula
from tests.benchmarks.parts.command import is_smoke
from tests.benchmarks.parts.figures import largest, medians, ratio
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
    import keras
    import numpy as np

    from conf.load import resolve
    from pipelines.training.memory.memory import resident_peak
    from pipelines.training.ranks.collective import HorovodCollective
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


def measure(size: Size, *, together: bool) -> dict[str, dict[str, Any]]:
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


MICRO_BATCHES = 4
"""Those of the pipeline in a step; data-parallel ranks share them."""
# The first step compiles, and is not counted.
PIPELINE = Size(batch_size=16, steps=4)
PIPELINE_SMOKE = Size("{name: resnet_cifar, depth: 8, width_factor: 0.5}", batch_size=2, side=16, steps=2, rounds=1)


def steps_of(size: Size, stages: int) -> dict[str, float]:
    """Train some steps on this rank: as a stage, or with the whole network where there is one stage."""
    import keras

    from conf.load import load
    from models.losses import classification_loss
    from pipelines.training.memory.memory import resident_peak
    from pipelines.training.ranks.collective import HorovodCollective
    from pipelines.training.setup.recipe import make_mode
    from tests.benchmarks.parts import training

    mode = f"training.mode={{name: pipeline, stages: {stages}}}" if stages > 1 else "training.mode=synchronous"
    config = load("smoke", [mode, f"model={size.network}", f"training.batch_size_per_worker={size.batch_size}"])
    collective = HorovodCollective(stages, has_peers=stages > 1)
    before = resident_peak()
    keras.utils.set_random_seed(0)
    groups = [training.image_group("image", size.side, 12)]
    model = training.network(groups, config.model, 19)
    taken, loss = MICRO_BATCHES * stages // RANKS, classification_loss("multi_label")
    made = make_mode(config, model, loss, collective, steps_per_epoch=1, micro_batches=taken)
    made.optimizer.learning_rate = 0.01
    batch = training.noise(groups, size.batch_size, 19)

    def whole_step() -> Any:
        for _ in range(taken - 1):
            made.accumulate(*batch)  # type: ignore[misc]
        return made.step(*batch)

    seconds = training.timed(whole_step, steps=size.steps)
    return {
        "seconds_per_step": statistics.median(seconds[1:]),
        "peak_mib": (resident_peak() - before) / training.MIB,
        "idle_share": made.figures().get("time/idle_share", 0.0),
    }


def pipeline_figures(*, smoke: bool = False) -> dict[str, float]:
    """Measure both in turn; figures by their names in the last line."""
    size = PIPELINE_SMOKE if smoke else PIPELINE
    rounds = [
        [largest(ranks) for ranks in each_on_ranks(RANKS, steps_of, [(size, 1), (size, RANKS)], together=smoke)]
        for _ in range(size.rounds)
    ]
    parallel, pipeline = (medians(of_rounds) for of_rounds in zip(*rounds, strict=True))
    return {
        "pipeline_idle_share": pipeline["idle_share"],
        "pipeline_idle_formula": idle_formula(RANKS, MICRO_BATCHES),
        "pipeline_seconds_per_step": pipeline["seconds_per_step"],
        "pipeline_peak_mib": pipeline["peak_mib"],
        "data_parallel_seconds_per_step": parallel["seconds_per_step"],
        "data_parallel_peak_mib": parallel["peak_mib"],
    }


WORKERS = 3
SLOWER = 5
MODES = {
    "synchronous": "synchronous",
    "ssp": "{name: parameter_server, synchrony: ssp, bound: 3}",
    "async": "{name: parameter_server, synchrony: async}",
    "backup": "{name: parameter_server, synchrony: backup, backup_workers: 1}",
}


@dataclass(frozen=True)
class ServerSize:
    """How much is measured."""

    depth: int = 20
    side: int = 32
    sleep: float = 0.1
    """Seconds of a usual worker's step."""
    seconds: float = 8.0
    """Time of each training, after its first step."""
    rounds: int = 3


SERVER_SMOKE = ServerSize(depth=2, side=16, sleep=0.01, seconds=0.2, rounds=1)


def steps_on_rank(size: ServerSize, mode: str, slow: str) -> float:
    """Train for some seconds on this rank; steps per second of all workers, as the updates of its shard show them."""
    import time

    import keras
    import numpy as np
    import tensorflow as tf

    from conf.load import resolve
    from pipelines.training.modes.server_step import ServerStep
    from pipelines.training.ranks.collective import HorovodCollective
    from tests.benchmarks.parts import training

    collective = HorovodCollective()
    network = f"model={{name: resnet_cifar, depth: {size.depth}}}"
    config = resolve("smoke", [f"training.mode={mode}", network, "optimizer=sgd", f"launch.num_workers={WORKERS}"])
    keras.utils.set_random_seed(0)
    groups = [training.image_group("image", size.side, 3, "uint8", 120.0, 60.0)]
    model = training.network(groups, config.model, 10)
    trained = training.configured_training(config, model, collective, "single_label", steps_per_epoch=1)
    server = trained.server if isinstance(trained, ServerStep) else None
    trained.begin(0)
    trained.optimizer.learning_rate = 0.001
    images, _ = training.noise(groups, 2, 10, collective.rank, below=255)
    targets = tf.one_hot([collective.rank, 9 - collective.rank], 10)

    def take(number: int) -> None:
        slowest = WORKERS - 1 if slow == "straggler" else number % WORKERS
        # A step that is over is left out before it would be computed.
        if server is None or server.begin_batch():
            time.sleep(size.sleep * (SLOWER if collective.rank == slowest else 1))
        float(trained.step(images, targets))

    take(0)  # compiles
    collective.sum(np.zeros(1))
    number, began = 1, time.monotonic()
    if server is None:  # every step takes as long as the slowest worker
        for number in range(1, 1 + max(1, round(size.seconds / (SLOWER * size.sleep)))):
            take(number)
        return number / (time.monotonic() - began)
    before = server.updates
    while time.monotonic() - began < size.seconds:
        take(number)
        number += 1
    updates, took = server.updates - before, time.monotonic() - began
    server.close()
    # An update in lock step is a step of all workers; else it is a push of one of them.
    return updates / took if server.rule.name == "backup" else updates / took / WORKERS


def straggler_figures(*, smoke: bool = False) -> dict[str, float | None]:
    """Measure all modes in turn; figures by their names in the last line."""
    size = SERVER_SMOKE if smoke else ServerSize()
    kinds = [(slow, name) for slow in ("straggler", "passing") for name in MODES]
    cases = [(size, MODES[name], slow) for slow, name in kinds]
    found: dict[tuple[str, str], list[float]] = {kind: [] for kind in kinds}
    for _ in range(size.rounds):
        for (slow, name), ranks in zip(
            kinds, each_on_ranks(WORKERS, steps_on_rank, cases, together=smoke), strict=True
        ):
            found[slow, name].append(ranks[0])  # as rank 0 sees it
            print(f"{slow}, {name:11} {ranks[0]:.2f} steps/s", flush=True)
    return {
        f"{name}_speedup_with_{words}": ratio(found[slow, name], found[slow, "synchronous"])
        for slow, words in (("straggler", "straggler"), ("passing", "passing_stragglers"))
        for name in MODES
        if name != "synchronous"
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
