"""A model as MLflow 3 stores it: a separate entity beside the run that created it."""

import re
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from mlflow import MlflowClient
from mlflow.entities import LoggedModel, LoggedModelStatus
from mlflow.entities.model_registry import ModelVersion
from mlflow.exceptions import MlflowException
from mlflow.models import Model

from pipelines.tracking.journal.local_run import DESCRIPTION_TAG
from pipelines.tracking.models.model_metadata import CARD_FILE, Card
from pipelines.tracking.models.registry import registry_client
from pipelines.tracking.store.store import TrackedRun

_TAGS_OF_THE_RUN = ("mlflow.user", "mlflow.source.name", "mlflow.source.type")
"""Tags that MLflow's page also shows for a model: its author and source."""
_LONGEST_DESCRIPTION = 4000
_KIND = "groundswell.model"
"""Tag with a model's name within its run. Its name in the store is the run's, which differs between models."""
_REFUSED = str.maketrans(dict.fromkeys("/:.%\"'", "-"))
"""Translation of characters that the name of a model may not contain."""


def log_once(
    run: TrackedRun, content: Mapping[str, Any], registered_name: str | None, *, step: int, name: str, card: Card
) -> tuple[str, ModelVersion | None]:
    """Log a model unless an earlier attempt has logged that name after the same steps, and register it.

    Returns the model's name in a URI of its run, and the version in the registry.

    Args:
        run: The run that created the model.
        content: Flavor, model, signature, metadata and requirements.
        registered_name: Name in the registry; None: the model is not registered.
        step: Optimizer steps that the model has seen.
        name: Name of the model within the run.
        card: Returns the text of the model card for the model's metrics.
    """
    client = MlflowClient(run.uri)
    complete = (
        str(model.model_id)
        for model in _models_of(client, run.run_id, step)
        if (model.tags.get(_KIND), model.status) == (name, LoggedModelStatus.READY)
    )
    model_id = next(complete, None) or _log_model(client, run, content, step, name)
    _log_card(client, model_id, card)
    version = None if registered_name is None else _register(run, model_id, registered_name)
    return str(client.get_logged_model(model_id).name), version


def resolved(uri: str, store: str) -> str:
    """Return the address of the newest complete model for `runs:/<run id>/model`, which MLflow does not know.

    Args:
        uri: Any address of a model; other addresses are returned unchanged.
        store: Address of the store.
    """
    found = re.fullmatch(r"runs:/(?P<run_id>[^/]+)/(?P<name>model\w*)", uri)
    if found is None:
        return uri
    models = [
        (logged.creation_timestamp, logged.model_id)
        for logged in _models_of(MlflowClient(store), found["run_id"])
        if logged.status == LoggedModelStatus.READY and logged.tags.get(_KIND) == found["name"]
    ]
    return f"models:/{max(models)[1]}" if models else uri


def beside(uri: str, name: str) -> str:
    """Return the address of another model of a run, from the address of the final model of training."""
    return uri + _ending(name)


def _ending(name: str) -> str:
    """Return `-ema` for `model_ema`, and nothing for `model`."""
    return name.removeprefix("model").replace("_", "-")


def _models_of(client: MlflowClient, run_id: str, step: int | None = None) -> Iterator[LoggedModel]:
    """Yield the models that a run has logged and nobody has deleted, after any number of steps or after this one."""
    run = client.get_run(run_id)
    steps = {output.model_id: output.step for output in (run.outputs.model_outputs if run.outputs else [])}
    for model in client.search_logged_models([run.info.experiment_id], f"source_run_id = '{run_id}'"):
        if step in (None, steps.get(model.model_id)):
            yield model


def _log_model(client: MlflowClient, run: TrackedRun, content: Mapping[str, Any], step: int, name: str) -> str:
    """Log a model; those of earlier attempts whose upload failed are deleted, because MLflow would list them too."""
    for unfinished in _models_of(client, run.run_id):
        if unfinished.status != LoggedModelStatus.READY and unfinished.tags.get(_KIND) == name:
            client.delete_logged_model(unfinished.model_id)
    made_by = client.get_run(run.run_id)
    tags = {tag: value for tag, value in made_by.data.tags.items() if tag in _TAGS_OF_THE_RUN}
    logged = client.create_logged_model(
        made_by.info.experiment_id,
        name=made_by.info.run_name.translate(_REFUSED) + _ending(name),
        source_run_id=run.run_id,
        tags={**tags, _KIND: name},
        params=made_by.data.params,
    )
    # Not `mlflow.keras.log_model`: it needs an active run, whose end would set the run to finished.
    Model.log(artifact_path=None, model_id=logged.model_id, run_id=run.run_id, step=step, **content)
    return str(logged.model_id)


def _log_card(client: MlflowClient, model_id: str, card: Card) -> None:
    """Store the card beside the model's own files, unless an earlier attempt has done so."""
    if any(item.path == CARD_FILE for item in client.list_logged_model_artifacts(model_id)):
        return
    metrics = {metric.key: metric.value for metric in client.get_logged_model(model_id).metrics or []}
    with tempfile.TemporaryDirectory(prefix="groundswell-") as folder:
        file, text = Path(folder, CARD_FILE), card(metrics)
        file.write_text(text)
        client.set_logged_model_tags(model_id, {DESCRIPTION_TAG: _shortened(text)})
        client.log_model_artifact(model_id, str(file))  # last: if the file exists, nothing is missing


def _shortened(card: str) -> str:
    """Return the card without title and recipe, which the model's page has elsewhere, cut to the limit of a tag."""
    before, _, rest = card.partition("## Recipe")
    text = before.partition("\n")[2].lstrip() + "## " + rest.partition("\n## ")[2]
    if len(text) <= _LONGEST_DESCRIPTION:
        return text
    return f"{text[:_LONGEST_DESCRIPTION]}…\n\n(The whole card is the artifact {CARD_FILE}.)"


def _register(run: TrackedRun, model_id: str, name: str) -> ModelVersion:
    source, client = f"models:/{model_id}", registry_client(run.uri, name)
    for version in client.search_model_versions(f"name = '{name}'"):
        if version.source == source:
            return version
    try:
        client.create_registered_model(name)
    except MlflowException as error:
        if error.error_code != "RESOURCE_ALREADY_EXISTS":
            raise
    return client.create_model_version(name, source, run_id=run.run_id, model_id=model_id)
