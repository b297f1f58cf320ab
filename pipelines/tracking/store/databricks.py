"""The differences of Databricks' MLflow: its address, its registries and the workers' credentials.

This module follows Databricks' documentation and MLflow's source. Its tests use fakes: it has not run on Databricks.
"""

import os

URI = "databricks"
UNITY_CATALOG = "databricks-uc"
_HOST, _TOKEN = "DATABRICKS_HOST", "DATABRICKS_TOKEN"


def is_databricks(uri: str) -> bool:
    """Return whether a store is a Databricks workspace."""
    return uri == URI or uri.startswith(f"{URI}://")


def refuse_registry(uri: str) -> None:
    """Refuse the address of a registry of Unity Catalog, which contains models and no runs.

    Raises:
        ValueError: The address is a registry; the text says which variable it belongs to.
    """
    if uri == UNITY_CATALOG or uri.startswith((f"{UNITY_CATALOG}:", "uc:")):
        raise ValueError(
            f"MLFLOW_TRACKING_URI={uri}: Unity Catalog is a registry of models and holds no runs: set "
            f"MLFLOW_TRACKING_URI={URI} and MLFLOW_REGISTRY_URI={uri}"
        )


def is_in_runtime() -> bool:
    """Return whether this process runs on a Databricks cluster, where MLflow's default store is the workspace."""
    return "DATABRICKS_RUNTIME_VERSION" in os.environ


def worker_credentials(uri: str) -> dict[str, str]:
    """Return the variables for a worker's login to the workspace; none for another store.

    A notebook logs in with its session, which workers do not have. So they get its host and token.
    """
    if not is_databricks(uri):
        return {}
    found = {name: value for name, value in os.environ.items() if name.startswith("DATABRICKS_")}
    if _HOST in found or not is_in_runtime():
        return found
    from mlflow.utils.databricks_utils import get_databricks_host_creds

    credentials = get_databricks_host_creds(uri)  # type: ignore[no-untyped-call]
    if credentials.host and credentials.token:
        found |= {_HOST: credentials.host, _TOKEN: credentials.token}
    return found
