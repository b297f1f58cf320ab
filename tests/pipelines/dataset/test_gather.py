"""Reading rows in C++: the bytes, the checksums and the refusals of reading them in Python."""

import os
import random
import shutil
from pathlib import Path

import numpy as np
import pytest
from crc32c import crc32c

from models.compiled import Library
from pipelines.dataset import gather
from pipelines.dataset.reader import Batch, ReaderSettings, SplitReader

pytestmark = [
    pytest.mark.spark,
    # Where there is a compiler, the library must be there too.
    pytest.mark.skipif(
        shutil.which("g++") is None and not gather.LIBRARY.exists(), reason="the project was installed without g++"
    ),
]


@pytest.fixture
def library():
    found = gather.load()
    assert found is not None
    return found


@pytest.mark.parametrize("level", [1, 2])
def test_checksums_are_those_of_the_format(library, level):
    if library.groundswell_gather_level() < level:
        pytest.skip("this processor has no wide registers for it")

    def crc(value: bytes, before: int = 0) -> int:
        return int(library.groundswell_crc32c(value, len(value), before, level))

    assert crc(b"123456789") == 0xE3069283
    draw = random.Random(0)
    for length in [*range(70), 127, 128, 129, *range(250, 262), *range(508, 516), 1023, 4096, 115_200, 163_847]:
        value, before = draw.randbytes(length), draw.getrandbits(32)
        assert crc(value, before) == crc32c(value, before), length
    whole = draw.randbytes(3000)
    assert crc(whole[777:], crc(whole[:777])) == crc(whole)


def plain(dataset: Path, verify: str = "first_epoch") -> SplitReader:
    """A reader without the library."""
    found = SplitReader(dataset, "train", ReaderSettings(verify=verify))
    found._gather = None
    return found


def assert_equal(one: Batch, other: Batch) -> None:
    assert one.images.keys() == other.images.keys()
    for name, images in one.images.items():
        np.testing.assert_array_equal(images, other.images[name])
    for part in ("targets", "weights", "rows"):
        np.testing.assert_array_equal(getattr(one, part), getattr(other, part))


@pytest.mark.parametrize("verify", ["first_epoch", "always", "never"])
def test_both_ways_read_the_same(small_dataset, monkeypatch, verify):
    fast, slow = SplitReader(small_dataset, "train", ReaderSettings(verify=verify)), plain(small_dataset, verify)
    monkeypatch.setattr(fast, "_read_once", None)  # only where the library finds something wrong
    draw = np.random.default_rng(0)
    for size in (1, 2, 7, 32):
        rows = draw.integers(0, len(fast), size)
        assert_equal(fast.gather(rows), slow.gather(rows))
        assert_equal(fast.gather(rows[:1], size=size), slow.gather(rows[:1], size=size))


def test_a_row_counts_as_checked_when_it_was(small_dataset, monkeypatch):
    fast, slow = SplitReader(small_dataset, "train"), plain(small_dataset)
    monkeypatch.setattr(fast, "_read_once", None)
    for reader in (fast, slow):
        reader.gather(np.array([3, 0, 3]))
    flags = [reader._files.row_group(0).unchecked.tolist() for reader in (fast, slow)]
    assert flags[0] == flags[1]
    assert flags[0][:4] == [False, True, True, False]


@pytest.mark.parametrize("column", range(4))
@pytest.mark.parametrize("part", ["length", "header", "first value", "last value"])
def test_any_flipped_bit_is_found(small_dataset, tmp_path, column, part):
    dataset = shutil.copytree(small_dataset, tmp_path / "dataset")
    reader, row = SplitReader(dataset, "train"), 5
    group = reader._files.row_group(0)
    stride, prefix = (int(width) for width in reader._gather._table[column][:2])
    start = group.starts[column] + row * stride
    place = {"length": start, "header": start + 10, "first value": start + prefix, "last value": start + stride - 1}
    with group.file.path.open("r+b") as file:
        file.seek(place[part])
        (byte,) = file.read(1)
        file.seek(place[part])
        file.write(bytes([byte ^ 16]))
    reader.gather(np.array([0, 1]))
    for again in (reader, plain(dataset)):
        with pytest.raises(ValueError, match=r"row group 0, row 5 \(sample .*\) is damaged"):
            again.gather(np.array([0, row, 1]))


def test_what_was_wrong_for_a_moment_is_read_again(small_dataset, monkeypatch):
    reader = SplitReader(small_dataset, "train")
    monkeypatch.setattr(reader, "_gather", lambda *arguments, **settings: False)
    assert_equal(reader.gather(np.array([4, 2])), plain(small_dataset).gather(np.array([4, 2])))


def test_a_closed_file_is_an_error_of_its_own(small_dataset, tmp_path):
    reader = SplitReader(shutil.copytree(small_dataset, tmp_path / "dataset"), "train")
    nothing = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, reader._files.row_group(0).file.descriptor)
    os.close(nothing)
    with pytest.raises(ValueError, match="the file was truncated"):
        reader.gather(np.array([0]))


@pytest.mark.skipif(shutil.which("g++") is None, reason="no g++")
def test_a_processor_without_the_instructions_reads_in_python(tmp_path, monkeypatch, caplog):
    source = 'extern "C" __attribute__((visibility("default"))) long long groundswell_gather_level() { return 0; }'
    (tmp_path / "none.cc").write_text(source)
    library, problem = Library(tmp_path).renew()
    assert problem == ""
    monkeypatch.setattr(gather, "LIBRARY", library)
    assert gather.load.__wrapped__() is None
    assert caplog.messages[0].endswith("in Python, which takes longer: the processor has no instructions for checksums")
