import errno
import fcntl
import json
import os
import threading
from pathlib import Path
from unittest.mock import Mock

import pytest

from pipelines.storage.folder import Location, StorageError
from pipelines.storage.lease import check_owner, lease
from pipelines.storage.lock import hold
from tests.patience import wait_until


def test_only_one_holds_a_dataset_and_nothing_is_left(tmp_path: Path) -> None:
    dataset = Location.at(tmp_path / "dataset")
    with hold(dataset), pytest.raises(RuntimeError, match="another job is writing"), hold(dataset):
        pass
    assert list(tmp_path.iterdir()) == []


def test_a_lock_whose_file_is_gone_is_no_lock(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The holder removes the file between our opening of it and our locking of it; another job makes a new one."""
    path = tmp_path / ".dataset.incomplete.lock"
    real, taken = fcntl.flock, []

    def flock(file: object, how: int) -> None:
        if not taken:
            path.unlink()
            other = path.open("w")
            taken.append(other)
            real(other, how)
        real(file, how)  # type: ignore[arg-type]

    monkeypatch.setattr(fcntl, "flock", flock)
    with pytest.raises(RuntimeError, match="another job is writing"), hold(Location.at(tmp_path / "dataset")):
        pass
    taken[0].close()
    with hold(Location.at(tmp_path / "dataset")):
        assert path.exists()


@pytest.mark.parametrize("number", [errno.ENOLCK, errno.ENOTSUP, errno.ENOSYS])
def test_a_file_system_without_locks_uses_a_lease(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int) -> None:
    monkeypatch.setattr(fcntl, "flock", Mock(side_effect=OSError(number, "no locks")))
    dataset = Location.at(tmp_path / "dataset")
    with hold(dataset) as check_owner:
        check_owner()
        with pytest.raises(RuntimeError, match=rf"another job is writing {dataset} \(process"), hold(dataset):
            pass
        check_owner()
    with hold(dataset) as check_owner:
        for name in (tmp_path / ".dataset.incomplete.lease").iterdir():
            name.unlink()
        with pytest.raises(RuntimeError, match=f"^{dataset}: another job took over"):
            check_owner()
    assert list(tmp_path.iterdir()) == []


def test_a_lease_of_the_future_is_said_to_be_one(tmp_path: Path) -> None:
    (tmp_path / "leases").mkdir()
    with lease(Location.at(tmp_path), "leases") as name:
        os.utime(tmp_path / name, (2e9, 2e9))
        told = rf"seen \d+ s in the future, as the clock has jumped\): .*or remove {tmp_path / name}$"
        with pytest.raises(RuntimeError, match=told), lease(Location.at(tmp_path), "leases"):
            pass


def test_another_error_of_the_lock_is_not_hidden(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fcntl, "flock", Mock(side_effect=OSError(errno.EIO, "a broken disk")))
    with pytest.raises(OSError, match="a broken disk"), hold(Location.at(tmp_path / "dataset")):
        pass


def test_a_lease_that_cannot_be_removed_hides_no_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def train() -> None:
        with lease(Location.at(tmp_path), "leases"):
            monkeypatch.setattr(Location, "remove", Mock(side_effect=StorageError("the storage is away")))
            raise ValueError("the training failed")

    (tmp_path / "leases").mkdir()
    with pytest.raises(ValueError, match="the training failed"):
        train()
    assert "cannot be removed (the storage is away): the folder is free again in" in caplog.text


def test_a_folder_is_the_same_one_by_every_link(tmp_path: Path) -> None:
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "elsewhere" / "link").symlink_to(tmp_path / "dataset")
    link, dataset = Location.at(tmp_path / "elsewhere" / "link"), Location.at(tmp_path / "dataset")
    for first, second in ((dataset, link), (link, dataset)):
        with hold(first), pytest.raises(RuntimeError, match="another job is writing"), hold(second):
            pass
    assert [path.name for path in (tmp_path / "elsewhere").iterdir()] == ["link"]


@pytest.fixture
def leases(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder for leases, which are refreshed all the time."""
    monkeypatch.setattr("pipelines.storage.lease.REFRESH_SECONDS", 0.01)
    (tmp_path / "leases").mkdir()
    return tmp_path / "leases"


def test_a_lease_is_kept_where_files_seem_not_to_exist(
    tmp_path: Path, leases: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`os.path.exists` is false where a disk has an error or does not answer."""
    monkeypatch.setattr(Location, "exists", lambda folder, name="": False)
    with lease(Location.at(leases.parent), leases.name) as name:
        written = (tmp_path / name).stat().st_ino
        wait_until(lambda: (tmp_path / name).stat().st_ino != written)
        check_owner(Location.at(tmp_path), "leases")
    assert not list((tmp_path / "leases").iterdir()), "it was removed at the end"


def test_a_lease_that_another_one_replaces_is_not_kept(tmp_path: Path, leases: Path) -> None:
    with lease(Location.at(leases.parent), leases.name) as name:
        taker = {"host": "far", "pid": 1, "machine": "other", "replaces": [Path(name).name]}
        (tmp_path / "leases" / "lease-x.json").write_text(json.dumps(taker))
        wait_until(lambda: not any(thread.name == "groundswell-lease" for thread in threading.enumerate()))
        with pytest.raises(RuntimeError, match="another job took over"):
            check_owner(Location.at(tmp_path), "leases")
