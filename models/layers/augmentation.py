"""Augmentation without state, the same on any number of ranks and after a resume: flips, quarter turns and mixup."""

from typing import TYPE_CHECKING, Any

import keras
import numpy as np
from numpy.typing import ArrayLike, NDArray

from models.layers.backend import ON_TENSORFLOW, require_tensorflow
from models.layers.drop import sample_seeds

if TYPE_CHECKING or ON_TENSORFLOW:
    import tensorflow as tf

ELEMENTS = {"flips": 4, "dihedral": 8}
"""Number of symmetries of the square from which each augmentation draws, all with the same probability."""

_FLIP_COLUMNS, _FLIP_ROWS, _TRANSPOSE = 1, 2, 4

_FIRST_STREAM = 2**32
"""Offset of mixup's seeds; seeds of a training are below it, so that augmentation draws other numbers."""


def augmentation_seeds(seed: int, epoch: int, rows: ArrayLike) -> NDArray[np.int32]:
    """Draw one seed per sample, a pure function of the training's seed, the epoch and the sample's row.

        top 32 bits of mix(mix(mix(seed) + epoch) + row),  mix the SplitMix64 generator's output function

    Args:
        seed: Seed of the training, in [0, 2**64).
        epoch: Number of the epoch, in [0, 2**64).
        rows: Row of each sample in the dataset's split, independent of the rank that reads it: integers of any shape.

    Returns:
        Seeds of the shape of `rows`; every bit is as good as random.

    Raises:
        ValueError: a seed or epoch out of range, or rows that are not integers.

    Source: Steele, Lea, Flood 2014 (SplittableRandom); Stafford 2011, variant 13, for the constants.
    """
    for name, value in (("seed", seed), ("epoch", epoch)):
        if not 0 <= value < 2**64:
            raise ValueError(f"{name} must be in [0, 2**64), got {value}")
    numbers = np.asarray(rows)
    if not np.issubdtype(numbers.dtype, np.integer):
        raise ValueError(f"rows must be integers, got {numbers.dtype}")
    # Arrays throughout: numpy lets arrays overflow silently, and warns for scalars.
    key = _mix(_mix(np.array([seed], np.uint64)) + np.array([epoch], np.uint64))
    words = _mix(key + numbers.astype(np.uint64).reshape(-1))
    return (words >> np.uint64(32)).astype(np.uint32).view(np.int32).reshape(numbers.shape)


class SeededAugmentation(keras.layers.Layer):  # type: ignore[misc]
    """Changes the images of training batches by the seeds of their samples; a subclass has `augmented`.

    Raises:
        ValueError: when called in training, missing seeds, or another backend of Keras than TensorFlow.
    """

    def __init__(self, subject: str, **kwargs: Any) -> None:
        """Take the name of the augmentation in errors."""
        # There is no autocast: half floats have neither the range nor the precision of stored pixels.
        super().__init__(autocast=False, **kwargs)
        self._subject = subject

    def call(self, images: dict[str, Any], seeds: Any = None, training: bool | None = None) -> dict[str, Any]:
        """Return the images; in training they are augmented.

        Args:
            images: Images by group name, `(batch, height, width, bands)`, of any dtype.
            seeds: One per sample, int32 `(batch,)`; only needed in training.
            training: Whether to augment.
        """
        if not training:
            return images
        require_tensorflow(self._subject)
        if seeds is None:
            raise ValueError(f"{self._subject} needs seeds, one per sample, when training: got none")
        return self.augmented(images, tf.convert_to_tensor(seeds))

    def augmented(self, images: dict[str, Any], seeds: "tf.Tensor") -> dict[str, Any]:
        """Return the augmented images, with the same groups, shapes and dtypes."""
        raise NotImplementedError

    def compute_output_spec(self, images: dict[str, Any], seeds: Any = None, training: Any = None) -> dict[str, Any]:
        """Return the shapes and dtypes of the images, which do not change."""
        return {name: keras.KerasTensor(group.shape, group.dtype) for name, group in images.items()}


@keras.saving.register_keras_serializable(package="groundswell")
class Augmentation(SeededAugmentation):
    """Applies one symmetry of the square to every sample, the same to all image groups of the sample.

        element = seed mod (4 for "flips", 8 for "dihedral")
        transpose if element & 4, then reverse the rows if element & 2, then the columns if element & 1

    So 1 mirrors left to right, 2 mirrors top to bottom, and 3 is the half turn. Element 5 is the quarter turn
    clockwise, and 6 counter-clockwise; 4 and 7 mirror at the two diagonals. Images keep dtype and shape, under any
    dtype policy.

    Args:
        kind: "flips" or "dihedral".

    Raises:
        ValueError: another kind; when built, images that are not square, for "dihedral"; when called in training,
            missing seeds.
    """

    def __init__(self, kind: str, **kwargs: Any) -> None:
        super().__init__(f"augmentation {kind!r}", **kwargs)
        if kind not in ELEMENTS:
            raise ValueError(f"augmentation must be one of {tuple(ELEMENTS)}, got {kind!r}")
        self.kind = kind

    def build(self, images_shape: dict[str, Any], seeds_shape: Any = None) -> None:
        """Check that images for quarter turns are square."""
        for name, (_, height, width, _) in images_shape.items():
            if self.kind == "dihedral" and height != width:
                raise ValueError(
                    f"augmentation 'dihedral' turns images by 90 degrees and needs squares, but group {name!r} has "
                    f"{height} x {width} pixels: choose 'flips' or 'none'"
                )
        self.built = True

    def augmented(self, images: dict[str, Any], seeds: "tf.Tensor") -> dict[str, Any]:
        """Return the images `(batch, height, width, bands)`, flipped and turned."""
        # The lowest bits of the seeds, for either sign.
        elements = tf.bitwise.bitwise_and(seeds, ELEMENTS[self.kind] - 1)
        return {
            name: gather_pixels(group, tf.gather(_source_pixels(group, ELEMENTS[self.kind]), elements))
            for name, group in images.items()
        }

    def get_config(self) -> dict[str, Any]:
        """Return the arguments of `__init__`."""
        return {**super().get_config(), "kind": self.kind}


@keras.saving.register_keras_serializable(package="groundswell")
class AugmentedModel(keras.Model):  # type: ignore[misc]
    """Passes the seeds of samples to the layers that draw from them; outside training it only applies `network`.

    These are the augmentation, which comes before the network, and layers in the network such as `SeededDrop`.

    Called as `model(images, training=True, seeds=seeds)` or `model(images)`. Its variables are those of `network`, in
    the same order, so a checkpoint fits both. Predictions are served by `network` alone.

    Args:
        network: A built model of a dict of image groups.
        augmentation: Layer of image groups and seeds, such as `Augmentation`; without variables. None: no augmentation.
    """

    def __init__(self, network: keras.Model, augmentation: keras.layers.Layer | None, **kwargs: Any) -> None:
        super().__init__(autocast=False, **kwargs)
        self.network, self.augmentation = network, augmentation
        if augmentation is not None:
            augmentation.build({name: tensor.shape for name, tensor in network.input.items()})
        self.built = True

    @property
    def input(self) -> dict[str, Any]:
        """The network's inputs, by group name."""
        return dict(self.network.input)

    def call(self, images: dict[str, Any], training: bool | None = None, seeds: Any = None) -> Any:
        """Apply the network to the images; in training, to the augmented images."""
        if self.augmentation is not None:
            images = self.augmentation(images, seeds=seeds, training=training)  # Keras 3.2: no None without its name
        with sample_seeds(seeds):
            return self.network(images, training=training)

    def get_config(self) -> dict[str, Any]:
        """Return the arguments of `__init__`, the network serialised."""
        return {
            "name": self.name,
            "network": keras.saving.serialize_keras_object(self.network),
            "augmentation": keras.saving.serialize_keras_object(self.augmentation),
        }

    @classmethod
    def from_config(cls, config: dict[str, Any], custom_objects: Any = None) -> "AugmentedModel":
        """Return the model that `get_config` describes, with new weights."""
        parts = {
            key: keras.saving.deserialize_keras_object(config[key], custom_objects=custom_objects)
            for key in ("network", "augmentation")
        }
        return cls(**{**config, **parts})


def gather_pixels(images: Any, sources: Any, is_inside: Any = None) -> Any:
    """Return images of the same shape and dtype, from other pixels of each image.

    Args:
        images: `(batch, height, width, bands)`, of any dtype.
        sources: Place of each pixel's source, int32 `(batch, height * width)`; pixels are numbered row by row.
        is_inside: Bool `(batch, height * width, 1)`, false for pixels that become 0; None: no pixel does.
    """
    height, width, bands = images.shape[1:]
    pixels = tf.reshape(images, (-1, height * width, bands))
    if images.dtype.is_integer and images.dtype.size < tf.int32.size:
        # TensorFlow cannot gather integers shorter than int32 on a GPU: it would copy the images to the host and back.
        pixels = tf.cast(pixels, tf.int32)
    moved = tf.gather(pixels, sources, batch_dims=1)
    if is_inside is not None:
        moved = tf.where(is_inside, moved, tf.zeros_like(moved))
    return tf.reshape(tf.cast(moved, images.dtype), (-1, height, width, bands))


def _source_pixels(images: Any, count: int) -> NDArray[np.int32]:
    """Return the source of each pixel for each symmetry, `(count, height * width)`; pixels are numbered row by row."""
    height, width, _ = images.shape[1:]
    sources = []
    for element in range(count):
        pixels = np.arange(height * width, dtype=np.int32).reshape(height, width)
        pixels = pixels.T if element & _TRANSPOSE else pixels
        pixels = pixels[::-1] if element & _FLIP_ROWS else pixels
        pixels = pixels[:, ::-1] if element & _FLIP_COLUMNS else pixels
        sources.append(pixels.reshape(-1))
    return np.stack(sources)


def _mix(words: NDArray[np.uint64]) -> NDArray[np.uint64]:
    words = words + np.uint64(0x9E3779B97F4A7C15)
    words = (words ^ (words >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    words = (words ^ (words >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return words ^ (words >> np.uint64(31))


def mixing_coefficients(alpha: float, *, seed: int, epoch: int, rows: ArrayLike) -> NDArray[np.float32]:
    """Draw the weight of each sample in its mixture from Beta(alpha, alpha).

    It is a pure function of the training's seed, the epoch and the sample's row.

        with u, v uniform in (0, 1):  x = u^(1/alpha),  y = v^(1/alpha);  x / (x + y) if x + y <= 1, else draw again

    Args:
        alpha: Shape of the distribution, in (0, 1]; the smaller, the nearer to 0 or 1 most weights are.
        seed: Seed of the training, in [0, 2**32).
        epoch: Number of the epoch.
        rows: Row of each sample in the dataset's split.

    Returns:
        Weights in [0, 1], of the shape of `rows`.

    Raises:
        ValueError: alpha out of range.

    Source: Jöhnk 1964, for the beta distribution from uniform numbers.
    """
    if not 0 < alpha <= 1:
        raise ValueError(f"alpha must be in (0, 1], got {alpha}")
    shape = np.shape(rows)
    coefficients, drawn, stream = np.zeros(shape), np.zeros(shape, bool), _FIRST_STREAM + seed
    while not drawn.all():
        # Logarithms are used because powers of a small alpha exceed the range of floats.
        log_x = np.log(_uniform(stream, epoch, rows)) / alpha
        log_y = np.log(_uniform(stream + _FIRST_STREAM, epoch, rows)) / alpha
        accepted = ~drawn & (np.logaddexp(log_x, log_y) <= 0)
        coefficients = np.where(accepted, np.exp(-np.logaddexp(0.0, log_y - log_x)), coefficients)
        drawn |= accepted
        stream += 2 * _FIRST_STREAM
    return coefficients.astype(np.float32)


def mix_pairs(values: "tf.Tensor", coefficients: "tf.Tensor") -> "tf.Tensor":
    """Return, for each sample of a batch, c * (its value) + (1 - c) * (its partner's).

    Partners are neighbours: samples 0 and 1, 2 and 3, and so on. Every epoch has a new random order, so these pairs are
    as random as any others. They do not depend on how a global batch is divided into batches of even size.

    Args:
        values: `(batch, ...)`, of an even batch size; images in any stored dtype, or targets in float32.
        coefficients: c, float32 `(batch,)`.

    Returns:
        Values of the shape and dtype of `values`; integers are rounded to the nearest.

    Raises:
        ValueError: Keras's backend is not TensorFlow.

    Source: Zhang et al. 2018, "mixup: Beyond Empirical Risk Minimization", equation 2.
    Differs: every sample has its own c; the authors' code has one per batch. Stored pixels are mixed, not normalised
    ones. All steps from pixels to the network's input are linear and keep a constant. So the result is the same up to
    the rounding of half a stored unit. The mixture is then augmented as one image.
    """
    require_tensorflow("mixup")
    mixed = tf.cast(values, tf.float32)
    pairs = tf.reshape(mixed, (-1, 2, *values.shape[1:]))
    partners = tf.reshape(tf.reverse(pairs, [1]), tf.shape(mixed))
    weights = tf.reshape(coefficients, (-1, *(1,) * (len(values.shape) - 1)))
    mixed = weights * mixed + (1.0 - weights) * partners
    return tf.cast(tf.round(mixed) if values.dtype.is_integer else mixed, values.dtype)


def _uniform(stream: int, epoch: int, rows: ArrayLike) -> NDArray[np.float64]:
    return (augmentation_seeds(stream, epoch, rows).view(np.uint32) + 0.5) / 2.0**32
