"""Measurements from what trainings have recorded."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from conf.load import load
from pipelines.scaling.fit import fit
from pipelines.scaling.measurements import Measurements
from pipelines.scaling.recorded import combined, measurements_of
from pipelines.tracking.journal.writer import Point
from pipelines.tracking.store.recorded import RecordedRun
from pipelines.training.setup.description import parameters_of


def recorded(workers: int = 2, batch: int = 8, codec: str = "none", **changes: float) -> RecordedRun:
    """A training of two epochs of a model with a million parameters; 0.5 s of computing for 8 images."""
    seconds = {"compute": 0.05 * batch, "optimizer": 0.1, "encode": 0.0, "wire": 0.4, "decode": 0.0, "waiting": 0.05}
    curves = {
        f"time/step_{name}_seconds": [Point(step, value, 0) for step in (1, 2)]
        for name, value in {**seconds, **changes}.items()
    }

    return RecordedRun(
        run_id=f"{codec}{workers}",
        name="name",
        status="FINISHED",
        started=0,
        parameters={
            "launch.num_workers": str(workers),
            "global_batch_size": str(workers * batch),
            "exchange.codec.name": codec,
            "model.name": "resnet",
            "training.mode.name": "synchronous",
        },
        tags={},
        metrics={
            **{name: points[-1].value for name, points in curves.items()},
            "exchange/payload_bytes": 4e6,
            "summary/parameters": 1e6,
        },
        curves=curves,
    )


def test_the_phases_of_a_run_are_measurements() -> None:
    found = measurements_of([recorded(), recorded(batch=16, codec="onebit", encode=0.06)])
    small, large = ((point.batch_size, *point.seconds) for point in found.compute)
    assert [*small, *large, found.gradient_bytes] == pytest.approx([8, 0.5, 0.5, 16, 0.9, 0.9, 4_000_000])
    assert [(point.ranks, point.bytes, point.seconds) for point in found.collectives] == [
        (2, 4_000_000, (0.4, 0.4))
    ] * 2
    dense, onebit = found.codecs
    assert (dense.messages, dense.dense_bytes, onebit.messages[0].bytes, onebit.encode_seconds) == (
        (),
        4_000_000,
        4_000_000,
        (0.06, 0.06),
    )
    # Waiting over computing, by the mean of the larger of two normal numbers, 0.5642.
    assert found.straggler_deviation == pytest.approx((0.05 / 0.5 + 0.05 / 0.9) / 2 / 0.5642, rel=1e-3)


def test_one_worker_has_no_link() -> None:
    found = measurements_of([recorded(workers=1, wire=0.0, waiting=0.0)])
    assert (found.links, found.collectives, found.straggler_deviation) == ((), (), 0)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"status": "FAILED"}, ": that training has not finished, it is FAILED"),
        (
            {"parameters": {**recorded().parameters, "input.resolution_schedule": "[{}]"}},
            " was trained with input.resolution_schedule, so that its steps are of several lengths",
        ),
        ({"parameters": {}}, " is no training: it has no parameter launch.num_workers"),
        ({"metrics": {}}, " has not recorded time/step_compute_seconds: train again"),
        *(
            (
                {"tags": {f"changed.{setting}": later}},
                rf" was continued with another {setting}, so that its steps are of several lengths: {told}\. Take",
            )
            for setting, later, told in (
                ("launch.num_workers", "4 from step 4", "2, then 4 from step 4"),
                ("launch.threads_per_worker", "1 from step 4", "null, then 1 from step 4"),
                ("launch.gpus_per_worker", "1 from step 4", "0, then 1 from step 4"),
                ("training.mode.name", "pipeline from step 4", "synchronous, then pipeline from step 4"),
                ("training.mode.shard_optimizer", "True from step 4", "False, then True from step 4"),
                ("input.resolution_schedule", "[{}] from step 4", r"\[\], then \[{}\] from step 4"),
                ("training.batch_size_per_worker", "16 from step 4", "32, then 16 from step 4"),
                ("training.precision", "bfloat16 from step 4", "float32, then bfloat16 from step 4"),
                ("exchange.codec.name", "powersgd from step 4", "none, then powersgd from step 4"),
                ("exchange.codec.rank", "2 from step 4, 4 from step 9", "null, then 2 from step 4, 4 from step 9"),
                ("model.batch_norm_ranks", "all from step 4", "1, then all from step 4"),
            )
        ),
    ],
)
def test_a_run_that_does_not_say_how_long_a_step_is_is_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=f"--run none2{message}"):
        measurements_of([replace(recorded(), **changes)])


@pytest.mark.parametrize(
    "setting",
    ["{name: pipeline, stages: 2}", "{name: local, every_steps: 4}", "{name: parameter_server, bound: 3}", "delayed"],
)
def test_steps_of_other_modes_are_not_predicted(setting: str, eurosat_manifest: Callable[..., Any]) -> None:
    config = load("smoke", [f"training.mode={setting}", "training.checkpoint_every_steps=null"])
    run, mode = recorded(), config.training.mode.name
    run = replace(run, parameters={**run.parameters, **parameters_of(config, eurosat_manifest(0))})
    with pytest.raises(ValueError, match=rf"trained with training\.mode={mode}, whose steps are not predicted"):
        measurements_of([run])


def test_a_run_whose_steps_are_of_one_length_is_taken_though_it_changed() -> None:
    tags = {"changed.training.epochs": "3 from step 4", "changed.launch.num_workers": "2 from step 4"}
    assert measurements_of([replace(recorded(), tags=tags)]) == measurements_of([recorded()])


def with_settings(run: RecordedRun, settings: dict[str, str]) -> RecordedRun:
    return replace(run, parameters={**run.parameters, **settings})


@pytest.mark.parametrize(
    ("setting", "first", "second"),
    [
        ("training.precision", "float32", "bfloat16"),
        ("training.jit_compile", "False", "True"),
        ("training.ema", "null", "0.999"),
        ("optimizer.name", "lars", "lamb"),
        ("training.mode.shard_optimizer", "False", "True"),
        ("launch.threads_per_worker", "null", "4"),
        ("launch.gpus_per_worker", "0", "1"),
        ("model.batch_norm_ranks", "1", "all"),
        ("dataset_fingerprint", "a", "b"),
        ("exchange.bucket_mib", "1.0", "25.0"),  # waits behind buckets of other sizes
    ],
)
def test_trainings_that_compute_in_different_ways_are_refused(setting: str, first: str, second: str) -> None:
    runs = [
        with_settings(recorded(workers), {} if value == "null" else {setting: value})
        for workers, value in ((2, first), (4, second))
    ]
    with pytest.raises(ValueError, match=rf"none2 and --run none4 have different {setting}, {first} and {second}"):
        measurements_of(runs)


def test_one_worker_waits_for_nobody() -> None:
    small, large = ({"exchange.bucket_mib": size} for size in ("1.0", "25.0"))
    assert measurements_of([with_settings(recorded(), small), with_settings(recorded(workers=1), large)])


def test_runs_of_different_models_are_refused() -> None:
    with pytest.raises(ValueError, match=r"of different models, with \[1000000, 2000000\] parameters"):
        measurements_of([recorded(), with_metrics(recorded(), {"summary/parameters": 2e6})])


def with_metrics(run: RecordedRun, metrics: dict[str, float]) -> RecordedRun:
    return replace(run, metrics={**run.metrics, **metrics})


def test_a_setting_that_an_earlier_version_did_not_have_is_its_default() -> None:
    new = {"training.precision": "float32", "model.dropout": "0.0", "model.depth": "50"}
    assert measurements_of([recorded(), with_settings(recorded(workers=4), new)])


def test_a_codec_with_different_settings_is_refused() -> None:
    by_rank = {rank: with_settings(recorded(codec="powersgd"), {"exchange.codec.rank": rank}) for rank in ("2", "16")}
    for first, second in (("2", "16"), ("16", "2")):
        with pytest.raises(
            ValueError, match=rf"have different exchange\.codec\.rank, {first} and {second}, so that their times"
        ):
            measurements_of([by_rank[first], by_rank[second]])
    assert measurements_of([recorded(), by_rank["2"]]), "another codec has settings of its own"


def test_all_trainings_with_a_codec_say_what_it_costs() -> None:
    few = recorded(codec="onebit", encode=0.06)
    more = with_metrics(recorded(workers=4, codec="onebit", encode=0.08), {"exchange/payload_bytes": 5e6})
    for runs in ([few, more], [more, few]):
        (codec,) = measurements_of(runs).codecs
        assert (sorted(codec.encode_seconds), codec.messages[0].bytes) == ([0.06, 0.06, 0.08, 0.08], 4_500_000)


@pytest.mark.parametrize("ranks", [(2,), (2, 4), (2, 4, 8)])
def test_few_trainings_on_a_ring_say_its_speed(ranks: tuple[int, ...]) -> None:
    # 4 MB at 10 MB/s: each rank sends 2 (N - 1) / N of them.
    runs = [recorded(workers=count, wire=0.8 * (count - 1) / count, waiting=0.0) for count in ranks]
    wire = fit(measurements_of(runs)).links["recorded"].wires["allreduce"]
    assert (wire.operation_seconds, wire.hop_seconds, wire.bytes_per_second) == pytest.approx((0.0, 0.0, 1e7))


@pytest.fixture
def measured(scaling_measurements: Callable[..., dict[str, Any]]) -> Measurements:
    return Measurements.model_validate(scaling_measurements(), strict=False)


def test_beside_measured_links_the_model_is_that_of_the_runs(measured: Measurements) -> None:
    both = combined(measured, measurements_of([recorded()]))
    # 4 MB of gradients where 30 MB were measured.
    assert both.gradient_bytes == pytest.approx(4_000_000, rel=1e-6)
    none, small = both.codecs
    assert (none.name, none.dense_bytes, small.name, small.messages[0].bytes) == ("none", 4_000_000, "small", 40_000)
    assert small.encode_seconds == pytest.approx((0.06 * 4 / 30,))
    found = fit(both)
    speed = found.links["mbit_100"].wires["allreduce"].bytes_per_second
    assert (found.worker.seconds_per_image, speed) == pytest.approx((0.5 / 8, 0.9 * 12.5e6))


def test_a_codec_carries_what_the_trainings_sent_by_the_collectives_that_were_measured(
    scaling_measurements: Callable[..., dict[str, Any]],
) -> None:
    """Its settings were others than those that were measured, or its tensors have other shapes."""
    values = scaling_measurements()
    messages = [{"collective": "alltoall", "bytes": 300_000}, {"collective": "allgather", "bytes": 100_000}]
    values["codecs"][1] |= {"messages": messages, "dense_bytes": 50_000}
    measured = Measurements.model_validate(values, strict=False)
    run = with_metrics(recorded(codec="small", encode=0.01), {"exchange/payload_bytes": 1e6})
    _, codec = combined(measured, measurements_of([recorded(), run])).codecs
    # An alltoall or allgather costs half of an allreduce: 250,000 were measured, and a million was sent.
    assert [*(each.bytes for each in codec.messages), codec.dense_bytes] == pytest.approx(
        [1_200_000, 400_000, 200_000], rel=1e-4
    )
    assert (codec.name, codec.encode_seconds, [each.collective for each in codec.messages]) == (
        "small",
        (0.01, 0.01),
        ["alltoall", "allgather"],
    )


def test_trainings_of_one_worker_leave_the_measured_stragglers(measured: Measurements) -> None:
    measured = measured.model_copy(update={"straggler_deviation": 0.07})
    assert combined(measured, measurements_of([recorded(workers=1)])).straggler_deviation == 0.07
    several = measurements_of([recorded()])
    assert combined(measured, several).straggler_deviation == several.straggler_deviation != 0.07


def test_epochs_with_steps_in_float32_say_nothing_of_a_codec() -> None:
    run, short = (with_settings(recorded(codec="onebit"), {"exchange.warmup_steps": steps}) for steps in ("1", "2"))
    curves = {
        f"time/step_{name}_seconds": [Point(1, before, 0), Point(2, after, 0)]
        for name, before, after in (("wire", 4.0, 0.4), ("encode", 0.0, 0.06), ("decode", 0.0, 0.02))
    }
    found = measurements_of([replace(run, curves=run.curves | curves)])
    (codec,), (collective,) = found.codecs, found.collectives
    assert (collective.seconds, codec.encode_seconds, codec.decode_seconds) == ((0.4,), (0.06,), (0.02,))
    assert len(found.compute[0].seconds) == 2, "computing is the same in all of them"
    with pytest.raises(ValueError, match=r"onebit2 has no epoch without steps in float32, and exchange\.warmup_s"):
        measurements_of([short])
