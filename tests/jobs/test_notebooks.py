"""The notebooks of jobs/notebooks, cell by cell on real Spark, with stand-ins for the names that Databricks gives.

They are executed twice: here, and as Jupyter notebooks by a kernel of their own, of which HTML is made.
"""

import json
import os
import re
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from pyspark.sql import SparkSession

from conf.describe import to_yaml
from conf.load import load
from pipelines.dataset.manifest import read_manifest
from pipelines.storage import Folder
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
from jobs.session import spark_session

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


@dataclass
class Stage:
    """What Databricks puts into a notebook; `shown` has what its cells display."""

    values: dict[str, str]
    """What the user has typed into the widgets."""
    shown: list[Any] = field(default_factory=list)
    widgets: dict[str, str] = field(default_factory=dict)

    def names(self, spark: SparkSession | None) -> dict[str, Any]:
        dbutils = SimpleNamespace(
            widgets=SimpleNamespace(
                text=lambda name, default, label: self.widgets.update({name: self.values.get(name, default)}),
                get=lambda name: self.widgets[name],
            ),
            library=SimpleNamespace(restartPython=lambda: None),
        )
        return {"spark": spark, "dbutils": dbutils, "display": self.shown.append, "displayHTML": self.shown.append}


def execute(path: Path, spark: SparkSession | None, values: dict[str, str]) -> tuple[Stage, dict[str, Any]]:
    """Run one Python cell after the other, as a notebook does; what they displayed and their names."""
    stage = Stage(values)
    names = stage.names(spark)
    for number, cell in enumerate(cells(path)):
        if cell.kind == "python":
            exec(compile(cell.text, f"{path.name}, cell {number + 1}", "exec"), names)
    assert set(values) <= set(stage.widgets), "a widget that the test sets is not there"
    return stage, names


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
class TestForm:
    def test_the_first_cell_says_what_for_and_where(self, path: Path) -> None:
        first = cells(path)[0]
        assert first.kind == "md"
        assert first.text.startswith("# ")
        assert "**Runtime**" in first.text

    def test_then_it_installs_and_asks(self, path: Path) -> None:
        kinds = [cell.kind for cell in cells(path)]
        assert kinds[1] == "pip"
        assert "restartPython" in cells(path)[2].text
        assert "dbutils.widgets" in cells(path)[3].text

    def test_cells_are_short(self, path: Path) -> None:
        assert max(len(cell.text.splitlines()) for cell in cells(path)) <= 15

    def test_paths_are_those_of_volumes(self, path: Path) -> None:
        defaults = re.findall(r'widgets\.text\("\w+", "(/[^"]*)"', path.read_text())
        assert defaults
        assert all(default.startswith("/Volumes/") for default in defaults)


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


def executed(path: Path, values: dict[str, str], folder: Path) -> Any:
    """The notebook with its outputs, of which a page is in `folder`."""
    from nbclient import NotebookClient
    from nbconvert import HTMLExporter

    notebook = as_jupyter(path)
    client = NotebookClient(
        notebook, timeout=int(patient(300)), coalesce_streams=True, resources={"metadata": {"path": str(folder)}}
    )
    client.execute(env=kernel_environment(WIDGETS=json.dumps(values)))
    del notebook.cells[0]
    page, _ = HTMLExporter().from_notebook_node(notebook)
    (folder / f"{path.stem}.html").write_text(page)
    return notebook


def check_page(show_page: Callable[..., Any], page: Path) -> None:
    """A browser shows every picture of a notebook's page, and nothing of it ends outside of the window."""
    found, screenshot = show_page(
        page.read_text(), 1100, height=2400, screenshot=page.with_suffix(".png"), is_ours=False
    )
    assert found["seen"]
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


def test_neither_folder_is_a_package() -> None:
    assert not (FOLDER / "__init__.py").exists()


@pytest.mark.spark
@pytest.mark.timeout(240)
def test_prepare_and_look(spark: SparkSession, small_archive: Path, tmp_path: Path) -> None:
    values = {"config": "smoke", "archive": str(small_archive), "dataset": str(tmp_path / "dataset")}
    stage, _ = execute(FOLDER / "prepare_and_look.py", spark, values)
    table, figure, page = stage.shown
    assert sum(row["count"] for row in table.collect()) == 32
    assert read_manifest(Folder.at(tmp_path / "dataset")).splits["train"].rows == 32
    labels = [text.get_text() for text in figure.axes[0].get_yticklabels()]
    assert set(labels) <= set(read_manifest(Folder.at(tmp_path / "dataset")).class_names)
    assert page.lower().startswith("<!doctype html>")


@pytest.mark.spark
@pytest.mark.parallel
@pytest.mark.long
@pytest.mark.timeout(400)
def test_train_on_workers_and_score_a_table(
    spark: SparkSession, small_dataset: Path, small_network: str, tmp_path: Path, mlflow_store: str
) -> None:
    config = tmp_path / "small.yaml"
    config.write_text(to_yaml(load("smoke", [small_network])))
    values = {
        "config": str(config),
        "dataset": str(small_dataset),
        "output": str(tmp_path / "outputs"),
        "workers": "2",
        "gpus": "0",
        "epochs": "2",
    }
    stage, names = execute(FOLDER / "train_on_workers.py", spark, values)
    history, figure, per_class = stage.shown
    assert len(history) == 2
    assert figure.axes
    assert "f1" in per_class.columns

    output = tmp_path / "predictions"
    values = {"model": names["trained"].model_uri, "input": str(small_dataset), "output": str(output)}
    stage, names = execute(FOLDER / "score_a_table.py", spark, values)
    rows, labels = stage.shown
    assert names["scored"].predictions == 32 + 12 + 12
    assert names["predictions"].count() == names["predictions"].select("id").distinct().count() == 32 + 12 + 12
    assert rows.count() == 20
    assert set(labels.columns) == {"label", "count"}


@pytest.mark.timeout(120)
def test_compare_runs(tmp_path: Path, record: Callable[..., str]) -> None:
    for seed in (0, 1):
        record("sweep", f"training.seed={seed}")
    record("sweep", "optimizer=sgd")
    values = {"experiment": "sweep", "output": str(tmp_path / "comparison")}
    stage, names = execute(FOLDER / "compare_runs.py", None, values)
    table, figure, page = stage.shown
    assert list(table["seeds"]) == [2, 1]
    assert list(table["setting optimizer.name"]) == ["lars", "sgd"]
    assert [axes.get_xlabel() for axes in figure.axes] == ["samples", "seconds of training"]
    assert [len(axes.lines) for axes in figure.axes] == [3, 3]
    assert [text.get_text() for text in figure.axes[0].get_legend().get_texts()] == ["1 lars", "2 sgd"]
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
from pipelines.storage import Folder
from pipelines.tasks import run_tasks

def fail(item):
    import time
    from pathlib import Path
    Path(f"runs-{item}").touch()
    while not all(Path(f"runs-{each}").exists() for each in (1, 2)):  # a worker that is started must not be killed
        time.sleep(0.1)
    time.sleep(2)
    raise ValueError("of a task")

run_tasks(spark, [1, 2], fail, job="prepare", folder=Folder.at("/data"), files=["a", "b"], less_memory="")
"""


@pytest.mark.spark
@pytest.mark.parallel
@pytest.mark.long
@pytest.mark.timeout(240)
def test_a_cell_that_fails_shows_one_error_and_no_log_of_spark(tmp_path: Path) -> None:
    """In a session of the user's own, whose log and bars are Spark's defaults."""
    import nbformat
    from nbclient import NotebookClient

    session = 'SparkSession.builder.master("local[2]").config("spark.ui.enabled", "false").getOrCreate()'
    texts = [f"from pyspark.sql import SparkSession\nspark = {session}", IN_THE_RANKS, IN_THE_TASKS, "print(6 * 7)"]
    notebook = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(text.strip()) for text in texts])
    client = NotebookClient(
        notebook,
        timeout=int(patient(200)),
        coalesce_streams=True,
        allow_errors=True,
        resources={"metadata": {"path": str(tmp_path)}},
    )
    client.execute(env=kernel_environment())
    # Spark's own start says something: what its processes print does reach a cell.
    assert "WARN" in "".join(each.text for each in notebook.cells[0].outputs if each.get("name") == "stderr")
    for cell, name, words in zip(
        notebook.cells[1:3], ("WorkerError", "RuntimeError"), ("of a rank", "of a task"), strict=True
    ):
        assert len(cell.outputs) == 1, [each.get("text", each.output_type) for each in cell.outputs]
        error = cell.outputs[0]
        assert (error.output_type, error.ename) == ("error", name)
        assert words in error.evalue
    (last,) = notebook.cells[3].outputs
    assert last.text == "42\n"


@pytest.mark.spark
@pytest.mark.long
@pytest.mark.timeout(400)
def test_preparing_and_comparing_as_jupyter_notebooks(
    small_archive: Path, tmp_path: Path, record: Callable[..., str], show_page_if_possible: Callable[..., Any] | None
) -> None:
    values = {"config": "smoke", "archive": str(small_archive), "dataset": str(tmp_path / "dataset")}
    prepared = executed(FOLDER / "prepare_and_look.py", values, tmp_path)
    assert printed(prepared, "stdout").splitlines()[-1] == "test 12 samples, train 32 samples, validation 12 samples"
    assert len(shown(prepared, "image/png")) == 1
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
    for name in ("prepare_and_look", "compare_runs"):
        page = tmp_path / f"{name}.html"
        assert "data:image/png" in page.read_text()
        if show_page_if_possible is not None:
            check_page(show_page_if_possible, page)


@pytest.mark.spark
@pytest.mark.parallel
@pytest.mark.long
@pytest.mark.timeout(900)
def test_training_and_scoring_as_jupyter_notebooks(small_dataset: Path, tmp_path: Path, mlflow_store: str) -> None:
    values = {"config": "smoke", "dataset": str(small_dataset), "output": str(tmp_path / "outputs")}
    values |= {"workers": "2", "gpus": "0", "epochs": "2"}
    trained = executed(FOLDER / "train_on_workers.py", values, tmp_path)
    assert len(re.findall(r"^epoch \d/2: loss", printed(trained, "stdout"), re.MULTILINE)) == 2
    assert len(shown(trained, "image/png")) == 1
    summary = shown(trained, "text/html")[0]
    assert "data:image/png" in summary
    (model,) = re.findall(r"runs:/\w+/[\w-]+", summary)
    check_quiet(trained)

    values = {"model": model, "input": str(small_dataset), "output": str(tmp_path / "predictions")}
    scored = executed(FOLDER / "score_a_table.py", values, tmp_path)
    assert "56 predictions, 0 samples rejected" in printed(scored, "stdout")
    check_quiet(scored)
