"""Links as users name them, and what collectives reach on them."""

import math
from collections.abc import Callable
from typing import Any

import pytest

from pipelines.scaling.fit import FittedLink, fit, wires_on
from pipelines.scaling.measurements import CollectiveName, Measurements
from pipelines.scaling.named_link import NamedLink, link_of
from pipelines.scaling.step import Wire


@pytest.mark.parametrize(
    ("text", "speed", "latency", "label"),
    [
        ("1Gbit/s", 125e6, None, "1 Gbit/s"),
        ("100 Mbit/s, 200us", 12.5e6, 2e-4, "100 Mbit/s, 200 us"),
        ("0.4Tbit/s,5us", 5e10, 5e-6, "400 Gbit/s, 5 us"),
        ("64kbit/s,1s", 8000, 1.0, "64 kbit/s, 1e+06 us"),
    ],
)
def test_a_link_is_read(text: str, speed: float, latency: float | None, label: str) -> None:
    link = link_of(text)
    assert [link.bytes_per_second, link.latency_seconds] == pytest.approx([speed, latency])
    assert link.label == label


@pytest.mark.parametrize("text", ["", "fast", "1", "1Gb", "1 GB/s", "0Gbit/s", "1Gbit/s,", "1Gbit/s,5", "-1Gbit/s"])
def test_what_is_no_link_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="should be a speed above 0 and perhaps a latency, such as 1Gbit/s"):
        link_of(text)


@pytest.mark.parametrize(
    ("link", "collective", "wire"),
    [
        # 500 Mbit/s is nearer to 1 Gbit/s than to 100 Mbit/s; the parts reached are 0.9 and 0.6 on both.
        (NamedLink(62.5e6, None), "allreduce", (0.005, 0.001, 0.9 * 62.5e6)),
        (NamedLink(62.5e6, None), "alltoall", (0.005, 0.001, 0.6 * 62.5e6)),
        # Twice the latency, twice the hop; no more than what the processors reach without a limit.
        (NamedLink(1e12, 0.002), "allreduce", (0.005, 0.002, 0.9e9)),
    ],
)
def test_a_link_between_measured_ones(
    scaling_measurements: Callable[..., dict[str, Any]],
    link: NamedLink,
    collective: CollectiveName,
    wire: tuple[float, float, float],
) -> None:
    found = wires_on(link, fit(Measurements.model_validate(scaling_measurements(), strict=False)).links)[collective]
    assert (found.operation_seconds, found.hop_seconds, found.bytes_per_second) == pytest.approx(wire)


def test_without_any_measured_link_the_latency_must_be_said() -> None:
    assert wires_on(NamedLink(1e6, 1e-5), {})["alltoall"] == Wire(0.0, 1e-5, 1e6)
    for unknown in ({}, {"recorded": FittedLink(None, 0.0, {"allreduce": Wire(0.0, 0.0, math.inf)})}):
        with pytest.raises(ValueError, match="say it too, as in 1Gbit/s,50us"):
            wires_on(NamedLink(1e6, None), unknown)
