"""Saves the state of an exchange, and loads it on the same or another number of ranks."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from models.compression.codec import Shape
from models.compression.exchange.exchange import GradientExchange

Saved = Mapping[str, NDArray[Any]]


def save_state(exchange: GradientExchange) -> dict[str, NDArray[Any]]:
    """Return this rank's state by name."""
    arrays = {entry.name: entry.variable.numpy() for entry in exchange.state}
    return arrays | {name: variable.numpy() for name, variable in exchange.clock.items()}


def load_state(exchange: GradientExchange, saved: Sequence[Saved]) -> None:
    """Set this rank's state from the states of all ranks that saved it.

    With the same number of ranks, a rank takes the state that it saved. With another number, no update is lost:

        worker state (residual, velocity):  every rank takes the mean over the old ranks
        owner state:                        joined to the whole tensor, added to every rank's residual, then set to 0
        shared state, step, learning rate:  unchanged

    The mean over ranks of the worker residuals plus the owners' residuals does not change: it is the sum of what all
    exchanges so far left out.

    Args:
        exchange: The exchange, built.
        saved: What `save_state` returned on the old ranks 0, 1, ...

    Raises:
        ValueError: names of another model or codec.
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
        elif entry.spec.scope == "owner":
            owned[entry.name.partition("/")[2]] = _join(exchange, values, entry.tensor_shape)
            entry.variable.assign(np.zeros(entry.spec.shape, np.float32))
        elif entry.spec.scope == "worker":
            entry.variable.assign(np.mean(values, axis=0))
        else:
            entry.variable.assign(values[0])
    for entry in exchange.state:
        name, _, tensor = entry.name.partition("/")
        if name == "residual" and tensor in owned:
            entry.variable.assign_add(owned[tensor])


def _join(exchange: GradientExchange, parts: list[NDArray[Any]], shape: Shape) -> NDArray[Any]:
    joined: NDArray[Any] = exchange.codec.join_parts(np.stack(parts), shape).numpy()
    return joined
