"""Training as the person at the terminal sees it: a bar, or lines where there is no terminal."""

import time
from typing import Any

from tqdm.auto import tqdm

from jobs.command import interactive, say

_SECONDS_BETWEEN_LINES = 15.0
_SHOWN = {
    "val/loss": "validation loss",
    "val/top_1": "top-1",
    "val/top_5": "top-5",
    "val/f1_micro": "F1 micro",
    "val/f1_macro": "F1 macro",
}


class TrainingProgress:
    """Shows what rank 0 reports."""

    def __init__(self) -> None:
        """Nothing is shown before the first report."""
        self._interactive = interactive()
        self._bar: Any = None
        self._last_line = time.monotonic()

    def __call__(self, message: dict[str, Any]) -> None:
        """Take one report of a worker."""
        match message.get("event"):
            case "compiling":
                say("compiling the training step, which takes a minute or two with some codecs")
            case "step":
                self._step(message)
            case "epoch":
                self.close()
                say(_epoch_line(message))
            case "saving":
                say("saving the model")

    def close(self) -> None:
        """End the bar."""
        if self._bar is not None:
            self._bar.close()
            self._bar = None

    def _step(self, message: dict[str, Any]) -> None:
        text = f"loss {message['loss']:.4f}, {message['images_per_second']:.1f} images/s"
        if self._interactive:
            if self._bar is None:
                title = f"epoch {message['epoch']}/{message['epochs']}"
                self._bar = tqdm(total=message["steps"], desc=title, unit="step", leave=False)
            self._bar.n = message["step"]
            self._bar.set_postfix_str(text)
        elif time.monotonic() - self._last_line >= _SECONDS_BETWEEN_LINES:
            self._last_line = time.monotonic()
            say(f"epoch {message['epoch']}/{message['epochs']}, step {message['step']}/{message['steps']}: {text}")


def _epoch_line(message: dict[str, Any]) -> str:
    metrics = message["metrics"]
    parts = [f"epoch {message['epoch']}/{message['epochs']}: loss {metrics['train/loss']:.4f}"]
    for name, label in _SHOWN.items():
        if name in metrics:
            parts.append(f"{label} {metrics[name]:.4f}")
    return ", ".join([*parts, f"{metrics['speed/images_per_second']:.1f} images/s"])
