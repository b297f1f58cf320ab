"""At which size each epoch is trained, and the steps at several sizes."""

from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

from conf.load import load
from conf.schema import RunConfig
from models.losses import classification_loss
from pipelines.dataset.format.manifest import Manifest
from pipelines.sample import ImageGroup
from pipelines.training.setup.recipe import make_mode, make_model
from pipelines.training.setup.resolution import described_sizes, scaled_epochs, trained_sizes

HALF = "{until: {fraction: 0.4}, scale: 0.5}"
THREE_QUARTERS = "{until: {fraction: 0.8}, scale: 0.75}"
SEVEN_TENTHS = "{until: {fraction: 0.4}, scale: 0.7}"
CIFAR = "model={name: resnet_cifar, depth: 8, width_factor: 0.5}"


def config(*parts: str, epochs: int = 10, settings: tuple[str, ...] = (CIFAR,)) -> RunConfig:
    schedule = f"input.resolution_schedule=[{', '.join(parts)}]"
    return load("smoke", [schedule, f"training.epochs={epochs}", *settings])


def with_images(manifest: Manifest, *shapes: tuple[int, int, int]) -> Manifest:
    """The manifest of a dataset with such image groups."""
    groups = tuple(
        ImageGroup(f"group{i}", shape, "uint8", tuple(f"{i}{b}" for b in range(shape[2])))
        for i, shape in enumerate(shapes)
    )
    return manifest.model_copy(update={"groups": groups})


def test_epochs_grow_to_the_full_size(eurosat_manifest: Any) -> None:
    sizes = trained_sizes(config(HALF, THREE_QUARTERS), eurosat_manifest(), 7)
    assert (sizes, [described_sizes(each) for each in (sizes, sizes[7:9])]) == (
        [(16, 16)] * 4 + [(24, 24)] * 4 + [(32, 32)] * 2,
        [
            "16 x 16 pixels in epochs 1 to 4, 24 x 24 pixels in epochs 5 to 8, 32 x 32 pixels in epochs 9 to 10",
            "24 x 24 pixels in epoch 1, 32 x 32 pixels in epoch 2",
        ],
    )
    whole = trained_sizes(config(epochs=3), eurosat_manifest(), 7)
    assert (whole, described_sizes(whole), scaled_epochs(config().input, None, 3, 7)) == ([None] * 3, "", [])


@pytest.mark.parametrize(
    ("until", "steps", "first_whole"),
    [
        ("fraction: 0.5", 7, 5),
        ("fraction: 0.55", 7, 6),  # epoch 6 has begun before
        ("fraction: 0.41", 1, 5),
        ("steps: 14", 7, 2),
        ("steps: 15", 7, 3),
        # The smoke configuration has places for a run of 2 epochs; 1 of these is 5 of 10.
        ("epochs: 1", 7, 5),
    ],
)
def test_a_size_changes_at_the_first_epoch_from_its_place_on(until: str, steps: int, first_whole: int) -> None:
    chosen = config(f"{{until: {{{until}}}, scale: 0.5}}")
    parts = scaled_epochs(chosen.input, chosen.schedule.recipe_epochs, 10, steps)
    assert [(part.first, part.end, part.scale) for part in parts] == [(0, first_whole, 0.5), (first_whole, 10, 1.0)]


@pytest.mark.parametrize(
    ("part", "shapes", "settings", "size"),
    [
        # The size is that of the finest group that the network sees.
        (HALF, [(120, 80, 1), (60, 40, 2)], [CIFAR], (60, 40)),
        (HALF, [(120, 80, 1), (60, 40, 2)], [CIFAR, "input.bands=['10']"], (30, 20)),
        ("{until: {fraction: 0.5}, scale: 0.125}", [(32, 32, 1)], [CIFAR], (4, 4)),
        # A third needs no more than four digits.
        ("{until: {fraction: 0.5}, scale: 0.3333}", [(120, 120, 1)], [CIFAR], (40, 40)),
        (HALF, [(64, 64, 3)], [], (32, 32)),
    ],
)
def test_the_first_size(
    eurosat_manifest: Any, part: str, shapes: list[tuple[int, int, int]], settings: list[str], size: tuple[int, int]
) -> None:
    assert trained_sizes(config(part, settings=tuple(settings)), with_images(eurosat_manifest(), *shapes), 7)[0] == size


@pytest.mark.parametrize(
    ("part", "shape", "settings", "message"),
    [
        # A stride in the stem needs twice the side, and a deep network a pixel after its last stage.
        (
            "{until: {fraction: 0.5}, scale: 0.125}",
            (32, 32, 1),
            [CIFAR, "model.stem_stride=2"],
            r"is 4 x 4 pixels, and model\.name=resnet_cifar needs at least 8",
        ),
        (HALF, (32, 32, 3), [], r"model\.name=resnet needs at least 32 on each side: raise the scale$"),
        # Possible scales are named.
        (SEVEN_TENTHS, (32, 32, 3), [CIFAR], r"no whole number: choose 0\.6875 or 0\.71875$"),
        (SEVEN_TENTHS, (32, 40, 3), [CIFAR], r"22\.4 x 28, no whole number: choose 0\.625 or 0\.75$"),
    ],
)
def test_a_size_that_does_not_fit_is_refused(
    eurosat_manifest: Any, part: str, shape: tuple[int, int, int], settings: list[str], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        trained_sizes(config(part, settings=tuple(settings)), with_images(eurosat_manifest(), shape), 7)


@pytest.mark.parametrize(
    ("parts", "message"),
    [
        ([SEVEN_TENTHS], r"\[0\]: scale=0\.7 of 32 x 32 pixels is 22\.4 x 22\.4, no whole"),
        (["{until: {fraction: 0.4}, scale: 0.0625}"], r"\[0\]: .* is 2 x 2 pixels, and model\.name=resnet_cifar needs"),
        (
            ["{until: {fraction: 0.4}, scale: 0.9999}"],
            r"\[0\]: scale=0\.9999 of 32 x 32 pixels is 32 x 32 pixels, as in the part after it: leave one",
        ),
        ([HALF, "{until: {fraction: 0.8}, scale: 0.50001}"], r"\[0\]: scale=0\.5 .* as in the part after it"),
        (["{until: {fraction: 0}, scale: 0.5}"], r"\[0\] has no effect: none of the 10 epochs begins within it"),
        (
            [HALF, "{until: {steps: 28}, scale: 0.75}"],
            r"\[1\] has no effect: none of the 10 epochs begins within it, and images change",
        ),
        (["{until: {fraction: 0.95}, scale: 0.5}"], r"\[0\]\.until is after the beginning of the last of 10 epochs"),
        (["{until: {steps: 71}, scale: 0.5}"], r"\[0\]\.until is at step 71, beyond the end of the run \(70 steps\)"),
        (
            ["{until: {steps: 35}, scale: 0.5}", "{until: {steps: 28}, scale: 0.75}"],
            r"\[1\]\.until is at step 28, ",
        ),
    ],
)
def test_what_does_not_fit_the_dataset_or_the_run_is_refused(
    eurosat_manifest: Any, parts: list[str], message: str
) -> None:
    with pytest.raises(ValueError, match=rf"^input\.resolution_schedule{message}[^\n]*\Z"):
        trained_sizes(config(*parts), eurosat_manifest(), 7)


@pytest.mark.parametrize(
    ("codec", "micro_batches"),
    [("none", 2), *(pytest.param(each, 1, marks=pytest.mark.long) for each in ("onebit", "powersgd"))],
)
def test_a_step_of_a_size_is_compiled_when_it_is_needed_and_not_again(
    codec: str, micro_batches: int, manifest: Manifest, one_rank: Any
) -> None:
    chosen = config(HALF, settings=(CIFAR, f"exchange.codec={codec}", "input.augmentation=flips"))
    keras.utils.set_random_seed(0)
    model = make_model(chosen, manifest)
    loss = classification_loss("single_label")
    mode: Any = make_mode(chosen, model, loss, one_rank, steps_per_epoch=1, micro_batches=micro_batches)
    mode.optimizer.learning_rate = 0.1
    images = {"rgb": tf.constant(np.random.default_rng(0).integers(0, 255, (4, 32, 32, 3)).astype(np.uint8))}
    targets, seeds = tf.one_hot([0, 1, 0, 1], 2), tf.range(4)
    computed = [mode.accumulate, mode.step] if mode.accumulate else [mode.step]
    *_, last = [each(images, targets, seeds, (side, side)) for side in (16, 32, 16) for each in computed]
    assert np.isfinite(float(last))
    assert {each.experimental_get_tracing_count() for each in computed} == {2}
