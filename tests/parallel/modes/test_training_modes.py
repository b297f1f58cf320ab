"""Training modes on a real ring: what they equal, and what they send."""

from typing import Any

import numpy as np
import pytest

from tests.parallel.ring import Trainee, on_ring

pytestmark = [pytest.mark.parallel, pytest.mark.long, pytest.mark.timeout(600)]

RANKS, STEPS, RATE = 2, 12, 0.1


class Ring(Trainee):
    """One rank's trainings on fixed batches; every method gives the same kind of result."""

    rate = RATE

    def train(self, chosen: str, optimizer: str, *, codec: str = "none", same: bool = False) -> dict[str, Any]:
        """Train; how far every weight moved, the weights after each step, and the payload of each step."""
        sets = [
            f"training.mode={chosen}",
            f"optimizer={optimizer}",
            f"exchange.codec={codec}",
            "exchange.dense_below=0",
        ]
        model, mode = self.begin(sets, self.rate, STEPS)
        start, weights, payloads = [np.array(each) for each in model.trainable_variables], [], []
        for batch in self.batches(STEPS, RANKS, same=same):
            mode.step(*batch)
            weights.append([np.array(each) for each in model.trainable_variables])
            payloads.append(mode.exchange.metrics().payload_bytes)
        moved = [after - before for after, before in zip(weights[-1], start, strict=True)]
        return {"moved": moved, "weights": weights, "payloads": payloads}

    def by_hand(self, every: int, rate: float, momentum: float, kind: str, *, adamw: bool = False) -> dict[str, Any]:
        """The published rules in float64: BMUF (`classical`, `nesterov`), DiLoCo; inside plain SGD, or AdamW."""
        model = self.model()
        variables = model.trainable_variables
        start = anchor = [np.array(each, np.float64) for each in variables]
        speed = [np.zeros_like(each) for each in start]
        first, second = ([np.zeros_like(each) for each in start] for _ in range(2))
        for number, (images, targets) in enumerate(self.batches(STEPS, RANKS), start=1):
            ways = self.gradients(model, images, targets)
            if adamw:  # Loshchilov and Hutter (2019), algorithm 2, without weight decay
                first = [0.9 * m + 0.1 * g for m, g in zip(first, ways, strict=True)]
                second = [0.999 * v + 0.001 * g**2 for v, g in zip(second, ways, strict=True)]
                means = [m / (1 - 0.9**number) for m in first]
                roots = [np.sqrt(v / (1 - 0.999**number)) for v in second]
                ways = [m / (root + 1e-8) for m, root in zip(means, roots, strict=True)]
            for variable, way in zip(variables, ways, strict=True):
                variable.assign((np.array(variable, np.float64) - self.rate * way).astype(np.float32))
            if number % every:
                continue
            mean = [self.collective.sum(np.array(each, np.float64)) / self.collective.size for each in variables]
            if kind == "diloco":  # as torch.optim.SGD: v = m v + d, w = w - rate (d + m v)
                ways = [a - b for a, b in zip(anchor, mean, strict=True)]
                speed = [momentum * v + d for v, d in zip(speed, ways, strict=True)]
                anchor = [a - rate * (d + momentum * v) for a, d, v in zip(anchor, ways, speed, strict=True)]
            else:  # W = W + D with D = momentum D + rate G; Nesterov's next block starts from W + momentum D
                held = [a - momentum * v for a, v in zip(anchor, speed, strict=True)] if kind == "nesterov" else anchor
                ways = [b - a for a, b in zip(anchor, mean, strict=True)]
                speed = [momentum * v + rate * g for v, g in zip(speed, ways, strict=True)]
                held = [w + v for w, v in zip(held, speed, strict=True)]
                anchor = [w + momentum * v for w, v in zip(held, speed, strict=True)] if kind == "nesterov" else held
            for variable, each in zip(variables, anchor, strict=True):
                variable.assign(each.astype(np.float32))
        return {"moved": [a - b for a, b in zip(anchor, start, strict=True)]}

    def delayed_by_hand(self, momentum: float) -> dict[str, Any]:
        """Momentum SGD in float64 by the mean gradient of all ranks, which each step applies one step late."""
        model = self.model()
        variables = model.trainable_variables
        start = [np.array(each, np.float64) for each in variables]
        held, speed = start, [np.zeros_like(each) for each in start]
        pending: list[Any] | None = None
        for images, targets in self.batches(STEPS, RANKS):
            gradients = self.gradients(model, images, targets)
            if pending is not None:
                speed = [momentum * v - self.rate * g for v, g in zip(speed, pending, strict=True)]
                held = [w + v for w, v in zip(held, speed, strict=True)]
                for variable, each in zip(variables, held, strict=True):
                    variable.assign(each.astype(np.float32))
            pending = [self.collective.sum(each) / self.collective.size for each in gradients]
        return {"moved": [after - before for after, before in zip(held, start, strict=True)]}


def trainings() -> dict[str, Any]:
    """Every training that the tests below compare, on one ring."""
    ring, slow = Ring(), Ring()
    slow.rate = RATE / 100
    plain = "{name: sgd, momentum: 0.0, nesterov: false, weight_decay: 0.0}"
    momentum = "{name: sgd, momentum: 0.9, nesterov: false, weight_decay: 0.0}"
    nesterov = "{name: sgd, momentum: 0.9, nesterov: true, weight_decay: 0.0}"
    lars, adamw = "{name: lars, weight_decay: 0.0}", "{name: adamw, weight_decay: 0.0}"

    def local(every: int, outer: str = "{}", after: int = 0) -> str:
        return f"{{name: local, every_steps: {every}, local_after_steps: {after}, outer: {outer}}}"

    return {
        "synchronous": ring.train("synchronous", momentum),
        "synchronous nesterov": ring.train("synchronous", nesterov),
        "synchronous lars": ring.train("synchronous", lars),
        "every step": ring.train(local(1), momentum),
        "every step, outer nesterov": ring.train(local(1, "{momentum: 0.9}"), plain),
        "every step, lars": ring.train(local(1), lars),
        "synchronous adamw": slow.train("synchronous", adamw),
        "every step, adamw": slow.train(local(1), adamw),
        "averages": ring.train(local(4), plain),
        "averages by hand": ring.by_hand(4, 1.0, 0.0, "classical"),
        "bmuf": ring.train(local(4, "{rate: 0.9, momentum: 0.5, nesterov: false}"), plain),
        "bmuf by hand": ring.by_hand(4, 0.9, 0.5, "classical"),
        "bmuf nesterov": ring.train(local(4, "{rate: 0.9, momentum: 0.5}"), plain),
        "bmuf nesterov by hand": ring.by_hand(4, 0.9, 0.5, "nesterov"),
        "diloco": ring.train(local(4, "{rate: 0.7, momentum: 0.9}"), plain),
        "diloco by hand": ring.by_hand(4, 0.7, 0.9, "diloco"),
        "diloco, adamw": slow.train(local(4, "{rate: 0.7, momentum: 0.9}"), adamw),
        "diloco, adamw by hand": slow.by_hand(4, 0.7, 0.9, "diloco", adamw=True),
        "same data": ring.train(local(6), momentum, same=True),
        "post-local, never local": ring.train(local(4, after=STEPS), momentum),
        "post-local": ring.train(local(4, after=5), momentum),
        "delayed": ring.train("delayed", momentum),
        "delayed by hand": ring.delayed_by_hand(0.9),
        "delayed, compressed": ring.train("delayed", momentum, codec="onebit"),
        "compressed": ring.train(local(4), momentum, codec="onebit"),
        "compressed always": ring.train("synchronous", momentum, codec="onebit"),
        "one rank": None if ring.collective.rank else _alone(ring, momentum),
    }


def _alone(ring: Ring, optimizer: str) -> dict[str, Any]:
    """Rank 0's training on its own data without any other rank."""

    class Alone:
        rank, size, allreduce = 0, 1, staticmethod(lambda tensors, name=None: list(tensors))

    together, ring.collective = ring.collective, Alone()
    try:
        return ring.train("synchronous", optimizer, same=True)
    finally:
        ring.collective = together


@pytest.fixture(scope="module")
def everyones() -> list[dict[str, Any]]:
    """What `trainings` gives on each rank."""
    return on_ring(RANKS, trainings)


def difference(first: dict[str, Any], second: dict[str, Any]) -> float:
    """Length of the difference of two trainings over the length of the way."""
    one, two = (np.concatenate([each.ravel() for each in which["moved"]]) for which in (first, second))
    assert np.linalg.norm(two) > 0.01
    return float(np.linalg.norm(one - two) / np.linalg.norm(two))


@pytest.mark.parametrize(
    ("mode", "equal"),
    [
        ("every step", "synchronous"),
        ("every step, outer nesterov", "synchronous nesterov"),
        ("averages", "averages by hand"),
        ("bmuf", "bmuf by hand"),
        ("bmuf nesterov", "bmuf nesterov by hand"),
        ("diloco", "diloco by hand"),
        ("same data", "one rank"),
        ("post-local, never local", "synchronous"),
        ("delayed", "delayed by hand"),
    ],
)
def test_modes_equal(everyones: list[dict[str, Any]], mode: str, equal: str) -> None:
    assert difference(everyones[0][mode], everyones[0][equal]) < 2e-5


def test_diloco_is_local_adamw_with_outer_nesterov_momentum(everyones: list[dict[str, Any]]) -> None:
    # AdamW divides by the root of the squares, so that rounding of the smallest gradients moves whole steps.
    assert difference(everyones[0]["diloco, adamw"], everyones[0]["diloco, adamw by hand"]) < 1e-3


def test_a_delay_of_one_step_is_one(everyones: list[dict[str, Any]]) -> None:
    assert difference(everyones[0]["delayed"], everyones[0]["synchronous"]) > 0.01
    first, *_ = everyones[0]["delayed"]["weights"]
    np.testing.assert_equal(first, everyones[0]["delayed, compressed"]["weights"][0])  # nothing was applied yet


@pytest.mark.parametrize("name", ["delayed", "delayed, compressed"])
def test_ranks_with_delayed_gradients_are_equal_always(everyones: list[dict[str, Any]], name: str) -> None:
    np.testing.assert_equal(*(each[name]["weights"] for each in everyones))


@pytest.mark.parametrize("optimizer", ["lars", "adamw"])
def test_a_rule_that_is_not_linear_in_the_gradient_is_another_one(
    everyones: list[dict[str, Any]], optimizer: str
) -> None:
    """The mean of what it makes of two gradients is not what it makes of their mean."""
    assert difference(everyones[0][f"every step, {optimizer}"], everyones[0][f"synchronous {optimizer}"]) > 0.01


@pytest.mark.parametrize("name", ["averages", "diloco", "compressed", "post-local"])
def test_ranks_are_equal_at_borders_and_only_there(everyones: list[dict[str, Any]], name: str) -> None:
    first, second = (each[name]["weights"] for each in everyones)
    together = [
        all(np.array_equal(a, b) for a, b in zip(*both, strict=True)) for both in zip(first, second, strict=True)
    ]
    synchronous = 5 if name == "post-local" else 0
    assert together == [step <= synchronous or step % 4 == 0 for step in range(1, STEPS + 1)]


def test_the_bytes_are_those_of_one_step_in_every_block(everyones: list[dict[str, Any]]) -> None:
    for local, always in (("averages", "synchronous"), ("compressed", "compressed always")):
        payloads, each = everyones[0][local]["payloads"], everyones[0][always]["payloads"]
        assert (sum(payloads) * 4, [payload > 0 for payload in payloads]) == (
            sum(each),
            [step % 4 == 0 for step in range(1, STEPS + 1)],
        )
