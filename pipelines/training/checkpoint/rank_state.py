"""The part of a checkpoint that differs between ranks: the state of the exchange and the mode's own variables."""

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
    """Return this rank's arrays by name."""
    variables = {f"{_OWN}{number:04d}/{each.path}": np.asarray(each) for number, each in enumerate(own)}
    return save_state(exchange) | variables


def load_rank_state(exchange: GradientExchange, own: Sequence["keras.Variable"], saved: Sequence[Arrays]) -> None:
    """Set this rank's state from the saved states of all ranks.

    If the number of ranks is the same, each rank gets its own state. If it differs, `own` becomes the mean over the old
    ranks, as do the residuals of the exchange.

    Args:
        exchange: The exchange, already built.
        own: The variables of this rank.
        saved: Results of `rank_state` on the old ranks 0, 1, ...; only one of them is in memory at a time.

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
    """The exchange's part of the saved states; it also sums the other part of each state that is read."""

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
