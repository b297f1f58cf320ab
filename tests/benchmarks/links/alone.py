"""What one rank measures without others, on one core: computing, and what a codec costs."""

import math
import time


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


def compute(batch, steps, small):
    """Seconds of training steps, and when each gradient is ready as a part of a step."""
    from conf.sections.networks import ResNetCifarConfig, ResNetConfig
    from models.compression.arithmetic.graph import Marks
    from tests.benchmarks.parts import training

    training.pin()
    side, network = (36, ResNetCifarConfig(depth=2)) if small else (120, ResNetConfig())
    groups = training.satellite_groups(side)
    # Every gradient is a bucket of its own, so that the clocks of the exchange say when each one is ready.
    exchange = training.exchange_of(training.Alone(), bucket_mib=1e-6)
    exchange.marks = Marks()
    model = training.network(groups, network, 43)
    step, inputs = training.lars_training(model, exchange).step, training.noise(groups, batch, 43)
    training.timed(step, *inputs, steps=2)
    seconds = []
    for _ in range(steps):
        exchange.marks.clear()
        began = time.time()
        seconds += training.timed(step, *inputs, steps=1)
    sizes = {variable.path: 4 * math.prod(variable.shape) for variable in model.trainable_variables}
    ready = sorted(
        (min(1.0, max(0.0, (at - began) / seconds[-1])), sum(sizes[name] for name in mark.tensors))
        for mark, at, _ in exchange.marks.read()
        if mark.phase == "wire"
    )
    return {"seconds": seconds, "gradients": [{"bytes": size, "ready": part} for part, size in ready]}


def codec(name, parameters, repeats, shapes):
    """Messages of an exchange, and the seconds of encoding and decoding it, for gradients of these shapes."""
    import tensorflow as tf

    from tests.benchmarks.parts import training

    training.pin()
    # Two ranks: what an owner decodes, sums and encodes again does not depend on their number.
    collective = Recording()
    exchange = training.exchange_of(collective, {"name": name, **parameters}, bucket_mib=None)
    gradients = training.random_gradients(exchange, shapes)
    step = tf.function(exchange.exchange)
    encode, decode = [], []
    for number in range(max(1, repeats + 2)):
        started = time.perf_counter()
        step(gradients)[-1].numpy()
        seconds = time.perf_counter() - started
        if number >= 2:
            encode.append(exchange.metrics().encode_seconds)
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
