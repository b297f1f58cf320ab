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

import argparse
import json
import os
import statistics
import sys
from dataclasses import asdict, dataclass

import cloudpickle
from relaxed_parts.pipeline import pipeline_figures
from relaxed_parts.server import straggler_figures

from pipelines.launch.runner import BarrierRunner

RANKS = 2
MOMENTS = {"lars": 1, "adamw": 2}
MIB = 1 << 20


@dataclass(frozen=True)
class Size:
    """What is trained, and how long."""

    depth: int = 50
    width_factor: float = 1.0
    batch_size: int = 8
    side: int = 60
    """Pixels on each side."""
    steps: int = 8
    rounds: int = 3


SMOKE = Size(depth=18, width_factor=0.125, batch_size=1, side=12, steps=2, rounds=1)


@dataclass(frozen=True)
class Measured:
    """One rank's training."""

    bytes_per_parameter: float
    peak_mib: float
    seconds_per_step: float


def train(size: Size, optimizer: str, *, sharded: bool) -> Measured:
    """Take some steps on this rank; its time is the median of all steps but the first two."""
    import math
    import time

    import numpy as np
    import tensorflow as tf

    from conf.load import resolve
    from models.layers.preprocessing import InputGroup
    from models.losses import classification_loss
    from models.networks.model import build_model
    from pipelines.training.collective import HorovodCollective
    from pipelines.training.finders.memory import resident_peak
    from pipelines.training.modes.table import make_mode
    from pipelines.training.recipe import make_exchange, make_optimizer, make_shards
    from pipelines.training.step import make_train_step
    from pipelines.training.stop import StopAgreement

    mode = f"training.mode={{name: synchronous, shard_optimizer: {str(sharded).lower()}}}"
    network = f"model={{name: resnet, depth: {size.depth}, width_factor: {size.width_factor}}}"
    config, collective = resolve("smoke", [mode, network, f"optimizer={optimizer}"]), HorovodCollective()
    tf.keras.utils.set_random_seed(0)
    group = InputGroup("image", (size.side, size.side, 12), "uint16", (1000.0,) * 12, (500.0,) * 12)
    model = build_model(
        [group],
        network="resnet",
        classes=19,
        precision="float32",
        upsampling="nearest",
        augmentation=None,
        **config.model.arguments(),
    )
    exchange = make_exchange(config, collective)
    shards = make_shards(config, model, exchange, collective)
    adapt = make_optimizer(config.optimizer, model, shards=shards)
    stop = StopAgreement(collective, requested=lambda: False)
    rule = make_mode(config.training.mode, model, adapt, exchange, stop, steps_per_epoch=size.steps)
    step = make_train_step(
        model, classification_loss("multi_label"), adapt, exchange, jit_compile=config.training.jit_compile, mode=rule
    )
    adapt.learning_rate = 1e-3
    random = np.random.default_rng(collective.rank)
    images = {"image": tf.constant(random.integers(0, 5000, (size.batch_size, *group.shape), dtype=np.uint16))}
    targets = tf.constant(random.integers(0, 2, (size.batch_size, 19)).astype(np.float32))
    seconds = []
    for _ in range(2 + size.steps):
        began = time.perf_counter()
        float(step(images, targets))
        seconds.append(time.perf_counter() - began)
    trained = model.trainable_variables
    parameters = sum(math.prod(variable.shape) for variable in trained)
    held = sum(np.asarray(variable).nbytes for variable in [*trained, *adapt.variables]) + 4 * parameters
    return Measured(held / parameters, resident_peak() / MIB, statistics.median(seconds[2:]))


def measure(size: Size, optimizer: str) -> dict[str, dict[str, float]]:
    """Figures with and without sharding: medians over the rounds of the rank with the most."""
    found: dict[str, list[Measured]] = {"synchronous": [], "sharded": []}
    for number in range(size.rounds):
        for name, measured in found.items():
            runner = BarrierRunner(None, RANKS, threads_per_worker=1, log_to_driver="none")
            ranks: list[Measured] = runner.run_all(train, size, optimizer, sharded=name == "sharded")
            most = Measured(*(max(values) for values in zip(*(asdict(rank).values() for rank in ranks), strict=True)))
            measured.append(most)
            print(
                f"{optimizer}, round {number + 1}, {name:11} {most.bytes_per_parameter:.3f} bytes a parameter, "
                f"peak {most.peak_mib:,.0f} MiB, {most.seconds_per_step:.3f} s a step",
                flush=True,
            )
    return {
        name: {key: round(statistics.median(asdict(each)[key] for each in measured), 4) for key in asdict(measured[0])}
        for name, measured in found.items()
    }


def main() -> None:
    """Measure, and print the JSON line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--smoke", action="store_true", help="one round with a tiny network")
    smoke = parser.parse_args().smoke
    size = SMOKE if smoke else Size()
    cloudpickle.register_pickle_by_value(sys.modules[__name__])
    optimizers = {name: measure(size, name) for name in MOMENTS}
    figures = {
        "shard_bytes_per_parameter": optimizers["lars"]["sharded"]["bytes_per_parameter"],
        "shard_bytes_formula": 8 + 4 * MOMENTS["lars"] / RANKS,
        "shard_optimizers": {
            name: {**of, "bytes_formula": 8 + 4 * MOMENTS[name] / RANKS} for name, of in optimizers.items()
        },
        **pipeline_figures(smoke=smoke),
        **straggler_figures(smoke=smoke),
        "ranks": RANKS,
        "cores": os.cpu_count(),
    }
    print(json.dumps(figures))


if __name__ == "__main__":
    main()
