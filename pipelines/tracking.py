"""The only module that knows MLflow: runs made on the driver, written by rank 0, models loaded back."""

import logging
import os
import subprocess
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import mlflow
from mlflow import MlflowClient
from mlflow.entities import Metric, Param
from mlflow.exceptions import MlflowException
from mlflow.models import ModelSignature
from mlflow.types import Schema, TensorSpec

from pipelines.locations import redacted

if TYPE_CHECKING:
    import keras
    from matplotlib.figure import Figure

_DEFAULT_FOLDER = "mlruns"
# One bar per small file, on every load, would drown what the job says.
os.environ.setdefault("MLFLOW_ENABLE_ARTIFACTS_PROGRESS_BAR", "false")
_METRICS_PER_BATCH = 1000
_PARAMS_PER_BATCH = 100
_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class TrackedRun:
    """A run and the store that holds it; small, travels to the workers."""

    uri: str
    run_id: str


def tracking_uri() -> str:
    """`MLFLOW_TRACKING_URI`, or a sqlite file under `mlruns/` in the working directory."""
    return os.environ.get("MLFLOW_TRACKING_URI") or _default_uri()


def worker_environment() -> dict[str, str]:
    """What a worker needs to write to the driver's store: its address and, where it asks for them, credentials."""
    settings = {name: value for name, value in os.environ.items() if name.startswith("MLFLOW_")}
    return {**settings, "MLFLOW_TRACKING_URI": tracking_uri()}


def _default_uri() -> str:
    return f"sqlite:///{Path(_DEFAULT_FOLDER).absolute()}/mlflow.db"


def start_run(experiment: str, name: str | None, parameters: Mapping[str, Any], tags: Mapping[str, str]) -> TrackedRun:
    """Create a run, its experiment too where it is new.

    Raises:
        RuntimeError: The tracking server cannot be reached.
    """
    uri = tracking_uri()
    with _readable_errors(uri):
        client = MlflowClient(uri)
        run = client.create_run(_experiment_id(client, uri, experiment), run_name=name, tags=dict(tags))
        run_id: str = run.info.run_id
        values = [Param(key, str(value)) for key, value in parameters.items()]
        for start in range(0, len(values), _PARAMS_PER_BATCH):
            client.log_batch(run_id, params=values[start : start + _PARAMS_PER_BATCH])
    return TrackedRun(uri, run_id)


def continue_run(run_id: str) -> TrackedRun:
    """Set an existing run to running again.

    Raises:
        ValueError: The store has no such run.
        RuntimeError: The tracking server cannot be reached.
    """
    uri = tracking_uri()
    with _readable_errors(uri):
        MlflowClient(uri).update_run(run_id, status="RUNNING")
    return TrackedRun(uri, run_id)


def end_run(run: TrackedRun, status: Literal["FINISHED", "FAILED", "KILLED"]) -> None:
    """Close a run."""
    with _training_goes_on():
        MlflowClient(run.uri).set_terminated(run.run_id, status)


def show_command(run: TrackedRun) -> str:
    """What to type to look at a run."""
    if run.uri.startswith(("http://", "https://")):
        return f"open {redacted(run.uri)}"
    if run.uri == _default_uri() and Path("Makefile").is_file():
        return "make ui"
    return f"mlflow ui --host 127.0.0.1 --backend-store-uri {redacted(run.uri)}"


def is_file_store(uri: str) -> bool:
    """Whether only this machine can write to a store."""
    return "://" not in uri or uri.startswith(("sqlite:", "file:"))


class RunWriter:
    """Writes to one run; used by rank 0.

    A write that fails is a warning and not the end of the training, but for the model's.
    """

    def __init__(self, run: TrackedRun) -> None:
        """Connect."""
        self._run = run
        self._client = MlflowClient(run.uri)

    def metrics(self, values: Mapping[str, float], step: int) -> None:
        """One value per metric."""
        self.curves({name: [(step, value)] for name, value in values.items()})

    def curves(self, points: Mapping[str, Sequence[tuple[int, float]]]) -> None:
        """Several `(step, value)` per metric."""
        now = time.time_ns() // 1_000_000
        metrics = [Metric(name, float(value), now, step) for name, series in points.items() for step, value in series]
        with _training_goes_on():
            for start in range(0, len(metrics), _METRICS_PER_BATCH):
                self._client.log_batch(self._run.run_id, metrics=metrics[start : start + _METRICS_PER_BATCH])

    def tags(self, values: Mapping[str, str]) -> None:
        """Tags of the run."""
        with _training_goes_on():
            for name, value in values.items():
                self._client.set_tag(self._run.run_id, name, value)

    def text(self, text: str, path: str) -> None:
        """A text artifact."""
        with _training_goes_on():
            self._client.log_text(self._run.run_id, text, path)

    def table(self, rows: Sequence[Mapping[str, Any]], path: str) -> None:
        """A table artifact, JSON as MLflow's own tables; replaces what was there, where `log_table` would append."""
        names = list(rows[0])
        data = [[None if row[name] != row[name] else row[name] for name in names] for row in rows]
        with _training_goes_on():
            self._client.log_dict(self._run.run_id, {"columns": names, "data": data}, path)

    def figure(self, figure: "Figure", path: str) -> None:
        """A PNG artifact."""
        with _training_goes_on():
            self._client.log_figure(self._run.run_id, figure, path)

    def folder(self, folder: Path, path: str) -> None:
        """All files of a folder as artifacts."""
        with _training_goes_on():
            self._client.log_artifacts(self._run.run_id, str(folder), path)

    def model(self, model: "keras.Model", metadata: Mapping[str, Any], registered_name: str | None) -> str:
        """Log a Keras model with its signature; the URI to load it by."""
        import keras

        mlflow.set_tracking_uri(self._run.uri)
        with mlflow.start_run(run_id=self._run.run_id, nested=True):
            mlflow.keras.log_model(
                model,
                name="model",
                signature=_signature(model),
                metadata=dict(metadata),
                registered_model_name=registered_name,
                # Stated, not inferred: inference would load the model in another process.
                pip_requirements=[f"keras=={keras.__version__}", "tensorflow"],
            )
        return f"runs:/{self._run.run_id}/model"


def load_model(uri: str) -> tuple["keras.Model", dict[str, Any]]:
    """Load a logged model (`runs:/...` or `models:/...`) and its metadata.

    Raises:
        ValueError: The store has no such model.
    """
    mlflow.set_tracking_uri(tracking_uri())
    with _readable_errors(uri):
        return mlflow.keras.load_model(uri), dict(model_metadata(uri))


def model_metadata(uri: str) -> dict[str, Any]:
    """What was logged beside the model: classes, task, dataset fingerprint, run.

    Raises:
        ValueError: The store has no such model.
    """
    mlflow.set_tracking_uri(tracking_uri())
    with _readable_errors(uri):
        info = mlflow.models.get_model_info(uri)
        return {**(info.metadata or {}), "run_id": info.run_id}


def git_revision(folder: Path) -> str:
    """Commit of the code, with `-dirty` where it was changed; `unknown` outside a checkout."""
    command = ["git", "-C", str(folder), "describe", "--always", "--dirty", "--abbrev=40", "--match="]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=10, check=True)
    except (OSError, subprocess.SubprocessError):
        return "unknown"
    return done.stdout.strip()


def _experiment_id(client: MlflowClient, uri: str, name: str) -> str:
    experiment = client.get_experiment_by_name(name)
    if experiment is not None:
        return str(experiment.experiment_id)
    local = Path(uri.removeprefix("sqlite:///")).parent / "artifacts" if uri.startswith("sqlite:///") else None
    # Beside the database: MLflow's own default would follow the working directory of whoever asks.
    return str(client.create_experiment(name, artifact_location=local.as_uri() if local else None))


def _signature(model: "keras.Model") -> ModelSignature:
    def specification(tensor: Any) -> TensorSpec:
        import numpy as np

        return TensorSpec(np.dtype(tensor.dtype), (-1, *tensor.shape[1:]), tensor.name)

    return ModelSignature(
        inputs=Schema([specification(tensor) for tensor in model.inputs]),
        outputs=Schema([TensorSpec(specification(model.outputs[0]).type, (-1, *model.outputs[0].shape[1:]))]),
    )


@contextmanager
def _training_goes_on() -> Iterator[None]:
    try:
        yield
    except (MlflowException, OSError) as error:  # requests' errors are OSErrors
        _log.warning("MLflow did not take a write: %s", redacted(str(error)[:300]))


@contextmanager
def _readable_errors(what: str) -> Iterator[None]:
    if what.startswith("sqlite:///"):
        Path(what.removeprefix("sqlite:///")).parent.mkdir(parents=True, exist_ok=True)
    try:
        yield
    except MlflowException as error:
        reason = redacted(str(error).splitlines()[0])
        if reason.startswith("API request to"):
            raise RuntimeError(f"no answer from MLflow, see MLFLOW_TRACKING_URI: {reason[:300]}") from None
        raise ValueError(f"{redacted(what)}: {reason}") from None
