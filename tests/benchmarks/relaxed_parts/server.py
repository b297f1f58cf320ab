"""Steps per second with one slow worker: a parameter server beside synchronous training.

Three ranks train a small network (a ResNet-20 for CIFAR-10, 2 samples each). Each step also sleeps: there are fewer
cores than ranks, and sleeping stands for the computing of machines of their own. Two kinds of slow workers: one rank
always sleeps 5 times as long (`straggler`), or in every step one rank does, which is another one each time (`passing`).
All train for about the same time. A step is one update by all workers, or as many pushes as there are workers.
Gradients that were dropped do not count. Rounds in turn; medians.
"""

import statistics
import sys
from dataclasses import dataclass
from typing import Any

import cloudpickle

from pipelines.launch.runner import BarrierRunner

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


SMOKE = Size(depth=8, side=16, sleep=0.01, seconds=0.5, rounds=1)


def steps_on_rank(size: Size, mode: str, slow: str) -> float:
    """Train for some seconds on this rank; steps per second of all workers, as the updates of its shard show them."""
    import functools
    import time

    import keras
    import numpy as np
    import tensorflow as tf

    from conf.load import resolve
    from models.layers.preprocessing import InputGroup
    from models.losses import classification_loss
    from models.networks.model import build_model
    from pipelines.training.collective import HorovodCollective
    from pipelines.training.modes.parameter_server import ParameterServer
    from pipelines.training.modes.server_step import ServerStep
    from pipelines.training.modes.table import make_mode
    from pipelines.training.recipe import copy_optimizer, make_codec, make_exchange, make_optimizer
    from pipelines.training.step import make_train_step
    from pipelines.training.stop import StopAgreement

    collective = HorovodCollective()
    network = f"model={{name: resnet_cifar, depth: {size.depth}}}"
    settings = [f"training.mode={mode}", network, "optimizer=sgd", f"launch.num_workers={RANKS}"]
    config = resolve("smoke", settings)
    keras.utils.set_random_seed(0)
    group = InputGroup("image", (size.side, size.side, 3), "uint8", (120.0,) * 3, (60.0,) * 3)
    model = build_model(
        [group],
        network="resnet_cifar",
        classes=10,
        precision="float32",
        upsampling="nearest",
        augmentation=None,
        **config.model.arguments(),
    )
    optimizer, exchange = make_optimizer(config.optimizer, model), make_exchange(config, collective)
    stop = StopAgreement(collective, requested=lambda: False)
    rule = make_mode(
        config.training.mode,
        model,
        optimizer,
        exchange,
        stop,
        steps_per_epoch=1,
        copy_optimizer=functools.partial(copy_optimizer, config, model),
        codec=make_codec(config.exchange.codec, config.optimizer),
    )
    loss = classification_loss("single_label")
    if isinstance(rule, ParameterServer):
        step: Any = ServerStep(rule, model, loss, optimizer, micro_batches=1, jit_compile=False)
    else:
        step = make_train_step(model, loss, optimizer, exchange, jit_compile=False, mode=rule)
    rule.begin(0)
    optimizer.learning_rate = 0.001
    random = np.random.default_rng(collective.rank)
    images = {"image": tf.constant(random.integers(0, 255, (2, size.side, size.side, 3), dtype=np.uint8))}
    targets = tf.constant(np.eye(10, dtype=np.float32)[random.integers(0, 10, 2)])

    def take(number: int) -> None:
        slowest = RANKS - 1 if slow == "straggler" else number % RANKS
        # A step that is over is left out before it would be computed.
        if not isinstance(rule, ParameterServer) or rule.begin_batch():
            time.sleep(size.sleep * (SLOWER if collective.rank == slowest else 1))
        float(step(images, targets))

    take(0)  # compiles
    collective.sum(np.zeros(1))
    number, began = 1, time.monotonic()
    if not isinstance(rule, ParameterServer):  # every step takes as long as the slowest worker
        while number <= max(1, round(size.seconds / (SLOWER * size.sleep))):
            take(number)
            number += 1
        return (number - 1) / (time.monotonic() - began)
    before = rule.updates
    while time.monotonic() - began < size.seconds:
        take(number)
        number += 1
    updates, took = rule.updates - before, time.monotonic() - began
    rule.close()
    # An update in lock step is a step of all workers; else it is a push of one of them.
    return updates / took if rule.rule.name == "backup" else updates / took / RANKS


def straggler_figures(*, smoke: bool = False) -> dict[str, float]:
    """Measure all modes in turn; figures by their names in the last line."""
    size = SMOKE if smoke else Size()
    # This module cannot be imported in a worker process: its function travels as code.
    cloudpickle.register_pickle_by_value(sys.modules[__name__])
    found: dict[tuple[str, str], list[float]] = {}
    for _ in range(size.rounds):
        for slow in ("straggler", "passing"):
            for name, mode in MODES.items():
                runner = BarrierRunner(None, RANKS, threads_per_worker=1, log_to_driver="none")
                rate = runner.run(steps_on_rank, size, mode, slow)  # as rank 0 sees it
                found.setdefault((slow, name), []).append(rate)
                print(f"{slow}, {name:11} {rate:.2f} steps/s", flush=True)
    figures = {}
    for slow, words in (("straggler", "with_straggler"), ("passing", "with_passing_stragglers")):
        base = found[slow, "synchronous"]
        for name in ("ssp", "async", "backup"):
            pairs = zip(found[slow, name], base, strict=True)
            figures[f"{name}_speedup_{words}"] = statistics.median(rate / other for rate, other in pairs)
    return figures
