"""What a training step costs on smaller images (`input.resolution_schedule`): steps of each size in turn, medians.

Two networks on one rank: the one of CIFAR-10 in bfloat16 at 32 pixels, and ResNet-50 on 12 bands of three resolutions
at 120 pixels. Each is measured without the layer that resizes, and with it at full size, 0.75 and 0.5 of it. The first
step of a size traces and compiles its graph. `--smoke` takes tiny networks.
"""

import argparse
import json
import os
import statistics
import sys
from dataclasses import dataclass
from typing import Any

import cloudpickle

from conf.networks import ResNetCifarConfig, ResNetConfig
from pipelines.launch.runner import BarrierRunner

SCALES = (1.0, 0.75, 0.5)


@dataclass(frozen=True)
class Case:
    """One network and its images."""

    network: ResNetConfig | ResNetCifarConfig
    groups: tuple[tuple[int, int], ...]
    """Side and bands of each image group."""
    precision: str
    batch_size: int
    rounds: int


CASES = {
    "cifar": Case(ResNetCifarConfig(depth=20), ((32, 3),), "bfloat16", 64, 20),
    "resnet50": Case(ResNetConfig(), ((120, 4), (60, 6), (20, 2)), "float32", 4, 6),
}
SMOKE_CASES = {
    "cifar": Case(ResNetCifarConfig(depth=8), ((16, 3),), "bfloat16", 2, 2),
    "resnet50": Case(ResNetConfig(depth=18, width_factor=0.125), ((24, 4), (12, 6)), "float32", 2, 2),
}


def measure(case: Case) -> tuple[dict[str, list[float]], dict[str, float]]:
    """Seconds of each step and of the first one, by what is trained."""
    import time

    import keras
    import numpy as np
    import tensorflow as tf

    from conf.exchange import ExchangeConfig
    from conf.optimizers import LARSConfig
    from models.compression.exchange.exchange import GradientExchange
    from models.layers.preprocessing import InputGroup
    from models.losses import classification_loss
    from models.networks.model import build_model
    from pipelines.training.collective import HorovodCollective
    from pipelines.training.recipe import make_codec, make_optimizer
    from pipelines.training.step import make_train_step

    collective, loss = HorovodCollective(), classification_loss("single_label")
    groups = [
        InputGroup(f"group{number}", (side, side, bands), "uint16", (1000.0,) * bands, (500.0,) * bands)
        for number, (side, bands) in enumerate(case.groups)
    ]
    random = np.random.default_rng(0)
    shapes = {group.name: (case.batch_size, *group.shape) for group in groups}
    images = {name: tf.constant(random.integers(0, 5000, shape, dtype=np.uint16)) for name, shape in shapes.items()}
    targets = tf.one_hot(random.integers(0, 10, case.batch_size), 10)

    def make(*, resizes: bool) -> Any:
        keras.utils.set_random_seed(0)
        settings = {**case.network.arguments(), "upsampling": "nearest", "augmentation": None, "resizes": resizes}
        model = build_model(groups, network=case.network.name, classes=10, precision=case.precision, **settings)
        optimizer, exchanged = make_optimizer(LARSConfig(), model), ExchangeConfig()
        optimizer.learning_rate = 0.01
        codec = make_codec(exchanged.codec, LARSConfig())
        exchange = GradientExchange(codec, collective, seed=0, **exchanged.arguments())
        return make_train_step(model, loss, optimizer, exchange, jit_compile=False)

    plain, resized, full = make(resizes=False), make(resizes=True), case.groups[0][0]
    steps = {"plain": lambda: plain(images, targets)}
    for scale in SCALES:
        side = round(scale * full)
        steps[f"{scale:g}"] = lambda side=side: resized(images, targets, None, (side, side))
    seconds: dict[str, list[float]] = {name: [] for name in steps}
    for _ in range(1 + case.rounds):
        for name, step in steps.items():
            started = time.perf_counter()
            float(step())
            seconds[name].append(time.perf_counter() - started)
    return {name: values[1:] for name, values in seconds.items()}, {name: values[0] for name, values in seconds.items()}


def main() -> None:
    """Measure each case, and print a table and the JSON line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--smoke", action="store_true", help="two steps of tiny networks")
    parser.add_argument("--cases", nargs="+", choices=CASES, default=list(CASES))
    arguments = parser.parse_args()
    cases = SMOKE_CASES if arguments.smoke else CASES
    cloudpickle.register_pickle_by_value(sys.modules[__name__])
    figures: dict[str, Any] = {"cores": os.cpu_count()}
    for name in arguments.cases:
        case = cases[name]
        runner = BarrierRunner(None, 1, threads_per_worker=os.cpu_count(), log_to_driver="none")
        seconds, first = runner.run(measure, case)
        # Of steps in turn, so that what else runs on the machine falls on all alike.
        speedups = {
            kind: round(statistics.median(a / b for a, b in zip(seconds["plain"], values, strict=True)), 2)
            for kind, values in seconds.items()
        }
        median = {kind: statistics.median(values) for kind, values in seconds.items()}
        for kind, value in median.items():
            rate = case.batch_size / value
            print(
                f"{name:<10}{kind:>6}  {rate:9.1f} images/s  {speedups[kind]:5.2f}x  first step {first[kind]:6.1f} s",
                flush=True,
            )
        figures[f"speedup_{name}"] = speedups
        figures[f"compile_seconds_{name}"] = {kind: round(first[kind] - median[kind], 1) for kind in seconds}
    print(json.dumps(figures))


if __name__ == "__main__":
    main()
