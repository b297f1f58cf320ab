"""The buckets of gradients that are sent together."""

import math
from collections.abc import Sequence

_MIB = 1 << 20


def make_buckets(indexes: Sequence[int], elements: Sequence[int], bucket_mib: float | None) -> list[list[int]]:
    """Put the gradients of the last layers, which the backward pass computes first, into the first bucket.

    Args:
        indexes: Positions of the gradients to put into buckets, rising.
        elements: Number of elements of every gradient, by position.
        bucket_mib: Largest size of a bucket, in MiB of float32; a larger gradient is a separate bucket. None: one
            bucket has all gradients.
    """
    buckets: list[list[int]] = []
    filled = math.inf
    limit = math.inf if bucket_mib is None else bucket_mib * _MIB
    for index in reversed(indexes):
        size = 4 * elements[index]
        if not buckets or filled + size > limit:
            buckets.append([])
            filled = 0
        buckets[-1].append(index)
        filled += size
    return buckets
