"""The results file of a grid, which must survive kills and machines."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from pipelines.comparison.grid_results import (
    CellLine,
    GridLine,
    ResultsFile,
    cells_of,
    estimated_seconds,
    read_lines,
    runs_of,
)


def cell(digest: str, status: str = "finished", seconds: float = 10.0, epochs: int = 2, **settings: object) -> CellLine:
    return CellLine(cell=digest, status=status, settings=settings, seconds=seconds, epochs=epochs)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "results.jsonl"


def write(path: Path, *lines: CellLine | GridLine) -> None:
    results = ResultsFile(path)
    for line in lines:
        results.append(line)
    results.close()


def test_what_was_appended_is_read_and_the_last_line_of_a_cell_counts(path: Path) -> None:
    write(path, GridLine(parent="p", experiment="e"), cell("a", "failed"), cell("b", "diverged"))
    write(path, cell("a"))
    results = ResultsFile(path)
    assert (
        {name: line.is_done for name, line in results.cells.items()},
        [line.parent for line in results.parents],
        runs_of(results.lines, "x"),
        path.read_text().count("\n"),
    ) == ({"a": True, "b": True}, ["p"], [], 4)
    results.close()


@pytest.mark.parametrize("kept", [1, 20, -1])
def test_a_half_written_last_line_is_cut_off_and_a_whole_one_kept(path: Path, kept: int) -> None:
    write(path, cell("a"), cell("b"))
    first, second = path.read_bytes().splitlines()
    path.write_bytes(first + b"\n" + second[:kept])
    assert list(cells_of(read_lines(path))) == ["a"]
    assert path.read_bytes() == first + b"\n" + second[:kept], "reading changes nothing"
    write(path, cell("c"))
    assert list(cells_of(read_lines(path))) == ["a", "c"]
    path.write_bytes(first + b"\n" + second)  # an editor took the last end of line away
    write(path, cell("c"))
    assert list(cells_of(read_lines(path))) == ["a", "b", "c"]


def test_one_grid_at_a_time_writes(path: Path) -> None:
    first = ResultsFile(path)
    with pytest.raises(ValueError, match="another grid writes to this file"):
        ResultsFile(path)
    first.close()
    ResultsFile(path).close()


@pytest.mark.parametrize(
    "content",
    [
        b"hello",
        b'{"a": 1}',
        b'{"a": 1}\n',
        b"\x00\x01\n",
        b'{"format_version":2,"kind":"grid","parent":"p","experiment":"e"}\n',
        b'{"format_version":1,"kind":"cell","cell":"a","status":"finished","settings":{},"seconds":"x","epochs":1}\n',
    ],
)
def test_another_kind_of_file_is_refused_and_stays_as_it_is(path: Path, content: bytes) -> None:
    path.write_bytes(content)
    with pytest.raises(ValueError, match=r"^[^\n]*no (result of|file of results of) a grid[^\n]*\Z"):
        ResultsFile(path)
    assert path.read_bytes() == content


@pytest.mark.parametrize(
    ("use", "place", "error", "message"),
    [
        (ResultsFile, "nowhere/results.jsonl", ValueError, "cannot be written: No such file or directory"),
        (read_lines, "results.jsonl", FileNotFoundError, "cannot be read"),
    ],
)
def test_a_folder_and_a_file_that_are_not_there(
    tmp_path: Path, use: Callable[[Path], object], place: str, error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=f"--results .* {message}"):
        use(tmp_path / place)


def test_a_line_is_plain_json_on_one_line(path: Path) -> None:
    write(path, cell("a", optimizer="sgd", text="two\nlines"))
    (line,) = path.read_text().splitlines()
    assert json.loads(line)["settings"] == {"optimizer": "sgd", "text": "two\nlines"}


ENDED = [
    cell("a", seconds=10, epochs=2, optimizer="sgd", batch=1),
    cell("b", seconds=30, epochs=2, optimizer="lars", batch=1),
    cell("c", "failed", seconds=500, optimizer="lars", batch=2),
    cell("d", "diverged", seconds=1, optimizer="lars", batch=2),
]


@pytest.mark.parametrize(
    ("settings", "epochs", "lines", "expected"),
    [
        # 15 s an epoch with LARS.
        ({"optimizer": "lars", "batch": 2, "training.seed": 4}, 4, ENDED, 60),
        # Nothing in common: the mean of 5 and 15 s an epoch.
        ({"optimizer": "lamb"}, 1, ENDED, 10),
        ({}, 1, [], None),
        ({}, 1, [cell("e", seconds=1).model_copy(update={"resumed": True})], None),
    ],
    ids=["alike", "nothing in common", "none", "resumed"],
)
def test_the_time_of_a_cell_is_that_of_the_most_alike_ones_by_epoch(
    settings: dict[str, object], epochs: int, lines: list[CellLine], expected: float | None
) -> None:
    assert estimated_seconds(settings, epochs, lines) == expected
