"""The settings of the gradient exchange."""

from typing import Any

from pydantic import Field

from conf.sections.codecs import CodecConfig, NoneConfig
from conf.sections.section import Section


class ExchangeConfig(Section):
    """What travels between the ranks."""

    codec: CodecConfig = NoneConfig()
    """The codec's name with its settings; a name alone takes the defaults."""
    dense_below: int = Field(default=1024, ge=0)
    """Tensors with fewer elements travel in float32, as all biases and gains do."""
    bucket_mib: float | None = Field(default=8.0, gt=0)
    """Gradients up to this size travel together, last layers first, during the backward pass; null: all at once."""
    warmup_steps: int = Field(default=0, ge=0)
    """Number of first optimizer steps in which everything travels in float32; with `training.mode=local`
    of first exchanges."""
    rescale_residual: bool = True
    """Whether the residual keeps its weight when the learning rate changes."""

    def arguments(self) -> dict[str, Any]:
        """The keyword arguments for the exchange, all but the codec."""
        return self.model_dump(exclude={"codec"})
