"""What the driver finds before any rank starts."""

import errno
import os
import re
import shutil
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from conf.load import load, override
from conf.schema import RunConfig
from pipelines.dataset.format.manifest import BandStatistics, Manifest, read_manifest, write_manifest
from pipelines.sample import ImageGroup
from pipelines.storage.folder import Location
from pipelines.training.checkpoint.settings import recorded_settings
from pipelines.training.checkpoint.state import TrainingState, save_checkpoint
from pipelines.training.driver import checks
from pipelines.training.driver.checks import (
    _check_cache_is_default,
    _check_model_input,
    _check_steps,
    _check_trace,
    check_dataset,
    check_output,
    check_resume,
)
from tests.pipelines.training.manifests import rgb_manifest


def check_model_input(config: RunConfig, manifest: Manifest) -> None:
    _check_model_input(config.dataset.path, config.input, config.model, manifest)


def check_output_of(config: RunConfig) -> None:
    check_output(config.training, config.dataset.path)


@pytest.mark.parametrize(
    ("setting", "fits", "refused", "message"),
    [
        (
            "input.augmentation=dihedral",
            (32, 32, 3),
            (32, 40, 3),
            r"group 'rgb' of .* has 32 x 40 pixels, no square: choose another input",
        ),
        *(
            (
                f"model={{name: {network}}}",
                (least, least, 3),
                (32, least - 1, 3),
                rf"^model\.name=\w+ needs images of at least {least} pixels on each side, and those of .* have "
                rf"{least - 1}:",
            )
            for network, least in (("airbench", 9), ("resnet9", 8), ("resnet9, stem_stride: 2", 16))
        ),
    ],
)
def test_images_that_do_not_fit_are_refused(
    setting: str, fits: tuple[int, int, int], refused: tuple[int, int, int], message: str
) -> None:
    config = load("smoke", [setting])
    check_model_input(config, rgb_manifest(fits))
    with pytest.raises(ValueError, match=message):
        check_model_input(config, rgb_manifest(refused))


def test_flips_need_no_squares_and_every_band_has_statistics() -> None:
    check_model_input(load("smoke", ["input.augmentation=flips"]), rgb_manifest((32, 40, 3)))
    short = BandStatistics(mean=(1.0,) * 2, std=(1.0,) * 2)
    with pytest.raises(ValueError, match=r"no finite mean and standard deviation for each of the 3 bands of group"):
        check_model_input(load("smoke"), rgb_manifest(statistics={"rgb": short}))


def test_an_output_that_cannot_be_written_is_found_by_the_driver(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(RuntimeError, match=r"cannot write to .*/file/outputs \(Not a directory\): set "):
        check_output_of(load("smoke", [f"training.output={tmp_path}/file/outputs"]))
    check_output_of(load("smoke", [f"training.output={tmp_path}/outputs"]))
    assert list((tmp_path / "outputs").iterdir()) == []


@pytest.mark.parametrize("output", ["dataset", "dataset/outputs", "link/outputs", "other/../dataset/outputs"])
def test_an_output_in_the_dataset_is_refused(tmp_path: Path, output: str) -> None:
    for name in ("dataset", "other"):
        (tmp_path / name).mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "dataset")
    behind_a_url = (r"s3://bucket/dataset", "s3a://bucket", "dataset/outputs")
    for dataset, place, under in ((tmp_path / "dataset", tmp_path, output), behind_a_url):
        message = rf"training\.output={place}/{under} is (in )?the dataset {dataset}: choose a folder outside of it$"
        with pytest.raises(ValueError, match=message):
            check_output_of(load("smoke", [f"dataset.path={dataset}", f"training.output={place}/{under}"]))
    assert list((tmp_path / "dataset").iterdir()) == []
    check_output_of(load("smoke", [f"dataset.path={tmp_path / 'dataset'}", f"training.output={tmp_path}"]))


@pytest.mark.parametrize(
    ("number", "remedy"),
    [
        (errno.EROFS, "set training.output to a folder with write access"),
        (errno.ENOSPC, "free some space, or set training.output to a larger disk"),
    ],
)
def test_a_read_only_or_full_output_is_found_by_the_driver(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int, remedy: str
) -> None:
    chosen = load("smoke", [f"training.output={tmp_path}"])

    def refuse(self: Path, *_: object, **__: object) -> None:
        raise OSError(number, os.strerror(number), str(self))

    monkeypatch.setattr(Path, "open", refuse)  # root may write to any folder, and a disk is not filled here
    message = re.escape(f"cannot write to {tmp_path} ({os.strerror(number)}): {remedy}")
    with pytest.raises(RuntimeError, match=f"^{message}$"):
        check_output_of(chosen)


def resumed(folder: Path, state: TrainingState, *settings: str, order: str = "any row") -> list[str]:
    """The settings that continue a run whose newest checkpoint is that of the state."""
    state = replace(state, order=f"groundswell's reader, {order}", settings=recorded_settings(load("smoke")))
    save_checkpoint(Location.at(folder) / "run" / "checkpoints", state, [])
    return [f"training.output={folder}", "training.resume_run=run", *settings]


def test_more_epochs_than_asked_for_are_refused(tmp_path: Path) -> None:
    dataset = rgb_manifest()
    config = load("smoke", resumed(tmp_path, TrainingState(3, 12, 0, 8, "run", dataset.fingerprint, [])))
    with pytest.raises(ValueError, match=r"has done 3 epochs, more than training\.epochs=2: raise training\.epochs"):
        check_resume(config, dataset)
    check_output_of(config)


@pytest.mark.parametrize(
    ("settings", "end"),
    [
        (["training.epochs=3"], "after all 3 epochs"),
        (
            ["training.epochs=9", "training.selection={metric: val/top_1, patience: 2, model: last}"],
            "after 3 of 9 epochs: 2 in a row without a better val/top_1",
        ),
    ],
)
def test_the_middle_of_an_epoch_beyond_the_end_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, settings: list[str], end: str
) -> None:
    monkeypatch.setattr(checks, "window_rows", lambda *_: None)  # there are no files
    dataset, history = rgb_manifest(splits={"train": (16, 16)}), [{"val/top_1": 0.5}] * 3
    state = TrainingState(3, 14, 0, 8, "run", dataset.fingerprint, history, loss_sum=2.0, loss_count=2)
    before = resumed(tmp_path, state)
    with pytest.raises(ValueError, match=rf"is in the middle of epoch 4, and training would end {end}: raise training"):
        check_resume(load("smoke", [*before, *settings]), dataset)
    check_resume(load("smoke", [*before, "training.epochs=4"]), dataset)


@pytest.mark.parametrize(
    ("order", "setting"),
    [("any row", "reader.name=petastorm"), ("any row", "reader.cache_limit_gib=1"), ("windows of 9 rows", "")],
)
def test_another_order_within_an_epoch_is_refused(
    small_dataset: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, order: str, setting: str
) -> None:
    dataset = read_manifest(small_dataset)
    state = TrainingState(0, 1, 0, 8, "run", dataset.fingerprint, [], loss_sum=2.0, loss_count=2)
    before = resumed(tmp_path, state, f"dataset.path={small_dataset}", order=order)
    if order == "any row":
        check_resume(load("smoke", before), dataset)
    if "cache" in setting:  # as where the rows are compressed, and do not fit
        monkeypatch.setattr(checks, "window_rows", lambda *_: 64)
    with pytest.raises(
        ValueError, match=rf"within an epoch of groundswell's reader, {order}, now it is .*: set reader"
    ):
        check_resume(load("smoke", [*before, *filter(None, [setting])]), dataset)


def test_a_resumed_run_needs_no_source_of_weights(small_dataset: Path) -> None:
    settings = [f"dataset.path={small_dataset}", "warm_start.source=/nowhere/model.keras"]
    with pytest.raises((FileNotFoundError, ValueError), match=r"/nowhere/model\.keras"):
        check_dataset(load("smoke", settings))
    check_dataset(load("smoke", [*settings, "training.resume_run=run"]))


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (
            ["training.trace_steps=[19, 21]"],
            r"trace_steps=\[19, 21\] is beyond the end of the run, which has 20 steps \(2 epochs of 10\)",
        ),
        (
            ["training.tensorflow_profiler=true", "training.trace_steps=[19, 20]", "training.output=s3://a/b"],
            r"tensorflow_profiler=true writes files, and training\.output=s3://a/b is a URL",
        ),
    ],
)
def test_steps_beyond_the_end_are_not_traced(settings: list[str], message: str) -> None:
    _check_trace(load("smoke", ["training.trace_steps=[19, 20]"]).training, 10)
    with pytest.raises(ValueError, match=message):
        _check_trace(load("smoke", settings).training, 10)


def test_upsampling_needs_images_of_several_sizes() -> None:
    config = load("smoke", ["input.upsampling=bilinear"])
    groups = (ImageGroup("fine", (32, 32, 3), "uint8", ("a", "b", "c")), ImageGroup("z", (16, 16, 1), "uint8", ("d",)))
    statistics = {
        group.name: BandStatistics(mean=(1.0,) * len(group.bands), std=(1.0,) * len(group.bands)) for group in groups
    }
    both = rgb_manifest().model_copy(update={"groups": groups, "statistics": statistics})
    check_model_input(config, both)
    message = r"^input\.upsampling=bilinear has no effect: all images of .* have 32 x 32 pixels$"
    for one_size, chosen in ((rgb_manifest(), config), (both, override(config, "input.bands=[a, b]"))):
        with pytest.raises(ValueError, match=message):
            check_model_input(chosen, one_size)


def test_what_our_own_reader_will_read_is_checked(small_dataset: Path, tmp_path: Path) -> None:
    damaged = tmp_path / "damaged"
    shutil.copytree(small_dataset, damaged)
    shard = min(damaged.glob("train/part-*.parquet"))
    shard.write_bytes(shard.read_bytes()[:-1])
    petastorm = [f"dataset.path={damaged}", "reader.name=petastorm"]
    check_dataset(load("smoke", petastorm))  # Petastorm reads the training split in the ranks
    # Rank 0 whitens by some of its rows.
    for settings in ([*petastorm, "model=airbench"], petastorm[:1]):
        with pytest.raises(ValueError, match=f"^shard {shard} has "):
            check_dataset(load("smoke", settings))


@pytest.mark.parametrize("setting", ["cache_folder=/tmp/cache", "cache_limit_gib=50.0"])
def test_a_dataset_that_needs_no_cache(setting: str) -> None:
    default, chosen = load("smoke"), load("smoke", [f"reader.{setting}"])
    _check_cache_is_default(default.dataset.path, default.reader)
    with pytest.raises(ValueError, match=rf"^reader\.{setting} has no effect: .* is local and not compressed"):
        _check_cache_is_default(chosen.dataset.path, chosen.reader)


@pytest.mark.parametrize(
    ("setting", "message"),
    [
        (
            "training.global_batch_size=20",
            r"global_batch_size=20 does not divide into batches of 4 on each of 2 workers: make it a multiple of 8",
        ),
        (
            "training.accumulation_steps=200",
            r"fewer than one global batch of 1600 \(2 workers x 200 micro-batches x 4\): lower training",
        ),
    ],
)
def test_a_global_batch_that_does_not_divide_is_refused(setting: str, message: str) -> None:
    dataset: Any = SimpleNamespace(splits={"train": SimpleNamespace(rows=1000)})
    _check_steps(load("smoke", ["training.global_batch_size=24"]), dataset)
    with pytest.raises(ValueError, match=message):
        _check_steps(load("smoke", [setting]), dataset)


@pytest.mark.parametrize(
    ("splits", "message"),
    [
        ({"test": (2, 1)}, r"has no training split, only test$"),
        ({}, r"has no training split, only no split at all$"),
    ],
)
def test_splits_that_are_needed(tmp_path: Path, splits: dict[str, tuple[int, ...]], message: str) -> None:
    write_manifest(rgb_manifest(splits=splits), tmp_path)
    with pytest.raises(ValueError, match=message):
        check_dataset(load("smoke", [f"dataset.path={tmp_path}"]))
