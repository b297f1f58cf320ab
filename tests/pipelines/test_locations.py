import os
import sys
from pathlib import Path

import pytest

from pipelines import locations
from pipelines.locations import absolute_location, absolute_path, redacted


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", "/home/somebody")
    monkeypatch.setenv("DATA", "/data/sets")
    monkeypatch.setenv("BUCKET", "bucket")
    monkeypatch.delenv("UNSET", raising=False)
    return tmp_path


@pytest.mark.parametrize(
    ("written", "found"),
    [
        ("/data/x", "/data/x"),
        ("/data/x/", "/data/x"),
        ("~", "/home/somebody"),
        ("~/x", "/home/somebody/x"),
        ("$HOME/x", "/home/somebody/x"),
        ("${DATA}/x", "/data/sets/x"),
        ("$DATA", "/data/sets"),
        ("/cost/5$", "/cost/5$"),
        ("file:/data/x", "/data/x"),
        ("file:///data/x", "/data/x"),
        ("file://localhost/data/x", "/data/x"),
        ("FILE:///data/with%20space", "/data/with space"),
        ("s3://bucket/x", "s3://bucket/x"),
        ("s3://bucket/x/", "s3://bucket/x"),
        ("S3://Bucket/X", "s3://Bucket/X"),
        ("s3a://bucket/x", "s3a://bucket/x"),
        ("s3://$BUCKET/x", "s3://bucket/x"),
        ("s3://bucket/with space/a@b", "s3://bucket/with space/a@b"),
        ("hdfs://namenode:8020/x", "hdfs://namenode:8020/x"),
        ("hdfs:///x", "hdfs:///x"),
        (Path("/data/$UNSET"), "/data/$UNSET"),
    ],
)
def test_spellings(written: str | Path, found: str) -> None:
    assert absolute_location(written) == found


def test_relative_paths_start_at_the_working_directory(here: Path) -> None:
    assert absolute_location("data/x") == f"{here}/data/x"
    assert absolute_location(Path("data/x")) == f"{here}/data/x"
    assert absolute_location("data:v2/x") == f"{here}/data:v2/x"
    assert absolute_location("./s3:/x") == f"{here}/s3:/x"


@pytest.mark.parametrize(
    ("written", "message"),
    [
        ("$UNSET/x", r"\$UNSET/x: the environment variable UNSET is not set"),
        ("s3://${UNSET}/x", "the environment variable UNSET is not set"),
        ("~nobody_of_that_name/x", "there is no home folder of '~nobody_of_that_name'"),
        ("", "names no folder"),
        ("s3:/bucket/x", "expected s3://bucket/x"),
        (Path("s3://bucket/x"), "expected s3://bucket/x"),
        ("s3:bucket/x", "expected s3://bucket/folder"),
        ("file:x", "expected file:///folder"),
        ("file://data/x", "'data' is taken for a host name, expected file:///data/x"),
        ("s3://", "names no bucket or host, expected s3://bucket/folder"),
        ("s3:///bucket/x", "names no bucket or host, expected s3://bucket/x"),
        ("s3n://bucket/x", "write s3:// instead"),
        ("wasbs://c@a.blob.core.windows.net/x", "write abfss:// instead"),
        ("nosuch://host/x", "the scheme nosuch is unknown, expected a path or a URL such as s3://bucket/folder"),
        ("C:\\data", "a Windows path"),
        ("c:/data", "a Windows path"),
    ],
)
def test_misspelt_locations_never_become_folders(written: str | Path, message: str, here: Path) -> None:
    with pytest.raises(ValueError, match=message):
        absolute_location(written)
    assert list(here.iterdir()) == []


@pytest.mark.parametrize(
    ("url", "package"),
    [("abfss://c@acc.dfs.core.windows.net/x", "adlfs"), ("az://c/x", "adlfs"), ("gs://b/x", "gcsfs")],
)
def test_a_missing_package_is_named(url: str, package: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, package, None)  # as where it is not installed
    with pytest.raises(ValueError, match=f"needs the package {package}: pip install {package}"):
        absolute_location(url)


def test_databricks_paths_are_those_of_its_mounts(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(locations, "_DBFS", here / "dbfs")
    monkeypatch.setattr(locations, "_VOLUMES", here / "Volumes")
    for written in ("dbfs:/mnt/x", "dbfs:/Volumes/c/s/v"):
        with pytest.raises(ValueError, match=r"this machine has no .*, where Databricks mounts it"):
            absolute_location(written)
    (here / "dbfs").mkdir()
    (here / "Volumes").mkdir()
    assert absolute_location("dbfs:/mnt/x") == f"{here}/dbfs/mnt/x"
    assert absolute_location("dbfs:///mnt/x") == f"{here}/dbfs/mnt/x"
    assert absolute_location("dbfs:/Volumes/c/s/v") == f"{here}/Volumes/c/s/v"


@pytest.mark.parametrize(
    "url", ["s3://key:secret@bucket/x", "s3://key:se@secret@bucket/x", "s3://key:se/secret@bucket/x"]
)
def test_a_password_is_refused_and_not_repeated(url: str) -> None:
    with pytest.raises(ValueError, match=r"s3://\*\*\*@bucket/x: a URL may not hold a password") as caught:
        absolute_location(url)
    assert "secret" not in str(caught.value)


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("postgresql://user:p@ss@host/db", "postgresql://***@host/db"),
        ("http://user:pa/ss@host", "http://***@host"),
        ("cannot reach https://token@host:8080/x, nor //u:p@h", "cannot reach https://***@host:8080/x, nor //***@h"),
        ("s3://bucket/a@b", "s3://bucket/a@b"),
        ("abfss://container@account.dfs.core.windows.net/x", "abfss://container@account.dfs.core.windows.net/x"),
        ("abfss://container:key@account/x", "abfss://***@account/x"),
        ("sqlite:////data/mlflow.db", "sqlite:////data/mlflow.db"),
    ],
)
def test_credentials_are_not_shown(text: str, shown: str) -> None:
    assert redacted(text) == shown


def test_a_setting_that_must_be_a_path() -> None:
    assert absolute_path("training.output", "~/out") == "/home/somebody/out"
    with pytest.raises(ValueError, match=r"training\.output=s3://bucket/x: expected a path"):
        absolute_path("training.output", "s3://bucket/x")
    with pytest.raises(ValueError, match=r"reader\.cache_folder: s3:/x: .*expected s3://x"):
        absolute_path("reader.cache_folder", "s3:/x")
    assert not os.path.lexists("~")
