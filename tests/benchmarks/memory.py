"""Peak memory of one rank by the number of micro-batches per step: ResNet-50, batch 4, in processes of their own.

Accumulation keeps a sum of gradients beside what one batch needs, for any number of micro-batches. The network has
twice the usual width, so that one float32 gradient is large beside what two processes of the same kind differ by.
Rounds in turn; medians. `--smoke` takes a tiny network and no round twice.
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
class Size:
    """How much is measured."""

    depth: int = 50
    width_factor: float = 2.0
    batch_size: int = 4
    side: int = 60
    """Pixels of the finest images on each side; divisible by 6."""
    micro_batches: tuple[int, ...] = (1, 2, 64)
    steps: int = 3
    rounds: int = 3


SMOKE = Size(depth=18, width_factor=0.125, batch_size=1, side=12, micro_batches=(1, 2), steps=2, rounds=1)
MIB = 1 << 20


def peak_mib(size: Size, micro_batches: int) -> tuple[float, float]:
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
    """Measure in turn, and print one line per round and the JSON line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--smoke", action="store_true", help="one round with a tiny network")
    size = SMOKE if parser.parse_args().smoke else Size()
    cloudpickle.register_pickle_by_value(sys.modules[__name__])
    peaks: dict[int, list[float]] = {count: [] for count in size.micro_batches}
    gradient = 0.0
    for number in range(size.rounds):
        for count in size.micro_batches:
            runner = BarrierRunner(None, 1, threads_per_worker=os.cpu_count(), log_to_driver="none")
            peak, gradient = runner.run(peak_mib, size, count)
            peaks[count].append(peak)
        texts = (f"{count} micro-batches {values[-1]:,.0f} MiB" for count, values in peaks.items())
        print(f"round {number + 1}: {', '.join(texts)}", flush=True)
    first, *_, last = size.micro_batches
    more = statistics.median(b - a for a, b in zip(peaks[first], peaks[last], strict=True))
    figures = {
        "peak_mib": {str(count): round(statistics.median(values)) for count, values in peaks.items()},
        "gradient_mib": round(gradient, 1),
        "more_gradients": round(more / gradient, 3),
        "micro_batches": last,
        "cores": os.cpu_count(),
    }
    print(json.dumps(figures))


if __name__ == "__main__":
    main()
