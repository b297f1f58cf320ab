"""What the owner of a part adds to the ranks' error: nothing if it sends the mean as it is."""

import numpy as np
import pytest

SHAPE = (64, 64)
GRADIENT = np.random.default_rng(0).normal(size=SHAPE).astype(np.float32)


def expected_of_ranks(name, size):
    """The ranks' error by the formula of their codec, over N because they draw independently."""
    parts = GRADIENT.astype(np.float64).reshape(size, -1)
    if name == "norm_sparsifier":
        one, two = np.abs(parts).sum(1), np.linalg.norm(parts, axis=1)
        return np.sum((one / two - 1) * two**2) / np.sum(parts**2) / size
    buckets = parts.reshape(-1, 512)
    unit = np.abs(buckets).max(1, keepdims=True) / 7
    chance = np.abs(buckets) / unit % 1
    return np.sum(chance * (1 - chance) * unit**2) / np.sum(parts**2) / size


def relative_error(ring, name, draws):
    """Mean over exchanges of |result - g|^2 / |g|^2, by the ranks' own, where every rank has the gradient g."""
    errors = [np.sum((ring.alike(GRADIENT)[0] - GRADIENT) ** 2) for _ in range(draws)]
    return np.mean(errors) / np.sum(GRADIENT**2) / expected_of_ranks(name, ring.size)


@pytest.mark.parametrize("size", [1, 2, pytest.param(8, marks=pytest.mark.long)])
@pytest.mark.parametrize(
    ("name", "settings"),
    [("qsgd", {"owner_bits": 32}), ("norm_sparsifier", {"exact_mean": True})],
    ids=["qsgd", "norm_sparsifier"],
)
def test_an_exact_mean_has_the_error_of_the_ranks(name, settings, size, make_ring):
    # One exchange of 4,096 elements has this error to within 5 %.
    assert relative_error(make_ring(size, name, settings), name, 10) == pytest.approx(1, rel=0.15)


@pytest.mark.long
@pytest.mark.parametrize(
    ("name", "settings"),
    [("qsgd", {"owner_bits": None}), ("norm_sparsifier", {"exact_mean": False})],
    ids=["qsgd", "norm_sparsifier"],
)
def test_a_second_compression_has_an_error_that_stays(name, settings, make_ring):
    assert relative_error(make_ring(8, name, settings), name, 5) > 3


@pytest.mark.long
def test_more_bits_for_the_mean_are_nearly_exact(make_ring):
    # 127 levels in place of 7: the owner's error is about 330 times smaller than a rank's.
    assert relative_error(make_ring(8, "qsgd", {"owner_bits": 8}), "qsgd", 10) == pytest.approx(1, rel=0.15)


@pytest.mark.parametrize(("owner_bits", "bits"), [(None, 8), (8, 12), (32, 36)])
def test_bytes_of_both_stages(owner_bits, bits, make_ring):
    ring = make_ring(2, "qsgd", {"owner_bits": owner_bits})
    ring.alike(GRADIENT)
    # Half of what a rank sends in both rounds; 4 bytes per bucket for each norm.
    norms = 4 * GRADIENT.size // 512 * (1 if owner_bits == 32 else 2)
    assert ring.exchanges[0].metrics().payload_bytes == (GRADIENT.size * bits // 8 + norms) // 2


def test_a_sparse_mean_takes_eight_bytes_for_each_element(make_ring):
    ring = make_ring(1, "norm_sparsifier", {"exact_mean": True})
    sent = np.count_nonzero(ring.alike(GRADIENT))
    assert ring.exchanges[0].metrics().payload_bytes == (2 * 4 + 4 + 4 * sent + 8 * sent) // 2


@pytest.mark.parametrize("size", [1, 3])
def test_sums_of_nothing_and_of_little_arrive(size, make_ring):
    ring, sparse = make_ring(size, "norm_sparsifier", {"exact_mean": True}), np.zeros((5, 7), np.float32)
    np.testing.assert_array_equal(ring.alike(sparse)[0], sparse)
    sparse[2, 3] = -4.0  # the only element of its part: it has the whole norm, and is always sent
    np.testing.assert_allclose(ring.alike(sparse)[0], sparse, rtol=1e-6)
