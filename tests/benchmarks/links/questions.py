"""One rank that takes several kinds of questions, for the scaling model; a script of `Ring`.

    {"collective": "allreduce", "bytes": 8192, "repeats": 5}     seconds of each operation
    {"prepare": {"codec": "none", "parameters": {}, ...}}        the step from now on, see `paced`
    {"steps": 3}                                                 as `rank.measure`

Input and output are lines of JSON, as in `rank.py`.
"""

import functools
import time

import rank

from tests.benchmarks.parts.answers import answer


def prepare(settings):
    """The function that answers each line."""
    collective = rank.joined(settings)
    operation = functools.cache(functools.partial(operation_of, collective=collective))
    prepared = []

    def answer_to(asked):
        if "collective" in asked:
            return {"seconds": timed(operation(asked["collective"], asked["bytes"]), asked["repeats"])}
        if "prepare" in asked:
            prepared[:] = paced(asked["prepare"], collective)
            return {"prepared": True}
        return rank.measure(*prepared, asked["steps"])

    return answer_to


def operation_of(name, size, collective):
    """A collective as the exchange calls it; `size` as `pipelines.scaling.measurements.CollectivePoint.bytes`."""
    import tensorflow as tf

    if name == "allreduce":
        buffer = tf.zeros(size // 4)
        return tf.function(lambda: collective.allreduce([tf.identity(buffer)], f"{name}{size}")[0])
    rows = tf.zeros((collective.size if name == "alltoall" else 1, size // collective.size), tf.uint8)
    if name == "alltoall":
        return tf.function(lambda: collective.alltoall(tf.identity(rows), name=f"{name}{size}"))
    return tf.function(lambda: collective.allgather(tf.identity(rows), f"{name}{size}"))


def timed(operation, repeats):
    """Seconds of each call, which all ranks begin together."""
    import horovod.tensorflow as hvd
    import tensorflow as tf

    seconds = []
    for _ in range(repeats):
        hvd.allreduce(tf.zeros(1), name="barrier").numpy()
        started = time.perf_counter()
        operation().numpy()
        seconds.append(time.perf_counter() - started)
    return seconds


def paced(method, collective):
    """A step whose computing is a sleep: random gradients are ready one after the other, last layers first.

    Args:
        method: `codec` and `parameters`; `shapes` of the gradients; `bucket_mib`; `seconds` of the computing; `ready`,
            the part of it after which each gradient is there, from the last shape to the first. What is left of the
            computing is slept after the exchange.
        collective: Of all ranks.
    """
    import tensorflow as tf

    from tests.benchmarks.parts import training

    exchange = rank.make_exchange(method, method["bucket_mib"], collective)
    values = training.random_gradients(exchange, method["shapes"], collective.rank)
    ready, seconds = method["ready"], method["seconds"]

    def sleep(pause):
        time.sleep(float(pause))
        return 0.0

    @tf.function
    def all_of_it():
        gradients, before, waited = [None] * len(values), 0.0, None
        for part, index in zip(ready, reversed(range(len(values))), strict=True):
            if part > before:
                with tf.control_dependencies([] if waited is None else [waited]):
                    waited = tf.py_function(sleep, [(part - before) * seconds], tf.float32)
                before = part
            with tf.control_dependencies([waited]):
                gradients[index] = tf.identity(values[index])
        return exchange.exchange(gradients)

    def step():
        all_of_it()[-1].numpy()
        time.sleep((1 - ready[-1]) * seconds)

    return step, exchange.metrics


if __name__ == "__main__":
    answer(prepare)
