"""Every codec between 2 and 3 real Horovod ranks; a ring starts once."""

from collections.abc import Iterable
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import numpy as np
import pytest
import tensorflow as tf

from conf.sections.codecs import ExchangeConfig
from conf.sections.optimizers import LARSConfig
from models.compression.codecs.table import CODECS
from pipelines.training.setup.recipe import make_codec
from tests.parallel.exchange import exchange_rank
from tests.parallel.ring import on_ring

pytestmark = [pytest.mark.parallel, pytest.mark.timeout(280)]

SHAPES, STEPS, gradients = exchange_rank.SHAPES, exchange_rank.STEPS, exchange_rank.gradients
COMPRESSED = (0, 2, 3)


@dataclass(frozen=True)
class Ring:
    """So many ranks, and what they exchange with."""

    size: int
    codecs: tuple[str, ...]
    compiled: tuple[str, ...]
    """By XLA, which takes seconds for each. `test_codecs` says why these, and compiles every codec on one rank."""
    marks: tuple[pytest.MarkDecorator, ...] = field(default=(), compare=False)


COMPILED = ("qsgd", "randomk", "threshold")
# The usual tests have a codec of each form that messages have: summed or not, of a fixed length or of any.
USUAL = Ring(2, ("none", "fp16", "onebit", "powersgd", *COMPILED), COMPILED)
EVERYTHING = Ring(3, tuple(CODECS), COMPILED, marks=(pytest.mark.long, pytest.mark.timeout(600)))


def on_rings(names: Iterable[str] | None = None) -> Any:
    """Run a test on both rings, and there with each of some codecs that the ring has."""
    cases = [
        pytest.param(ring, *case, id="-".join([str(ring.size), *case]), marks=ring.marks)
        for ring in (USUAL, EVERYTHING)
        for case in ([()] if names is None else [(name,) for name in names if name in ring.codecs])
    ]
    return pytest.mark.parametrize(["ring"] if names is None else ["ring", "name"], cases, indirect=["ring"])


@cache
def started(ring: Ring) -> list[dict[str, np.ndarray]]:
    """What every rank of a ring gives, which starts once."""
    return on_ring(ring.size, exchange_rank.measured, ring.codecs, ring.compiled)


@pytest.fixture
def ring(request):
    """What every rank of a ring gives."""
    return started(request.param)


@on_rings(sorted(CODECS))
def test_all_ranks_have_the_same(ring, name):
    for step in range(STEPS):
        for index in range(len(SHAPES)):
            first, *others = (saved[f"{name}/result/{step}/{index}"] for saved in ring)
            assert np.any(first)
            np.testing.assert_equal(others, [first] * len(others))
    assert len({int(saved[f"{name}/payload_bytes"]) for saved in ring}) == 1 or name in (
        "threshold",
        "norm_sparsifier",
        "adaptive",
    )


@on_rings()
def test_no_codec_is_horovods_own_allreduce_bit_for_bit(ring):
    for step in range(STEPS):
        for index in range(len(SHAPES)):
            key = f"result/{step}/{index}"
            np.testing.assert_array_equal(ring[0][f"none/{key}"], ring[0][f"horovod/{key}"])


@on_rings()
@pytest.mark.parametrize("index", range(len(SHAPES)))
def test_buckets_that_travel_at_the_same_time_give_the_same_digits_each_time(ring, index):
    first, *others = ring[0][f"repeated/{index}"]
    assert [each.tobytes() for each in others] == [first.tobytes()] * len(others)


@on_rings()
def test_training_without_a_codec_is_plain_horovod(ring):
    for index in range(4):
        ours, theirs = ring[0][f"ours/{index}"], ring[0][f"theirs/{index}"]
        if len(ring) == 2:
            np.testing.assert_array_equal(ours, theirs)
        else:
            # The order in which Gloo sums more than two ranks depends on an element's place in the buffer.
            np.testing.assert_allclose(ours, theirs, rtol=1e-5, atol=1e-7)
        np.testing.assert_array_equal(ring[0][f"ours/{index}"], ring[-1][f"ours/{index}"])


@on_rings(["onebit", "scaled_sign", "threshold", "adaptive", "topk", "dgc", "randomk", "powersgd"])
def test_what_came_out_and_the_residuals_sum_to_all_gradients(ring, name):
    for index in COMPRESSED:
        sent = [gradients(rank, step)[index] for rank in range(len(ring)) for step in range(STEPS)]
        expected = STEPS * np.mean(sent, axis=0)
        total = sum(ring[0][f"{name}/result/{step}/{index}"].astype(np.float64) for step in range(STEPS))
        residual, owner = (f"{name}/state/{state}/gradient_{index}" for state in ("residual", "owner_residual"))
        if residual in ring[0]:
            total = total + np.mean([saved[residual] for saved in ring], axis=0)
        if owner in ring[0]:
            parts = tf.constant(np.stack([saved[owner] for saved in ring]))
            config = ExchangeConfig(codec={"name": name, **({"tau": 1.0} if name == "threshold" else {})}).codec
            total = total + make_codec(config, LARSConfig()).join_parts(parts, SHAPES[index]).numpy()
        np.testing.assert_allclose(total, expected, rtol=1e-4, atol=1e-4)


@on_rings(["fp16", "bf16"])
def test_roundings_give_the_mean(ring, name):
    relative = {"fp16": 2**-9, "bf16": 2**-7}[name]
    for index in range(len(SHAPES)):
        values = [gradients(rank, 0)[index] for rank in range(len(ring))]
        error = np.abs(ring[0][f"{name}/result/0/{index}"] - np.mean(values, axis=0))
        assert np.all(error <= relative * np.mean(np.abs(values), axis=0))
