"""One training in a comparison, small enough for a line of a file, and the files that `compare --save` wrote."""

import math
import statistics
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from itertools import accumulate, pairwise
from pathlib import Path
from typing import Literal

from pydantic import BaseModel, ConfigDict, ValidationError, model_validator

from conf.sections.dataset import ReaderConfig
from pipelines.storage.whole_files import os_errors_as, write_whole
from pipelines.tracking.metrics import AVERAGED_GROUP, VALIDATION_GROUP, is_lower_better
from pipelines.tracking.store.recorded import DIVERGED_TAG, RecordedRun

EPOCH, STEP, SECONDS, PAYLOAD = "epoch", "step", "seconds", "payload_bytes"
"""Columns of a history: epochs, optimizer steps, seconds of training and payload bytes of one rank since the start."""
SCORES = ("val/top_1", "val/f1_micro", "val/loss")
"""Default metrics of a comparison: the first one that the trainings have is used."""
CURVE_GROUPS = (VALIDATION_GROUP, AVERAGED_GROUP)
_TOTAL_PAYLOAD = "exchange/payload_bytes_total"
CURVES = ("train/loss", "speed/images_per_second", _TOTAL_PAYLOAD)
SEED = "training.seed"
_SECTIONS = ("input", "model", "warm_start", "optimizer", "schedule", "exchange", "training")
_FURTHER = (
    "archive.kind",
    "dataset_fingerprint",
    "global_batch_size",
    "micro_batches_per_step",
    "launch.num_workers",
    "launch.gpus_per_worker",
    "launch.threads_per_worker",
)
DEFAULT_READER = {f"reader.{key}": str(ReaderConfig.default(key)) for key in ("name", "cache_limit_gib")}
"""Settings that may change the order of samples, and their defaults, which are left out."""
# These settings are locations, or (two of them) only factors of the global batch size.
_LEFT_OUT = (
    "training.output",
    "training.resume_run",
    "training.checkpoint_every_steps",
    "training.trace_steps",
    "training.tensorflow_profiler",
    "training.global_batch_size",
    "training.accumulation_steps",
)

Column = list[float | None]

SAVED_MARK = b'"runs": ['
"""Bytes near the beginning of every file of trainings."""


class StoredModel(BaseModel):
    """The base of what files of comparisons and grids hold: readers ignore unknown keys."""

    model_config = ConfigDict(frozen=True, extra="ignore", strict=True)


class ComparedRun(StoredModel):
    """One training."""

    run_id: str
    name: str
    source: str
    """Experiment or file that contains the training."""
    status: str
    """Status in MLflow: FINISHED, FAILED, KILLED or RUNNING."""
    started: str
    """Date and time in UTC."""
    diverged: str = ""
    """Rank and step at which loss, gradient or weights became non-finite; empty if they stayed finite."""
    chance_loss: float | None = None
    """Training loss of equal probabilities for all classes; None: the classes or the loss are not known."""
    settings: dict[str, str]
    """Settings that can change the result, by key; unset ones are left out."""
    metrics: dict[str, float]
    """Last value of each metric."""
    history: dict[str, Column]
    """Columns of equal length with a row per epoch: `EPOCH`, `STEP`, `SECONDS`, `PAYLOAD` and metrics."""

    @model_validator(mode="after")
    def _columns_are_equally_long(self) -> "ComparedRun":
        lengths = {len(column) for column in self.history.values()}
        if len(lengths) > 1 or not {EPOCH, STEP} <= self.history.keys():
            raise ValueError(f"the columns of the history of run {self.run_id} do not fit together")
        return self

    @property
    def dataset(self) -> str:
        """The fingerprint of the dataset."""
        return self.settings.get("dataset_fingerprint", "")

    @property
    def is_diverged(self) -> bool:
        """Whether the run ended because it diverged; a run that was resumed and finished did not."""
        return bool(self.diverged) and self.status != "FINISHED"


def compared_run(run: RecordedRun, source: str, *, history_rows: int | None = None) -> ComparedRun:
    """Return the data of a recorded run that a comparison needs.

    Args:
        run: The run.
        source: Experiment or file that contains the run.
        history_rows: Number of evenly spaced rows of the history to keep. Rows with the best value of a score or loss,
            or in which the usual score rises above all before, also stay. None: all rows.
    """
    return ComparedRun(
        run_id=run.run_id,
        name=run.name,
        source=source,
        status=run.status,
        started=datetime.fromtimestamp(run.started / 1000, UTC).strftime("%Y-%m-%d %H:%M:%S"),
        diverged=run.tags.get(DIVERGED_TAG, ""),
        chance_loss=_chance_loss(run),
        settings=decisive_settings(_settings(run)),
        metrics={
            name: _short(value)
            for name, value in sorted(run.metrics.items())
            if math.isfinite(value) and not name.startswith("system/")
        },
        history=_thinned(_history(run), history_rows),
    )


def _chance_loss(run: RecordedRun) -> float | None:
    """Return the cross-entropy of equal probabilities: ln(classes), or ln 2 for each class if there are several labels.

    Label smoothing does not change it. With class weights or another loss it is not known.
    """
    loss = run.parameters.get("training.loss.name", "cross_entropy")
    if (
        not run.dataset
        or loss != "cross_entropy"
        or any(key.startswith("training.class_weights") for key in run.parameters)
    ):
        return None
    return math.log(2 if run.dataset["task"] == "multi_label" else run.dataset["classes"])


def _settings(run: RecordedRun) -> dict[str, str]:
    """Return the settings of a run. A setting that a resume changed has all its values: `0.1, 0.5 from step 16`."""
    first = run.parameters
    return {**first, **{key: ", ".join(filter(None, [first.get(key), text])) for key, text in run.later_values.items()}}


def decisive_settings(settings: Mapping[str, str]) -> dict[str, str]:
    """Return the settings that can change the result of a training, without unset ones."""
    return {
        key: value
        for key, value in sorted(settings.items())
        if (key.partition(".")[0] in _SECTIONS or key in _FURTHER or key in DEFAULT_READER)
        and key not in _LEFT_OUT
        and value not in ("None", "", DEFAULT_READER.get(key))
    }


def best_row(values: Sequence[float | None], metric: str) -> int | None:
    """Return the index of the best value of a metric, the first one if equal; None if there is none."""
    rows = [row for row, value in enumerate(values) if value is not None]
    sign = 1 if is_lower_better(metric) else -1
    return min(rows, key=lambda row: sign * (values[row] or 0.0), default=None)


def _history(run: RecordedRun) -> dict[str, Column]:
    """Return the columns by epoch; epochs end at the steps of the training loss."""
    steps = [point.step for point in run.curves.get("train/loss", [])]

    def at_ends(name: str) -> Column:
        values = {point.step: point.value for point in run.curves.get(name, [])}
        return [_finite(values.get(step)) for step in steps]

    columns: dict[str, Column] = {
        EPOCH: [float(row + 1) for row in range(len(steps))],
        STEP: [float(step) for step in steps],
        SECONDS: _seconds(run, steps),
        PAYLOAD: at_ends(_TOTAL_PAYLOAD),
        **{name: at_ends(name) for name in run.curves if _is_value(name)},
    }
    return {name: [None if value is None else _short(value) for value in column] for name, column in columns.items()}


def _is_value(name: str) -> bool:
    """Return whether a column is the training loss or a score."""
    return name == "train/loss" or name.partition("/")[0] in CURVE_GROUPS


def _seconds(run: RecordedRun, steps: Sequence[int]) -> Column:
    """Return the seconds of training at each epoch's end (samples / rate), without start, evaluation and interruptions.

    An epoch has no rate if it was resumed after its last step; then the median rate is used.
    """
    batch = float(run.parameters.get("global_batch_size", "nan"))
    rates = {point.step: point.value for point in run.curves.get("speed/images_per_second", []) if point.value > 0}
    usual = statistics.median(rates.values()) if rates else math.nan
    spans = [(step - before) * batch / rates.get(step, usual) for before, step in pairwise([0, *steps])]
    return [_finite(total) for total in accumulate(spans)]


def _thinned(history: dict[str, Column], rows: int | None) -> dict[str, Column]:
    count = len(history[STEP])
    if rows is None or count <= rows:
        return history
    # Curves begin at the first epoch.
    chosen = {0, *(round((number + 1) * count / rows) - 1 for number in range(rows))}
    for name, column in history.items():
        if _is_value(name) and (best := best_row(column, name)) is not None:
            chosen.add(best)
        if name in SCORES and not is_lower_better(name):  # keeps exact when a score was first reached
            chosen |= _rises(column)
    return {name: [column[row] for row in sorted(chosen)] for name, column in history.items()}


def _rises(column: Column) -> set[int]:
    """Return the rows with a higher value than all before."""
    values = [-math.inf if value is None else value for value in column]
    before = accumulate([-math.inf, *values], max)
    return {row for row, (value, highest) in enumerate(zip(values, before, strict=False)) if value > highest}


def _finite(value: float | None) -> float | None:
    return value if value is not None and math.isfinite(value) else None


def _short(value: float) -> float:
    """Return the value with the digits that a comparison shows; whole numbers stay unchanged."""
    return value if value == int(value) else float(f"{value:.5g}")


class _SavedRuns(StoredModel):
    format_version: Literal[1]
    runs: list[ComparedRun]


def save_runs(runs: Sequence[ComparedRun], path: Path) -> None:
    """Write trainings as JSON atomically.

    Raises:
        ValueError: The file cannot be written, or it exists with other content.
    """
    if path.is_file() and path.stat().st_size:
        read_runs(path)  # refuses another kind of file, such as the results of a grid
    lines = ",\n".join(run.model_dump_json() for run in runs)
    write_text(path, f'{{"format_version": 1, "runs": [\n{lines}\n]}}\n')


def read_runs(path: Path) -> list[ComparedRun]:
    """Read a file of `save_runs`.

    Raises:
        FileNotFoundError: There is no such file.
        ValueError: The file is of another kind or damaged.
    """
    with os_errors_as(FileNotFoundError, f"{path} cannot be read"):
        text = path.read_bytes()
    try:
        saved = _SavedRuns.model_validate_json(text)
    except ValidationError as error:
        raise ValueError(f"{path} is no file of `groundswell compare --save`: {problem_of(error)}") from None
    return [run.model_copy(update={"source": f"{path.name}: {run.source}"}) for run in saved.runs]


def write_text(path: Path, text: str) -> None:
    """Write a file atomically.

    Raises:
        ValueError: The file cannot be written.
    """
    with os_errors_as(ValueError, f"{path} cannot be written"):
        write_whole(path, text.encode())


def problem_of(error: ValidationError) -> str:
    """Return the first problem of a file, in one line."""
    first = error.errors()[0]
    place = ".".join(map(str, first["loc"]))
    return f"{place}: {first['msg']}" if place else str(first["msg"])
