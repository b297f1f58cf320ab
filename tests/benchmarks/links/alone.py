"""What one rank measures without others, in a process of its own: computing, and what a codec costs.

    alone.py compute "[batch, steps, small]"
    alone.py codec "[name, parameters, repeats, small]"

The last line of the output is JSON.
"""

import json
import sys
import time
from collections.abc import Callable
from typing import Any


class Alone:
    """A collective of one rank."""

    rank, size = 0, 1

    def allreduce(self, tensors, name=None):
        return tensors

    def alltoall(self, tensor, splits=None, name=None):
        return tensor

    def allgather(self, tensor, name=None):
        return tensor


class Recording:
    """A collective of two ranks on one, which are the same: it notes the bytes of each operation."""

    rank, size = 0, 2

    def __init__(self):
        self.sent = []

    def allreduce(self, tensors, name=None):
        self.sent.append(("allreduce", sum(bytes_of(tensor) for tensor in tensors)))
        return [tensor + tensor for tensor in tensors]

    def alltoall(self, tensor, splits=None, name=None):
        import tensorflow as tf

        self.sent.append(("alltoall", bytes_of(tensor)))
        half = tensor[: tensor.shape[0] // 2]
        return tf.concat([half, half], 0)

    def allgather(self, tensor, name=None):
        import tensorflow as tf

        self.sent.append(("allgather", self.size * bytes_of(tensor)))
        return tf.concat([tensor, tensor], 0)


def bytes_of(tensor):
    return tensor.shape.num_elements() * tensor.dtype.size


def shapes_of(small):
    """Of the gradients: of a ResNet-50, of a few small ones, or (`scaled`) those of 18 MB."""
    from compression import SMOKE_SHAPES, resnet50_shapes
    from links.measure import SCALED_SHAPES

    if small == "scaled":
        return SCALED_SHAPES
    return SMOKE_SHAPES if small else resnet50_shapes()


def exchange_of(name, parameters, collective, bucket_mib):
    from conf.exchange import ExchangeConfig
    from conf.optimizers import LARSConfig
    from models.compression.exchange.exchange import GradientExchange
    from pipelines.training.recipe import make_codec

    config = ExchangeConfig(codec={"name": name, **parameters}, bucket_mib=bucket_mib)
    return GradientExchange(make_codec(config.codec, LARSConfig()), collective, seed=0, **config.arguments())


def compute(batch, steps, small):
    """Seconds of training steps, and when each gradient is ready as a part of a step."""
    import numpy as np
    import tensorflow as tf

    from conf.networks import ResNetCifarConfig, ResNetConfig
    from conf.optimizers import LARSConfig
    from models.compression.arithmetic.marks import Marks
    from models.layers.preprocessing import InputGroup
    from models.losses import classification_loss
    from models.networks.model import build_model
    from pipelines.training.recipe import make_optimizer
    from pipelines.training.step import make_train_step

    side, network = (36, ResNetCifarConfig(depth=8)) if small else (120, ResNetConfig())
    groups = [
        InputGroup(f"bands_{metres}m", (pixels, pixels, bands), "uint16", (1000.0,) * bands, (500.0,) * bands)
        for metres, pixels, bands in ((10, side, 4), (20, side // 2, 6), (60, side // 6, 2))
    ]
    settings = {**network.arguments(), "upsampling": "nearest", "augmentation": None}
    model = build_model(groups, network=network.name, classes=43, **settings)
    optimizer = make_optimizer(LARSConfig(), model)
    optimizer.learning_rate = 0.01
    random = np.random.default_rng(0)
    images = {
        group.name: tf.constant(random.integers(0, 5000, (batch, *group.shape), dtype=np.uint16)) for group in groups
    }
    targets = tf.constant(random.integers(0, 2, (batch, 43)).astype(np.float32))
    # Every gradient is a bucket of its own, so that the clocks of the exchange say when each one is ready.
    exchange = exchange_of("none", {}, Alone(), 1e-6)
    exchange.marks = Marks()
    step = make_train_step(model, classification_loss("multi_label"), optimizer, exchange, jit_compile=False)
    seconds = []
    for number in range(steps + 2):
        exchange.marks.clear()
        began, started = time.time(), time.perf_counter()
        float(step(images, targets))
        if number >= 2:
            seconds.append(time.perf_counter() - started)
    sizes = {variable.path: 4 * int(np.prod(variable.shape)) for variable in model.trainable_variables}
    ready = sorted(
        (min(1.0, max(0.0, (at - began) / seconds[-1])), sum(sizes[name] for name in mark.tensors))
        for mark, at, _ in exchange.marks.read()
        if mark.phase == "wire"
    )
    return {"seconds": seconds, "gradients": [{"bytes": size, "ready": part} for part, size in ready]}


def codec(name, parameters, repeats, small):
    """Messages of an exchange, and the seconds of encoding and decoding it, for the gradients of the network."""
    import tensorflow as tf

    shapes = [tuple(shape) for shape in shapes_of(small)]
    gradients = [tf.random.stateless_normal(shape, (0, index)) for index, shape in enumerate(shapes)]
    # Two ranks: what an owner decodes, sums and encodes again does not depend on their number.
    collective = Recording()
    exchange = exchange_of(name, parameters, collective, None)
    exchange.build([tf.zeros(shape) for shape in shapes])
    step = tf.function(exchange.exchange)
    encode, decode = [], []
    for number in range(max(1, repeats + 2)):
        started = time.perf_counter()
        step(gradients)[-1].numpy()
        seconds = time.perf_counter() - started
        if number >= 2:
            encode.append(exchange.metrics()["encode_seconds"])
            decode.append(max(0.0, seconds - encode[-1]))  # checks and copies of the exchange too
    sent = collective.sent  # noted when the graph was traced, once
    compressed = len(exchange.codec.collectives)
    messages = [{"collective": kind, "bytes": size} for kind, size in sent[:compressed]]
    return {
        "name": name,
        "messages": messages,
        "dense_bytes": sum(size for _, size in sent[compressed:]),
        "encode_seconds": encode,
        "decode_seconds": decode,
    }


if __name__ == "__main__":
    from pathlib import Path

    sys.path.insert(0, str(Path(__file__).parents[1]))
    function: Callable[..., Any] = compute if sys.argv[1] == "compute" else codec
    print(json.dumps(function(*json.loads(sys.argv[2]))))
