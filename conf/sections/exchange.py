"""The settings of the gradient exchange."""

from typing import Any

from pydantic import Field

from conf.sections.codecs import CodecConfig, NoneConfig
from conf.sections.section import Section


class ExchangeConfig(Section):
    """The settings of the messages between the ranks."""

    codec: CodecConfig = NoneConfig()
    """The codec's name with its settings; a name alone takes the defaults."""
    dense_below: int = Field(default=1024, ge=0)
    """Tensors with fewer elements are sent in float32, as all biases and gains are."""
    bucket_mib: float | None = Field(default=8.0, gt=0)
    """Largest size of a bucket of gradients that are sent together, last layers first, during the backward pass; null:
    one bucket."""
    warmup_steps: int = Field(default=0, ge=0)
    """Number of first optimizer steps in which everything is sent in float32; with `training.mode=local`, of first
    exchanges."""
    rescale_residual: bool = True
    """Whether the residual is rescaled when the learning rate changes, so that its updates keep their size."""

    def arguments(self) -> dict[str, Any]:
        """Return the keyword arguments of the exchange, without the codec."""
        return self.model_dump(exclude={"codec"})
