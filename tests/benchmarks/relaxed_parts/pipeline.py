"""A pipeline of two stages beside two data-parallel ranks: ticks without work, seconds and peak memory of a step.

Both train a ResNet-50 on two ranks of one thread each, with the same global batch in the same micro-batches, in
processes of their own, whose peak of resident memory is theirs alone. Rounds in turn; medians. Memory is that of the
rank that takes most, less what a rank holds before it makes the network.
"""

import statistics
from dataclasses import dataclass
from typing import Any

from conf.networks import ResNetCifarConfig, ResNetConfig
from pipelines.training.modes.ticks import idle_formula
from tests.benchmarks.parts.figures import largest, medians
from tests.benchmarks.parts.ranks import each_on_ranks


@dataclass(frozen=True)
class Size:
    """How much is measured."""

    network: ResNetConfig | ResNetCifarConfig = ResNetConfig()  # noqa: RUF009  it is frozen
    side: int = 60
    """Pixels of the images on each side."""
    micro_batch: int = 16
    micro_batches: int = 4
    """Those of the pipeline in a step; data-parallel ranks share them."""
    steps: int = 4
    """The first one compiles, and is not counted."""
    rounds: int = 3


RANKS = 2
SMOKE = Size(ResNetCifarConfig(depth=8, width_factor=0.5), side=16, micro_batch=2, steps=2, rounds=1)


def steps_of(size: Size, stages: int) -> dict[str, float]:
    """Train some steps on this rank: as a stage, or with the whole network where there is one stage."""
    import keras

    from conf.load import load
    from models.losses import classification_loss
    from models.networks.stages import cut
    from pipelines.training.accumulation import Accumulation
    from pipelines.training.collective import HorovodCollective
    from pipelines.training.finders.memory import resident_peak
    from pipelines.training.modes.pipeline import Pipeline
    from pipelines.training.modes.synchronous import Synchronous
    from pipelines.training.recipe import make_exchange, make_optimizer
    from pipelines.training.step import make_accumulate, make_train_step
    from tests.benchmarks.parts import training

    collective, config = HorovodCollective(stages, has_peers=stages > 1), load("smoke")
    before = resident_peak()
    keras.utils.set_random_seed(0)
    groups = [training.image_group("image", size.side, 12)]
    model = training.network(groups, size.network, 19)
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
    batch = training.noise(groups, size.micro_batch, 19)

    def whole_step() -> Any:
        for _ in range(taken - 1):
            take(*batch)
        return step(*batch)

    seconds = training.timed(whole_step, steps=size.steps)
    return {
        "seconds_per_step": statistics.median(seconds[1:]),
        "peak_mib": (resident_peak() - before) / training.MIB,
        "idle_share": step.idle_share if stages > 1 else 0.0,
    }


def pipeline_figures(*, smoke: bool = False) -> dict[str, float]:
    """Measure both in turn; figures by their names in the last line."""
    size = SMOKE if smoke else Size()
    rounds = [
        [largest(ranks) for ranks in each_on_ranks(RANKS, steps_of, [(size, 1), (size, RANKS)], together=smoke)]
        for _ in range(size.rounds)
    ]
    parallel, pipeline = (medians(of_rounds) for of_rounds in zip(*rounds, strict=True))
    return {
        "pipeline_idle_share": pipeline["idle_share"],
        "pipeline_idle_formula": idle_formula(RANKS, size.micro_batches),
        "pipeline_seconds_per_step": pipeline["seconds_per_step"],
        "pipeline_peak_mib": pipeline["peak_mib"],
        "data_parallel_seconds_per_step": parallel["seconds_per_step"],
        "data_parallel_peak_mib": parallel["peak_mib"],
    }
