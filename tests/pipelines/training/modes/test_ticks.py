"""The clock of a pipeline."""

import itertools

import pytest

from pipelines.training.modes.ticks import Ticks, idle_formula


@pytest.mark.parametrize(("stages", "micro_batches"), list(itertools.product([2, 3, 4], [1, 2, 4, 32])))
def test_every_stage_computes_each_micro_batch_after_the_one_that_sends_it(stages: int, micro_batches: int) -> None:
    ticks = Ticks(stages, micro_batches)
    clocks = {ticks.forward: range(stages), ticks.backward: range(stages - 1, -1, -1)}
    for clock, order in clocks.items():
        whens = [
            {number: tick for tick in range(ticks.of_a_clock) if (number := clock(tick, stage)) is not None}
            for stage in order
        ]
        for when in whens:
            assert sorted(when) == list(range(micro_batches))
            idle = ticks.of_a_clock - len(when)
            assert idle / ticks.of_a_clock == pytest.approx(idle_formula(stages, micro_batches))
        for sender, receiver in itertools.pairwise(whens):
            assert all(receiver[number] == sender[number] + 1 for number in sender)
