"""The kernels in C++: the same as TensorFlow's operations, on every processor, and not needed."""

import runpy
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import tensorflow as tf

from models.compiled import Library
from models.compression import kernels

SHAPES = ((40, 30), (3, 3, 6, 10), (1, 1), (7, 13), (2, 77), (400, 300))
METHODS = {
    "onebit": {},
    "topk": {"density": 0.01},
    "topk by step": {"density": 0.01, "density_schedule": [(1, 0.1)]},
    "dgc": {"density": 0.01},
    "powersgd": {"rank": 3},
    "powersgd by step": {"rank": 5, "rank_schedule": [(1, 2)]},
}
needs_compiler = pytest.mark.skipif(shutil.which("g++") is None, reason="no g++")
# Where there is one, the library must be there too.
needs_library = pytest.mark.skipif(
    shutil.which("g++") is None and not kernels.LIBRARY.exists(), reason="the project was installed without a compiler"
)


def run(make_ring, random_gradients, name, size):
    ring, results = make_ring(size, name.split()[0], METHODS[name]), []
    for step in range(3):
        results += ring.exchange(random_gradients(size, SHAPES, seed=step), learning_rate=1.0 + step)
    return ring, results, [entry.variable.numpy() for exchange in ring.exchanges for entry in exchange.state]


@needs_library
@pytest.mark.parametrize("size", [1, 3])
@pytest.mark.parametrize("name", METHODS)
def test_results_and_states_are_those_without(name, size, make_ring, random_gradients, monkeypatch):
    ring, results, states = run(make_ring, random_gradients, name, size)
    monkeypatch.setattr(kernels, "load", lambda: None)
    plain, expected, expected_states = run(make_ring, random_gradients, name, size)
    assert ring.exchanges[0].codec.checks_finite
    assert not plain.exchanges[0].codec.checks_finite
    for own, other in zip(results + states, expected + expected_states, strict=True):
        np.testing.assert_allclose(own, other, rtol=2e-3, atol=2e-4 * max(0.05, np.abs(other).max()))
    sent = [exchange.metrics().payload_bytes for exchange in (ring.exchanges[0], plain.exchanges[0])]
    assert sent[0] == sent[1]


KINDS = {
    "normal": lambda values: values,
    "ties": lambda values: np.round(values),
    "few": lambda values: values * (np.arange(10000) % 1009 == 0),
    "zeros": lambda values: 0 * values,
    "unlike the sample": lambda values: np.where(np.arange(10000) % 61, values, 100),
    "tiny": lambda values: values * 1e-30,
}


@needs_library
@pytest.mark.parametrize("count", [1, 5, 63, 64, 4000, 9999, 10000])
@pytest.mark.parametrize("kind", KINDS)
def test_the_largest_are_exact(kind, count):
    values = KINDS[kind](np.random.default_rng(count).normal(size=10000)).astype(np.float32)
    order = np.argsort(-np.abs(values), kind="stable")[:count]
    places, sent, remainder, finite = kernels.load().groundswell_encode_largest(values, (), 1.0, 1, 10000, count)
    np.testing.assert_array_equal(places[0], np.sort(order))
    np.testing.assert_array_equal(sent[0], values[np.sort(order)])
    values[order] = 0
    np.testing.assert_array_equal(remainder, values)
    assert finite


@needs_library
@pytest.mark.parametrize("wrong", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("place", [0, 61, 9999])
def test_what_is_not_finite_is_found(wrong, place):
    values = np.ones(10000, np.float32)
    values[place] = wrong
    operations, matrix = kernels.load(), values.reshape(100, 100)
    assert not operations.groundswell_encode_largest(values, (), 1.0, 1, 10000, 10).finite
    assert not operations.groundswell_encode_columns(matrix, (), 1.0, 1).finite
    assert not operations.groundswell_project(matrix, (), 1.0, np.zeros((100, 2), np.float32)).finite
    # And what is only huge is finite.
    huge = np.full((100, 100), 3e38, np.float32)
    assert operations.groundswell_encode_columns(huge, (), 1.0, 1).finite
    np.testing.assert_allclose(operations.groundswell_encode_columns(huge, (), 1.0, 1).upper, 3e38, rtol=1e-6)


ONE = np.ones((1, 1), np.float32)


@needs_library
@pytest.mark.parametrize(
    ("kernel", "arguments", "message"),
    [
        *(("decode_largest", ([[place]], ONE, 16, 16), "a place out of range") for place in (-1, 16, 1 << 30)),
        ("decode_largest", ([[0]], ONE, 16, 17), "messages of too few parts"),
        ("decode_columns", (np.zeros((1, 2, 1), np.uint8), ONE, ONE, 8, 1), "a message for other rows"),
        ("decode_columns", (np.zeros((1, 1, 1), np.uint8), ONE, ONE, 8, 2), "a message for fewer columns"),
        ("encode_columns", (tf.ones((4, 4)), tf.ones((4, 3)), 1.0, 1), "the residual has another shape"),
        ("expand", (tf.ones((4, 3, 0)), tf.ones((4, 3, 0))), "a tensor with another number of axes"),
        ("expand", (tf.ones((4, 2)), tf.ones((4, 3))), "factors of different ranks"),
    ],
)
def test_wrong_messages_are_refused(kernel, arguments, message):
    with pytest.raises(tf.errors.InvalidArgumentError, match=message):
        getattr(kernels.load(), f"groundswell_{kernel}")(*arguments)


@pytest.mark.long
@needs_library
def test_a_message_that_no_memory_holds_is_refused():
    with pytest.raises(tf.errors.ResourceExhaustedError):
        kernels.load().groundswell_encode_largest(tf.ones(4), (), 1.0, (1 << 31) - 1, 1 << 20, 1 << 20)


@needs_library
def test_messages_that_end_with_a_place_again():
    # As TensorFlow's operations fill them up.
    places, values = tf.constant([[7, 100, 7, 7]]), tf.constant([[5.0, 2.0, 0.0, 0.0]])
    joined = kernels.load().groundswell_decode_largest(places, values, 128, 128).numpy()
    np.testing.assert_array_equal(np.flatnonzero(joined), [7, 100])
    np.testing.assert_array_equal(joined[[7, 100]], [5, 2])


@needs_library
def test_memory_is_used_again_where_nothing_else_needs_it():
    operations = kernels.load()
    velocity = tf.Variable(tf.ones(1 << 16))

    @tf.function
    def step():
        return operations.groundswell_clear(velocity.read_value() * 2, [[3]], 1 << 16)

    cleared = step().numpy()
    assert (cleared[3], cleared.sum()) == (0, 2 * (1 << 16) - 2)
    # And not where something does.
    value = tf.ones(16)
    operations.groundswell_clear(value, [[3]], 16)
    np.testing.assert_array_equal(value, np.ones(16))


def test_disabled(monkeypatch, make_codec):
    monkeypatch.setattr(kernels, "is_disabled", False)
    kernels.disable()
    assert kernels.load() is None
    assert not make_codec("powersgd").checks_finite


@needs_compiler
@pytest.mark.parametrize("source", sorted(kernels.LIBRARY.parent.glob("*.cc")), ids=lambda path: path.name)
def test_declarations_are_tensorflows(source):
    include = tf.sysconfig.get_include()
    command = ["g++", "-std=c++17", "-fsyntax-only", "-Wall", "-Wextra", "-Werror", str(source)]
    # Two declarations of a function that differ are an error of the compiler's.
    for extra in (["-DGROUNDSWELL_TF_HEADERS", f"-isystem{include}"], []):
        said = subprocess.run([*command, *extra], capture_output=True, text=True, check=False)
        assert (said.returncode, said.stderr) == (0, "")


@pytest.mark.long  # compiles the library
@needs_library
@needs_compiler
def test_the_plainest_processor_gives_the_same_digits(tmp_path):
    library = Library(kernels.LIBRARY.parent, "libtensorflow_framework.so.2")
    library.build(tmp_path / "plain.so", ["-DGROUNDSWELL_ONE_TARGET"])
    script, output = Path(__file__).with_name("kernel_digits.py"), tmp_path / "plain.npz"
    subprocess.run([sys.executable, str(script), str(tmp_path / "plain.so"), str(output)], check=True)
    plain, usual = np.load(output), runpy.run_path(str(script))["digits"](kernels.load())
    assert set(plain.files) == set(usual)
    assert len(usual) > 15
    for name, values in usual.items():
        np.testing.assert_array_equal(values.view(np.uint8), plain[name].view(np.uint8), err_msg=name)
