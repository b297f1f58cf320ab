from collections.abc import Callable, Sequence

import keras
import numpy as np
import pytest
import tensorflow as tf

from conf.sections.optimizers import OptimizerBase
from models.optimizers.table import OPTIMIZERS

SHAPES = {"both": (4, 3), "decay_only": (3,), "ratio_only": (2, 2), "neither": (5,)}
LEFT_OUT = {"excluded": ("ratio_only", "neither"), "unadapted": ("decay_only", "neither")}


def check_steps(
    config: OptimizerBase,
    reference: Callable[..., np.ndarray],
    rates: Sequence[float],
    *,
    dtype: str = "float64",
    tolerance: float,
) -> None:
    """Let an optimizer take steps, and `reference(weights, [(rate, gradient), ...], decay, adapts)` in numpy."""
    random = np.random.default_rng(0)
    starts = {name: random.normal(size=shape) for name, shape in SHAPES.items()}
    gradients = [{name: random.normal(size=shape) for name, shape in SHAPES.items()} for _ in rates]
    variables = {name: keras.Variable(value, dtype=dtype, name=name) for name, value in starts.items()}
    chosen = {argument: [variables[name] for name in LEFT_OUT[argument]] for argument in config.roles()}
    optimizer = OPTIMIZERS[config.name](**chosen, **config.arguments())
    optimizer.build(list(variables.values()))
    for rate, gradient in zip(rates, gradients, strict=True):
        optimizer.learning_rate = rate
        optimizer.apply([tf.constant(each, dtype) for each in gradient.values()], list(variables.values()))
    for name, variable in variables.items():
        steps = [(rate, gradient[name]) for rate, gradient in zip(rates, gradients, strict=True)]
        decays = [config.weight_decay, 0.0] if name in ("both", "decay_only") else [0.0, config.weight_decay]
        adapts = name in ("both", "ratio_only")
        expected, other = (reference(starts[name], steps, decay=decay, adapts=adapts) for decay in decays)
        scale = np.abs(expected).max()
        np.testing.assert_allclose(np.array(variable) / scale, expected / scale, atol=tolerance, err_msg=name)
        assert np.abs(expected - other).max() > 1e-3 * scale, "the decay counts"


@pytest.fixture(scope="session")
def steps_are_those_of() -> Callable[..., None]:
    """Compares an optimizer with its formula in numpy."""
    return check_steps


@pytest.fixture(scope="session")
def rates() -> list[float]:
    """A warm-up and a decay, exact in float32, in which Keras keeps the rate."""
    return [
        float(np.float32(rate)) for rate in np.concatenate([np.linspace(0.001, 0.05, 20), np.linspace(0.05, 0, 30)])
    ]
