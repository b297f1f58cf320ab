import errno
import os
import pickle
import re
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

import pytest

from pipelines.storage import folder as storage
from pipelines.storage.folder import Location, StorageError
from pipelines.storage.whole_files import disk_errors
from tests.patience import patient


@pytest.fixture(params=["local", "s3"])
def folder(request: pytest.FixtureRequest, tmp_path: Path) -> Location:
    return Location.at(tmp_path / "folder" if request.param == "local" else request.getfixturevalue("s3_folder"))


def test_files_of_a_folder(folder: Location) -> None:
    assert (folder.names(), folder.exists()) == ([], False)
    folder.make("sub")
    folder.write("a b#é.txt", b"0123456789")
    folder.write("sub/empty", b"")
    assert (folder.names(), {entry[:2] for entry in folder.entries()}) == (
        ["a b#é.txt", "sub"],
        {("a b#é.txt", False), ("sub", True)},
    )
    starts = [("a b#é.txt", 3), ("a b#é.txt", 99), ("sub/empty", 5)]
    assert [folder.read_start(*start) for start in starts] == [b"012", b"0123456789", b""]
    with folder.open("a b#é.txt") as file:
        file.seek(7)
        assert file.read() == b"789"
    assert (
        [folder.size(name) for name in ("a b#é.txt", "sub/empty", "sub", "missing")],
        [folder.modified(name) is None for name in ("a b#é.txt", "missing")],
    ) == ([10, 0, None, None], [False, True])
    assert folder.names("a b#é.txt") == folder.names("missing") == []
    for _ in range(2):
        folder.remove("sub")
    assert folder.names() == ["a b#é.txt"]
    folder.remove()
    assert not folder.exists()


@pytest.mark.parametrize("kind", ["local", "s3", "memory"])
def test_names_are_no_patterns(kind: str, request: pytest.FixtureRequest, tmp_path: Path) -> None:
    places = {"local": str(tmp_path), "memory": f"memory://{tmp_path.name}"}
    parent = places.get(kind) or request.getfixturevalue("s3_folder")
    mine, other = Location.at(f"{parent}/lr=[1]"), Location.at(f"{parent}/lr=1")
    for folder in (mine, other):
        folder.make("sub")
        for name in ("a.json", "b[1].json", "b1.json", "sub/c"):
            folder.write(name, name.encode())
    for name in ("a.json", "a.json", "b[1].json"):
        mine.remove(name)
    assert set(mine.files()) == {"b1.json", "sub/c"}
    other.remove("b[1].json")
    mine.remove()
    assert (mine.exists(), other.read("sub/c"), set(other.files())) == (False, b"sub/c", {"a.json", "b1.json", "sub/c"})


def test_a_file_is_a_location_too(folder: Location, tmp_path: Path) -> None:
    folder.make()
    for name in ("step-1.npz", "step-2.npz", "other"):
        folder.write(name, name.encode())
    file = folder / "step-1.npz"
    assert (
        file.name,
        file.stem,
        file.parent,
        file.sibling("other").read(),
        [file.is_file(), file.is_folder(), folder.is_file(), folder.is_folder()],
    ) == ("step-1.npz", "step-1", folder, b"other", [True, False, False, True])
    assert (
        [(folder / "missing").is_file(), (folder / "missing").is_folder()],
        sorted(found.name for found in folder.glob("step-*")),
    ) == ([False, False], ["step-1.npz", "step-2.npz"])
    assert file in folder.glob("step-*")
    with file.open() as opened:
        assert (file.size(), opened.read()) == (10, b"step-1.npz")
    (tmp_path / "copied").write_bytes(b"new")
    file.put(tmp_path / "copied")
    with file.new_file() as path:
        assert file.read() == b"new"
        path.write_bytes(b"newer")
    assert (file.read(), len(folder.names())) == (b"newer", 3)
    file.remove()
    assert folder.names() == ["other", "step-2.npz"]


def test_only_a_local_location_is_a_path(tmp_path: Path) -> None:
    assert (
        os.fspath(Location.at(tmp_path)),
        [Location(url).parent.url for url in ("/a", "/a/b", "s3://bucket/a")],
    ) == (str(tmp_path), ["/", "/a", "s3://bucket"])
    with pytest.raises(AssertionError, match="s3://bucket/a"):
        os.fspath(Location("s3://bucket/a"))


def test_what_is_missing_is_not_found(folder: Location) -> None:
    for read in (folder.read, lambda name: folder.read_start(name, 4), lambda name: folder.open(name).read()):
        with pytest.raises(FileNotFoundError):
            read("missing")


def test_a_file_is_whole_or_not_there(folder: Location) -> None:
    folder.make()
    folder.write("file", b"old")

    with suppress(KeyboardInterrupt), folder.new_file("file") as path:
        path.write_bytes(b"ne")
        raise KeyboardInterrupt
    assert (folder.read("file"), folder.names()) == (b"old", ["file"])
    folder.write("file", b"new")
    assert folder.read("file") == b"new"


def test_a_folder_travels(folder: Location) -> None:
    folder.make()
    folder.write("file", b"x")
    assert pickle.loads(pickle.dumps(folder)).read("file") == b"x"


def test_folders_beside_and_in_a_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert (Location.at("data/x").url, Location.at(Location.at("x")), (Location.at("x") / "y").sibling("z").name) == (
        f"{tmp_path}/data/x",
        Location.at("x"),
        "z",
    )
    folder = Location.at("s3://bucket/folder/")
    assert (folder.url, folder.name, folder.is_local) == ("s3://bucket/folder", "folder", False)


def test_hdfs_without_its_library_is_one_error_with_what_to_set(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("JAVA_HOME", "/nowhere")
    for use in (Location.check, Location.names, lambda folder: folder.read("x"), lambda folder: folder.make("x")):
        with pytest.raises(StorageError, match=r"hdfs://namenode:8020/x: OSError: .*set JAVA_HOME, HADOOP_HOME and"):
            use(Location.at("hdfs://namenode:8020/x"))


def test_a_missing_bucket_is_named(s3: str) -> None:
    with pytest.raises(StorageError, match="there is no s3://nobucket"):
        Location.at("s3://nobucket/x").check()
    Location.at(f"{s3}/not-there-yet").check()


def test_s3a_is_the_same_store(s3_folder: str) -> None:
    Location.at(s3_folder).write("x", b"1")
    assert Location.at(s3_folder.replace("s3://", "s3a://")).names() == ["x"]


@pytest.mark.parametrize(
    ("environment", "message"),
    [
        pytest.param(
            {"AWS_ENDPOINT_URL": "http://127.0.0.1:9"},
            "EndpointConnectionError|no answer within",
            marks=pytest.mark.long,  # after several attempts
        ),
        ({"AWS_ACCESS_KEY_ID": "", "AWS_SECRET_ACCESS_KEY": ""}, "NoCredentialsError"),
    ],
)
def test_a_store_that_cannot_be_used_is_one_error(s3: str, environment: dict[str, str], message: str) -> None:
    # In a process of its own: connections are kept per process.
    code = f"from pipelines.storage.folder import Location\nLocation.at('{s3}/x').check()"
    values = {**os.environ, "AWS_EC2_METADATA_DISABLED": "true", **environment}
    given = {name: value for name, value in values.items() if value}
    result = subprocess.run(
        [sys.executable, "-c", code], env=given, capture_output=True, text=True, timeout=patient(120)
    )
    assert re.match(
        rf"pipelines\.storage\.folder\.StorageError: {s3}/x: .*({message})", result.stderr.strip().splitlines()[-1]
    )


def test_silence_ends_after_some_seconds(s3_folder: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(storage, "SECONDS_FOR_AN_ANSWER", 0.0)
    with pytest.raises(StorageError, match=r"no answer within 0 s.*AWS_ENDPOINT_URL"):
        Location.at(s3_folder).check()


@pytest.mark.parametrize("name", [255 * "x", 127 * "é"])
def test_a_file_may_have_the_longest_name(tmp_path: Path, name: str) -> None:
    Location.at(tmp_path).write(name, b"content")
    assert [path.name for path in tmp_path.iterdir()] == [name]


def test_an_error_that_is_neither_of_space_nor_of_permission_stays_as_it_is() -> None:
    error = OSError(errno.EIO, "Input/output error")
    with pytest.raises(OSError, match="Input/output error") as caught, disk_errors("somewhere"):
        raise error
    assert caught.value is error
