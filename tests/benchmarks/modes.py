"""Training modes beside synchronous training: bytes and time of a step, and the time after a worker's process has died.

    make bench NAME=modes
    make bench NAME=modes ARGS=--smoke

The first part trains a ResNet-50 of 12 bands at batch 8 on two ranks in network namespaces. Each has one core, and 100
Mbit/s are between them. The modes are synchronous, in float32 and with PowerSGD, and `training.mode=local` with 8 and
32 steps between two exchanges. The second part trains the network of `convergence` on a fifth of CIFAR-10 over that
link, one seed by each method. It takes the time in steps until a test accuracy is reached. Both need root. The third
part trains a ResNet-50 with two workers by `groundswell train`, and kills one at a step. It takes the time from the
kill to the end of the next step. One case has `launch.recover=in_place`, the other a restart from a checkpoint of every
step. It also has the time of a step before. In turn; medians.

The last line is JSON. `--part NAME` measures one part. `--smoke` has no links, one death and a tiny network.
"""

import functools
import itertools
import json
import os
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import pytest
from cifar10.methods import EPOCHS_PER_EVALUATION
from links.network import Hosts
from links.ring import PROJECT, Ring
from mlflow import MlflowClient

from conf.load import load
from jobs.shell.session import spark_session
from jobs.train import train
from pipelines.archives.bigearthnet.v2 import BigEarthNetV2
from pipelines.archives.synthetic.files import generate_bigearthnet_v2
from pipelines.dataset.prepare.writer import prepare_dataset
from pipelines.training import entry
from tests.benchmarks.parts.command import command
from tests.benchmarks.parts.figures import slowest

MBIT = 100
METHODS: dict[str, dict[str, Any]] = {
    "synchronous": {"codec": "none", "parameters": {}},
    "synchronous, powersgd": {"codec": "powersgd", "parameters": {"rank": 4}},
    "local, every 8 steps": {"codec": "none", "parameters": {}, "mode": {"name": "local", "every_steps": 8}},
    "local, every 32 steps": {"codec": "none", "parameters": {}, "mode": {"name": "local", "every_steps": 32}},
}
TRAINED = ["none", "powersgd rank 4", "local, every 6 steps", "local, every 26 steps"]
"""Methods of `cifar10.methods` whose time to an accuracy is taken."""
TARGET = 0.60
PARTS = ("links", "accuracy", "recovery")
ROUNDS = 3
DEATH = 28
"""Optimizer steps before the death, of 36: a spare takes half a minute on a shared core to be ready."""
SETTINGS = ["training.batch_size_per_worker=8", "model.depth=50", "model.width_factor=1"]
SMOKE_DEATH = 6
SMOKE_SETTINGS = ["training.batch_size_per_worker=2", "model={name: resnet_cifar, depth: 2, width_factor: 0.5}"]


def over_a_link() -> dict[str, dict[str, float]]:
    """Seconds and bytes of a step by method."""
    found = {}
    for name, method in METHODS.items():
        every = method.get("mode", {}).get("every_steps", 4)
        with Hosts(2) as hosts, Ring(hosts, {"kind": "step", "method": method, "bucket_mib": None}) as ring:
            ring.ask(steps=every)  # whole blocks, of which the last step exchanges
            hosts.shape(MBIT)
            ring.ask(steps=every)
            answers = ring.ask(steps=2 * every if every < 32 else every)
        steps = slowest(answers)
        found[name] = {
            "seconds_per_step": round(statistics.mean(steps), 4),
            "sent_bytes_per_step": round(statistics.mean(answer["sent_bytes"] for answer in answers) / len(steps)),
            "payload_bytes_per_step": round(statistics.mean(answers[0]["payload_bytes"])),
        }
        print(f"{name:24} {found[name]}", flush=True)
    return found


def to_an_accuracy() -> dict[str, dict[str, Any]]:
    """Training seconds and epochs until the test accuracy is `TARGET`, by method; nothing without the images."""
    import numpy as np
    from convergence import ARCHIVE, read_archive  # type: ignore[import-not-found]

    benchmarks = Path(__file__).parent
    if not ARCHIVE.exists():
        print(f"{ARCHIVE} is not there: no training over the link", flush=True)
        return {}
    found: dict[str, dict[str, Any]] = {}
    with tempfile.TemporaryDirectory() as folder, Hosts(2) as hosts:
        images = Path(folder) / "cifar10.npz"
        np.savez(images, **read_archive(ARCHIVE))
        paths = {"PYTHONPATH": f"{PROJECT}{os.pathsep}{benchmarks}"}
        with Ring(hosts, {"images": str(images)}, benchmarks / "cifar10" / "link_rank.py", paths) as ring:
            hosts.shape(MBIT)
            for name in TRAINED:
                first, second = ring.ask(method=name, seed=0)
                # A step ends when the last rank has done it.
                seconds = np.cumsum(np.maximum(first["training_seconds"], second["training_seconds"]))
                reached = [n for n, value in enumerate(first["accuracy"], start=1) if value >= TARGET]
                epochs = reached[0] * EPOCHS_PER_EVALUATION if reached else None
                found[name] = {
                    "seconds_to_target": None if epochs is None else round(float(seconds[epochs - 1]), 1),
                    "epochs_to_target": epochs,
                    "seconds": round(float(seconds[-1]), 1),
                    "accuracy": first["accuracy"][-1],
                    "payload_bytes_per_step": round(first["payload_bytes"]),
                }
                print(f"{name:24} {found[name]}", flush=True)
    return found


def training_that_dies(config: Any, run: Any, checkpoints: Any, *, death: int) -> Any:
    """`entry.train`, but the process of rank 1 is killed at one step, once."""
    import signal

    from pipelines.training.worker import train_worker

    mark = checkpoints.parent.path / "death"

    def die_once(_: Any, step: int) -> None:
        if step == death and os.environ["HOROVOD_RANK"] == "1" and not mark.exists():
            mark.touch()
            os.kill(os.getpid(), signal.SIGKILL)

    return train_worker(config, run, checkpoints, before_step=die_once)


def seconds_after_a_death(
    dataset: Path, folder: Path, settings: list[str], recover: str, death: int
) -> tuple[float, float]:
    """Seconds from a worker's death to the end of the next step, and of an undisturbed step before it."""
    fixed = [
        f"dataset.path={dataset}",
        f"training.output={folder}",
        "training.epochs=1",
        f"launch.recover={recover}",
        *(["training.checkpoint_every_steps=1", "launch.retries=1"] if recover == "restart" else []),
    ]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(entry, "train", functools.partial(training_that_dies, death=death))
        done = train(load("smoke", [*fixed, *settings]))
    died = (done.folder / "death").path.stat().st_mtime
    points = MlflowClient().get_metric_history(done.run.run_id, "train/step_loss")
    ended = sorted(point.timestamp / 1000 for point in points)[1:]
    steps = [later - earlier for earlier, later in itertools.pairwise([at for at in ended if at < died])]
    return min(at for at in ended if at > died) - died, statistics.median(steps)


def recoveries(*, smoke: bool) -> tuple[dict[str, list[float]], dict[str, list[float]]]:
    """Seconds to the next step after each death, and of a step before it, by way to recover."""
    death, settings = (SMOKE_DEATH, SMOKE_SETTINGS) if smoke else (DEATH, SETTINGS)
    seconds: dict[str, list[float]] = {"in_place": [], "restart": []}
    steps: dict[str, list[float]] = {"in_place": [], "restart": []}
    with tempfile.TemporaryDirectory() as temporary, spark_session("benchmark", "local[2]") as spark:
        folder = Path(temporary)
        os.environ["MLFLOW_TRACKING_URI"] = f"sqlite:///{folder / 'mlflow.db'}"
        generate_bigearthnet_v2(folder / "BigEarthNet", train=40 if smoke else 576, validation=8, test=0)
        archive = BigEarthNetV2(str(folder / "BigEarthNet"))
        prepare_dataset(spark, archive, folder / "dataset", row_group_mib=1, row_groups_per_shard=4)
        ways = ("in_place",) if smoke else ("in_place", "restart")
        for number, recover in itertools.product(range(1 if smoke else ROUNDS), ways):
            output = folder / f"{recover}-{number}"
            after, step = seconds_after_a_death(folder / "dataset", output, settings, recover, death)
            seconds[recover].append(after)
            steps[recover].append(step)
            print(f"{recover:9} {after:6.2f} s to the next step, {step:.2f} s a step before", flush=True)
            time.sleep(1)
    return seconds, steps


def main() -> None:
    """Measure, and print the JSON line."""
    parser = command(__doc__, "no links, one death, a tiny network")
    parser.add_argument("--part", choices=PARTS, help="measure this part only")
    chosen = parser.parse_args()
    smoke, parts = chosen.smoke, PARTS if chosen.part is None else (chosen.part,)
    links = over_a_link() if "links" in parts and not smoke else {}
    accuracy = to_an_accuracy() if "accuracy" in parts and not smoke else {}
    seconds, steps = recoveries(smoke=smoke) if "recovery" in parts else ({}, {})
    median = {name: round(statistics.median(values), 2) if values else None for name, values in seconds.items()}
    local, synchronous = links.get("local, every 8 steps", {}), links.get("synchronous", {})
    bytes_sent, step = "sent_bytes_per_step", "seconds_per_step"
    figures = {
        "bytes_local_h8": round(local[bytes_sent] / synchronous[bytes_sent], 4) if local else None,
        "speedup_local_h8_100mbit": round(synchronous[step] / local[step], 2) if local else None,
        "seconds_in_place_recovery": median.get("in_place"),
        "seconds_restart": median.get("restart"),
        "steps": {name: round(statistics.median(values), 2) if values else None for name, values in steps.items()},
        "methods": links,
        "target_accuracy": TARGET,
        "to_accuracy": accuracy,
    }
    print(json.dumps(figures))


if __name__ == "__main__":
    main()
