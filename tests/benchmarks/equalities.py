"""How far trainings differ that should be the same: micro-batches and ranks, batch norm over ranks, precisions.

The trainings are those of the tests, which have the bounds; this prints what is left below them. Real ranks; small
networks with batch norm. `--smoke` leaves out the four ranks, and batch norm per worker.
"""

import importlib
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import cloudpickle
import numpy as np

from tests.benchmarks.parts.command import is_smoke
from tests.benchmarks.parts.ranks import on_ranks

TESTS = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(TESTS / "parallel" / "exchange"), str(TESTS / "pipelines" / "training" / "step")]


def largest(found: Sequence[np.ndarray], expected: Sequence[np.ndarray]) -> float:
    """Largest difference of two numbers at the same place."""
    return max(float(np.abs(own - other).max()) for own, other in zip(found, expected, strict=True))


def relative(found: Sequence[np.ndarray], expected: Sequence[np.ndarray]) -> float:
    """Length of the difference over the length, the largest of all variables."""
    return max(
        float(np.linalg.norm(own - other) / np.linalg.norm(other)) for own, other in zip(found, expected, strict=True)
    )


def accumulation(*, smoke: bool) -> dict[str, float]:
    """How far weights moved in 4 steps of 32 samples, and the statistics: as 4 micro-batches of 8 or on more ranks."""
    test = importlib.import_module("test_accumulation")
    (alone,) = run(1, test, test.train, 1, 4, *test.ALIKE)
    found = {"2 ranks x 2": largest(test.trained_on(2, 1, 2, *test.ALIKE), alone)}
    if not smoke:
        found["4 ranks x 1"] = largest(test.trained_on(4, 1, 1, *test.ALIKE), alone)
    return found


def batch_norm(*, smoke: bool) -> dict[str, float]:
    """How far weights moved in 3 steps of 16 samples, and the statistics, beside one rank."""
    test = importlib.import_module("test_accumulation")
    (whole,) = run(1, test, test.train, 1, 1, *test.BRIGHTER)
    found = {"2 ranks x 8, over all": relative(test.trained_on(2, 2, 1, *test.BRIGHTER), whole)}
    if not smoke:
        found["2 ranks x 8, per worker"] = relative(test.trained_on(2, 1, 1, *test.BRIGHTER), whole)
        (parts,) = run(1, test, test.train, 1, 4, *test.BRIGHTER)
        found["4 ranks x 2 x 2, groups of 2"] = relative(test.trained_on(4, 2, 2, *test.BRIGHTER), parts)
    return found


def precision(*, smoke: bool) -> dict[str, dict[str, float]]:
    """The first step of a ResNet-18 beside float32: loss, length and direction of how the weights moved."""
    test = importlib.import_module("test_half_precision")
    names = ("bfloat16",) if smoke else ("bfloat16", "float16")
    ((loss, full), *others) = run(1, test, first_steps, test, ("float32", *names))[0]
    lengths = [float(np.linalg.norm(moved)) for _, moved in [(loss, full), *others]]
    return {
        name: {
            "loss": round(other / loss, 5),
            "length": round(length / lengths[0], 4),
            "cosine": round(float(np.dot(moved, full)) / (length * lengths[0]), 4),
        }
        for name, (other, moved), length in zip(names, others, lengths[1:], strict=True)
    }


def first_steps(test: Any, precisions: tuple[str, ...]) -> list[tuple[float, np.ndarray]]:
    """Loss and movement of all weights in one step of each precision."""
    import numpy as np

    from pipelines.training.ranks.collective import HorovodCollective

    collective, found = HorovodCollective(), []
    for name in precisions:
        model, mode, _ = test.build(name, collective)
        start = [np.array(variable) for variable in model.trainable_variables]
        loss = float(mode.step(*test.batch(0)))
        moved = [np.ravel(v) - np.ravel(s) for v, s in zip(model.trainable_variables, start, strict=True)]
        found.append((loss, np.concatenate(moved)))
    return found


def run(ranks: int, test: Any, function: Any, *arguments: Any) -> list[Any]:
    """What a function of a test's module gives on each of some ranks, one thread each."""
    cloudpickle.register_pickle_by_value(test)
    return on_ranks(ranks, function, *arguments)


def main() -> None:
    """Print each figure and the JSON line."""
    smoke = is_smoke(__doc__, "one and two ranks only, batch norm over both")
    figures: dict[str, Any] = {}
    for measure in (accumulation, batch_norm, precision):
        figures[measure.__name__] = measure(smoke=smoke)
        print(f"{measure.__name__}: {figures[measure.__name__]}", flush=True)
    print(json.dumps(figures))


if __name__ == "__main__":
    main()
