"""All optimizers by name.

A new optimizer is one file in this folder and one line in the table below. To be configurable it also has a class of
settings, with a line in the union, in `conf/sections/optimizers.py`.
"""

from collections.abc import Callable

import keras

from models.optimizers.adagrad import adagrad
from models.optimizers.adamw import adamw
from models.optimizers.lamb import lamb
from models.optimizers.lars import lars
from models.optimizers.onebit_adam import onebit_adam
from models.optimizers.sgd import sgd

OPTIMIZERS: dict[str, Callable[..., keras.optimizers.Optimizer]] = {
    "lars": lars,
    "lamb": lamb,
    "adamw": adamw,
    "adagrad": adagrad,
    "sgd": sgd,
    "onebit_adam": onebit_adam,
}
"""Constructors with the settings of the optimizer as keyword arguments, all of them required.

`excluded` are the variables without weight decay. `unadapted`, in some optimizers, are the variables without the ratio
of norms. The learning rate is 0 until it is set, before every step.
"""
