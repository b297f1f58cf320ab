import pytest

from pipelines.tracking.runs import start_run
from pipelines.tracking.store import TrackedRun


@pytest.fixture
def run(mlflow_store: str) -> TrackedRun:
    return start_run("tests", "name", {"a.b": 1}, {"tag": "value"})
