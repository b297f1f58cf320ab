"""What recording costs a training with steps of 50 ms, and what an outage of MLflow costs it.

A real `mlflow server` is killed, started again, made slow (each answer comes a second late) or made to answer with
error 500. It is behind a small proxy. Outages are at the start, in the middle and shortly before the end of a training.
The steps only wait, so that whatever they wait longer is the record's. Rank 0's part and the driver's are those of a
real training, with the retries that ranks have by default. A small model is logged.

The cost is the sum of these times, divided by the wall time:

* the time that steps waited for the record;
* what the figures add to the graph of a step;
* processor time of the threads that record and sample.

The delay of an outage is the time that steps and the end of the run waited for the record. The same time with a server
that answers is subtracted. After each outage `groundswell sync`'s function writes what is left. All points are then
compared with those that were recorded, and the order in which the server took them with the order of the steps.

`--smoke` takes few steps, and has each kind of outage once.
"""

import json
import os
import sys
import tempfile
import threading
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from http import HTTPStatus
from itertools import pairwise
from pathlib import Path

from mlflow import MlflowClient
from outages.server import Door, Request, Server, free_port
from outages.training import STEP_SECONDS, Trained, log_small_model, seconds_of_figures, train

from pipelines.tracking.journal.sync import sync, unsynced
from tests.benchmarks.parts.command import is_smoke

KINDS = ("slow", "error_500", "restarted")
EVERY_MOMENT = ("start", "middle", "end")


@dataclass(frozen=True)
class Size:
    """How much is measured."""

    epochs: int = 12
    epochs_of_an_outage: int = 3
    steps: int = 200
    """Steps of an epoch."""
    moments: Mapping[str, Sequence[str]] = field(default_factory=lambda: dict.fromkeys(KINDS, EVERY_MOMENT))
    """When each kind of outage begins."""


SMOKE = Size(2, 2, 15, {"slow": ("start",), "error_500": ("end",), "restarted": ("middle",)})
SECONDS_LATE = 1.0


MOMENTS = {"start": (0.0, 0.25), "middle": (0.25, 0.5), "end": (0.95, 1.1), "to the end": (0.25, None)}
"""Where an outage begins and ends, as fractions of all steps; the third ends after the last step, the fourth never."""


@dataclass(frozen=True)
class Outage:
    """A disturbance from one part of a training to another."""

    begin: Callable[[], None]
    end: Callable[[], None]

    def at_step(self, moment: str, steps: int) -> Callable[[int], None]:
        """The function that a training calls before each step; `moment` is one of `MOMENTS`."""
        first, last = MOMENTS[moment]

        def act(step: int) -> None:
            if step == int(first * steps):
                self.begin()
                if last is not None:  # in a thread: starting a server takes seconds, and no step waits for it
                    threading.Timer((last - first) * steps * STEP_SECONDS, self.end).start()

        return act


def lost(trained: Trained, run_id: str, door: Door) -> dict[str, int]:
    """What is wrong with a run's points in the store: lost, doubled, and arrived out of order."""
    client = MlflowClient(door.uri)
    arrived = arrivals(door.answered, run_id)
    found = Counter[str]()
    for name, expected in trained.points.items():
        stored = Counter((metric.step, metric.value) for metric in client.get_metric_history(run_id, name))
        found["lost"] += sum((Counter(expected) - stored).values())
        found["doubled"] += sum((stored - Counter(expected)).values())
        found["out_of_order"] += sum(later < earlier for earlier, later in pairwise(arrived.get(name, [])))
    return {f"points_{name}": found[name] for name in ("lost", "doubled", "out_of_order")}


def arrivals(requests: Sequence[Request], run_id: str) -> dict[str, list[int]]:
    """Steps of each metric of a run in the order in which the server took its points; of a repeated one, the first."""
    steps: dict[str, list[int]] = {}
    for request in requests:
        if request.path.endswith("/runs/log-batch") and request.status == HTTPStatus.OK:
            content = json.loads(request.body)
            for point in content.get("metrics", []) if content["run_id"] == run_id else []:
                taken = steps.setdefault(point["key"], [])
                if int(point["step"]) not in taken:
                    taken.append(int(point["step"]))
    return steps


def measure(trained: Trained, healthy: Trained, door: Door) -> dict[str, float]:
    """Write what is left, as `groundswell sync` does, and compare with what was recorded, and with a healthy server."""
    before = lost(trained, trained.run.run_id, door)["points_lost"] if not trained.run.is_offline else None
    run_id = trained.run.run_id
    for folder in unsynced(trained.folder.parent):
        run_id = sync(folder, lambda folder, run: log_small_model(run)).run_id
    client = MlflowClient(door.uri)
    run = client.get_run(run_id)
    assert run.info.status == "FINISHED", run.info.status
    models = [client.get_logged_model(output.model_id).status for output in run.outputs.model_outputs]
    assert models.count("READY") == 1, "the model is logged once"
    delayed = trained.waited + trained.end_seconds - healthy.waited - healthy.end_seconds
    in_journal = sum(map(len, trained.points.values())) if before is None else before
    return {
        **lost(trained, run_id, door),
        "points_lost_before_sync": in_journal,
        "seconds_delayed": round(delayed, 2),
        "lines_told": len(trained.told),
    }


def main() -> None:
    """Print the cost, a table of outages and the JSON line."""
    size = SMOKE if is_smoke(__doc__, "few steps, each kind of outage at one moment") else Size()
    with tempfile.TemporaryDirectory() as folder:
        server = Server(Path(folder))
        door = Door(server)
        try:
            result = run_all(size, Path(folder), server, door)
        finally:
            door.close()
            server.kill()
    print(json.dumps(result))


def run_all(size: Size, folder: Path, server: Server, door: Door) -> dict[str, object]:
    """Measure all; `down_at_start` first, while there is no server yet."""
    steps = size.steps * size.epochs_of_an_outage
    outages: dict[str, dict[str, float]] = {}

    table: list[dict[str, object]] = []

    def outage(name: str, moment: str, kind: Outage) -> None:
        place = folder / name / moment.replace(" ", "-")
        trained = train(place, size.epochs_of_an_outage, size.steps, at_step=kind.at_step(moment, steps))
        kind.end()  # where it has not ended yet
        server.start()
        figures = measure(trained, short, door)
        show(name, moment, trained, figures)
        table.append({"outage": name, "moment": moment, **figures})
        if moment in ("middle", "to the end") or name not in outages:
            outages[name] = figures

    os.environ["MLFLOW_TRACKING_URI"] = f"http://127.0.0.1:{free_port()}"
    offline = train(folder / "down_at_start", size.epochs_of_an_outage, size.steps, offline=True)
    server.start()
    os.environ["MLFLOW_TRACKING_URI"] = door.uri
    healthy = train(folder / "healthy", size.epochs, size.steps)
    in_graph = size.epochs * size.steps * max(0.0, seconds_of_figures(size.steps))
    cost = (healthy.waited + in_graph + healthy.thread_seconds) / healthy.seconds
    print(
        f"{size.epochs * size.steps} steps of {1000 * STEP_SECONDS:.0f} ms in {healthy.seconds:.1f} s: waited "
        f"{healthy.waited:.3f} s, figures in the graph {in_graph:.3f} s, threads {healthy.thread_seconds:.3f} s of a "
        f"processor, cost {100 * cost:.2f} %; end of the run {healthy.end_seconds:.2f} s, "
        f"{lost(healthy, healthy.run.run_id, door)}"
    )
    short = train(folder / "short", size.epochs_of_an_outage, size.steps)
    print(f"no outage: steps waited {short.waited:.3f} s, end of the run {short.end_seconds:.2f} s")
    outages["down_at_start"] = measure(offline, short, door)
    heads = f"{'lost':>6}{'doubled':>9}{'disorder':>9}{'before sync':>12}{'seconds':>9}{'told':>6}"
    print(f"{'outage':<20}{'moment':<12}{heads}")
    show("down_at_start", "offline", offline, outages["down_at_start"])

    kinds = {
        "slow": Outage(*(partial(setattr, door, "seconds_late", seconds) for seconds in (SECONDS_LATE, 0.0))),
        "error_500": Outage(*(partial(setattr, door, "fails", fails) for fails in (True, False))),
        "restarted": Outage(server.kill, server.start),
    }
    for name, kind in kinds.items():
        for moment in size.moments[name]:
            outage(name, moment, kind)
    outage("down_to_end", "to the end", Outage(server.kill, lambda: None))
    return {"cost_fraction": round(cost, 5), "outages": outages, "table": table}


def show(name: str, moment: str, trained: Trained, figures: dict[str, float]) -> None:
    """One row of the table; what the driver was told goes to standard error."""
    print(
        f"{name:<20}{moment:<12}{figures['points_lost']:>6}{figures['points_doubled']:>9}"
        f"{figures['points_out_of_order']:>9}{figures['points_lost_before_sync']:>12}{figures['seconds_delayed']:>9}"
        f"{figures['lines_told']:>6}",
        flush=True,
    )
    print(f"{name}: steps waited {trained.waited:.3f} s, end {trained.end_seconds:.2f} s", file=sys.stderr)


if __name__ == "__main__":
    main()
