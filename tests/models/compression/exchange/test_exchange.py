"""How tensors travel: dense or compressed, in which operations and buckets, with which state."""

import functools

import numpy as np
import pytest
import tensorflow as tf

from models.compression.schemes.scatter_gather import ScatterGather


def shapes_sent(ring):
    """By collective, what rank 0 has sent."""
    return [[shape for _, shape in tensors] for _, tensors in ring.ranks[0].calls]


@pytest.mark.parametrize("size", [1, 2, 3, 4])
def test_dense_means_are_sums_times_one_over_the_ranks(size, make_ring, random_gradients):
    gradients = random_gradients(size)
    for index, result in enumerate(make_ring(size, "none").exchange(gradients)):
        np.testing.assert_array_equal(
            result, functools.reduce(np.add, [each[index] for each in gradients]) * np.float32(1 / size)
        )


@pytest.mark.parametrize(
    ("codec", "shapes", "first", "second"),
    [
        ("none", ((40, 40), (3,), (30, 30), (2000,), (7, 5)), [3, 4], [0, 1, 2]),
        ("fp16", ((64, 64), (8, 8), (64, 32), (16, 16)), [3, 2, 1], [0]),  # 8, 0.125, 4 and 0.5 KiB
    ],
)
def test_buckets_go_from_the_last_layer_to_the_first(codec, shapes, first, second, make_ring, random_gradients):
    ring = make_ring(2, codec, bucket_mib=10 / 1024)
    assert ([result.shape for result in ring.exchange(random_gradients(2, shapes))], shapes_sent(ring)) == (
        list(shapes),
        [[shapes[index] for index in bucket] for bucket in (first, second)],
    )


def test_small_tensors_and_vectors_keep_all_digits_under_compression(make_ring, random_gradients):
    gradients = random_gradients(2, shapes=((2000,), (31, 33), (32, 32), ()))  # 31 * 33 = 1023, 32 * 32 = 1024
    ring = make_ring(2, "fp16", dense_below=1024)
    results = ring.exchange(gradients)
    assert [rank.calls for rank in ring.ranks] == [
        [("allreduce", [(tf.float16, (32, 32))]), ("allreduce", [(tf.float32, (2000 + 31 * 33 + 1,))])]
    ] * 2
    assert [
        np.allclose(each, np.mean(own, axis=0), 1e-6, 0) for each, *own in zip(results, *gradients, strict=True)
    ] == [True, True, False, True]


def test_messages_of_all_tensors_of_a_bucket_travel_together(make_ring, random_gradients):
    gradients = random_gradients(2, ((40, 30), (24, 20), (16, 16)))
    ring, factors = make_ring(2, "onebit"), make_ring(2, "powersgd", {"rank": 1})
    ring.exchange(gradients)
    assert [name for name, _ in ring.ranks[0].calls] == ["alltoall", "allgather"]
    factors.exchange(gradients)
    assert shapes_sent(factors) == [[(16, 1), (24, 1), (40, 1)], [(16, 1), (20, 1), (30, 1)]]


@pytest.mark.parametrize("size", [1, 2, 3])
def test_messages_of_any_length_travel_in_one_operation_per_collective(size, make_ring):
    heights = np.float32([1, 0, 3]).reshape(3, 1, 1)
    # Fewer elements beyond tau from rank to rank.
    gradients = [[*(heights * (np.arange(90).reshape(9, 10) % (rank + 2) == 0))] for rank in range(size)]
    ring = make_ring(size, "threshold", {"tau": 0.01})
    results = ring.exchange(gradients)
    assert all([name for name, _ in rank.calls] == ["alltoall", "allgather"] for rank in ring.ranks)
    for index, result in enumerate(results):
        np.testing.assert_allclose(
            result + ring.left_out(index, (9, 10)), np.mean([each[index] for each in gradients], axis=0), atol=1e-6
        )
    assert not results[1].any()
    assert [rank.calls[0][1][0][1][0] for rank in ring.ranks] == [
        4 * np.count_nonzero(own) + 4 * size * len(own) for own in gradients
    ]  # of values and lengths


@pytest.mark.parametrize("name", ["onebit", "qsgd", "topk"])
def test_traffic_of_a_rank_hardly_grows_with_the_ranks(name, make_ring, random_gradients):
    sent = {}
    for size in (2, 8):
        ring = make_ring(size, name)
        ring.exchange(random_gradients(size, ((256, 256),)))
        alltoall, allgather = (int(np.prod(shape)) for (shape,) in shapes_sent(ring))
        # To every other rank its section of the first; the second to every other rank.
        sent[size] = alltoall * (size - 1) / size + allgather * (size - 1)
        assert sent[size] == pytest.approx(ring.exchanges[0].metrics().payload_bytes * 2 * (size - 1) / size, abs=9)
    # (N-1)/N goes from 1/2 to 7/8. Gathering everybody's payload would give a factor of 7.
    assert sent[8] / sent[2] == pytest.approx(7 / 4, rel=0.02)


MATRICES, REST = 40 * 30 + 3 * 3 * 16 * 16, 30 + 5 * 4 + 1


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("none", 4 * MATRICES),
        ("fp16", 2 * MATRICES),
        # A bit per element, two means per column; 30 columns are 32 for 8 ranks.
        ("onebit", (40 * 32 + 3 * 3 * 16 * 16) / 8 + 8 * (32 + 16)),
        # A bit per element, padded to bytes in each of 8 parts, and a scale each: parts of 150 and 288 elements.
        ("scaled_sign", 8 * (19 + 4) + 8 * (36 + 4)),
    ],
)
def test_payload_bytes_by_hand(name, expected, make_exchange):
    gradients = [tf.zeros((40, 30)), tf.zeros((30,)), tf.zeros((3, 3, 16, 16)), tf.zeros((5, 4)), tf.zeros(())]
    assert make_exchange(name, 8).payload_bytes(gradients) == expected + 4 * REST


def test_payload_bytes_need_shapes_only(make_exchange):
    specs = [tf.TensorSpec((1 << 20, 1 << 20), tf.float32)]  # 4 TiB
    assert make_exchange("fp16", 2).payload_bytes(specs) == 2 << 40


def test_warm_up_travels_dense(make_ring, random_gradients):
    ring = make_ring(2, "onebit", warmup_steps=2)
    for step in range(3):
        gradients = random_gradients(2, ((40, 30),), seed=step)
        (result,) = ring.exchange(gradients)
        assert np.array_equal(result, (gradients[0][0] + gradients[1][0]) / 2) == (step < 2)
        assert np.any(ring.left_out(0, (40, 30))) == (step == 2)


def test_warm_up_ends_inside_a_traced_step(random_gradients, make_exchange):
    step = tf.function(make_exchange("onebit", 1, warmup_steps=1).exchange)
    (gradient,) = random_gradients(1, ((40, 30),))[0]
    (first,), (second,) = step([tf.constant(gradient)]), step([tf.constant(gradient)])
    np.testing.assert_array_equal(first, gradient)
    assert len(np.unique(second)) == 2 * 30


GRADIENT = np.array([[1.0, -3.0], [2.0, 1.0]], np.float32)


@pytest.mark.parametrize(("rescale", "factor"), [(True, 10.0), (False, 1.0)])
def test_residual_counts_as_much_after_the_learning_rate_fell(rescale, factor, make_ring):
    ring = make_ring(1, "topk", {"density": 0.25}, rescale_residual=rescale)
    ring.alike(GRADIENT, learning_rate=1.0)
    (before,) = ring.state("residual/gradient_0")
    (result,) = ring.alike(np.zeros_like(GRADIENT), learning_rate=0.1)
    np.testing.assert_allclose(result + ring.left_out(0, (2, 2)), factor * before, rtol=1e-6)


def test_the_rate_that_counts_is_that_of_the_last_step_that_compressed(make_exchange, make_codec):
    """A resumed run may begin again with dense steps, which leave the residual, or switch the setting off."""
    exchange = make_exchange(make_codec("topk", density=0.25), 1, dense_below=0)

    def sent(gradient, rate):
        return exchange.exchange([tf.constant(gradient)], learning_rate=rate)[0]

    sent(GRADIENT, 1.0)
    before, zeros = exchange.state[0].variable.numpy(), np.zeros_like(GRADIENT)
    exchange.warmup_steps = 3
    np.testing.assert_array_equal([sent(zeros, 0.5), sent(zeros, 0.2)], [zeros, zeros])
    np.testing.assert_allclose(sent(zeros, 0.1) + exchange.state[0].variable, 10 * before, rtol=1e-6)
    exchange.rescale_residual, kept = False, exchange.state[0].variable.numpy()
    first = sent(zeros, 0.01)
    exchange.rescale_residual = True
    np.testing.assert_allclose(first + sent(zeros, 0.01) + exchange.state[0].variable, kept, rtol=1e-6)


def test_learning_rate_zero_leaves_the_residual(make_ring):
    ring = make_ring(1, "topk", {"density": 0.25})
    assert all(np.all(np.isfinite(ring.alike(GRADIENT, learning_rate=rate))) for rate in (0.0, 1.0, 0.0, 0.5))


def test_half_gradients_come_back_as_halves_and_sums_beyond_float32_as_they_are(make_exchange):
    (result,) = make_exchange("none", 4).exchange([tf.ones((2, 2), tf.float16)])
    assert result.dtype == tf.float16
    huge = np.full((4, 2), 3e38, np.float32)
    np.testing.assert_array_equal(make_exchange("none", 1).exchange([tf.constant(huge)])[0], huge)


def test_state_has_the_names_of_the_variables(make_exchange):
    exchange = make_exchange("onebit", 1, dense_below=4)

    class Named:
        path, shape = "block/conv/kernel", (3, 3)

    exchange.build([Named(), tf.zeros((2,))])
    assert [entry.name for entry in exchange.state] == [
        "residual/block/conv/kernel",
        "owner_residual/block/conv/kernel",
    ]
    assert len(exchange.variables) == 4  # and the step and the learning rate
    with pytest.raises(ValueError, match=r"was built for shapes \[\(3, 3\), \(2,\)\], got \[\(4, 4\)\]"):
        exchange.exchange([tf.zeros((4, 4))])


def test_metrics_by_hand(make_ring):
    ring = make_ring(1, "topk", {"density": 0.25})
    ring.alike(GRADIENT, np.ones(2, np.float32))
    metrics = ring.exchanges[0].metrics()
    # Of four elements, padded to 8: two in 16 bytes, then the owner's four in 32; half of both. A vector of 8 bytes.
    assert (metrics.payload_bytes, metrics.compression_ratio) == (8 + 16 + 8, (16 + 8) / (8 + 16 + 8))
    residuals = [*ring.state("residual/gradient_0"), *ring.state("owner_residual/gradient_0")]
    assert metrics.residual_norm == pytest.approx(np.sqrt(sum(np.sum(each**2) for each in residuals)))
    assert min(metrics.encode_seconds, metrics.collective_seconds, metrics.decode_seconds) > 0, metrics


@pytest.mark.parametrize("name", ["onebit", "powersgd", "threshold"])
def test_parts_of_a_traced_exchange_take_their_time_one_after_the_other(name, make_exchange):
    exchange = make_exchange(name, 1)
    gradients = [tf.random.stateless_normal((3, 3, 64, 64), (0, index)) for index in range(2)]
    step = tf.function(exchange.exchange)
    for _ in range(20):
        step(gradients)
        metrics = exchange.metrics()
        assert min(metrics.encode_seconds, metrics.collective_seconds, metrics.decode_seconds) > 0, metrics


def test_random_numbers_differ_by_step_rank_and_tensor_and_repeat(make_ring, make_codec):
    def payloads():
        ring = make_ring(2, Recording(make_codec("qsgd")), seed=5)
        for _ in range(2):
            ring.alike(*[np.full((24, 40), 0.3, np.float32)] * 2)
        return sorted(ring.exchanges[0].codec.keys)

    keys = payloads()
    assert len(keys) == len(set(keys)) == 2 * 2 * 2 * 2  # ranks, tensors, steps, rounds
    assert keys == payloads()


class Recording(ScatterGather):
    """Keeps the keys that its compressor is given."""

    def __init__(self, codec):
        super().__init__("recording", codec.compressor, codec.memory, owner_feedback=False)
        encode, self.keys = codec.compressor.encode, []

        def recording(parts, real, step, key):
            self.keys.append(tuple(key.numpy().tolist()))
            return encode(parts, real, step, key)

        self.compressor.encode = recording


@pytest.mark.parametrize(
    ("method", "missing", "message"),
    [
        ("exchange", [False, True, False, True], r"gradients \[1, 3\] are None"),
        ("payload_bytes", [True], r"gradients \[0\] are None"),
    ],
)
def test_missing_gradients_are_named(method, missing, message, make_exchange):
    with pytest.raises(ValueError, match=message):
        getattr(make_exchange("none", 2), method)([None if each else tf.ones(()) for each in missing])


@pytest.mark.parametrize(("name", "value"), [("bucket_mib", 0), ("warmup_steps", -1)])
def test_settings_out_of_range_are_named(name, value, make_exchange):
    with pytest.raises(ValueError, match=name):
        make_exchange("none", 2, **{name: value})
