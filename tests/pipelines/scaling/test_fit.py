"""Parameters that made the data come back from it."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from pipelines.scaling.collectives import Wire
from pipelines.scaling.fit import fit, least_squares, resampled
from pipelines.scaling.measurements import Measurements

Make = Callable[..., dict[str, Any]]


def test_data_of_the_model_gives_back_its_parameters(scaling_measurements: Make) -> None:
    found = fit(Measurements.model_validate(scaling_measurements(), strict=False))
    assert found.worker.fixed_seconds == pytest.approx(0.1)
    assert found.worker.seconds_per_image == pytest.approx(0.05)
    link = found.links["mbit_100"]
    assert link.wires["allreduce"] == _near(Wire(0.005, 0.001, 0.9 * 12.5e6))
    assert link.wires["alltoall"] == _near(Wire(0.005, 0.001, 0.6 * 12.5e6))
    assert found.links["unshaped"].wires["allreduce"] == _near(Wire(0.005, 0.001, 0.9e9))
    assert found.codecs["small"].encode_seconds == 0.06


def test_several_numbers_of_ranks_tell_operation_and_hop_apart(scaling_measurements: Make) -> None:
    content = scaling_measurements(ranks=(2, 4))
    for link in content["links"]:
        link["latency_seconds"] = [0.5]  # not needed, and not believed
    found = fit(Measurements.model_validate(content, strict=False))
    assert found.links["mbit_1000"].wires["allreduce"] == _near(Wire(0.005, 0.001, 0.9 * 125e6))


def test_one_batch_is_all_per_image(scaling_measurements: Make) -> None:
    content = scaling_measurements()
    content["compute"] = content["compute"][1:2]
    worker = fit(Measurements.model_validate(content, strict=False)).worker
    assert worker.fixed_seconds == 0
    assert worker.seconds_per_image == pytest.approx(0.5 / 8)


def test_steps_that_take_no_longer_with_more_images_are_refused(scaling_measurements: Make) -> None:
    content = scaling_measurements()
    content["compute"] = [{"batch_size": 4, "seconds": [0.5]}, {"batch_size": 8, "seconds": [0.5]}]
    with pytest.raises(ValueError, match=r"no longer with more images \(4: 0.5 s, 8: 0.5 s\): measure"):
        fit(Measurements.model_validate(content, strict=False))


def test_draws_spread_as_the_repeats_do_and_are_the_same_every_time(scaling_measurements: Make) -> None:
    noisy = Measurements.model_validate(scaling_measurements(noise=0.02), strict=False)
    draws, again = resampled(noisy, 50), resampled(noisy, 50)
    assert draws == again
    assert draws is not None
    speeds = [draw.links["mbit_100"].wires["allreduce"].bytes_per_second for draw in draws]
    assert 0.001 < np.std(speeds) / np.mean(speeds) < 0.05
    # Equal repeats do not spread.
    equal = resampled(Measurements.model_validate(scaling_measurements(), strict=False), 3)
    assert equal is not None
    assert equal[0].worker.fixed_seconds == pytest.approx(equal[1].worker.fixed_seconds)


def test_what_was_measured_once_has_no_draws(scaling_measurements: Make) -> None:
    content = scaling_measurements()
    for point in (*content["compute"], *content["collectives"]):
        point["seconds"] = point["seconds"][:1]
    assert resampled(Measurements.model_validate(content, strict=False), 3) is None


def test_coefficients_are_never_negative() -> None:
    # Exactly 2 x - 1: without the bound the first coefficient is -1.
    x = np.array([1.0, 2.0, 3.0])
    found = least_squares(np.stack([np.ones(3), x], 1), 2 * x - 1, 2 * x - 1)
    assert found[0] == 0
    # sum(x / y) / sum((x / y)^2) of 1 / 1, 2 / 3 and 3 / 5.
    assert found[1] == pytest.approx((1 + 2 / 3 + 3 / 5) / (1 + 4 / 9 + 9 / 25))


def test_columns_of_very_different_sizes_are_found() -> None:
    size = np.array([1e3, 1e6, 1e8])
    seconds = 1e-3 + 1e-9 * size
    found = least_squares(np.stack([np.ones(3), size], 1), seconds, seconds)
    assert found.tolist() == pytest.approx([1e-3, 1e-9])


def test_points_whose_repeats_spread_count_less(scaling_measurements: Make) -> None:
    content = scaling_measurements()
    point = content["compute"][0]
    exact, wide = ([{**point, "seconds": seconds}, *content["compute"][1:]] for seconds in ([0.6], [0.2, 0.6, 1.0]))
    fixed = [
        fit(Measurements.model_validate({**content, "compute": compute}, strict=False)).worker.fixed_seconds
        for compute in (exact, wide)
    ]
    # Without the wrong point it is 0.1.
    assert fixed[0] > fixed[1] > 0.1


def _near(wire: Wire) -> Any:
    values = (wire.operation_seconds, wire.hop_seconds, wire.bytes_per_second)

    class Near:
        def __eq__(self, other: object) -> bool:
            assert isinstance(other, Wire)
            return (other.operation_seconds, other.hop_seconds, other.bytes_per_second) == pytest.approx(values)

        def __repr__(self) -> str:
            return repr(wire)

    return Near()
