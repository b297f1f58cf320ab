"""Nothing of a ring is left in the next one, and a ring that dies fails one test only."""

import os
import signal
from typing import Any

import pytest

from pipelines.launch.driver.failure import RankLostError
from tests.parallel.ring import on_ring

pytestmark = [pytest.mark.parallel, pytest.mark.timeout(120)]


def used() -> dict[str, Any]:
    """What a test may leave behind: names, seeds, Horovod's state, residuals; as it is before this changes them."""
    import random

    import horovod.tensorflow as hvd
    import keras
    import numpy as np
    import tensorflow as tf

    from conf.load import load
    from pipelines.training.ranks.collective import HorovodCollective
    from pipelines.training.setup.recipe import make_exchange

    began, drawn = hvd.is_initialized(), [random.random(), float(np.random.random())]
    name, collective = keras.layers.Dense(1).name, HorovodCollective()
    exchange = make_exchange(load("smoke", ["exchange.codec=onebit", "exchange.dense_below=0"]), collective)
    exchange.build([tf.zeros((40, 30))])
    residual = sum(float(tf.reduce_sum(tf.abs(tf.cast(each.variable, tf.float32)))) for each in exchange.state)
    exchange.exchange([tf.random.normal((40, 30))])
    keras.utils.set_random_seed(7)
    return {"began": began, "name": name, "residual": residual, "drawn": drawn}


def test_a_ring_begins_as_the_first_one_did() -> None:
    first, second = (on_ring(2, used) for _ in range(2))
    for one, other in zip(first, second, strict=True):
        assert not set(one.pop("drawn")) & set(other.pop("drawn"))
        assert one == other
        assert one == {"began": False, "name": "dense", "residual": 0}


def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def alive() -> bool:
    return True


def test_a_ring_that_dies_is_made_anew() -> None:
    with pytest.raises(RankLostError, match="killed by SIGKILL"):
        on_ring(2, die)
    assert on_ring(2, alive) == [True, True]
