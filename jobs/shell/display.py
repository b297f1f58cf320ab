"""The progress of a job for the person at the terminal: a bar, or lines without a terminal."""

import sys
import time
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

from jobs.shell.command import interactive, say
from pipelines.dataset.prepare.spark_job import PrepareProgress
from pipelines.machine.notebook import in_notebook
from pipelines.training.ranks.events import Compiling, EpochTrained, Event, SavingModel, StepTrained, TrackingNews

if TYPE_CHECKING:  # MLflow takes seconds to import, and preparation does not need it
    from pipelines.scoring.job import ScoreProgress
    from pipelines.tracking.journal.delivery import News

_SECONDS_BETWEEN_LINES = 15.0
_RANK_0 = "rank 0"
_SHOWN = {
    "val/loss": "validation loss",
    "val/top_1": "top-1",
    "val/top_5": "top-5",
    "val/f1_micro": "F1 micro",
    "val/f1_macro": "F1 macro",
}


class Bar:
    """Progress towards a known total: a bar on a terminal and in notebooks, occasional lines elsewhere."""

    def __init__(self, unit: str) -> None:
        """Make a bar that is not shown before its first `move`."""
        self._unit = unit
        self._interactive = interactive()
        self._bar: Any = None  # tqdm has different classes for terminals and notebooks
        self._last_line = time.monotonic()

    def move(self, title: str, done: int, total: int, bar_text: str, line: str) -> None:
        """Show the progress of the job.

        Args:
            title: Text before the bar; it may be empty.
            done: Units done so far.
            total: Units in all.
            bar_text: Text after the bar.
            line: The line that is printed instead of a bar if nobody watches.
        """
        if self._interactive:
            if self._bar is None:
                self._bar = _new_bar(total=total, desc=title or None, unit=self._unit, leave=False)
            self._bar.set_postfix_str(bar_text, refresh=False)
            self._bar.update(done - self._bar.n)
        elif time.monotonic() - self._last_line >= _SECONDS_BETWEEN_LINES:
            self._last_line = time.monotonic()
            say(line)

    def close(self) -> None:
        """Remove the bar; the next `move` creates a new one."""
        if self._bar is not None:
            self._bar.close()
            self._bar = None


def _new_bar(**settings: Any) -> Any:
    """Return a bar of tqdm: a widget if the notebook has widgets, else text, in a notebook on standard output."""
    if in_notebook() and find_spec("ipywidgets") is not None:
        from tqdm.notebook import tqdm as widget

        return widget(**settings)
    from tqdm import tqdm

    # In a page made from a notebook, a bar stays: the next output would stand in its line.
    return tqdm(file=sys.stdout, **{**settings, "leave": True}) if in_notebook() else tqdm(**settings)


class SamplesDisplay:
    """Shows the progress of preparation or scoring, with the rate of this run."""

    def __init__(self) -> None:
        """Show nothing before the first call."""
        self._bar, self._started = Bar("sample"), time.monotonic()

    def __call__(self, progress: "PrepareProgress | ScoreProgress") -> None:
        """Show the state of the job."""
        rate = (progress.done - progress.found) / (time.monotonic() - self._started)
        rejected = f"{progress.rejected} rejected" if isinstance(progress, PrepareProgress) else ""
        line = ", ".join([f"{progress.done}/{progress.total} samples", f"{rate:.0f}/s", *filter(None, [rejected])])
        self._bar.move("", progress.done, progress.total, rejected, line)

    def close(self) -> None:
        """Remove the bar."""
        self._bar.close()


class TrainingDisplay:
    """Shows the events of rank 0 in the training."""

    def __init__(self) -> None:
        """Show nothing before the first report."""
        self._bar = Bar("step")
        self._without_tracking: set[str] = set()

    def __call__(self, event: Event) -> None:
        """Show one event of the training."""
        match event:
            case Compiling():
                self._without_tracking.discard(_RANK_0)  # a further attempt is another process
                say("compiling the training step, which takes a minute or two with some codecs")
            case StepTrained(step=step, steps=steps):
                title = f"epoch {event.epoch}/{event.epochs}"
                text = f"loss {event.loss:.4f}, {event.images_per_second:.1f} images/s"
                self._bar.move(title, step, steps, text, f"{title}, step {step}/{steps}: {text}")
            case EpochTrained():
                self.close()
                say(_epoch_line(event))
                if event.where:
                    say(f"  {event.where}")
            case SavingModel():
                say("saving the model")
            case TrackingNews():
                self.tracking(event.news, event.reason, _RANK_0)

    def tracking(self, news: "News", reason: str, process: str = "driver") -> None:
        """Say once that MLflow is away, for driver and rank 0 together, and once that both reach it again."""
        if news == "refused":
            say(f"MLflow refuses a write for good: {reason}")
            return
        before = bool(self._without_tracking)
        (self._without_tracking.add if news == "away" else self._without_tracking.discard)(process)
        if not before and self._without_tracking:
            say(f"MLflow does not answer; training continues, and what it records is kept on disk ({reason})")
        elif before and not self._without_tracking:
            say("MLflow answers again and gets what was kept")

    def close(self) -> None:
        """Remove the bar."""
        self._bar.close()


def _epoch_line(event: EpochTrained) -> str:
    metrics = event.metrics
    parts = [f"epoch {event.epoch}/{event.epochs}: loss {metrics['train/loss']:.4f}"]
    parts += [f"{label} {metrics[name]:.4f}" for name, label in _SHOWN.items() if name in metrics]
    rate = metrics["speed/images_per_second"]
    return ", ".join([*parts, f"{rate:.1f} images/s"] if rate else parts)
