"""Logged models for scoring: their description and Keras file. This module imports no TensorFlow."""

import json
import logging
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import mlflow
from mlflow import MlflowClient
from mlflow.exceptions import MlflowException
from mlflow.models import Model
from mlflow.utils.validation import MAX_TAG_VAL_LENGTH

from pipelines.machine.json_text import parse_json
from pipelines.storage.locations import redacted
from pipelines.tracking.models.model_metadata import ModelMetadata
from pipelines.tracking.models.models import known_uri, using_store
from pipelines.tracking.models.registry import REGISTERED, name_in
from pipelines.tracking.store.store import is_new, readable_errors, short_waits, tracking_uri

_TAG = "groundswell.thresholds"
HAS_TAGS_OF_MODELS = hasattr(MlflowClient, "set_logged_model_tags")
"""Whether models have tags; false for MLflow 2, which stores them with the run."""
_MODEL_FILE = "MLmodel"
_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class ServedModel:
    """A model that a user named, as its store describes it."""

    uri: str
    """Permanent address of this model, even if an alias moves later."""
    model_id: str
    """MLflow's identifier, the same for all names of one model."""
    version: str
    """Readable name: `<name>/<version>` in a registry, else the identifier."""
    metadata: ModelMetadata
    thresholds: tuple[float, ...] | None
    """Least probability of each predicted class, from `store_thresholds` or else the logged model; None: none."""
    inputs: dict[str, tuple[tuple[int, ...], str]]
    """Inputs by name: shape without the batch, and dtype."""


def find_model(uri: str) -> ServedModel:
    """Ask the store for a model.

    Args:
        uri: `runs:/<run id>/model` or `runs:/<run id>`, `models:/<name>/<version>`, `models:/<name>@<alias>`,
            `models:/<name>/latest`, or the folder of an exported model (what `mlflow artifacts download` gives).

    Raises:
        ValueError: There is no such model, version or alias, or it was not logged by Groundswell.
        RuntimeError: The tracking server cannot be reached.
    """
    store = tracking_uri()
    if "://" not in uri and ":/" not in uri:
        _check_exported(uri)
    elif is_new(store):
        raise ValueError(f"{uri}: MLflow's store {redacted(store)} does not exist: set MLFLOW_TRACKING_URI")
    with using_store(store, name_in(uri)), readable_errors(f"{uri} in {store}"), short_waits():
        fixed, version = _fixed(uri)
        # Not `get_model_info`: it asks the store for the model, but the store may not have an exported model.
        info = Model.load(fixed)
        # MLflow 2 has only `model_uuid`.
        model_id = str(getattr(info, "model_id", None) or info.model_uuid)
        tags = _tags(model_id, info.run_id)
    metadata = ModelMetadata.from_json({**(info.metadata or {}), "run_id": info.run_id})
    if not metadata.class_names or info.signature is None:
        raise ValueError(f"{uri} was not logged by groundswell: its metadata has no class_names")
    stored = (tags or {}).get(_tag(model_id))
    thresholds = metadata.thresholds if stored is None else tuple(parse_json(stored))
    inputs = {
        spec.name: (tuple(int(size) for size in spec.shape[1:]), str(spec.type)) for spec in info.signature.inputs
    }
    return ServedModel(fixed, model_id, version or model_id, metadata, thresholds, inputs)


def store_thresholds(model: ServedModel, thresholds: Sequence[float]) -> None:
    """Write thresholds for a model's classes to its store, if the store has the model.

    They are a tag of the logged model. MLflow 2 has no such tags, so there the run that created the model has the tag.

    Raises:
        TrackingError: The store does not answer.
    """
    tag, text = _tag(model.model_id), json.dumps([float(each) for each in thresholds])
    with readable_errors(model.uri), short_waits():
        tags, client = _tags(model.model_id, model.metadata.run_id), MlflowClient(tracking_uri())
        if tags is None or tags.get(tag) == text:
            return
        if HAS_TAGS_OF_MODELS:
            client.set_logged_model_tags(model.model_id, {tag: text})
        elif len(text) > MAX_TAG_VAL_LENGTH:
            _log.warning("the thresholds of %s are too long for a tag of MLflow 2, and are not kept", model.uri)
        else:
            client.set_tag(str(model.metadata.run_id), tag, text)


def _tag(model_id: str) -> str:
    return _TAG if HAS_TAGS_OF_MODELS else f"{_TAG}.{model_id}"


def _tags(model_id: str, run_id: str | None) -> dict[str, str] | None:
    """Return the tags that may contain a model's thresholds; None if the store does not know the model."""
    client = MlflowClient(tracking_uri())
    try:
        if HAS_TAGS_OF_MODELS:
            return dict(client.get_logged_model(model_id).tags)
        return dict(client.get_run(run_id).data.tags) if run_id else None
    except MlflowException as error:
        if error.error_code == "RESOURCE_DOES_NOT_EXIST":  # an exported model from another store
            return None
        raise


def read_model_file(model: ServedModel) -> bytes:
    """Read a model's `.keras` file.

    Raises:
        ValueError: The store does not have its files.
        RuntimeError: The tracking server cannot be reached.
    """
    with tempfile.TemporaryDirectory(prefix="groundswell-") as temporary:
        folder = Path(model.uri)
        if not (folder / _MODEL_FILE).is_file():
            with using_store(tracking_uri(), name_in(model.uri)), readable_errors(model.uri):
                with short_waits():
                    _tags(model.model_id, model.metadata.run_id)  # fails here quickly if the store does not answer
                folder = Path(mlflow.artifacts.download_artifacts(artifact_uri=model.uri, dst_path=temporary))
        files = sorted(folder.rglob("*.keras"))
        if len(files) != 1:
            raise ValueError(f"{model.uri} has {len(files)} .keras files, expected 1: was it logged by groundswell?")
        return files[0].read_bytes()


def _fixed(uri: str) -> tuple[str, str | None]:
    """Return the URI with a version instead of an alias, or the model instead of its run; and the version's name."""
    named = REGISTERED.fullmatch(uri)
    if named is None:
        return known_uri(uri), None
    name, version, client = named["name"], named["version"], MlflowClient(tracking_uri())
    if named["alias"] is not None:
        version = client.get_model_version_by_alias(name, named["alias"]).version
    elif version == "latest":
        versions = [int(found.version) for found in client.search_model_versions(f"name = '{name}'")]
        if not versions:
            raise MlflowException(f"there is no registered model {name}")
        version = str(max(versions))
    return f"models:/{name}/{version}", f"{name}/{version}"


def _check_exported(path: str) -> None:
    folder = Path(path).expanduser()
    if folder.suffix == ".keras":
        raise ValueError(
            f"{path} is a Keras file, which does not say its classes and bands: give the model's folder of MLflow, or "
            "runs:/<run id>/model"
        )
    if not (folder / _MODEL_FILE).is_file():
        raise ValueError(
            f"{path} is no model: expected runs:/<run id>/model, models:/<name>/<version>, models:/<name>@<alias>, or "
            f"a folder with a file {_MODEL_FILE}"
        )
