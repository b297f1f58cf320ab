import pickle
from pathlib import Path

import pytest

from pipelines import storage
from pipelines.storage import Folder, StorageError
from tests.patience import patient


@pytest.fixture(params=["local", "s3"])
def folder(request: pytest.FixtureRequest, tmp_path: Path) -> Folder:
    if request.param == "local":
        return Folder.at(tmp_path / "folder")
    return Folder.at(request.getfixturevalue("s3_folder"))


def test_files_of_a_folder(folder: Folder) -> None:
    assert folder.names() == []
    assert not folder.exists()
    folder.make("sub")
    folder.write("a b#é.txt", b"0123456789")
    folder.write("sub/empty", b"")
    assert folder.names() == ["a b#é.txt", "sub"]
    assert sorted(folder.entries()) == [("a b#é.txt", False, 10), ("sub", True, folder.entries()[0][2])] or (
        {entry[:2] for entry in folder.entries()} == {("a b#é.txt", False), ("sub", True)}
    )
    assert folder.read("a b#é.txt") == b"0123456789"
    assert folder.read_start("a b#é.txt", 3) == b"012"
    assert folder.read_start("a b#é.txt", 99) == b"0123456789"
    assert folder.read_start("sub/empty", 5) == b""
    with folder.open("a b#é.txt") as file:
        file.seek(7)
        assert file.read() == b"789"
    assert (folder / "sub").size("empty") == 0
    assert folder.size("a b#é.txt") == 10
    assert folder.size("sub") is None
    assert folder.size("missing") is None
    assert folder.modified("missing") is None
    assert folder.modified("a b#é.txt") is not None
    assert folder.names("a b#é.txt") == []
    assert folder.names("missing") == []
    folder.remove("sub")
    folder.remove("sub")
    assert folder.names() == ["a b#é.txt"]
    folder.remove()
    assert not folder.exists()


@pytest.mark.parametrize("kind", ["local", "s3", "memory"])
def test_names_are_no_patterns(kind: str, request: pytest.FixtureRequest, tmp_path: Path) -> None:
    parent = {
        "local": lambda: str(tmp_path),
        "s3": lambda: request.getfixturevalue("s3_folder"),
        "memory": lambda: f"memory://{tmp_path.name}",
    }[kind]()
    mine, other = Folder.at(f"{parent}/lr=[1]"), Folder.at(f"{parent}/lr=1")
    for folder in (mine, other):
        folder.make("sub")
        for name in ("a.json", "b[1].json", "b1.json", "sub/c"):
            folder.write(name, name.encode())
    mine.remove("a.json")
    mine.remove("a.json")
    mine.remove("b[1].json")
    assert set(mine.files()) == {"b1.json", "sub/c"}
    other.remove("b[1].json")
    assert set(other.files()) == {"a.json", "b1.json", "sub/c"}
    mine.remove()
    assert not mine.exists()
    assert other.read("sub/c") == b"sub/c"
    assert set(other.files()) == {"a.json", "b1.json", "sub/c"}


def test_what_is_missing_is_not_found(folder: Folder) -> None:
    for read in (folder.read, lambda name: folder.read_start(name, 4), lambda name: folder.open(name).read()):
        with pytest.raises(FileNotFoundError):
            read("missing")


def test_a_file_is_whole_or_not_there(folder: Folder) -> None:
    folder.make()
    folder.write("file", b"old")

    def fail() -> None:
        with folder.new_file("file") as path:
            path.write_bytes(b"ne")
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        fail()
    assert folder.read("file") == b"old"
    assert folder.names() == ["file"]
    folder.write("file", b"new")
    assert folder.read("file") == b"new"


def test_a_folder_travels(folder: Folder) -> None:
    folder.make()
    folder.write("file", b"x")
    assert pickle.loads(pickle.dumps(folder)).read("file") == b"x"


def test_folders_beside_and_in_a_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert Folder.at("data/x").url == f"{tmp_path}/data/x"
    assert Folder.at(Folder.at("x")) == Folder.at("x")
    assert (Folder.at("x") / "y").sibling("z").name == "z"
    folder = Folder.at("s3://bucket/folder/")
    assert (folder.url, folder.name, folder.is_local) == ("s3://bucket/folder", "folder", False)


def test_hdfs_without_its_library_is_one_error_with_what_to_set(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("JAVA_HOME", "/nowhere")
    for use in (Folder.check, Folder.names, lambda folder: folder.read("x"), lambda folder: folder.make("x")):
        with pytest.raises(StorageError, match=r"hdfs://namenode:8020/x: OSError: .*set JAVA_HOME, HADOOP_HOME and"):
            use(Folder.at("hdfs://namenode:8020/x"))


def test_a_missing_bucket_is_named(s3: str) -> None:
    with pytest.raises(StorageError, match="there is no s3://nobucket"):
        Folder.at("s3://nobucket/x").check()
    Folder.at(f"{s3}/not-there-yet").check()


def test_s3a_is_the_same_store(s3_folder: str) -> None:
    Folder.at(s3_folder).write("x", b"1")
    assert Folder.at(s3_folder.replace("s3://", "s3a://")).names() == ["x"]


@pytest.mark.parametrize(
    ("environment", "message"),
    [
        ({"AWS_ENDPOINT_URL": "http://127.0.0.1:9"}, "EndpointConnectionError|no answer within"),
        ({"AWS_ACCESS_KEY_ID": "", "AWS_SECRET_ACCESS_KEY": ""}, "NoCredentialsError"),
    ],
)
def test_a_store_that_cannot_be_used_is_one_error(s3: str, environment: dict[str, str], message: str) -> None:
    # In a process of its own: connections are kept per process.
    import os
    import subprocess
    import sys

    code = f"from pipelines.storage import Folder\nFolder.at('{s3}/x').check()"
    values = {name: value for name, value in {**os.environ, **environment}.items() if value}
    values["AWS_EC2_METADATA_DISABLED"] = "true"
    result = subprocess.run(
        [sys.executable, "-c", code], env=values, capture_output=True, text=True, timeout=patient(120)
    )
    last = result.stderr.strip().splitlines()[-1]
    assert last.startswith(f"pipelines.storage.StorageError: {s3}/x: ")
    assert any(part in last for part in message.split("|"))


def test_silence_ends_after_some_seconds(s3_folder: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(storage, "_SECONDS_FOR_AN_ANSWER", 0.0)
    with pytest.raises(StorageError, match=r"no answer within 0 s.*AWS_ENDPOINT_URL"):
        Folder.at(s3_folder).check()
