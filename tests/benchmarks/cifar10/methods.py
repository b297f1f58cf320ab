"""Set-up and methods of `convergence`."""

import hashlib
import json
import os
import sys
from dataclasses import dataclass, field
from typing import Any

SMOKE_VARIABLE = "CONVERGENCE_SMOKE"
"""Set in the ranks of a smoke run."""
IS_SMOKE = "--smoke" in sys.argv or SMOKE_VARIABLE in os.environ
RANKS = 2
SEEDS = (0,) if IS_SMOKE else (0, 1, 2)
CLASSES = 10
TRAIN_IMAGES, TEST_IMAGES = (40, 20) if IS_SMOKE else (10_000, 10_000)
BATCH_SIZE, EPOCHS, EPOCHS_PER_EVALUATION = (10, 5, 1) if IS_SMOKE else (64, 20, 2)
STEPS_PER_EPOCH = TRAIN_IMAGES // (RANKS * BATCH_SIZE)
CROP_MARGIN = 0
EVERY_STEPS = (6, 26, 78)
"""Steps between two exchanges of local training."""
# One block per stage, 300,000 parameters in 12 convolutions and the head.
DEPTH, WIDTH_FACTOR = 10, 0.25
# Tuned on `none`.
SETUP: dict[str, dict[str, Any]] = {
    "optimizer": {"name": "sgd", "learning_rate_per_256": 0.2, "momentum": 0.9, "nesterov": True, "weight_decay": 5e-4},
    "schedule": {
        "recipe_epochs": EPOCHS,
        "warmup": {"name": "gradual", "epochs": 1},
        "decay": {
            "name": "multi_step",
            "milestones": [{"fraction": 5 / 8, "factor": 0.1}, {"fraction": 7 / 8, "factor": 0.01}],
        },
    },
    # A fifth of the run is dense.
    "exchange": {"warmup_steps": EPOCHS // 5 * STEPS_PER_EPOCH},
    "training": {"epochs": EPOCHS, "batch_size_per_worker": BATCH_SIZE},
}


@dataclass(frozen=True)
class Method:
    """What a method changes, and what is expected of it."""

    codec: dict
    exchange: dict = field(default_factory=dict)
    optimizer: dict = field(default_factory=dict)
    precision: str = "float32"
    """Numbers in forward and backward pass."""
    mode: dict | None = None
    """Training mode; None: synchronous."""
    meprop: float | None = None
    """Part of a convolution's channels whose gradient goes on, at each pixel."""
    baseline: str = "none"
    parity: bool = False
    """Whether it must reach the baseline: within a point, or two standard errors of the difference."""
    worse_than: str | None = None
    """An ablation of that method, which must be below it."""


# The codec advances the momentum.
NO_MOMENTUM = {"momentum": 0.0, "nesterov": False}
# The densities that DGC published, an epoch each, instead of a dense warm-up.
DENSITY_WARMUP = [
    {"before_step": (epoch + 1) * STEPS_PER_EPOCH, "density": density}
    for epoch, density in enumerate((0.25, 0.0625, 0.015625, 0.004))
]
ADAM = {"name": "onebit_adam", "learning_rate_per_256": 2e-3, "weight_decay": 5e-4}
LARS = {"name": "lars", "trust_coefficient": 0.001, "weight_decay": 5e-4}
MOMENTUM_HALF, DILOCO = {"momentum": 0.5}, {"rate": 0.7, "momentum": 0.9}
FROZEN_FROM = EPOCHS * STEPS_PER_EPOCH // 5
METHODS = {
    "none": Method({"name": "none"}),
    "onebit": Method({"name": "onebit"}, parity=True),
    "qsgd 8 bits": Method({"name": "qsgd", "bits": 8}, parity=True),
    "qsgd 4 bits": Method({"name": "qsgd", "bits": 4}, parity=True),
    "topk 1 %": Method({"name": "topk", "density": 0.01}, parity=True),
    "dgc 1 %": Method({"name": "dgc", "density": 0.01}, optimizer=NO_MOMENTUM, parity=True),
    "powersgd rank 4": Method({"name": "powersgd", "rank": 4}, parity=True),
    "onebit, no error feedback": Method({"name": "onebit", "error_feedback": False}, worse_than="onebit"),
    "topk 1 %, no error feedback": Method(
        {"name": "topk", "density": 0.01, "error_feedback": False}, worse_than="topk 1 %"
    ),
    "powersgd rank 4, no error feedback": Method(
        {"name": "powersgd", "rank": 4, "error_feedback": False}, worse_than="powersgd rank 4"
    ),
    "dgc 0.1 %": Method(
        {"name": "dgc", "density": 0.001, "density_schedule": DENSITY_WARMUP},
        exchange={"warmup_steps": 0},
        optimizer=NO_MOMENTUM,
    ),
    # Residuals of gradients instead of velocities, and the optimizer's momentum after the sum.
    "dgc 0.1 %, no momentum correction": Method(
        {"name": "topk", "density": 0.001, "density_schedule": DENSITY_WARMUP},
        exchange={"warmup_steps": 0},
        worse_than="dgc 0.1 %",
    ),
    "fp16": Method({"name": "fp16"}),
    "bf16": Method({"name": "bf16"}),
    "scaled_sign": Method({"name": "scaled_sign"}),
    "qsgd 2 bits": Method({"name": "qsgd", "bits": 2}),
    "norm_sparsifier": Method({"name": "norm_sparsifier", "exact_mean": False}),
    "norm_sparsifier, exact mean": Method({"name": "norm_sparsifier"}),
    "threshold": Method({"name": "threshold", "tau": 0.01}),
    "adaptive": Method({"name": "adaptive", "density": 0.01}),
    "randomk 1 %": Method({"name": "randomk", "density": 0.01}),
    "powersgd rank 1": Method({"name": "powersgd", "rank": 1}),
    "meprop": Method({"name": "none"}, meprop=0.25),
    "bfloat16": Method({"name": "none"}, precision="bfloat16", parity=True),
    # The published LARS rates grow as the square root of the batch: 2.9 at 256 by that law. Beside it the rate that
    # large-batch SGD has.
    "lars": Method({"name": "none"}, optimizer={**LARS, "learning_rate_per_256": 2.9, "scaling": "sqrt"}),
    "lars at SGD's rate": Method(
        {"name": "none"}, optimizer={**LARS, "learning_rate_per_256": 0.1, "scaling": "linear"}, worse_than="lars"
    ),
    # Divisors of the steps of an epoch: an epoch's last step exchanges nothing more.
    **{
        f"local, every {steps} steps": Method({"name": "none"}, mode={"name": "local", "every_steps": steps})
        for steps in EVERY_STEPS
    },
    # Its first fifth is dense, as that of every codec: so many exchanges.
    "local, every 6 steps, onebit": Method(
        {"name": "onebit"},
        exchange={"warmup_steps": EPOCHS // 5 * STEPS_PER_EPOCH // EVERY_STEPS[0]},
        mode={"name": "local", "every_steps": EVERY_STEPS[0]},
    ),
    "post-local, every 26 steps": Method(
        {"name": "none"},
        mode={
            "name": "local",
            "every_steps": EVERY_STEPS[1],
            "local_after_steps": EPOCHS * STEPS_PER_EPOCH // 2,
        },
    ),
    "bmuf, every 26 steps": Method(
        {"name": "none"}, mode={"name": "local", "every_steps": EVERY_STEPS[1], "outer": MOMENTUM_HALF}
    ),
    "diloco, every 26 steps": Method(
        {"name": "none"}, mode={"name": "local", "every_steps": EVERY_STEPS[1], "outer": DILOCO}
    ),
    "delayed": Method({"name": "none"}, mode={"name": "delayed"}),
    # The first fifth is in lock step, as that of every codec is dense.
    **{
        f"parameter server, {name}": Method(
            {"name": codec},
            mode={"name": "parameter_server", "synchronous_steps": EPOCHS // 5 * STEPS_PER_EPOCH, **settings},
        )
        for name, codec, settings in (
            ("async", "none", {"synchrony": "async"}),
            ("ssp, bound 3", "none", {"synchrony": "ssp", "bound": 3}),
            ("async, onebit", "onebit", {"synchrony": "async"}),
        )
    },
    # Adam until the end: the exchange stays dense, and nothing is frozen.
    "adam": Method(
        {"name": "onebit_adam"},
        exchange={"warmup_steps": EPOCHS * STEPS_PER_EPOCH},
        optimizer={**ADAM, "warmup_steps": EPOCHS * STEPS_PER_EPOCH},
        baseline="adam",
    ),
    "onebit_adam": Method(
        {"name": "onebit_adam"},
        exchange={"warmup_steps": FROZEN_FROM},
        optimizer={**ADAM, "warmup_steps": FROZEN_FROM},
        baseline="adam",
    ),
}


def overrides(method, seed):
    """Of the shipped configuration `smoke`, for one run."""
    sections = {name: dict(values) for name, values in SETUP.items()}
    # Another optimizer has other settings.
    sections["optimizer"] = {**({} if "name" in method.optimizer else sections["optimizer"]), **method.optimizer}
    sections["exchange"] |= {"codec": method.codec, **method.exchange}
    sections["training"]["seed"] = seed
    if method.mode is not None:
        sections["training"]["mode"] = method.mode
    if method.precision != "float32":
        sections["training"]["precision"] = method.precision
    optimizer = sections.pop("optimizer")
    keys = [f"{name}.{key}={json.dumps(value)}" for name, values in sections.items() for key, value in values.items()]
    return [f"optimizer={json.dumps(optimizer)}", *keys]


def fingerprint(method, seed):
    """Of all that decides a run's result, but the code."""
    settings = [overrides(method, seed), method.meprop, DEPTH, WIDTH_FACTOR, RANKS, TRAIN_IMAGES, CROP_MARGIN]
    return hashlib.sha256(json.dumps(settings).encode()).hexdigest()[:12]
