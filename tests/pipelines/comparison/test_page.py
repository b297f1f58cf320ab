"""The report of a comparison, as text and in a real browser."""

import html
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from jobs.compare import comparison_of, lines_of
from pipelines.comparison.run import ComparedRun

SCRIPT = "<script>document.title = 'owned'</script>"


def training(
    number: int,
    *,
    batch: int = 128,
    optimizer: str = "lars",
    rate: float = 1.0,
    workers: int | str = 2,
    codec: str = "none",
    seed: int = 0,
    best: float = 0.9,
    speed: float = 400.0,
    diverged: bool = False,
    dataset: str = "0123456789abcdef",
    epochs: int = 30,
) -> ComparedRun:
    """An invented training of 50,000 samples an epoch, which comes to its score as real ones do."""
    steps = 50_000 // batch
    done = epochs // 3 if diverged else epochs
    rows = range(1, done + 1)
    scores = [best * (1 - 0.85 * 0.85**epoch) + 0.004 * ((epoch * 7 + seed) % 5 - 2) for epoch in rows]
    return ComparedRun(
        run_id=f"{number:032x}",
        name=f"{SCRIPT}{number}",
        source="cifar10",
        status="FAILED" if diverged else "FINISHED",
        started=f"2026-01-{1 + number % 28:02d} 10:00:00",
        diverged="FloatingPointError: the loss of rank 1 is nan at step 200" if diverged else "",
        settings={
            "dataset_fingerprint": dataset,
            "archive.kind": "image_folder",
            "global_batch_size": str(batch),
            "launch.num_workers": str(workers),
            "optimizer.name": optimizer,
            "optimizer.learning_rate": str(rate),
            "exchange.codec.name": codec,
            "training.precision": "bfloat16",
            "training.seed": str(seed),
            "schedule.warmup.name": "gradual",
            "schedule.warmup.epochs": "5",
            "model.name": SCRIPT,
        },
        metrics={"val/top_1": scores[-1]},
        history={
            "epoch": [float(row) for row in rows],
            "step": [float(row * steps) for row in rows],
            "seconds": [row * 50_000 / speed for row in rows],
            "payload_bytes": [row * steps * (1.1e6 if codec == "none" else 5e4) for row in rows],
            "train/loss": [2.3 * 0.9**row + 0.1 for row in rows],
            "val/top_1": [float(score) for score in scores],
        },
    )


def grid() -> list[ComparedRun]:
    """A grid of batch sizes, optimizers, rates, seeds and codecs, of which some diverged."""
    runs = []
    for batch, lost in ((128, 0.0), (1024, 0.01), (4096, 0.02), (16384, 0.12)):
        for optimizer, worse in (("lars", 0.0), ("sgd", 1.5)):
            for rate, off in ((0.5, 0.03), (2.0, 0.0)):
                bad = optimizer == "sgd" and batch == 16384
                for seed in range(3 if rate == 2.0 and not bad else 1):
                    best = 0.91 - lost * (1 + worse) - off
                    runs.append(
                        training(
                            len(runs), batch=batch, optimizer=optimizer, rate=rate * batch / 128, seed=seed, best=best,
                            diverged=bad, speed=300 + batch / 64,
                        )
                    )  # fmt: skip
    for workers in (1, 4, 8):
        runs.append(training(len(runs), batch=4096, workers=workers, speed=190.0 * workers**0.9, best=0.88))
    runs.append(training(len(runs), batch=4096, codec="powersgd", best=0.885, speed=470))
    return runs


def page_of(folder: Path, runs: list[ComparedRun], **chosen: Any) -> str:
    comparison_of(runs, "cifar10", **chosen).write(folder)
    return (folder / "report.html").read_text()


def cells(page: str) -> list[str]:
    found = re.findall(r"<t[dh][^>]*>(.*?)</t[dh]>", page, re.DOTALL)
    return [" ".join(html.unescape(re.sub(r"<[^>]*>", " ", cell)).split()) for cell in found]


def section(page: str, name: str) -> str:
    return page.split(f'<section class="{name}">')[1].split("</section>")[0]


def test_the_table_has_recipe_score_time_and_bytes(tmp_path: Path) -> None:
    page = page_of(tmp_path, [training(seed, seed=seed, epochs=10) for seed in range(2)])
    table = cells(section(page, "table"))
    names = table[: len(table) // 2]
    row = dict(zip(names, table[len(names) :], strict=True))
    assert "2 trainings in 1 group." in page
    assert (row["Seeds"], row["Batch"], row["Workers"], row["Peak rate"]) == ("2", "128", "2", "1")
    assert (row["Warm-up"], row["Optimizer"], row["Codec"]) == ("gradual, 5 epochs", "lars", "none")
    assert (row["Epochs"], row["Steps"], row["Precision"]) == ("10", "3,900", "bfloat16")
    # 10 epochs of 50,000 samples at 400/s; 3900 steps of 1.1 MB.
    assert (row["Time"], row["Bytes"]) == ("21 min", "4.29 GB")
    assert re.fullmatch(r"0\.7\d+ ± 0\.00\d+", row["val/top_1"])
    assert "Nothing: all trainings have the same settings, apart from the seed." in page


def test_only_what_differs_is_shown(tmp_path: Path) -> None:
    page = page_of(tmp_path, [training(0), training(1, optimizer="sgd")])
    assert cells(section(page, "differences")) == ["#", "optimizer optimizer.name", "1", "lars", "2", "sgd"]
    assert "10 further settings are the same." in " ".join(section(page, "differences").split())


def test_diverged_runs_and_mixed_datasets_are_said(tmp_path: Path) -> None:
    runs = [training(0), training(1, diverged=True, seed=1), training(2, dataset="fedcba9876543210", best=0.5)]
    compared = comparison_of(runs, "cifar10")
    page = compared.page
    text = " ".join(page.split())
    assert "The trainings are of 2 datasets (image_folder 0123456789ab, image_folder fedcba987654)" in text
    assert "1 of 3 trainings diverged." in text
    assert '<span class="mark">1 of 2 trainings diverged</span>' in page
    assert "FloatingPointError: the loss of rank 1 is nan at step 200" in text
    assert page.count('<section class="table">') == 2
    shown = "\n".join(lines_of(compared))
    assert "of 2 datasets" in shown
    assert "(1 of 2 trainings diverged: FloatingPointError" in shown


def test_a_training_that_failed_does_not_mark_the_others_of_its_group() -> None:
    runs = [training(0), training(1, seed=1), training(2, seed=2).model_copy(update={"status": "FAILED"})]
    compared = comparison_of(runs, "cifar10")
    assert '<span class="mark">1 of 3 trainings failed</span>' in compared.page
    assert lines_of(compared)[-1].endswith("(1 of 3 trainings failed)")
    row = compared.table.iloc[0]
    assert (row["seeds"], row["seeds in the mean"]) == (3, 2)
    alone = comparison_of(runs[2:], "cifar10")
    assert lines_of(alone)[-1].endswith("(failed)")
    assert alone.table.iloc[0]["seeds in the mean"] == 0


def test_a_dataset_without_the_metric_is_named() -> None:
    other = training(1, dataset="fedcba9876543210")
    other.history["val/f1_micro"] = other.history.pop("val/top_1")
    notes = comparison_of([training(0), other], "cifar10").notes
    assert notes[0] == (
        "No training on image_folder fedcba987654 has val/top_1. To compare these, choose another metric, such as "
        "val/f1_micro."
    )
    assert not any("choose another metric" in note for note in comparison_of([training(0)], "cifar10").notes)


def test_a_seed_counts_once_and_only_if_its_training_ended_well() -> None:
    recipes = [(0, 0.8), (0, 0.8), (1, 0.9)]
    runs = [training(number, seed=seed, best=best) for number, (seed, best) in enumerate(recipes)]
    (part,) = comparison_of(runs, "cifar10").parts
    (group,) = part.groups
    assert group.seeds == 2
    means = [training(0, best=0.8), training(1, seed=1, best=0.9)]
    (expected,) = comparison_of(means, "cifar10").parts[0].groups
    assert group.score == expected.score
    assert group.reached("val/top_1", 0.5) == expected.reached("val/top_1", 0.5)
    compared = comparison_of([*runs, training(3, seed=2, diverged=True)], "cifar10", target=0.1)
    assert "1 of 4 trainings repeat recipe and seed of another one." in compared.page
    reached = compared.parts[0].groups[0].reached("val/top_1", 0.1)
    assert reached is not None
    assert reached.seeds == 2, "one that diverged has no part in it"
    assert cells(section(compared.page, "target"))[-1] == "2 of 3", "seeds, as the table counts them"
    assert '<span class="mark">1 of 4 trainings diverged</span>' in compared.page, "not seeds"


def test_without_validation_the_loss_is_named_and_said_to_tell_little() -> None:
    bare = [training(number, optimizer=name) for number, name in enumerate(("lars", "sgd"))]
    bare = [
        run.model_copy(update={"history": {name: run.history[name] for name in ("epoch", "step", "train/loss")}})
        for run in bare
    ]
    note = "No training was validated, so nothing here tells how well they do on other images."
    compared = comparison_of(bare, "cifar10")
    assert note in compared.page
    shown = lines_of(compared)
    assert shown[0] == note
    assert shown[1].split() == ["train/loss", "time", "bytes", "group"]
    assert note not in comparison_of([*bare, training(2)], "cifar10").notes


def test_a_run_that_changed_its_workers_is_in_no_plot_over_workers(tmp_path: Path) -> None:
    changed = training(0, workers="4, 3 from step 780", seed=1)
    alone = comparison_of([changed, training(1), training(2, workers=1).model_copy(update={"history": {}})], "cifar10")
    assert '<section class="workers">' not in alone.page
    both = comparison_of([changed, training(1), training(2, workers=4)], "cifar10")
    assert '<section class="workers">' in both.page


def test_what_is_not_recorded_is_a_dash(tmp_path: Path) -> None:
    bare = training(0).model_copy(update={"settings": {}, "metrics": {}})
    bare = bare.model_copy(update={"history": {name: bare.history[name] for name in ("epoch", "step", "val/top_1")}})
    page = page_of(tmp_path, [bare])
    assert "not recorded" in section(page, "table")
    assert cells(section(page, "table")).count("-") > 5
    assert "by training time" not in page
    empty = bare.model_copy(update={"history": {}, "status": "RUNNING"})
    assert "have not finished" in page_of(tmp_path / "empty", [empty])


def test_a_target_of_ones_own(tmp_path: Path) -> None:
    runs = [training(0), training(1, optimizer="sgd", best=0.5)]
    targets = section(page_of(tmp_path, runs, target=0.8), "target")
    assert "Time to val/top_1 0.8" in targets
    assert "--target" not in targets
    assert cells(targets)[-3:] == ["2", "sgd", "not reached"]


def test_names_from_other_peoples_files_are_escaped(tmp_path: Path) -> None:
    runs = [training(0), training(1).model_copy(update={"settings": {**training(1).settings, "model.name": "a"}})]
    page = page_of(tmp_path, runs)
    assert "<script" not in page
    assert "&lt;script&gt;" in page


def test_the_page_needs_nothing_else(tmp_path: Path) -> None:
    text = page_of(tmp_path, grid())
    assert not re.search(r"https?:|//\w|@import|url\(|<link|<iframe", re.sub(r"data:[^\"]*", "data:", text))
    sources = re.findall(r"\b(?:src|srcset|href)=(\S{6})", text)
    assert set(sources) == {'"data:'}
    assert len(sources) >= 2 * 6
    assert len(text) < 3_000_000
    assert "default-src 'none'" in text
    assert len(list(tmp_path.iterdir())) == 3


@pytest.mark.timeout(120)
@pytest.mark.parametrize("width", [1280, 390])  # a desktop's and a phone's
def test_a_browser_shows_the_whole_page(show_page: Callable[..., Any], tmp_path: Path, width: int) -> None:
    found, _ = show_page(page_of(tmp_path / "comparison", grid()), width)
    assert found["width"] == width
    assert len(found["seen"]) == 6 + 2, "curves, and score and speed in the width that fits"
    assert min(found["seen"]) > 300
    assert max(found["right"]) <= width
    assert found["overflow"] == 0
    assert found["scripts"] == 1
