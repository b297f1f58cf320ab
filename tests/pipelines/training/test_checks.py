"""What the driver finds before any rank starts."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from conf.load import load
from pipelines.dataset.manifest import BandStatistics, Manifest
from pipelines.sample import ImageGroup
from pipelines.training.checkpoint import TrainingState, save_checkpoint
from pipelines.training.checks import _check_model_input, _check_steps, check_output, check_resume


def manifest(shape: tuple[int, int, int] = (32, 32, 3), statistics: Any = None) -> Manifest:
    return Manifest(
        archive="image_folder",
        task="single_label",
        class_names=("water", "land"),
        groups=(ImageGroup("rgb", shape, "uint8", ("red", "green", "blue")),),
        splits={},
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


def test_more_epochs_than_asked_for_are_refused(tmp_path: Path) -> None:
    dataset = manifest()
    state = TrainingState(3, 12, 0, 8, "run", dataset.fingerprint, [])
    save_checkpoint(tmp_path / "run" / "checkpoints", state, [])
    config = load("smoke", [f"training.output={tmp_path}", "training.resume_run=run"])
    with pytest.raises(ValueError, match=r"has done 3 epochs, more than training\.epochs=2: raise training\.epochs"):
        check_resume(config, dataset)
    check_output(config)


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
