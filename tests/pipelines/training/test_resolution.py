"""At which size each epoch is trained, and the steps at several sizes."""

from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

from conf.load import load
from conf.schema import RunConfig
from models.losses import classification_loss
from pipelines.dataset.manifest import Manifest
from pipelines.sample import ImageGroup
from pipelines.training.accumulation import Accumulation
from pipelines.training.recipe import make_exchange, make_model, make_optimizer
from pipelines.training.resolution import described_sizes, scaled_epochs, trained_sizes
from pipelines.training.step import make_accumulate, make_train_step

HALF = "{until: {fraction: 0.4}, scale: 0.5}"
THREE_QUARTERS = "{until: {fraction: 0.8}, scale: 0.75}"
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
    assert sizes == [(16, 16)] * 4 + [(24, 24)] * 4 + [(32, 32)] * 2
    text = "16 x 16 pixels in epochs 1 to 4, 24 x 24 pixels in epochs 5 to 8, 32 x 32 pixels in epochs 9 to 10"
    assert described_sizes(sizes) == text
    assert described_sizes(sizes[7:9]) == "24 x 24 pixels in epoch 1, 32 x 32 pixels in epoch 2"


def test_without_a_schedule_no_epoch_is_resized(eurosat_manifest: Any) -> None:
    sizes = trained_sizes(config(epochs=3), eurosat_manifest(), 7)
    assert sizes == [None] * 3
    assert described_sizes(sizes) == ""
    assert scaled_epochs(config(), 7) == []


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
    part, rest = scaled_epochs(config(f"{{until: {{{until}}}, scale: 0.5}}"), steps)
    assert (part.first, part.end, part.scale) == (0, first_whole, 0.5)
    assert (rest.first, rest.end, rest.scale) == (first_whole, 10, 1.0)


def test_the_size_is_that_of_the_finest_group_that_the_network_sees(eurosat_manifest: Any) -> None:
    several = with_images(eurosat_manifest(), (120, 80, 1), (60, 40, 2))
    assert trained_sizes(config(HALF), several, 7)[0] == (60, 40)
    chosen = config(HALF, settings=(CIFAR, "input.bands=['10']"))
    assert trained_sizes(chosen, several, 7)[0] == (30, 20)


def test_a_stride_in_the_stem_needs_twice_the_side(eurosat_manifest: Any) -> None:
    eighth, images = "{until: {fraction: 0.5}, scale: 0.125}", with_images(eurosat_manifest(), (32, 32, 1))
    assert trained_sizes(config(eighth), images, 7)[0] == (4, 4)
    halved = config(eighth, settings=(CIFAR, "model.stem_stride=2"))
    with pytest.raises(ValueError, match=r"is 4 x 4 pixels, and model\.name=resnet_cifar needs at least 8"):
        trained_sizes(halved, images, 7)


def test_a_third_needs_no_more_than_four_digits(eurosat_manifest: Any) -> None:
    third, images = config("{until: {fraction: 0.5}, scale: 0.3333}"), with_images(eurosat_manifest(), (120, 120, 1))
    assert trained_sizes(third, images, 7)[0] == (40, 40)


@pytest.mark.parametrize(
    ("parts", "message"),
    [
        (
            ["{until: {fraction: 0.4}, scale: 0.7}"],
            r"\[0\]: scale=0\.7 of 32 x 32 pixels is 22\.4 x 22\.4, no whole",
        ),
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
    with pytest.raises(ValueError, match=rf"^input\.resolution_schedule{message}") as caught:
        trained_sizes(config(*parts), eurosat_manifest(), 7)
    assert "\n" not in str(caught.value)


def test_possible_scales_are_named(eurosat_manifest: Any) -> None:
    seven = config("{until: {fraction: 0.4}, scale: 0.7}")
    with pytest.raises(ValueError, match=r"no whole number: choose 0\.6875 or 0\.71875$"):
        trained_sizes(seven, eurosat_manifest(), 7)
    with pytest.raises(ValueError, match=r"22\.4 x 28, no whole number: choose 0\.625 or 0\.75$"):
        trained_sizes(seven, with_images(eurosat_manifest(), (32, 40, 3)), 7)


def test_a_deep_network_needs_a_pixel_after_its_last_stage(eurosat_manifest: Any) -> None:
    resnet = config(HALF, settings=())
    with pytest.raises(ValueError, match=r"model\.name=resnet needs at least 32 on each side: raise the scale$"):
        trained_sizes(resnet, eurosat_manifest(), 7)
    assert trained_sizes(resnet, with_images(eurosat_manifest(), (64, 64, 3)), 7)[0] == (32, 32)


@pytest.mark.parametrize(("codec", "micro_batches"), [("none", 2), ("onebit", 1), ("powersgd", 1)])
def test_a_step_of_a_size_is_compiled_when_it_is_needed_and_not_again(
    codec: str, micro_batches: int, manifest: Manifest, one_rank: Any
) -> None:
    chosen = config(HALF, settings=(CIFAR, f"exchange.codec={codec}", "input.augmentation=flips"))
    keras.utils.set_random_seed(0)
    model = make_model(chosen, manifest)
    optimizer = make_optimizer(chosen.optimizer, model)
    optimizer.learning_rate = 0.1
    exchange, loss = make_exchange(chosen, one_rank), classification_loss("single_label")
    sums = Accumulation(model, micro_batches) if micro_batches > 1 else None
    step: Any = make_train_step(model, loss, optimizer, exchange, jit_compile=False, accumulation=sums)
    accumulate: Any = make_accumulate(model, loss, sums, jit_compile=False) if sums else None
    images = {"rgb": tf.constant(np.random.default_rng(0).integers(0, 255, (4, 32, 32, 3)).astype(np.uint8))}
    targets, seeds = tf.one_hot([0, 1, 0, 1], 2), tf.range(4)
    losses = []
    for size in ((16, 16), (32, 32), (16, 16)):
        if accumulate is not None:
            accumulate(images, targets, seeds, size)
        losses.append(float(step(images, targets, seeds, size)))
    assert np.isfinite(losses).all()
    assert step.experimental_get_tracing_count() == 2
    if accumulate is not None:
        assert accumulate.experimental_get_tracing_count() == 2
