import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyspark
import pytest

from jobs.shell.session import spark_session
from tests.patience import patient, wait_until


@pytest.mark.parametrize("variable", ["SPARK_REMOTE", "SPARK_CONNECT_MODE_ENABLED"])
def test_spark_connect_is_refused_before_anything_starts(variable: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(variable, "sc://127.0.0.1")
    with (
        pytest.raises(
            RuntimeError,
            match=r"which cannot run barrier stages \(prepare, evaluate and score run there\): unset .*dedicated",
        ),
        spark_session("tests", "local[2]"),
    ):
        pass


def master_of_a_session(master: str) -> str:
    with spark_session("tests", master) as spark:
        return str(spark.sparkContext.master)


@pytest.mark.long
@pytest.mark.spark
@pytest.mark.timeout(120)
def test_a_standalone_master_is_found(in_fresh_process: Callable[..., Any], tmp_path: Path) -> None:
    spark_class = Path(pyspark.__file__).parent / "bin/spark-class"
    command = [str(spark_class), "org.apache.spark.deploy.master.Master", "--host", "127.0.0.1", "--webui-port", "0"]
    log = tmp_path / "log"
    with log.open("wb") as file, subprocess.Popen([*command, "--port", "0"], stderr=file) as process:
        try:
            wait_until(lambda: "Starting Spark master at" in log.read_text())
            master = re.search(r"Starting Spark master at (\S+)", log.read_text())[1]  # type: ignore[index]
            assert in_fresh_process(master_of_a_session, master) == master
        finally:
            process.terminate()
    assert "Exception" not in log.read_text()


@pytest.mark.long
@pytest.mark.spark
@pytest.mark.timeout(120)
@pytest.mark.parametrize(("named", "name"), [([], "tests"), (["--name", "nightly"], "nightly")])
def test_a_submitted_job_has_its_name_and_shows_its_own_lines_and_no_chatter_of_spark(
    tmp_path: Path, named: list[str], name: str
) -> None:
    script = tmp_path / "job.py"
    script.write_text(
        "from jobs.shell.session import spark_session\n"
        "with spark_session('tests', 'unused') as spark:\n"
        "    print(spark.sparkContext.appName, spark.range(4).selectExpr('sum(id)').first()[0])\n"
    )
    submit = Path(sys.executable).parent / "spark-submit"
    command = [str(submit), "--master", "local[1]", "--conf", "spark.ui.enabled=false", *named, str(script)]
    environment = {**os.environ, "PYSPARK_PYTHON": sys.executable}
    done = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=patient(100))
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1] == f"{name} 6"
    # Those are of the time before the job's own Python.
    assert sum(" INFO " in line for line in done.stderr.splitlines()) < 5, done.stderr


def refusal(master: str, settings: str) -> str:
    """Why two workers find no place, in a session of a job with these settings."""
    from pipelines.launch.driver.preflight import check_cluster

    os.environ["PYSPARK_SUBMIT_ARGS"] = f"{settings} pyspark-shell"
    try:
        with spark_session("tests", master) as spark:
            check_cluster(spark, 2, 0)
    except RuntimeError as error:
        return str(error)
    return ""


@pytest.mark.long
@pytest.mark.spark
@pytest.mark.timeout(120)
@pytest.mark.parametrize(
    ("master", "settings", "reason"),
    [
        (
            "local[2]",
            "--conf spark.task.cpus=2",
            r"do not fit 1 slot of local\[2\].*spark\.task\.cpus=2 cores make one",
        ),
        (
            "local-cluster[1,1,1024]",
            "--conf spark.executor.cores=1 --conf spark.task.cpus=2",
            r"^Spark does not start: .* cores per executor .* See spark\.executor\.cores and spark\.task\.cpus\.$",
        ),
    ],
)
def test_cores_that_make_too_few_slots_name_their_settings(
    in_fresh_process: Callable[..., Any], master: str, settings: str, reason: str
) -> None:
    assert re.search(reason, in_fresh_process(refusal, master, settings))
