"""The settings of every network, by name; their defaults are stated here only."""

from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field, field_validator

from conf.sections.section import Imported, NamedSection


class NetworkConfig(NamedSection):
    """The settings that all networks share."""

    whitens: ClassVar[bool] = False
    """Whether the first convolution whitens patches, with statistics of training images."""
    batch_norm_ranks: int | Literal["all"] = 1
    """Number of consecutive ranks over whose batches batch norm takes its statistics. It is 1 (each rank alone: Goyal
    et al.), a number that divides launch.num_workers (MLPerf's span), or all. It costs two sums over these ranks per
    layer and micro-batch."""

    @property
    def shortest_side(self) -> int:
        """Side of the smallest images, in pixels, for which the last stage still has a pixel."""
        return 1

    @property
    def least_side(self) -> int:
        """Side of the smallest images, in pixels, that the network accepts."""
        return 1

    def arguments(self) -> dict[str, Any]:
        """Return the keyword arguments of the constructor of that name, without the settings for several ranks."""
        return self.model_dump(exclude={"name", "batch_norm_ranks"})

    def batch_norm_span(self, workers: int) -> int:
        """Return the number of ranks over which batch norm takes its statistics, for `workers` ranks."""
        return workers if self.batch_norm_ranks == "all" else self.batch_norm_ranks

    @field_validator("batch_norm_ranks", mode="before")
    @classmethod
    def _number_or_all(cls, value: object) -> object:
        if value == "all" or (isinstance(value, int) and not isinstance(value, bool) and value > 0):
            return value
        raise ValueError(f"model.batch_norm_ranks={value!r}: should be all, or a number of ranks from 1")


class ResidualConfig(NetworkConfig):
    """The settings that residual networks share."""

    dropout: float = Field(default=0.0, ge=0, lt=1)
    """Rate of the dropout before the last layer."""
    stochastic_depth: float = Field(default=0.0, ge=0, lt=1)
    """Rate at which the last block is left out for a sample in training (drop path); block l of L has l / L of it."""
    zero_init_residual: bool = True
    """Whether the last normalisation of every block starts with gamma 0, so that the block starts as its shortcut."""


class ResNetConfig(ResidualConfig):
    """ResNet v1.5 (He et al. 2015, Goyal et al. 2017)."""

    name: Literal["resnet"] = "resnet"
    depth: Literal[18, 34, 50, 101, 152] = 50
    """Number of layers with weights."""
    width_factor: float = Field(default=1.0, gt=0, le=4)
    """Scales every channel count; 1.0 is the published network."""

    @property
    def shortest_side(self) -> int:
        """The network halves the image five times: 2**5 pixels."""
        return 32


class ResNetCifarConfig(ResidualConfig):
    """ResNet for images of 32 x 32 pixels (He et al. 2015, section 4.2)."""

    name: Literal["resnet_cifar"] = "resnet_cifar"
    depth: Literal[2, 8, 20, 32, 44, 56, 110] = 20
    """Number of layers with weights. 2 and 8 are not published: 8 is for a first try, 2 only for tests of the other
    parts."""
    width_factor: float = Field(default=1.0, gt=0, le=16)
    """Scales every channel count; 1.0 is the published network."""
    preactivation: bool = False
    """Whether normalisation and activation precede a convolution (He et al. 2016, identity mappings)."""
    stem_stride: Literal[1, 2] = 1
    """Stride of the first convolution. 2 halves the image before the first stage: for images of 64 pixels, or for a
    quarter of the computation on smaller images."""

    @property
    def shortest_side(self) -> int:
        """Two stages halve the image, and the stem may halve it too."""
        return 4 * self.stem_stride


class ResNet9Config(ResidualConfig):
    """ResNet-9 for images of 32 x 32 pixels (Page 2018, DAWNBench)."""

    name: Literal["resnet9"] = "resnet9"
    width_factor: float = Field(default=1.0, gt=0, le=4)
    """Scales every channel count; 1.0 is the published network."""
    stem_stride: Literal[1, 2] = 1
    """Stride of the first convolution. 2 halves the image before the first stage: for images of 64 pixels, or for a
    quarter of the computation on smaller images."""

    @property
    def shortest_side(self) -> int:
        """Three stages halve the image, and the stem may halve it too."""
        return 8 * self.stem_stride

    @property
    def least_side(self) -> int:
        """The same number, because a stage without a pixel is an error."""
        return self.shortest_side


class AirbenchConfig(NetworkConfig):
    """Seven convolutions for images of 32 x 32 pixels; the first one whitens patches (Jordan 2024, airbench94)."""

    whitens: ClassVar[bool] = True
    name: Literal["airbench"] = "airbench"
    width_factor: float = Field(default=1.0, gt=0, le=8)
    """Scales the channel counts of the stages; 1.0 is the published network."""
    dropout: float = Field(default=0.0, ge=0, lt=1)
    """Rate of the dropout before the last layer."""

    @property
    def shortest_side(self) -> int:
        """The first convolution shortens each side by a pixel, and three stages halve the image."""
        return 9

    @property
    def least_side(self) -> int:
        """The same number, because a stage without a pixel is an error."""
        return self.shortest_side


class ImportedNetworkConfig(NetworkConfig, Imported):
    """Your own function, or one of Keras, that builds a network."""

    name: Literal["import"] = "import"


ModelConfig = Annotated[
    ResNetConfig | ResNetCifarConfig | ResNet9Config | AirbenchConfig | ImportedNetworkConfig,
    Field(discriminator="name"),
]
