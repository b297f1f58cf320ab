"""`groundswell prepare` as a process that is stopped from outside."""

import argparse
import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from conf.load import load
from jobs import prepare
from jobs.shell.command import Result
from tests.patience import patient, wait_until

pytestmark = [pytest.mark.spark, pytest.mark.timeout(280)]


@pytest.mark.long
def test_a_jvm_that_dies_is_told_without_a_trace(tmp_path: Path) -> None:
    command = [
        sys.executable, "-m", "jobs.shell.cli", "prepare", "--config", "smoke",
        "--set", "archive=synthetic", "--set", "archive.train=900", "--set", "archive.validation=6",
        "--set", "archive.test=6", "--set", f"dataset.path={tmp_path}/dataset", "--set", "prepare.row_group_mib=1",
        "--set", "prepare.row_groups_per_shard=1", "--set", "launch.master=local[1]",
    ]  # fmt: skip
    process = subprocess.Popen(
        command, start_new_session=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    try:
        progress = tmp_path / "dataset.incomplete" / "_progress"
        wait_until(lambda: list(progress.glob("*-part-*.json")) or process.poll() is not None, 120)
        assert process.poll() is None, process.communicate()
        children = psutil.Process(process.pid).children(recursive=True)
        next(child for child in children if child.name() == "java").kill()
        output, errors = process.communicate(timeout=patient(120))
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
            process.communicate()
    assert process.returncode == 4, (output, errors)
    expected = r"error: Spark's JVM has died of signal 9; finished shards are kept in \S+, and the same command"
    assert re.search(expected, errors), errors
    assert "to continue: groundswell prepare --config smoke" in errors
    assert not re.search("Traceback|[Pp]y4[jJ]|Errno", errors), errors
    assert not (tmp_path / "dataset").exists()


@pytest.mark.parametrize(
    ("settings", "more"), [([], []), (["prepare.restart=true"], ["--set", "prepare.restart=false"])]
)
def test_the_command_that_continues_does_not_discard_again(
    monkeypatch: pytest.MonkeyPatch, settings: list[str], more: list[str]
) -> None:
    def stopped(config: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(prepare, "prepare", stopped)
    monkeypatch.setattr(prepare, "read_config", lambda _: load("smoke", settings))
    result = Result("prepare")
    with pytest.raises(KeyboardInterrupt):
        prepare.main(argparse.Namespace(), result)
    assert result.continue_with == more


def test_an_archive_is_needed() -> None:
    with pytest.raises(ValueError, match=r"archive is missing: set archive=bigearthnet_v2 and archive\.root, or see"):
        prepare.configured_archive(load("smoke").model_copy(update={"archive": None}))
