"""Packing of small integers to their width, and numbers as bytes."""

import tensorflow as tf


def pack(codes: tf.Tensor, width: int, axis: int = 1) -> tf.Tensor:
    """Pack uint8 codes below 2**width into `width` bits each; the result's axis is width / 8 times as long.

    The length of the axis is a multiple of 8. If the width divides 8, the axis is cut into 8 / width runs, and a byte
    takes one code of each run: memory is read in order, and each code once. Otherwise the axis is cut into 8 runs, and
    a byte takes one bit of each run. The bytes of bit 0 come first, then those of bit 1, and so on.
    """
    if 8 % width == 0:
        return _combine(tf.split(codes, 8 // width, axis), width)
    runs = tf.split(codes, 8, axis)
    return tf.concat([_combine([_bit(run, place) for run in runs], 1) for place in range(width)], axis)


def unpack(packed: tf.Tensor, width: int, axis: int = 1) -> tf.Tensor:
    """Return the uint8 codes that `pack` received."""
    if 8 % width == 0:
        mask = tf.constant((1 << width) - 1, tf.uint8)
        return tf.concat([_shift_right(packed, place) & mask for place in range(0, 8, width)], axis)
    planes = tf.split(packed, width, axis)
    return tf.concat([_combine([_bit(plane, place) for plane in planes], 1) for place in range(8)], axis)


def spread(packed: tf.Tensor) -> tf.Tensor:
    """Return the 8 runs that `pack` with width 1 put into bytes `(rows, n, ...)`, as bool `(rows, 8, n, ...)`."""
    masks = tf.constant([1 << bit for bit in range(8)], tf.uint8, (8, *[1] * (len(packed.shape) - 1)))
    return packed[:, None] & masks != 0


def to_bytes(numbers: tf.Tensor) -> tf.Tensor:
    """Return numbers `(rows, ...)` of any type as uint8 `(rows, bytes)`."""
    raw = tf.bitcast(numbers, tf.uint8)
    rows = numbers.shape[0]
    if rows is not None and raw.shape.is_fully_defined():
        return tf.reshape(raw, (rows, raw.shape.num_elements() // rows))
    return tf.reshape(raw, (tf.shape(raw)[0], -1)) if rows is None else tf.reshape(raw, (rows, -1))


def from_bytes(raw: tf.Tensor, dtype: tf.DType, shape: tuple[int | None, ...]) -> tf.Tensor:
    """Return the numbers that `to_bytes` received, of shape `(rows, *shape)`, in which one length may be None."""
    lengths = [-1 if length is None else length for length in shape]
    if dtype.size == 1:
        return tf.reshape(tf.bitcast(raw, dtype), (raw.shape[0], *lengths))
    return tf.bitcast(tf.reshape(raw, (raw.shape[0], *lengths, dtype.size)), dtype)


def _combine(codes: list[tf.Tensor], width: int) -> tf.Tensor:
    """Return bytes that hold codes[i] from bit `i * width` on."""
    byte = codes[0]
    for place, code in enumerate(codes[1:], 1):
        byte = byte | tf.bitwise.left_shift(code, tf.constant(place * width, tf.uint8))
    return byte


def _bit(codes: tf.Tensor, place: int) -> tf.Tensor:
    return _shift_right(codes, place) & tf.constant(1, tf.uint8)


def _shift_right(value: tf.Tensor, bits: int) -> tf.Tensor:
    return tf.bitwise.right_shift(value, tf.constant(bits, tf.uint8)) if bits else value
