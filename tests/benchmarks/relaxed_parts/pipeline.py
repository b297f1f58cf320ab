"""A pipeline of two stages beside two data-parallel ranks: ticks without work, seconds and peak memory of a step.

Both train a ResNet-50 on two ranks of one thread each, with the same global batch in the same micro-batches, in
processes of their own, whose peak of resident memory is theirs alone. Rounds in turn; medians. Memory is that of the
rank that takes most, less what a rank holds before it makes the network.
"""

import statistics
import sys
import time
from dataclasses import dataclass
from typing import Any

import cloudpickle

from pipelines.launch.runner import BarrierRunner
from pipelines.training.modes.ticks import idle_formula


@dataclass(frozen=True)
class Size:
    """How much is measured."""

    depth: int = 50
    width_factor: float = 1.0
    side: int = 60
    """Pixels of the images on each side."""
    micro_batch: int = 16
    micro_batches: int = 4
    """Those of the pipeline in a step; data-parallel ranks share them."""
    steps: int = 4
    """The first one compiles, and is not counted."""
    rounds: int = 3


RANKS = 2
SMOKE = Size(depth=18, width_factor=0.125, side=16, micro_batch=2, steps=2, rounds=1)
MIB = 1 << 20


def steps_of(size: Size, stages: int) -> dict[str, float]:
    """Train some steps on this rank: as a stage, or with the whole network where there is one stage."""
    import keras
    import numpy as np
    import tensorflow as tf

    from conf.load import load
    from models.layers.preprocessing import InputGroup
    from models.losses import classification_loss
    from models.networks.model import build_model
    from models.networks.stages import cut
    from pipelines.training.accumulation import Accumulation
    from pipelines.training.collective import HorovodCollective
    from pipelines.training.finders.memory import resident_peak
    from pipelines.training.modes.pipeline import Pipeline
    from pipelines.training.modes.synchronous import Synchronous
    from pipelines.training.recipe import make_exchange, make_optimizer
    from pipelines.training.step import make_accumulate, make_train_step

    collective, config = HorovodCollective(stages, has_peers=stages > 1), load("smoke")
    before = resident_peak()
    keras.utils.set_random_seed(0)
    group = InputGroup("image", (size.side, size.side, 12), "uint16", (1000.0,) * 12, (500.0,) * 12)
    model = build_model(
        [group],
        network="resnet",
        classes=19,
        upsampling="nearest",
        augmentation=None,
        depth=size.depth,
        width_factor=size.width_factor,
        dropout=0.0,
        stochastic_depth=0.0,
        zero_init_residual=True,
    )
    optimizer, loss = make_optimizer(config.optimizer, model), classification_loss("multi_label")
    optimizer.learning_rate = 0.01
    taken = size.micro_batches * stages // RANKS
    if stages > 1:
        exchange = make_exchange(config, collective.peers)
        step: Any = Pipeline(
            cut(model, stages),
            collective,
            loss,
            optimizer,
            exchange,
            Synchronous(optimizer, exchange),
            micro_batches=taken,
            samples=size.micro_batch,
            jit_compile=False,
        )
        take = step.take
    else:
        sums, exchange = Accumulation(model, taken), make_exchange(config, collective)
        step = make_train_step(model, loss, optimizer, exchange, jit_compile=False, accumulation=sums)
        take = make_accumulate(model, loss, sums, jit_compile=False)
    random = np.random.default_rng(0)
    images = random.integers(0, 5000, (size.micro_batch, size.side, size.side, 12), dtype=np.uint16)
    batch = {"image": tf.constant(images)}, tf.constant(random.integers(0, 2, (size.micro_batch, 19)), tf.float32)
    seconds = []
    for _ in range(size.steps):
        started = time.perf_counter()
        for _ in range(taken - 1):
            take(*batch)
        float(step(*batch))
        seconds.append(time.perf_counter() - started)
    idle = step.idle_share if stages > 1 else 0.0
    peak = (resident_peak() - before) / MIB
    return {"seconds": statistics.median(seconds[1:]), "peak_mib": peak, "idle_share": idle}


def pipeline_figures(*, smoke: bool = False) -> dict[str, float]:
    """Measure both in turn; figures by their names in the last line."""
    size = SMOKE if smoke else Size()
    # This module cannot be imported in a worker process: its function travels as code.
    cloudpickle.register_pickle_by_value(sys.modules[__name__])
    threads = dict.fromkeys(("OMP_NUM_THREADS", "TF_NUM_INTRAOP_THREADS", "TF_NUM_INTEROP_THREADS"), "1")
    runner = BarrierRunner(None, RANKS, env=threads, on_log=lambda rank, line: None)
    found: dict[int, list[list[dict[str, float]]]] = {1: [], RANKS: []}
    for _ in range(size.rounds):
        for stages, rounds in found.items():
            rounds.append(runner.run_all(steps_of, size, stages))

    def median(stages: int, name: str) -> float:
        return statistics.median(max(rank[name] for rank in ranks) for ranks in found[stages])

    return {
        "pipeline_idle_share": median(RANKS, "idle_share"),
        "pipeline_idle_formula": idle_formula(RANKS, size.micro_batches),
        "pipeline_seconds_per_step": median(RANKS, "seconds"),
        "pipeline_peak_mib": median(RANKS, "peak_mib"),
        "data_parallel_seconds_per_step": median(1, "seconds"),
        "data_parallel_peak_mib": median(1, "peak_mib"),
    }
