"""Statistics that others published for the same archives, used to check ours, never to normalise.

Per-band mean and standard deviation of the training split of BigEarthNet, in stored units (reflectance x 10,000).
"""

from typing import NamedTuple


class PublishedBand(NamedTuple):
    """Mean and standard deviation of one band."""

    mean: float
    std: float


PUBLISHED: dict[str, dict[str, PublishedBand]] = {
    # Source: ConfigILM (Hackel, Clasen, Demir, 2024), figures for BigEarthNet v2.0 with bands resampled to 120 x 120.
    "bigearthnet_v2": {
        "B01": PublishedBand(361.08, 575.07),
        "B02": PublishedBand(438.37, 607.03),
        "B03": PublishedBand(614.06, 603.30),
        "B04": PublishedBand(588.41, 684.57),
        "B05": PublishedBand(942.84, 738.43),
        "B06": PublishedBand(1769.93, 1100.46),
        "B07": PublishedBand(2049.55, 1275.81),
        "B08": PublishedBand(2193.29, 1369.37),
        "B8A": PublishedBand(2235.56, 1356.54),
        "B09": PublishedBand(2241.46, 1316.39),
        "B11": PublishedBand(1568.23, 1070.16),
        "B12": PublishedBand(997.73, 813.53),
    },
    # Source: bigearthnet_common, which cites TU Berlin's Remote Sensing Image Analysis group, for BigEarthNet v1.0.
    "bigearthnet_v1": {
        "B01": PublishedBand(340.77, 554.81),
        "B02": PublishedBand(429.94, 572.42),
        "B03": PublishedBand(614.22, 582.88),
        "B04": PublishedBand(590.24, 675.89),
        "B05": PublishedBand(950.68, 729.90),
        "B06": PublishedBand(1792.46, 1096.01),
        "B07": PublishedBand(2075.47, 1273.45),
        "B08": PublishedBand(2218.95, 1365.46),
        "B8A": PublishedBand(2266.46, 1356.14),
        "B09": PublishedBand(2246.06, 1302.33),
        "B11": PublishedBand(1594.43, 1079.19),
        "B12": PublishedBand(1009.33, 818.87),
    },
}
"""Published statistics by kind of archive and by band."""
