"""Rows of predictions: batches, efficiency, time, cost, intervals, and the fastest choice."""

import csv
import io
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from pipelines.scaling import estimate
from pipelines.scaling.estimate import STRONG, WEAK, Job, Row, batches_of, csv_of, fastest, figure_of, lines_of, predict
from pipelines.scaling.fit import Parameters, fit, resampled, wires_on
from pipelines.scaling.measurements import Measurements
from pipelines.scaling.named_link import NamedLink
from pipelines.scaling.step import Topology

WORKERS, JOB = [2**power for power in range(11)], Job(images=10_000, epochs=3, price=2.0)


@pytest.fixture(scope="module")
def measured(scaling_measurements: Callable[..., dict[str, Any]]) -> Measurements:
    return Measurements.model_validate(scaling_measurements(noise=0.01), strict=False)


def rows_of(measured: Measurements, scaling: str, batch: int, speed: float = 125e6) -> list[Row]:
    return predict(
        fit(measured), resampled(measured, 20), _network(speed), scaling, batch, WORKERS, ["none", "small"], 8.0, JOB
    )


def _network(speed: float) -> Callable[[Parameters], Topology]:
    return lambda parameters: Topology(wires_on(NamedLink(speed, None), parameters.links))


@pytest.mark.parametrize(
    ("scaling", "batch", "workers", "expected"),
    [(WEAK, 32, 4, (32, 128)), (STRONG, 128, 4, (32, 128)), (STRONG, 100, 3, (34, 100)), (STRONG, 2, 3, None)],
)
def test_batches(scaling: str, batch: int, workers: int, expected: tuple[int, int] | None) -> None:
    assert batches_of(scaling, batch, workers) == expected


def test_time_and_cost_by_hand(measured: Measurements) -> None:
    row = next(row for row in rows_of(measured, WEAK, 8) if row.workers == 4 and row.codec == "none")
    # 312 steps of 32 images in each of 3 epochs; 16 images are left out.
    hours = 3 * 312 * row.seconds / 3600
    assert (row.hours, row.cost, row.images_per_second) == pytest.approx((hours, hours * 4 * 2.0, 32 / row.seconds))


@pytest.mark.parametrize(("scaling", "batch"), [(WEAK, 8), (STRONG, 512)])
def test_efficiency_is_a_part_and_the_interval_holds_the_prediction(
    measured: Measurements, scaling: str, batch: int
) -> None:
    rows: list[Any] = rows_of(measured, scaling, batch)
    assert all(0 < row.efficiency <= 1 + 1e-9 for row in rows)
    assert next(row for row in rows if row.workers == 1 and row.codec == "none").efficiency == pytest.approx(1)
    for row in rows:
        assert 0.97 * row.low <= row.seconds <= 1.03 * row.high > 1.03 * row.low
    # A worker has one image at least.
    assert max(row.workers for row in rows) == (512 if scaling == STRONG else WORKERS[-1])


def test_a_dataset_smaller_than_a_batch_has_no_time(measured: Measurements) -> None:
    last = rows_of(measured, WEAK, 16)[-1]
    assert (last.global_batch_size > 10_000, last.hours, last.cost) == (True, None, None)


def test_the_fastest_codec_depends_on_the_link(measured: Measurements, monkeypatch: pytest.MonkeyPatch) -> None:
    parameters = fit(measured)

    def choice(speed: float, scaling: str = WEAK, batch: int = 8, bucket_mib: float | None = None) -> Any:
        return fastest(parameters, _network(speed), scaling, batch, 8, parameters.codecs, bucket_mib)

    assert ([choice(speed).codec for speed in (1e6, 1e12)], choice(1e6, STRONG, 4)) == (["small", "none"], None)
    # Buckets of 8 MiB (the gradients are 6 MB each) travel during the backward pass, one bucket does not.
    assert choice(1e12).bucket_mib is not None
    monkeypatch.setattr(estimate, "BUCKETS_MIB", (None,))
    assert choice(1e12, bucket_mib=3.0).bucket_mib == 3.0, "the user's own"


def test_what_is_written_says_that_it_is_predicted(measured: Measurements, tmp_path: Path) -> None:
    rows = rows_of(measured, WEAK, 8) + rows_of(measured, STRONG, 512)
    read = list(csv.DictReader(io.StringIO(csv_of(rows))))
    assert [float(row["predicted_step_seconds"]) for row in read] == pytest.approx([row.seconds for row in rows], 1e-5)
    inputs = {"scaling", "workers", "codec", "batch_size", "global_batch_size"}
    assert all(name in inputs or name.startswith("predicted_") for name in read[0])
    lines = lines_of(rows_of(measured, WEAK, 8, speed=1e6), "none")
    assert [line.split()[2] for line in lines[1:5]] == ["none", "none", "small", "none"]
    figure = figure_of(rows, "a link")
    figure.savefig(tmp_path / "plot.png")
    assert figure.get_suptitle() == "Predicted, not measured: a link"
    assert all("predicted" in text for axes in figure.axes for text in (axes.get_title(), axes.get_ylabel()))
