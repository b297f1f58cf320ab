"""The notebooks of jobs/notebooks, cell by cell on real Spark, with stand-ins for the names that Databricks gives.

They are executed twice: here, and as Jupyter notebooks by a kernel of their own, of which HTML is made.
"""

import json
import os
import re
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pyarrow.parquet as pq
import pytest
from pyspark.sql import SparkSession

from conf.describe import to_yaml
from conf.load import load
from pipelines.dataset.format.manifest import read_manifest
from pipelines.storage.folder import Location
from tests.patience import patient

FOLDER = Path(__file__).resolve().parents[2] / "jobs" / "notebooks"
NOTEBOOKS = sorted(FOLDER.glob("*.py"))
HEADER = "# Databricks notebook source\n"
SEPARATOR = "\n# COMMAND ----------\n"
IN_THE_KERNEL = """
import html, json, os
from types import SimpleNamespace
from IPython.display import display as show
from pyspark.sql import DataFrame
from jobs.shell.session import spark_session

typed, asked = json.loads(os.environ["WIDGETS"]), {}
session = spark_session("notebook", "local[2]")
spark = session.__enter__()
get_ipython().register_magic_function(lambda line: None, "line", "pip")
dbutils = SimpleNamespace(
    widgets=SimpleNamespace(
        text=lambda name, default, label: asked.update({name: typed.get(name, default)}),
        get=lambda name: asked[name],
    ),
    library=SimpleNamespace(restartPython=lambda: None),
)

def display(shown):
    show(shown.toPandas() if isinstance(shown, DataFrame) else shown)

def displayHTML(text):
    page = f'<iframe srcdoc="{html.escape(text)}" width="100%" height="700"></iframe>'
    show({"text/html": page}, raw=True)
"""
"""What Databricks puts into a notebook, as the first cell of a Jupyter notebook."""


@dataclass(frozen=True)
class Cell:
    kind: str
    """python, md, pip."""
    text: str


def cells(path: Path) -> list[Cell]:
    """The cells of a notebook in Databricks' source format."""
    source = path.read_text()
    assert source.startswith(HEADER)
    found = []
    for part in source.removeprefix(HEADER).split(SEPARATOR):
        lines = part.strip("\n").splitlines()
        if any(line.startswith("# MAGIC") for line in lines):
            assert all(line.startswith("# MAGIC") for line in lines), "a cell is either magic or Python"
            text = "\n".join(line.removeprefix("# MAGIC").removeprefix(" ") for line in lines)
            kind, _, rest = text.partition(" " if text.startswith("%pip") else "\n")
            found.append(Cell(kind.removeprefix("%").strip(), rest))
        else:
            found.append(Cell("python", "\n".join(lines)))
    return found


def execute(path: Path, spark: SparkSession | None, values: dict[str, str]) -> tuple[list[Any], dict[str, Any]]:
    """Run one Python cell after the other, as a notebook does: what they display, and their names.

    Args:
        path: The notebook.
        spark: Its session.
        values: What the user has typed into the widgets.
    """
    shown, widgets = list[Any](), dict[str, str]()
    dbutils = SimpleNamespace(
        widgets=SimpleNamespace(
            text=lambda name, default, label: widgets.update({name: values.get(name, default)}),
            get=lambda name: widgets[name],
        ),
        library=SimpleNamespace(restartPython=lambda: None),
    )
    names = {"spark": spark, "dbutils": dbutils, "display": shown.append, "displayHTML": shown.append}
    for number, cell in enumerate(cells(path)):
        if cell.kind == "python":
            exec(compile(cell.text, f"{path.name}, cell {number + 1}", "exec"), names)
    assert set(values) <= set(widgets), "a widget that the test sets is not there"
    return shown, names


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_a_notebook_says_what_for_then_installs_and_asks(path: Path) -> None:
    first, second, third, fourth, *_ = found = cells(path)
    assert (first.kind, first.text[:2], "**Runtime**" in first.text) == ("md", "# ", True)
    assert (second.kind, "restartPython" in third.text, "dbutils.widgets" in fourth.text) == ("pip", True, True)
    assert max(len(cell.text.splitlines()) for cell in found) <= 15
    defaults = re.findall(r'widgets\.text\("\w+", "(/[^"]*)"', path.read_text())
    assert {default.split("/")[1] for default in defaults} == {"Volumes"}, "paths are those of volumes"


def kernel_environment(**more: str) -> dict[str, str]:
    """The environment of a Jupyter kernel.

    Where pytest is named there, the kernel leaves out of its cells what its child processes print, such as Spark's JVM.
    """
    named = {name: value for name, value in os.environ.items() if name != "PYTEST_CURRENT_TEST"}
    return {**named, "PYSPARK_PYTHON": sys.executable, **more}


def as_jupyter(path: Path) -> Any:
    """A notebook in Jupyter's format, after a cell with what Databricks would give."""
    import nbformat

    new = nbformat.v4
    found = [new.new_code_cell(IN_THE_KERNEL)]
    for cell in cells(path):
        text = f"%pip {cell.text}" if cell.kind == "pip" else cell.text
        found.append(new.new_markdown_cell(text) if cell.kind == "md" else new.new_code_cell(text))
    return new.new_notebook(cells=found)


def client_of(notebook: Any, folder: Path, **settings: Any) -> Any:
    from nbclient import NotebookClient

    place = {"metadata": {"path": str(folder)}}
    return NotebookClient(notebook, timeout=int(patient(300)), coalesce_streams=True, resources=place, **settings)


def executed(path: Path, values: dict[str, str], folder: Path) -> Any:
    """The notebook with its outputs, of which a page is in `folder`."""
    from nbconvert import HTMLExporter

    notebook = as_jupyter(path)
    client_of(notebook, folder).execute(env=kernel_environment(WIDGETS=json.dumps(values)))
    del notebook.cells[0]
    page, _ = HTMLExporter().from_notebook_node(notebook)
    (folder / f"{path.stem}.html").write_text(page)
    return notebook


def check_page(show_page: Callable[..., Any], page: Path) -> None:
    """A browser shows every picture of a notebook's page, and nothing of it ends outside of the window."""
    picture = page.with_suffix(".png")
    found, screenshot = show_page(page.read_text(), 1100, height=2400, screenshot=picture, is_ours=False)
    assert min(found["seen"]) > 0
    assert max(found["right"]) <= 1100
    assert screenshot.stat().st_size > 10_000


def outputs(notebook: Any) -> list[Any]:
    return [output for cell in notebook.cells if cell.cell_type == "code" for output in cell.outputs]


def printed(notebook: Any, stream: str) -> str:
    return "".join(each.text for each in outputs(notebook) if each.get("name") == stream)


def shown(notebook: Any, kind: str) -> list[str]:
    """What cells show of one MIME type."""
    return [each.data[kind] for each in outputs(notebook) if kind in each.get("data", {})]


@pytest.mark.long
@pytest.mark.spark
@pytest.mark.timeout(240)
def test_prepare_and_look(spark: SparkSession, small_archive: Path, tmp_path: Path) -> None:
    values = {"config": "smoke", "archive": str(small_archive), "dataset": str(tmp_path / "dataset")}
    (table, figure, page), _ = execute(FOLDER / "prepare_and_look.py", spark, values)
    manifest = read_manifest(Location.at(tmp_path / "dataset"))
    assert sum(row["count"] for row in table.collect()) == manifest.splits["train"].rows == 32
    assert {text.get_text() for text in figure.axes[0].get_yticklabels()} <= {*manifest.class_names}
    assert page.lower().startswith("<!doctype html>")


@pytest.mark.timeout(120)
def test_compare_runs(tmp_path: Path, record: Callable[..., str]) -> None:
    for settings in ("training.seed=0", "training.seed=1", "optimizer=sgd"):
        record("sweep", settings)
    values = {"experiment": "sweep", "output": str(tmp_path / "comparison")}
    (table, figure, page), names = execute(FOLDER / "compare_runs.py", None, values)
    assert (
        table[["seeds", "setting optimizer.name"]].to_numpy().tolist(),
        {axes.get_xlabel(): len(axes.lines) for axes in figure.axes},
    ) == ([[2, "lars"], [1, "sgd"]], {"samples": 2, "seconds of training": 2})
    named = ["1 lars, rate per 256 8", "2 sgd, rate per 256 0.1"]
    assert [text.get_text() for text in figure.subfigs[0].legends[0].get_texts()] == named
    assert "0.7000 ± 0.0000" in names["compared"]._repr_html_()
    assert page == (tmp_path / "comparison" / "report.html").read_text()


def check_quiet(notebook: Any) -> None:
    """Nothing but what the cells and our own lines say: no bar of Spark's stages, no log, no trace."""
    assert printed(notebook, "stderr") == ""
    assert not re.search(r"\[Stage |Traceback|WARN|INFO", printed(notebook, "stdout"))


IN_THE_RANKS = """
import groundswell

def fail():
    import time
    time.sleep(2)  # so that a bar of stages would be there
    raise ValueError("of a rank")

groundswell.BarrierRunner(spark, 2).run(fail)
"""
IN_THE_TASKS = """
from pipelines.storage.folder import Location
from pipelines.spark.tasks import run_tasks

def fail(item):
    import time
    from pathlib import Path
    Path(f"runs-{item}").touch()
    while not all(Path(f"runs-{each}").exists() for each in (1, 2)):  # a worker that is started must not be killed
        time.sleep(0.1)
    time.sleep(2)
    raise ValueError("of a task")

run_tasks(spark, [1, 2], fail, job="prepare", folder=Location.at("/data"), files=["a", "b"], less_memory="")
"""


@pytest.mark.spark
@pytest.mark.parallel
@pytest.mark.long
@pytest.mark.timeout(240)
def test_a_cell_that_fails_shows_one_error_and_no_log_of_spark(tmp_path: Path) -> None:
    """In a session of the user's own, whose log and bars are Spark's defaults."""
    import nbformat

    session = 'SparkSession.builder.master("local[2]").config("spark.ui.enabled", "false").getOrCreate()'
    texts = [f"from pyspark.sql import SparkSession\nspark = {session}", IN_THE_RANKS, IN_THE_TASKS, "print(6 * 7)"]
    notebook = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(text.strip()) for text in texts])
    client_of(notebook, tmp_path, allow_errors=True).execute(env=kernel_environment())
    # Spark's own start says something: what its processes print does reach a cell.
    assert "WARN" in "".join(each.text for each in notebook.cells[0].outputs if each.get("name") == "stderr")
    for cell, name, words in zip(
        notebook.cells[1:3], ("WorkerError", "RuntimeError"), ("of a rank", "of a task"), strict=True
    ):
        assert len(cell.outputs) == 1, [each.get("text", each.output_type) for each in cell.outputs]
        error = cell.outputs[0]
        assert (error.output_type, error.ename, words in error.evalue) == ("error", name, True)
    assert [output.text for output in notebook.cells[3].outputs] == ["42\n"]


@pytest.mark.spark
@pytest.mark.long
@pytest.mark.timeout(400)
def test_preparing_and_comparing_as_jupyter_notebooks(
    small_archive: Path, tmp_path: Path, record: Callable[..., str], show_page_if_possible: Callable[..., Any] | None
) -> None:
    values = {"config": "smoke", "archive": str(small_archive), "dataset": str(tmp_path / "dataset")}
    prepared = executed(FOLDER / "prepare_and_look.py", values, tmp_path)
    assert (printed(prepared, "stdout").splitlines()[-1], len(shown(prepared, "image/png"))) == (
        "test 12 samples, train 32 samples, validation 12 samples",
        1,
    )
    assert "iframe" in shown(prepared, "text/html")[-1]
    check_quiet(prepared)

    record("jupyter")
    compared = executed(
        FOLDER / "compare_runs.py", {"experiment": "jupyter", "output": str(tmp_path / "comparison")}, tmp_path
    )
    assert len(shown(compared, "image/png")) == 1
    assert "0.7000" in shown(compared, "text/html")[0]
    check_quiet(compared)
    assert (tmp_path / "comparison" / "report.html").is_file()
    for page in (tmp_path / "prepare_and_look.html", tmp_path / "compare_runs.html"):
        assert "data:image/png" in page.read_text()
        if show_page_if_possible is not None:
            check_page(show_page_if_possible, page)


@pytest.mark.spark
@pytest.mark.parallel
@pytest.mark.long
@pytest.mark.timeout(900)
def test_training_and_scoring_as_jupyter_notebooks(
    small_dataset: Path, small_network: str, tmp_path: Path, mlflow_store: str
) -> None:
    config = tmp_path / "small.yaml"
    config.write_text(to_yaml(load("smoke", [small_network])))
    values = {"config": str(config), "dataset": str(small_dataset), "output": str(tmp_path / "outputs")}
    values |= {"workers": "2", "gpus": "0", "epochs": "2"}
    trained = executed(FOLDER / "train_on_workers.py", values, tmp_path)
    assert (
        len(re.findall(r"^epoch \d/2: loss", printed(trained, "stdout"), re.MULTILINE)),
        len(shown(trained, "image/png")),
    ) == (2, 1)
    summary, *tables = shown(trained, "text/html")
    assert "data:image/png" in summary
    assert any("<th>f1</th>" in table for table in tables), "of each class"
    (model,) = re.findall(r"runs:/\w+/[\w-]+", summary)
    check_quiet(trained)

    values = {"model": model, "input": str(small_dataset), "output": str(tmp_path / "predictions")}
    scored = executed(FOLDER / "score_a_table.py", values, tmp_path)
    assert "56 predictions, 0 samples rejected" in printed(scored, "stdout")
    ids = [name for file in tmp_path.glob("predictions/*-part-*") for name in pq.read_table(file)["id"].to_pylist()]
    assert len(ids) == len(set(ids)) == 32 + 12 + 12
    rows, labels = shown(scored, "text/html")[-2:]
    assert rows.count("<tr") == 1 + 20
    assert all(f"<th>{column}</th>" in labels for column in ("label", "count"))
    check_quiet(scored)
