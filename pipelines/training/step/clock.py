"""The images and seconds of one rank's epoch."""

import time

_SECONDS_BETWEEN_REPORTS = 1.0


class Clock:
    """Measures images per second and the wait for input; the first step compiles and counts only if it is alone."""

    def __init__(self) -> None:
        """Start with the wait for the first batch."""
        self._started = self._waits_since = self._reported = time.perf_counter()
        self._waited = 0.0
        self._images = self._images_arrived = 0
        self.steps = 0
        """Number of measured steps."""
        self.measures = False
        """Whether a step after the first one is done."""

    def batch_arrived(self, images: int) -> None:
        """End the wait for input; `images` is the number of images that arrived on this rank."""
        self._images_arrived += images
        self._waited += time.perf_counter() - self._waits_since

    def step_done(self) -> None:
        """Count the images of one step, which may have come in several batches."""
        if self.steps == 0:
            self._first_ended, self._first_waited = time.perf_counter(), self._waited
        elif not self.measures:
            self._images, self.steps, self.measures = 0, 0, True
        self._images += self._images_arrived
        self._images_arrived = 0
        self.steps += 1

    def begin_waiting(self) -> None:
        """Start the wait for the next batch."""
        self._waits_since = time.perf_counter()

    def is_report_due(self) -> bool:
        """Return whether a step is measured, and a second has passed since this last returned True or the start."""
        now = time.perf_counter()
        if not self.measures or now - self._reported < _SECONDS_BETWEEN_REPORTS:
            return False
        self._reported = now
        return True

    @property
    def seconds(self) -> float:
        """Seconds of the measured steps."""
        return max(time.perf_counter() - (self._first_ended if self.measures else self._started), 1e-9)

    @property
    def first_step_seconds(self) -> float:
        """Seconds until the first step was done if it is not measured; otherwise 0."""
        return self._first_ended - self._started if self.measures else 0.0

    @property
    def steady_seconds(self) -> float:
        """Seconds of all steps, where the first one counts as an average one; 0 before a step is measured."""
        return self.seconds * (self.steps + 1) / self.steps if self.measures else 0.0

    @property
    def images_per_second(self) -> float:
        """The rate of this rank so far."""
        return self._images / self.seconds

    @property
    def wait_fraction(self) -> float:
        """Fraction of the measured time that was spent waiting for input."""
        waited = self._waited - (self._first_waited if self.measures else 0.0)
        return waited / self.seconds
