import subprocess
import sys
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest

from pipelines.launch.rank.rank_log import LAST_LINES, RankLog


@pytest.fixture
def log() -> Iterator[RankLog]:
    with closing(RankLog()) as log:
        yield log


def test_lines_of_several_processes_and_kinds(log: RankLog) -> None:
    code = "import sys, os; print('one\\rtwo\\r\\nthree'); sys.stderr.write('four\\n'); os.system('echo five')"
    subprocess.run([sys.executable, "-u", "-c", code], stdout=log.file, stderr=subprocess.STDOUT, check=True)
    lines, end = log.read(0, 1 << 16)
    assert (lines, end) == (["one", "two", "three", "four", "five"], log.size())
    assert log.read(end, 1 << 16) == ([], end)


def test_a_line_is_read_when_it_is_whole_or_nothing_will_follow(log: RankLog) -> None:
    log.write("whole\nhal")
    lines, end = log.read(0, 1 << 16)
    assert lines == ["whole"]
    log.write("f")
    assert log.read(end, 1 << 16) == ([], end)
    log.finish()
    assert log.read(end, 1 << 16) == (["half"], log.size())


def test_a_line_without_end_comes_in_pieces_and_the_last_lines_of_much_are_few(log: RankLog) -> None:
    written = "x" * 100_000 + "\n" + "".join(f"line {number} {'.' * 300}\n" for number in range(200))
    log.write(written)
    log.finish()
    lines, offset = [], 0
    while offset < log.size():
        part, offset = log.read(offset, 30_000)
        lines += part
    assert "".join(lines) == written.replace("\n", "")
    assert max(map(len, lines)) <= 1 << 14
    assert log.last_lines() == lines[-LAST_LINES:]


def test_the_file_has_no_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    log = RankLog()
    log.write("text\n")
    assert list(tmp_path.iterdir()) == []
    log.close()
