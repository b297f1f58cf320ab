"""Peak memory of a rank by the number of micro-batches per step: ResNet-50, in processes of their own.

Accumulation keeps a sum of gradients beside what one batch needs, for any number of micro-batches. Two cases: a network
of twice the usual width on one rank, so that one float32 gradient is large beside what two processes of the same kind
differ by, and a global batch of 32,768 on two ranks. Rounds in turn; medians. `--smoke` takes tiny networks and no
round twice.
"""

import argparse
import json
import os
import statistics
import sys
from dataclasses import dataclass

import cloudpickle

from pipelines.launch.runner import BarrierRunner


@dataclass(frozen=True)
class Case:
    """One network and batch per rank, with several numbers of micro-batches."""

    micro_batches: tuple[int, ...]
    ranks: int = 1
    depth: int = 50
    width_factor: float = 1.0
    batch_size: int = 4
    side: int = 60
    """Pixels on each side."""
    steps: int = 3


ROUNDS = 3
CASES = {
    "twice the width": Case((1, 2, 64), width_factor=2.0),
    "global batch 32,768": Case((1, 256), ranks=2, batch_size=64, side=32, steps=1),
}
SMOKE = {
    "twice the width": Case((1, 2), depth=18, width_factor=0.125, batch_size=1, side=12, steps=2),
    "global batch 32,768": Case((1, 2), ranks=2, depth=18, width_factor=0.125, batch_size=1, side=12, steps=2),
}
MIB = 1 << 20


def peak_mib(size: Case, micro_batches: int) -> tuple[float, float]:
    """Peak of this process's resident memory, and the size of one float32 gradient."""
    import numpy as np
    import tensorflow as tf

    from conf.exchange import ExchangeConfig
    from conf.networks import ResNetConfig
    from conf.optimizers import LARSConfig
    from models.compression.exchange.exchange import GradientExchange
    from models.layers.preprocessing import InputGroup
    from models.losses import classification_loss
    from models.networks.model import build_model
    from pipelines.training.accumulation import Accumulation
    from pipelines.training.collective import HorovodCollective
    from pipelines.training.finders.memory import resident_peak
    from pipelines.training.recipe import make_codec, make_optimizer
    from pipelines.training.step import make_accumulate, make_train_step

    group = InputGroup("image", (size.side, size.side, 4), "uint16", (1000.0,) * 4, (500.0,) * 4)
    network = ResNetConfig(depth=size.depth, width_factor=size.width_factor).arguments()
    model = build_model(
        [group], network="resnet", classes=19, precision="float32", **network, upsampling="nearest", augmentation=None
    )
    optimizer, loss = make_optimizer(LARSConfig(), model), classification_loss("multi_label")
    settings = ExchangeConfig()
    exchange = GradientExchange(
        make_codec(settings.codec, LARSConfig()), HorovodCollective(), seed=0, **settings.arguments()
    )
    accumulation = Accumulation(model, micro_batches) if micro_batches > 1 else None
    step = make_train_step(model, loss, optimizer, exchange, jit_compile=False, accumulation=accumulation)
    add = None if accumulation is None else make_accumulate(model, loss, accumulation, jit_compile=False)
    random = np.random.default_rng(0)
    images = {"image": tf.constant(random.integers(0, 5000, (size.batch_size, *group.shape), dtype=np.uint16))}
    targets = tf.constant(random.integers(0, 2, (size.batch_size, 19)).astype(np.float32))
    for _ in range(size.steps):
        for _ in range(micro_batches - 1):
            add(images, targets)
        float(step(images, targets))
    gradient = sum(4 * int(np.prod(variable.shape)) for variable in model.trainable_variables)
    return resident_peak() / MIB, gradient / MIB


def main() -> None:
    """Measure in turn, and print one line per case and round and the JSON line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--smoke", action="store_true", help="one round with tiny networks")
    smoke = parser.parse_args().smoke
    cases, rounds = (SMOKE, 1) if smoke else (CASES, ROUNDS)
    cloudpickle.register_pickle_by_value(sys.modules[__name__])
    figures = {name: measure(name, case, rounds) for name, case in cases.items()}
    print(json.dumps({"cases": figures, "cores": os.cpu_count()}))


def measure(name: str, case: Case, rounds: int) -> dict[str, object]:
    """Figures of one case: peaks of the rank with the highest one, medians of the rounds."""
    peaks: dict[int, list[float]] = {count: [] for count in case.micro_batches}
    gradient = 0.0
    for number in range(rounds):
        for count in case.micro_batches:
            threads = max(1, (os.cpu_count() or 1) // case.ranks)
            runner = BarrierRunner(None, case.ranks, threads_per_worker=threads, log_to_driver="none")
            peak, gradient = max(runner.run_all(peak_mib, case, count))
            peaks[count].append(peak)
        texts = (f"{count} micro-batches {values[-1]:,.0f} MiB" for count, values in peaks.items())
        print(f"{name}, round {number + 1}: {', '.join(texts)}", flush=True)
    first, *_, last = case.micro_batches
    more = statistics.median(b - a for a, b in zip(peaks[first], peaks[last], strict=True))
    return {
        "peak_mib": {str(count): round(statistics.median(values)) for count, values in peaks.items()},
        "gradient_mib": round(gradient, 1),
        "more_gradients": round(more / gradient, 3),
        "global_batch": case.ranks * case.batch_size * last,
    }


if __name__ == "__main__":
    main()
