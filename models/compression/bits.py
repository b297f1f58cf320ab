"""Small integers, packed to their width, and numbers as bytes."""

import tensorflow as tf


def pack(codes: tf.Tensor, width: int, axis: int = 1) -> tf.Tensor:
    """Pack uint8 codes below 2**width, `width` bits each.

    The axis, a multiple of 8 long, is cut into 8 runs; a byte takes one bit of each, so that all memory is read in
    order. One plane of bytes follows the other: the result's axis is width / 8 times as long.
    """
    runs = tf.split(codes, 8, axis)
    planes = []
    for plane in range(width):
        bits = [_shift_right(run, plane) & _one() if width > 1 else run for run in runs]
        planes.append(_combine(bits))
    return planes[0] if width == 1 else tf.concat(planes, axis)


def unpack(packed: tf.Tensor, width: int, axis: int = 1) -> tf.Tensor:
    """The uint8 codes that `pack` was given."""
    planes = tf.split(packed, width, axis) if width > 1 else [packed]
    runs = []
    for bit in range(8):
        runs.append(_combine([_shift_right(plane, bit) & _one() for plane in planes]))
    return tf.concat(runs, axis)


def spread(packed: tf.Tensor) -> tf.Tensor:
    """Bool `(rows, 8, n, ...)` from bytes `(rows, n, ...)`: the 8 runs that `pack` with width 1 put into them."""
    masks = tf.constant([1 << bit for bit in range(8)], tf.uint8, (8, *[1] * (len(packed.shape) - 1)))
    return packed[:, None] & masks != 0


def to_bytes(numbers: tf.Tensor) -> tf.Tensor:
    """`(rows, ...)` of any number type as uint8 `(rows, bytes)`."""
    raw = tf.bitcast(numbers, tf.uint8)
    rows = numbers.shape[0]
    if rows is not None and raw.shape.is_fully_defined():
        return tf.reshape(raw, (rows, raw.shape.num_elements() // rows))
    return tf.reshape(raw, (tf.shape(raw)[0], -1)) if rows is None else tf.reshape(raw, (rows, -1))


def from_bytes(raw: tf.Tensor, dtype: tf.DType, shape: tuple[int, ...]) -> tf.Tensor:
    """What `to_bytes` was given, of shape `(rows, *shape)`."""
    if dtype.size == 1:
        return tf.reshape(tf.bitcast(raw, dtype), (raw.shape[0], *shape))
    return tf.bitcast(tf.reshape(raw, (raw.shape[0], *shape, dtype.size)), dtype)


def _combine(bits: list[tf.Tensor]) -> tf.Tensor:
    """Bytes whose bit i is bits[i], 0 or 1."""
    byte = bits[0]
    for place, bit in enumerate(bits[1:], 1):
        byte = byte | tf.bitwise.left_shift(bit, tf.constant(place, tf.uint8))
    return byte


def _one() -> tf.Tensor:
    return tf.constant(1, tf.uint8)


def _shift_right(value: tf.Tensor, bits: int) -> tf.Tensor:
    return tf.bitwise.right_shift(value, tf.constant(bits, tf.uint8)) if bits else value
