"""A packed environment that Spark hands to executors (`spark.archives`, as `--archives` on YARN): ranks run in it."""

import os
import subprocess
import sys
import sysconfig
import tarfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from pyspark.sql import SparkSession

from pipelines.launch.runner import BarrierRunner

pytestmark = [pytest.mark.spark, pytest.mark.parallel, pytest.mark.timeout(180)]


def launch(archive: str) -> list[str]:
    """The interpreters of two ranks on two executors."""
    os.environ["PYSPARK_PYTHON"] = "./environment/bin/python"
    settings = {"spark.ui.enabled": "false", "spark.archives": f"{archive}#environment"}
    with SparkSession.builder.master("local-cluster[2,1,1024]").config(map=dict(settings)).getOrCreate() as spark:
        return BarrierRunner(spark, 2).run_all(lambda: sys.executable)


@pytest.mark.long
def test_ranks_run_in_a_packed_environment(in_fresh_process: Callable[..., Any], project: Path, tmp_path: Path) -> None:
    environment = tmp_path / "environment"
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(environment)], check=True)
    # A real one holds its packages; this one points at those of this machine, so that it is packed in no time.
    (site,) = (environment / "lib").glob("python3*/site-packages")
    (site / "packages.pth").write_text(f"{sysconfig.get_paths()['purelib']}\n{project}\n")
    archive = tmp_path / "environment.tar.gz"
    with tarfile.open(archive, "w:gz") as file:
        for path in environment.iterdir():
            file.add(path, path.name)
    interpreters = in_fresh_process(launch, str(archive))
    assert len(set(interpreters)) == 2
    assert [path.startswith(str(environment)) for path in interpreters] == [False, False]
    assert [path.endswith("/environment/bin/python") for path in interpreters] == [True, True]
