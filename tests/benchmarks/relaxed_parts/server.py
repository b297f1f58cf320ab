"""Steps per second with one slow worker: a parameter server beside synchronous training.

Three ranks train a small network (a ResNet-20 for CIFAR-10, 2 samples each). Each step also sleeps: there are fewer
cores than ranks, and sleeping stands for the computing of machines of their own. Two kinds of slow workers: one rank
always sleeps 5 times as long (`straggler`), or in every step one rank does, which is another one each time (`passing`).
All train for about the same time. A step is one update by all workers, or as many pushes as there are workers.
Gradients that were dropped do not count. Rounds in turn; medians.
"""

from dataclasses import dataclass

from tests.benchmarks.parts.figures import ratio
from tests.benchmarks.parts.ranks import each_on_ranks

RANKS = 3
SLOWER = 5
MODES = {
    "synchronous": "synchronous",
    "ssp": "{name: parameter_server, synchrony: ssp, bound: 3}",
    "async": "{name: parameter_server, synchrony: async}",
    "backup": "{name: parameter_server, synchrony: backup, backup_workers: 1}",
}


@dataclass(frozen=True)
class Size:
    """How much is measured."""

    depth: int = 20
    side: int = 32
    sleep: float = 0.1
    """Seconds of a usual worker's step."""
    seconds: float = 8.0
    """Time of each training, after its first step."""
    rounds: int = 3


SMOKE = Size(depth=2, side=16, sleep=0.01, seconds=0.2, rounds=1)


def steps_on_rank(size: Size, mode: str, slow: str) -> float:
    """Train for some seconds on this rank; steps per second of all workers, as the updates of its shard show them."""
    import time

    import keras
    import numpy as np
    import tensorflow as tf

    from conf.load import resolve
    from pipelines.training.collective import HorovodCollective
    from pipelines.training.modes.parameter_server import ParameterServer
    from tests.benchmarks.parts import training

    collective = HorovodCollective()
    network = f"model={{name: resnet_cifar, depth: {size.depth}}}"
    config = resolve("smoke", [f"training.mode={mode}", network, "optimizer=sgd", f"launch.num_workers={RANKS}"])
    keras.utils.set_random_seed(0)
    groups = [training.image_group("image", size.side, 3, "uint8", 120.0, 60.0)]
    model = training.network(groups, config.model, 10)
    trained = training.configured_training(config, model, collective, "single_label", steps_per_epoch=1)
    server = trained.mode if isinstance(trained.mode, ParameterServer) else None
    trained.mode.begin(0)
    trained.optimizer.learning_rate = 0.001
    images, _ = training.noise(groups, 2, 10, collective.rank, below=255)
    targets = tf.one_hot([collective.rank, 9 - collective.rank], 10)

    def take(number: int) -> None:
        slowest = RANKS - 1 if slow == "straggler" else number % RANKS
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
    return updates / took if server.rule.name == "backup" else updates / took / RANKS


def straggler_figures(*, smoke: bool = False) -> dict[str, float | None]:
    """Measure all modes in turn; figures by their names in the last line."""
    size = SMOKE if smoke else Size()
    kinds = [(slow, name) for slow in ("straggler", "passing") for name in MODES]
    cases = [(size, MODES[name], slow) for slow, name in kinds]
    found: dict[tuple[str, str], list[float]] = {kind: [] for kind in kinds}
    for _ in range(size.rounds):
        for (slow, name), ranks in zip(kinds, each_on_ranks(RANKS, steps_on_rank, cases, together=smoke), strict=True):
            found[slow, name].append(ranks[0])  # as rank 0 sees it
            print(f"{slow}, {name:11} {ranks[0]:.2f} steps/s", flush=True)
    return {
        f"{name}_speedup_with_{words}": ratio(found[slow, name], found[slow, "synchronous"])
        for slow, words in (("straggler", "straggler"), ("passing", "passing_stragglers"))
        for name in MODES
        if name != "synchronous"
    }
