"""The pixels of one synthetic patch: invented land covers, as a Sentinel-2 sensor would see them.

Everything is a pure function of (seed, patch number): a map of 1 to 5 land covers at 10 m, and 12 bands that share it.
Every class has its spectrum, but the patch's illumination, the variety within a class and noise make spectra overlap.
On another processor a floating-point sum may round differently and change a pixel by 1.
"""

import functools
import multiprocessing
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor

import numpy as np
from numpy.typing import NDArray

from pipelines.archives.bigearthnet.nomenclature import BIGEARTHNET_19
from pipelines.sample import ImageGroup

PIXELS = 120
"""Rows and columns of the map of land covers, 10 m each."""
MINIMUM_COVER = 0.05
"""Least fraction of a patch that a class must cover to be in it; smaller covers go to their neighbours."""

_BANDS = ("B01", "B02", "B03", "B04", "B05", "B06", "B07", "B08", "B8A", "B09", "B11", "B12")
# Relative frequency of the class, then invented but plausible reflectances x 10,000 in the order of _BANDS.
_CLASSES: dict[str, tuple[float, tuple[int, ...]]] = {
    "Agro-forestry areas": (0.08, (400, 520, 800, 1000, 1460, 2230, 2580, 2780, 2980, 3010, 3130, 2180)),
    "Arable land": (0.55, (470, 640, 910, 1160, 1540, 2000, 2200, 2460, 2660, 2770, 3490, 2930)),
    "Beaches, dunes, sands": (0.04, (2060, 2520, 3000, 3830, 3640, 3220, 3230, 3350, 3390, 3180, 4420, 4380)),
    "Broad-leaved forest": (0.30, (200, 260, 500, 270, 870, 3050, 3920, 4210, 4340, 4300, 1830, 760)),
    "Coastal wetlands": (0.04, (470, 570, 760, 800, 1010, 1350, 1550, 1660, 1710, 1530, 1250, 830)),
    "Complex cultivation patterns": (0.22, (420, 580, 860, 920, 1460, 2550, 3060, 3260, 3390, 3340, 2620, 1740)),
    "Coniferous forest": (0.42, (150, 190, 320, 200, 490, 1490, 1830, 2020, 2140, 2160, 870, 370)),
    "Industrial or commercial units": (0.04, (1630, 1880, 2010, 2400, 2300, 2150, 2200, 2310, 2360, 2390, 2790, 2830)),
    "Inland waters": (0.14, (330, 390, 460, 330, 260, 180, 160, 140, 120, 110, 75, 55)),
    "Inland wetlands": (0.06, (260, 320, 500, 450, 800, 1490, 1760, 1870, 1990, 1940, 1530, 830)),
    "Land principally occupied by agriculture, with significant areas of natural vegetation": (
        0.24,
        (330, 440, 720, 610, 1230, 2630, 3230, 3430, 3550, 3600, 2290, 1260),
    ),
    "Marine waters": (0.18, (510, 440, 260, 110, 70, 45, 40, 30, 25, 20, 15, 10)),
    "Mixed forest": (0.34, (180, 230, 410, 230, 670, 2230, 2820, 3020, 3140, 3180, 1320, 530)),
    "Moors, heathland and sclerophyllous vegetation": (
        0.05,
        (260, 340, 520, 530, 870, 1490, 1760, 1870, 1990, 2010, 1980, 1180),
    ),
    "Natural grassland and sparsely vegetated areas": (
        0.05,
        (470, 610, 910, 1030, 1460, 1920, 2200, 2310, 2510, 2540, 3130, 2360),
    ),
    "Pastures": (0.24, (300, 410, 800, 480, 1300, 3570, 4460, 4760, 4970, 4940, 2450, 1180)),
    "Permanent crops": (0.07, (540, 760, 1110, 1450, 1860, 2310, 2500, 2620, 2900, 2930, 3850, 3030)),
    "Transitional woodland, shrub": (0.28, (240, 310, 530, 430, 940, 1920, 2350, 2540, 2740, 2770, 1980, 1010)),
    "Urban fabric": (0.16, (950, 1130, 1270, 1450, 1620, 2000, 2200, 2310, 2430, 2460, 2290, 2000)),
}
_FREQUENCIES = np.array([_CLASSES[name][0] for name in BIGEARTHNET_19])
_SPECTRA = np.array([_CLASSES[name][1] for name in BIGEARTHNET_19], np.float32)
_COVER_COUNTS = (0.15, 0.2, 0.28, 0.22, 0.15)  # probability of 1, 2, ... 5 land covers in a patch

# Standard deviations of the logarithm of the reflectance, which make the classes overlap.
_ILLUMINATION = 0.10  # of the whole patch: sun, haze, season
_CLASS_BRIGHTNESS = 0.05  # of a class between patches
_CLASS_COLOUR = 0.03  # of a class between patches, separately for each band
_TEXTURE = 0.08  # within a region, smooth over some 100 m, equal in all bands
_NOISE = 0.04  # of each pixel and band


def land_cover(seed: int, number: int) -> tuple[NDArray[np.uint8], tuple[int, ...]]:
    """Draw the land covers of a patch.

    Regions are nearest-site (Voronoi) cells of a plane bent by smooth noise; a class has one or two sites.

    Returns:
        The map `(120, 120)` of indices into `BIGEARTHNET_19`, and the indices in it, ascending: the labels.
    """
    generator = np.random.default_rng([seed, number, 0])
    count = 1 + generator.choice(len(_COVER_COUNTS), p=_COVER_COUNTS)
    classes = generator.choice(len(BIGEARTHNET_19), count, replace=False, p=_FREQUENCIES / _FREQUENCIES.sum())
    sites = np.repeat(classes, generator.integers(1, 3, count)).astype(np.uint8)
    places = generator.uniform(0, PIXELS, (2, len(sites), 1, 1))
    rows, columns = np.mgrid[:PIXELS, :PIXELS] + PIXELS / 12 * _smooth_noise(generator, 2)
    distances = (rows - places[0]) ** 2 + (columns - places[1]) ** 2
    drawn = sites[distances.argmin(axis=0)]
    fractions = np.bincount(drawn.ravel(), minlength=len(BIGEARTHNET_19)) / drawn.size
    # Without the sites of a small class the others only grow, so one pass is enough.
    kept = fractions[sites] >= MINIMUM_COVER
    cover = sites[kept][distances[kept].argmin(axis=0)]
    return cover, tuple(np.unique(cover).tolist())


def render(
    seed: int, number: int, groups: tuple[ImageGroup, ...]
) -> tuple[dict[str, NDArray[np.uint16]], tuple[int, ...]]:
    """Draw the bands of a patch over its land covers, as reflectance x 10,000.

    A coarse band is the mean of the 10 m pixels below each of its own, so shares of classes mix within a pixel.

    Args:
        seed: Seed of the archive.
        number: Number of the patch.
        groups: Image groups to draw; each height and width divides 120.

    Returns:
        One image `(height, width, bands)` per group name, and the labels of `land_cover`.
    """
    cover, labels = land_cover(seed, number)
    generator = np.random.default_rng([seed, number, 1])
    spread = (
        _ILLUMINATION * generator.standard_normal()
        + _CLASS_BRIGHTNESS * generator.standard_normal((len(labels), 1))
        + _CLASS_COLOUR * generator.standard_normal((len(labels), len(_BANDS)))
    )
    spectra = _SPECTRA[list(labels)] * np.exp(spread).astype(np.float32)
    texture = np.exp(_TEXTURE * _smooth_noise(generator, 1)[0])
    shares = np.stack([texture * (cover == label) for label in labels], axis=-1)  # (120, 120, labels)
    return {group.name: _observe(shares, spectra, group, generator) for group in groups}, labels


def draw_patches(
    draw: Callable[[int], tuple[int, ...]], total: int, processes: int, patches_per_task: int
) -> Iterator[tuple[int, ...]]:
    """Draw patches 0 to total - 1 and yield their labels in this order.

    Args:
        draw: Function that draws the patch of a number and returns its labels.
        total: Number of patches.
        processes: Largest number of processes. They are spawned, because the threads of Spark or TensorFlow do not
            survive a fork. With 1, this process does everything.
        patches_per_task: Number of patches that a process draws at a time.
    """
    processes = min(processes, -(-total // patches_per_task))
    if processes == 1:
        yield from map(draw, range(total))
        return
    with ProcessPoolExecutor(processes, mp_context=multiprocessing.get_context("spawn")) as pool:
        yield from pool.map(draw, range(total), chunksize=patches_per_task)


def _observe(
    shares: NDArray[np.float32], spectra: NDArray[np.float32], group: ImageGroup, generator: np.random.Generator
) -> NDArray[np.uint16]:
    height, width, _ = group.shape
    blocks = shares.reshape(height, PIXELS // height, width, PIXELS // width, -1).mean(axis=(1, 3))
    signal = blocks @ spectra[:, [_BANDS.index(band) for band in group.bands]]
    signal *= 1 + _NOISE * generator.standard_normal(signal.shape, np.float32)
    # 0 marks a missing pixel in the archive's files.
    return np.asarray(np.clip(np.rint(signal), 1, 10_000), np.uint16)


def _smooth_noise(generator: np.random.Generator, count: int) -> NDArray[np.float32]:
    """Draw fields `(count, 120, 120)` of about unit deviation: random values on a coarse grid, interpolated."""
    weights = _interpolation()
    coarse = generator.standard_normal((count, weights.shape[1], weights.shape[1]), np.float32)
    return weights @ coarse @ weights.T


@functools.cache
def _interpolation(knots: int = 10) -> NDArray[np.float32]:
    """Return weights `(120, knots)` of a smooth interpolation between equally spaced values, rows of unit length."""
    distance = np.linspace(0, knots - 1, PIXELS)[:, None] - np.arange(knots)
    weights = np.exp(-(distance**2))
    return np.asarray(weights / np.linalg.norm(weights, axis=1, keepdims=True), np.float32)
