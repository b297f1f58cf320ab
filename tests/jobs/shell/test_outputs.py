"""What jobs do not write over, and where they write nothing."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from matplotlib.figure import Figure

from jobs.shell.paths import PLOT_MARK, check_outputs, save_plot
from pipelines.comparison.tables import CSV_MARK
from pipelines.dataset.report.html import PAGE_MARK, render

PAGE = render("dataset/report/base.html")


@pytest.fixture
def folder(folder: Path, small_dataset: Path, scaling_measurements: Callable[..., dict[str, Any]]) -> Path:
    """Working directory with a dataset, a file of measurements, and files of somebody else."""
    shutil.copytree(small_dataset, folder / "dataset")
    (folder / "measured.json").write_text(json.dumps(scaling_measurements()))
    (folder / "mine").mkdir()
    for name in ("report.html", "table.csv", "estimate.csv", "plot.png"):
        (folder / "mine" / name).write_text("mine")
    return folder


_MEASURED = ["--measurements", "measured.json", "--link", "1Gbit/s", "--batch-size-per-worker", "8"]
COMMANDS = {
    "compare": (["--saved", "runs.json", "--output", "{}"], "table.csv"),
    "estimate": ([*_MEASURED, "--output", "{}"], "estimate.csv"),
    "schedule": (["--config", "smoke", "--images", "320", "--plot", "{}/plot.png"], "plot.png"),
    "find-rate": (["--config", "smoke", "--plot", "{}/plot.png"], "plot.png"),
}
"""Arguments, with `{}` for a folder, and the first of the files that would be replaced."""


@pytest.mark.parametrize("verb", COMMANDS)
@pytest.mark.parametrize("place", ["dataset", "dataset/train", "mine"])
def test_a_place_of_something_else_is_refused_before_the_work(
    verb: str, place: str, folder: Path, error_line: Callable[..., str]
) -> None:
    arguments, name = COMMANDS[verb]
    before = {file: file.read_bytes() for file in folder.rglob("*") if file.is_file()}
    line = error_line(verb, *(text.format(place) for text in arguments))
    dataset = f"would write into the dataset {folder / 'dataset'}, whose folder holds its own files only"
    foreign = f"would replace mine/{name}, which groundswell has not written: move or remove {name}, or choose another"
    assert (foreign if place == "mine" else dataset) in line
    assert {file: file.read_bytes() for file in folder.rglob("*") if file.is_file()} == before


@pytest.mark.parametrize("more", [[], ["--dry-run"]])
def test_results_of_a_grid_are_not_written_into_a_dataset(
    more: list[str], folder: Path, error_line: Callable[..., str]
) -> None:
    assert "--results dataset/r.jsonl would write into the dataset" in error_line(
        "grid", "--config", "smoke", "--grid", "g.yaml", "--results", "dataset/r.jsonl", *more
    )
    assert not (folder / "dataset" / "r.jsonl").exists()


def test_a_folder_within_a_dataset_need_not_be_there(folder: Path) -> None:
    (folder / "link.html").symlink_to(folder / "dataset" / "report.html")
    for place, mark in ((folder / "dataset" / "new" / "table.csv", CSV_MARK), (folder / "link.html", PAGE_MARK)):
        with pytest.raises(ValueError, match=r"^--output x would write into the dataset"):
            check_outputs("--output x", {place: mark})
    # The folder of a run has a `dataset.json` too.
    (folder / "outputs").mkdir()
    shutil.copy(folder / "dataset" / "dataset.json", folder / "outputs")
    check_outputs("--output x", {folder / "outputs" / "new" / "table.csv": CSV_MARK})


def test_own_files_and_empty_ones_are_replaced(folder: Path) -> None:
    save_plot(Figure(), folder / "own.png")
    for name, text in {"own.csv": "dataset,group,label\n", "own.html": PAGE, "empty.html": ""}.items():
        (folder / name).write_text(text)
    pages = {folder / name: PAGE_MARK for name in ("own.html", "empty.html", "new.html")}
    check_outputs("--output x", {folder / "own.png": PLOT_MARK, folder / "own.csv": CSV_MARK, **pages})
    with pytest.raises(ValueError, match=r"would replace .*own\.png, which groundswell has not written"):
        check_outputs("--output x", {folder / "own.png": PAGE_MARK})


def test_a_plot_that_cannot_be_drawn_leaves_the_one_before(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save_plot(Figure(), folder / "own.png")
    before = (folder / "own.png").read_bytes()

    def full(*arguments: object) -> None:
        raise OSError("no space left")

    monkeypatch.setattr("pipelines.storage.whole_files.os.fsync", full)
    with pytest.raises(OSError, match="no space left"):
        save_plot(Figure(figsize=(1, 1)), folder / "own.png")
    assert ((folder / "own.png").read_bytes(), list(folder.glob(".own.png*"))) == (before, [])
