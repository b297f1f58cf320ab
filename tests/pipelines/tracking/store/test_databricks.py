"""A Databricks workspace as MLflow's store, with stand-ins for the workspace."""

import os
from pathlib import Path
from types import SimpleNamespace

import mlflow
import pytest
from mlflow.exceptions import MlflowException
from mlflow.models import Model
from mlflow.tracking import fluent
from mlflow.utils import databricks_utils

from pipelines.tracking.models.models import using_store
from pipelines.tracking.store import databricks, experiments, served, store


@pytest.fixture(autouse=True)
def runtime(monkeypatch: pytest.MonkeyPatch) -> None:
    """As in a notebook on a Databricks cluster."""
    for prefix in ("MLFLOW_TRACKING_URI", "MLFLOW_EXPERIMENT_", "DATABRICKS_"):
        for name in [name for name in os.environ if name.startswith(prefix)]:
            monkeypatch.delenv(name)
    monkeypatch.setenv("DATABRICKS_RUNTIME_VERSION", "17.3")
    creds = SimpleNamespace(host="https://workspace.example", token="secret")
    monkeypatch.setattr(databricks_utils, "get_databricks_host_creds", lambda uri: creds)
    monkeypatch.setattr(mlflow, "get_registry_uri", lambda: "databricks-uc")


def test_workers_get_the_notebooks_store_registry_and_credentials() -> None:
    assert store.tracking_uri() == "databricks"
    assert store.worker_environment().items() >= {
        ("MLFLOW_TRACKING_URI", "databricks"),
        ("MLFLOW_REGISTRY_URI", "databricks-uc"),
        ("DATABRICKS_HOST", "https://workspace.example"),
        ("DATABRICKS_TOKEN", "secret"),
        ("DATABRICKS_RUNTIME_VERSION", "17.3"),
    }
    store.check_workers_reach("databricks", "spark://host:7077")


def test_credentials_of_the_environment_come_first(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DATABRICKS_HOST", "https://other.example")
    monkeypatch.setenv("DATABRICKS_CLIENT_ID", "me")
    found = databricks.worker_credentials("databricks")
    assert (found["DATABRICKS_HOST"], found["DATABRICKS_CLIENT_ID"]) == ("https://other.example", "me")
    assert "DATABRICKS_TOKEN" not in found


def test_another_store_gets_no_credentials(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "https://mlflow.example")
    assert [
        name for name in store.worker_environment() if name.startswith(("DATABRICKS_", "MLFLOW_REGISTRY_URI"))
    ] == []


@pytest.mark.parametrize(
    ("active", "name", "expected"),
    [
        ("/Users/me@x.y/notebook", "imagenet", "/Users/me@x.y/imagenet"),
        ("/Users/me@x.y/notebook", "/Shared/imagenet", "/Shared/imagenet"),
        (None, "/Shared/imagenet", "/Shared/imagenet"),
    ],
)
def test_an_experiment_is_absolute(
    monkeypatch: pytest.MonkeyPatch, active: str | None, name: str, expected: str
) -> None:
    monkeypatch.setattr(experiments, "active_experiment", lambda: active)
    assert experiments.name_in_store("databricks", name) == expected


@pytest.mark.parametrize("uri", ["databricks-uc", "databricks-uc://profile", "uc:http://host"])
def test_a_registry_is_no_store_of_runs(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, uri: str) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("MLFLOW_TRACKING_URI", uri)
    with pytest.raises(ValueError, match=rf"^MLFLOW_TRACKING_URI={uri}: Unity Catalog .* MLFLOW_REGISTRY_URI={uri}$"):
        store.tracking_uri()
    assert list(tmp_path.iterdir()) == []


def test_the_notebooks_own_experiment_is_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MLFLOW_EXPERIMENT_ID", "7")
    found = SimpleNamespace(name="/Users/me/book", experiment_id="7")
    for module in (fluent, mlflow):
        monkeypatch.setattr(module, "MlflowClient", lambda *uri: SimpleNamespace(get_experiment={"7": found}.get))
    assert (experiments.chosen_experiment(None), experiments.chosen_experiment("imagenet")) == (
        "/Users/me/book",
        "imagenet",
    )


def test_a_relative_experiment_without_an_active_one_is_refused() -> None:
    with pytest.raises(
        ValueError, match=r"^tracking\.experiment=imagenet: Databricks takes absolute names, such as /U"
    ):
        experiments.name_in_store("databricks", "imagenet")
    assert experiments.name_in_store("https://mlflow.example", "imagenet") == "imagenet"


def test_a_model_of_unity_catalog_is_asked_of_its_registry(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also with MLflow 2, and in a notebook whose registry is the workspace's."""
    monkeypatch.undo()
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "databricks")
    monkeypatch.setenv("MLFLOW_REGISTRY_URI", "databricks")
    asked: list[tuple[str, str]] = []

    class Client:
        def __init__(self, uri: str) -> None: ...

        def get_model_version_by_alias(self, name: str, alias: str) -> SimpleNamespace:
            asked.append((f"{name}@{alias}", mlflow.get_registry_uri()))
            return SimpleNamespace(version="7")

    def load(uri: str) -> None:
        asked.append((uri, mlflow.get_registry_uri()))
        raise MlflowException("enough")

    monkeypatch.setattr(served, "MlflowClient", Client)
    monkeypatch.setattr(Model, "load", load)
    for uri in ("models:/main.land.cover@champion", "models:/cover@champion"):
        with pytest.raises(ValueError, match="enough"):
            served.find_model(uri)
    assert (asked, mlflow.get_registry_uri()) == (
        [
            ("main.land.cover@champion", "databricks-uc"),
            ("models:/main.land.cover/7", "databricks-uc"),
            ("cover@champion", "databricks"),
            ("models:/cover/7", "databricks"),
        ],
        "databricks",
    )
    with using_store("databricks", "main.land.cover"):  # as a model is registered
        assert (mlflow.get_registry_uri(), mlflow.MlflowClient("databricks")._registry_uri) == (
            "databricks-uc",
            "databricks-uc",
        )
    with using_store("http://localhost:5000", "main.land.cover"):
        assert mlflow.get_registry_uri() == "databricks"
