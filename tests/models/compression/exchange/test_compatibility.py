"""Pairs of codec and optimizer that make no sense."""

import keras
import pytest

from models.compression.codecs.table import CODECS
from models.compression.exchange.compatibility import check_optimizer
from models.optimizers.lars import LARS
from models.optimizers.onebit_adam import OneBitAdam


@pytest.mark.parametrize(
    ("codec", "optimizer", "warmup_steps", "reason"),
    [
        ("dgc", keras.optimizers.SGD(0.1, momentum=0.9), 0, "'dgc' has its own momentum, and SGD would apply a second"),
        ("dgc", LARS(0.1), 0, "'dgc' gives accumulated velocities, for which LARS has no known recipe"),
        ("dgc", keras.optimizers.Adam(0.1), 0, "for which Adam has no known recipe"),
        ("onebit_adam", keras.optimizers.Adam(0.1), 5, "got codec 'onebit_adam' and Adam: .* twice or never"),
        ("onebit", OneBitAdam(0.1, warmup_steps=5), 5, "got codec 'onebit' and OneBitAdam: .* twice or never"),
        ("onebit_adam", OneBitAdam(0.1, warmup_steps=5), 4, "warm up for as many steps, got 5 and 4"),
    ],
)
def test_refused_with_the_reason(codec, optimizer, warmup_steps, reason):
    with pytest.raises(ValueError, match=reason):
        check_optimizer(CODECS[codec](), optimizer, warmup_steps=warmup_steps)


def test_pairs_that_fit():
    check_optimizer(CODECS["dgc"](), keras.optimizers.SGD(0.1), warmup_steps=0)
    check_optimizer(CODECS["onebit"](), LARS(0.1), warmup_steps=0)
    check_optimizer(CODECS["qsgd"](), keras.optimizers.Adam(0.1), warmup_steps=0)
    check_optimizer(CODECS["onebit_adam"](), OneBitAdam(0.1, warmup_steps=5), warmup_steps=5)
