"""Saving of an exchange's state, and loading on the same or another number of ranks."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from models.compression.exchange.exchange import GradientExchange

Saved = Mapping[str, NDArray[Any]]


def save_state(exchange: GradientExchange) -> dict[str, NDArray[Any]]:
    """Return this rank's state by name."""
    arrays = {entry.name: entry.variable.numpy() for entry in exchange.state}
    return arrays | {name: variable.numpy() for name, variable in exchange.clock.items()}


def load_state(exchange: GradientExchange, saved: Sequence[Saved]) -> None:
    """Set this rank's state from the states of all ranks that saved it.

    With the same number of ranks, a rank reads only the state that it saved. With another number, no update is lost:

        worker state (residual, velocity):  every rank takes the mean over the old ranks
        owner state:                        joined to the whole tensor, added to every rank's residual, then set to 0
        shared state, step, learning rate:  taken from old rank 0

    The mean over ranks of the worker residuals plus the owners' residuals does not change. It is the sum of everything
    that the exchanges left out.

    Args:
        exchange: The exchange, built.
        saved: Results of `save_state` on the old ranks 0, 1, ...; each is read at most once.

    Raises:
        ValueError: The names or shapes belong to another model or codec.
    """
    if len(saved) == exchange.collective.size:
        rank = exchange.collective.rank
        own = saved[rank]
        _check(exchange, own, rank)
        for entry in exchange.state:
            entry.variable.assign(own[entry.name])
        _set_clock(exchange, own)
    else:
        _load_resized(exchange, saved)


def _load_resized(exchange: GradientExchange, saved: Sequence[Saved]) -> None:
    """Read the old ranks' states one after the other, so that one of them is in memory at a time."""
    sums: dict[str, NDArray[Any]] = {}
    parts: dict[str, list[NDArray[Any]]] = {}  # the owners' residuals, by tensor
    for rank, state in enumerate(saved):
        _check(exchange, state, rank)
        if rank == 0:
            _set_clock(exchange, state)
        for entry in exchange.state:
            value = state[entry.name]
            if entry.spec.scope == "owner":
                parts.setdefault(entry.name.partition("/")[2], []).append(value)
            elif entry.spec.scope == "worker":
                sums[entry.name] = sums.get(entry.name, 0.0) + value.astype(np.float64)
            elif rank == 0:
                entry.variable.assign(value)
    for entry in exchange.state:
        name, _, tensor = entry.name.partition("/")
        if entry.spec.scope == "worker":
            entry.variable.assign((sums[entry.name] / len(saved)).astype(np.float32))
        elif entry.spec.scope == "owner":
            entry.variable.assign(np.zeros(entry.spec.shape, np.float32))
        if name == "residual" and tensor in parts:
            entry.variable.assign_add(exchange.codec.join_parts(np.stack(parts[tensor]), entry.tensor_shape).numpy())


def _check(exchange: GradientExchange, state: Saved, rank: int) -> None:
    expected = {entry.name for entry in exchange.state} | exchange.clock.keys()
    if state.keys() != expected:
        differing = sorted(state.keys() ^ expected)
        raise ValueError(f"exchange state of rank {rank} is of another model or codec: {differing[0]!r} differs")
    for entry in exchange.state:
        if entry.spec.scope != "owner" and state[entry.name].shape != tuple(entry.variable.shape):
            raise ValueError(
                f"exchange state of rank {rank} is of another model or codec: {entry.name!r} has shape "
                f"{state[entry.name].shape}, expected {tuple(entry.variable.shape)}"
            )


def _set_clock(exchange: GradientExchange, state: Saved) -> None:
    for name, variable in exchange.clock.items():
        variable.assign(state[name])
