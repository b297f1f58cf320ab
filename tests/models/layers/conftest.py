from collections.abc import Callable, Iterator

import keras
import pytest


@pytest.fixture
def dtype_policy() -> Iterator[Callable[[str], None]]:
    """Sets the policy of all layers that are made in a test."""
    before = keras.config.dtype_policy()
    yield keras.config.set_dtype_policy
    keras.config.set_dtype_policy(before)
