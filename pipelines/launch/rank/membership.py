"""The join of a rank, at the start and after the death of another rank, and the memory that outlives its process."""

import logging
import os
from multiprocessing.connection import Connection

from pipelines.launch.rank.report import send
from pipelines.launch.wire.messages import Join, ReadyToJoin, TakeOver, decode

ORPHAN_EXIT_CODE = 113
NO_COMMON_STATE = "a rank has died before every rank had done a step"
"""Message of a rank that rejoined but has no state to continue from; the death of the other rank is the cause."""
CYCLE_TIME = "HOROVOD_CYCLE_TIME"
"""A variable that makes Horovod 0.28 change the size of its fusion buffer when ranks rejoin."""
_log = logging.getLogger(__name__)
_orders: Connection | None = None
_memory: tuple[int, ...] = ()
_is_spare = False


def join(progress: int = 0) -> None:
    """Wait until every rank is ready to join, then set the variables that Horovod needs for it.

    Call `hvd.init` right after this; all ranks do so at the same time. After a rank has died, the others call
    `hvd.shutdown`, then this function, then `hvd.init`. Outside a rank this does nothing.

    Args:
        progress: Progress of the function, in any unit. The launcher gives up if ranks die repeatedly and this value
            does not rise.
    """
    if _orders is None:
        return
    if _memory and os.environ.pop(CYCLE_TIME, None) is not None:  # set on the executors; the driver refuses its own
        _log.warning("%s of this host is ignored: Horovod 0.28 cannot join again with it", CYCLE_TIME)
    send(ReadyToJoin(progress))
    order = _next_order(_orders)
    assert isinstance(order, Join), order
    os.environ.update(order.environment)


def is_spare() -> bool:
    """Return whether this process is a spare that waits for its turn; it also runs the function."""
    return _is_spare


def is_turn() -> bool:
    """Return whether a spare's rank has died, so that `wait_for_turn` returns at once."""
    return _orders is not None and _orders.poll()


def wait_for_turn() -> None:
    """Wait, in a spare, until the rank's own process has died; then this process becomes the rank.

    In any other process this returns at once. A spare must not report, join or write anything before that.
    """
    global _is_spare
    if _is_spare:
        assert _orders is not None
        order = _next_order(_orders)
        assert isinstance(order, TakeOver), order
        _is_spare = False


def shared_memory_files() -> tuple[int, ...]:
    """Return descriptors of three in-memory files shared by the rank's process and its spare; empty without spares.

    The files are empty at first, and disappear with the rank's task.
    """
    return _memory


def connect(orders: Connection, memory: tuple[int, ...], *, spare: bool) -> None:
    """Use this connection for orders from now on; the rank's process calls this."""
    global _orders, _memory, _is_spare
    _orders, _memory, _is_spare = orders, memory, spare


def _next_order(orders: Connection) -> object:
    try:
        order, _ = decode(orders.recv_bytes())
    except EOFError:  # the task is gone
        os._exit(ORPHAN_EXIT_CODE)
    return order
