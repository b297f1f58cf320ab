"""Pictures that a thread draws during training, as often as their cost allows."""

import logging
import threading
import time
from collections.abc import Callable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from matplotlib.figure import Figure

Draw = Callable[[], "Figure"]
LARGEST_COST = 0.002
"""Largest share of the time since the start that drawing may take during a training, in processor time."""
_LONGEST_PAUSE_SECONDS = 1.0
_log = logging.getLogger(__name__)


class Pictures:
    """Draws the newest version of each picture; versions in quick succession are skipped, except the last one."""

    def __init__(self, take: Callable[["Figure", str, int], None]) -> None:
        """Store the callback; the first order starts the thread.

        Args:
            take: Called with each picture, its path and its step, from the thread.
        """
        self._take = take
        self._orders: dict[str, tuple[Draw, int]] = {}  # function and step, by path
        self._changed = threading.Condition()
        self._thread: threading.Thread | None = None
        self._started = time.monotonic()
        self._seconds = 0.0  # processor time of all drawing
        self._finishes = False

    def order(self, path: str, draw: Draw, *, after_step: int) -> None:
        """Order a picture; it replaces an earlier order of the same path that is not drawn yet.

        Args:
            path: Path of the artifact.
            draw: Draws the picture; a thread calls it, and it must own the data that it reads.
            after_step: Optimizer steps that the picture covers.
        """
        with self._changed:
            self._orders[path] = draw, after_step
            if self._thread is None:
                self._thread = threading.Thread(target=self._draw_all, name="pictures", daemon=True)
                self._thread.start()
            self._changed.notify_all()

    def hurry(self) -> None:
        """Draw the last order of each picture without a pause from now on; `finish` waits for it."""
        with self._changed:
            self._finishes = True
            self._changed.notify_all()

    def finish(self) -> None:
        """Draw the last order of each picture, and wait for it."""
        self.hurry()
        if self._thread is not None:
            self._thread.join()
            self._thread = None
        self._finishes = False

    def _draw_all(self) -> None:
        while True:
            with self._changed:
                while not self._may_draw():
                    if self._finishes and not self._orders:
                        return
                    self._changed.wait(_LONGEST_PAUSE_SECONDS)
                path = next(iter(self._orders))
                draw, after_step = self._orders.pop(path)
            before = time.thread_time()
            try:
                self._take(draw(), path, after_step)
            except Exception:  # training continues; the next version of the picture may succeed
                _log.warning("%s was not drawn", path, exc_info=True)
            self._seconds += time.thread_time() - before

    def _may_draw(self) -> bool:
        if not self._orders:
            return False
        return self._finishes or self._seconds <= LARGEST_COST * (time.monotonic() - self._started)
