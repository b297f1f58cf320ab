"""What the driver finds before any rank starts."""

import errno
import os
import shutil
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from conf.load import load
from pipelines.dataset.manifest import BandStatistics, Manifest, Shard, Split, read_manifest, write_manifest
from pipelines.sample import ImageGroup
from pipelines.training import checks
from pipelines.training.checkpoint import TrainingState, save_checkpoint
from pipelines.training.checks import (
    _check_cache_is_default,
    _check_model_input,
    _check_steps,
    _check_trace,
    check_dataset,
    check_output,
    check_resume,
)


def manifest(
    shape: tuple[int, int, int] = (32, 32, 3), statistics: Any = None, splits: dict[str, Split] | None = None
) -> Manifest:
    return Manifest(
        archive="image_folder",
        task="single_label",
        class_names=("water", "land"),
        groups=(ImageGroup("rgb", shape, "uint8", ("red", "green", "blue")),),
        splits=splits or {},
        statistics={"rgb": statistics or BandStatistics(mean=(1.0,) * 3, std=(1.0,) * 3)},
        settings={},
        source_fingerprint="abc",
    )


def test_quarter_turns_need_squares() -> None:
    config = load("smoke", ["input.augmentation=dihedral"])
    _check_model_input(config, manifest())
    with pytest.raises(ValueError, match=r"group 'rgb' of .* has 32 x 40 pixels, no square: choose another input"):
        _check_model_input(config, manifest((32, 40, 3)))
    _check_model_input(load("smoke", ["input.augmentation=flips"]), manifest((32, 40, 3)))


@pytest.mark.parametrize(("network", "least"), [("airbench", 9), ("resnet9", 8), ("resnet9, stem_stride: 2", 16)])
def test_images_that_are_too_small_for_the_network_are_refused(network: str, least: int) -> None:
    config = load("smoke", [f"model={{name: {network}}}"])
    _check_model_input(config, manifest((least, least, 3)))
    message = (
        rf"^model\.name=\w+ needs images of at least {least} pixels on each side, and those of .* have {least - 1}:"
    )
    with pytest.raises(ValueError, match=message):
        _check_model_input(config, manifest((32, least - 1, 3)))


def test_statistics_of_every_band_are_needed() -> None:
    short = BandStatistics(mean=(1.0,) * 2, std=(1.0,) * 2)
    with pytest.raises(ValueError, match=r"no finite mean and standard deviation for each of the 3 bands of group"):
        _check_model_input(load("smoke"), manifest(statistics=short))


def test_an_output_that_cannot_be_written_is_found_by_the_driver(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(RuntimeError, match=r"cannot write to .*/file/outputs \(Not a directory\): set "):
        check_output(load("smoke", [f"training.output={tmp_path}/file/outputs"]))
    check_output(load("smoke", [f"training.output={tmp_path}/outputs"]))
    assert list((tmp_path / "outputs").iterdir()) == []


@pytest.mark.parametrize("output", ["dataset", "dataset/outputs", "link/outputs", "other/../dataset/outputs"])
def test_an_output_in_the_dataset_is_refused(tmp_path: Path, output: str) -> None:
    for name in ("dataset", "other"):
        (tmp_path / name).mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "dataset")
    dataset = f"dataset.path={tmp_path / 'dataset'}"
    message = rf"training\.output=.*/{output} is (in )?the dataset {tmp_path}/dataset: choose a folder outside of it$"
    with pytest.raises(ValueError, match=message):
        check_output(load("smoke", [dataset, f"training.output={tmp_path}/{output}"]))
    assert list((tmp_path / "dataset").iterdir()) == []
    check_output(load("smoke", [dataset, f"training.output={tmp_path}"]))
    behind_a_url = ["dataset.path=s3://bucket/dataset", "training.output=s3a://bucket/dataset/outputs"]
    with pytest.raises(ValueError, match=r"training\.output=s3a://.* is in the dataset s3://bucket/dataset"):
        check_output(load("smoke", behind_a_url))


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
    with pytest.raises(RuntimeError) as refused:
        check_output(chosen)
    assert str(refused.value) == f"cannot write to {tmp_path} ({os.strerror(number)}): {remedy}"


def test_more_epochs_than_asked_for_are_refused(tmp_path: Path) -> None:
    dataset = manifest()
    state = TrainingState(3, 12, 0, 8, "run", dataset.fingerprint, [])
    save_checkpoint(tmp_path / "run" / "checkpoints", state, [])
    config = load("smoke", [f"training.output={tmp_path}", "training.resume_run=run"])
    with pytest.raises(ValueError, match=r"has done 3 epochs, more than training\.epochs=2: raise training\.epochs"):
        check_resume(config, dataset)
    check_output(config)


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
    monkeypatch.setattr(checks, "_window_rows", lambda config, manifest: None)
    split = Split(shards=(Shard(file="train/a.parquet", row_groups=(32,), size=1),), class_counts=(16, 16))
    dataset, history = manifest(splits={"train": split}), [{"val/top_1": 0.5}] * 3
    state = TrainingState(3, 14, 0, 8, "run", dataset.fingerprint, history, loss_sum=2.0, loss_count=2)
    state = replace(state, order="groundswell's reader, any row")
    save_checkpoint(tmp_path / "run" / "checkpoints", state, [])
    before = [f"training.output={tmp_path}", "training.resume_run=run"]
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
    save_checkpoint(tmp_path / "run" / "checkpoints", replace(state, order=f"groundswell's reader, {order}"), [])
    before = [f"dataset.path={small_dataset}", f"training.output={tmp_path}", "training.resume_run=run"]
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


def test_steps_beyond_the_end_are_not_traced() -> None:
    dataset: Any = SimpleNamespace(splits={"train": SimpleNamespace(rows=80)})
    _check_trace(load("smoke", ["training.trace_steps=[19, 20]"]), dataset)
    with pytest.raises(
        ValueError,
        match=r"trace_steps=\[19, 21\] is beyond the end of the run, which has 20 steps \(2 epochs of 10\)",
    ):
        _check_trace(load("smoke", ["training.trace_steps=[19, 21]"]), dataset)
    profiled = ["training.tensorflow_profiler=true", "training.trace_steps=[19, 20]"]
    with pytest.raises(
        ValueError, match=r"tensorflow_profiler=true writes files, and training\.output=s3://a/b is a URL"
    ):
        _check_trace(load("smoke", [*profiled, "training.output=s3://a/b"]), dataset)


def test_upsampling_needs_images_of_several_sizes() -> None:
    config = load("smoke", ["input.upsampling=bilinear"])
    fine, coarse = (
        ImageGroup("fine", (32, 32, 3), "uint8", ("a", "b", "c")),
        ImageGroup("z", (16, 16, 1), "uint8", ("d",)),
    )
    statistics = {"fine": BandStatistics(mean=(1.0,) * 3, std=(1.0,) * 3), "z": BandStatistics(mean=(1.0,), std=(1.0,))}
    both = manifest().model_copy(update={"groups": (fine, coarse), "statistics": statistics})
    _check_model_input(config, both)
    message = r"^input\.upsampling=bilinear has no effect: all images of .* have 32 x 32 pixels$"
    for one_size in (manifest(), both):
        with pytest.raises(ValueError, match=message):
            _check_model_input(config.override("input.bands=[a, b]") if one_size is both else config, one_size)


def test_what_our_own_reader_will_read_is_checked(small_dataset: Path, tmp_path: Path) -> None:
    damaged = tmp_path / "damaged"
    shutil.copytree(small_dataset, damaged)
    shard = min(damaged.glob("train/part-*.parquet"))
    shard.write_bytes(shard.read_bytes()[:-1])
    settings = [f"dataset.path={damaged}", "reader.name=petastorm"]
    check_dataset(load("smoke", settings))  # Petastorm reads the training split in the ranks
    with pytest.raises(ValueError, match=f"^shard {shard} has "):
        check_dataset(load("smoke", [*settings, "model=airbench"]))  # rank 0 whitens by some of its rows
    with pytest.raises(ValueError, match=f"^shard {shard} has "):
        check_dataset(load("smoke", settings[:1]))


@pytest.mark.parametrize("setting", ["cache_folder=/tmp/cache", "cache_limit_gib=50.0"])
def test_a_dataset_that_needs_no_cache(setting: str) -> None:
    _check_cache_is_default(load("smoke"))
    with pytest.raises(ValueError, match=rf"^reader\.{setting} has no effect: .* is local and not compressed"):
        _check_cache_is_default(load("smoke", [f"reader.{setting}"]))


def test_a_global_batch_that_does_not_divide_is_refused() -> None:
    dataset: Any = SimpleNamespace(splits={"train": SimpleNamespace(rows=1000)})
    _check_steps(load("smoke", ["training.global_batch_size=24"]), dataset)
    with pytest.raises(
        ValueError,
        match=r"global_batch_size=20 does not divide into batches of 4 on each of 2 workers: make it a multiple of 8",
    ):
        _check_steps(load("smoke", ["training.global_batch_size=20"]), dataset)
    with pytest.raises(
        ValueError, match=r"fewer than one global batch of 1600 \(2 workers x 200 micro-batches x 4\): lower training"
    ):
        _check_steps(load("smoke", ["training.accumulation_steps=200"]), dataset)


def test_a_training_split_is_needed(tmp_path: Path) -> None:
    shard = Shard(file="test/part-00000.parquet", row_groups=(3,), size=99)
    only_test = {"test": Split(shards=(shard,), class_counts=(2, 1))}
    write_manifest(manifest().model_copy(update={"splits": only_test}), tmp_path)
    with pytest.raises(ValueError, match=r"has no training split, only test$"):
        check_dataset(load("smoke", [f"dataset.path={tmp_path}"]))
    write_manifest(manifest().model_copy(update={"splits": {}}), tmp_path)
    with pytest.raises(ValueError, match=r"has no training split, only no split at all$"):
        check_dataset(load("smoke", [f"dataset.path={tmp_path}"]))


def test_a_validation_split_without_samples_is_refused(tmp_path: Path) -> None:
    """Earlier versions wrote one where all of its images were bad, and training ended after its first epoch."""
    shards = [
        Shard(file=f"{split}/part-00000.parquet", row_groups=rows, size=99)
        for split, rows in (("train", (64,)), ("validation", ()))
    ]
    splits = {shard.file.split("/")[0]: Split(shards=(shard,), class_counts=(0, 0)) for shard in shards}
    write_manifest(manifest().model_copy(update={"splits": splits}), tmp_path)
    with pytest.raises(ValueError, match=r"every sample of the validation split of .* is bad, as _rejected\.parquet"):
        check_dataset(load("smoke", [f"dataset.path={tmp_path}"]))
