"""The training step of ResNet-50 at 120x120x12, batch 32, beside `keras.applications.ResNet50` + `model.fit`.

All are run in turn, several rounds, each in a fresh worker process with the launcher's environment: one rank on all
cores, two ranks with half of them each, and Keras alone on all cores with ready float32 images; each of them in float32
and in bfloat16 (`training.precision`, Keras's `mixed_bfloat16`). Ours also upsamples and normalises uint16 groups,
exchanges, and applies LARS. `--smoke` runs one round of small steps of small networks, both precisions in one process.

Goals of the ratios in bfloat16 exist only where the processor has instructions for it, which `bf16_isa` names: 0.95 of
Keras's own `mixed_bfloat16`, and of Keras's float32 1.6 times (AVX-512 BF16) or 1.8 times (AMX).
"""

import itertools
import json
import os
import platform
import statistics
from dataclasses import dataclass, field

from conf.sections.networks import ResNetCifarConfig, ResNetConfig
from pipelines.training.setup.precision import bfloat16_isa
from tests.benchmarks.parts.command import is_smoke
from tests.benchmarks.parts.figures import ratio
from tests.benchmarks.parts.ranks import all_of, on_ranks


@dataclass(frozen=True)
class Size:
    """How much is measured."""

    batch_size: int = 32
    warmup_steps: int = 2
    measured_steps: int = 6
    rounds: int = 5
    side: int = 120
    """Pixels of the finest images on each side; divisible by 6."""
    network: ResNetConfig | ResNetCifarConfig = field(default_factory=ResNetConfig)
    """Ours."""
    rival: str = "ResNet50"
    """Network of `keras.applications`."""
    processes: tuple[tuple[str, ...], ...] = (("float32",), ("bfloat16",))
    """The precisions that each worker process measures."""


SMOKE = Size(
    batch_size=2,
    warmup_steps=1,
    measured_steps=1,
    rounds=1,
    side=36,
    network=ResNetCifarConfig(depth=2),
    rival="MobileNet",
    processes=(("float32", "bfloat16"),),
)


def groundswell_steps(size: Size, precision: str) -> float:
    """Seconds per step, the median, on this rank."""
    from pipelines.training.ranks.collective import HorovodCollective
    from tests.benchmarks.parts import training

    collective, groups = HorovodCollective(), training.satellite_groups(size.side)
    model = training.network(groups, size.network, 19, precision=precision)
    step = training.lars_training(model, training.exchange_of(collective, bucket_mib=None)).step
    batch = training.noise(groups, size.batch_size, 19, collective.rank)
    seconds = training.timed(step, *batch, steps=size.warmup_steps + size.measured_steps)
    return statistics.median(seconds[size.warmup_steps :])


def keras_steps(size: Size, precision: str) -> float:
    """Seconds per step of `model.fit`, the median."""
    import time

    import keras
    import numpy as np
    import tensorflow as tf

    keras.config.set_dtype_policy({"float32": "float32", "bfloat16": "mixed_bfloat16"}[precision])
    network = getattr(keras.applications, size.rival)
    model = network(weights=None, input_shape=(size.side, size.side, 12), classes=19, classifier_activation=None)
    model.compile(
        keras.optimizers.SGD(0.01, momentum=0.9, nesterov=True), keras.losses.BinaryCrossentropy(from_logits=True)
    )
    random = np.random.default_rng(0)
    images = tf.constant(random.standard_normal((size.batch_size, size.side, size.side, 12)).astype(np.float32))
    targets = tf.constant(random.integers(0, 2, (size.batch_size, 19)).astype(np.float32))
    ended: list[float] = []

    class Clock(keras.callbacks.Callback):
        def on_train_batch_end(self, batch: int, logs: object = None) -> None:
            ended.append(time.perf_counter())

    steps = size.warmup_steps + size.measured_steps
    data = tf.data.Dataset.from_tensors((images, targets)).repeat(steps)
    model.fit(data, epochs=1, verbose=0, callbacks=[Clock()])
    return float(np.median(np.diff(ended)[size.warmup_steps - 1 :]))


def main() -> None:
    """Run all rounds and print the table and the JSON line."""
    size = SMOKE if is_smoke(__doc__, "one round of two small steps, in less than a minute") else Size()
    runs = (("keras fit", 1, keras_steps), ("one rank", 1, groundswell_steps), ("two ranks", 2, groundswell_steps))
    suffixes = {"float32": "", "bfloat16": " bf16"}
    rates: dict[str, list[float]] = {f"{name}{suffix}": [] for suffix in suffixes.values() for name, _, _ in runs}
    for number in range(size.rounds):
        for precisions, (name, ranks, function) in itertools.product(size.processes, runs):
            seconds = on_ranks(ranks, all_of, function, [(size, each) for each in precisions], threads=None)
            for precision, both in zip(precisions, zip(*seconds, strict=True), strict=True):
                rates[f"{name}{suffixes[precision]}"].append(ranks * size.batch_size / max(both))
        print(f"round {number + 1}: " + ", ".join(f"{name} {values[-1]:.2f}" for name, values in rates.items()))
    pairs = {
        "ratio_vs_keras_fit": ("one rank", "keras fit"),
        "ratio_vs_keras_fit_two_ranks": ("two ranks", "keras fit"),
        "ratio_bf16_vs_keras_fit": ("one rank bf16", "keras fit bf16"),
        "ratio_bf16_vs_keras_fit_two_ranks": ("two ranks bf16", "keras fit bf16"),
        "ratio_bf16_vs_keras_fit_float32": ("one rank bf16", "keras fit"),
        "ratio_bf16_vs_keras_fit_float32_two_ranks": ("two ranks bf16", "keras fit"),
    }
    names = {"one rank": "", "two ranks": "_two_ranks", "keras fit": "_keras_fit"}
    result = {
        **{
            f"images_per_second{suffix.replace(' ', '_')}{of}": round(statistics.median(rates[f"{name}{suffix}"]), 2)
            for suffix in suffixes.values()
            for name, of in names.items()
        },
        **{name: ratio(rates[one], rates[other]) for name, (one, other) in pairs.items()},
        "bf16_isa": bfloat16_isa(),
        "batch_size": size.batch_size,
        "cores": os.cpu_count(),
        "machine": platform.machine(),
    }
    print(json.dumps(result))


if __name__ == "__main__":
    main()
