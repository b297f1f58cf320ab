"""What one rank alone has in a checkpoint: its exchange's state, and the variables that its training mode keeps."""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from models.compression.exchange.exchange import GradientExchange
from models.compression.exchange.resize import load_state, save_state

if TYPE_CHECKING:
    import keras

Arrays = dict[str, NDArray[Any]]
_OWN = "own/"


def rank_state(exchange: GradientExchange, own: Sequence["keras.Variable"]) -> Arrays:
    """Return the arrays of this rank by name."""
    variables = {f"{_OWN}{number:04d}/{each.path}": np.asarray(each) for number, each in enumerate(own)}
    return save_state(exchange) | variables


def load_rank_state(exchange: GradientExchange, own: Sequence["keras.Variable"], saved: Sequence[Arrays]) -> None:
    """Set this rank's state from those of all ranks that saved it.

    With the same number of ranks each one takes its own; with another number, `own` becomes the mean over the old
    ranks, as the exchange's residuals do.

    Args:
        exchange: The exchange, built.
        own: The variables of this rank.
        saved: What `rank_state` returned on the old ranks 0, 1, ...; one of them is in memory at a time.

    Raises:
        ValueError: The names or shapes are of another model, codec or mode.
    """
    parts = _Parts(saved)
    load_state(exchange, parts)
    if len(parts.sums) != len(own):
        raise ValueError(f"a rank saved {len(parts.sums)} variables of its own, and this training mode has {len(own)}")
    for variable, total in zip(own, parts.sums, strict=True):
        if total.shape != tuple(variable.shape):
            raise ValueError(f"{variable.path} has shape {total.shape} in the checkpoint, and {variable.shape} here")
        variable.assign((total / parts.read).astype(total.dtype) if parts.read > 1 else total)


class _Parts(Sequence[Arrays]):
    """The exchange's part of the saved states; sums the other part of those that are read."""

    def __init__(self, saved: Sequence[Arrays]) -> None:
        self._saved = saved
        self.read = 0
        self.sums: list[NDArray[Any]] = []

    def __len__(self) -> int:
        return len(self._saved)

    def __getitem__(self, rank: int) -> Arrays:  # type: ignore[override]  # no slices
        arrays = self._saved[rank]
        own = [arrays[name] for name in sorted(arrays) if name.startswith(_OWN)]
        self.sums = [total + value for total, value in zip(self.sums, own, strict=True)] if self.read else own
        self.read += 1
        return {name: value for name, value in arrays.items() if not name.startswith(_OWN)}
