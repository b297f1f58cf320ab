"""All training modes by name.

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
"""Import paths, as a rank imports only the mode that it has; see `MakeMode`."""


def mode_maker(config: ModeConfig) -> MakeMode:
    """Import what makes the configured mode.

    Raises:
        ValueError: There is nothing at the path that the mode's declaration names.
    """
    declaration = config.declaration
    path = declaration.implementation or MODES[config.name]
    maker: MakeMode = import_function(path, f"{type(declaration).__qualname__}.implementation")
    return maker


def check_model_of_mode(config: ModeConfig, model: keras.Model, samples: tuple[dict[str, Any], Any]) -> None:
    """Check that the configured mode can train a model; see `MakeMode`.

    Raises:
        ValueError: It cannot, or it is not found; in one line.
    """
    check = getattr(sys.modules[mode_maker(config).__module__], "check_model", None)
    if check is not None:
        check(model, config.declaration, samples)
