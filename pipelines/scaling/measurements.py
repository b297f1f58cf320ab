"""What was measured on one node or one pair of hosts, as a file: the inputs of the scaling model."""

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
_VERSION: Literal[1] = 1


class Measured(BaseModel):
    """Base of all parts: frozen, and no other keys."""

    model_config = ConfigDict(frozen=True, extra="ignore", strict=True)


class ComputePoint(Measured):
    """Steps of one rank without an exchange: forward and backward pass and the update."""

    batch_size: int = Field(gt=0)
    """Images of the rank in a step."""
    seconds: Repeats
    """One number per step."""


class Gradient(Measured):
    """One gradient, or several that are ready together."""

    bytes: int = Field(gt=0)
    """Bytes in float32."""
    ready: float = Field(ge=0, le=1)
    """When it is computed, as a part of the computing of a step."""


class LinkMeasurement(Measured):
    """A link between two hosts."""

    name: Name
    bytes_per_second: float | None = Field(gt=0, allow_inf_nan=False)
    """Its nominal speed; null where it has no limit."""
    latency_seconds: Durations
    """From one host to the other, one way: half a round trip of a small message; 0 where it is not known."""


class CollectivePoint(Measured):
    """One operation of all ranks, alone on the link."""

    link: Name
    """Name of one of the links."""
    collective: CollectiveName
    ranks: int = Field(ge=2)
    bytes: int = Field(gt=0)
    """Allreduce: of a rank's buffer; alltoall: of all that a rank has for others and itself; allgather: of what comes
    out."""
    seconds: Repeats
    """One number per operation: the slowest rank's."""


class Message(Measured):
    """What one of a codec's collectives carries in an exchange of all gradients; `bytes` as of `CollectivePoint`."""

    collective: CollectiveName
    bytes: int = Field(gt=0)


class CodecMeasurement(Measured):
    """The exchange of all gradients by one codec."""

    name: Name
    messages: tuple[Message, ...]
    """Messages in their order; empty where all gradients travel dense."""
    dense_bytes: int = Field(ge=0)
    """Bytes of the gradients that travel dense beside them, in one allreduce."""
    encode_seconds: Durations
    """Seconds of encoding all buckets on one rank."""
    decode_seconds: Durations
    """Seconds of decoding all buckets, with what owners do between two collectives, and of checks and copies."""


class Measurements(Measured):
    """All inputs of the model."""

    format_version: Literal[1]
    machine: Name
    measured: Name
    """Date."""
    model: Name
    """Network and images."""
    compute: tuple[ComputePoint, ...] = Field(min_length=1)
    straggler_deviation: float = Field(ge=0, allow_inf_nan=False)
    """Standard deviation of a rank's computing of one step, as a part of its mean."""
    gradients: tuple[Gradient, ...] = Field(min_length=1)
    """Gradients in the order in which the backward pass computes them."""
    links: tuple[LinkMeasurement, ...]
    collectives: tuple[CollectivePoint, ...]
    codecs: tuple[CodecMeasurement, ...] = Field(min_length=1)

    @model_validator(mode="after")
    def _parts_fit(self) -> "Measurements":
        for kind, names in (("links", self.links), ("codecs", self.codecs)):
            found = [part.name for part in names]
            if len(set(found)) < len(found):
                raise ValueError(f"{kind}: a name is there twice in {found}")
        links = {link.name for link in self.links}
        for point in self.collectives:
            if point.link not in links:
                raise ValueError(f"collectives: the link {point.link!r} is none of {sorted(links)}")
        if any(later.ready < earlier.ready for earlier, later in zip(self.gradients, self.gradients[1:], strict=False)):
            raise ValueError("gradients: they should be in the order in which they are ready")
        batches = [point.batch_size for point in self.compute]
        if len(set(batches)) < len(batches):
            raise ValueError(f"compute: a batch size is there twice in {batches}")
        return self

    @property
    def gradient_bytes(self) -> int:
        """Bytes of all gradients in float32."""
        return sum(gradient.bytes for gradient in self.gradients)


def read_measurements(path: Path) -> Measurements:
    """Read a file of `make bench NAME=network`.

    Raises:
        FileNotFoundError: It cannot be read.
        ValueError: It is another kind of file, or damaged.
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
