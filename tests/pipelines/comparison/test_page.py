"""The report of a comparison, as text and in a real browser."""

import html
import itertools
import re
from collections.abc import Callable
from typing import Any

import pytest

from jobs.compare import Comparison, comparison_of, lines_of
from pipelines.comparison import figures
from pipelines.comparison.figures import GREY
from pipelines.comparison.page import latex_of
from pipelines.comparison.run import ComparedRun
from pipelines.comparison.tables import importance_of

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
    steps, rows = 50_000 // batch, range(1, (epochs // 3 if diverged else epochs) + 1)
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
    lost, runs = {128: 0.0, 1024: 0.01, 4096: 0.02, 16384: 0.12}, []
    for batch, optimizer, rate in itertools.product(lost, ("lars", "sgd"), (0.5, 2.0)):
        bad = optimizer == "sgd" and batch == 16384
        best = 0.91 - lost[batch] * (2.5 if optimizer == "sgd" else 1) - (0.03 if rate == 0.5 else 0.0)
        recipe = {"batch": batch, "optimizer": optimizer, "rate": rate * batch / 128, "best": best}
        runs += [
            recipe | {"seed": seed, "diverged": bad, "speed": 300 + batch / 64}
            for seed in range(3 if rate == 2.0 and not bad else 1)
        ]
    runs += [{"batch": 4096, "workers": n, "speed": 190.0 * n**0.9, "best": 0.88} for n in (1, 4, 8)]
    runs.append({"batch": 4096, "codec": "powersgd", "best": 0.885, "speed": 470})
    return [training(number, **recipe) for number, recipe in enumerate(runs)]


def compared(runs: list[ComparedRun], **chosen: Any) -> Comparison:
    return comparison_of(runs, "cifar10", **chosen)


def cells(page: str) -> list[str]:
    return [
        " ".join(html.unescape(re.sub(r"<[^>]*>", " ", cell)).split())
        for cell in re.findall(r"<t[dh][^>]*>(.*?)</t[dh]>", page, re.DOTALL)
    ]


def section(page: str, name: str) -> str:
    return page.split(f'<section class="{name}">')[1].split("</section>")[0]


def test_the_table_has_recipe_score_time_and_bytes() -> None:
    page = compared([training(seed, seed=seed, epochs=10) for seed in range(2)]).page
    table = cells(section(page, "table"))
    row = dict(zip(table[: len(table) // 2], table[len(table) // 2 :], strict=True))
    assert row == row | {
        "Seeds": "2",
        "Batch": "128",
        "Workers": "2",
        "Peak rate": "1",
        "Warm-up": "gradual, 5 epochs",
        "Optimizer": "lars",
        "Codec": "none",
        "Epochs": "10",
        "Steps": "3,900",
        "Precision": "bfloat16",
        # 10 epochs of 50,000 samples at 400/s; 3900 steps of 1.1 MB.
        "Time": "21 min",
        "Bytes": "4.29 GB",
    }
    assert re.fullmatch(r"0\.7\d+ ± 0\.00\d+", row["val/top_1"])
    assert [
        said
        for said in ("2 trainings in 1 group.", "Nothing: all trainings have the same settings, apart from the seed.")
        if said not in page
    ] == []


def test_only_what_differs_is_shown() -> None:
    page = compared([training(0), training(1, optimizer="sgd")]).page
    assert cells(section(page, "differences")) == ["#", "optimizer optimizer.name", "1", "lars", "2", "sgd"]
    assert "10 further settings are the same." in " ".join(section(page, "differences").split())


def test_every_setting_that_differs_is_named_and_not_only_the_optimizer() -> None:
    more = {"model.name": "vgg", "training.epochs": "10", "schedule.warmup.epochs": "2", "optimizer.momentum": "0.9"}
    runs = [training(0, epochs=10), training(1, optimizer="sgd", epochs=10)]
    runs[0].settings["training.epochs"] = "30"
    runs[1].settings.update(more)
    made = compared(runs)
    assert [group.label for group in made.parts[0].groups][1] == "sgd, vgg, epochs 10, warmup epochs 2"
    assert "<p>what differs: optimizer, model, epochs, warmup epochs</p>" in made._repr_html_()
    assert "sgd, vgg, epochs 10, warmup epochs 2" in lines_of(made)[-1]


def test_diverged_trainings_have_one_count_and_a_line_for_each_reason() -> None:
    runs = [training(number, rate=1.0 + number % 20, seed=number, diverged=True) for number in range(40)]
    steps = [
        run.model_copy(update={"diverged": f"the loss is nan at step {number}"}) for number, run in enumerate(runs)
    ]
    high = {"status": "FINISHED", "diverged": "", "chance_loss": 0.5}
    made = compared([*steps[:30], *(run.model_copy(update=high) for run in runs[30:])])
    said = re.findall("<li>(.*)</li>", section(made.page, "table"))
    assert [line.split(")")[0] for line in said] == [
        "30 of 40 trainings (groups 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, ...",
        "10 of 40 trainings (groups 11, 12, 13, 14, 15, 16, 17, 18, 19, 20",
    ]
    assert said[0].endswith("), for example: diverged: the loss is nan at step 0")
    for text, place in (
        ("at chance level", said[1]),
        ("40 of 40 trainings diverged", made.notes[0]),
        ("(2 of 2 trainings diverged: the loss is nan at step 10; diverged: the last", lines_of(made)[-10]),
        ("; with the diverged 0.", lines_of(made)[-10]),
    ):
        assert text in place
    assert made.page.count("2 of 2 trainings diverged;\nwith them 0.") == 20


def test_diverged_runs_and_mixed_datasets_are_said() -> None:
    runs = [training(0), training(1, diverged=True, seed=1), training(2, dataset="fedcba9876543210", best=0.5)]
    made = compared(runs)
    text, shown = " ".join(made.page.split()), "\n".join(lines_of(made))
    for said, place in (
        ("The trainings are of 2 datasets (image_folder 0123456789ab, image_folder fedcba987654)", text),
        ("1 of 3 trainings diverged: they became not finite, or ended at 98% or more of the loss of", text),
        ('<span class="mark">1 of 2 trainings diverged; with it 0.', text),
        ("FloatingPointError: the loss of rank 1 is nan at step 200", text),
        ("of 2 datasets", shown),
        ("(1 of 2 trainings diverged: FloatingPointError", shown),
    ):
        assert said in place
    assert made.page.count('<section class="table">') == 2


def test_a_training_that_failed_does_not_mark_the_others_of_its_group() -> None:
    runs = [training(0), training(1, seed=1), training(2, seed=2).model_copy(update={"status": "FAILED"})]
    made, alone = compared(runs), compared(runs[2:])
    assert '<span class="mark">1 of 3 trainings failed</span>' in made.page
    for comparison, end, means in ((made, "(1 of 3 trainings failed)", 2), (alone, "(failed)", 0)):
        assert lines_of(comparison)[-1].endswith(end)
        assert comparison.table.iloc[0]["seeds in the mean"] == means
    assert made.table.iloc[0]["seeds"] == 3


def test_a_dataset_without_the_metric_is_named() -> None:
    other = training(1, dataset="fedcba9876543210")
    other.history["val/f1_micro"] = other.history.pop("val/top_1")
    assert compared([training(0), other]).notes[0] == (
        "No training on image_folder fedcba987654 has val/top_1. To compare these, choose another metric, such as "
        "val/f1_micro."
    )
    assert not any("choose another metric" in note for note in compared([training(0)]).notes)


def test_a_seed_counts_once_and_only_if_its_training_ended_well() -> None:
    recipes = [(0, 0.8), (0, 0.8), (1, 0.9)]
    runs = [training(number, seed=seed, best=best) for number, (seed, best) in enumerate(recipes)]
    group, expected = (compared(some).parts[0].groups[0] for some in (runs, runs[1:]))
    assert (group.seeds, group.score, group.reached("val/top_1", 0.5)) == (
        2,
        expected.score,
        expected.reached("val/top_1", 0.5),
    )
    made = compared([*runs, training(3, seed=2, diverged=True)], target=0.1)
    assert "1 of 4 trainings repeat recipe and seed of another one." in made.page
    reached: Any = made.parts[0].groups[0].reached("val/top_1", 0.1)
    assert reached.seeds == 2, "one that diverged has no part in it"
    assert cells(section(made.page, "target"))[-1] == "2 of 3", "seeds, as the table counts them"
    assert '<span class="mark">1 of 4 trainings diverged;' in made.page, "not seeds"


def test_without_validation_the_loss_is_named_and_said_to_tell_little() -> None:
    runs = [training(number, optimizer=name) for number, name in enumerate(("lars", "sgd"))]
    bare = [only(run, "epoch", "step", "train/loss") for run in runs]
    note = "No training was validated, so nothing here tells how well they do on other images."
    made = compared(bare)
    assert note in made.page
    first, second, *_ = lines_of(made)
    assert (first, second.split()) == (note, ["train/loss", "time", "bytes", "group"])
    assert note not in compared([*bare, training(2)]).notes


def only(run: ComparedRun, *kept: str) -> ComparedRun:
    return run.model_copy(update={"history": {name: run.history[name] for name in kept}})


def test_a_run_that_changed_its_workers_is_in_no_plot_over_workers() -> None:
    changed = training(0, workers="4, 3 from step 780", seed=1)
    for other, shown in ((only(training(2, workers=1)), False), (training(2, workers=4), True)):
        assert ('<section class="workers">' in compared([changed, training(1), other]).page) == shown


def test_what_is_not_recorded_is_a_dash() -> None:
    bare = only(training(0), "epoch", "step", "val/top_1").model_copy(update={"settings": {}, "metrics": {}})
    page = compared([bare]).page
    table = section(page, "table")
    assert ("not recorded" in table, cells(table).count("-") > 5, "by training time" in page) == (True, True, False)
    assert "have not finished" in compared([only(bare).model_copy(update={"status": "RUNNING"})]).page


def test_a_target_of_ones_own() -> None:
    targets = section(compared([training(0), training(1, optimizer="sgd", best=0.5)], target=0.8).page, "target")
    assert ("Time to val/top_1 0.8" in targets, "--target" in targets, cells(targets)[-3:]) == (
        True,
        False,
        ["2", "sgd", "not reached"],
    )


def test_names_from_other_peoples_files_are_escaped() -> None:
    other = training(1).model_copy(update={"settings": {**training(1).settings, "model.name": "a"}})
    page = compared([training(0), other]).page
    assert (SCRIPT in page, "&lt;script&gt;" in page) == (False, True)


@pytest.fixture(scope="module")
def page_of_grid(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The page of all trainings of the grid, which is written with three other files."""
    folder = tmp_path_factory.mktemp("comparison")
    compared(grid()).write(folder)
    assert len(list(folder.iterdir())) == 4
    return (folder / "report.html").read_text()


def test_the_page_needs_nothing_else(page_of_grid: str) -> None:
    ours = re.sub(r"<script>.*?</script>|(?<=id=\"plotly\">)[\w+/=]+|data:[^\"]*", "", page_of_grid, flags=re.DOTALL)
    assert not re.search(r"https?:|//\w|@import|url\(|<link|<iframe|unsafe-eval", ours)
    assert re.search(r"default-src 'none'[^\"]*; script-src( 'sha256-[\w+/=]{44}'){2}\">", page_of_grid)


@pytest.mark.parametrize("datasets", [1, pytest.param(10, marks=pytest.mark.long)])
def test_the_page_of_200_trainings_is_at_most_6_megabytes(datasets: int) -> None:
    grey = [
        training(number, rate=1 + number / 100, best=0.9 - number / 1000, dataset=f"{number % datasets:016x}")
        for number in range(200)
    ]
    made = compared(grey)
    assert len(made.page.encode()) <= 6_000_000
    lines = figures.curves(made.parts[0], "val/top_1", figures.SAMPLES, dict.fromkeys(range(1, 201), GREY)).lines
    assert [len(line["x"]) for line in lines] == {1: [15] * 200, 10: [30] * 20}[datasets], "every second epoch"


def scored(number: int, score: float, **recipe: Any) -> ComparedRun:
    made = training(number, **recipe)
    made.history["val/top_1"] = [score] * 30
    return made


def test_the_importance_of_a_setting_is_its_share_of_the_variance() -> None:
    recipes: list[dict[str, Any]] = [
        {"optimizer": "lars", "codec": "none"},
        {"optimizer": "lars", "codec": "powersgd"},
        {"optimizer": "sgd", "codec": "none"},
        {"optimizer": "sgd", "codec": "powersgd"},
    ]
    runs = [
        scored(row, score, **recipe) for row, score, recipe in zip(range(4), (0.1, 0.3, 0.7, 0.9), recipes, strict=True)
    ]
    # The squares sum to 0.4 around the mean of all, to 0.02 + 0.02 around those of the optimizers, and to 0.18 + 0.18
    # around those of the codecs: 1 - (0.04 / 2) / (0.4 / 3), and 1 - (0.36 / 2) / (0.4 / 3) < 0.
    made = compared([*runs, training(4, optimizer="adam", diverged=True)])
    assert importance_of(made.parts[0]) == {"optimizer.name": pytest.approx(0.85), "exchange.codec.name": 0.0}
    assert "optimizer optimizer.name 85 %" in " ".join(cells(section(made.page, "importance")))
    assert importance_of(compared(runs[::3]).parts[0]) == {}, "a value per training says nothing"


def test_a_line_is_the_mean_over_seeds_and_its_band_their_range() -> None:
    runs = [scored(0, 0.4), scored(1, 0.8, seed=1), scored(2, 0.9, seed=1), training(3, seed=2, diverged=True)]
    chart = figures.curves(compared(runs).parts[0], "val/top_1", figures.SAMPLES, {1: GREY})
    mean, own = chart.lines
    assert {name: mean[name][0] for name in ("x", "mean", "low", "high", "count")} == {
        "x": 390 * 128,
        "mean": pytest.approx((0.4 + 0.85) / 2),
        "low": 0.4,
        "high": 0.85,
        "count": 2,
    }
    assert (own["has_cross"], len(own["x"]), mean["has_cross"]) == (True, 10, False)


def test_the_main_table_is_written_for_latex() -> None:
    table = latex_of(compared([training(seed, seed=seed, batch=1024) for seed in range(2)]).parts)
    assert re.search(r"\n1 & [^&]+ & 2 & 0\.\d{4} \$\\pm\$ 0\.\d{4} & .* \\\\\n\\bottomrule", table)


ACT = """(async () => {
  const root = document.documentElement, all = query => [...document.querySelectorAll(query)];
  while (!root.classList.contains("drawn")) await new Promise(done => setTimeout(done, 20));
  const inside = text => {
    const plot = text.closest(".plot").getBoundingClientRect(), box = text.getBoundingClientRect();
    return box.left >= plot.left && box.right <= plot.right && box.top >= plot.top && box.bottom <= plot.bottom;
  };
  const clipped = all(".plot text").filter(text => !inside(text)).map(text => text.textContent);
  const plot = document.querySelector(".learning .plot"), place = plot.data.findIndex(trace => trace.customdata);
  Plotly.Fx.hover(plot, [{curveNumber: place, pointNumber: 3}]);
  const hover = all(".hoverlayer text").map(text => text.textContent);
  document.querySelector(".learning .legend button").click();
  const hidden = all(".learning .plot").map(each => each.data.filter(trace => !(trace.visible ?? true)).length);
  const sorted = head => { head.click(); return all(".runs tbody tr").map(row => row.cells[4].textContent.trim()); };
  const time = all(".runs thead button")[4];
  return {plots: all(".js-plotly-plot").length, clipped, hover, hidden, times: [sorted(time), sorted(time)],
    policy: await new Promise(done => { addEventListener("securitypolicyviolation", () => done("kept"));
      document.body.append(Object.assign(document.createElement("script"), {textContent: "done()"})); })};
})()"""


@pytest.mark.timeout(120)
@pytest.mark.parametrize("width", [1400, 390])  # a desktop's and a phone's
def test_a_browser_draws_the_page(show_page: Callable[..., Any], page_of_grid: str, width: int) -> None:
    found, _ = show_page(page_of_grid, width, act=ACT)
    assert (found["width"], found["overflow"], found["fetched"], found["seen"]) == (width, 0, [], [])
    (refused,) = found["problems"]  # the script that the test itself has added
    acted = found["acted"]
    assert (acted["plots"], acted["clipped"], acted["policy"]) == (9, [], "kept"), refused
    assert re.fullmatch(r"0\.\d+ \(0\.\d+ to 0\.\d+, 3 seeds\)", acted["hover"][-1])
    assert set(acted["hidden"]) == {1}, "of the first group, in each chart"
    up, down = acted["times"]
    assert (up[0], up[-3:], down[0], down[-2:]) == ("20 min", ["2.2 h", "-", "-"], "2.2 h", ["-", "-"])


@pytest.mark.timeout(120)
def test_without_scripts_a_browser_shows_pictures(show_page: Callable[..., Any], page_of_grid: str) -> None:
    found, _ = show_page(page_of_grid, 390, has_scripts=False)
    assert (len(found["seen"]), min(found["seen"]) > 300, max(found["right"]) <= 390) == (9, True, True)
    assert (found["overflow"], found["fetched"]) == (0, [])
