"""One rank of `test_compressed_exchange`: some codecs on a real ring."""

from typing import Any

import horovod.tensorflow as hvd
import keras
import numpy as np
import tensorflow as tf

from conf.load import load
from conf.sections.codecs import ExchangeConfig
from conf.sections.optimizers import LARSConfig, OneBitAdamConfig
from models.compression.exchange.exchange import GradientExchange
from models.losses import classification_loss
from pipelines.training.ranks.collective import HorovodCollective
from pipelines.training.setup.recipe import make_codec, make_mode

SHAPES, STEPS = ((40, 30), (30,), (3, 3, 6, 10), (7, 13), ()), 3
BUCKET_MIB, REPEATS = 0.004, 20
PARAMETERS: dict[str, dict[str, Any]] = {
    "threshold": {"tau": 0.05},
    "topk": {"density": 0.1, "density_schedule": [{"before_step": 2, "density": 0.25}]},
    "dgc": {"density": 0.1, "masking": False, "nesterov": False, "momentum": 0.0},
    "powersgd": {"rank": 2},
}


def gradients(rank, step):
    generator = np.random.default_rng((rank, step))
    return [generator.normal(size=shape).astype(np.float32) for shape in SHAPES]


def make_exchange(name, collective, *, jit_compile=False, **settings):
    config = ExchangeConfig(codec={"name": name, **PARAMETERS.get(name, {})}, **settings)
    codec = make_codec(config.codec, OneBitAdamConfig() if name == "onebit_adam" else LARSConfig())
    return GradientExchange(codec, collective, seed=0, jit_compile=jit_compile, **config.arguments())


def run_codec(name, collective, *, compiled):
    # Horovod's own operation, which `none` is compared to, takes all gradients at once.
    bucket_mib = None if name == "none" else BUCKET_MIB
    exchange = make_exchange(name, collective, dense_below=64, bucket_mib=bucket_mib, jit_compile=compiled)
    exchange.build([tf.zeros(shape) for shape in SHAPES])
    step, arrays = tf.function(exchange.exchange), {}
    for number in range(STEPS):
        for index, result in enumerate(step([tf.constant(each) for each in gradients(collective.rank, number)])):
            arrays[f"{name}/result/{number}/{index}"] = result.numpy()
    states = {f"{name}/state/{entry.name}": entry.variable.numpy() for entry in exchange.state}
    return {**arrays, **states, f"{name}/payload_bytes": np.array(exchange.metrics().payload_bytes)}


def repeat(collective):
    """Sums of the same gradients in several buckets, again and again."""
    exchange = make_exchange("none", collective, bucket_mib=BUCKET_MIB)
    step, values = tf.function(exchange.exchange), [tf.constant(each) for each in gradients(collective.rank, 0)]
    repeats = [step(values) for _ in range(REPEATS)]
    return {f"repeated/{index}": np.stack(each) for index, each in enumerate(zip(*repeats, strict=True))}


def train(collective, *, plain):
    """Weights after some steps of a small network, by our step with no codec or by Horovod's own allreduce."""
    keras.utils.set_random_seed(0)
    inputs = keras.Input((8,), name="bands")
    model = keras.Model({"bands": inputs}, keras.layers.Dense(3)(keras.layers.Dense(64, "relu")(inputs)))
    loss, sgd = classification_loss("multi_label"), "{name: sgd, momentum: 0.9, nesterov: true, weight_decay: 0.0}"
    config = load("smoke", [f"optimizer={sgd}", "exchange.bucket_mib=null"])
    mode = make_mode(config, model, loss, collective, steps_per_epoch=5)
    mode.optimizer.learning_rate = 0.1

    @tf.function
    def theirs(images, targets):
        with tf.GradientTape() as tape:
            value = tf.reduce_mean(loss(targets, model(images, training=True)))
        gradients = tape.gradient(value, [variable.value for variable in model.trainable_variables])
        mode.optimizer.apply(hvd.grouped_allreduce(gradients, op=hvd.Average), model.trainable_variables)

    generator = np.random.default_rng(collective.rank)
    for _ in range(5):
        images = {"bands": tf.constant(generator.normal(size=(4, 8)).astype(np.float32))}
        targets = tf.constant(generator.integers(0, 2, (4, 3)).astype(np.float32))
        (theirs if plain else mode.step)(images, targets)
    return [np.array(variable) for variable in model.trainable_variables]


def measured(codecs, compiled):
    """What all of this gives on one rank, as arrays by name."""
    collective, arrays = HorovodCollective(), {}
    for name in codecs:
        print(name, flush=True)  # where a rank that hangs or fails was
        arrays |= run_codec(name, collective, compiled=name in compiled)
    plain = tf.function(lambda tensors: hvd.grouped_allreduce(tensors, op=hvd.Average))
    for number in range(STEPS):
        for index, mean in enumerate(plain([tf.constant(each) for each in gradients(collective.rank, number)])):
            arrays[f"horovod/result/{number}/{index}"] = mean.numpy()
    arrays |= repeat(collective)
    for name, plain_step in (("ours", False), ("theirs", True)):
        arrays |= {f"{name}/{i}": each for i, each in enumerate(train(collective, plain=plain_step))}
    hvd.shutdown()
    return arrays
