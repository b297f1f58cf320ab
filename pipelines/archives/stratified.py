"""Makes splits for archives without splits: by class and seed, equal on every machine."""

import hashlib
import math
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from pipelines.sample import SPLITS, TRAINING_SPLIT


def check_split(fractions: Sequence[float]) -> tuple[float, ...]:
    """Check the fractions of train, validation and test, and return them as a tuple.

    Raises:
        ValueError: Not three fractions are given, one is negative, train's is 0, or their sum is not 1.
    """
    valid = len(fractions) == len(SPLITS) and all(0 <= fraction <= 1 for fraction in fractions)
    if not valid or fractions[0] == 0 or not math.isclose(sum(fractions), 1, abs_tol=1e-6):
        raise ValueError(
            f"split_fractions is {list(fractions)}, expected three numbers for {', '.join(SPLITS)} "
            "of 0 or more with the sum 1, the first above 0"
        )
    return tuple(fractions)


def assign_splits(
    archive: Any,
    given: Sequence[str | None],
    keys: Sequence[str],
    classes: NDArray[np.integer[Any]],
    *,
    has_validation: bool,
) -> NDArray[np.str_]:
    """Return the split of every sample: the given one, or one that is drawn by class.

    Args:
        archive: The archive, with the settings `seed`, `split_fractions` and `validation_fraction`.
        given: Split of every sample, or None for all.
        keys: Unique name of every sample.
        classes: Class of every sample.
        has_validation: Whether the given splits include validation; otherwise a part of every training class moves.

    Raises:
        ValueError: A setting has no effect on this archive.
    """
    if not any(given):
        _refuse_without_effect(archive, "validation_fraction", "it has no splits")
        return np.array(SPLITS)[stratified_split(keys, classes, archive.split_fractions, archive.seed)]
    _refuse_without_effect(archive, "split_fractions", "it has splits")
    splits = np.array(given, "U10")
    if has_validation:
        _refuse_without_effect(archive, "validation_fraction", "it has a validation split")
        _refuse_without_effect(archive, "seed", "it has a validation split")
    else:
        train = np.flatnonzero(splits == TRAINING_SPLIT)
        kept_and_moved = (1 - archive.validation_fraction, archive.validation_fraction)
        drawn = stratified_split([keys[row] for row in train], classes[train], kept_and_moved, archive.seed)
        splits[train] = np.array(SPLITS)[drawn]
    return splits


def _refuse_without_effect(archive: Any, name: str, because: str) -> None:
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
