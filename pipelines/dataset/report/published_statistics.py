"""Statistics that others published for the same archives, used to check ours, never to normalise.

Per-band mean and standard deviation of the training split of BigEarthNet, in stored units (reflectance x 10,000).
"""

PUBLISHED: dict[str, dict[str, dict[str, float]]] = {
    # Source: ConfigILM (Hackel, Clasen, Demir, 2024), figures for BigEarthNet v2.0 with bands resampled to 120 x 120.
    "bigearthnet_v2": {
        "B01": {"mean": 361.08, "std": 575.07},
        "B02": {"mean": 438.37, "std": 607.03},
        "B03": {"mean": 614.06, "std": 603.30},
        "B04": {"mean": 588.41, "std": 684.57},
        "B05": {"mean": 942.84, "std": 738.43},
        "B06": {"mean": 1769.93, "std": 1100.46},
        "B07": {"mean": 2049.55, "std": 1275.81},
        "B08": {"mean": 2193.29, "std": 1369.37},
        "B8A": {"mean": 2235.56, "std": 1356.54},
        "B09": {"mean": 2241.46, "std": 1316.39},
        "B11": {"mean": 1568.23, "std": 1070.16},
        "B12": {"mean": 997.73, "std": 813.53},
    },
    # Source: bigearthnet_common, which cites TU Berlin's Remote Sensing Image Analysis group, for BigEarthNet v1.0.
    "bigearthnet_v1": {
        "B01": {"mean": 340.77, "std": 554.81},
        "B02": {"mean": 429.94, "std": 572.42},
        "B03": {"mean": 614.22, "std": 582.88},
        "B04": {"mean": 590.24, "std": 675.89},
        "B05": {"mean": 950.68, "std": 729.90},
        "B06": {"mean": 1792.46, "std": 1096.01},
        "B07": {"mean": 2075.47, "std": 1273.45},
        "B08": {"mean": 2218.95, "std": 1365.46},
        "B8A": {"mean": 2266.46, "std": 1356.14},
        "B09": {"mean": 2246.06, "std": 1302.33},
        "B11": {"mean": 1594.43, "std": 1079.19},
        "B12": {"mean": 1009.33, "std": 818.87},
    },
}
"""Published mean and standard deviation by kind of archive and by band."""
