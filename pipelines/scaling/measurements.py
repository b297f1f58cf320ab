"""The measurements on one node or one pair of hosts, as a file: the inputs of the scaling model."""

from pathlib import Path
from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from pipelines.storage.whole_files import os_errors_as

CollectiveName = Literal["allreduce", "alltoall", "allgather"]
Seconds = Annotated[float, Field(gt=0, allow_inf_nan=False)]
Duration = Annotated[float, Field(ge=0, allow_inf_nan=False)]
Repeats = Annotated[tuple[Seconds, ...], Field(min_length=1)]
Durations = Annotated[tuple[Duration, ...], Field(min_length=1)]
Name = Annotated[str, Field(min_length=1)]


class MeasurementBase(BaseModel):
    """The base of all parts: frozen, without other keys."""

    model_config = ConfigDict(frozen=True, extra="ignore", strict=True)


class ComputePoint(MeasurementBase):
    """The steps of one rank without an exchange: forward and backward pass and the update."""

    batch_size: int = Field(gt=0)
    """Images of the rank in a step."""
    seconds: Repeats
    """Seconds of each step."""


class Gradient(MeasurementBase):
    """One gradient, or several that are ready together."""

    bytes: int = Field(gt=0)
    """Bytes in float32."""
    ready: float = Field(ge=0, le=1)
    """Time at which the gradient is computed, as a fraction of a step's computing."""


class LinkMeasurement(MeasurementBase):
    """A link between two hosts."""

    name: Name
    bytes_per_second: float | None = Field(gt=0, allow_inf_nan=False)
    """Nominal speed; null if there is no limit."""
    latency_seconds: Durations
    """Latency from one host to the other: half a round trip of a small message; 0 if it is not known."""


class CollectivePoint(MeasurementBase):
    """One operation of all ranks, alone on the link."""

    link: Name
    collective: CollectiveName
    ranks: int = Field(ge=2)
    bytes: int = Field(gt=0)
    """Bytes of a rank's buffer (allreduce), of a rank's data for all ranks (alltoall), or of the result (allgather)."""
    seconds: Repeats
    """Seconds of each operation on the slowest rank."""


class Message(MeasurementBase):
    """The message of one of a codec's collectives in an exchange of all gradients; `bytes` as in `CollectivePoint`."""

    collective: CollectiveName
    bytes: int = Field(gt=0)


class CodecMeasurement(MeasurementBase):
    """The exchange of all gradients by one codec."""

    name: Name
    messages: tuple[Message, ...]
    """Messages in order; empty if all gradients are sent dense."""
    dense_bytes: int = Field(ge=0)
    """Bytes of the other gradients, which are sent dense in one allreduce."""
    encode_seconds: Durations
    """Seconds of encoding all buckets on one rank."""
    decode_seconds: Durations
    """Seconds of decoding all buckets, of the owners' work between two collectives, and of checks and copies."""


class Measurements(MeasurementBase):
    """The inputs of the model."""

    format_version: Literal[1]
    machine: Name
    measured: Name
    """Date of the measurements."""
    model: Name
    """Name of the network and size of the images."""
    compute: tuple[ComputePoint, ...] = Field(min_length=1)
    straggler_deviation: float = Field(ge=0, allow_inf_nan=False)
    """Standard deviation of a rank's computing time of one step, as a fraction of its mean."""
    gradients: tuple[Gradient, ...] = Field(min_length=1)
    """Gradients in the order in which the backward pass computes them."""
    links: tuple[LinkMeasurement, ...]
    collectives: tuple[CollectivePoint, ...]
    codecs: tuple[CodecMeasurement, ...] = Field(min_length=1)

    @model_validator(mode="after")
    def _parts_fit(self) -> "Measurements":
        unique: dict[str, list[object]] = {
            "links: a name": [link.name for link in self.links],
            "codecs: a name": [codec.name for codec in self.codecs],
            "compute: a batch size": [point.batch_size for point in self.compute],
        }
        for what, values in unique.items():
            if len(set(values)) < len(values):
                raise ValueError(f"{what} is there twice in {values}")
        links = {link.name for link in self.links}
        for point in self.collectives:
            if point.link not in links:
                raise ValueError(f"collectives: the link {point.link!r} is none of {sorted(links)}")
        if any(later.ready < earlier.ready for earlier, later in zip(self.gradients, self.gradients[1:], strict=False)):
            raise ValueError("gradients: they should be in the order in which they are ready")
        return self

    @property
    def gradient_bytes(self) -> int:
        """Bytes of all gradients in float32."""
        return sum(gradient.bytes for gradient in self.gradients)


def read_measurements(path: Path) -> Measurements:
    """Read a file of `make bench NAME=network`.

    Raises:
        FileNotFoundError: The file cannot be read.
        ValueError: The file is of another kind or damaged.
    """
    with os_errors_as(FileNotFoundError, f"--measurements {path} cannot be read"):
        text = path.read_bytes()
    try:
        return Measurements.model_validate_json(text)
    except ValidationError as error:
        first = error.errors()[0]
        place = ".".join(map(str, first["loc"]))
        problem = first["msg"].removeprefix("Value error, ")
        what = f"{place}: {problem}" if place else problem
        raise ValueError(f"--measurements {path} is no file of `make bench NAME=network`: {what}") from None
