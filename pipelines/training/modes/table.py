"""The training modes by name.

A new mode is one file in this folder, one line in the table below, and one class in `conf/sections/modes.py`.
"""

import sys
from typing import Any

import keras

from conf.sections.modes import ModeConfig
from models.imported import import_function
from pipelines.training.step.mode import MakeMode

MODES = {
    "synchronous": "pipelines.training.modes.synchronous:make",
    "local": "pipelines.training.modes.local:make",
    "delayed": "pipelines.training.modes.delayed:make",
    "pipeline": "pipelines.training.modes.pipeline:make",
    "parameter_server": "pipelines.training.modes.server_step:make",
}
"""The import paths of the modes, because a rank imports only its own mode; see `MakeMode`."""


def mode_maker(config: ModeConfig) -> MakeMode:
    """Import the function that makes the configured mode.

    Raises:
        ValueError: The path in the mode's declaration does not exist.
    """
    declaration = config.declaration
    path = declaration.implementation or MODES[config.name]
    return import_function(path, f"{type(declaration).__qualname__}.implementation")


def check_model_of_mode(config: ModeConfig, model: keras.Model, samples: tuple[dict[str, Any], Any]) -> None:
    """Check that the configured mode can train a model; see `MakeMode`.

    Raises:
        ValueError: The mode cannot train the model, or is not found. The text has one line.
    """
    check = getattr(sys.modules[mode_maker(config).__module__], "check_model", None)
    if check is not None:
        check(model, config.declaration, samples)
