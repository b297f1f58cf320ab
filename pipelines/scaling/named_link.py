"""The link that a user names."""

import re
from dataclasses import dataclass

_SPEED = re.compile(r"^(?P<number>\d+(\.\d+)?)\s*(?P<prefix>[kMGT])bit/s$")
_LATENCY = re.compile(r"^(?P<number>\d+(\.\d+)?)\s*(?P<unit>ns|us|ms|s)$")
_PREFIXES = {"k": 1e3, "M": 1e6, "G": 1e9, "T": 1e12}
_UNITS = {"ns": 1e-9, "us": 1e-6, "ms": 1e-3, "s": 1.0}


@dataclass(frozen=True)
class NamedLink:
    """A link, with or without measurements."""

    bytes_per_second: float
    latency_seconds: float | None
    """Latency in one direction; None: the value of the measured link with the nearest speed."""

    @property
    def label(self) -> str:
        """The speed in bits, and the latency if it is known."""
        bits = 8 * self.bytes_per_second
        scale = next((name for name in "TGM" if bits >= _PREFIXES[name]), "k")
        speed = f"{bits / _PREFIXES[scale]:g} {scale}bit/s"
        return speed if self.latency_seconds is None else f"{speed}, {1e6 * self.latency_seconds:g} us"


def link_of(text: str) -> NamedLink:
    """Read a link, such as `1Gbit/s`, `100Mbit/s,200us` or `0.4Tbit/s,5us`.

    Raises:
        ValueError: The text is not a link, or a speed is 0.
    """
    speed_text, comma, latency_text = text.partition(",")
    speed, latency = _SPEED.match(speed_text.strip()), _LATENCY.match(latency_text.strip())
    if speed is None or (comma and latency is None) or float(speed["number"]) == 0:
        raise ValueError(
            f"should be a speed above 0 and perhaps a latency, such as 1Gbit/s or 1Gbit/s,50us, got {text!r}"
        )
    bytes_per_second = float(speed["number"]) * _PREFIXES[speed["prefix"]] / 8
    return NamedLink(bytes_per_second, None if latency is None else float(latency["number"]) * _UNITS[latency["unit"]])
