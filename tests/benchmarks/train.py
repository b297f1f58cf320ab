"""The training step of ResNet-50 at 120x120x12, batch 32, beside `keras.applications.ResNet50` + `model.fit`.

All are run in turn, several rounds, each in a fresh worker process with the launcher's environment: one rank on all
cores, two ranks with half of them each, and Keras alone on all cores with ready float32 images; each of them in float32
and in bfloat16 (`training.precision`, Keras's `mixed_bfloat16`). Ours also upsamples and normalises uint16 groups,
exchanges, and applies LARS. `--smoke` runs one round of small steps of small networks, both precisions in one process.

Goals of the ratios in bfloat16 exist only where the processor has instructions for it, which `bf16_isa` names: 0.95 of
Keras's own `mixed_bfloat16`, and of Keras's float32 1.6 times (AVX-512 BF16) or 1.8 times (AMX).
"""

import argparse
import itertools
import json
import os
import platform
import statistics
import sys
from dataclasses import dataclass, field
from typing import Any

import cloudpickle

from conf.networks import ResNetCifarConfig, ResNetConfig
from jobs.session import spark_session
from pipelines.launch.runner import BarrierRunner
from pipelines.training.precision import bfloat16_isa


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
    network=ResNetCifarConfig(depth=8),
    rival="MobileNet",
    processes=(("float32", "bfloat16"),),
)
CORES = os.cpu_count() or 1


def groundswell_steps(size: Size, precision: str) -> float:
    """Seconds per step, the median, on this rank."""
    import time

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

    collective = HorovodCollective()
    groups = [
        InputGroup(f"bands_{metres}m", (side, side, bands), "uint16", (1000.0,) * bands, (500.0,) * bands)
        for metres, side, bands in ((10, size.side, 4), (20, size.side // 2, 6), (60, size.side // 6, 2))
    ]
    settings = {**size.network.arguments(), "upsampling": "nearest", "augmentation": None}
    model = build_model(groups, network=size.network.name, classes=19, precision=precision, **settings)
    optimizer = make_optimizer(LARSConfig(), model)
    optimizer.learning_rate = 0.01
    unbucketed = ExchangeConfig(bucket_mib=None)
    exchange = GradientExchange(
        make_codec(unbucketed.codec, LARSConfig()), collective, seed=0, **unbucketed.arguments()
    )
    step = make_train_step(model, classification_loss("multi_label"), optimizer, exchange, jit_compile=False)
    random = np.random.default_rng(collective.rank)
    images = {
        group.name: tf.constant(random.integers(0, 5000, (size.batch_size, *group.shape), dtype=np.uint16))
        for group in groups
    }
    targets = tf.constant(random.integers(0, 2, (size.batch_size, 19)).astype(np.float32))
    seconds = []
    for _ in range(size.warmup_steps + size.measured_steps):
        started = time.perf_counter()
        float(step(images, targets))
        seconds.append(time.perf_counter() - started)
    return float(np.median(seconds[size.warmup_steps :]))


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
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--smoke", action="store_true", help="one round of two small steps, in less than a minute")
    size = SMOKE if parser.parse_args().smoke else Size()
    cloudpickle.register_pickle_by_value(sys.modules[__name__])
    runs = (("keras fit", 1, keras_steps), ("one rank", 1, groundswell_steps), ("two ranks", 2, groundswell_steps))
    suffixes = {"float32": "", "bfloat16": " bf16"}
    rates: dict[str, list[float]] = {f"{name}{suffix}": [] for suffix in suffixes.values() for name, _, _ in runs}

    def threads(count: int) -> dict[str, str]:
        names = ("OMP_NUM_THREADS", "TF_NUM_INTRAOP_THREADS", "TF_NUM_INTEROP_THREADS")
        return dict.fromkeys(names, str(max(1, count)))

    with spark_session("benchmark", "local[2]") as spark:

        def run(ranks: int, function: Any, precisions: tuple[str, ...]) -> list[float]:
            """Images/s in each of some precisions."""
            environment = threads(CORES // ranks)
            runner = BarrierRunner(spark, ranks, env=environment, log_to_driver="none")
            seconds = runner.run_all(lambda: [function(size, precision) for precision in precisions])
            return [ranks * size.batch_size / max(each) for each in zip(*seconds, strict=True)]

        for number in range(size.rounds):
            for precisions, (name, ranks, function) in itertools.product(size.processes, runs):
                for precision, rate in zip(precisions, run(ranks, function, precisions), strict=True):
                    rates[f"{name}{suffixes[precision]}"].append(rate)
            print(f"round {number + 1}: " + ", ".join(f"{name} {values[-1]:.2f}" for name, values in rates.items()))
    median = {name: round(statistics.median(values), 2) for name, values in rates.items()}

    def ratio(name: str, beside: str) -> float:
        return round(statistics.median(a / b for a, b in zip(rates[name], rates[beside], strict=True)), 3)

    print(
        json.dumps(
            {
                "images_per_second": median["one rank"],
                "images_per_second_two_ranks": median["two ranks"],
                "images_per_second_keras_fit": median["keras fit"],
                "images_per_second_bf16": median["one rank bf16"],
                "images_per_second_bf16_two_ranks": median["two ranks bf16"],
                "images_per_second_bf16_keras_fit": median["keras fit bf16"],
                "ratio_vs_keras_fit": ratio("one rank", "keras fit"),
                "ratio_vs_keras_fit_two_ranks": ratio("two ranks", "keras fit"),
                "ratio_bf16_vs_keras_fit": ratio("one rank bf16", "keras fit bf16"),
                "ratio_bf16_vs_keras_fit_two_ranks": ratio("two ranks bf16", "keras fit bf16"),
                "ratio_bf16_vs_keras_fit_float32": ratio("one rank bf16", "keras fit"),
                "ratio_bf16_vs_keras_fit_float32_two_ranks": ratio("two ranks bf16", "keras fit"),
                "bf16_isa": bfloat16_isa(),
                "batch_size": size.batch_size,
                "cores": CORES,
                "machine": platform.machine(),
            }
        )
    )


if __name__ == "__main__":
    main()
