"""Accuracy on CIFAR-10 under every method of compression: two real ranks, three seeds, equal epochs.

    make bench NAME=convergence
    python tests/benchmarks/convergence.py --methods none onebit --seeds 0

All methods share data, model, schedule and optimizer, but for what `cifar10/methods.py` says. A run goes into a file of
JSON lines when it ends; what is there with the same settings is not run again. The data (GROUNDSWELL_CIFAR10, default
../shared/data/cifar10.zip) are JPEG files `cifar10/<split>/<class>/<number>.jpg`. `--smoke` trains two methods on a few
invented images and keeps no results.
"""

import io
import json
import math
import os
import statistics
import tempfile
import zipfile
from pathlib import Path

import numpy as np
from cifar10.figures import draw_accuracies, draw_curves
from cifar10.methods import (
    CLASSES,
    IS_SMOKE,
    METHODS,
    RANKS,
    SEEDS,
    SMOKE_VARIABLE,
    TEST_IMAGES,
    TRAIN_IMAGES,
    fingerprint,
)
from PIL import Image

from pipelines.launch.runner import BarrierRunner, WorkerError
from tests.benchmarks.parts.command import command
from tests.benchmarks.parts.figures import head, row

ROOT = Path(__file__).parents[2]
ARCHIVE = Path(os.environ.get("GROUNDSWELL_CIFAR10", ROOT.parent / "shared/data/cifar10.zip"))
RESULTS = Path(__file__).with_name("results")
# One pair of processes for so many runs: what TensorFlow keeps of each is given back.
RUNS_PER_START = 8
POINT = 0.01
SMOKE_METHODS = ["none", "fp16"]


def read_archive(path):
    """The first images of each class, as arrays."""
    data = {}
    with zipfile.ZipFile(path) as archive:
        names = sorted(name for name in archive.namelist() if name.endswith(".jpg"))
        classes = sorted({name.split("/")[2] for name in names})
        for split, count in (("train", TRAIN_IMAGES), ("test", TEST_IMAGES)):
            of_class = [[name for name in names if name.startswith(f"cifar10/{split}/{each}/")] for each in classes]
            chosen = [name for members in of_class for name in members[: count // CLASSES]]
            data[f"{split}_images"] = np.stack([np.asarray(Image.open(io.BytesIO(archive.read(n)))) for n in chosen])
            data[f"{split}_labels"] = np.repeat(np.arange(CLASSES), count // CLASSES)
    return data


def invented_images():
    """Images of noise as `read_archive` returns them, for a smoke run."""
    random, data = np.random.default_rng(0), {}
    for split, count in (("train", TRAIN_IMAGES), ("test", TEST_IMAGES)):
        data[f"{split}_images"] = random.integers(0, 256, (count, 32, 32, 3), dtype=np.uint8)
        data[f"{split}_labels"] = np.repeat(np.arange(CLASSES), count // CLASSES)
    return data


def on_each_rank(runs, data_path):
    # TensorFlow is for the ranks only.
    from cifar10.rank import train_all

    train_all(runs, data_path)


def run_missing(names, seeds, finished, record):
    """Run what has no result; a failure costs the run that failed. Returns those, with the reason."""
    missing = [run for run in ordered(names, seeds) if run not in finished]
    failures = {}
    if not missing:
        return failures
    with tempfile.TemporaryDirectory() as folder:
        data_path = str(Path(folder) / "cifar10.npz")
        np.savez(data_path, **(invented_images() if IS_SMOKE else read_archive(ARCHIVE)))
        while missing:
            started = missing[:RUNS_PER_START]
            done = []

            def finish(message, done=done):
                fields = {key: message[key] for key in message if key != "rank"}
                done.append((fields["method"], fields["seed"]))
                record(fields)

            env = {SMOKE_VARIABLE: "1"} if IS_SMOKE else {}
            runner = BarrierRunner(None, RANKS, threads_per_worker=1, env=env, log_to_driver="none", on_report=finish)
            try:
                runner.run_all(on_each_rank, started, data_path)
            except WorkerError as error:
                failed = started[len(done)]
                failures[failed] = str(error).splitlines()[0]
                print(f"{failed[0]}, seed {failed[1]} failed: {error}", flush=True)
                done.append(failed)
            missing = [run for run in missing if run not in done]
    return failures


def ordered(names, seeds):
    """Baseline first, then what has a goal, then the others; seed by seed."""
    kinds = {name: 0 if name == "none" else 1 if METHODS[name].parity else 2 for name in METHODS if name in names}
    return [(name, seed) for kind in range(3) for seed in seeds for name in kinds if kinds[name] == kind]


def summarise(results):
    """Mean, deviation, difference and verdict of each method that has results."""
    final = {name: {run["seed"]: run["accuracy"][-1] for run in runs} for name, runs in results.items()}

    def compare(name, other):
        # Seed by seed: two methods with one seed start from the same weights and see the same samples.
        differences = [value - final[other][seed] for seed, value in final[name].items() if seed in final[other]]
        return statistics.mean(differences), 2 * _deviation(differences) / math.sqrt(len(differences))

    summary = {}
    for name, runs in results.items():
        method = METHODS[name]
        entry = {
            "ratio": statistics.median(run["ratio"] for run in runs),
            "accuracy": statistics.mean(final[name].values()),
            "deviation": _deviation(list(final[name].values())),
            "seeds": len(runs),
        }
        if method.baseline in final and method.baseline != name:
            difference, margin = compare(name, method.baseline)
            entry["difference"] = difference
            entry["verdict"] = "parity" if difference >= -max(POINT, margin) else "below"
        if method.worse_than in final:
            difference, margin = compare(name, method.worse_than)
            entry["verdict"] = f"{'worse' if difference < -margin else 'not worse'} than {method.worse_than}"
        if len(runs) < 2 and "verdict" in entry:
            entry["verdict"] = "one seed"
        summary[name] = {key: round(value, 4) if isinstance(value, float) else value for key, value in entry.items()}
    return summary


def _deviation(values):
    return statistics.stdev(values) if len(values) > 1 else 0.0


def print_table(summary, failures):
    """In Markdown; accuracies in per cent."""
    print(head(["method", "settings", "ratio", "accuracy", "difference", "verdict"]))
    for name in METHODS:
        if name in summary:
            entry = summary[name]
            difference = f"{100 * entry['difference']:+.2f}" if "difference" in entry else ""
            if entry.get("verdict", "").split() and METHODS[name].parity:
                difference = f"**{difference}**"
            deviation = f" ± {100 * entry['deviation']:.2f}" if entry["seeds"] > 1 else ""
            accuracy = f"{100 * entry['accuracy']:.2f}{deviation}"
            texts = [settings_text(METHODS[name]), f"{entry['ratio']:.1f}", accuracy, difference]
            print(row([name, *texts, entry.get("verdict", "")]))
    for (name, seed), reason in failures.items():
        print(f"| {name} | seed {seed} | | failed: {reason} | | |")


def settings_text(method):
    """What differs from the baseline, in words."""
    settings = {key: value for key, value in method.codec.items() if key not in ("name", "density_schedule")}
    if "density_schedule" in method.codec:
        settings["first densities"] = [entry["density"] for entry in method.codec["density_schedule"]]
    settings |= {
        f"optimizer {key}": value for key, value in method.optimizer.items() if key not in ("name", "nesterov")
    }
    if method.precision != "float32":
        settings["precision"] = method.precision
    if method.mode is not None:
        settings |= {key: value for key, value in method.mode.items() if key != "name"}
    if method.meprop is not None:
        settings["channels kept"] = method.meprop
    return ", ".join(f"{key} {value}" for key, value in settings.items())


def main():
    """Read the arguments and run."""
    parser = command(__doc__, "two methods on a few invented images, without results")
    parser.add_argument("--methods", nargs="+", choices=METHODS, default=SMOKE_METHODS if IS_SMOKE else list(METHODS))
    parser.add_argument("--seeds", nargs="+", type=int, default=SEEDS)
    parser.add_argument("--results", type=Path, default=RESULTS)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        run_and_show(arguments.methods, arguments.seeds, Path(temporary) if arguments.smoke else arguments.results)


def run_and_show(methods, seeds, folder):
    """Run what is missing in a folder of results; print the table and the JSON line, draw both figures."""
    folder.mkdir(exist_ok=True)
    path = folder / "convergence.jsonl"
    lines = [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []
    finished = {(line["method"], line["seed"]): line for line in lines if is_current(line)}

    def record(run):
        finished[run["method"], run["seed"]] = run
        with path.open("a") as file:
            file.write(json.dumps(run) + "\n")
        print(f"{run['method']}, seed {run['seed']}: {run['accuracy'][-1]:.4f}, {run['seconds']:.0f} s", flush=True)

    failures = run_missing(methods, seeds, finished, record)
    results = {
        name: runs for name in METHODS if (runs := [run for (method, _), run in finished.items() if method == name])
    }
    summary = summarise(results)
    baselines = {name: METHODS[name].baseline for name in results}
    ablations = [name for name in results if METHODS[name].worse_than]
    draw_curves(results, baselines, ablations).savefig(folder / "convergence.png", dpi=110)
    draw_accuracies(summary, baselines, ablations).savefig(folder / "convergence_accuracy.png", dpi=110)
    print_table(summary, failures)
    print(json.dumps({"methods": summary, "failed": [f"{name}, seed {seed}" for name, seed in failures]}))


def is_current(line):
    """Whether a recorded run has the settings of today."""
    return line["method"] in METHODS and line["fingerprint"] == fingerprint(METHODS[line["method"]], line["seed"])


if __name__ == "__main__":
    main()
