import os
import signal
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

import pytest
from mlflow import MlflowClient

from pipelines.tracking.journal.guard import guarded
from pipelines.tracking.store.runs import ended
from pipelines.tracking.store.store import TrackedRun
from tests.patience import wait_until

DRIVER = """
import sys, time
from pipelines.tracking.store.runs import ended
from pipelines.tracking.store.store import TrackedRun
with ended(TrackedRun(*sys.argv[1:])):
    print("trains", flush=True)
    time.sleep(600)
"""


@pytest.mark.long
@pytest.mark.timeout(120)
def test_the_run_of_a_driver_that_is_killed_fails(run: TrackedRun, project: Path) -> None:
    client, command = MlflowClient(run.uri), [sys.executable, "-c", DRIVER, run.uri, run.run_id]
    with subprocess.Popen(
        command,
        env={**os.environ, "PYTHONPATH": str(project)},
        stdout=subprocess.PIPE,
        text=True,
        start_new_session=True,
    ) as driver:
        assert driver.stdout.readline() == "trains\n"
        assert client.get_run(run.run_id).info.status == "RUNNING"
        os.killpg(driver.pid, signal.SIGKILL)
    wait_until(lambda: "driver" in client.get_run(run.run_id).data.tags, 100, every=0.2)
    assert client.get_run(run.run_id).info.status == "FAILED"


@pytest.mark.parametrize(
    ("error", "status"), [(None, "FINISHED"), (KeyboardInterrupt(), "KILLED"), (ValueError("no"), "FAILED")]
)
def test_a_run_ends_as_its_block_does(run: TrackedRun, error: BaseException | None, status: str) -> None:
    with suppress(KeyboardInterrupt, ValueError), ended(run):
        if error is not None:
            raise error
    stored = MlflowClient(run.uri).get_run(run.run_id)
    assert (stored.info.status, "driver" in stored.data.tags) == (status, False)


def test_a_store_that_is_away_at_the_end_is_a_warning(caplog: pytest.LogCaptureFixture) -> None:
    with guarded(TrackedRun("", "offline-1")), ended(TrackedRun("http://127.0.0.1:9", "a-run")):
        pass
    assert "MLflow still shows run a-run as running, and it is finished" in caplog.text
