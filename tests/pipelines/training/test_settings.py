"""Which settings of a resumed run may differ from those of its checkpoint."""

import re
from dataclasses import replace
from pathlib import Path

import pytest

from conf.load import load
from conf.schema import RunConfig
from pipelines.dataset.manifest import Manifest
from pipelines.training.checkpoint import TrainingState
from pipelines.training.settings import check_same_training, recorded_settings

PATH = Path("step-00000004.npz")
MANIFEST = Manifest(
    archive="image_folder",
    task="single_label",
    class_names=("water", "land"),
    groups=(),
    splits={},
    statistics={},
    settings={},
    source_fingerprint="abc",
)
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


def test_a_checkpoint_says_what_it_was_written_with() -> None:
    settings = STATE.settings
    assert settings["model.depth"] == "18"
    assert settings["optimizer.name"] == "lars"
    assert settings["exchange.codec.name"] == "none"
    assert settings["training.batch_size_per_worker"] == "4"
    assert settings["launch.num_workers"] == "2"
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
    ],
)
def test_what_does_not_fit_the_state_is_refused(setting: str, message: str) -> None:
    with pytest.raises(ValueError, match=rf"step-00000004.npz is of another training: {message}\. Set them as they"):
        check_same_training(PATH, STATE, load("smoke", [setting]), MANIFEST)


@pytest.mark.parametrize(("setting", "value"), [("model.stem_stride", "2"), ("model.zero_init_residual", "false")])
def test_a_setting_that_an_earlier_version_did_not_know_had_its_default(setting: str, value: str) -> None:
    # The variables have the same shapes with either stride: only the settings tell the networks apart.
    network = "model={name: resnet_cifar, depth: 8}"
    earlier = {key: text for key, text in recorded_settings(load("smoke", [network])).items() if key != setting}
    check_same_training(PATH, replace(STATE, settings=earlier), load("smoke", [network]), MANIFEST)
    with pytest.raises(ValueError, match=rf"{re.escape(setting)} was \w+, is {value.capitalize()}"):
        check_same_training(
            PATH, replace(STATE, settings=earlier), load("smoke", [network, f"{setting}={value}"]), MANIFEST
        )


def test_momentum_of_sgd_neither_begins_nor_ends() -> None:
    def training(momentum: float) -> RunConfig:
        return load("smoke", [f"optimizer={{name: sgd, momentum: {momentum}, nesterov: false}}"])

    with_momentum = replace(STATE, settings=recorded_settings(training(0.9)))
    check_same_training(PATH, with_momentum, training(0.8), MANIFEST)
    with pytest.raises(ValueError, match=r"optimizer\.momentum was 0\.9, is 0\.0"):
        check_same_training(PATH, with_momentum, training(0), MANIFEST)
    without = replace(STATE, settings=recorded_settings(training(0)))
    with pytest.raises(ValueError, match=r"optimizer\.momentum was 0\.0, is 0\.9"):
        check_same_training(PATH, without, training(0.9), MANIFEST)
    unknown = {name: value for name, value in without.settings.items() if name != "optimizer.momentum"}
    check_same_training(PATH, replace(STATE, settings=unknown), training(0.9), MANIFEST)


def test_lars_without_momentum_has_the_same_variables() -> None:
    check_same_training(PATH, STATE, load("smoke", ["optimizer.momentum=0"]), MANIFEST)


def test_a_pipeline_and_synchronous_training_continue_each_other() -> None:
    pipeline = load("smoke", ["training.mode={name: pipeline, stages: 2}", "training.global_batch_size=8"])
    check_same_training(PATH, STATE, pipeline, MANIFEST)
    check_same_training(PATH, replace(STATE, settings=recorded_settings(pipeline)), load("smoke"), MANIFEST)
    delayed = load("smoke", ["training.mode=delayed"])
    with pytest.raises(ValueError, match=r"training\.mode\.name was pipeline, is delayed"):
        check_same_training(PATH, replace(STATE, settings=recorded_settings(pipeline)), delayed, MANIFEST)


def test_the_number_of_updates_of_a_frozen_moment_stays() -> None:
    def chosen(steps: int) -> RunConfig:
        optimizer = f"optimizer={{name: onebit_adam, warmup_steps: {steps}}}"
        return load("smoke", [optimizer, f"exchange.warmup_steps={steps}", "exchange.codec=onebit_adam"])

    state = replace(STATE, settings=recorded_settings(chosen(100)))
    check_same_training(PATH, state, chosen(100), MANIFEST)
    with pytest.raises(ValueError, match=r"another training: optimizer\.warmup_steps was 100, is 20\. Set"):
        check_same_training(PATH, state, chosen(20), MANIFEST)


def test_another_dataset_is_refused() -> None:
    with pytest.raises(ValueError, match="the dataset's fingerprint was 0123, is "):
        check_same_training(PATH, replace(STATE, dataset_fingerprint="0123"), load("smoke"), MANIFEST)


def test_another_codec_is_refused_where_something_is_left_to_send() -> None:
    config = load("smoke", ["exchange.codec=onebit"])
    check_same_training(PATH, STATE, config, MANIFEST)
    with pytest.raises(ValueError, match=r"exchange\.codec\.name was none, is onebit"):
        check_same_training(PATH, replace(STATE, exchange_ranks=2), config, MANIFEST)


@pytest.mark.parametrize(
    ("codec", "setting", "message"),
    [
        ("powersgd", "exchange.codec.rank=2", r"exchange\.codec\.rank was 4, is 2"),
        ("onebit", "exchange.codec.error_feedback=false", r"exchange\.codec\.error_feedback was True, is False"),
        ("topk", "exchange.dense_below=7", r"exchange\.dense_below was \d+, is 7"),
    ],
)
def test_what_shapes_the_state_of_an_exchange_stays(codec: str, setting: str, message: str) -> None:
    before = [f"exchange.codec={codec}"]
    state = replace(STATE, settings=recorded_settings(load("smoke", before)))
    check_same_training(PATH, state, load("smoke", [*before, setting]), MANIFEST)
    with pytest.raises(ValueError, match=message):
        check_same_training(PATH, replace(state, exchange_ranks=2), load("smoke", [*before, setting]), MANIFEST)


def test_what_an_exchange_sends_may_change() -> None:
    state = replace(STATE, settings=recorded_settings(load("smoke", ["exchange.codec=topk"])), exchange_ranks=2)
    check_same_training(PATH, state, load("smoke", ["exchange.codec={name: topk, density: 0.05}"]), MANIFEST)


@pytest.mark.parametrize(
    "settings",
    [
        ["optimizer.learning_rate_per_256=1.0"],
        ["schedule.warmup=none"],
        ["training.epochs=9"],
        ["input.augmentation=flips"],
        ["model.dropout=0.1"],
        ["input.resolution_schedule=[{until: {steps: 4}, scale: 0.5}]"],
        ["input.augmentation={name: pad_crop, padding: 2}"],
        ["training.batch_size_per_worker=8", "launch.num_workers=1"],
        ["exchange.bucket_mib=1"],
    ],
)
def test_what_leaves_the_state_valid_may_change(settings: list[str]) -> None:
    check_same_training(PATH, STATE, load("smoke", settings), MANIFEST)


@pytest.mark.parametrize(
    ("before", "after", "message"),
    [
        ("{}", "{alpha: 0.5}", "was not set, is 0.5"),
        ("{alpha: 0.5}", "{}", "was 0.5, is not set"),
        ("{alpha: 0.5}", "{alpha: 0.25}", "was 0.5, is 0.25"),
    ],
)
def test_arguments_of_a_network_by_import_path_stay(before: str, after: str, message: str) -> None:
    then, now = (load("smoke", [f"model={{name: import, path: 'a:b', settings: {each}}}"]) for each in (before, after))
    state = replace(STATE, settings=recorded_settings(then))
    check_same_training(PATH, state, then, MANIFEST)
    with pytest.raises(ValueError, match=rf"is of another training: model\.settings\.alpha {message}\. Set them"):
        check_same_training(PATH, state, now, MANIFEST)


def test_a_checkpoint_without_settings_is_compared_by_what_it_has() -> None:
    old = replace(STATE, settings={})
    check_same_training(PATH, old, load("smoke", ["model.depth=50"]), MANIFEST)
    with pytest.raises(ValueError, match=r"training\.seed was 0, is 1"):
        check_same_training(PATH, old, load("smoke", ["training.seed=1"]), MANIFEST)


def test_a_checkpoint_of_the_time_when_the_network_had_the_keys_of_the_input(tmp_path: Path) -> None:
    settings = {name: value for name, value in STATE.settings.items() if not name.startswith("input.")}
    older = replace(STATE, settings={**settings, "model.upsampling": "nearest", "model.augmentation": "flips"})
    check_same_training(PATH, older, load("smoke", ["input.augmentation=dihedral"]), MANIFEST)
    with pytest.raises(ValueError, match=r"input\.upsampling was nearest, is bicubic\. Set"):
        check_same_training(PATH, older, load("smoke", ["input.upsampling=bicubic"]), MANIFEST)
    with pytest.raises(ValueError, match=r"input\.bands was None, is \['red'\]\. Set"):
        check_same_training(PATH, older, load("smoke", ["input.bands=[red]"]), MANIFEST)


def test_a_checkpoint_holds_averages_or_none() -> None:
    averaged = load("smoke", ["training.ema=0.99"])
    with pytest.raises(ValueError, match=r"training\.ema was None, is 0\.99\. Set them as they were"):
        check_same_training(PATH, STATE, averaged, MANIFEST)
    with pytest.raises(ValueError, match=r"training\.ema was None, is 0\.99\. Set them as they were"):
        check_same_training(PATH, replace(STATE, settings={}), averaged, MANIFEST)  # of a version without averages
    holding = replace(STATE, settings=recorded_settings(averaged))
    check_same_training(PATH, holding, load("smoke", ["training.ema=0.9"]), MANIFEST)
    with pytest.raises(ValueError, match=r"training\.ema was 0\.99, is None"):
        check_same_training(PATH, holding, load("smoke"), MANIFEST)


def test_only_half_floats_bind_a_run_to_its_precision() -> None:
    check_same_training(PATH, STATE, load("smoke", ["training.precision=bfloat16"]), MANIFEST)
    with pytest.raises(ValueError, match=r"training\.precision was float32, is float16\. Set them as they"):
        check_same_training(PATH, STATE, load("smoke", ["training.precision=float16"]), MANIFEST)
    older = replace(STATE, settings={})  # of a version that knew float32 only
    check_same_training(PATH, older, load("smoke", ["training.precision=bfloat16"]), MANIFEST)
