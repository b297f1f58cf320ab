"""Ranks that give no sign of life: whether one hangs, and which one the others wait for."""

import re
from collections.abc import Iterable, Sequence

from pipelines.launch.driver.status import AttemptStatus, RankStatus
from pipelines.launch.policy import TimeLimits


def is_hanging(status: AttemptStatus, ranks: Iterable[RankStatus], limits: TimeLimits) -> bool:
    """Return whether one of these ranks has given no sign of life for too long.

    Args:
        status: The attempt at one poll.
        ranks: Some of its ranks.
        limits: The time limits.
    """
    latest = max(rank.last_sign for rank in status.ranks)
    return any(_is_late(rank, latest, status.now, limits) for rank in ranks)


def _is_late(rank: RankStatus, latest: float, now: float, limits: TimeLimits) -> bool:
    if not rank.has_begun:
        return now - rank.last_sign > limits.start
    # A rank that never reports is measured by the last sign of any rank.
    return limits.hang is not None and now - (rank.last_sign if rank.signs else latest) > limits.hang


def suspect(ranks: Sequence[RankStatus]) -> RankStatus:
    """Return the rank for which the others wait inside a collective operation, by their stacks and signs of life."""
    suspects = [rank for rank in ranks if not waits_in_collective(rank.stacks)] or ranks
    return min(suspects, key=lambda rank: (rank.has_begun, rank.signs, rank.last_sign))


def waits_in_collective(stacks: str) -> bool:
    """Return whether the stacks of a rank show that it waits for other ranks inside TensorFlow or Horovod."""
    match = re.search(r'Current thread[^\n]*\n\s*File "([^"]+)"', stacks)
    return match is not None and ("/tensorflow/" in match[1] or "/horovod/" in match[1])
