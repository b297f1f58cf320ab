import gc

import numpy as np
import pytest
import tensorflow as tf

from pipelines.dataset.read.buffers import BufferPool
from pipelines.training.step.tensors import image_tensors

COLUMNS = {"a": (4, 6), "b": (0, 100)}


def test_memory_that_is_free_is_lent_again() -> None:
    pool = BufferPool(3, COLUMNS, keep=2)
    first, values = pool.lend()
    del values
    assert pool.lend()[0] is first
    assert pool.created == 1


def test_memory_is_not_lent_while_a_view_of_it_lives() -> None:
    pool = BufferPool(3, COLUMNS, keep=2)
    memory, values = pool.lend()
    value = values["b"].view(np.uint16)[1].reshape(5, 10)[2:, ::2]
    del values
    gc.collect()
    assert pool.lend()[0] is not memory
    value[:] = 7
    del value
    assert pool.lend()[0] is memory


def test_memory_is_not_lent_while_a_tensor_over_it_lives() -> None:
    pool = BufferPool(3, {"image": (4, 64)}, keep=2)
    memory, values = pool.lend()
    values["image"][:] = 5
    tensor = image_tensors({"image": values["image"].view(np.uint16).reshape(3, 4, 4, 2)})["image"]
    del values
    assert tensor.dtype == tf.uint16
    assert pool.lend()[0] is not memory
    # No copy was made: the tensor shows what is written to the memory.
    np.frombuffer(memory.pages, np.uint16)[0] = 9
    assert tensor[0, 0, 0, 0].numpy() == 9
    kept = tf.identity(tensor)
    del tensor
    assert pool.lend()[0] is not memory
    del kept
    assert pool.lend()[0] is memory


def test_values_that_are_not_aligned_are_copied() -> None:
    image = np.arange(1, 65, dtype=np.uint16)[1:33].reshape(2, 4, 4)
    tensor = image_tensors({"image": image})["image"]
    image[:] = 0
    assert tensor[0, 0, 0].numpy() == 2


def test_no_more_free_memory_is_kept_than_asked_for() -> None:
    pool = BufferPool(1, COLUMNS, keep=1)
    held = [pool.lend() for _ in range(3)]
    assert pool.created == 3
    held.clear()
    del held
    again = [pool.lend() for _ in range(2)]
    assert pool.created == 4
    del again


@pytest.mark.parametrize("columns", [{"a": (4, 1)}, {"a": (4, 63), "b": (4, 65), "c": (1, 1)}])
def test_columns_do_not_overlap_and_are_aligned(columns: dict[str, tuple[int, int]]) -> None:
    _, values = BufferPool(5, columns, keep=1).lend()
    for number, value in enumerate(values.values()):
        assert value.ctypes.data % 64 == 0
        value[:] = number
    for number, value in enumerate(values.values()):
        assert (value == number).all()
