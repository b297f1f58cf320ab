"""Rates and batch sizes that are found, as numbers; and what is said where memory is short."""

import math
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import tensorflow as tf

from conf.load import load
from conf.schema import RunConfig
from pipelines.dataset.format.manifest import Manifest
from pipelines.machine import proc
from pipelines.training.finders.batches import (
    FRACTION,
    MAXIMUM_TRIALS,
    BatchSearch,
    Trial,
    batch_multiple,
    next_batch_size,
)
from pipelines.training.finders.rates import SmoothedLosses, rising_rates, suggest
from pipelines.training.memory.memory import MemoryLimit, Needs, memory_limit, resident_peak
from pipelines.training.memory.shortage import Shortage, estimate, shortage_explained
from pipelines.training.setup.recipe import make_mode, make_model

MIB = 1 << 20
NEEDS = Needs(weights=100 * MIB, gradients=100 * MIB, optimizer=100 * MIB, exchange=0, sample=2 * MIB)


def run(losses: list[float], low: float = 1e-4, high: float = 1.0) -> SmoothedLosses:
    smoothed = SmoothedLosses()
    for rate, loss in zip(rising_rates(low, high, len(losses)), losses, strict=True):
        if smoothed.add(rate, loss):
            break
    return smoothed


def test_rates_rise_by_one_factor() -> None:
    assert rising_rates(0.01, 10.0, 31) == pytest.approx([0.01 * 10 ** (0.1 * step) for step in range(31)])


@pytest.mark.parametrize(("low", "high", "steps"), [(1.0, 1.0, 20), (0.0, 1.0, 20), (2.0, 1.0, 20), (0.1, 1.0, 9)])
def test_rates_that_do_not_rise_are_refused(low: float, high: float, steps: int) -> None:
    with pytest.raises(ValueError, match=r"rates must rise|at least 10 steps"):
        rising_rates(low, high, steps)


def test_losses_are_smoothed_without_a_bias_towards_zero() -> None:
    first, second, *_ = run([2.0, 4.0] + [4.0] * 8).points
    assert (first.smoothed, second.smoothed) == pytest.approx((2.0, (0.9 * 2 + 4) / 1.9))


BELOW_ZERO = [-0.1, -0.12, -0.09, 0.05, -0.3, -0.6, -0.8, -0.85, -0.8, -0.75]


@pytest.mark.parametrize(
    ("losses", "points"),
    [
        *(([1.0] * 12 + [bad] * 8, 13) for bad in (math.nan, math.inf, 100.0)),
        # A loss below zero may fall and rise a little, but not for ever.
        (BELOW_ZERO, 10),
        ([*BELOW_ZERO, *[40.0] * 5], 11),
    ],
)
def test_a_loss_that_diverges_ends_the_test(losses: list[float], points: int) -> None:
    assert len(run(losses).points) == points


def test_the_suggestion_is_the_steepest_descent_at_most_a_tenth_of_the_lowest() -> None:
    # A fall between 1e-2.5 and 1e-1.5 in the middle of four decades, then a wall.
    places = [-4 + 4 * step / 99 for step in range(100)]
    losses = [1 / (1 + math.exp(8 * (place + 2))) + max(0.0, 8 * (place + 0.5)) for place in places]
    found: Any = suggest(run(losses).points)
    # Smoothing is late by about nine steps, which are 0.36 decades.
    assert [math.log10(rate) for rate in (found.steepest, found.lowest)] == pytest.approx([-1.65, -0.4], abs=0.25)
    assert found.rate == pytest.approx(min(found.steepest, found.lowest / 10))


@pytest.mark.parametrize("losses", [[1.0 + 0.01 * step for step in range(50)], [1.0] * 5 + [math.nan] * 5])
def test_a_loss_that_never_falls_suggests_nothing(losses: list[float]) -> None:
    assert suggest(run(losses).points) is None


LIMIT = MemoryLimit(8000 * MIB, "a test")


def search(
    fixed: float, sample: float, limit: MemoryLimit = LIMIT, largest_allowed: int = 10**6, multiple: int = 1
) -> BatchSearch:
    """The search on workers that use `fixed + sample * batch` MiB."""
    trials: list[Trial] = []
    while size := next_batch_size(NEEDS, limit, largest_allowed, trials, multiple=multiple):
        trials.append(Trial(size, int((fixed + sample * size) * MIB)))
    return BatchSearch(NEEDS, limit, largest_allowed, trials)


@pytest.mark.parametrize(("fixed", "sample"), [(500, 2.0), (900, 5.0), (300, 1.0), (1500, 20.0)])
def test_the_search_ends_within_a_tenth_of_what_fits(fixed: float, sample: float) -> None:
    search_done: Any = search(fixed, sample)
    best = (FRACTION * 8000 - fixed) / sample
    assert 0.85 * best - 8 <= search_done.found <= best
    assert all(trial.fits(LIMIT) for trial in search_done.trials)
    sizes = [trial.batch_size for trial in search_done.trials]
    assert sizes == sorted(set(sizes))[:MAXIMUM_TRIALS]


@pytest.mark.parametrize("sample", [300.0, 470.0, 900.0])
def test_batches_that_mixup_takes_are_even(sample: float) -> None:
    settings = [load("smoke", settings).training for settings in ([], ["training.mixup=0.2"])]
    assert (
        [batch_multiple(training) for training in settings],
        {trial.batch_size % 2 for trial in search(500, sample, largest_allowed=10, multiple=2).trials},
    ) == ([1, 2], {0})


def test_the_search_has_bounds() -> None:
    little = MemoryLimit(400 * MIB, "a test")
    assert [search(500, 2.0, largest_allowed=100).found, search(500, 2.0, little).found] == [100, None]
    nothing = [Trial(8, 10 * MIB, out_of_memory=True)]
    assert (next_batch_size(NEEDS, LIMIT, 100, nothing), BatchSearch(NEEDS, LIMIT, 100, nothing).found) == (None, None)


def test_the_limit_is_the_smaller_of_host_and_control_group(monkeypatch: pytest.MonkeyPatch) -> None:
    total = int(Path("/proc/meminfo").read_text().split()[1]) * 1024
    monkeypatch.setattr(proc, "limit_of_control_group", lambda: 1 << 60)
    assert memory_limit(2, {}).bytes == total // 2
    monkeypatch.setattr(proc, "limit_of_control_group", lambda: 3000 * MIB)
    assert memory_limit(3, {}) == MemoryLimit(1000 * MIB, "the control group's limit, 3,000 MiB, shared by 3 workers")
    assert 50 * MIB < resident_peak() < total


def test_a_gpus_memory_is_asked_for(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    command = tmp_path / "nvidia-smi"
    command.write_text('#!/bin/sh\n[ "$1" = --id=3 ] && echo 81559\n')
    command.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    assert memory_limit(4, {"CUDA_VISIBLE_DEVICES": "3"}) == MemoryLimit(81559 * MIB, "GPU 3, 81,559 MiB")
    with pytest.raises(RuntimeError, match="nvidia-smi does not say how much memory GPU 4 has"):
        memory_limit(4, {"CUDA_VISIBLE_DEVICES": "4"})


Parts = SimpleNamespace


@pytest.fixture
def parts_of(manifest: Manifest, one_rank: Any) -> Callable[[RunConfig], Parts]:
    """What the estimate needs of a rank."""

    def make(config: RunConfig) -> Parts:
        model = make_model(config, manifest)
        mode = make_mode(config, model, lambda targets, logits: targets, one_rank, steps_per_epoch=1)
        return Parts(micro_batches=1, model=model, mode=mode, manifest=manifest)

    return make


def test_the_estimate_counts_variables_and_outputs(parts_of: Callable[[RunConfig], Parts], manifest: Manifest) -> None:
    settings = ["model.width_factor=0.125", "optimizer=adamw"]
    parts = parts_of(load("smoke", settings))
    model, mode = parts.model, parts.mode
    needs = estimate(model, mode, manifest, accumulates=False)
    trainable, everything = (
        4 * sum(math.prod(variable.shape) for variable in variables)
        for variables in (model.trainable_variables, model.variables)
    )
    assert (needs.gradients, needs.weights) == (trainable, everything)
    assert needs.optimizer == pytest.approx(2 * trainable, rel=0.01)  # two moments, and some numbers
    # The stem alone: convolution, normalisation and ReLU of 16 x 16 x 8, after images in uint8 and float32.
    assert needs.sample > 3 * 4 * 16 * 16 * 8 + 5 * 32 * 32 * 3
    assert estimate(model, mode, manifest, accumulates=True).gradients == 2 * trainable
    for name, copies in (("local", 1), ("delayed", 1), ("{name: local, outer: {momentum: 0.5}}", 2)):
        other = parts_of(load("smoke", [*settings, f"training.mode={name}"]))
        kept: Any = estimate(other.model, other.mode, manifest, accumulates=False)
        assert (kept.mode, kept.fixed) == (pytest.approx(copies * trainable, rel=0.01), needs.fixed + kept.mode)
    half = make_model(load("smoke", ["model.width_factor=0.125", "training.precision=bfloat16"]), manifest)
    assert estimate(half, mode, manifest, accumulates=False).sample < 0.7 * needs.sample


def test_out_of_memory_names_rank_batch_and_what_would_fit(
    parts_of: Callable[[RunConfig], Parts], one_rank: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = load("smoke", ["model.width_factor=0.125", "training.batch_size_per_worker=64", "launch.num_workers=1"])
    parts: Any = parts_of(config)
    parts.collective = one_rank
    told: list[Any] = []
    monkeypatch.setattr("pipelines.training.memory.shortage.tell", told.append)

    def run_out(error: Exception | None, known: Any = None) -> None:
        with shortage_explained(config.training) as shortage:
            if known is not None:
                shortage.know(known, known.mode)
            if error is not None:
                raise error

    exhausted = tf.errors.ResourceExhaustedError(None, None, "OOM when allocating tensor")
    without_model = "ran out of memory before it had a model, whatever the batch is"
    for error, known, message in (
        (
            exhausted,
            parts,
            r"ran out of memory with training\.batch_size_per_worker=64 \(weights .* MiB, gradients .* MiB, "
            r"optimizer .* MiB, .* MiB for each sample\): lower it to 32, .*find-batch",
        ),
        (exhausted, None, without_model),
        (MemoryError("Unable to allocate 9 TiB"), None, without_model),
    ):
        with pytest.raises(MemoryError, match=f"^rank 0 {message}"):
            run_out(error, known)
    run_out(None)
    (event,) = told
    weights = 4 * sum(math.prod(variable.shape) for variable in parts.model.variables)
    assert (event.needs.weights, event.limit.bytes) == (weights, memory_limit(1).bytes)


@pytest.mark.parametrize(("limit", "room"), [(3_399, False), (3_400, True)])
def test_a_spare_computes_a_step_only_where_the_memory_holds_two(
    limit: int, room: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two processes of 700, the gradients of 100, ten samples of 50; two states of 200, 100 and 100."""
    for name, value in {
        "estimate": lambda *parts, accumulates: Needs(200, gradients=100, optimizer=100, exchange=100, sample=50),
        "memory_limit": lambda ranks: MemoryLimit(limit, "a test's limit"),
        "resident_peak": lambda: 700,
        "FRACTION": 1.0,
    }.items():
        monkeypatch.setattr(f"pipelines.training.memory.shortage.{name}", value)
    shortage = Shortage(load("smoke", ["training.batch_size_per_worker=10"]).training)
    assert not shortage.has_room(), "nothing is known yet"
    unused = dict.fromkeys(("model", "mode", "manifest"))
    known: Any = Parts(micro_batches=1, collective=SimpleNamespace(rank=1), **unused)
    shortage.know(known, known.mode)
    assert shortage.has_room() == room
    monkeypatch.setattr(tf.config, "get_visible_devices", lambda kind: [kind])
    assert not shortage.has_room(), "a GPU's memory holds one"
