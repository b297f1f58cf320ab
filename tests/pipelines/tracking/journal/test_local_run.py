import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from pipelines.tracking.journal.local_run import (
    DatasetFacts,
    Description,
    LocalRun,
    is_locked,
    locked,
    read_local_run,
    update_local_run,
)

FACTS = DatasetFacts("eurosat_rgb", "abc", '{"uri": "/data"}', "{}", "{}")
RUN = LocalRun("offline-1", Description("tests", "name", {"a.b": "1"}, {"tag": "x"}, FACTS), 1_700_000_000_000, False)

HOLDER = """
import sys, time
from pathlib import Path
from pipelines.tracking.journal.local_run import locked
with locked(Path(sys.argv[1])):
    print("held", flush=True)
    time.sleep(600)
"""


def test_what_is_written_is_read_back(tmp_path: Path) -> None:
    assert read_local_run(tmp_path) is None
    update_local_run(tmp_path, status="FAILED")  # there is no file
    assert not list(tmp_path.iterdir())
    RUN.write(tmp_path / "run")
    assert read_local_run(tmp_path / "run") == RUN
    update_local_run(tmp_path / "run", status="KILLED", ended=5)
    assert (read_local_run(tmp_path / "run"), [path.name for path in (tmp_path / "run").iterdir()]) == (
        replace(RUN, status="KILLED", ended=5),
        ["run.json"],
    )
    values = json.loads((tmp_path / "run" / "run.json").read_text())
    assert values["run_id"] == "offline-1"
    # Fields of a later version are ignored.
    later = {**values, "host": "a", "description": {**values["description"], "language": "en"}}
    (tmp_path / "run" / "run.json").write_text(json.dumps(later))
    assert read_local_run(tmp_path / "run") == replace(RUN, status="KILLED", ended=5)


def test_two_drivers_do_not_train_one_run(tmp_path: Path, project: Path) -> None:
    folder = tmp_path / "run"
    command, environment = [sys.executable, "-c", HOLDER, str(folder)], {**os.environ, "PYTHONPATH": str(project)}
    with subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True) as other:
        try:
            assert other.stdout.readline() == "held\n"
            assert is_locked(folder)
            with (
                pytest.raises(ValueError, match=rf"run run is being trained or written by process {other.pid} on "),
                locked(folder),
            ):
                pass
        finally:
            other.kill()  # as the kernel does: nothing is tidied up
    assert not is_locked(folder)
    with locked(folder):
        assert is_locked(folder)
    assert not is_locked(folder)
