"""Keras models: logged to a run with their signature, and loaded back."""

import logging
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import mlflow
from mlflow import MlflowClient
from mlflow.entities import LoggedModelStatus
from mlflow.models import Model, ModelSignature
from mlflow.types import Schema, TensorSpec

from pipelines.tracking.store import TrackedRun, TrackingError, readable_errors, reason_of, tracking_uri

if TYPE_CHECKING:
    import keras

MODEL = "model"
"""Name within its run of the model that training ends with; it is what a registry gets."""
AVERAGED_MODEL = "model_ema"
"""Name of the same model with averaged weights."""
_log = logging.getLogger(__name__)
_STEP = "optimizer_steps"


def log_model(
    run: TrackedRun,
    model: "keras.Model",
    metadata: Mapping[str, Any],
    registered_name: str | None,
    *,
    step: int,
    name: str = MODEL,
) -> str:
    """Log a Keras model with its signature, once for each name and step; return the URI to load it by.

    Args:
        run: The run that made the model.
        model: Saved with its preprocessing layers.
        metadata: What `load_model` returns beside the model.
        registered_name: Name in the registry; None: the model is not registered.
        step: Optimizer steps that the model has seen. The run's metrics of this step are shown with the model.
        name: Name of the model within the run.

    Raises:
        TrackingError: The store did not take the model.
    """
    try:
        with _using(run.uri):
            model_id = _logged_before(run, step, name)
            if model_id is None:
                _give_up_unfinished(run)
                model_id = _log_anew(run, model, metadata, step, name)
            if registered_name is not None:
                _register(run, model_id, registered_name)
    except Exception as error:  # of MLflow, its HTTP and its storage libraries, each with errors of its own
        _log.warning("MLflow did not take the model", exc_info=True)
        raise TrackingError(reason_of(error)) from error
    return f"runs:/{run.run_id}/{name}"


def _log_anew(run: TrackedRun, model: "keras.Model", metadata: Mapping[str, Any], step: int, name: str) -> str:
    import keras

    client = MlflowClient(run.uri)
    made_by = client.get_run(run.run_id)
    logged = client.create_logged_model(
        made_by.info.experiment_id, name=name, source_run_id=run.run_id, params=made_by.data.params
    )
    # Not `mlflow.keras.log_model`: it wants an active run, whose end would set the run to finished.
    Model.log(
        artifact_path=None,
        flavor=mlflow.keras,
        model_id=logged.model_id,
        run_id=run.run_id,
        step=step,
        model=model,
        signature=_signature(model),
        metadata={**metadata, _STEP: step},
        # Stated, not inferred: inference would load the model in another process.
        pip_requirements=[f"keras=={keras.__version__}", "tensorflow"],
    )
    return str(logged.model_id)


def _logged_before(run: TrackedRun, step: int, name: str) -> str | None:
    """Identifier of a complete model of that name that an earlier attempt logged after the same steps."""
    client = MlflowClient(run.uri)
    outputs = client.get_run(run.run_id).outputs
    for output in outputs.model_outputs if outputs else []:
        if output.step == step:
            logged = client.get_logged_model(output.model_id)
            if (logged.name, logged.status) == (name, "READY"):
                return str(output.model_id)
    return None


def _give_up_unfinished(run: TrackedRun) -> None:
    """Set to failed what an attempt that died while it logged a model has left, which MLflow would show as pending."""
    client = MlflowClient(run.uri)
    outputs = client.get_run(run.run_id).outputs
    for output in outputs.model_outputs if outputs else []:
        if client.get_logged_model(output.model_id).status == LoggedModelStatus.PENDING:
            client.finalize_logged_model(output.model_id, LoggedModelStatus.FAILED)


def _register(run: TrackedRun, model_id: str, name: str) -> None:
    source = f"models:/{model_id}"
    versions = MlflowClient(run.uri).search_model_versions(f"name = '{name}'")
    if source not in {version.source for version in versions}:
        mlflow.register_model(source, name)


def load_model(uri: str) -> tuple["keras.Model", dict[str, Any]]:
    """Load a logged model (`runs:/...` or `models:/...`) and its metadata.

    Raises:
        ValueError: The store has no such model.
        RuntimeError: The tracking server cannot be reached.
    """
    with _using(tracking_uri()), readable_errors(uri):
        return mlflow.keras.load_model(uri), dict(model_metadata(uri))


def model_metadata(uri: str) -> dict[str, Any]:
    """Return what was logged beside the model: classes, task, dataset fingerprint, run.

    Raises:
        ValueError: The store has no such model.
        RuntimeError: The tracking server cannot be reached.
    """
    with _using(tracking_uri()), readable_errors(uri):
        info = mlflow.models.get_model_info(uri)
        return {**(info.metadata or {}), "run_id": info.run_id}


@contextmanager
def _using(uri: str) -> Iterator[None]:
    """Set MLflow's own store, which MLflow keeps in the environment too, and leave both as they were."""
    before = os.environ.get("MLFLOW_TRACKING_URI")
    mlflow.set_tracking_uri(uri)
    try:
        yield
    finally:
        mlflow.set_tracking_uri(None)  # type: ignore[arg-type]  # from now on MLflow asks the environment again
        if before is None:
            os.environ.pop("MLFLOW_TRACKING_URI", None)
        else:
            os.environ["MLFLOW_TRACKING_URI"] = before


def _signature(model: "keras.Model") -> ModelSignature:
    def specification(tensor: Any) -> TensorSpec:
        import numpy as np

        return TensorSpec(np.dtype(tensor.dtype), (-1, *tensor.shape[1:]), tensor.name)

    return ModelSignature(
        inputs=Schema([specification(tensor) for tensor in model.inputs]),
        outputs=Schema([TensorSpec(specification(model.outputs[0]).type, (-1, *model.outputs[0].shape[1:]))]),
    )
