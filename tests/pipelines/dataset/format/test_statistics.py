import numpy as np
import pytest

from pipelines.dataset.format.statistics import BandSums

PIXELS = np.random.default_rng(0).integers(0, 65536, (5, 4, 3, 2), dtype=np.uint16)


@pytest.mark.parametrize(
    "pixels", [PIXELS, np.random.default_rng(0).normal(-12, 5, (100, 2)).astype(np.float32)], ids=["uint16", "float32"]
)
def test_mean_and_deviation_are_numpys(pixels: np.ndarray) -> None:
    statistics = (BandSums.of(pixels[:2]) + BandSums.of(pixels[2:])).statistics()
    assert statistics.mean == pytest.approx(pixels.reshape(-1, 2).mean(axis=0))
    assert statistics.std == pytest.approx(pixels.reshape(-1, 2).std(axis=0))


def test_any_cut_gives_exactly_the_same_sums() -> None:
    assert BandSums.of(PIXELS[:2]) + BandSums.of(PIXELS[2:]) == BandSums.of(PIXELS)


def test_a_large_constant_band_has_no_deviation() -> None:
    # In single or double precision, the difference of these sums of squares would not come out as zero.
    assert BandSums(10**12, (65535 * 10**12,), (65535**2 * 10**12,), ((10**12,),)).statistics().std == (0.0,)


def test_histograms_count_every_pixel() -> None:
    pixels = np.array([[0, 63, 64, 127, 16319, 16320, 65535]], np.uint16).T
    (histogram,) = BandSums.of(pixels).histogram
    assert [histogram[0], histogram[1], histogram[254], histogram[255]] == [2, 2, 1, 2]
    (small,) = BandSums.of(pixels.astype(np.uint8)).histogram
    assert sum(small) == 7


def test_other_dtypes_are_refused() -> None:
    with pytest.raises(ValueError, match="int32"):
        BandSums.of(PIXELS.astype(np.int32))
