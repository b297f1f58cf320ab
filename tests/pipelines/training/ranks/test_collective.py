"""How a rank joins the job."""

import os
from contextlib import nullcontext

import horovod.tensorflow as hvd
import numpy as np
import pytest
import tensorflow as tf

from pipelines.training.ranks.collective import HorovodCollective, job_of_one


@pytest.mark.parametrize(
    ("gpus", "environment", "cycle"),
    [
        ([], {}, "5"),
        ([], {"HOROVOD_CYCLE_TIME": "1"}, "1"),
        (["GPU"], {}, None),
    ],
)
def test_ranks_on_cpus_talk_less(gpus, environment, cycle, monkeypatch):
    monkeypatch.setattr(os, "environ", dict(environment))
    monkeypatch.setattr(tf.config, "get_visible_devices", lambda kind: gpus)
    joined = []
    # Horovod reads its settings when it starts.
    monkeypatch.setattr(hvd, "init", lambda: joined.append(os.environ.get("HOROVOD_CYCLE_TIME")))
    HorovodCollective()
    assert joined == [cycle]
    assert os.environ == environment, "what this process does next must not find them"


def test_a_broadcast_brings_the_states_of_random_generators_too(monkeypatch):
    """Horovod cannot send uint32, and the launcher leaves Keras's states out."""
    largest = 2**32 - 1
    variables = [tf.Variable([1.0]), tf.Variable(np.array([largest, 7], np.uint32), name="seed_generator_state")]

    def send(given, root_rank):
        for each in given:
            assert ("seed_generator_state" in each.name, each.dtype == tf.uint32) == (False, False)
            each.assign(each - 1)

    monkeypatch.setattr(hvd, "broadcast_variables", send)
    collective = HorovodCollective.__new__(HorovodCollective)
    collective.size = 2
    collective.broadcast(variables)
    assert [each.numpy().tolist() for each in variables] == [[0.0], [largest - 1, 6]]


@pytest.mark.parametrize("fails", [False, True])
def test_a_job_of_one_has_no_settings_of_the_ranks(fails, monkeypatch):
    ranks = {
        "HOROVOD_RANK": "1",
        "HOROVOD_SIZE": "2",
        "HOROVOD_LOCAL_RANK": "1",
        "HOROVOD_GLOO_RENDEZVOUS_ADDR": "127.0.0.1",
        "HOROVOD_CPU_OPERATIONS": "gloo",
        "HOROVOD_HOSTNAME": "here",
        "HOROVOD_CYCLE_TIME": "5",
        "HOROVOD_TIMELINE": "/timeline.json",
        "PATH": "/bin",
    }
    monkeypatch.setattr(os, "environ", dict(ranks))
    seen = {}

    def init():
        seen.update(os.environ)
        if fails:
            raise ValueError("no ring")

    for name, stand_in in (("init", init), ("shutdown", lambda: None)):
        monkeypatch.setattr(hvd, name, stand_in)
    with pytest.raises(ValueError, match="no ring") if fails else nullcontext(), job_of_one():
        pass
    assert seen == {
        "HOROVOD_RANK": "0",
        "HOROVOD_SIZE": "1",
        "HOROVOD_LOCAL_RANK": "0",
        "HOROVOD_LOCAL_SIZE": "1",
        "HOROVOD_CROSS_RANK": "0",
        "HOROVOD_CROSS_SIZE": "1",
        "HOROVOD_CPU_OPERATIONS": "gloo",
        "HOROVOD_HOSTNAME": "here",
        "HOROVOD_DISABLE_GROUP_FUSION": "1",
        "PATH": "/bin",
    }
    assert os.environ == ranks
