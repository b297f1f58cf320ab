"""A model as MLflow 2 stores it: a folder among the artifacts of the run that created it."""

from collections.abc import Mapping
from typing import Any

import mlflow
from mlflow import MlflowClient
from mlflow.entities.model_registry import ModelVersion
from mlflow.models import Model

from pipelines.tracking.models.model_metadata import CARD_FILE, Card
from pipelines.tracking.store.store import TrackedRun

_STEP = "optimizer_steps"
"""Tag of a version in the registry: the optimizer steps that its model has seen."""
_COMPLETE = "groundswell.logged"
"""Tag of the run that is set when a model's folder is complete; its value is the number of steps."""


def log_once(
    run: TrackedRun, content: Mapping[str, Any], registered_name: str | None, *, step: int, name: str, card: Card
) -> tuple[str, ModelVersion | None]:
    """Log a model unless an earlier attempt has logged that name after the same steps, and register it.

    Returns the model's name in a URI of its run, and the version in the registry.

    A model of more steps replaces an earlier one, because the folder has the same name.

    Args:
        run: The run that created the model.
        content: Flavor, model, signature, metadata and requirements.
        registered_name: Name in the registry; None: the model is not registered.
        step: Optimizer steps that the model has seen.
        name: Name of the model within the run.
        card: Returns the text of the model card for the model's metrics.
    """
    client = MlflowClient(run.uri)
    tag = f"{_COMPLETE}.{name}"
    if client.get_run(run.run_id).data.tags.get(tag) != str(step):
        # Not `mlflow.keras.log_model`: it needs an active run, whose end would set the run to finished.
        Model.log(artifact_path=name, run_id=run.run_id, **content)
        client.log_text(run.run_id, card(client.get_run(run.run_id).data.metrics), f"{name}/{CARD_FILE}")
        client.set_tag(run.run_id, tag, str(step))
    if registered_name is None:
        return name, None
    for version in client.search_model_versions(f"name = '{registered_name}'"):
        if (version.run_id, version.tags.get(_STEP)) == (run.run_id, str(step)):
            return name, version
    return name, mlflow.register_model(f"runs:/{run.run_id}/{name}", registered_name, tags={_STEP: str(step)})


def resolved(uri: str, store: str) -> str:
    """Return an address of a model unchanged: MLflow 2 knows `runs:/<run id>/model`."""
    return uri


def beside(uri: str, name: str) -> str:
    """Return the address of another model of a run, from the address of the final model of training."""
    return f"{uri.rpartition('/')[0]}/{name}"
