import subprocess
import sys
from pathlib import Path

import pytest

from pipelines.launch.spool import LAST_LINES, SpoolFile


def test_lines_of_several_processes_and_kinds() -> None:
    spool = SpoolFile()
    code = "import sys, os; print('one\\rtwo\\r\\nthree'); sys.stderr.write('four\\n'); os.system('echo five')"
    subprocess.run([sys.executable, "-u", "-c", code], stdout=spool.file, stderr=subprocess.STDOUT, check=True)
    lines, end = spool.read(0, 1 << 16)
    assert lines == ["one", "two", "three", "four", "five"]
    assert end == spool.size()
    assert spool.read(end, 1 << 16) == ([], end)


def test_a_line_is_read_when_it_is_whole_or_nothing_will_follow() -> None:
    spool = SpoolFile()
    spool.write("whole\nhal")
    lines, end = spool.read(0, 1 << 16)
    assert lines == ["whole"]
    spool.write("f")
    assert spool.read(end, 1 << 16) == ([], end)
    spool.finish()
    assert spool.read(end, 1 << 16) == (["half"], spool.size())


def test_a_line_without_end_comes_in_pieces() -> None:
    spool = SpoolFile()
    spool.write("x" * 100_000 + "\nlast\n")
    spool.finish()
    lines, offset = [], 0
    while offset < spool.size():
        part, offset = spool.read(offset, 30_000)
        lines += part
    assert "".join(lines) == "x" * 100_000 + "last"
    assert max(map(len, lines)) <= 1 << 14


def test_the_last_lines_of_much() -> None:
    spool = SpoolFile()
    spool.write("".join(f"line {number} {'.' * 300}\n" for number in range(1000)))
    spool.finish()
    lines = spool.last_lines()
    assert lines[-1].startswith("line 999 ")
    assert len(lines) == LAST_LINES


def test_the_file_has_no_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    spool = SpoolFile()
    spool.write("text\n")
    assert list(tmp_path.iterdir()) == []
    spool.close()
