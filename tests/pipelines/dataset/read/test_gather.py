"""Reading rows in C++: the bytes, the checksums and the refusals of reading them in Python."""

import gc
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
from crc32c import crc32c

from models.compiled import Library
from pipelines.dataset import gather
from pipelines.dataset.read.reader import Batch, ReaderSettings, SplitReader
from tests.patience import patient
from tests.pipelines.dataset.files import flip_bit

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


@pytest.fixture(params=[1, 2])
def level(request, library):
    """Which instructions are used."""
    if library.groundswell_gather_level() < request.param:
        pytest.skip("this processor has no wide registers for it")
    return request.param


def test_checksums_are_those_of_the_format(library, level):
    def crc(value: bytes, before: int = 0) -> int:
        return int(library.groundswell_crc32c(value, len(value), before, level, None))

    assert crc(b"123456789") == 0xE3069283
    draw = random.Random(0)
    for length in [*range(70), 127, 128, 129, *range(250, 262), *range(508, 516), 1023, 4096, 115_200, 163_847]:
        value, before = draw.randbytes(length), draw.getrandbits(32)
        assert crc(value, before) == crc32c(value, before), length
    whole = draw.randbytes(3000)
    assert crc(whole[777:], crc(whole[:777])) == crc(whole)


def test_a_copy_is_whole_wherever_it_begins_and_ends(library, level):
    draw = random.Random(1)
    for length in [*range(70), *range(250, 262), 319, 320, 321, *range(508, 516), 4097, 115_200]:
        value, before, place = draw.randbytes(length), draw.getrandbits(32), draw.randrange(64)
        around = np.full(length + 192, 7, np.uint8)
        found = library.groundswell_crc32c(value, length, before, level, gather.address(around) + 64 + place)
        assert found == crc32c(value, before), length
        assert around[64 + place :][:length].tobytes() == value, length
        assert (around[: 64 + place] == 7).all()
        assert (around[64 + place + length :] == 7).all()


def plain(dataset: Path, verify: str = "first_epoch") -> SplitReader:
    """A reader without the library."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("pipelines.dataset.read.reader.make_gather", lambda columns: None)
        return SplitReader(dataset, "train", ReaderSettings(verify=verify))


def fast(dataset: Path, verify: str = "first_epoch") -> SplitReader:
    """A reader whose rows all come from the library: nothing is read in Python afterwards."""

    def make(columns):
        read = gather.make_gather(columns)

        def whole(*arguments, **settings):
            assert read(*arguments, **settings)
            return True

        return whole

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("pipelines.dataset.read.reader.make_gather", make)
        return SplitReader(dataset, "train", ReaderSettings(verify=verify))


def assert_equal(one: Batch, other: Batch) -> None:
    np.testing.assert_equal(vars(one), vars(other))


@pytest.mark.parametrize("verify", ["first_epoch", "always", "never"])
def test_both_ways_read_the_same(small_dataset, verify):
    one, other, draw = fast(small_dataset, verify), plain(small_dataset, verify), np.random.default_rng(0)
    for size in (1, 2, 7, 32):
        rows = draw.integers(0, len(one), size)
        assert_equal(one.gather(rows), other.gather(rows))
        assert_equal(one.gather(rows[:1], size=size), other.gather(rows[:1], size=size))


def test_a_row_counts_as_checked_when_it_was(small_dataset):
    readers = fast(small_dataset), plain(small_dataset)
    for reader in readers:
        reader.gather(np.array([3, 0, 3]))
    flags = [reader._files.row_group(0).unchecked.tolist() for reader in readers]
    assert (flags[0], flags[0][:4]) == (flags[1], [False, True, True, False])


@pytest.mark.parametrize("column", range(4))
@pytest.mark.parametrize("part", ["length", "header", "first value", "last value"])
def test_any_flipped_bit_is_found(copied, column, part):
    reader, row = SplitReader(copied, "train"), 5
    group = reader._files.row_group(0)
    stride, prefix = (int(width) for width in reader._gather._table[column][:2])
    start = group.starts[column] + row * stride
    place = {"length": start, "header": start + 10, "first value": start + prefix, "last value": start + stride - 1}
    flip_bit(group.file.path, place[part], 16)
    reader.gather(np.array([0, 1]))
    for again in (reader, plain(copied)):
        with pytest.raises(ValueError, match=r"row group 0, row 5 \(sample .*\) is damaged"):
            again.gather(np.array([0, row, 1]))


def other_file_at_descriptor(reader: SplitReader, tmp_path: Path) -> None:
    """Give the descriptor of the first shard to a copy of it that has another last byte in every image of row 0."""
    group = reader._files.row_group(0)
    content = bytearray(group.file.path.read_bytes())
    for start, stride in zip(group.starts, reader._strides, strict=True):
        content[start + stride - 1] ^= 255
    (tmp_path / "other").write_bytes(content)
    other = os.open(tmp_path / "other", os.O_RDONLY)
    os.dup2(other, group.file.descriptor)
    os.close(other)


@pytest.mark.parametrize("mapped", [True, False])
def test_long_values_in_memory_are_copied_from_the_map(copied, tmp_path, monkeypatch, mapped):
    monkeypatch.setattr("pipelines.dataset.read.split_files.is_mapping_wise", lambda *split: mapped)
    reader = SplitReader(copied, "train", ReaderSettings(verify="never"))
    assert (reader._files.row_group(0).file.mapping != 0) == mapped
    before = reader.gather(np.array([0]))
    other_file_at_descriptor(reader, tmp_path)
    after = reader.gather(np.array([0]))
    assert before.images.keys() == after.images.keys()
    for name, images in before.images.items():
        assert (images.tobytes() == after.images[name].tobytes()) == (
            mapped and images.nbytes >= gather.LEAST_MAPPED_BYTES
        ), name


def test_a_map_goes_with_its_reader(small_dataset):
    def maps() -> list[str]:
        return [line for line in Path("/proc/self/maps").read_text().splitlines() if str(small_dataset) in line]

    reader = SplitReader(small_dataset, "train")
    batch = reader.gather(np.array([0, 1]))
    files = {group.file.path for group in map(reader._files.row_group, range(len(reader.group_rows)))}
    assert len(maps()) == len(files)
    expected = {name: images.copy() for name, images in batch.images.items()}
    del reader
    gc.collect()
    assert not maps()
    np.testing.assert_equal(batch.images, expected)


OUTSIDE = """
import faulthandler, os, signal, sys
import numpy as np
from pipelines.dataset.read.reader import ReaderSettings, SplitReader
if "earlier" in sys.argv:
    faulthandler.enable(open(os.devnull, "w"))
reader = SplitReader(sys.argv[1], "train", ReaderSettings(verify="never"))
reader.gather(np.array([0, 1]))
file = reader._files.row_group(0).file
assert file.mapping
if "blocked" in sys.argv:
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGBUS})
if "again" in sys.argv:
    faulthandler.enable(open(os.devnull, "w"))
    faulthandler.disable()
    assert SplitReader(sys.argv[1], "train")._files.row_group(0).file.mapping
if "later" in sys.argv:
    faulthandler.enable(open(os.devnull, "w"))
if "foreign" in sys.argv:  # a fault that is none of the reader's
    import mmap
    own = mmap.mmap(file.descriptor, 0, access=mmap.ACCESS_READ)
start = reader._files.row_group(0).starts[1]
os.truncate(file.path, (start + 3 * 4096) // 4096 * 4096)
try:
    reader.gather(np.array([0, 1]))
except ValueError as error:
    print(error)
if "sent" in sys.argv:
    os.kill(os.getpid(), signal.SIGBUS)
if "foreign" in sys.argv:
    own[-1]
print("alive")
"""


@pytest.mark.parametrize(
    ("others", "survives"),
    [
        ([], True),
        (["earlier"], True),
        (["later"], True),
        (["again"], True),
        (["blocked"], True),
        (["sent"], False),
        (["foreign"], False),
        (["earlier", "foreign"], False),
    ],
)
def test_a_file_that_shrinks_ends_no_process_and_the_signal_stays_what_it_was(copied, others, survives):
    ended = subprocess.run(
        [sys.executable, "-u", "-c", OUTSIDE, str(copied), *others],
        capture_output=True,
        text=True,
        timeout=patient(120),
    )
    assert "part-00000.parquet, row group 0, row 0" in ended.stdout, ended.stderr
    assert "was truncated" in ended.stdout
    assert (ended.returncode, "alive" in ended.stdout) == ((0, True) if survives else (-signal.SIGBUS, False))


@pytest.fixture
def mapped_column(copied):
    """A column of long values of a file that is mapped: what reads it, its row groups' table, and where row 0 lies."""
    reader = SplitReader(copied, "train", ReaderSettings(verify="never"))
    group = reader._files.row_group(0)
    if not group.file.mapping:
        pytest.skip("this filesystem does not say what is in memory")
    column = next(at for at, stride in enumerate(reader._strides) if stride > 2 * gather.LEAST_MAPPED_BYTES)
    prefix = list(reader._prefixes.values())[column]
    read = gather.make_gather([(reader._strides[column], prefix)])
    memory = np.zeros(reader._strides[column] - len(prefix), np.uint8)
    table = np.array([[*group.entry[:4], group.starts[column]]])
    zero = np.zeros(1, np.int64)

    def gathered() -> bool:
        return read(table, zero, zero, np.array([gather.address(memory)]), always=False)

    assert gathered()
    return gathered, group.file, group.starts[column] + len(prefix), group.starts[column] + reader._strides[column]


@pytest.mark.parametrize("kept", [0.2, 0.5, 0.9])
def test_zeros_behind_a_files_end_are_not_taken_for_a_row(mapped_column, kept):
    """The last page of a file that was cut off within a row still has the row's first bytes, and zeros behind them."""
    gathered, file, _, end = mapped_column
    page = end // 4096 * 4096
    assert end > page
    os.truncate(file.path, page + int(kept * (end - page)))
    assert not gathered()


def test_a_fault_within_a_value_is_caught_every_time(mapped_column):
    """The start of the value is still in the file, so that it is copied from the map up to the first missing page."""
    gathered, file, start, end = mapped_column
    border = (start + 2 * 4096) // 4096 * 4096
    assert start + 4096 <= border < end
    os.truncate(file.path, border)
    for _ in range(3):
        assert not gathered()


def test_files_whose_place_is_not_known_are_read(small_dataset):
    """A filesystem that does not know calls which do not wait: its files are read, as are all of a reader elsewhere."""
    with tempfile.TemporaryDirectory(dir="/dev/shm") as folder:
        dataset = shutil.copytree(small_dataset, Path(folder) / "dataset")
        reader, rows = SplitReader(dataset, "train"), np.arange(5)
        with (dataset / "dataset.json").open("rb") as file:
            try:
                knows = os.preadv(file.fileno(), [bytearray(1)], 0, os.RWF_NOWAIT) == 1
            except OSError:
                knows = False
        assert (reader._files.row_group(0).file.mapping != 0) == knows
        assert_equal(reader.gather(rows), plain(small_dataset).gather(rows))


def test_threads_go_on_after_a_fault_of_one(small_dataset, copied):
    """Each thread has its own place to go on at, and a fault is caught every time."""
    broken, whole = (SplitReader(each, "train", ReaderSettings(verify="never")) for each in (copied, small_dataset))
    rows = np.arange(len(whole))
    expected = whole.gather(rows)
    for group in map(broken._files.row_group, range(len(broken.group_rows))):
        os.truncate(group.file.path, 4096)

    def read(number: int) -> None:
        if number % 2:
            assert_equal(whole.gather(rows), expected)
        else:
            with pytest.raises(ValueError, match="was truncated"):
                broken.gather(rows)

    with ThreadPoolExecutor(4) as threads:
        assert len(list(threads.map(read, range(40)))) == 40


def test_what_was_wrong_for_a_moment_is_read_again(small_dataset, monkeypatch):
    monkeypatch.setattr("pipelines.dataset.read.reader.make_gather", lambda columns: lambda *_, **__: False)
    assert_equal(
        SplitReader(small_dataset, "train").gather(np.array([4, 2])), plain(small_dataset).gather(np.array([4, 2]))
    )


@pytest.mark.skipif(shutil.which("g++") is None, reason="no g++")
def test_a_processor_without_the_instructions_reads_in_python(tmp_path, monkeypatch, caplog):
    source = 'extern "C" __attribute__((visibility("default"))) long long groundswell_gather_level() { return 0; }'
    (tmp_path / "none.cc").write_text(source)
    library, problem = Library(tmp_path).renew()
    assert problem == ""
    monkeypatch.setattr(gather, "LIBRARY", library)
    assert gather.load.__wrapped__() is None
    assert caplog.messages[0].endswith("in Python, which takes longer: the processor has no instructions for checksums")
