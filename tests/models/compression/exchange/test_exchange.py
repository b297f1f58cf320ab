"""How tensors travel: dense or compressed, in which operations and buckets, with which state."""

import functools

import numpy as np
import pytest
import tensorflow as tf

from models.compression.schemes.scatter_gather import ScatterGather


@pytest.mark.parametrize("size", [1, 2, 3, 4])
def test_dense_means_are_sums_times_one_over_the_ranks(size, make_ring, random_gradients):
    gradients = random_gradients(size)
    results = make_ring(size, "none").exchange(gradients)
    for index, result in enumerate(results):
        total = functools.reduce(np.add, [each[index] for each in gradients])
        np.testing.assert_array_equal(result, total * np.float32(1 / size) if size > 1 else total)


def test_dense_gradients_go_from_the_last_layer_to_the_first(make_ring, random_gradients):
    ring = make_ring(2, "none", bucket_mib=10 / 1024)
    results = ring.exchange(random_gradients(2, shapes=((40, 40), (3,), (30, 30), (2000,), (7, 5))))
    assert [[shape for _, shape in tensors] for _, tensors in ring.ranks[0].calls] == [
        [(2000,), (7, 5)],
        [(40, 40), (3,), (30, 30)],
    ]
    assert [result.shape for result in results] == [(40, 40), (3,), (30, 30), (2000,), (7, 5)]


def test_small_tensors_and_vectors_keep_all_digits_under_compression(make_ring, random_gradients):
    gradients = random_gradients(2, shapes=((2000,), (31, 33), (32, 32), ()))  # 31 * 33 = 1023, 32 * 32 = 1024
    ring = make_ring(2, "fp16", dense_below=1024)
    results = ring.exchange(gradients)
    expected = [
        ("allreduce", [(tf.float16, (32, 32))]),
        ("allreduce", [(tf.float32, (2000 + 31 * 33 + 1,))]),
    ]
    assert [rank.calls for rank in ring.ranks] == [expected, expected]
    for index in (0, 1, 3):
        np.testing.assert_allclose(results[index], np.mean([each[index] for each in gradients], axis=0), rtol=1e-6)
    assert not np.allclose(results[2], np.mean([each[2] for each in gradients], axis=0), rtol=1e-6, atol=0)


def test_buckets_go_from_the_last_layer_to_the_first(make_ring, random_gradients):
    shapes = ((64, 64), (8, 8), (64, 32), (16, 16))  # 16, 0.25, 8 and 1 KiB
    ring = make_ring(2, "fp16", bucket_mib=10 / 1024)
    ring.exchange(random_gradients(2, shapes))
    assert [[shape for _, shape in tensors] for _, tensors in ring.ranks[0].calls] == [
        [(16, 16), (64, 32), (8, 8)],
        [(64, 64)],
    ]


def test_messages_of_all_tensors_of_a_bucket_travel_together(make_ring, random_gradients):
    shapes = ((40, 30), (24, 20), (16, 16))
    ring = make_ring(2, "onebit")
    ring.exchange(random_gradients(2, shapes))
    assert [name for name, _ in ring.ranks[0].calls] == ["alltoall", "allgather"]
    ring = make_ring(2, "powersgd", {"rank": 1})
    ring.exchange(random_gradients(2, shapes))
    factors = [[(16, 1), (24, 1), (40, 1)], [(16, 1), (20, 1), (30, 1)]]
    assert [[shape for _, shape in tensors] for _, tensors in ring.ranks[0].calls] == factors


@pytest.mark.parametrize("size", [1, 2, 3])
def test_messages_of_any_length_travel_in_one_operation_per_collective(size, make_ring):
    def gradient(rank, height):  # fewer elements beyond tau from rank to rank
        return np.where(np.arange(90) % (rank + 2) == 0, height, 0.0).astype(np.float32).reshape(9, 10)

    gradients = [[gradient(rank, height) for height in (1.0, 0.0, 3.0)] for rank in range(size)]
    ring = make_ring(size, "threshold", {"tau": 0.01})
    results = ring.exchange(gradients)
    assert all([name for name, _ in rank.calls] == ["alltoall", "allgather"] for rank in ring.ranks)
    for index, result in enumerate(results):
        everything = result + ring.left_out(index, (9, 10))
        np.testing.assert_allclose(everything, np.mean([each[index] for each in gradients], axis=0), atol=1e-6)
    assert not results[1].any()
    for own, rank in zip(gradients, ring.ranks, strict=True):
        (_, (length,)) = rank.calls[0][1][0]
        assert length == 4 * np.count_nonzero(own) + 4 * size * len(own)  # and the length of each message


@pytest.mark.parametrize("name", ["onebit", "qsgd", "topk"])
def test_traffic_of_a_rank_hardly_grows_with_the_ranks(name, make_ring, random_gradients):
    sent = {}
    for size in (2, 8):
        ring = make_ring(size, name)
        ring.exchange(random_gradients(size, ((256, 256),)))
        alltoall, allgather = (int(np.prod(tensors[0][1])) for _, tensors in ring.ranks[0].calls)
        # To every other rank its section of the first; the second to every other rank.
        sent[size] = alltoall * (size - 1) / size + allgather * (size - 1)
        assert sent[size] == pytest.approx(ring.exchanges[0].metrics()["payload_bytes"] * 2 * (size - 1) / size, abs=9)
    # (N-1)/N goes from 1/2 to 7/8. Gathering everybody's payload would give a factor of 7.
    assert sent[8] / sent[2] == pytest.approx(7 / 4, rel=0.02)


def test_payload_bytes_by_hand(equal_ranks, make_exchange):
    gradients = [tf.zeros((40, 30)), tf.zeros((30,)), tf.zeros((3, 3, 16, 16)), tf.zeros((5, 4)), tf.zeros(())]
    matrices, rest = 40 * 30 + 3 * 3 * 16 * 16, 30 + 5 * 4 + 1
    parts = {
        "none": 4 * matrices,
        "fp16": 2 * matrices,
        "bf16": 2 * matrices,
        # A bit per element, two means per column.
        "onebit": matrices / 8 + 8 * (30 + 16),
        # A bit per element, padded to bytes in each of 8 parts, and a scale each: parts of 150 and 288 elements.
        "scaled_sign": 8 * (19 + 4) + 8 * (36 + 4),
    }
    for name, expected in parts.items():
        exchange = make_exchange(name, equal_ranks(8))
        padding = 8 * (32 - 30) * (40 / 8 + 8) / 8 if name == "onebit" else 0  # 30 columns are 32 for 8 ranks
        assert exchange.payload_bytes(gradients) == expected + padding + 4 * rest, name


def test_payload_bytes_need_shapes_only(equal_ranks, make_exchange):
    specs = [tf.TensorSpec((1 << 20, 1 << 20), tf.float32)]  # 4 TiB
    assert make_exchange("fp16", equal_ranks(2)).payload_bytes(specs) == 2 << 40


def test_one_bit_is_one_bit(equal_ranks, make_codec, make_exchange):
    # Kernels of ResNet-50's last stage, on 8 ranks: beside the bits there are two means per column of 512 or more.
    specs = [tf.TensorSpec(shape, tf.float32) for shape in ((3, 3, 512, 512), (1, 1, 512, 2048), (1, 1, 2048, 512))]
    dense = 4 * sum(spec.shape.num_elements() for spec in specs)
    assert dense / make_exchange("onebit", equal_ranks(8)).payload_bytes(specs) > 29
    assert dense / make_exchange("scaled_sign", equal_ranks(8)).payload_bytes(specs) > 31.9
    assert dense / make_exchange(make_codec("qsgd", bits=4), equal_ranks(8)).payload_bytes(specs) > 7.8


def test_warm_up_travels_dense(make_ring, random_gradients):
    ring = make_ring(2, "onebit", warmup_steps=2)
    for step in range(3):
        gradients = random_gradients(2, ((40, 30),), seed=step)
        (result,) = ring.exchange(gradients)
        mean = (gradients[0][0] + gradients[1][0]) / 2
        assert np.array_equal(result, mean) == (step < 2)
        assert np.any(ring.left_out(0, (40, 30))) == (step == 2)


def test_warm_up_ends_inside_a_traced_step(equal_ranks, random_gradients, make_exchange):
    exchange = make_exchange("onebit", equal_ranks(1), warmup_steps=1)
    step = tf.function(exchange.exchange)
    (gradient,) = random_gradients(1, ((40, 30),))[0]
    (first,), (second,) = step([tf.constant(gradient)]), step([tf.constant(gradient)])
    np.testing.assert_array_equal(first, gradient)
    assert len(np.unique(second)) == 2 * 30


def test_residual_counts_as_much_after_the_learning_rate_fell(make_ring):
    gradient = np.array([[1.0, -3.0], [2.0, 1.0]], np.float32)
    zeros = [[np.zeros((2, 2), np.float32)]]
    for rescale, factor in ((True, 10.0), (False, 1.0)):
        ring = make_ring(1, "topk", {"density": 0.25}, rescale_residual=rescale)
        ring.exchange([[gradient]], learning_rate=1.0)
        (before,) = ring.state("residual/gradient_0")
        (result,) = ring.exchange(zeros, learning_rate=0.1)
        np.testing.assert_allclose(result + ring.left_out(0, (2, 2)), factor * before, rtol=1e-6)


def test_the_rate_that_counts_is_that_of_the_last_step_that_compressed(equal_ranks, make_exchange, make_codec):
    """A resumed run may begin again with dense steps, which leave the residual, or switch the setting off."""
    gradient, zeros = tf.constant([[1.0, -3.0], [2.0, 1.0]]), tf.zeros((2, 2))
    exchange = make_exchange(make_codec("topk", density=0.25), equal_ranks(1), dense_below=0)
    exchange.exchange([gradient], learning_rate=1.0)
    before = exchange.state[0].variable.numpy()
    exchange.warmup_steps = 3
    for rate in (0.5, 0.2):
        exchange.exchange([zeros], learning_rate=rate)
    (sent,) = exchange.exchange([zeros], learning_rate=0.1)
    np.testing.assert_allclose(sent + exchange.state[0].variable, 10 * before, rtol=1e-6)

    exchange.rescale_residual, kept = False, exchange.state[0].variable.numpy()
    (sent,) = exchange.exchange([zeros], learning_rate=0.01)
    exchange.rescale_residual = True
    (more,) = exchange.exchange([zeros], learning_rate=0.01)
    np.testing.assert_allclose(sent + more + exchange.state[0].variable, kept, rtol=1e-6)


def test_learning_rate_zero_leaves_the_residual(make_ring):
    ring = make_ring(1, "topk", {"density": 0.25})
    for rate in (0.0, 1.0, 0.0, 0.5):
        (result,) = ring.exchange([[np.array([[1.0, -3.0], [2.0, 1.0]], np.float32)]], learning_rate=rate)
        assert np.all(np.isfinite(result))


def test_half_gradients_come_back_as_halves(equal_ranks, make_exchange):
    exchange = make_exchange("none", equal_ranks(4))
    (result,) = exchange.exchange([tf.ones((2, 2), tf.float16)])
    assert result.dtype == tf.float16


def test_state_has_the_names_of_the_variables(equal_ranks, make_exchange):
    exchange = make_exchange("onebit", equal_ranks(1), dense_below=4)

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
    ring.exchange([[np.array([[1.0, -3.0], [2.0, 2.0]], np.float32), np.ones(2, np.float32)]])
    metrics = ring.exchanges[0].metrics()
    # Of four elements, padded to 8: two in 16 bytes, then the owner's four in 32; half of both. A vector of 8 bytes.
    assert metrics["payload_bytes"] == 8 + 16 + 8
    assert metrics["compression_ratio"] == (16 + 8) / (8 + 16 + 8)
    residuals = [*ring.state("residual/gradient_0"), *ring.state("owner_residual/gradient_0")]
    assert metrics["residual_norm"] == pytest.approx(np.sqrt(sum(np.sum(each**2) for each in residuals)))
    assert metrics["encode_seconds"] > 0
    assert metrics["collective_seconds"] > 0
    assert metrics["decode_seconds"] > 0


@pytest.mark.parametrize("name", ["onebit", "topk", "powersgd", "threshold", "qsgd"])
def test_parts_of_a_traced_exchange_take_their_time_one_after_the_other(name, equal_ranks, make_exchange):
    exchange = make_exchange(name, equal_ranks(1))
    gradients = [tf.random.stateless_normal((3, 3, 64, 64), (0, index)) for index in range(2)]
    step = tf.function(exchange.exchange)
    for _ in range(20):
        step(gradients)
        metrics = exchange.metrics()
        assert all(metrics[f"{part}_seconds"] > 0 for part in ("encode", "collective", "decode")), metrics


def test_random_numbers_differ_by_step_rank_and_tensor_and_repeat(make_ring, make_codec):
    gradients = [[np.full((24, 40), 0.3, np.float32)] * 2] * 2

    def payloads():
        ring = make_ring(2, Recording(make_codec("qsgd")), seed=5)
        for _ in range(2):
            ring.exchange(gradients)
        return ring.exchanges[0].codec.keys

    keys = payloads()
    assert len(keys) == 2 * 2 * 2 * 2  # ranks, tensors, steps, rounds
    assert sorted(keys) == sorted(payloads())
    assert len(set(keys)) == len(keys)


class Recording(ScatterGather):
    """Keeps the keys that its compressor is given."""

    def __init__(self, codec):
        super().__init__("recording", codec.compressor, codec.memory, owner_feedback=False)
        encode, self.keys = codec.compressor.encode, []

        def recording(parts, real, step, key):
            self.keys.append(tuple(key.numpy().tolist()))
            return encode(parts, real, step, key)

        self.compressor.encode = recording


def test_sums_beyond_float32_are_finite_gradients(equal_ranks, make_exchange):
    exchange = make_exchange("none", equal_ranks(1))
    huge = np.full((4, 2), 3e38, np.float32)
    np.testing.assert_array_equal(exchange.exchange([tf.constant(huge)])[0], huge)


def test_missing_gradients_are_named(equal_ranks, make_exchange):
    exchange = make_exchange("none", equal_ranks(2))
    with pytest.raises(ValueError, match=r"gradients \[1, 3\] are None"):
        exchange.exchange([tf.ones(()), None, tf.ones(()), None])
    with pytest.raises(ValueError, match=r"gradients \[0\] are None"):
        exchange.payload_bytes([None])


@pytest.mark.parametrize("settings", [{"bucket_mib": 0}, {"warmup_steps": -1}])
def test_settings_out_of_range_are_refused(settings, equal_ranks, make_exchange):
    with pytest.raises(ValueError, match=next(iter(settings))):
        make_exchange("none", equal_ranks(2), **settings)
