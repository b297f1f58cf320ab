import errno
import fcntl
from pathlib import Path

import pytest

from pipelines.dataset.lease import lease
from pipelines.dataset.lock import hold
from pipelines.storage import Folder, StorageError


def test_only_one_holds_a_dataset_and_nothing_is_left(tmp_path: Path) -> None:
    dataset = Folder.at(tmp_path / "dataset")
    with hold(dataset), pytest.raises(RuntimeError, match="another job is writing"), hold(dataset):
        pass
    with hold(dataset):
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
    with pytest.raises(RuntimeError, match="another job is writing"), hold(Folder.at(tmp_path / "dataset")):
        pass
    taken[0].close()
    with hold(Folder.at(tmp_path / "dataset")):
        assert path.exists()


@pytest.mark.parametrize("number", [errno.ENOLCK, errno.ENOTSUP, errno.ENOSYS])
def test_a_file_system_without_locks_uses_a_lease(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int) -> None:
    def flock(file: object, how: int) -> None:
        raise OSError(number, "no locks")

    monkeypatch.setattr("fcntl.flock", flock)
    dataset = Folder.at(tmp_path / "dataset")
    with hold(dataset) as still_held:
        still_held()
        with pytest.raises(RuntimeError, match=r"another job is writing .* \(process"), hold(dataset):
            pass
        still_held()
    with hold(dataset) as still_held:
        for name in (tmp_path / ".dataset.incomplete.lease").iterdir():
            name.unlink()
        with pytest.raises(RuntimeError, match="another job took over"):
            still_held()
    assert list(tmp_path.iterdir()) == []


def test_another_error_of_the_lock_is_not_hidden(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def flock(file: object, how: int) -> None:
        raise OSError(errno.EIO, "a broken disk")

    monkeypatch.setattr("fcntl.flock", flock)
    with pytest.raises(OSError, match="a broken disk"), hold(Folder.at(tmp_path / "dataset")):
        pass


def test_a_lease_that_cannot_be_removed_hides_no_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def away(folder: Folder, name: str) -> None:
        raise StorageError("the storage is away")

    def train() -> None:
        with lease(Folder.at(tmp_path), "leases"):
            monkeypatch.setattr(Folder, "remove", away)
            raise ValueError("the training failed")

    (tmp_path / "leases").mkdir()
    with pytest.raises(ValueError, match="the training failed"):
        train()
    assert "cannot be removed (the storage is away): the folder is free again in" in caplog.text
