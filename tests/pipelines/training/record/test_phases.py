import numpy as np
import pytest

from pipelines.training.record.phases import PHASES, divide, line_of, table_of


def test_the_slowest_rank_is_the_one_that_waits_for_nobody() -> None:
    # Steps of 1 s: rank 1 computes 0.2 s longer, for which ranks 0 and 2 wait.
    phases = divide(
        np.array(
            [
                [1.0, 0.1, 0.05, 0.30, 0.05, 0.1, 0.5],
                [1.0, 0.1, 0.05, 0.10, 0.05, 0.1, 0.4],
                [1.0, 0.1, 0.05, 0.25, 0.05, 0.1, 0.45],
            ]
        )
    )
    names = ("waiting", "wire", "compute")
    seconds = [pytest.approx([rank[name] for name in names]) for rank in phases.seconds]
    assert seconds == [[0.2, 0.1, 0.4], [0.0, 0.1, 0.6], [0.15, 0.1, 0.45]]
    assert [sum(phases.mean.values()), *(sum(rank.values()) for rank in phases.seconds)] == pytest.approx([1.0] * 4)
    assert line_of(phases) == (
        "a step takes 1000 ms: input 10 %, compute 48 %, encode 5 %, wire 10 %, decode 5 %, optimizer 10 %, "
        "waiting 12 %; slowest is rank 1"
    )
    rows = table_of(phases, 4)
    assert [(row["epoch"], row["rank"]) for row in rows] == [(4, 0), (4, 1), (4, 2)]
    assert {f"{name}_seconds" for name in PHASES} <= rows[0].keys()


def test_what_the_backward_pass_hides_is_part_of_computing() -> None:
    # Steps of 1 s in which the buckets, counted singly, take 1.5 s; 0.3 s of them come after the last gradient.
    phases = divide(np.array([[1.0, 0.0, 0.1, 1.3, 0.1, 0.1, 0.4], [1.0, 0.0, 0.1, 1.3, 0.1, 0.1, 0.4]]))
    first, second = phases.seconds
    assert first == second
    found = [sum(phases.mean.values()), *(first[name] for name in ("compute", "encode", "wire", "decode"))]
    assert found == pytest.approx([1.0, 0.6, 0.02, 0.26, 0.02])
    assert line_of(phases) == "a step takes 1000 ms: compute 60 %, encode 2 %, wire 26 %, decode 2 %, optimizer 10 %"


@pytest.mark.parametrize(
    ("row", "compute"),
    [
        # Delayed gradients arrive before the next ones are computed.
        ([1.0, 0.0, 0.1, 0.6, 0.1, 0.1, 0.1], 0.9),
        # There is no exchange.
        ([1.0, 0.2, 0.0, 0.0, 0.0, 0.1, 0.1], 0.7),
    ],
)
def test_an_exchange_that_is_hidden_whole_costs_nothing(row: list[float], compute: float) -> None:
    (rank,) = divide(np.array([row])).seconds
    assert [rank[name] for name in ("compute", "wire", "encode", "waiting")] == [pytest.approx(compute), 0.0, 0.0, 0.0]
