import io
import multiprocessing
import os
import signal
import subprocess
import time
from pathlib import Path
from unittest.mock import Mock

import numpy as np
import pyarrow as pa
import pytest

from pipelines.dataset.format.columns import CHECKSUM_FIELD
from pipelines.dataset.format.encoding import computed_checksums, encoded
from pipelines.dataset.format.layout import open_row_groups, value_bytes
from pipelines.dataset.format.rows import ColumnBuffer
from pipelines.dataset.read import cache as module_of_cache
from pipelines.dataset.read.cache import RowGroupCache
from tests.patience import patient, wait_until

FIELDS, ROWS = {"image": ((2, 2, 1), np.dtype(np.uint16)), "labels": ((3,), np.dtype(np.uint8))}, 5
SIZE = ROWS * sum(value_bytes(*field) for field in FIELDS.values())


def table(first: int = 0) -> pa.Table:
    columns = {}
    for name, (shape, dtype) in FIELDS.items():
        buffer = ColumnBuffer(shape, dtype, ROWS)
        for row in range(ROWS):
            buffer.row(row)[:] = first + row
        columns[name] = buffer.arrow(ROWS)
    return pa.table({**columns, CHECKSUM_FIELD: computed_checksums(pa.table(columns), FIELDS)})


def first_image(group) -> int:
    """The first pixel of the last row."""
    start = group.starts[0] + ROWS * value_bytes(*FIELDS["image"]) - 8
    return int(np.frombuffer(os.pread(group.file.descriptor, 2, start), np.uint16)[0])


def test_the_second_time_nothing_is_read(tmp_path: Path) -> None:
    cache = RowGroupCache(tmp_path, 1 << 20)
    cache.get("a", FIELDS, table, ROWS)

    assert (
        first_image(cache.get("a", FIELDS, Mock(side_effect=AssertionError("it is read again")), ROWS)),
        first_image(cache.get("b", FIELDS, lambda: table(7), ROWS)),
    ) == (ROWS - 1, 7 + ROWS - 1)


def test_the_least_recently_used_makes_room_and_open_files_stay_readable(tmp_path: Path) -> None:
    size = RowGroupCache(tmp_path / "one", 1 << 20).get("a", FIELDS, table, ROWS).file.path.stat().st_size
    cache = RowGroupCache(tmp_path / "two", 2 * size + SIZE // 2)
    old = cache.get("a", FIELDS, lambda: table(100), ROWS)
    cache.get("b", FIELDS, table, ROWS)
    os.utime(old.file.path, (1, 1))
    cache.get("a", FIELDS, table, ROWS)  # used again: b is the oldest now, once it is made so
    others = [path for path in (tmp_path / "two").glob("*.parquet") if path != old.file.path]
    os.utime(others[0], (2, 2))
    cache.get("c", FIELDS, table, ROWS)
    assert (old.file.path.exists(), others[0].exists()) == (True, False)
    os.utime(old.file.path, (1, 1))
    cache.get("d", FIELDS, table, ROWS)
    assert (old.file.path.exists(), first_image(old)) == (False, 100 + ROWS - 1)


def test_files_of_others_in_its_folder_stay(tmp_path: Path) -> None:
    mine = [tmp_path / name for name in (".env", ".ssh/id", "results.parquet", "locks/0", f".{'a' * 64}.parquet")]
    for path in mine:
        path.parent.mkdir(exist_ok=True)
        path.write_text("mine")
    unfinished = tmp_path / f".{'a' * 64}.parquet.{'b' * 32}"
    unfinished.touch()
    cache = RowGroupCache(tmp_path, 1)
    for key in "abc":
        cache.get(key, FIELDS, table, ROWS)
    assert ([path.read_text() for path in mine], unfinished.exists()) == (["mine"] * len(mine), False)
    assert len(list(tmp_path.glob("*.parquet"))) == 3  # the newest, and two of the user's


def test_a_damaged_entry_is_written_again(tmp_path: Path) -> None:
    cache = RowGroupCache(tmp_path, 1 << 20)
    path = cache.get("a", FIELDS, table, ROWS).file.path
    path.write_bytes(path.read_bytes()[:50])
    assert first_image(cache.get("a", FIELDS, lambda: table(9), ROWS)) == 9 + ROWS - 1


def test_a_cache_of_another_user_is_refused(tmp_path: Path) -> None:
    if os.getuid() != 0:
        pytest.skip("only root can give a folder away")
    os.chown(tmp_path, 12345, -1)
    with pytest.raises(RuntimeError, match=r"belongs to another user: set reader.cache_folder"):
        RowGroupCache(tmp_path, 1)


def test_a_folder_that_cannot_be_made_is_named() -> None:
    with pytest.raises(RuntimeError, match=r"/proc/nothing.*set reader.cache_folder"):
        RowGroupCache(Path("/proc/nothing"), 1)


FORK = multiprocessing.get_context("fork")


def _get(folder: Path, seconds: float, reads) -> None:
    def slow() -> pa.Table:
        with reads.get_lock():
            reads.value += 1
        time.sleep(seconds)
        return table()

    RowGroupCache(folder, 1 << 20).get("a", FIELDS, slow, ROWS)


def test_of_ranks_that_start_at_once_one_writes(tmp_path: Path) -> None:
    reads = FORK.Value("i", 0)
    processes = [FORK.Process(target=_get, args=(tmp_path, 0.3, reads)) for _ in range(3)]
    for process in processes:
        process.start()
    for process in processes:
        process.join(patient(30))
        assert process.exitcode == 0
    assert reads.value == 1


def test_where_the_writer_dies_the_next_one_writes(tmp_path: Path) -> None:
    reads = FORK.Value("i", 0)
    dying = FORK.Process(target=_get, args=(tmp_path, patient(60), reads))
    dying.start()
    wait_until(lambda: reads.value > 0)
    waiting = FORK.Process(target=_get, args=(tmp_path, 0, reads))
    waiting.start()
    os.kill(dying.pid, signal.SIGKILL)
    waiting.join(patient(30))
    dying.join(patient(30))
    assert (waiting.exitcode, reads.value) == (0, 2)


def test_a_full_disk_names_the_setting(tmp_path: Path) -> None:
    if subprocess.run(["mount", "-t", "tmpfs", "-o", "size=64k", "tmpfs", str(tmp_path)], check=False).returncode:
        pytest.skip("a small filesystem cannot be mounted")
    try:
        cache = RowGroupCache(tmp_path, 1 << 30)
        cache.get("a", FIELDS, table, ROWS)
        (tmp_path / "ballast").write_bytes(bytes(os.statvfs(tmp_path).f_bavail * 4096))
        with pytest.raises(RuntimeError, match=r"cannot write .*reader.cache_folder"):
            cache.get("b", FIELDS, table, ROWS)
        assert not [path for path in tmp_path.iterdir() if path.name.startswith(".")]
        (tmp_path / "ballast").unlink()
        assert first_image(cache.get("b", FIELDS, table, ROWS)) == ROWS - 1
    finally:
        subprocess.run(["umount", "-l", str(tmp_path)], check=True)


def npy(array: np.ndarray) -> bytes:
    stream = io.BytesIO()
    np.save(stream, array)
    return stream.getvalue()


def test_values_of_another_encoding_are_encoded_again() -> None:
    images = [np.full((2, 2, 1), row, np.uint16) for row in range(3)]
    fortran = [npy(np.asfortranarray(np.arange(4, dtype=np.uint16).reshape(2, 2, 1)))] + [npy(i) for i in images[1:]]
    done = encoded(pa.table({"image": fortran, "labels": [npy(np.zeros(3, np.uint8))] * 3}), FIELDS)
    first = np.load(pa.BufferReader(done["image"][0].as_buffer()))
    assert (first.ravel().tolist(), len({len(value.as_py()) for value in done["image"]})) == ([0, 1, 2, 3], 1)


@pytest.mark.parametrize(
    ("image", "message"),
    [
        (npy(np.zeros((2, 2, 2), np.uint16)), r"'image' holds uint16 \(2, 2, 2\) at row 1, expected"),
        (npy(np.zeros((2, 2, 1), np.int16)), "'image' holds int16"),
        (b"not an array", "'image' holds no array at row 1"),
        (None, "'image' has 1 missing values"),
        (npy(np.array([{}], object)), "'image' holds no array at row 1"),
    ],
)
def test_values_that_are_not_what_the_manifest_says_are_refused(image: bytes | None, message: str) -> None:
    good = npy(np.zeros((2, 2, 1), np.uint16))
    given = pa.table({"image": [good, image], "labels": [npy(np.zeros(3, np.uint8))] * 2})
    with pytest.raises(ValueError, match=message):
        encoded(given, FIELDS)


def test_an_entry_that_is_removed_while_it_is_opened_is_written_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def open_late(path, *args, **settings):
        if not removed:  # another process makes room at this very moment
            removed.append(path.unlink())
        return open_row_groups(path, *args, **settings)

    removed = []
    store = RowGroupCache(tmp_path, 1 << 20)
    store.get("a", FIELDS, table, ROWS)
    monkeypatch.setattr(module_of_cache, "open_row_groups", open_late)
    assert first_image(store.get("a", FIELDS, lambda: table(4), ROWS)) == 4 + ROWS - 1
