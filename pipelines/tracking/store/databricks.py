"""What differs where MLflow is Databricks' own: its address, its registries, credentials of workers.

Written after Databricks' documentation and MLflow's source, and tested with stand-ins: it has not run on Databricks.
"""

import os

URI = "databricks"
UNITY_CATALOG = "databricks-uc"
_RUNTIME = "DATABRICKS_RUNTIME_VERSION"
_HOST, _TOKEN = "DATABRICKS_HOST", "DATABRICKS_TOKEN"
_PREFIX = "DATABRICKS_"


def is_databricks(uri: str) -> bool:
    """Whether a store is a Databricks workspace."""
    return uri == URI or uri.startswith(f"{URI}://")


def refuse_registry(uri: str) -> None:
    """Refuse the address of a registry of Unity Catalog, which holds models and no runs.

    Raises:
        ValueError: It is one; says which variable takes it.
    """
    if uri == UNITY_CATALOG or uri.startswith((f"{UNITY_CATALOG}:", "uc:")):
        raise ValueError(
            f"MLFLOW_TRACKING_URI={uri}: Unity Catalog is a registry of models and holds no runs: set "
            f"MLFLOW_TRACKING_URI={URI} and MLFLOW_REGISTRY_URI={uri}"
        )


def is_in_runtime() -> bool:
    """Whether this process runs on a Databricks cluster, where MLflow's store is the workspace by default."""
    return _RUNTIME in os.environ


def worker_credentials(uri: str) -> dict[str, str]:
    """Return the variables with which a worker signs in to the workspace; none for another store.

    A notebook's process signs in by its session, which workers do not have: they get its host and token.
    """
    if not is_databricks(uri):
        return {}
    found = {name: value for name, value in os.environ.items() if name.startswith(_PREFIX)}
    if _HOST in found or not is_in_runtime():
        return found
    from mlflow.utils.databricks_utils import get_databricks_host_creds

    credentials = get_databricks_host_creds(uri)  # type: ignore[no-untyped-call]
    if credentials.host and credentials.token:
        found |= {_HOST: credentials.host, _TOKEN: credentials.token}
    return found
