"""How a rank joins the job."""

import os

import horovod.tensorflow as hvd
import pytest
import tensorflow as tf

from pipelines.training.collective import HorovodCollective


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
