"""The figures of one exchange on one rank."""

import enum
import math
from typing import NamedTuple


class ExchangeFigures(NamedTuple):
    """Figures of one exchange on one rank; tensors and files hold them as float64 in this order.

    The seconds are sums over buckets. They are meaningful on a CPU, where operations run when they are called. Buckets
    that are sent at the same time are counted separately.
    """

    payload_bytes: float
    """The bytes of an allreduce with the same cost; a rank sends 2(N-1)/N times as many."""
    compression_ratio: float
    """Bytes of the gradients in float32 over `payload_bytes`; NaN if nothing was sent."""
    residual_norm: float
    """Euclidean norm over all residuals of this rank; 0 for codecs without residuals."""
    encode_seconds: float
    collective_seconds: float
    """Sending, receiving and waiting for other ranks."""
    decode_seconds: float

    def without_seconds(self) -> "ExchangeFigures":
        """Return the figures with NaN for all times."""
        return self._replace(encode_seconds=math.nan, collective_seconds=math.nan, decode_seconds=math.nan)


class TimedPart(enum.IntEnum):
    """The parts of an exchange whose times are measured."""

    ENCODE = 0
    WIRE = 1
    DECODE = 2
