"""How a rank joins the others, at the start and again after one of them has died, and what outlives its process."""

import logging
import os
from multiprocessing.connection import Connection

from pipelines.launch.rank.report import send
from pipelines.launch.wire.messages import Join, Ready, TakeOver, decode

ORPHAN_EXIT_CODE = 113
NOTHING_KEPT = "a rank has died before every rank had done a step"
"""What a rank says, in an exception, that has joined again and can go on from nothing: the death is the cause."""
CYCLE_TIME = "HOROVOD_CYCLE_TIME"
"""Where it is set and ranks join again, Horovod 0.28 takes another size for its fusion buffer than at the start."""
_log = logging.getLogger(__name__)
_orders: Connection | None = None
_memory: tuple[int, ...] = ()
_is_spare = False


def join(progress: int = 0) -> None:
    """Wait until every rank is ready to join, then set the variables that Horovod needs for it.

    Call `hvd.init` right after this; all ranks do so at the same time. After a rank has died, the others call
    `hvd.shutdown`, then this, then `hvd.init`. Outside a rank this does nothing.

    Args:
        progress: How far the function is, in units of its own. The launcher gives up where ranks die again and again
            and this does not rise.
    """
    if _orders is None:
        return
    if _memory and os.environ.pop(CYCLE_TIME, None) is not None:  # of the executors; the driver refuses its own
        _log.warning("%s of this host is ignored: Horovod 0.28 cannot join again with it", CYCLE_TIME)
    send(Ready(progress))
    order = _next_order(_orders)
    assert isinstance(order, Join), order
    os.environ.update(order.environment)


def is_spare() -> bool:
    """Whether this process is a spare that waits for its turn; the launcher calls the function in it too."""
    return _is_spare


def is_turn() -> bool:
    """Whether a spare's rank has died, so that `wait_for_turn` returns at once."""
    return _orders is not None and _orders.poll()


def wait_for_turn() -> None:
    """Wait, in a spare, until the rank's own process has died; this process is the rank from then on.

    In any other process this returns at once. A spare must not report, join or write anything before.
    """
    global _is_spare
    if _is_spare:
        assert _orders is not None
        order = _next_order(_orders)
        assert isinstance(order, TakeOver), order
        _is_spare = False


def kept_memory() -> tuple[int, ...]:
    """Return descriptors of three files in memory that the rank's process and its spare share; empty without spares.

    They begin empty, and end with the rank's task.
    """
    return _memory


def connect(orders: Connection, memory: tuple[int, ...], *, spare: bool) -> None:
    """Take orders through this connection from now on; the rank's process calls this."""
    global _orders, _memory, _is_spare
    _orders, _memory, _is_spare = orders, memory, spare


def _next_order(orders: Connection) -> object:
    try:
        order, _ = decode(orders.recv_bytes())
    except EOFError:  # the task is gone
        os._exit(ORPHAN_EXIT_CODE)
    return order
