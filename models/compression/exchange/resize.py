"""Exchange state saved by some number of ranks, for another number."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from models.compression.codec import Shape
from models.compression.exchange.exchange import GradientExchange

Saved = Mapping[str, NDArray[Any]]


def save_state(exchange: GradientExchange) -> dict[str, NDArray[Any]]:
    """This rank's state by name."""
    arrays = {entry.name: entry.variable.numpy() for entry in exchange.state}
    return arrays | {name: variable.numpy() for name, variable in exchange.clock.items()}


def load_state(exchange: GradientExchange, saved: Sequence[Saved]) -> None:
    """Set this rank's state from that of all ranks of the run that saved it.

    With as many ranks as then, a rank takes what it saved. With another number, no update is lost:

        worker slots (residual, velocity):  every rank takes the mean over the old ranks
        owner slots:                        joined to the whole tensor, added to every rank's residual, and zero
        shared slots, step, learning rate:  as they are

    so that the mean over ranks of worker residuals, plus the owners', stays what it was: the sum of what all exchanges
    so far left out.

    Args:
        exchange: Built.
        saved: Of old rank 0, 1, ..., as `save_state` gave them.

    Raises:
        ValueError: names or shapes of another model or codec.
    """
    expected = {entry.name for entry in exchange.state} | exchange.clock.keys()
    for rank, state in enumerate(saved):
        if state.keys() != expected:
            differing = sorted(state.keys() ^ expected)
            raise ValueError(f"exchange state of rank {rank} is of another model or codec: {differing[0]!r} differs")
    for name, variable in exchange.clock.items():
        variable.assign(saved[0][name])
    same_size = len(saved) == exchange.collective.size
    owned: dict[str, NDArray[Any]] = {}
    for entry in exchange.state:
        values = [state[entry.name] for state in saved]
        if same_size:
            entry.variable.assign(values[exchange.collective.rank])
        elif entry.slot.scope == "owner":
            owned[entry.name.partition("/")[2]] = _join(exchange, values, entry.tensor_shape)
            entry.variable.assign(np.zeros(entry.slot.shape, np.float32))
        elif entry.slot.scope == "worker":
            entry.variable.assign(np.mean(values, axis=0))
        else:
            entry.variable.assign(values[0])
    for entry in exchange.state:
        slot, _, tensor = entry.name.partition("/")
        if slot == "residual" and tensor in owned:
            entry.variable.assign_add(owned[tensor])


def _join(exchange: GradientExchange, parts: list[NDArray[Any]], shape: Shape) -> NDArray[Any]:
    joined: NDArray[Any] = exchange.codec.join_parts(np.stack(parts), shape).numpy()
    return joined
