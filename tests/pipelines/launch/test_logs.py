import subprocess
import sys
import time
from pathlib import Path

import pytest

from pipelines.launch.logs import LAST_LINES, RankLogs, Spool, Throttle


def test_lines_of_several_processes_and_kinds() -> None:
    spool = Spool()
    code = "import sys, os; print('one\\rtwo\\r\\nthree'); sys.stderr.write('four\\n'); os.system('echo five')"
    subprocess.run([sys.executable, "-u", "-c", code], stdout=spool.file, stderr=subprocess.STDOUT, check=True)
    lines, end = spool.read(0, 1 << 16)
    assert lines == ["one", "two", "three", "four", "five"]
    assert end == spool.size()
    assert spool.read(end, 1 << 16) == ([], end)


def test_a_line_is_read_when_it_is_whole_or_nothing_will_follow() -> None:
    spool = Spool()
    spool.write("whole\nhal")
    lines, end = spool.read(0, 1 << 16)
    assert lines == ["whole"]
    spool.write("f")
    assert spool.read(end, 1 << 16) == ([], end)
    spool.finish()
    assert spool.read(end, 1 << 16) == (["half"], spool.size())


def test_a_line_without_end_comes_in_pieces() -> None:
    spool = Spool()
    spool.write("x" * 100_000 + "\nlast\n")
    spool.finish()
    lines, offset = [], 0
    while offset < spool.size():
        part, offset = spool.read(offset, 30_000)
        lines += part
    assert "".join(lines) == "x" * 100_000 + "last"
    assert max(map(len, lines)) <= 1 << 14


def test_the_last_lines_of_much() -> None:
    spool = Spool()
    spool.write("".join(f"line {number} {'.' * 300}\n" for number in range(1000)))
    spool.finish()
    lines = spool.last_lines()
    assert lines[-1].startswith("line 999 ")
    assert len(lines) == LAST_LINES


def test_every_rank_has_a_file(tmp_path: Path) -> None:
    logs = RankLogs(tmp_path / "logs")
    logs.write(0, ["a", "b"])
    logs.write(1, ["ä"])
    logs.write(0, ["c"])
    logs.close()
    assert {path.name: path.read_text() for path in (tmp_path / "logs").iterdir()} == {
        "rank-0.log": "a\nb\nc\n",
        "rank-1.log": "ä\n",
    }


def test_a_flood_of_lines_is_shown_in_part_and_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 100.0
    monkeypatch.setattr(time, "monotonic", lambda: now)
    shown: list[tuple[int, str]] = []
    throttle = Throttle(lambda rank, line: shown.append((rank, line)))
    throttle.write(0, [f"line {number}" for number in range(5000)])
    throttle.write(1, ["the other rank is heard"])
    assert shown[:2] == [(0, "line 0"), (0, "line 1")]
    assert len(shown) == 2001
    assert shown[-1] == (1, "the other rank is heard")
    now += 1.0
    throttle.write(0, ["later"])
    assert [line for _, line in shown[-2:]] == ["[3000 lines not shown: more than this can be read]", "later"]
    throttle.write(0, ["line"] * 300)
    throttle.close()
    assert shown[-1] == (0, "[101 lines not shown: more than this can be read]")
