"""Pairs of codec and optimizer that make no sense."""

import keras
import pytest

from conf.sections.optimizers import LARSConfig, OneBitAdamConfig
from models.compression.exchange.compatibility import check_optimizer
from models.optimizers.lars import LARS
from models.optimizers.onebit_adam import OneBitAdam

LARS_RULE = LARS(0.1, **LARSConfig().arguments())
PAIR = OneBitAdam(0.1, **OneBitAdamConfig(warmup_steps=5).arguments())


@pytest.mark.parametrize(
    ("codec", "optimizer", "warmup_steps", "reason"),
    [
        ("dgc", keras.optimizers.SGD(0.1, momentum=0.9), 0, "'dgc' has its own momentum, and SGD would apply a second"),
        ("dgc", LARS_RULE, 0, "'dgc' gives accumulated velocities, for which LARS has no known recipe"),
        ("dgc", keras.optimizers.Adam(0.1), 0, "for which Adam has no known recipe"),
        ("onebit_adam", keras.optimizers.Adam(0.1), 5, "got codec 'onebit_adam' and Adam: .* twice or never"),
        ("onebit", PAIR, 5, "got codec 'onebit' and OneBitAdam: .* twice or never"),
        ("onebit_adam", PAIR, 4, "warm up for as many steps, got 5 and 4"),
    ],
)
def test_refused_with_the_reason(codec, optimizer, warmup_steps, reason, make_codec):
    with pytest.raises(ValueError, match=reason):
        check_optimizer(make_codec(codec), optimizer, warmup_steps=warmup_steps)


@pytest.mark.parametrize(
    ("codec", "optimizer", "warmup_steps"),
    [
        ("dgc", keras.optimizers.SGD(0.1), 0),
        ("onebit", LARS_RULE, 0),
        ("qsgd", keras.optimizers.Adam(0.1), 0),
        ("onebit_adam", PAIR, 5),
    ],
)
def test_pairs_that_fit(codec, optimizer, warmup_steps, make_codec):
    check_optimizer(make_codec(codec), optimizer, warmup_steps=warmup_steps)
