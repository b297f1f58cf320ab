"""Accuracy over the global batch, from what the grids of CIFAR-10 have recorded: table, CSV and picture.

    make bench NAME=large_batch

Nothing is trained here: `grids/large_batch/train.sh` has the commands, which write `results/large_batch_<grid>.jsonl`
and continue on any machine. Of each optimizer and global batch the table has the rate with the highest mean accuracy of
those with most seeds. The rate that is best on one seed gets more seeds. The table also says how many of the grids'
rates were trained. A point of the picture is one training, and a line goes through the best means; trainings that are
over 10 points below all of these are left out. `results/large_batch_rates.png` has all trainings, as accuracy over the
rate, with lines through the means of the seeds.

Three grids change one thing each. A table of theirs has the difference to the training without the change, of the same
optimizer, rate, global batch and seed. Ablations and more epochs stand beside the grids above, codecs beside the
float32 exchange of their own grid. The network of the baseline (`claim.yaml`) has a table of its own.

`results/large_batch.csv` has a line for each training: steps beside epochs, and the steps after which the validation
first reached 80 % (looked at after every second epoch). The last line is JSON: `best`, by optimizer and global batch
the mean accuracy, the rate, the number of seeds and of rates; `claim`, the same for the baseline's network; `changes`,
by grid, optimizer and change the mean accuracy, the difference and the number of seeds; and `trained`, the number of
cells. `--smoke` draws into a temporary folder.
"""

import csv
import json
import statistics
import tempfile
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure

from pipelines.comparison.grid_results import CellLine, cells_of, read_lines
from tests.benchmarks.parts.command import is_smoke
from tests.benchmarks.parts.figures import head, row

RESULTS = Path(__file__).parent / "results"
GRIDS = ("sgd", "lars", "lamb", "beyond", "lecture_rule", "seeds")
CHANGES = ("ablations", "longer", "compression")
CLAIM = "claim"
DENSE = "none"
NAMED_ELSEWHERE = {"training.global_batch_size", "training.seed", "training.precision", "optimizer"}
RULE = "LARS, the lecture's rule"
SCORE, GOAL = "val/top_1", 0.8
COLOURS = {"SGD": "tab:blue", "LARS": "tab:orange", "LAMB": "tab:green", RULE: "black"}
MARKS = {"SGD": "o", "LARS": "s", "LAMB": "^", RULE: "x"}


@dataclass(frozen=True)
class Training:
    """One cell of a grid."""

    grid: str
    optimizer: str
    change: str
    """What the grid sets besides optimizer, global batch, seed and precision."""
    global_batch_size: int
    learning_rate: float
    """At its peak."""
    seed: int
    precision: str
    epochs: int
    steps: int
    status: str
    top_1: float
    """Of the last epoch; NaN where training diverged."""
    steps_to_goal: int | None
    seconds: float

    @property
    def recipe(self) -> tuple[str, float, int, int]:
        """What a change is compared at."""
        return self.optimizer, self.learning_rate, self.global_batch_size, self.seed


def training_of(grid: str, line: CellLine) -> Training | None:
    """What a line of results says; None where the training failed for another reason than its recipe."""
    if line.run is None or not line.is_done:
        return None
    settings, history = line.run.settings, line.run.history
    batch = int(settings["global_batch_size"])
    rate = settings.get("optimizer.learning_rate")
    of_rule = grid == "lecture_rule"
    peak = float(rate) if rate is not None else float(settings["optimizer.learning_rate_per_256"]) * batch / 256
    scores = zip(history["step"], history.get(SCORE, []), strict=False)
    reached = [int(step) for step, score in scores if step is not None and score is not None and score >= GOAL]
    return Training(
        grid=grid,
        optimizer=RULE if of_rule else settings["optimizer.name"].upper(),
        change=_change(line.settings),
        global_batch_size=batch,
        learning_rate=peak,
        seed=int(settings["training.seed"]),
        precision=settings["training.precision"],
        epochs=line.epochs,
        steps=int(history["step"][-1] or 0) if history["step"] else 0,
        status=line.status,
        top_1=line.metrics.get(SCORE, float("nan")) if line.status == "finished" else float("nan"),
        steps_to_goal=reached[0] if reached else None,
        seconds=line.seconds,
    )


def _change(settings: Mapping[str, Any]) -> str:
    own = {key: value for key, value in settings.items() if key not in NAMED_ELSEWHERE}
    texts = {
        key: " ".join(map(str, value.values())) if isinstance(value, dict) else value for key, value in own.items()
    }
    return ", ".join(f"{key}={text}" for key, text in texts.items())


def grouped(found: Iterable[Training], key: Callable[[Training], Any]) -> dict[Any, list[Training]]:
    """Trainings by a key."""
    groups: dict[Any, list[Training]] = {}
    for each in found:
        groups.setdefault(key(each), []).append(each)
    return groups


def trainings(grids: Sequence[str]) -> list[Training]:
    """All that is recorded of these grids."""
    found = []
    for grid in grids:
        path = RESULTS / f"large_batch_{grid}.jsonl"
        if path.exists():
            found += [training_of(grid, line) for line in cells_of(read_lines(path)).values()]
    return [each for each in found if each is not None]


def best_of(found: Sequence[Training]) -> dict[str, dict[int, dict[str, Any]]]:
    """By optimizer and global batch the best rate of those with most seeds; a diverged training counts as chance."""
    best: dict[str, dict[int, dict[str, Any]]] = {}
    cells = grouped(found, lambda each: (each.optimizer, each.global_batch_size))
    for optimizer, batch in sorted(cells):
        alike = cells[optimizer, batch]
        by_rate = grouped(alike, lambda each: each.learning_rate)
        scores = {rate: [_or_chance(each.top_1) for each in runs] for rate, runs in by_rate.items()}
        rate = max(scores, key=lambda rate: (len(scores[rate]), statistics.mean(scores[rate])))
        to_goal = [each.steps_to_goal for each in by_rate[rate]]
        best.setdefault(optimizer, {})[batch] = {
            "top_1": round(statistics.mean(scores[rate]), 4),
            "deviation": _deviation(scores[rate]),
            "seeds": len({each.seed for each in by_rate[rate]}),
            "learning_rate": rate,
            "rates": len(by_rate),
            "steps": max(each.steps for each in by_rate[rate]),
            "steps_to_goal": None if None in to_goal else round(statistics.mean(filter(None, to_goal))),
            "diverged": sum(each.status == "diverged" for each in alike),
        }
    return best


def _deviation(values: Sequence[float]) -> float | None:
    return round(statistics.stdev(values), 4) if len(values) > 1 else None


def _or_chance(score: float) -> float:
    return 0.1 if score != score else score


def changes_of(grid: str, usual: Sequence[Training]) -> dict[str, dict[str, dict[str, Any]]]:
    """By optimizer and change of a grid: mean accuracy, and the difference to the same seeds without the change."""
    found = trainings([grid])
    dense = [each for each in found if each.change.endswith(f"exchange.codec={DENSE}")]
    unchanged = {each.recipe: _or_chance(each.top_1) for each in dense or usual}
    changes: dict[str, dict[str, dict[str, Any]]] = {}
    for (optimizer, change), runs in grouped(found, lambda each: (each.optimizer, each.change)).items():
        scores = {each.recipe: _or_chance(each.top_1) for each in runs}
        differences = [score - unchanged[recipe] for recipe, score in scores.items() if recipe in unchanged]
        changes.setdefault(optimizer, {})[change] = {
            "top_1": round(statistics.mean(scores.values()), 4),
            "difference": round(statistics.mean(differences), 4) if differences else None,
            "deviation": _deviation(differences),
            "seeds": len(scores),
        }
    return changes


def print_changes(grid: str, changes: Mapping[str, Mapping[str, Mapping[str, Any]]]) -> None:
    """In Markdown, accuracies in per cent, differences in points."""
    print(f"\n{grid}:\n\n{head(['', 'change', 'top-1', 'difference', 'seeds'])}")
    for optimizer, by_change in changes.items():
        for change, figures in by_change.items():
            points = f"{100 * figures['difference']:+.1f}" if figures["difference"] is not None else "-"
            top_1 = f"{100 * figures['top_1']:.1f}"
            print(row([optimizer, change, top_1, f"{points}{_plus_minus(figures)}", figures["seeds"]]))


def print_table(best: Mapping[str, Mapping[int, Mapping[str, Any]]]) -> None:
    """In Markdown, accuracies in per cent."""
    print(head(["", "global batch", "steps", "rate", "top-1", "seeds", "rates tried", "steps to 80 %"]))
    for optimizer, batches in best.items():
        for batch, figures in batches.items():
            top_1 = f"{100 * figures['top_1']:.1f}{_plus_minus(figures)}"
            to_goal = f"{figures['steps_to_goal']:,}" if figures["steps_to_goal"] else None
            cells = [optimizer, f"{batch:,}", f"{figures['steps']:,}", f"{figures['learning_rate']:g}", top_1]
            print(row([*cells, figures["seeds"], figures["rates"], to_goal]))


def _plus_minus(figures: Mapping[str, Any]) -> str:
    return f" ± {100 * figures['deviation']:.1f}" if figures["deviation"] is not None else ""


def draw(found: Sequence[Training], best: Mapping[str, Mapping[int, Mapping[str, Any]]], path: Path) -> None:
    """One panel: top-1 over the global batch."""
    figure = Figure(figsize=(8, 5))
    axes = figure.subplots()
    for optimizer in best:
        colour, mark = COLOURS[optimizer], MARKS[optimizer]
        alike = [each for each in found if each.optimizer == optimizer]
        batches = [each.global_batch_size for each in alike]
        axes.plot(
            batches, [100 * _or_chance(each.top_1) for each in alike], mark, color=colour, alpha=0.35, markersize=5
        )
        means = best[optimizer]
        style = "--" if optimizer == RULE else "-"
        tried = sorted({each["rates"] for each in means.values()})
        tuned = "" if optimizer == RULE else f", rates tried: {' to '.join(map(str, tried[:1] + tried[1:][-1:]))}"
        axes.plot(
            list(means),
            [100 * each["top_1"] for each in means.values()],
            style,
            marker=mark,
            color=colour,
            label=f"{optimizer}{tuned}",
        )
    lowest = min(each["top_1"] for means in best.values() for each in means.values())
    axes.set_ylim(bottom=max(0, 100 * lowest - 10))  # those of rates that fail are in the picture of the rates
    axes.set_xscale("log", base=2)
    steps = {each.global_batch_size: each.steps for each in found}
    batches = sorted(steps)
    axes.set_xticks(batches, [f"{batch:,}\n{steps[batch]:,} steps" for batch in batches])
    axes.minorticks_off()
    epochs = sorted({each.epochs for each in found})
    axes.set(
        xlabel="global batch, and steps of a training",
        ylabel="top-1 on the official test images, %",
        title=f"CIFAR-10, ResNet-9 (width 1/4), {' or '.join(map(str, epochs))} epochs; points: trainings",
    )
    axes.grid(alpha=0.3)
    axes.legend(loc="lower left")
    figure.tight_layout()
    figure.savefig(path, dpi=120)


def draw_rates(found: Sequence[Training], path: Path) -> None:
    """A panel for each global batch: top-1 over the rate, by which one sees whether a best rate is between others.

    What is far below all best ones is drawn at the lower edge, with its number.
    """
    bottom = 100 * max(each.top_1 for each in found if each.top_1 == each.top_1) - 15
    batches = sorted({each.global_batch_size for each in found})
    figure = Figure(figsize=(3.2 * len(batches) + 0.8, 3.8), layout="constrained")
    panels = figure.subplots(1, len(batches), sharey=True, squeeze=False)
    present = {each.optimizer for each in found}
    for axes, batch in zip(panels[0], batches, strict=True):
        for optimizer, colour in COLOURS.items():
            if optimizer not in present:
                continue
            alike = [each for each in found if (each.optimizer, each.global_batch_size) == (optimizer, batch)]
            by_rate = sorted(grouped(alike, lambda each: each.learning_rate).items())
            means = {rate: 100 * statistics.mean(_or_chance(each.top_1) for each in runs) for rate, runs in by_rate}
            shown = [max(bottom, mean) for mean in means.values()]
            axes.plot(list(means), shown, marker=MARKS[optimizer], color=colour, label=optimizer)
            single = [max(bottom, 100 * _or_chance(each.top_1)) for each in alike]
            axes.plot([each.learning_rate for each in alike], single, MARKS[optimizer], color=colour, alpha=0.35)
            for rate, mean in means.items():
                if mean < bottom:
                    axes.annotate(f"{mean:.0f}", (rate, bottom), (-4, 6), textcoords="offset points", ha="right")
        axes.set_xscale("log", base=2)
        tried = sorted({each.learning_rate for each in found if each.global_batch_size == batch})
        labelled = [tried[0]]
        for rate in tried[1:]:
            if rate > 1.2 * labelled[-1]:  # the labels of others would lie on each other
                labelled.append(rate)
        axes.set_xticks(labelled, [f"{rate:g}" for rate in labelled], rotation=60)
        axes.minorticks_off()
        axes.set(title=f"batch {batch:,}", xlabel="learning rate")
        axes.grid(alpha=0.3)
    figure.legend(*panels[0][0].get_legend_handles_labels(), loc="outside lower center", ncols=len(present))
    panels[0][0].set_ylabel("top-1 on the official test images, %")
    figure.savefig(path, dpi=120)


def write_csv(found: Sequence[Training], path: Path) -> None:
    """A line for each training."""
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, [field.name for field in fields(Training)], lineterminator="\n")
        writer.writeheader()
        writer.writerows(asdict(each) for each in found)


def main() -> None:
    """Read, print, draw, and print the JSON line."""
    smoke = is_smoke(__doc__, "draw into a temporary folder")
    found = trainings(GRIDS)
    best = best_of(found)
    print_table(best)
    changes = {grid: changes_of(grid, found) for grid in CHANGES}
    for grid in filter(changes.get, CHANGES):
        print_changes(grid, changes[grid])
    claim = best_of(trainings([CLAIM]))
    if claim:
        print(f"\n{CLAIM}:\n")
        print_table(claim)
    recorded = [*found, *trainings([*CHANGES, CLAIM])]
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary) if smoke else RESULTS
        if found:
            write_csv(recorded, folder / "large_batch.csv")
            draw(found, best, folder / "large_batch.png")
            draw_rates(found, folder / "large_batch_rates.png")
    print(json.dumps({"best": best, "claim": claim, "changes": changes, "trained": len(recorded)}))


if __name__ == "__main__":
    main()
