"""The building blocks of residual networks: layers of one dtype policy, initialised for large-batch training."""

import keras

from models.layers.drop import SeededDrop
from models.layers.normalisation import FusedBatchNormalization

_BOTTLENECK_EXPANSION = 4


class Layers:
    """The layers of blocks, with one dtype policy.

    Source: He et al. 2015 ("Delving deep into rectifiers", fan out) for the kernels of convolutions.
    """

    def __init__(
        self,
        dtype: str | None,
        *,
        classes: int,
        width_factor: float,
        stochastic_depth: float,
        zero_init_residual: bool,
        blocks: int,
    ) -> None:
        """Begin a network.

        Args:
            dtype: Keras dtype policy of all layers, such as "mixed_bfloat16"; None: Keras's global one.
            classes: Number of logits, at least 1.
            width_factor: Scales the channel counts.
            stochastic_depth: Rate at which the last block's residual is left out in training, in [0, 1).
            zero_init_residual: Whether the last normalisation of every block starts with gamma 0.
            blocks: Number of blocks of the network.

        Raises:
            ValueError: A width or number of classes that is not positive.
        """
        if width_factor <= 0:
            raise ValueError(f"width_factor must be positive, got {width_factor}")
        if classes < 1:
            raise ValueError(f"classes must be at least 1, got {classes}")
        self.dtype, self._zero_init_residual = dtype, zero_init_residual
        self._classes, self._width_factor = classes, width_factor
        self._stochastic_depth, self._blocks, self._block = stochastic_depth, blocks, 0

    def scaled(self, channels: int) -> int:
        """Scale a channel count, rounded to a multiple of 8 and at least 8."""
        return max(8, 8 * int(channels * self._width_factor / 8 + 0.5))

    def convolution(
        self, features: keras.KerasTensor, channels: int, kernel_size: int, *, stride: int = 1, name: str
    ) -> keras.KerasTensor:
        """Convolve without bias, in "same" padding."""
        # Each layer has its own initializer: an instance draws the same numbers each time for the same shape.
        return keras.layers.Conv2D(
            channels,
            kernel_size,
            strides=stride,
            padding="same",
            use_bias=False,
            kernel_initializer=keras.initializers.VarianceScaling(
                scale=2.0, mode="fan_out", distribution="untruncated_normal"
            ),
            dtype=self.dtype,
            name=name,
        )(features)

    def normalisation(self, features: keras.KerasTensor, *, name: str, ends_block: bool = False) -> keras.KerasTensor:
        """Normalise over the batch; the residual at the end of a block starts with 0 if `zero_init_residual` is set.

        Source: Goyal et al. 2017, section 5.1, for the start with 0.
        """
        gamma = "zeros" if ends_block and self._zero_init_residual else "ones"
        return FusedBatchNormalization(
            momentum=0.9, epsilon=1e-5, gamma_initializer=gamma, dtype=self.dtype, name=name
        )(features)

    def convolved(
        self,
        features: keras.KerasTensor,
        channels: int,
        kernel_size: int,
        *,
        stride: int = 1,
        name: str,
        number: str = "",
    ) -> keras.KerasTensor:
        """Convolve, normalise, and set negative features to 0: the layers `<name>_conv`, `_bn` and `_relu`."""
        features = self.convolution(features, channels, kernel_size, stride=stride, name=f"{name}_conv{number}")
        return self.activation(self.normalisation(features, name=f"{name}_bn{number}"), name=f"{name}_relu{number}")

    def basic_residual(
        self, features: keras.KerasTensor, channels: int, *, stride: int = 1, name: str
    ) -> keras.KerasTensor:
        """Return the residual of a basic block: two convolutions of 3 x 3 pixels, each with a normalisation."""
        residual = self.convolved(features, channels, 3, stride=stride, name=name, number="1")
        residual = self.convolution(residual, channels, 3, name=f"{name}_conv2")
        return self.normalisation(residual, name=f"{name}_bn2", ends_block=True)

    def bottleneck_residual(
        self, features: keras.KerasTensor, channels: int, *, stride: int = 1, name: str
    ) -> keras.KerasTensor:
        """Return the residual of a bottleneck: convolutions of 1, 3 and 1 pixels, the last to 4 times the channels."""
        residual = self.convolved(features, channels, 1, name=name, number="1")
        residual = self.convolved(residual, channels, 3, stride=stride, name=name, number="2")
        residual = self.convolution(residual, _BOTTLENECK_EXPANSION * channels, 1, name=f"{name}_conv3")
        return self.normalisation(residual, name=f"{name}_bn3", ends_block=True)

    def activation(self, features: keras.KerasTensor, *, name: str) -> keras.KerasTensor:
        """Set negative features to 0."""
        return keras.layers.ReLU(dtype=self.dtype, name=name)(features)

    def add(self, shortcut: keras.KerasTensor, residual: keras.KerasTensor, *, name: str) -> keras.KerasTensor:
        """Add a block's residual to its shortcut; once per block.

        With stochastic depth, block l of L loses its residual at the rate l / L * stochastic_depth, for whole samples.

        Source: Huang et al. 2016, "Deep networks with stochastic depth", equation 4; equation 5 is replaced by the
        scaling in training.
        """
        self._block += 1
        if self._stochastic_depth > 0:
            rate = self._stochastic_depth * self._block / self._blocks
            drop = SeededDrop(rate, self._block, whole_samples=True, dtype=self.dtype, name=f"{name}_drop")
            residual = drop(residual)
        return keras.layers.Add(dtype=self.dtype, name=name)([shortcut, residual])

    def head(self, features: keras.KerasTensor, *, dropout: float) -> keras.KerasTensor:
        """Map features `(batch, height, width, channels)` to logits `(batch, classes)`: mean, dropout, a dense layer.

        These layers stay in float32 under a half precision policy.

        Source: Goyal et al. 2017, section 5.1, for the normal(0.01) kernel.
        """
        features = keras.layers.GlobalAveragePooling2D(dtype="float32", name="pool")(features)
        if dropout > 0:
            features = SeededDrop(dropout, 0, whole_samples=False, dtype="float32", name="dropout")(features)
        return keras.layers.Dense(
            self._classes,
            kernel_initializer=keras.initializers.RandomNormal(stddev=0.01),
            dtype="float32",
            name="logits",
        )(features)
