"""What `training.trace_steps` costs: steps outside and inside the trace, beside those of a training without one.

Two ranks take steps of a ResNet in turn from two graphs of equal arithmetic: one as it is by default, and one with the
marks of a trace. Then some steps are traced, with Horovod's timeline, and at last steps without marks are taken again,
as Horovod's thread stays. A codec has more parts than plain gradients. `--smoke` takes few small steps.
"""

import argparse
import json
import os
import sys
from dataclasses import dataclass
from typing import Any

import cloudpickle

from jobs.session import spark_session
from pipelines.launch.runner import BarrierRunner


@dataclass(frozen=True)
class Size:
    """How much is measured."""

    depth: int = 18
    side: int = 120
    batch_size: int = 8
    pairs: int = 25
    traced: int = 25


SMOKE = Size(side=36, batch_size=2, pairs=3, traced=3)
CODECS = ("none", "onebit")


def measure(size: Size, codec: str) -> dict[str, float]:
    """Median seconds of each kind of step on this rank, and the seconds of the trace's begin and end."""
    import tempfile
    import time
    from pathlib import Path

    import numpy as np
    import tensorflow as tf

    from conf.exchange import ExchangeConfig
    from conf.networks import ResNetConfig
    from conf.optimizers import LARSConfig
    from models.compression.arithmetic.marks import Marks
    from models.compression.exchange.exchange import GradientExchange
    from models.layers.preprocessing import InputGroup
    from models.losses import classification_loss
    from models.networks.model import build_model
    from pipelines.training.collective import HorovodCollective
    from pipelines.training.loop import Trainer
    from pipelines.training.recipe import make_codec, make_optimizer
    from pipelines.training.step import make_train_step
    from pipelines.training.tracing.timeline import allow_timeline
    from pipelines.training.tracing.tracer import StepTracer

    allow_timeline()
    collective = HorovodCollective()
    group = InputGroup("rgb", (size.side, size.side, 3), "uint8", (100.0,) * 3, (50.0,) * 3)
    network = {**ResNetConfig(depth=size.depth).arguments(), "upsampling": "nearest", "augmentation": None}
    random = np.random.default_rng(collective.rank)
    images = {"rgb": tf.constant(random.integers(0, 255, (size.batch_size, *group.shape), dtype=np.uint8))}
    targets = tf.constant(random.integers(0, 2, (size.batch_size, 19)).astype(np.float32))

    def make(marks: Marks | None) -> tuple[Any, Any]:
        model = build_model([group], network="resnet", classes=19, precision="float32", **network)
        optimizer = make_optimizer(LARSConfig(), model)
        settings = ExchangeConfig.model_validate({"codec": {"name": codec}})
        made = make_codec(settings.codec, LARSConfig())
        exchange = GradientExchange(made, collective, seed=0, **settings.arguments())
        exchange.marks = marks
        loss = classification_loss("multi_label")
        return make_train_step(model, loss, optimizer, exchange, jit_compile=False), optimizer

    def seconds(step: Any) -> float:
        started = time.perf_counter()
        float(step(images, targets))
        return time.perf_counter() - started

    marks = Marks()
    (plain, _), (marked, optimizer) = make(None), make(marks)
    for step in (plain, marked):
        seconds(step)
    outside = np.array([[seconds(plain), seconds(marked)] for _ in range(size.pairs)])
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
        traced_step = tracer.of_trainer(Trainer(marked, optimizer, lambda step: 0.0, collective)).step
        begun = time.perf_counter()
        batches: Any = tracer.of_batches(iter([images] * size.traced))  # type: ignore[list-item]  # only waited for
        next(batches)
        begin = time.perf_counter() - begun
        traced = [seconds(traced_step), *(seconds(traced_step) for _ in batches)]
        ending = time.perf_counter()
        tracer.finish()
        end = time.perf_counter() - ending
        after = [seconds(plain) for _ in range(size.pairs)]
    return {
        "plain": float(np.median(outside[:, 0])),
        "marked": float(np.median(outside[:, 1])),
        "traced": float(np.median(traced)),
        "after": float(np.median(after)),
        "begin": begin,
        "end": end,
    }


def main() -> None:
    """Print a table and the JSON line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--smoke", action="store_true", help="few small steps, in about a minute")
    size = SMOKE if parser.parse_args().smoke else Size()
    cloudpickle.register_pickle_by_value(sys.modules[__name__])
    threads = str(max(1, (os.cpu_count() or 1) // 2))
    environment = dict.fromkeys(("OMP_NUM_THREADS", "TF_NUM_INTRAOP_THREADS", "TF_NUM_INTEROP_THREADS"), threads)
    result: dict[str, dict[str, float]] = {}
    with spark_session("benchmark", "local[2]") as spark:
        for codec in CODECS:
            runner = BarrierRunner(spark, 2, env=environment, log_to_driver="none")
            slowest = max(runner.run_all(measure, size, codec), key=lambda each: float(each["plain"]))
            plain = slowest["plain"]
            result[codec] = {
                "ms_per_step": round(1000 * plain, 1),
                "ratio_outside": round(slowest["marked"] / plain, 4),
                "ratio_inside": round(slowest["traced"] / plain, 4),
                "ratio_after": round(slowest["after"] / plain, 4),
                "seconds_begin": round(slowest["begin"], 3),
                "seconds_end": round(slowest["end"], 3),
            }
            print(f"{codec}: {result[codec]}", flush=True)
    print(json.dumps({"codecs": result}))


if __name__ == "__main__":
    main()
