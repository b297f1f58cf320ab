"""Parameters that made the data come back from it."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from pipelines.scaling.fit import Parameters, fit, least_squares, resampled
from pipelines.scaling.measurements import Measurements
from pipelines.scaling.step import Wire

Make = Callable[..., dict[str, Any]]


def fitted(content: dict[str, Any]) -> Parameters:
    return fit(Measurements.model_validate(content, strict=False))


def numbers(wire: Wire) -> tuple[float, float, float]:
    return (wire.operation_seconds, wire.hop_seconds, wire.bytes_per_second)


def test_data_of_the_model_gives_back_its_parameters(scaling_measurements: Make) -> None:
    found: Any = fitted(scaling_measurements())
    assert (found.worker.fixed_seconds, found.worker.seconds_per_image) == pytest.approx((0.1, 0.05))
    for link, collective, speed in (
        ("mbit_100", "allreduce", 0.9 * 12.5e6),
        ("mbit_100", "alltoall", 0.6 * 12.5e6),
        ("unshaped", "allreduce", 0.9e9),
    ):
        assert numbers(found.links[link].wires[collective]) == pytest.approx((0.005, 0.001, speed))
    assert found.codecs["small"].encode_seconds == 0.06


def test_several_numbers_of_ranks_tell_operation_and_hop_apart(scaling_measurements: Make) -> None:
    content = scaling_measurements(ranks=(2, 4))
    for link in content["links"]:
        link["latency_seconds"] = [0.5]  # not needed, and not believed
    assert numbers(fitted(content).links["mbit_1000"].wires["allreduce"]) == pytest.approx((0.005, 0.001, 0.9 * 125e6))


def test_one_batch_is_all_per_image(scaling_measurements: Make) -> None:
    content = scaling_measurements()
    worker = fitted({**content, "compute": content["compute"][1:2]}).worker
    assert (worker.fixed_seconds, worker.seconds_per_image) == pytest.approx((0, 0.5 / 8))


def test_steps_that_take_no_longer_with_more_images_are_refused(scaling_measurements: Make) -> None:
    compute = [{"batch_size": 4, "seconds": [0.5]}, {"batch_size": 8, "seconds": [0.5]}]
    with pytest.raises(ValueError, match=r"no longer with more images \(4: 0.5 s, 8: 0.5 s\): measure"):
        fitted({**scaling_measurements(), "compute": compute})


def test_draws_spread_as_the_repeats_do_and_are_the_same_every_time(scaling_measurements: Make) -> None:
    noisy, equal = (
        Measurements.model_validate(scaling_measurements(noise=noise), strict=False) for noise in (0.02, 0.0)
    )
    draws: Any = resampled(noisy, 50)
    assert draws == resampled(noisy, 50)
    speeds = [draw.links["mbit_100"].wires["allreduce"].bytes_per_second for draw in draws]
    assert 0.001 < np.std(speeds) / np.mean(speeds) < 0.05
    # Equal repeats do not spread.
    same: Any = resampled(equal, 3)
    assert same[0].worker.fixed_seconds == pytest.approx(same[1].worker.fixed_seconds)


def test_what_was_measured_once_has_no_draws(scaling_measurements: Make) -> None:
    content = scaling_measurements()
    for point in (*content["compute"], *content["collectives"]):
        point["seconds"] = point["seconds"][:1]
    assert resampled(Measurements.model_validate(content, strict=False), 3) is None


@pytest.mark.parametrize(
    ("x", "y", "expected"),
    [
        # Exactly 2 x - 1: without the bound the first coefficient is -1.
        # sum(x / y) / sum((x / y)^2) of 1 / 1, 2 / 3 and 3 / 5.
        ([1.0, 2.0, 3.0], [1.0, 3.0, 5.0], (0, (1 + 2 / 3 + 3 / 5) / (1 + 4 / 9 + 9 / 25))),
        # Columns of very different sizes.
        ([1e3, 1e6, 1e8], [1.001e-3, 2e-3, 0.101], (1e-3, 1e-9)),
    ],
)
def test_coefficients_are_found_and_never_negative(
    x: list[float], y: list[float], expected: tuple[float, float]
) -> None:
    columns = np.stack([np.ones(3), np.array(x)], 1)
    assert tuple(least_squares(columns, np.array(y), np.array(y))) == pytest.approx(expected)


def test_points_whose_repeats_spread_count_less(scaling_measurements: Make) -> None:
    content = scaling_measurements()
    point, *rest = content["compute"]
    exact, wide = (
        fitted({**content, "compute": [{**point, "seconds": seconds}, *rest]}).worker.fixed_seconds
        for seconds in ([0.6], [0.2, 0.6, 1.0])
    )
    # Without the wrong point it is 0.1.
    assert exact > wide > 0.1
