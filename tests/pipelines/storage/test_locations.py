import os
import sys
from pathlib import Path

import pytest

from pipelines.storage import locations
from pipelines.storage.locations import absolute_location, absolute_path, redacted


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    for name, value in (("HOME", "/home/somebody"), ("DATA", "/data/sets"), ("BUCKET", "bucket")):
        monkeypatch.setenv(name, value)
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
        ("data/x", "{here}/data/x"),
        (Path("data/x"), "{here}/data/x"),
        ("data:v2/x", "{here}/data:v2/x"),
        ("./s3:/x", "{here}/s3:/x"),
    ],
)
def test_spellings(written: str | Path, found: str, here: Path) -> None:
    assert absolute_location(written) == found.format(here=here)


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
        ("s3://bucket/a::b", "a URL with '::' is a chain of URLs"),
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


@pytest.mark.parametrize(
    ("written", "found"),
    [
        ("dbfs:/mnt/x", "dbfs/mnt/x"),
        ("dbfs:///mnt/x", "dbfs/mnt/x"),
        ("dbfs:/Volumes/c/s/v", "Volumes/c/s/v"),
    ],
)
def test_databricks_paths_are_those_of_its_mounts(
    written: str, found: str, here: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(locations, "DBFS", here / "dbfs")
    monkeypatch.setattr(locations, "VOLUMES", here / "Volumes")
    with pytest.raises(ValueError, match=r"this machine has no .*, where Databricks mounts it"):
        absolute_location(written)
    (here / found.partition("/")[0]).mkdir()
    assert absolute_location(written) == f"{here}/{found}"


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
        ("mysql+pymysql://u:p@ss@host:3306/db", "mysql+pymysql://***@host:3306/db"),
        ("postgresql://user:p@s/s@host/db?sslmode=require", "postgresql://***@host/db?sslmode=require"),
        ("//user:p@ss@host", "//***@host"),
        ("https://host/api?access_token=abc&page=2", "https://host/api?access_token=***&page=2"),
        ("postgresql://host/db?user=u&password=p@ss", "postgresql://host/db?user=u&password=***"),
        ("no answer from https://u:p@ss@host/x (timeout)", "no answer from https://***@host/x (timeout)"),
        ("sqlite:////data/mlflow@home.db", "sqlite:////data/mlflow@home.db"),
        ("http://127.0.0.1:5000/api/2.0/runs/get?run_id=1", "http://127.0.0.1:5000/api/2.0/runs/get?run_id=1"),
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
