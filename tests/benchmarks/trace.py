"""What `training.trace_steps` costs: steps outside and inside the trace, beside those of a training without one.

Two ranks take steps of a ResNet in turn from two graphs of equal arithmetic: one as it is by default, and one with the
marks of a trace. Then some steps are traced, with Horovod's timeline, and at last steps without marks are taken again,
as Horovod's thread stays. A codec has more parts than plain gradients. `--smoke` takes few small steps.
"""

import json
from dataclasses import dataclass
from typing import Any

from conf.sections.networks import ResNetCifarConfig, ResNetConfig
from tests.benchmarks.parts.command import is_smoke
from tests.benchmarks.parts.ranks import each_on_ranks


@dataclass(frozen=True)
class Size:
    """How much is measured."""

    network: ResNetConfig | ResNetCifarConfig = ResNetConfig(depth=18)  # noqa: RUF009  it is frozen
    side: int = 120
    batch_size: int = 8
    pairs: int = 25
    traced: int = 25


SMOKE = Size(ResNetCifarConfig(depth=8, width_factor=0.5), side=12, batch_size=2, pairs=3, traced=3)
CODECS = ("none", "onebit")
RATIOS = {"ratio_outside": "marked", "ratio_inside": "traced", "ratio_after": "after"}


def measure(size: Size, codec: str) -> dict[str, float]:
    """Median seconds of each kind of step on this rank, and the seconds of the trace's begin and end."""
    import tempfile
    import time
    from pathlib import Path

    import numpy as np

    from models.compression.arithmetic.graph import Marks
    from pipelines.training.ranks.collective import HorovodCollective
    from pipelines.training.step.loop import Trainer
    from pipelines.training.tracing.timeline import allow_timeline
    from pipelines.training.tracing.tracer import StepTracer
    from tests.benchmarks.parts import training

    allow_timeline()
    collective = HorovodCollective()
    groups = [training.image_group("rgb", size.side, 3, "uint8", 100.0, 50.0)]
    batch = training.noise(groups, size.batch_size, 19, collective.rank, below=255)

    def make(marks: Marks | None) -> training.Training:
        exchange = training.exchange_of(collective, {"name": codec})
        exchange.marks = marks
        return training.lars_training(training.network(groups, size.network, 19), exchange)

    def seconds(step: Any, count: int = 1) -> list[float]:
        return training.timed(step, *batch, steps=count)

    marks = Marks()
    plain, marked = make(None).step, make(marks)
    for step in (plain, marked.step):
        seconds(step)
    outside = np.median([seconds(plain) + seconds(marked.step) for _ in range(size.pairs)], axis=0)
    with tempfile.TemporaryDirectory() as folder:
        tracer = StepTracer(
            [1, size.traced + 1],  # the end is called for below
            done=0,
            marks=marks,
            collective=collective,
            folder=Path(folder),
            write=lambda trace, profiles, step: None,
            profiles=False,
            about={},
        )
        trainer = Trainer(marked.step, marked.optimizer, lambda step: 0.0, collective)
        traced_step = tracer.of_trainer(trainer).step
        begun = time.perf_counter()
        batches: Any = tracer.of_batches(iter([batch] * size.traced))  # type: ignore[list-item]  # only waited for
        next(batches)
        begin = time.perf_counter() - begun
        traced = seconds(traced_step) + [each for _ in batches for each in seconds(traced_step)]
        ending = time.perf_counter()
        tracer.finish()
        end = time.perf_counter() - ending
    return {
        "plain": float(outside[0]),
        "marked": float(outside[1]),
        "traced": float(np.median(traced)),
        "after": float(np.median(seconds(plain, size.pairs))),
        "begin": begin,
        "end": end,
    }


def main() -> None:
    """Print a table and the JSON line."""
    smoke = is_smoke(__doc__, "few small steps of a tiny network")
    cases = [(SMOKE if smoke else Size(), codec) for codec in CODECS]
    result: dict[str, dict[str, float]] = {}
    for codec, ranks in zip(CODECS, each_on_ranks(2, measure, cases, together=smoke, threads=None), strict=True):
        slowest = max(ranks, key=lambda each: float(each["plain"]))
        ratios = {name: round(slowest[key] / slowest["plain"], 4) for name, key in RATIOS.items()}
        seconds = {f"seconds_{name}": round(slowest[name], 3) for name in ("begin", "end")}
        result[codec] = {"ms_per_step": round(1000 * slowest["plain"], 1), **ratios, **seconds}
        print(f"{codec}: {result[codec]}", flush=True)
    print(json.dumps({"codecs": result}))


if __name__ == "__main__":
    main()
