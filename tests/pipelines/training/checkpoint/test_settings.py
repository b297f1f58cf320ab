"""Which settings of a resumed run may differ from those of its checkpoint."""

import re
from contextlib import nullcontext
from dataclasses import replace
from typing import Any

import pytest

from conf.load import load
from pipelines.storage.folder import Location
from pipelines.training.checkpoint.settings import check_same_training, recorded_settings
from pipelines.training.checkpoint.state import TrainingState
from tests.pipelines.training.manifests import rgb_manifest

PATH = Location("step-00000004.npz")
MANIFEST = rgb_manifest()
STATE = TrainingState(
    epochs_done=1,
    step=4,
    seed=0,
    global_batch_size=8,
    run_id="run",
    dataset_fingerprint=MANIFEST.fingerprint,
    history=[],
    settings=recorded_settings(load("smoke")),
)


def state_of(*settings: str, **more: Any) -> TrainingState:
    """The state that a training with these settings has written."""
    return replace(STATE, settings=recorded_settings(load("smoke", settings)), **more)


def check(state: TrainingState, *settings: str, refused: str = "") -> None:
    """A training with these settings continues the state, or is refused by what differs."""
    message = rf"step-00000004.npz is of another training: {refused}\. Set them as they were"
    config = load("smoke", settings)
    with pytest.raises(ValueError, match=message) if refused else nullcontext():
        check_same_training(PATH, state, recorded_settings(config), config.global_batch_size, MANIFEST)


def test_a_checkpoint_says_what_it_was_written_with() -> None:
    settings = STATE.settings
    assert settings == settings | {
        "model.depth": "18",
        "optimizer.name": "lars",
        "exchange.codec.name": "none",
        "training.batch_size_per_worker": "4",
        "launch.num_workers": "2",
    }
    assert all(settings[f"version.{package}"] for package in ("groundswell", "keras", "tensorflow"))


@pytest.mark.parametrize(
    ("setting", "message"),
    [
        ("training.seed=5", "training.seed was 0, is 5"),
        ("training.batch_size_per_worker=8", "the global batch size was 8, is 16"),
        ("model.depth=50", "model.depth was 18, is 50"),
        # Layers come in another order then, and so do the variables.
        ("model.stochastic_depth=0.1", r"model\.stochastic_depth was 0\.0, is 0\.1"),
        ("input.upsampling=bilinear", "input.upsampling was nearest, is bilinear"),
        ("input.bands=[red]", r"input\.bands was None, is \['red'\]"),
        ("optimizer.name=sgd", "optimizer.name was lars, is sgd"),
        ("optimizer.variant=larc", "optimizer.variant was mlperf, is larc"),
        (
            "warm_start={source: /x.npz, frozen_layers: ['stem*']}",
            r"warm_start\.frozen_layers was \[\], is \['stem\*'\]",
        ),
        # Only half floats bind a run to its precision.
        ("training.precision=float16", r"training\.precision was float32, is float16"),
    ],
)
def test_what_does_not_fit_the_state_is_refused(setting: str, message: str) -> None:
    check(STATE, setting, refused=message)


def test_momentum_of_sgd_neither_begins_nor_ends() -> None:
    some, less, none = (f"optimizer={{name: sgd, momentum: {value}, nesterov: false}}" for value in (0.9, 0.8, 0))
    check(state_of(some), less)
    check(state_of(some), none, refused=r"optimizer\.momentum was 0\.9, is 0\.0")
    check(state_of(none), some, refused=r"optimizer\.momentum was 0\.0, is 0\.9")
    check(STATE, "optimizer.momentum=0")  # LARS without momentum has the same variables


def test_a_pipeline_and_synchronous_training_continue_each_other() -> None:
    pipeline = ["training.mode={name: pipeline, stages: 2}", "training.global_batch_size=8"]
    check(STATE, *pipeline)
    check(state_of(*pipeline))
    check(state_of(*pipeline), "training.mode=delayed", refused=r"training\.mode\.layout was synchronous, is delayed")


def test_the_number_of_updates_of_a_frozen_moment_stays() -> None:
    before, after = (
        [
            f"optimizer={{name: onebit_adam, warmup_steps: {steps}}}",
            f"exchange.warmup_steps={steps}",
            "exchange.codec=onebit_adam",
        ]
        for steps in (100, 20)
    )
    check(state_of(*before), *before)
    check(state_of(*before), *after, refused=r"optimizer\.warmup_steps was 100, is 20")


def test_another_dataset_is_refused() -> None:
    fingerprint = re.escape(MANIFEST.fingerprint)
    check(replace(STATE, dataset_fingerprint="0123"), refused=f"the dataset's fingerprint was 0123, is {fingerprint}")


@pytest.mark.parametrize(
    ("codec", "setting", "message"),
    [
        ("none", "exchange.codec=onebit", r"exchange\.codec\.name was none, is onebit"),
        ("powersgd", "exchange.codec.rank=2", r"exchange\.codec\.rank was 4, is 2"),
        ("onebit", "exchange.codec.error_feedback=false", r"exchange\.codec\.error_feedback was True, is False"),
        ("topk", "exchange.dense_below=7", r"exchange\.dense_below was \d+, is 7"),
        ("topk", "exchange.codec={name: topk, density: 0.05}", ""),  # what it sends may change
    ],
)
def test_what_shapes_the_state_of_an_exchange_stays_where_something_is_left_to_send(
    codec: str, setting: str, message: str
) -> None:
    before = f"exchange.codec={codec}"
    check(state_of(before), before, setting)
    check(state_of(before, exchange_ranks=2), before, setting, refused=message)


@pytest.mark.parametrize(
    "settings",
    [
        ["optimizer.learning_rate_per_256=1.0"],
        ["schedule.warmup=none"],
        ["training.epochs=9"],
        ["training.precision=bfloat16"],
        ["input.augmentation=flips"],
        ["model.dropout=0.1"],
        ["input.resolution_schedule=[{until: {steps: 4}, scale: 0.5}]"],
        ["input.augmentation={name: pad_crop, padding: 2}"],
        ["training.batch_size_per_worker=8", "launch.num_workers=1"],
        ["exchange.bucket_mib=1"],
    ],
)
def test_what_leaves_the_state_valid_may_change(settings: list[str]) -> None:
    check(STATE, *settings)


@pytest.mark.parametrize(
    ("before", "after", "message"),
    [
        ("{}", "{alpha: 0.5}", "was not set, is 0.5"),
        ("{alpha: 0.5}", "{}", "was 0.5, is not set"),
        ("{alpha: 0.5}", "{alpha: 0.25}", "was 0.5, is 0.25"),
    ],
)
def test_arguments_of_a_network_by_import_path_stay(before: str, after: str, message: str) -> None:
    then, now = (f"model={{name: import, path: 'a:b', settings: {each}}}" for each in (before, after))
    check(state_of(then), then)
    check(state_of(then), now, refused=rf"model\.settings\.alpha {message}")


def test_a_checkpoint_holds_averages_or_none() -> None:
    check(STATE, "training.ema=0.99", refused=r"training\.ema was None, is 0\.99")
    check(state_of("training.ema=0.99"), "training.ema=0.9")
    check(state_of("training.ema=0.99"), refused=r"training\.ema was 0\.99, is None")
