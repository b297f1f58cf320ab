"""Measurements from trainings of this project: the phases of a step that a run records in every epoch."""

from collections import defaultdict
from collections.abc import Sequence
from typing import TYPE_CHECKING

from conf.modes import SynchronousConfig
from pipelines.scaling.collectives import expected_maximum
from pipelines.scaling.measurements import (
    CodecMeasurement,
    CollectivePoint,
    ComputePoint,
    Gradient,
    LinkMeasurement,
    Measurements,
    Message,
)

if TYPE_CHECKING:
    from pipelines.tracking.recorded import RecordedRun

PHASES = tuple(f"time/step_{name}_seconds" for name in ("compute", "encode", "wire", "decode", "optimizer", "waiting"))
SPEED = "speed/images_per_second"
CURVES = (*PHASES, SPEED)
"""The metrics whose curves are needed; runs without a curve of `SPEED` are taken too."""
PAYLOAD, PARAMETERS = "exchange/payload_bytes", "summary/parameters"
RECORDED_LINK = "recorded"
"""Name of the link on which the trainings ran."""
_FLOAT32_BYTES = 4
_NO_CODEC = "none"
_MODE = "training.mode.name"
_PREDICTED_MODE = SynchronousConfig().name
"""The mode in which a step waits for one exchange of all ranks; runs of versions that had no other do not name it."""
_SAME_THROUGHOUT = ("launch.num_workers", "global_batch_size", "exchange.codec.name")


def measurements_of(runs: Sequence["RecordedRun"]) -> Measurements:
    """Return what finished trainings of one model have recorded.

    A step's computing is its phases `compute` and `optimizer`; waiting for input is left out. What is sent is counted
    as one allreduce of the payload, whose time is the phase `wire`: that which the backward pass does not hide. So
    these measurements know of no overlap, and all communication that they predict is exposed.

    Args:
        runs: Recorded runs, at least one; with `CURVES` as curves.

    Raises:
        ValueError: A run has not finished, lacks a metric, has steps of several lengths or of a mode that is not
            predicted, or trains another model than the others.
    """
    for run in runs:
        _check(run)
    sizes = {run.metrics[PARAMETERS] for run in runs}
    if len(sizes) > 1:
        raise ValueError(f"--run: the trainings are of different models, with {sorted(map(int, sizes))} parameters")
    gradient_bytes = int(_FLOAT32_BYTES * sizes.pop())
    compute: dict[int, list[float]] = defaultdict(list)
    codecs: dict[str, CodecMeasurement] = {}
    points, deviations = [], []
    for run in runs:
        workers = int(run.parameters["launch.num_workers"])
        computing = [a + b for a, b in zip(_curve(run, "compute"), _curve(run, "optimizer"), strict=True)]
        compute[int(run.parameters["global_batch_size"]) // workers] += computing
        codec = run.parameters["exchange.codec.name"]
        payload = int(run.metrics.get(PAYLOAD, 0)) or gradient_bytes
        codecs[codec] = _codec(run, codec, payload)
        wire = tuple(seconds for seconds in _curve(run, "wire") if seconds > 0)
        if workers > 1 and wire:
            points.append(
                CollectivePoint(link=RECORDED_LINK, collective="allreduce", ranks=workers, bytes=payload, seconds=wire)
            )
            waiting = sum(_curve(run, "waiting")) / sum(computing)
            deviations.append(max(0.0, waiting) / expected_maximum(workers))
    link = LinkMeasurement(name=RECORDED_LINK, bytes_per_second=None, latency_seconds=(0.0,))
    return Measurements(
        format_version=1,
        machine=", ".join(f"run {run.run_id}" for run in runs),
        measured="recorded by the runs",
        model=runs[0].parameters.get("model.name", "model"),
        compute=tuple(ComputePoint(batch_size=batch, seconds=tuple(compute[batch])) for batch in sorted(compute)),
        straggler_deviation=sum(deviations) / len(deviations) if deviations else 0.0,
        gradients=(Gradient(bytes=gradient_bytes, ready=1.0),),
        links=(link,) if points else (),
        collectives=tuple(points),
        codecs=tuple(codecs.values()),
    )


def combined(measured: Measurements, recorded: Measurements) -> Measurements:
    """Return the model of the trainings on the links of the other measurements.

    Computing, stragglers and the codecs of the trainings are taken from them. Codecs that they did not use, and the
    order in which gradients become ready, are those measured, in proportion to the bytes of the gradients.
    """
    factor = recorded.gradient_bytes / measured.gradient_bytes
    known = {codec.name for codec in recorded.codecs}
    # What was recorded says nothing of the collectives of a codec: the measured messages do where they are there.
    scaled = {codec.name: _scaled(codec, factor) for codec in measured.codecs}
    codecs = [
        codec.model_copy(
            update={"messages": scaled[codec.name].messages, "dense_bytes": scaled[codec.name].dense_bytes}
            if codec.name in scaled
            else {}
        )
        for codec in recorded.codecs
    ]
    gradients = tuple(
        Gradient(bytes=max(1, round(gradient.bytes * factor)), ready=gradient.ready) for gradient in measured.gradients
    )
    return measured.model_copy(
        update={
            "machine": f"{measured.machine}; {recorded.machine}",
            "model": recorded.model,
            "compute": recorded.compute,
            "straggler_deviation": recorded.straggler_deviation,
            "gradients": gradients,
            "codecs": (*codecs, *(codec for name, codec in scaled.items() if name not in known)),
        }
    )


def _check(run: "RecordedRun") -> None:
    if run.status != "FINISHED":
        raise ValueError(f"--run {run.run_id}: that training has not finished, it is {run.status}")
    for name in _SAME_THROUGHOUT:
        if name not in run.parameters:
            raise ValueError(f"--run {run.run_id} is no training: it has no parameter {name}")
    if "input.resolution_schedule" in run.parameters:
        raise ValueError(
            f"--run {run.run_id} was trained with input.resolution_schedule, so that its steps are of several lengths: "
            "take a training with full images only"
        )
    mode = run.parameters.get(_MODE, _PREDICTED_MODE)
    if mode != _PREDICTED_MODE:
        raise ValueError(f"--run {run.run_id} trained with training.mode={mode}, whose steps are not predicted")
    # An estimate from a file needs no MLflow, which this imports.
    from pipelines.tracking.recorded import CHANGED_PREFIX

    changed = next((key for key in _SAME_THROUGHOUT if f"{CHANGED_PREFIX}{key}" in run.tags), None)
    if changed is not None:
        raise ValueError(
            f"--run {run.run_id} was continued with another {changed}, so that its steps are of several lengths: take "
            "a training without such a change"
        )
    absent = [
        name
        for name in (*PHASES, PARAMETERS)
        if name not in run.metrics or (name in PHASES and not run.curves.get(name))
    ]
    if absent:
        raise ValueError(f"--run {run.run_id} has not recorded {absent[0]}: train again with this version")


def _curve(run: "RecordedRun", phase: str) -> list[float]:
    """Seconds by epoch; earlier versions have recorded some for epochs that were resumed after their last step."""
    without_steps = {point.step for point in run.curves.get(SPEED, []) if point.value == 0}
    curve = run.curves[f"time/step_{phase}_seconds"]
    return [point.value for point in curve if point.step not in without_steps]


def _codec(run: "RecordedRun", name: str, payload: int) -> CodecMeasurement:
    sparse = () if name == _NO_CODEC else (Message(collective="allreduce", bytes=payload),)
    return CodecMeasurement(
        name=name,
        messages=sparse,
        dense_bytes=0 if sparse else payload,
        encode_seconds=tuple(_curve(run, "encode")),
        decode_seconds=tuple(_curve(run, "decode")),
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
