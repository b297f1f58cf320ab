import numpy as np
import pytest

from pipelines.dataset.statistics import BandSums

PIXELS = np.random.default_rng(0).integers(0, 65536, (5, 4, 3, 2), dtype=np.uint16)


def test_mean_and_deviation_are_numpys() -> None:
    statistics = BandSums.of(PIXELS).statistics()
    pixels = PIXELS.reshape(-1, 2).astype(np.float64)
    assert statistics.mean == pytest.approx(pixels.mean(axis=0))
    assert statistics.std == pytest.approx(pixels.std(axis=0))


def test_any_cut_gives_exactly_the_same_sums() -> None:
    assert BandSums.of(PIXELS[:2]) + BandSums.of(PIXELS[2:]) == BandSums.of(PIXELS)


def test_a_large_constant_band_has_no_deviation() -> None:
    # In single or double precision, the difference of these sums of squares would not come out as zero.
    sums = BandSums(10**12, (65535 * 10**12,), (65535**2 * 10**12,))
    assert sums.statistics().std == (0.0,)


def test_other_dtypes_are_refused() -> None:
    with pytest.raises(ValueError, match="float32"):
        BandSums.of(PIXELS.astype(np.float32))
