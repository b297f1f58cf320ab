"""Makes splits for archives without splits: by class and seed, equal on every machine."""

import hashlib
import math
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from pipelines.archives.archive import Archive
from pipelines.sample import SPLITS, TRAINING_SPLIT


def check_split(fractions: Sequence[float], seed: int) -> tuple[float, float, float]:
    """Check the settings of a split; return the fractions of train, validation and test as a tuple.

    Raises:
        ValueError: Not three fractions are given, one is negative, train's is 0, or their sum is not 1; or the seed is
            negative.
    """
    valid = len(fractions) == len(SPLITS) and all(0 <= fraction <= 1 for fraction in fractions)
    if not valid or fractions[0] == 0 or not math.isclose(sum(fractions), 1, abs_tol=1e-6):
        raise ValueError(
            f"split_fractions is {list(fractions)}, expected three numbers for {', '.join(SPLITS)} "
            "of 0 or more with the sum 1, the first above 0"
        )
    if not 0 <= seed < 2**64:
        raise ValueError(f"seed is {seed}, expected 0 or more and below 2**64")
    train, validation, test = fractions
    return train, validation, test


def refuse_without_effect(archive: Archive, name: str, because: str) -> None:
    """Refuse a setting of the split that has no effect on this archive.

    Args:
        archive: The archive, whose class has the defaults of the settings.
        name: Name of the setting.
        because: Property of the archive that explains this, for the message.

    Raises:
        ValueError: The value is not the default.
    """
    value = getattr(archive, name)
    if value != getattr(type(archive), name):
        raise ValueError(f"{name}={value} has no effect on {archive.root}: {because}")


def draw_validation(
    splits: NDArray[np.str_], keys: Sequence[str], classes: NDArray[np.integer[Any]], fraction: float, seed: int
) -> None:
    """Move a part of the training samples of every class to validation.

    Args:
        splits: Split of every sample, changed in place.
        keys: Unique name of every sample.
        classes: Class of every sample.
        fraction: Part of the training samples that is moved.
        seed: Another seed moves other samples.
    """
    train = np.flatnonzero(splits == TRAINING_SPLIT)
    drawn = stratified_split([keys[row] for row in train], classes[train], (1 - fraction, fraction), seed)
    splits[train] = np.array(SPLITS)[drawn]


def stratified_split(
    keys: Sequence[str], classes: NDArray[np.integer[Any]], fractions: Sequence[float], seed: int
) -> NDArray[np.int8]:
    """Divide samples so that every class is divided in the same proportions.

    The samples of a class are ordered by a hash of seed and key and cut by `split_counts`. So the order of the listing
    does not matter, and a further file moves few others to another split.

    Args:
        keys: One per sample, unique within a class; otherwise the listing's order decides.
        classes: One per sample.
        fractions: Fraction of each split; they add up to 1.
        seed: Seed of the hash, 0 or more.

    Returns:
        Position in `fractions` for every sample.
    """
    salt = seed.to_bytes(8, "little")
    hashes = np.frombuffer(
        b"".join(hashlib.blake2b(key.encode(), digest_size=8, salt=salt).digest() for key in keys), "<u8"
    )
    order = np.lexsort((hashes, classes))
    splits = np.empty(len(keys), np.int8)
    starts = np.flatnonzero(np.diff(classes[order], prepend=-1))
    for members in np.split(order, starts[1:]):
        splits[members] = np.repeat(np.arange(len(fractions)), split_counts(len(members), fractions))
    return splits


def split_counts(total: int, fractions: Sequence[float]) -> list[int]:
    """Divide a number by largest remainder; splits with a fraction above 0 are not empty if there are enough samples.

    `floor(total * fraction)` each, then one more for the largest remainders. E.g. 10 by (0.7, 0.15, 0.15): 7, 1, 1 and
    remainders 0, 0.5, 0.5, so 7, 2, 1.
    """
    exact = [total * fraction for fraction in fractions]
    counts = [math.floor(value + 1e-9) for value in exact]  # 0.29 * 100 is 28.999999999999996
    by_remainder = sorted(range(len(exact)), key=lambda split: round(counts[split] - exact[split], 9))
    for split in by_remainder[: total - sum(counts)]:
        counts[split] += 1
    used = [split for split, fraction in enumerate(fractions) if fraction > 0]
    for split in used if total >= len(used) else []:
        if counts[split] == 0:
            counts[counts.index(max(counts))] -= 1
            counts[split] = 1
    return counts
