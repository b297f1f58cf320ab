"""One rank: builds what its first argument says, then does as many steps as each line of its input asks for.

    {"kind": "step" or "exchange", "method": settings, "bucket_mib": None, "rank": 0, ...}

Input: a line `{"steps": 3}`; output: a line with the wall seconds of each step, the bytes that the
interface sent during them, and payload bytes of each. `{"idle": 2.0}` asks for the bytes sent in two seconds without a
step: Horovod's ranks never stop talking. The end of the input ends the rank.
"""

import functools
import itertools
import socket
import threading
import time
from pathlib import Path

from tests.benchmarks.parts.answers import answer
from tests.patience import patient

RENDEZVOUS_PORT = 29400
BATCH_SIZE, CLASSES = 8, 43
BATCHES = 4
_SENT = Path("/sys/class/net/eth0/statistics/tx_bytes")


def prepare(settings):
    """The function that answers each line."""
    build = {"step": full_step, "exchange": exchange_alone}[settings["kind"]]
    step, metrics = build(settings["method"], settings.get("bucket_mib"), joined(settings))
    return lambda asked: idle(asked["idle"]) if "idle" in asked else measure(step, metrics, asked["steps"])


def joined(settings):
    """The collective of all ranks, when each has found the rendezvous."""
    if settings["rank"] == 0:
        serve_rendezvous(settings["address"], settings["size"])
    join(settings["rendezvous"])
    # After the rendezvous, which needs neither; each takes seconds to import.
    from pipelines.training.ranks.collective import HorovodCollective

    return HorovodCollective()


def serve_rendezvous(address, size):
    """In rank 0, where its host can be reached; it is idle once all have joined."""
    from horovod.runner.common.util.hosts import get_host_assignments, parse_hosts
    from horovod.runner.http.http_server import RendezvousHandler, RendezvousHTTPServer

    server = RendezvousHTTPServer((address, RENDEZVOUS_PORT), RendezvousHandler, False)
    server.init(get_host_assignments(parse_hosts(",".join(f"{address}{i}:1" for i in range(size))), size))
    threading.Thread(target=server.serve_forever, daemon=True).start()


def join(address):
    deadline = time.monotonic() + patient(60)
    while True:
        try:
            socket.create_connection((address, RENDEZVOUS_PORT), timeout=1).close()
            return
        except OSError:
            if time.monotonic() > deadline:
                raise
            time.sleep(0.1)


def idle(seconds):
    before = int(_SENT.read_text())
    time.sleep(seconds)
    return {"sent_bytes": int(_SENT.read_text()) - before}


def measure(step, metrics, steps):
    import horovod.tensorflow as hvd
    import tensorflow as tf

    def barrier():
        hvd.allreduce(tf.zeros(1), name="barrier").numpy()

    seconds, payloads, parts, sent = [], [], [], 0
    barrier()
    began = time.perf_counter()
    for _ in range(steps):
        barrier()  # ranks begin together: what one does between steps is not counted as the other's waiting
        before, started = int(_SENT.read_text()), time.perf_counter()
        step()
        seconds.append(time.perf_counter() - started)
        sent += int(_SENT.read_text()) - before
        told = metrics()
        payloads.append(told["payload_bytes"])
        parts.append({name: value for name, value in told.items() if name.endswith("_seconds")})
    barrier()
    return {
        "seconds": seconds,
        "sent_bytes": sent,
        "elapsed_seconds": time.perf_counter() - began,
        "payload_bytes": payloads,
        "parts": parts,
    }


def full_step(method, bucket_mib, collective):
    """The training step of a ResNet-50 on 12 bands; Horovod's own users' where the method is Horovod's."""
    import horovod.tensorflow as hvd
    import keras
    import numpy as np
    import tensorflow as tf

    from conf.sections.networks import ResNetConfig
    from models.losses import classification_loss
    from pipelines.training.setup.recipe import make_optimizer
    from pipelines.training.step.step import make_train_step
    from tests.benchmarks.parts import training

    keras.utils.set_random_seed(0)
    groups = training.satellite_groups(120)
    model = training.network(groups, ResNetConfig(), CLASSES)
    for variable in model.trainable_variables:
        if variable.name == "gamma":
            variable.assign(np.ones(variable.shape))  # blocks that start as their shortcut have no gradient inside
    optimizer = make_optimizer(optimizer_config(method), model)
    # A rate that keeps the weights finite.
    optimizer.learning_rate = {"dgc": 0.001, "onebit_adam": 1e-5}.get(method.get("codec"), 0.01)
    loss = classification_loss("multi_label")
    batches = [
        training.noise(groups, BATCH_SIZE, CLASSES, BATCHES * collective.rank + number) for number in range(BATCHES)
    ]
    variables = model.trainable_variables
    if "horovod" in method:
        compression = getattr(hvd.Compression, method["horovod"])

        @tf.function
        def train_step(images, targets):
            with tf.GradientTape() as tape:
                value = tf.reduce_mean(loss(targets, model(images, training=True)))
            tape = hvd.DistributedGradientTape(tape, compression=compression)
            optimizer.apply(tape.gradient(value, [variable.value for variable in variables]), variables)
            return value

        payload = training.elements(model) * {"none": 4, "fp16": 2}[method["horovod"]]
        metrics = functools.partial(dict, payload_bytes=payload)
    else:
        exchange = make_exchange(method, bucket_mib, collective)
        rule = training_rule(method, model, optimizer, exchange, collective)
        train_step = make_train_step(model, loss, optimizer, exchange, rule, jit_compile=False)
        metrics = exchange.metrics
    turns = itertools.cycle(batches)

    def step():
        value = float(train_step(*next(turns)))
        if not np.isfinite(value):
            raise RuntimeError(f"the loss became {value}")

    return step, metrics


def training_rule(method, model, optimizer, exchange, collective):
    """What a step does with its gradients: as the mode that the method names, or as synchronous training."""
    from conf.sections.modes import LocalConfig
    from pipelines.training.modes.delayed import Delayed
    from pipelines.training.modes.local import LocalUpdates
    from pipelines.training.modes.synchronous import Synchronous
    from pipelines.training.ranks.stop import StopAgreement

    if "mode" not in method:
        return Synchronous(optimizer, exchange)
    exchange.build(model.trainable_variables)
    parts, settings = (model, optimizer, exchange, StopAgreement(collective)), dict(method["mode"])
    if settings.pop("name") == "delayed":
        return Delayed(*parts)
    rule = LocalUpdates(*parts, steps_per_epoch=1 << 30, **LocalConfig(**settings).arguments())
    rule.begin(0)
    return rule


def exchange_alone(method, bucket_mib, collective):
    """An exchange of random gradients of `shapes`."""
    import tensorflow as tf

    from tests.benchmarks.parts import training

    exchange = make_exchange(method, bucket_mib, collective)
    gradients = training.random_gradients(exchange, method["shapes"], collective.rank)
    function = tf.function(exchange.exchange)

    def step():
        function(gradients)[-1].numpy()

    return step, exchange.metrics


def make_exchange(method, bucket_mib, collective):
    from tests.benchmarks.parts import training

    codec = {"name": method["codec"], **method["parameters"]}
    settings = {"bucket_mib": bucket_mib, "warmup_steps": method.get("warmup_steps", 0)}
    return training.exchange_of(collective, codec, optimizer_config(method), **settings)


def optimizer_config(method):
    """LARS, or the optimizer that the codec needs."""
    from conf.sections.optimizers import LARSConfig, OneBitAdamConfig, SGDConfig

    if method.get("codec") == "dgc":
        return SGDConfig(momentum=0.0, nesterov=False, weight_decay=0.0)
    if method.get("codec") == "onebit_adam":
        return OneBitAdamConfig(warmup_steps=max(1, method.get("warmup_steps", 0)), weight_decay=0.0)
    return LARSConfig()


if __name__ == "__main__":
    answer(prepare)
