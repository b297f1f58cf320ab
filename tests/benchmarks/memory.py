"""Peak memory of a rank by the number of micro-batches per step: ResNet-50, in processes of their own.

Accumulation keeps a sum of gradients beside what one batch needs, for any number of micro-batches. There are two cases.
One is a network of twice the usual width on one rank: its float32 gradient is large beside the difference of two equal
processes. The other is a global batch of 32,768 on two ranks. Rounds in turn; medians. `--smoke` takes a tiny network
on two ranks once.
"""

import json
import os
import statistics
from dataclasses import dataclass

from conf.sections.networks import ResNetCifarConfig, ResNetConfig
from tests.benchmarks.parts.command import is_smoke
from tests.benchmarks.parts.ranks import each_on_ranks


@dataclass(frozen=True)
class Case:
    """One network and batch per rank, with several numbers of micro-batches."""

    micro_batches: tuple[int, ...]
    ranks: int = 1
    network: ResNetConfig | ResNetCifarConfig = ResNetConfig()  # noqa: RUF009  it is frozen
    batch_size: int = 4
    side: int = 60
    """Pixels on each side."""
    steps: int = 3


ROUNDS = 3
CASES = {
    "twice the width": Case((1, 2, 64), network=ResNetConfig(width_factor=2.0)),
    "global batch 32,768": Case((1, 256), ranks=2, batch_size=64, side=32, steps=1),
}
SMOKE = {"two ranks": Case((1, 2), 2, ResNetCifarConfig(depth=2, width_factor=0.5), batch_size=1, side=12, steps=2)}


def peak_mib(size: Case, micro_batches: int) -> tuple[float, float]:
    """Peak of this process's resident memory, and the size of one float32 gradient."""
    from models.losses import classification_loss
    from pipelines.training.memory.memory import resident_peak
    from pipelines.training.ranks.collective import HorovodCollective
    from pipelines.training.step.accumulation import Accumulation
    from pipelines.training.step.step import make_accumulate
    from tests.benchmarks.parts import training

    groups = [training.image_group("image", size.side, 4)]
    model = training.network(groups, size.network, 19)
    exchange = training.exchange_of(HorovodCollective())
    accumulation = Accumulation(model, micro_batches) if micro_batches > 1 else None
    trained = training.lars_training(model, exchange, accumulation=accumulation)
    loss, batch = classification_loss("multi_label"), training.noise(groups, size.batch_size, 19)
    add = None if accumulation is None else make_accumulate(model, loss, accumulation, jit_compile=False)
    for _ in range(size.steps):
        for _ in range(micro_batches - 1):
            add(*batch)
        float(trained.step(*batch))
    return resident_peak() / training.MIB, 4 * training.elements(model) / training.MIB


def main() -> None:
    """Measure in turn, and print one line per case and round and the JSON line."""
    smoke = is_smoke(__doc__, "one round with a tiny network")
    cases, rounds = (SMOKE, 1) if smoke else (CASES, ROUNDS)
    figures = {name: measure(name, case, rounds, together=smoke) for name, case in cases.items()}
    print(json.dumps({"cases": figures, "cores": os.cpu_count()}))


def measure(name: str, case: Case, rounds: int, *, together: bool) -> dict[str, object]:
    """Figures of one case: peaks of the rank with the highest one, medians of the rounds."""
    peaks: list[list[float]] = []
    gradient = 0.0
    for number in range(rounds):
        asked = [(case, count) for count in case.micro_batches]
        found = [max(ranks) for ranks in each_on_ranks(case.ranks, peak_mib, asked, together=together, threads=None)]
        peaks.append([peak for peak, _ in found])
        gradient = found[0][1]
        texts = (
            f"{count} micro-batches {peak:,.0f} MiB" for count, peak in zip(case.micro_batches, peaks[-1], strict=True)
        )
        print(f"{name}, round {number + 1}: {', '.join(texts)}", flush=True)
    more = statistics.median(last - first for first, *_, last in peaks)
    median = map(statistics.median, zip(*peaks, strict=True))
    return {
        "peak_mib": {str(count): round(peak) for count, peak in zip(case.micro_batches, median, strict=True)},
        "gradient_mib": round(gradient, 1),
        "more_gradients": round(more / gradient, 3),
        "global_batch": case.ranks * case.batch_size * case.micro_batches[-1],
    }


if __name__ == "__main__":
    main()
