import time
from pathlib import Path

import pytest

from pipelines.launch.driver.rank_output import RankLogs, RankOutput, Throttle


def test_a_full_disk_costs_lines_and_no_run(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    for rank in range(2):
        (tmp_path / f"rank-{rank}.log").symlink_to("/dev/full")
    listener = RankOutput("none", lambda rank, line: None, lambda report: None, tmp_path)
    listener.log(0, ["attempt 1"])
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
    shown: list[str] = []
    throttle = Throttle(lambda rank, line: shown.append(f"{rank}: {line}"))
    throttle.write(0, [f"line {number}" for number in range(5000)])
    throttle.write(1, ["the other rank is heard"])
    assert shown == [*(f"0: line {number}" for number in range(2000)), "1: the other rank is heard"]
    now += 1.0
    throttle.write(0, ["later"])
    throttle.write(0, ["line"] * 300)
    throttle.close()
    not_shown = "lines not shown: there were too many to read]"
    assert shown[2001:] == [f"0: [3000 {not_shown}", "0: later", *["0: line"] * 199, f"0: [101 {not_shown}"]


def test_on_storage_that_takes_whole_files_only_nothing_but_the_logs_changes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("pipelines.launch.driver.rank_output.takes_whole_files_only", lambda folder: True)
    (tmp_path / "rank-7.log").write_text("older")
    for text in ("first", "second"):
        logs = RankLogs(tmp_path)
        logs.write(0, [text])
        (tmp_path / "model.keras").write_text(text)
        (tmp_path / "rank-7.log").write_text("of another run")
        logs.close()
    listener = RankOutput("none", lambda rank, line: None, lambda report: None, tmp_path)
    with monkeypatch.context() as patch:
        patch.setattr("shutil.copyfile", lambda source, target: Path("/away").read_bytes())
        listener.lines(0, ["lost"])
    listener.lines(0, ["third"])
    listener.close()
    assert "No such file or directory: '/away'" in caplog.text
    assert {path.name: path.read_text() for path in tmp_path.iterdir()} == {
        "rank-0.log": "first\nsecond\nthird\n",
        "model.keras": "second",
        "rank-7.log": "of another run",
    }
