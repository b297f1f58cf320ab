import time
from pathlib import Path

import pytest

from pipelines.launch.listener import Listener
from pipelines.launch.logs import RankLogs, Throttle


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


def test_a_full_disk_costs_lines_and_no_run(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    for rank in range(2):
        (tmp_path / f"rank-{rank}.log").symlink_to("/dev/full")
    listener = Listener("none", lambda rank, line: None, lambda report: None, tmp_path)
    listener.heading(0, "attempt 1")
    listener.lines(1, ["a line"])
    listener.lines(2, ["another one"])
    files = list(listener._logs._files.values())  # type: ignore[union-attr]
    listener.close()
    assert all(file.closed for file in files)
    assert "No space left on device" in caplog.text
    assert (tmp_path / "rank-2.log").read_text() == "another one\n"


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
    assert [line for _, line in shown[-2:]] == ["[3000 lines not shown: there were too many to read]", "later"]
    throttle.write(0, ["line"] * 300)
    throttle.close()
    assert shown[-1] == (0, "[101 lines not shown: there were too many to read]")


def test_on_storage_that_takes_whole_files_only_nothing_but_the_logs_changes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("pipelines.launch.logs.takes_whole_files_only", lambda folder: True)
    folder = tmp_path / "run"
    folder.mkdir()
    (folder / "rank-7.log").write_text("older")
    for text in ("first", "second"):
        logs = RankLogs(folder)
        logs.write(0, [text])
        (folder / "export").mkdir(exist_ok=True)
        (folder / "export" / "model.keras").write_text(text)
        (folder / "rank-7.log").write_text("of another run")
        logs.close()
    assert (folder / "rank-0.log").read_text() == "first\nsecond\n"
    assert (folder / "export" / "model.keras").read_text() == "second"
    assert (folder / "rank-7.log").read_text() == "of another run"

    def fails_once(source: Path, target: Path) -> None:
        monkeypatch.undo()
        monkeypatch.setattr("pipelines.launch.logs.takes_whole_files_only", lambda folder: True)
        raise OSError("the storage is away")

    monkeypatch.setattr("pipelines.launch.logs.shutil.copyfile", fails_once)
    listener = Listener("none", lambda rank, line: None, lambda report: None, folder)
    listener.lines(0, ["lost"])
    listener.lines(0, ["third"])
    listener.close()
    assert "the storage is away" in caplog.text
    assert (folder / "rank-0.log").read_text() == "first\nsecond\nthird\n"
