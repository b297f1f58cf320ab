"""What all tests share: the sample data, one Spark session, one small prepared dataset."""

import os
import socket
import subprocess
import sys
import time
import uuid
from collections.abc import Iterator
from pathlib import Path

import pytest
from pyspark.sql import SparkSession

PROJECT = Path(__file__).parent.parent


@pytest.fixture(scope="session")
def project() -> Path:
    return PROJECT


@pytest.fixture(scope="session")
def shared_data() -> Path:
    """Real sample patches, which are not part of the project."""
    folder = PROJECT.parent / "shared" / "data"
    if not folder.is_dir():
        pytest.skip(f"no sample data at {folder}")
    return folder


@pytest.fixture(scope="session", autouse=True)
def s3_environment() -> dict[str, str]:
    """Where the tests' object store will listen, and keys for it; Spark's processes inherit this at their start."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    environment = {
        "AWS_ENDPOINT_URL": f"http://127.0.0.1:{port}",
        "AWS_ACCESS_KEY_ID": "test",
        "AWS_SECRET_ACCESS_KEY": "test",
        "AWS_DEFAULT_REGION": "us-east-1",
    }
    os.environ.update(environment)
    return environment


@pytest.fixture(scope="session")
def s3(s3_environment: dict[str, str], tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """An S3 server on loopback, in a process of its own; the URL of a bucket."""
    import fsspec

    port = s3_environment["AWS_ENDPOINT_URL"].rpartition(":")[2]
    log = tmp_path_factory.mktemp("s3") / "log"
    command = [sys.executable, "-m", "moto.server", "-H", "127.0.0.1", "-p", port]
    with log.open("w") as output, subprocess.Popen(command, stdout=output, stderr=subprocess.STDOUT) as server:
        try:
            deadline = time.monotonic() + 60
            while True:
                try:
                    socket.create_connection(("127.0.0.1", int(port))).close()
                    break
                except OSError:
                    assert time.monotonic() < deadline, log.read_text()
                    assert server.poll() is None, log.read_text()
                    time.sleep(0.05)
            fsspec.filesystem("s3").mkdir("tests")
            yield "s3://tests"
        finally:
            server.kill()


@pytest.fixture
def s3_folder(s3: str) -> str:
    """A URL under which nothing is yet."""
    return f"{s3}/{uuid.uuid4().hex}"


@pytest.fixture(scope="session")
def spark(s3_environment: dict[str, str]) -> Iterator[SparkSession]:
    """One local session for the whole test run, with two slots."""
    from jobs.session import spark_session

    os.environ["PYSPARK_PYTHON"] = sys.executable
    with spark_session("groundswell tests", "local[2]") as session:
        yield session


@pytest.fixture(scope="session")
def small_archive(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A generated BigEarthNet v2.0 archive of 32 + 12 + 12 patches."""
    from pipelines.archives.synthetic import generate_bigearthnet_v2

    root = tmp_path_factory.mktemp("archive") / "BigEarthNet"
    generate_bigearthnet_v2(root, train=32, validation=12, test=12, seed=7)
    return root


@pytest.fixture(scope="session")
def small_dataset(spark: SparkSession, small_archive: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The small archive, prepared with small row groups, so that there are several."""
    from pipelines.archives.table import open_archive
    from pipelines.dataset.writer import prepare_dataset

    path = tmp_path_factory.mktemp("dataset") / "small"
    archive = open_archive("bigearthnet_v2", root=str(small_archive))
    prepare_dataset(spark, archive, path, row_group_mib=1, row_groups_per_shard=2, seed=3)
    return path


@pytest.fixture
def mlflow_store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """An empty store of its own."""
    uri = f"sqlite:///{tmp_path / 'mlruns' / 'mlflow.db'}"
    monkeypatch.setenv("MLFLOW_TRACKING_URI", uri)
    return uri
