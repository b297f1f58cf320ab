"""The figures in the tables and sentences of READMEs are those of the committed results."""

import csv
import json
import re
import statistics
from pathlib import Path

import pytest

PROJECT = Path(__file__).parents[1]
BENCHMARKS = PROJECT / "tests" / "benchmarks"
CODECS = [
    ("Horovod fp32", "Horovod fp32", ""),
    ("Horovod fp16", "Horovod fp16", ""),
    ("`none`", "none", "none"),
    ("`qsgd` (4 bits)", "qsgd", "qsgd 4 bits"),
    ("`onebit`", "onebit", "onebit"),
    ("`powersgd` (rank 4)", "powersgd", "powersgd rank 4"),
    ("`topk` (1 %)", "topk 1 %", "topk 1 %"),
]
_MAIN_GRIDS = ("sgd", "lars", "seeds", "beyond", "lecture_rule")


def numbers(text: str) -> list[str]:
    """The numbers in a text, but for those in names such as fp16."""
    return re.findall(r"(?<![\w.])\d[\d,]*(?:\.\d+)?", text.replace("*", ""))


def row(file: str, label: str) -> list[str]:
    """The numbers in the cells of a table's row, without its label."""
    (found,) = re.findall(rf"^\| {re.escape(label)} \|(.*)", (PROJECT / file).read_text(), re.MULTILINE)
    return numbers(found)


def section(title: str) -> str:
    return (BENCHMARKS / "RESULTS.md").read_text().split(f"\n## {title}: ")[1].split("\n## ")[0]


def seconds(method: str) -> list[float]:
    """Of a step, on the three links."""
    links = json.loads((BENCHMARKS / "results" / "compression_links.json").read_text())["methods"][method]
    return [links[name]["seconds_per_step"] for name in ("mbit_100", "mbit_1000", "unshaped")]


def top_1(optimizer: str, batch: int) -> list[float]:
    """In percent, one for each seed: at the rate with all seeds, else at the best one."""
    by_rate: dict[str, list[float]] = {}
    with (BENCHMARKS / "results" / "large_batch.csv").open() as file:
        for line in csv.DictReader(file):
            if line["grid"] in _MAIN_GRIDS and (line["optimizer"], line["global_batch_size"]) == (
                optimizer,
                str(batch),
            ):
                by_rate.setdefault(line["learning_rate"], []).append(100 * float(line["top_1"]))
    return max(by_rate.values(), key=lambda values: (len(values), max(values)))


def change(optimizer: str, batch: int) -> list[str]:
    """Points that are lost or gained from batch 128 to this one, and their standard error."""
    first, other = top_1(optimizer, 128), top_1(optimizer, batch)
    error = (statistics.variance(first) / len(first) + statistics.variance(other) / len(other)) ** 0.5
    return [f"{abs(statistics.mean(other) - statistics.mean(first)):.1f}", f"{error:.1f}"]


def test_the_three_figures_at_the_top() -> None:
    reading, launches = section("Reading"), numbers(section("Launch").split("\n| 2 |")[1].split("\n")[0])
    (ours,) = re.findall(r"([\d,]+) rows/s \(`always`\)", reading)
    (petastorm,) = re.findall(r"times Petastorm with 2 threads \(([\d,]+)\)", reading)
    step = [f"{seconds(method)[0]:.1f}" for method in ("powersgd", "Horovod fp32", "Horovod fp16")]
    expected = {
        "reading shuffled 12-band patches from the page cache, each one checked": [ours, petastorm],
        "a ResNet-50 step of two ranks over a 100 Mbit/s link": step,
        "from `.run` to the first line on 2 ranks": [launches[0], *(f"{float(at):.1f}" for at in launches[3::3][:2])],
    }
    assert {label: row("README.md", label) for label in expected} == expected
    assert len(re.findall(r"^\|.*\d", (PROJECT / "README.md").read_text(), re.MULTILINE)) == len(expected)


@pytest.mark.parametrize(("label", "method", "trained"), CODECS)
def test_the_table_of_codecs(label: str, method: str, trained: str) -> None:
    every = map(json.loads, (BENCHMARKS / "results" / "convergence.jsonl").read_text().splitlines())
    accuracies = [100 * line["accuracy"][-1] for line in every if line["method"] == trained]
    expected = [f"{value:.2f}" for value in seconds(method)]
    if accuracies:
        expected += [f"{statistics.mean(accuracies):.1f}", f"{statistics.stdev(accuracies):.1f}"]
    found = row("models/compression/README.md", label)
    assert [*found[:3], *found[-2:]][: len(expected)] == expected


@pytest.mark.parametrize("batch", [128, 1_024, 4_096, 16_384])
def test_the_table_of_large_batches(batch: int) -> None:
    columns = ("SGD", "LARS", "LARS, the lecture's rule")
    found = row("pipelines/training/README.md", f"{batch:,}")
    assert found[:3] == [f"{statistics.mean(top_1(name, batch)):.1f}" for name in columns]


@pytest.mark.parametrize("file", ["README.md", "pipelines/training/README.md"])
def test_the_sentences_on_large_batches(file: str) -> None:
    text = numbers((PROJECT / file).read_text().split("From\n128" if "/" in file else "From 128")[1])
    (sgd, lars), (sgd_beyond, lars_beyond) = (
        [change(name, batch) for name in ("SGD", "LARS")] for batch in (4096, 16384)
    )
    beyond = [*lars_beyond, *sgd_beyond] if file == "README.md" else [*sgd_beyond, *lars_beyond]
    assert [at for at in text[:20] if "." in at][:8] == [*sgd, *lars, *beyond]


def test_the_errors_of_the_predictor_and_of_the_rule() -> None:
    rows = [at for at in json.loads((BENCHMARKS / "results" / "scaling.json").read_text()) if at["ranks"] > 2]
    errors = [[abs(at[name]) for at in rows] for name in ("error", "rule_error")]
    (ours, worst), (rule, rule_worst) = ((f"{statistics.mean(at):.1%}"[:-1], f"{max(at):.0%}"[:-1]) for at in errors)
    text = " ".join((PROJECT / "README.md").read_text().split())
    assert f'was {ours} % (worst: {worst} %). The rule "as long as 2" had [{rule} and {rule_worst} %]' in text
