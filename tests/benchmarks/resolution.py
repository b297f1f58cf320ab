"""What a training step costs on smaller images (`input.resolution_schedule`): steps of each size in turn, medians.

Two networks on one rank: the one of CIFAR-10 in bfloat16 at 32 pixels, and ResNet-50 on 12 bands of three resolutions
at 120 pixels. Each is measured without the layer that resizes, and with it at full size, 0.75 and 0.5 of it. The first
step of a size traces and compiles its graph. `--smoke` takes tiny networks.
"""

import json
import os
import statistics
from dataclasses import dataclass
from typing import Any

from conf.sections.networks import ResNetCifarConfig, ResNetConfig
from tests.benchmarks.parts.command import command
from tests.benchmarks.parts.figures import ratio
from tests.benchmarks.parts.ranks import each_on_ranks

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
    "cifar": Case(ResNetCifarConfig(depth=2), ((16, 3),), "bfloat16", 2, 1),
    "resnet50": Case(ResNetCifarConfig(depth=2), ((24, 4), (12, 6)), "float32", 2, 1),
}


def measure(case: Case) -> tuple[dict[str, list[float]], dict[str, float]]:
    """Seconds of each step and of the first one, by what is trained."""
    import keras
    import tensorflow as tf

    from pipelines.training.ranks.collective import HorovodCollective
    from tests.benchmarks.parts import training

    collective = HorovodCollective()
    groups = [training.image_group(f"group{number}", *size) for number, size in enumerate(case.groups)]
    images, _ = training.noise(groups, case.batch_size, 10)
    targets = tf.one_hot(range(case.batch_size), 10)

    def make(*, resizes: bool) -> Any:
        keras.utils.set_random_seed(0)
        model = training.network(groups, case.network, 10, precision=case.precision, resizes=resizes)
        return training.lars_training(model, training.exchange_of(collective), "single_label").step

    plain, resized, full = make(resizes=False), make(resizes=True), case.groups[0][0]
    steps = {"plain": lambda: plain(images, targets)}
    for scale in SCALES:
        side = round(scale * full)
        steps[f"{scale:g}"] = lambda side=side: resized(images, targets, None, (side, side))
    seconds: dict[str, list[float]] = {name: [] for name in steps}
    for _ in range(1 + case.rounds):
        for name, step in steps.items():
            seconds[name] += training.timed(step, steps=1)
    return {name: values[1:] for name, values in seconds.items()}, {name: values[0] for name, values in seconds.items()}


def main() -> None:
    """Measure each case, and print a table and the JSON line."""
    parser = command(__doc__, "a step of tiny networks")
    parser.add_argument("--cases", nargs="+", choices=CASES, default=list(CASES))
    arguments = parser.parse_args()
    cases = SMOKE_CASES if arguments.smoke else CASES
    asked = [(cases[name],) for name in arguments.cases]
    figures: dict[str, Any] = {"cores": os.cpu_count()}
    found = each_on_ranks(1, measure, asked, together=arguments.smoke, threads=None)
    for name, ((seconds, first),) in zip(arguments.cases, found, strict=True):
        # Of steps in turn, so that what else runs on the machine falls on all alike.
        speedups = {kind: ratio(seconds["plain"], values, 2) for kind, values in seconds.items()}
        median = {kind: statistics.median(values) for kind, values in seconds.items()}
        for kind, value in median.items():
            rate = cases[name].batch_size / value
            print(
                f"{name:<10}{kind:>6}  {rate:9.1f} images/s  {speedups[kind]:5.2f}x  first step {first[kind]:6.1f} s",
                flush=True,
            )
        figures[f"speedup_{name}"] = speedups
        figures[f"compile_seconds_{name}"] = {kind: round(first[kind] - median[kind], 1) for kind in seconds}
    print(json.dumps(figures))


if __name__ == "__main__":
    main()
