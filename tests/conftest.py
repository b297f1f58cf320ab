"""What all tests share: the sample data, one Spark session, one small prepared dataset."""

import os
import sys
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


@pytest.fixture(scope="session")
def spark() -> Iterator[SparkSession]:
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
