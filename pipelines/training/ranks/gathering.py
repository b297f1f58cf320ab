"""A gather operation for values of every rank that JSON can represent."""

import json
from typing import Any

import numpy as np

from pipelines.training.ranks.collective import HorovodCollective


def gather_json(value: Any, collective: HorovodCollective) -> list[Any]:
    """Return the value of every rank, in rank order; all ranks call this together.

    Args:
        value: Any value that JSON can represent.
        collective: The ranks.
    """
    data = np.frombuffer(json.dumps(value).encode(), np.uint8)
    lengths = collective.concatenate(np.array([len(data)], np.int64))
    texts = np.split(collective.concatenate(data), np.cumsum(lengths)[:-1])
    return [json.loads(text.tobytes()) for text in texts]
