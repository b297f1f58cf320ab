"""`groundswell compare` as a user meets it, on runs of a real store that were not trained."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from mlflow import MlflowClient

from jobs.shell import cli
from pipelines.comparison.grid_results import CellLine, ResultsFile
from pipelines.comparison.run import ComparedRun, read_runs

pytestmark = pytest.mark.usefixtures("module_mlflow_store", "folder")

Record = Callable[..., str]


def test_a_report_with_tables_and_a_file_for_elsewhere(
    record: Record,
    module_mlflow_store: str,
    folder: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    for seed in (0, 1):
        record("report", f"training.seed={seed}")
    record("report", "optimizer=sgd")
    assert cli.execute(["compare", "--experiment", "report", "--save", "runs.json"]) == 0
    output = [" ".join(line.split()) for line in capsys.readouterr().out.splitlines()]
    assert output[1:3] == ["1 0.7000 ± 0.0000 6.4 s - lars, rate per 256 8", "2 0.7000 6.4 s - sgd, rate per 256 0.1"]
    expected = [
        "report comparison/report.html",
        "tables comparison/table.csv, comparison/table.tex, comparison/runs.csv",
    ]
    assert (output[-2:], len((folder / "comparison" / "runs.csv").read_text().splitlines())) == (expected, 4)
    assert "Comparison of report" in (folder / "comparison" / "report.html").read_text()
    # On another machine, which has no store.
    monkeypatch.setenv("MLFLOW_TRACKING_URI", f"sqlite:///{folder / 'nowhere.db'}")
    assert cli.execute(["compare", "--saved", "runs.json", "--output", "again", "--metric", "train/loss"]) == 0
    assert "0.5000" in capsys.readouterr().out
    assert "lower is better" in (folder / "again" / "report.html").read_text()
    assert not (folder / "nowhere.db").exists()


@pytest.mark.long
def test_children_are_left_out_beside_others_unless_they_are_asked_for(record: Record) -> None:
    def seeds(*more: str) -> list[str]:
        assert cli.execute(["compare", "--experiment", "family", *more, "--save", "runs.json"]) == 0
        return [run.settings["training.seed"] for run in read_runs(Path("runs.json"))]

    record("family", "training.seed=1", parent=record("family", source="groundswell grid"))
    record("family", source="groundswell find-rate")
    assert (seeds(), seeds("--children")) == (["1"], ["1"]), "a grid is all that there is"
    record("family", "training.seed=2")
    assert (seeds(), seeds("--children")) == (["2"], ["1", "2"])


def keep_results(folder: Path) -> ComparedRun:
    """Make a file of a grid's results of the one run in `runs.json`, which is returned."""
    (run,) = read_runs(folder / "runs.json")
    results = ResultsFile(folder / "results.jsonl")
    results.append(CellLine(cell="a", status="finished", settings={}, seconds=1, epochs=2, run=run))
    results.close()
    return run


def test_a_filter_chooses_and_results_of_a_grid_are_read(record: Record, folder: Path) -> None:
    for name in ("sgd", "lars"):
        record("filtered", f"optimizer={name}")
    chosen = ["compare", "--experiment", "filtered", "--filter", "params.`optimizer.name` = 'sgd'"]
    assert (
        cli.execute([*chosen, "--save", "runs.json"]),
        keep_results(folder).settings["optimizer.name"],
        cli.execute(["compare", "--results", "results.jsonl", "--experiment", "filtered"]),
    ) == (0, "sgd", 0)
    assert len((folder / "comparison" / "runs.csv").read_text().splitlines()) == 3, "a run counts once"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("", "nothing to compare: name trainings with --experiment, --results or --saved"),
        ("--experiment absent", "experiment 'absent' is not in sqlite:///"),
        ("--experiment absent", "which has: "),
        ("--experiment here --filter x", "--filter 'x': "),
        ("--experiment here --filter tags.x='y'", "experiment 'here' has no runs that fit --filter \"tags.x='y'\""),
        ("--experiment here --metric val/x", "--metric val/x: no training has it, expected one of train/loss"),
        ("--experiment here --target nan", "--target nan should be a number"),
        ("--experiment here --target much", "argument --target: invalid float value: 'much'"),
        ("--saved absent.json", "absent.json cannot be read: No such file or directory"),
        ("--results absent.jsonl", "absent.jsonl cannot be read: No such file or directory"),
        ("--saved x.json --filter a=1", "--filter has no effect without --experiment"),
        ("--saved x.json --children", "--children has no effect without --experiment"),
        ("--experiment here --output taken", "the folder of the report taken cannot be made: File exists"),
        ("--experiment here --save nowhere/runs.json", "nowhere/runs.json cannot be written: No such file"),
        ("--experiment other", "none of the 1 runs of experiment 'other' is a training"),
        ("--results results.jsonl", "results.jsonl has no trainings yet"),
    ],
)
def test_mistakes_are_one_line(
    record: Record,
    module_mlflow_store: str,
    folder: Path,
    arguments: str,
    message: str,
    error_line: Callable[..., str],
) -> None:
    (folder / "taken").touch()
    (folder / "results.jsonl").touch()
    for experiment, source in (("here", "groundswell train"), ("other", "groundswell find-rate")):
        if MlflowClient(module_mlflow_store).get_experiment_by_name(experiment) is None:
            record(experiment, source=source)
    assert message in error_line("compare", *arguments.split())


def test_saved_trainings_replace_no_other_file(record: Record, folder: Path, error_line: Callable[..., str]) -> None:
    record("saving")
    command = ["compare", "--experiment", "saving", "--save"]
    assert cli.execute([*command, "runs.json"]) == 0
    keep_results(folder)
    before = (folder / "results.jsonl").read_bytes()
    assert "--save results.jsonl would replace results.jsonl, which groundswell" in error_line(
        *command, "results.jsonl"
    )
    assert (folder / "results.jsonl").read_bytes() == before
    shutil.rmtree(folder / "comparison")
    (folder / "dataset" / "train").mkdir(parents=True)
    (folder / "dataset" / "dataset.json").write_text('{"splits": {"train": {}}}')
    for save, message in (
        ("runs.json", "--save runs.json is compared, and would be replaced: choose another file"),
        ("dataset/runs.json", "--save dataset/runs.json would write into the dataset "),
    ):
        assert message in error_line("compare", "--saved", "runs.json", "--save", save)
    assert not (folder / "comparison").exists(), "nothing is written before that is known"
    (folder / "link.json").symlink_to("runs.json")
    assert (cli.execute([*command, "link.json"]), (folder / "link.json").is_symlink()) == (0, True)


@pytest.mark.parametrize(
    ("uri", "code", "message"),
    [
        ("sqlite:///absent.db", 2, "absent.db"),
        ("sqlite:///taken", 2, "taken"),
        ("sqlite:///text.db", 2, "text.db"),
        ("http://user:secret@127.0.0.1:9", 4, "no answer from MLflow at http:"),
    ],
)
def test_a_store_that_cannot_be_read_is_one_line(
    uri: str, code: int, message: str, folder: Path, monkeypatch: pytest.MonkeyPatch, error_line: Callable[..., str]
) -> None:
    (folder / "taken").mkdir()
    (folder / "text.db").write_text("no database, but longer than a database's header of a hundred bytes" * 3)
    monkeypatch.setenv("MLFLOW_TRACKING_URI", uri)
    line = error_line("compare", "--experiment", "any", "--result", "result.json", code=code)
    assert (message in line, "secret" in line) == (True, False), line
    assert (json.loads(Path("result.json").read_text())["exit_code"], (folder / "absent.db").exists()) == (code, False)
