"""Registered models: a version for each logged model, and the aliases that say which one to use.

The alias `champion` moves to a version whose validation metric is better than the champion's by a margin, measured on
the same dataset. Any other new version gets the alias `challenger`. The tag `validation_status` of a version contains
its alias.
"""

import math
import re
from dataclasses import dataclass

from mlflow import MlflowClient
from mlflow.entities.model_registry import ModelVersion
from mlflow.exceptions import MlflowException

from pipelines.tracking.metrics import is_lower_better
from pipelines.tracking.store.store import TrackedRun, readable_errors, short_waits

CHAMPION, CHALLENGER = "champion", "challenger"
STATUS, REASON = "validation_status", "validation_reason"
REGISTERED = re.compile(r"models:/(?P<name>[^/@]+)(?:@(?P<alias>[^/@]+)|/(?P<version>[^/@]+))")
"""URI of a model in a registry."""
_MODEL_SOURCE = "models:/"
_FINGERPRINT = "dataset_fingerprint"
_OTHER_DATASET = "on another dataset"


@dataclass(frozen=True)
class Promotion:
    """The rule for a new version to become the champion."""

    metric: str
    """Name of a validation metric, such as "val/f1_macro"; metrics that end in "loss" are better when lower."""
    margin: float
    """Smallest lead that a version needs over the champion."""


def registry_client(uri: str, name: str) -> MlflowClient:
    """Return the client of the registry for a model of this name.

    Args:
        uri: Address of the tracking store.
        name: Name of the model. On Databricks a name in three parts, `catalog.schema.model`, belongs to Unity Catalog.
    """
    return MlflowClient(uri, registry_uri=registry_uri(uri, name))


def registry_uri(uri: str, name: str) -> str | None:
    """Return the address of the registry; None: the address of the tracking store."""
    in_unity_catalog = uri.startswith("databricks") and name.count(".") == 2
    return uri.replace("databricks", "databricks-uc", 1) if in_unity_catalog else None


def name_in(uri: str) -> str | None:
    """Return the registered name in a model's URI; None if it is not a URI of a registry."""
    found = REGISTERED.fullmatch(uri)
    return found["name"] if found is not None else None


def promote(client: MlflowClient, version: ModelVersion, promotion: Promotion, fingerprint: str | None) -> None:
    """Give a new version its alias; a version that already has a status stays unchanged.

    Args:
        client: A client of the registry.
        version: The new version.
        promotion: The rule.
        fingerprint: Fingerprint of the dataset on which the validation metric was measured.
    """
    if STATUS in client.get_model_version(version.name, version.version).tags:
        return
    client.set_model_version_tag(version.name, version.version, _FINGERPRINT, str(fingerprint))
    version = client.get_model_version(version.name, version.version)
    champion = _champion(client, version.name)
    alias, reason = _verdict(client, version, champion, promotion)
    client.set_registered_model_alias(version.name, alias, version.version)
    client.set_model_version_tag(version.name, version.version, REASON, reason)
    # Last: a version without this tag is judged again.
    client.set_model_version_tag(version.name, version.version, STATUS, alias)


def standing(run: TrackedRun, name: str) -> str:
    """Return the alias of the newest version that a run has registered, and why; empty if nothing is decided.

    Args:
        run: The run that created the model.
        name: Name of the registered model.

    Raises:
        ValueError: The registry has no answer.
        TrackingError: The store does not answer.
    """
    with short_waits(), readable_errors(f"registered model {name}"):
        client = registry_client(run.uri, name)
        versions = client.search_model_versions(f"name = '{name}'")
        number = max((int(each.version) for each in versions if each.run_id == run.run_id), default=None)
        tags = {} if number is None else client.get_model_version(name, str(number)).tags
    if STATUS not in tags:
        return ""
    text = f"{name} version {number} is {tags[STATUS]}: {tags[REASON]}"
    if tags[REASON].endswith(_OTHER_DATASET):
        text += (
            f", which is not compared. To make it the champion: in Python, mlflow.MlflowClient()."
            f"set_registered_model_alias({name!r}, {CHAMPION!r}, '{number}'), or on the model's page of MLflow"
        )
    return text


def _verdict(
    client: MlflowClient, version: ModelVersion, champion: ModelVersion | None, promotion: Promotion
) -> tuple[str, str]:
    """Return the alias of a version, and why."""
    value = _value(client, version, promotion.metric)
    if champion is None or str(champion.version) == str(version.version):
        return CHAMPION, f"there is no other champion, {promotion.metric} {value:.4f}"
    best = _value(client, champion, promotion.metric)
    compared = f"{promotion.metric} {value:.4f}, version {champion.version} has {best:.4f}"
    if champion.tags.get(_FINGERPRINT) != version.tags.get(_FINGERPRINT):
        return CHALLENGER, f"{compared} {_OTHER_DATASET}"
    if math.isnan(best) and not math.isnan(value):
        return CHAMPION, compared
    gain = best - value if is_lower_better(promotion.metric) else value - best
    if gain > promotion.margin:
        return CHAMPION, compared
    return CHALLENGER, f"{compared}, and the margin is {promotion.margin:g}"


def _champion(client: MlflowClient, name: str) -> ModelVersion | None:
    aliases = client.get_registered_model(name).aliases
    if CHAMPION not in aliases:
        return None
    try:
        return client.get_model_version(name, str(aliases[CHAMPION]))
    except MlflowException as error:
        if error.error_code == "RESOURCE_DOES_NOT_EXIST":  # the version was deleted, but its alias stays
            return None
        raise


def _value(client: MlflowClient, version: ModelVersion, metric: str) -> float:
    """Return the metric of the model at its logged step; NaN if it has none.

    MLflow 2 knows only the newest value of the run.
    """
    if not str(version.source).startswith(_MODEL_SOURCE):
        return float(client.get_run(str(version.run_id)).data.metrics.get(metric, math.nan))
    model = client.get_logged_model(str(version.source).removeprefix(_MODEL_SOURCE))
    values = [each.value for each in model.metrics or [] if each.key == metric]
    return float(values[-1]) if values else math.nan
