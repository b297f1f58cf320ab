"""Measurements from trainings of this project: the phases of a step that a run records in every epoch."""

import statistics
from collections import defaultdict
from collections.abc import Collection, Sequence
from typing import TYPE_CHECKING

from conf.keys import find, nested
from conf.sections.modes import MODES
from pipelines.scaling.measurements import (
    CodecMeasurement,
    CollectivePoint,
    ComputePoint,
    Gradient,
    LinkMeasurement,
    Measurements,
    Message,
)
from pipelines.scaling.step import expected_maximum

if TYPE_CHECKING:
    from pipelines.tracking.store.recorded import RecordedRun

PHASES = tuple(f"time/step_{name}_seconds" for name in ("compute", "encode", "wire", "decode", "optimizer", "waiting"))
"""Metrics whose curves are needed."""
PAYLOAD, PARAMETERS = "exchange/payload_bytes", "summary/parameters"
RECORDED_LINK = "recorded"
"""Name of the link of the trainings."""
_FLOAT32_BYTES = 4
_NO_CODEC = "none"
_MODE = "training.mode.name"
_RESOLUTION = "input.resolution_schedule"
_BUCKETS = "exchange.bucket_mib"
_WARMUP_STEPS = "exchange.warmup_steps"
"""Setting with the number of steps at the start of a training whose gradients are sent in float32."""
_TOLD_BY_ALL = ("launch.num_workers", "global_batch_size", "exchange.codec.name", _MODE)
_OF_COMPUTING = (
    "training.mode",
    "model.name",
    "model",
    "dataset_fingerprint",  # stands for the size of the images, which has no setting
    "training.precision",
    "training.jit_compile",
    "training.ema",
    "optimizer.name",
    "input.upsampling",
    "launch.threads_per_worker",
    "launch.gpus_per_worker",
)
_OF_A_CODEC = ("exchange.codec", "exchange.dense_below", _WARMUP_STEPS)
_SAME_THROUGHOUT = (
    *_TOLD_BY_ALL,
    _RESOLUTION,
    "training.batch_size_per_worker",
    "micro_batches_per_step",
    _BUCKETS,
    *_OF_COMPUTING,
    *_OF_A_CODEC,
)
"""Settings and sections that determine the time of a step, in the order in which an error names them."""


def measurements_of(runs: Sequence["RecordedRun"]) -> Measurements:
    """Return the measurements that finished trainings of one model have recorded.

    A step's computing is its phases `compute` and `optimizer`; waiting for input is left out. Communication counts as
    one allreduce of the payload, whose time is the phase `wire`: the part that the backward pass does not hide. So
    these measurements contain no overlap, and all communication that they predict is exposed.

    Args:
        runs: Recorded runs, at least one, with the curves of `PHASES`.

    Raises:
        ValueError: A run has not finished, lacks a metric, or has steps of several lengths or of an unsupported mode.
            Or the runs differ in the model, the training or the settings of the same codec.
    """
    for run in runs:
        _check(run)
    sizes = {run.metrics[PARAMETERS] for run in runs}
    if len(sizes) > 1:
        raise ValueError(f"--run: the trainings are of different models, with {sorted(map(int, sizes))} parameters")
    gradient_bytes = int(_FLOAT32_BYTES * sizes.pop())
    _check_alike(runs, _OF_COMPUTING)
    _check_alike([run for run in runs if int(run.parameters["launch.num_workers"]) > 1], (_BUCKETS,))
    compute: dict[int, list[float]] = defaultdict(list)
    of_codecs: dict[str, list[RecordedRun]] = defaultdict(list)
    points, deviations = [], []
    for run in runs:
        workers = int(run.parameters["launch.num_workers"])
        computing = [a + b for a, b in zip(_curve(run, "compute"), _curve(run, "optimizer"), strict=True)]
        compute[int(run.parameters["global_batch_size"]) // workers] += computing
        of_codecs[run.parameters["exchange.codec.name"]].append(run)
        wire = tuple(seconds for seconds in _curve_of_codec(run, "wire") if seconds > 0)
        if workers > 1 and wire:
            points.append(
                CollectivePoint(
                    link=RECORDED_LINK, collective="allreduce", ranks=workers, bytes=_payload(run), seconds=wire
                )
            )
            waiting = sum(_curve(run, "waiting")) / sum(computing)
            deviations.append(max(0.0, waiting) / expected_maximum(workers))
    return Measurements(
        format_version=1,
        machine=", ".join(f"run {run.run_id}" for run in runs),
        measured="recorded by the runs",
        model=runs[0].parameters.get("model.name", "model"),
        compute=tuple(ComputePoint(batch_size=batch, seconds=tuple(compute[batch])) for batch in sorted(compute)),
        straggler_deviation=sum(deviations) / len(deviations) if deviations else 0.0,
        gradients=(Gradient(bytes=gradient_bytes, ready=1.0),),
        links=(LinkMeasurement(name=RECORDED_LINK, bytes_per_second=None, latency_seconds=(0.0,)),) if points else (),
        collectives=tuple(points),
        codecs=tuple(_codec(name, same) for name, same in of_codecs.items()),
    )


def combined(measured: Measurements, recorded: Measurements) -> Measurements:
    """Return the model of the trainings on the links of the other measurements.

    Computing, stragglers and codecs come from the trainings. If these had only one worker, the stragglers are the
    measured ones. Unused codecs and the order in which gradients become ready are the measured ones, in proportion to
    the bytes of the gradients. A used codec has the measured collectives with the payload of the trainings, because its
    settings or the shapes of the gradients may differ.
    """
    factor = recorded.gradient_bytes / measured.gradient_bytes
    known = {codec.name for codec in recorded.codecs}
    scaled = {codec.name: _scaled(codec, factor) for codec in measured.codecs}
    codecs = [
        _with_collectives_of(scaled[codec.name], codec) if codec.name in scaled else codec for codec in recorded.codecs
    ]
    return measured.model_copy(
        update={
            "machine": f"{measured.machine}; {recorded.machine}",
            "model": recorded.model,
            "compute": recorded.compute,
            "straggler_deviation": (recorded if recorded.collectives else measured).straggler_deviation,
            "gradients": tuple(
                Gradient(bytes=max(1, round(gradient.bytes * factor)), ready=gradient.ready)
                for gradient in measured.gradients
            ),
            "codecs": (*codecs, *(codec for name, codec in scaled.items() if name not in known)),
        }
    )


def _check(run: "RecordedRun") -> None:
    if run.status != "FINISHED":
        raise ValueError(f"--run {run.run_id}: that training has not finished, it is {run.status}")
    for name in _TOLD_BY_ALL:
        if name not in run.parameters:
            raise ValueError(f"--run {run.run_id} is no training: it has no parameter {name}")
    if _RESOLUTION in run.parameters:
        raise ValueError(
            f"--run {run.run_id} was trained with {_RESOLUTION}, so that its steps are of several lengths: "
            "take a training with full images only"
        )
    mode = run.parameters[_MODE]
    if mode not in MODES or not MODES[mode].is_lock_step:
        raise ValueError(f"--run {run.run_id} trained with training.mode={mode}, whose steps are not predicted")
    later = run.later_values
    changed = next(iter(_within(later, _SAME_THROUGHOUT)), None)
    if changed is not None:
        raise ValueError(
            f"--run {run.run_id} was continued with another {changed}, so that its steps are of several lengths: "
            f"{_value(run, changed)}, then {later[changed]}. Take a training without such a change"
        )
    absent = [
        name
        for name in (*PHASES, PARAMETERS)
        if name not in run.metrics or (name in PHASES and not run.curves.get(name))
    ]
    if absent:
        raise ValueError(f"--run {run.run_id} has not recorded {absent[0]}: train again")


def _check_alike(runs: Sequence["RecordedRun"], names: Sequence[str]) -> None:
    """Check that trainings have the same values of these settings and of all settings in these sections."""
    for key in _within({key for run in runs for key in run.parameters}, names):
        for run in runs[1:]:
            before, value = _value(runs[0], key), _value(run, key)
            if value != before:
                raise ValueError(
                    f"--run {runs[0].run_id} and --run {run.run_id} have different {key}, {before} and {value}, so "
                    "that their times do not belong together: take trainings with the same one"
                )


def _within(keys: Collection[str], names: Sequence[str]) -> list[str]:
    """Return the keys that are among the names or in a section among them, in the order of the names."""
    return [key for name in names for key in sorted(keys) if key == name or key.startswith(f"{name}.")]


def _value(run: "RecordedRun", key: str) -> str:
    """Return the value of a setting; if a run does not have it (no effect, null or empty), the default."""
    if key in run.parameters:
        return run.parameters[key]
    field = find(key.split("."), nested(run.parameters))
    default = None if field is None else field.get_default(call_default_factory=True)
    return "null" if default is None else str(default)


def _payload(run: "RecordedRun") -> int:
    return int(run.metrics.get(PAYLOAD, 0)) or int(_FLOAT32_BYTES * run.metrics[PARAMETERS])


def _curve(run: "RecordedRun", phase: str) -> list[float]:
    """Return the seconds by epoch."""
    return [point.value for point in run.curves[f"time/step_{phase}_seconds"]]


def _curve_of_codec(run: "RecordedRun", phase: str) -> list[float]:
    """Return the seconds by epoch, without epochs that contain float32 steps of the warm-up."""
    seconds, warmup = _curve(run, phase), int(_value(run, _WARMUP_STEPS))
    if run.parameters["exchange.codec.name"] == _NO_CODEC:
        return seconds
    begins = [0, *(point.step for point in run.curves[f"time/step_{phase}_seconds"])]
    found = [value for begin, value in zip(begins, seconds, strict=False) if begin >= warmup]
    if not found:
        raise ValueError(
            f"--run {run.run_id} has no epoch without steps in float32, and {_WARMUP_STEPS} asks for {warmup}: "
            "take a longer training"
        )
    return found


def _codec(name: str, runs: Sequence["RecordedRun"]) -> CodecMeasurement:
    """Return the costs of a codec, from all its trainings; the payload of some codecs varies a little between runs."""
    _check_alike(runs, _OF_A_CODEC)
    payload = round(statistics.fmean(_payload(run) for run in runs))
    sparse = () if name == _NO_CODEC else (Message(collective="allreduce", bytes=payload),)
    return CodecMeasurement(
        name=name,
        messages=sparse,
        dense_bytes=0 if sparse else payload,
        encode_seconds=tuple(seconds for run in runs for seconds in _curve_of_codec(run, "encode")),
        decode_seconds=tuple(seconds for run in runs for seconds in _curve_of_codec(run, "decode")),
    )


def _with_collectives_of(measured: CodecMeasurement, recorded: CodecMeasurement) -> CodecMeasurement:
    """Return the recorded codec, which has no collectives, with the measured collectives and the recorded payload."""
    alike = _scaled(measured, _payload_of(recorded) / _payload_of(measured))
    return recorded.model_copy(update={"messages": alike.messages, "dense_bytes": alike.dense_bytes})


def _payload_of(codec: CodecMeasurement) -> float:
    """Return the bytes of an allreduce of the same cost: an alltoall or allgather sends a byte once and not twice."""
    return codec.dense_bytes + sum(
        message.bytes if message.collective == "allreduce" else message.bytes / 2 for message in codec.messages
    )


def _scaled(codec: CodecMeasurement, factor: float) -> CodecMeasurement:
    return codec.model_copy(
        update={
            "messages": tuple(
                Message(collective=message.collective, bytes=max(1, round(message.bytes * factor)))
                for message in codec.messages
            ),
            "dense_bytes": round(codec.dense_bytes * factor),
            "encode_seconds": tuple(seconds * factor for seconds in codec.encode_seconds),
            "decode_seconds": tuple(seconds * factor for seconds in codec.decode_seconds),
        }
    )
