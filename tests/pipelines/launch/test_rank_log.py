import subprocess
import sys
from pathlib import Path

import pytest

from pipelines.launch.rank_log import LAST_LINES, RankLog


def test_lines_of_several_processes_and_kinds() -> None:
    log = RankLog()
    code = "import sys, os; print('one\\rtwo\\r\\nthree'); sys.stderr.write('four\\n'); os.system('echo five')"
    subprocess.run([sys.executable, "-u", "-c", code], stdout=log.file, stderr=subprocess.STDOUT, check=True)
    lines, end = log.read(0, 1 << 16)
    assert lines == ["one", "two", "three", "four", "five"]
    assert end == log.size()
    assert log.read(end, 1 << 16) == ([], end)


def test_a_line_is_read_when_it_is_whole_or_nothing_will_follow() -> None:
    log = RankLog()
    log.write("whole\nhal")
    lines, end = log.read(0, 1 << 16)
    assert lines == ["whole"]
    log.write("f")
    assert log.read(end, 1 << 16) == ([], end)
    log.finish()
    assert log.read(end, 1 << 16) == (["half"], log.size())


def test_a_line_without_end_comes_in_pieces() -> None:
    log = RankLog()
    log.write("x" * 100_000 + "\nlast\n")
    log.finish()
    lines, offset = [], 0
    while offset < log.size():
        part, offset = log.read(offset, 30_000)
        lines += part
    assert "".join(lines) == "x" * 100_000 + "last"
    assert max(map(len, lines)) <= 1 << 14


def test_the_last_lines_of_much() -> None:
    log = RankLog()
    log.write("".join(f"line {number} {'.' * 300}\n" for number in range(1000)))
    log.finish()
    lines = log.last_lines()
    assert lines[-1].startswith("line 999 ")
    assert len(lines) == LAST_LINES


def test_the_file_has_no_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    log = RankLog()
    log.write("text\n")
    assert list(tmp_path.iterdir()) == []
    log.close()
