"""Functions that log Keras models to a run with their signature, and load them."""

import functools
import logging
import os
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import mlflow
from mlflow import MlflowClient
from mlflow.models import Model, ModelSignature
from mlflow.types import Schema, TensorSpec

from pipelines.storage.locations import redacted_traceback
from pipelines.tracking.models.model_metadata import ModelMetadata, model_card
from pipelines.tracking.models.registry import Promotion, name_in, promote, registry_client, registry_uri
from pipelines.tracking.store.private import chosen_registry, chosen_store
from pipelines.tracking.store.store import (
    TrackedRun,
    TrackingError,
    readable_errors,
    reason_of,
    short_waits,
    tracking_uri,
)

if hasattr(MlflowClient, "create_logged_model"):
    from pipelines.tracking.models.logged_models import beside, log_once, resolved
else:  # MLflow 2
    from pipelines.tracking.models.run_models import beside, log_once, resolved

if TYPE_CHECKING:
    import keras
    from numpy.typing import NDArray

MODEL = "model"
"""Name of the final model of training within its run; a registry gets this model.

`runs:/<run id>/model` is its address for all functions here and in `served`. MLflow 3 itself uses the name of the run,
which is part of the address that `log_model` returns.
"""
AVERAGED_MODEL = "model_ema"
"""Name of the same model with averaged weights."""
_log = logging.getLogger(__name__)


def log_model(
    run: TrackedRun,
    model: "keras.Model",
    metadata: ModelMetadata,
    registered_name: str | None,
    *,
    step: int,
    name: str = MODEL,
    promotion: Promotion | None = None,
    example: "Mapping[str, NDArray[Any]] | None" = None,
) -> str:
    """Log a Keras model with its signature, once for each name and step; return its URI, which plain MLflow also loads.

    Args:
        run: The run that created the model.
        model: The model, saved with its preprocessing layers.
        metadata: Metadata that `load_model` will return; `step` replaces its `optimizer_steps`.
        registered_name: Name in the registry; None: the model is not registered.
        step: Optimizer steps that the model has seen. The run's metrics of this step are shown with the model.
        name: Name of the model within the run.
        promotion: The rule for the registered version to become the champion; None: it gets no alias.
        example: Image groups of one sample, `(1, height, width, bands)`, stored with the model; None: there is none.

    Raises:
        TrackingError: The store did not take the model.
    """
    try:
        with using_store(run.uri, registered_name):
            import keras

            content = {
                "flavor": _Flavor,
                "model": model,
                "signature": _signature(model),
                "input_example": None if example is None else dict(example),
                "metadata": replace(metadata, optimizer_steps=step).as_json(),
                # MLflow's inference of requirements would load the model in another process.
                "pip_requirements": [f"keras=={keras.__version__}", "tensorflow"],
                # The validation would load the model and predict the example, only to warn.
                "validate_serving_input": False,
            }
            parameters = MlflowClient(run.uri).get_run(run.run_id).data.params
            card = functools.partial(model_card, name, metadata, parameters)
            found_by, version = log_once(run, content, registered_name, step=step, name=name, card=card)
            if version is not None and promotion is not None:
                promote(registry_client(run.uri, version.name), version, promotion, metadata.dataset_fingerprint)
    except Exception as error:  # MLflow, its HTTP and its storage libraries each have their own errors
        # The caller reports the reason in one line; the libraries' messages may contain the store's password.
        _log.info("MLflow did not take the model: %s", redacted_traceback())
        raise TrackingError(reason_of(error)) from error
    return f"runs:/{run.run_id}/{found_by}"


def known_uri(uri: str) -> str:
    """Return an address that MLflow knows, also for `runs:/<run id>/model`, which is the run's newest model.

    `runs:/<run id>` alone means the same.
    """
    return resolved(f"{uri.rstrip('/')}/{MODEL}" if re.fullmatch("runs:/[^/]+/?", uri) else uri, tracking_uri())


def averaged_model_uri(uri: str) -> str:
    """Return the URI of the model with averaged weights, from the URI of the final model of training."""
    return beside(uri, AVERAGED_MODEL)


class _Flavor:
    """The flavor for Keras models; MLflow's own `save_model` writes an example to a folder that does not exist."""

    @staticmethod
    def save_model(path: str, **settings: Any) -> None:
        """Save a model to a new folder."""
        Path(path).mkdir(parents=True, exist_ok=True)
        settings.pop("validate_serving_input", None)  # MLflow's `Model.log` passes it on
        mlflow.keras.save_model(path=path, **settings)


def load_model(uri: str) -> tuple["keras.Model", ModelMetadata]:
    """Load a logged model (`runs:/...` or `models:/...`) and its metadata.

    Raises:
        ValueError: The store has no such model.
        RuntimeError: The tracking server cannot be reached.
    """
    with using_store(tracking_uri(), name_in(uri)), readable_errors(uri):
        metadata = model_metadata(uri)  # fails quickly if the store does not answer
        return mlflow.keras.load_model(known_uri(uri)), metadata


def model_metadata(uri: str) -> ModelMetadata:
    """Return the metadata of a logged model.

    Raises:
        ValueError: The store has no such model.
        RuntimeError: The tracking server cannot be reached.
    """
    with using_store(tracking_uri(), name_in(uri)), readable_errors(uri), short_waits():
        info = Model.load(known_uri(uri))
        return ModelMetadata.from_json({**(info.metadata or {}), "run_id": info.run_id})


@contextmanager
def using_store(uri: str, registered_name: str | None = None) -> Iterator[None]:
    """Set MLflow's own store during the block, and restore it at the end, together with the environment.

    MLflow 3 finds Unity Catalog by itself, unless a session or variable sets another registry. MLflow 2 does not.

    Args:
        uri: Address of the store.
        registered_name: Name of the registered model, whose registry is also set; None: there is none.
    """
    before = {name: os.environ.get(name) for name in ("MLFLOW_TRACKING_URI", "MLFLOW_REGISTRY_URI")}
    registry = None if registered_name is None else registry_uri(uri, registered_name)
    store_before, registry_before = chosen_store(), chosen_registry()
    mlflow.set_tracking_uri(uri)
    try:
        if registry is not None:
            mlflow.set_registry_uri(registry)
        yield
    finally:
        if registry is not None:
            mlflow.set_registry_uri(registry_before)  # type: ignore[arg-type]  # None: MLflow chooses by itself again
        mlflow.set_tracking_uri(store_before)  # type: ignore[arg-type]  # None: MLflow reads the environment again
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value


def _signature(model: "keras.Model") -> ModelSignature:
    def specification(tensor: Any) -> TensorSpec:
        import numpy as np

        return TensorSpec(np.dtype(tensor.dtype), (-1, *tensor.shape[1:]), tensor.name)

    return ModelSignature(
        inputs=Schema([specification(tensor) for tensor in model.inputs]),
        outputs=Schema([TensorSpec(specification(model.outputs[0]).type, (-1, *model.outputs[0].shape[1:]))]),
    )
