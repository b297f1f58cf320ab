"""A parameter server on real ranks: what it equals, what it sends, and what a killed run ends with."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from jobs.train import TrainedRun
from tests.parallel.ring import Trainee, on_ring

pytestmark = [pytest.mark.parallel, pytest.mark.long, pytest.mark.timeout(600)]

STEPS, RATE = 6, 0.1
SGD, PLAIN = "{name: sgd, momentum: 0.9}", "{name: sgd, momentum: 0.0, nesterov: false, weight_decay: 0.0}"
OPTIMIZERS = {"sgd": SGD, "lars": "lars", "adamw": "{name: adamw, epsilon: 0.001}", "adagrad": "adagrad"}


def server(synchrony: str, **settings: Any) -> str:
    given = "".join(f", {key}: {value}" for key, value in settings.items())
    return f"{{name: parameter_server, synchrony: {synchrony}{given}}}"


class Ring(Trainee):
    """One rank's trainings on fixed batches."""

    def train(
        self, mode: str, optimizer: str, *, codec: str = "none", steps: int = STEPS, micro_batches: int = 1,
        extra: tuple[str, ...] = (), break_after: int | None = None,
    ) -> dict[str, Any]:  # fmt: skip
        """Train; the weights and the optimizer's state at the end, and what the steps sent."""
        sets = [f"training.mode={mode}", f"optimizer={optimizer}", f"exchange.codec={codec}", *extra]
        sets += ["launch.num_workers=3"] if "backup_workers" in mode else []
        model, made = self.begin(sets, RATE, steps, micro_batches)
        payloads = []
        for number, batch in enumerate(self.batches(steps, 3), start=1):
            if made.accumulate is not None and number % micro_batches:
                made.accumulate(*batch)
                continue
            made.step(*batch)
            payloads.append(made.payload_bytes())
            if number == break_after:  # a checkpoint: all ranks come together, and continue
                made.come_together()
                made.begin(number)
        made.come_together()
        return {
            "weights": [np.array(each) for each in model.trainable_variables],
            "state": [np.array(each) for each in made.optimizer.variables],
            "own": [np.array(each) for each in made.own],
            "payloads": payloads,
            "counts": made.figures(),
            "sizes": [each.shape.num_elements() for each in (v.value for v in model.trainable_variables)],
        }

    def downpour_by_hand(self, fetch_every: int, push_every: int) -> list[Any]:
        """Dean et al. (2012), algorithm 7.1, with one worker and plain SGD on both sides, in float64."""
        model = self.model()
        variables = model.trainable_variables
        shard = [np.array(each, np.float64) for each in variables]
        own, accrued = list(shard), [np.zeros_like(each) for each in shard]
        for step, (images, targets) in enumerate(self.batches(STEPS, 3)):
            if step % fetch_every == 0:
                own = list(shard)
            for variable, value in zip(variables, own, strict=True):
                variable.assign(value.astype(np.float32))
            found = self.gradients(model, images, targets)
            accrued = [a + g for a, g in zip(accrued, found, strict=True)]
            own = [w - RATE * g for w, g in zip(own, found, strict=True)]
            if (step + 1) % push_every == 0 or step + 1 == STEPS:
                shard = [w - RATE * a for w, a in zip(shard, accrued, strict=True)]
                accrued = [np.zeros_like(each) for each in shard]
        return shard


def trainings(ranks: int) -> dict[str, Any]:
    ring, found = Ring(), {}
    for name, optimizer in OPTIMIZERS.items():
        found[f"synchronous {name}"] = ring.train("synchronous", optimizer)
        found[f"all {name}"] = ring.train(server("backup", backup_workers=0), optimizer)
        if ranks == 1:
            found[f"async {name}"] = ring.train(server("async"), optimizer)
    found["broken"] = ring.train(server("backup", backup_workers=0), SGD, break_after=3)
    found["first steps"] = ring.train(server("async", synchronous_steps=STEPS - 1), PLAIN, steps=STEPS - 1)
    found["synchronous, one less"] = ring.train("synchronous", PLAIN, steps=STEPS - 1)
    dense = ("exchange.dense_below=0", "exchange.rescale_residual=false")
    for codec in ("onebit", "{name: topk, density: 0.05}"):
        name = "onebit" if codec == "onebit" else "topk"
        found[name] = ring.train(server("async"), PLAIN, codec=codec, extra=dense)
        found[f"{name}, dense"] = ring.train(
            server("async"), PLAIN, codec=codec, extra=("exchange.dense_below=0", f"exchange.warmup_steps={STEPS}")
        )
        found[f"{name}, one step"] = ring.train(server("async"), PLAIN, codec=codec, extra=dense, steps=1)
    found["one step"] = ring.train(server("async"), PLAIN, steps=1)
    found["bounded"] = ring.train(server("ssp", bound=1), PLAIN, steps=12)
    found["free"] = ring.train(server("async"), PLAIN, steps=12)
    if ranks == 1:
        for fetch, push in ((1, 3), (2, 1), (3, 2), (2, 4)):
            found[f"downpour {fetch} {push}"] = ring.train(server("async", fetch_every=fetch, push_every=push), PLAIN)
            found[f"downpour {fetch} {push} by hand"] = ring.downpour_by_hand(fetch, push)
        found["micro-batches"] = ring.train(server("async"), PLAIN, micro_batches=2)
    if ranks == 3:
        found["two of three"] = ring.train(server("backup", backup_workers=1), PLAIN)
    return found


@pytest.fixture(scope="module")
def one() -> dict[str, Any]:
    return on_ring(1, trainings, 1)[0]


@pytest.fixture(scope="module")
def three() -> list[dict[str, Any]]:
    return on_ring(3, trainings, 3)


def moved(found: list[Any]) -> float:
    return float(np.sqrt(sum(np.sum(np.square(each)) for each in found)))


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_one_asynchronous_worker_is_one_process_digit_by_digit(one: dict[str, Any], name: str) -> None:
    for what in ("weights", "state"):
        np.testing.assert_equal(one[f"async {name}"][what], one[f"synchronous {name}"][what])


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_all_of_all_workers_in_lock_step_are_synchronous_training(three: list[dict[str, Any]], name: str) -> None:
    for rank in three:
        for what in ("weights", "state"):
            for ours, expected in zip(rank[f"all {name}"][what], rank[f"synchronous {name}"][what], strict=True):
                np.testing.assert_allclose(ours, expected, rtol=2e-5, atol=2e-6)


def test_all_ranks_are_equal_when_they_have_come_together(three: list[dict[str, Any]]) -> None:
    for name in ("all lars", "onebit", "topk", "bounded", "free", "two of three"):
        for what in ("weights", "state"):
            np.testing.assert_equal([rank[name][what] for rank in three[1:]], [three[0][name][what]] * 2)


def test_coming_together_changes_nothing(three: list[dict[str, Any]]) -> None:
    np.testing.assert_equal(three[0]["broken"]["weights"], three[0]["all sgd"]["weights"])


def test_the_first_steps_are_synchronous(three: list[dict[str, Any]]) -> None:
    pairs = zip(three[1]["first steps"]["weights"], three[1]["synchronous, one less"]["weights"], strict=True)
    for ours, expected in pairs:
        np.testing.assert_allclose(ours, expected, rtol=2e-5, atol=2e-6)


@pytest.mark.parametrize("periods", ["1 3", "2 1", "3 2", "2 4"])
def test_downpour_is_as_published(one: dict[str, Any], periods: str) -> None:
    for ours, expected in zip(one[f"downpour {periods}"]["weights"], one[f"downpour {periods} by hand"], strict=True):
        np.testing.assert_allclose(ours, expected, rtol=1e-4, atol=1e-6)


def test_micro_batches_are_one_push(one: dict[str, Any]) -> None:
    assert (len(one["micro-batches"]["payloads"]), int(one["micro-batches"]["state"][0])) == (STEPS / 2, STEPS / 2)


@pytest.mark.parametrize("codec", ["onebit", "topk"])
def test_what_was_pushed_and_what_is_left_are_the_gradient(one: dict[str, Any], codec: str) -> None:
    """After one step of one worker: w = w0 - rate * pushed, and w' = w0 - rate * g in float32."""
    compressed, dense = one[f"{codec}, one step"], one["one step"]
    *residuals, _ = compressed["own"]  # the last one is a learning rate
    kernels = (0, 2)
    assert len(residuals) == len(kernels)
    for index, residual in zip(kernels, residuals, strict=True):
        assert moved([residual]) > 0
        np.testing.assert_allclose(compressed["weights"][index] - dense["weights"][index], RATE * residual, atol=1e-6)
    for index in (1, 3):  # biases travel in float32
        np.testing.assert_array_equal(compressed["weights"][index], dense["weights"][index])


@pytest.mark.parametrize("codec", ["onebit", "topk"])
def test_pushes_are_smaller_and_fetches_stay_as_they_are(one: dict[str, Any], codec: str) -> None:
    compressed, dense = one[codec], one[f"{codec}, dense"]
    assert moved(dense["own"][:-1]) == 0, "nothing is left of pushes in float32"
    parameters = sum(dense["sizes"])
    assert dense["payloads"] == [4 * parameters] * STEPS
    assert all(2 * parameters < payload < 2.6 * parameters for payload in compressed["payloads"])


@pytest.mark.parametrize("codec", ["onebit", "topk"])
def test_compressed_pushes_learn_as_dense_ones_do(three: list[dict[str, Any]], codec: str) -> None:
    for rank in three:
        for each in rank[codec]["weights"]:
            assert np.isfinite(each).all()
        assert moved(rank[codec]["own"][:-1]) > 0


def test_the_payload_is_half_of_what_is_fetched_and_pushed(three: list[dict[str, Any]]) -> None:
    assert three[0]["free"]["payloads"] == [4 * sum(three[0]["free"]["sizes"])] * 12


def test_counts_are_those_of_the_rule(three: list[dict[str, Any]]) -> None:
    for rank in three:
        assert rank["bounded"]["counts"]["exchange/step_gap_max"] <= 2
        assert rank["all sgd"]["counts"]["exchange/dropped_share"] == 0
        assert int(rank["free"]["state"][0]) == 3 * 12, "every push is an update"
        assert int(rank["two of three"]["state"][0]) == STEPS


EVERY_STEP = ("training.checkpoint_every_steps=1", "training.batch_size_per_worker=4", "launch.retries=1")


@pytest.mark.spark
@pytest.mark.timeout(1200)
def test_a_rank_that_dies_costs_no_bit_in_lock_step(
    train_small: Callable[..., TrainedRun],
    let_ranks_die: Callable[..., None],
    weights: Callable[[TrainedRun], dict[str, np.ndarray]],
) -> None:
    lock_step, found = f"training.mode={server('backup', backup_workers=0)}", []
    for rank, step in ((1, 5), (0, 2)):  # what is lost would be another part of each
        let_ranks_die((rank, step))
        killed = train_small(lock_step, *EVERY_STEP, output=f"killed-{rank}")
        found.append(weights(killed))
        for metrics in killed.summary.history:
            assert metrics["exchange/dropped_share"] == 0
            assert metrics["exchange/step_gap_max"] <= 1
    np.testing.assert_equal(found[1], found[0])


@pytest.mark.spark
@pytest.mark.timeout(1200)
def test_an_asynchronous_run_goes_on_after_a_rank_has_died(
    train_small: Callable[..., TrainedRun],
    let_ranks_die: Callable[..., None],
    weights: Callable[[TrainedRun], dict[str, np.ndarray]],
) -> None:
    """Residuals are in each rank's part of the checkpoint; the result depends on timing, and is a model."""
    let_ranks_die((1, 5))
    onebit = ("exchange.codec=onebit", "exchange.dense_below=0")
    done = train_small(f"training.mode={server('async')}", *EVERY_STEP, *onebit)
    assert len(done.summary.history) == 2
    for metrics in done.summary.history:
        assert metrics["exchange/staleness_max"] >= metrics["exchange/staleness"] >= 0
    newest = Path(done.summary.checkpoint)
    assert len(list(newest.parent.glob(f"{newest.stem}.rank-*"))) == 2
    for name, value in weights(done).items():
        assert np.isfinite(value).all(), name
