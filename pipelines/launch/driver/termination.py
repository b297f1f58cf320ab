"""SIGTERM to the driver while ranks run: they get time to save their state before the signal takes effect."""

import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType

_REASON = "the driver received SIGTERM"


class Termination:
    """Whether the driver has received SIGTERM during an attempt."""

    def __init__(self) -> None:
        """Start without a received signal."""
        self.received = False
        self._request: Callable[[str], None] = lambda reason: None

    def handle(self, number: int, frame: FrameType | None) -> None:
        """Record the signal; a second one takes effect at once."""
        if self.received:
            raise KeyboardInterrupt("SIGTERM came twice")
        self.received = True
        self._request(_REASON)

    def tell(self, request: Callable[[str], None]) -> None:
        """Call `request` with the reason when the signal arrives, or now if it has arrived."""
        self._request = request
        if self.received:
            request(_REASON)


@contextmanager
def delayed_sigterm() -> Iterator[Termination]:
    """Turn SIGTERM into a request inside this block; at the end of the block the signal takes its usual effect.

    Only the main thread of a process handles signals: in other threads this changes nothing.
    """
    termination = Termination()
    previous = signal.getsignal(signal.SIGTERM)
    if threading.current_thread() is not threading.main_thread() or previous in (None, signal.SIG_IGN):
        yield termination
        return
    signal.signal(signal.SIGTERM, termination.handle)
    try:
        yield termination
    finally:
        signal.signal(signal.SIGTERM, previous)
        if termination.received:
            signal.raise_signal(signal.SIGTERM)
