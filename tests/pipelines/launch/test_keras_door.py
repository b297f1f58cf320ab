"""Horovod's Keras API on two ranks under Keras 3, as notebooks use it; one launch trains for all tests of this file."""

import os
import shutil
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest

from pipelines.launch.keras_door.keras_3 import is_keras_3
from pipelines.launch.runner import BarrierRunner

pytestmark = [pytest.mark.parallel, pytest.mark.timeout(280)]

RANKS, BATCH, STEPS, FEATURES, CLASSES = 2, 8, 4, 6, 3
Weights = list[np.ndarray]
DOORS = ("horovod.tensorflow.keras", "horovod.keras")
"""Where notebooks import Horovod's Keras API from."""


def samples() -> tuple[np.ndarray, np.ndarray]:
    """Images and classes in the order of the joined batches: those of rank 0, then those of rank 1, step by step."""
    rng, count = np.random.default_rng(5), RANKS * BATCH * STEPS
    return rng.standard_normal((count, FEATURES)).astype(np.float32), rng.integers(0, CLASSES, count)


def share(array: np.ndarray, rank: int) -> np.ndarray:
    return array.reshape(STEPS, RANKS, BATCH, *array.shape[1:])[:, rank].reshape(STEPS * BATCH, *array.shape[1:])


def network(seed: int, built: bool = True, dropout: float = 0.0) -> Any:
    from tensorflow import keras

    keras.utils.set_random_seed(seed)
    layers = [keras.layers.Dense(5, activation="tanh"), keras.layers.Dropout(dropout), keras.layers.Dense(CLASSES)]
    return keras.Sequential([*([keras.Input((FEATURES,))] if built else []), *layers])


def loss() -> Any:
    from tensorflow import keras

    return keras.losses.SparseCategoricalCrossentropy(from_logits=True)


def fitted(optimizer: Any, rank: int | None, batch: int = BATCH, epochs: int = 2, model: Any = None, **options: Any):
    """The model after training on a rank's share, or by plain Keras on all samples where `rank` is None."""
    model = model or network(seed=10 + (rank or 0))
    model.compile(optimizer, loss(), **options.pop("compile", {}))
    images, classes = (array if rank is None else share(array, rank) for array in samples())
    model.fit(images, classes, batch_size=batch, epochs=epochs, shuffle=False, verbose=0, **options)
    return model


def averaging(hvd: Any, rank: int) -> dict[str, Any]:
    """Weights of this rank, and of plain Keras on the joined batches, by what is tried."""
    import horovod.keras as hvd_keras
    import horovod.tensorflow as hvd_tensorflow
    from tensorflow.keras.optimizers import SGD

    wrap, two = hvd.DistributedOptimizer, {"backward_passes_per_step": 2}
    on_cpu = {"device_dense": "/cpu:0", "device_sparse": "/cpu:0", "sparse_as_dense": True}
    tried: dict[str, tuple[Any, tuple[float, float, int]]] = {  # and plain Keras' rate, momentum and batches in a step
        "plain": (wrap(SGD(0.1, momentum=0.9)), (0.1, 0.9, 1)),
        "horovod.keras": (hvd_keras.DistributedOptimizer(SGD(0.1, momentum=0.9)), (0.1, 0.9, 1)),
        "horovod.tensorflow": (hvd_tensorflow.DistributedOptimizer(SGD(0.1)), (0.1, 0.0, 1)),
        "devices": (wrap(SGD(0.1), **on_cpu), (0.1, 0.0, 1)),
        "process set": (wrap(SGD(0.1), process_set=hvd_tensorflow.global_process_set), (0.1, 0.0, 1)),
        "fp16": (wrap(SGD(0.1), compression=hvd.Compression.fp16), (0.1, 0.0, 1)),
        "sum": (wrap(SGD(0.1), op=hvd.Sum), (0.2, 0.0, 1)),
        "groups": (wrap(SGD(0.1), groups=2), (0.1, 0.0, 1)),
        "predivide": (wrap(SGD(0.1), gradient_predivide_factor=2.0), (0.1, 0.0, 1)),
        "two passes": (wrap(SGD(0.1), **two), (0.2, 0.0, 2)),
        "mean of two passes": (wrap(SGD(0.1), **two, average_aggregated_gradients=True), (0.1, 0.0, 2)),
    }
    first = hvd.callbacks.BroadcastGlobalVariablesCallback
    plain = {
        how: fitted(SGD(how[0], momentum=how[1]), None, how[2] * RANKS * BATCH).get_weights()
        for how in dict.fromkeys(how for _, how in tried.values())
    }
    return {
        name: (fitted(optimizer, rank, callbacks=[first(0)]).get_weights(), plain[how])
        for name, (optimizer, how) in tried.items()
    }


def callbacks(hvd: Any, rank: int, folder: str) -> dict[str, Any]:
    import tensorflow as tf
    from tensorflow import keras

    logs = Path(folder, hvd.__name__)
    rates, own = [], []
    model = network(seed=rank, built=False)
    watch = keras.callbacks.LambdaCallback(
        on_train_batch_begin=lambda batch, logs: rates.append(float(model.optimizer.learning_rate.numpy())),
        on_epoch_end=lambda epoch, logs: own.append(logs["loss"]),
    )
    order = [
        hvd.callbacks.BroadcastGlobalVariablesCallback(0),
        hvd.callbacks.LearningRateWarmupCallback(initial_lr=0.4, warmup_epochs=2, verbose=1),
        watch,
        hvd.callbacks.MetricAverageCallback(),
        *([keras.callbacks.TensorBoard(logs)] if rank == 0 else []),
    ]
    optimizer = hvd.DistributedOptimizer(keras.optimizers.SGD(0.4, momentum=0.9))
    fitted(optimizer, rank, epochs=3, model=model, callbacks=order)
    shown = [
        float(tf.make_ndarray(value.tensor))
        for path in logs.rglob("events.*")
        for event in tf.compat.v1.train.summary_iterator(str(path))
        for value in event.summary.value
        if value.tag == "epoch_loss"
    ]
    decay = hvd.callbacks.LearningRateScheduleCallback(initial_lr=0.4, multiplier=0.5, start_epoch=1)
    decay.set_model(model)
    velocity = model.optimizer.momentums[0]
    before = velocity.numpy()
    optimizer.learning_rate = 0.4
    decay.on_epoch_begin(2)
    decay.on_batch_begin(0)
    return {
        "weights of a network built by its first batch": model.get_weights(),
        "rates": rates,
        "own losses": own,
        "shown losses": shown,
        "mean losses": model.history.history["loss"],
        "reported rates": model.history.history["lr"],
        "decayed": (float(optimizer.learning_rate.numpy()), before, velocity.numpy()),
    }


def saving(hvd: Any, rank: int, folder: str) -> dict[str, Any]:
    from tensorflow import keras

    path = f"{folder}/{hvd.__name__}-{rank}.keras"
    model = fitted(hvd.DistributedOptimizer(keras.optimizers.Adam(0.01)), rank, model=network(seed=1))
    model.save(path)
    # As Horovod's documents say: the others get the weights and the optimizer's state from rank 0.
    plain, loaded = keras.models.load_model(path), hvd.load_model(path) if rank == 0 else network(seed=9)
    if rank != 0:
        loaded.compile(hvd.DistributedOptimizer(keras.optimizers.Adam(0.01)), loss())
    steps = int(loaded.optimizer.iterations.numpy())
    first = hvd.callbacks.BroadcastGlobalVariablesCallback(0)
    shares = (share(array, rank) for array in samples())
    loaded.fit(*shares, batch_size=BATCH, shuffle=False, verbose=0, callbacks=[first])
    return {
        "types": [type(each.optimizer).__name__ for each in (model, plain, loaded)],
        "plain": plain.get_weights(),
        "steps": steps,
        "jit": (model.jit_compile, loaded.jit_compile),
        "continued": [*loaded.get_weights(), *(variable.numpy() for variable in loaded.optimizer.variables)],
    }


def own_loops(rank: int) -> dict[str, Any]:
    """Custom loops, with Horovod's other two doors."""
    import horovod.keras as hvd_keras
    import horovod.tensorflow as hvd
    import tensorflow as tf
    from tensorflow import keras

    model, optimizer = network(seed=rank, dropout=0.5), keras.optimizers.SGD(0.1)
    images, classes = (share(array, rank)[:BATCH] for array in samples())
    hvd.broadcast_variables(model.variables, root_rank=0)
    hvd.broadcast_variables(model.variables, 0, inplace=True)

    @tf.function
    def step() -> None:
        groups = [model.trainable_variables[:1], model.trainable_variables[1:]]
        with hvd.DistributedGradientTape(tf.GradientTape(), groups=groups) as tape:
            value = loss()(classes, model(images, training=True))
        variables = model.trainable_variables
        optimizer.apply_gradients(zip(tape.gradient(value, variables), variables, strict=True))

    step()
    table = keras.layers.Embedding(4, 2, embeddings_initializer="ones")
    head = keras.layers.Dense(1, kernel_initializer="ones")
    both = keras.Sequential([keras.Input((1,), dtype="int32"), table, head])
    sparse = hvd_keras.PartialDistributedOptimizer(keras.optimizers.SGD(1.0), local_layers=[head])
    with tf.GradientTape() as tape:
        value = tf.reduce_sum(both(tf.constant([[rank]])))
    gradients = tape.gradient(value, both.trainable_variables)
    sparse.apply_gradients(zip(gradients, both.trainable_variables, strict=True))
    images, words = keras.Input((3,)), keras.Input((1,), dtype="int32")
    kernel = keras.layers.Dense(2, use_bias=False, kernel_initializer="ones")
    later = keras.layers.Embedding(4, 2, embeddings_initializer="ones")  # as of positions, after patches
    mixed = keras.Model([images, words], kernel(images) + keras.layers.Flatten()(later(words)))
    averaging = hvd_keras.DistributedOptimizer(keras.optimizers.SGD(1.0))
    with tf.GradientTape() as tape:
        value = tf.reduce_sum(mixed([tf.constant([[rank, 0.0, 0.0]]), tf.constant([[rank]])]))
    in_order = [*kernel.trainable_variables, *later.trainable_variables]
    gradients_of_both = tape.gradient(value, in_order)
    averaging.apply_gradients(zip(gradients_of_both, in_order, strict=True))
    return {
        "objects": hvd.allgather_object([rank] if rank == 0 else {"rank": rank}),
        "tape": model.get_weights(),
        "order": [type(gradient).__name__ == "IndexedSlices" for gradient in gradients_of_both],
        "mixed": [*kernel.get_weights(), *later.get_weights()],
        "random states": [variable.numpy().tolist() for variable in model.variables if "seed" in variable.name],
        "sparse": type(gradients[0]).__name__,
        "table": table.get_weights(),
        "local": head.get_weights(),
    }


def scaled_loss(hvd: Any, rank: int, *, own_scaler: bool) -> dict[str, Any]:
    """One step of mixed precision in which only rank 1's gradients overflow, and then one of neither.

    With `own_scaler` the user has put the scaler around the optimizer; otherwise Keras does it.
    """
    import tensorflow as tf
    from tensorflow import keras

    keras.mixed_precision.set_global_policy("mixed_float16")
    try:
        model = network(seed=1)
    finally:
        keras.mixed_precision.set_global_policy("float32")
    optimizer = hvd.DistributedOptimizer(keras.optimizers.SGD(0.1))
    model.compile(keras.optimizers.LossScaleOptimizer(optimizer) if own_scaler else optimizer, loss())
    before = model.get_weights()
    images, classes = (share(array, rank)[:BATCH] for array in samples())
    model.train_on_batch(images * (np.inf if rank == 1 else 1), classes)
    skipped = model.get_weights()
    model.train_on_batch(images, classes)
    return {
        "type": type(model.optimizer).__name__,
        "skipped": all(map(np.array_equal, before, skipped)),
        "scale": float(tf.convert_to_tensor(model.optimizer.dynamic_scale)),
        "weights": model.get_weights(),
        "moved": not all(map(np.array_equal, skipped, model.get_weights())),
    }


def mistakes(hvd: Any, rank: int) -> dict[str, str]:
    import tensorflow as tf
    from horovod.tensorflow import broadcast_variables
    from tensorflow import keras

    def error_of(call: Any) -> str:
        try:
            call()
        except (RuntimeError, TypeError, ValueError) as error:
            return f"{type(error).__name__}: {error}"
        return ""

    optimizer = hvd.DistributedOptimizer(keras.optimizers.SGD(0.1))
    one, two = tf.Variable([0.0]), tf.Variable(tf.zeros((2, 1 + rank)))
    return {
        "shapes": error_of(lambda: broadcast_variables([one, two], 0)),
        "shapes in a graph": error_of(tf.function(lambda: broadcast_variables([two], 1), autograph=False)),
        "numbers": error_of(lambda: broadcast_variables([one] * (1 + rank), 0)),
        "elastic state": error_of(lambda: hvd.elastic.KerasState(network(1), batch=0)),
        "elastic": error_of(lambda: hvd.elastic.run(print)),
        "jit": error_of(lambda: network(1).compile(optimizer, "mse", jit_compile=True)),
        "twice": error_of(lambda: hvd.DistributedOptimizer(optimizer)),
        "no optimizer": error_of(lambda: hvd.DistributedOptimizer("sgd")),
        "an idiom of Horovod": error_of(lambda: network(1).compile(optimizer, experimental_run_tf_function=False)),
    }


def train(folder: str) -> dict[str, Any]:
    import horovod.keras as hvd_keras
    import horovod.tensorflow.keras as hvd

    hvd.init()
    rank = hvd.rank()
    if rank == 0:
        network(seed=0)  # from here on, Keras names the layers and variables of the ranks differently
    return {
        "averaging": averaging(hvd, rank),
        "callbacks": {door.__name__: callbacks(door, rank, folder) for door in (hvd, hvd_keras)},
        "saving": {door.__name__: saving(door, rank, folder) for door in (hvd, hvd_keras)},
        "own loops": own_loops(rank),
        "scaled loss": scaled_loss(hvd, rank, own_scaler=False),
        "own scaler": scaled_loss(hvd, rank, own_scaler=True),
        "mistakes": mistakes(hvd, rank),
    }


@pytest.fixture(scope="module")
def lines() -> list[str]:
    """What the ranks print; `trained` fills it."""
    return []


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory, lines: list[str]) -> list[dict[str, Any]]:
    runner = BarrierRunner(None, RANKS, on_log=lambda rank, line: lines.append(line))
    return runner.run_all(train, str(tmp_path_factory.mktemp("models")))


def equal(first: Weights, second: Weights) -> bool:
    return len(first) == len(second) > 0 and all(map(np.array_equal, first, second))


@pytest.mark.long
@pytest.mark.parametrize(
    "name",
    [
        *("plain", "horovod.keras", "horovod.tensorflow", "devices", "process set", "fp16", "sum", "groups"),
        *("predivide", "two passes", "mean of two passes"),
    ],
)
def test_ranks_are_equal_and_train_as_one_rank_with_the_joined_batch(trained: list[dict[str, Any]], name: str) -> None:
    (first, joined), (second, _) = (rank["averaging"][name] for rank in trained)
    assert equal(first, second)
    for ours, plain in zip(first, joined, strict=True):
        np.testing.assert_allclose(ours, plain, atol=1e-3 if name == "fp16" else 1e-5)


@pytest.mark.long
@pytest.mark.parametrize("door", DOORS)
def test_callbacks_and_the_velocity_follows_the_rate(
    trained: list[dict[str, Any]], lines: list[str], door: str
) -> None:
    first, second = (rank["callbacks"][door] for rank in trained)
    assert equal(*(rank["weights of a network built by its first batch"] for rank in (first, second)))
    # lr = 0.4 / 2 * ((epoch + 1 / 4) / 2 * (2 - 1) + 1), and 0.4 from the third epoch on
    warm_up = [0.2 * ((step + 1) / STEPS / 2 + 1) for step in range(2 * STEPS)]
    assert first["rates"] == pytest.approx([*warm_up, *[0.4] * STEPS])
    assert first["reported rates"] == pytest.approx([0.3, 0.4, 0.4])
    assert sum("finished gradual learning rate warmup to 0.4" in line for line in lines) == len(DOORS)
    assert first["own losses"] != second["own losses"]
    assert first["mean losses"] == second["mean losses"]
    assert first["mean losses"] == pytest.approx(np.mean([first["own losses"], second["own losses"]], axis=0))
    assert first["shown losses"] == pytest.approx(first["mean losses"])
    rate, velocity, decayed = first["decayed"]
    assert rate == pytest.approx(0.2)  # 0.4 * 0.5 ** (2 - 1)
    np.testing.assert_allclose(decayed, velocity / 2, rtol=1e-6)


@pytest.mark.long
@pytest.mark.parametrize("door", DOORS)
def test_a_model_is_saved_as_one_without_horovod_and_continues_with_it(
    trained: list[dict[str, Any]], door: str
) -> None:
    first, second = (rank["saving"][door] for rank in trained)
    assert (first["types"], first["steps"], first["jit"]) == (["Adam"] * 3, 2 * STEPS, (False, False))
    assert equal(first["plain"], second["plain"])
    assert equal(first["continued"], second["continued"])
    assert first["continued"][len(first["plain"])] == 3 * STEPS, "the first state of an optimizer"
    assert not np.array_equal(first["continued"][0], first["plain"][0])


@pytest.mark.long
def test_own_loops(trained: list[dict[str, Any]]) -> None:
    first, second = (rank["own loops"] for rank in trained)
    assert equal(first["tape"], second["tape"])
    assert first["objects"] == second["objects"] == [[0], {"rank": 1}]
    assert first["random states"] != second["random states"]
    assert (first["sparse"], first["order"]) == ("IndexedSlices", [False, True])
    assert equal(first["mixed"], second["mixed"])
    # The kernel's first row has the gradient [rank, rank], of which the mean is 1/2.
    assert [part.tolist() for part in first["mixed"]] == [
        [[0.5, 0.5], [1, 1], [1, 1]],
        [[0.5, 0.5], [0.5, 0.5], [1, 1], [1, 1]],
    ]
    # Row r of the table has the gradient [1, 1] on rank r alone: its mean is 1/2.
    assert equal(first["table"], second["table"])
    assert first["table"][0].tolist() == [[0.5, 0.5], [0.5, 0.5], [1, 1], [1, 1]]
    # The head stays local: its gradients [1, 1] and 1 are divided by the number of ranks.
    assert [part.tolist() for part in first["local"]] == [[[0.5], [0.5]], [-0.5]]


@pytest.mark.long
@pytest.mark.parametrize("scaler", ["scaled loss", "own scaler"])
def test_an_overflow_on_one_rank_is_skipped_by_all(trained: list[dict[str, Any]], scaler: str) -> None:
    first, second = (rank[scaler] for rank in trained)
    assert (first["type"], first["skipped"], first["moved"]) == ("LossScaleOptimizer", True, True)
    assert first["scale"] == second["scale"] == 2.0**14  # half of Keras's 2 ** 15
    assert equal(first["weights"], second["weights"])


@pytest.mark.long
def test_xla_is_off_and_said_once_and_mistakes_are_named(trained: list[dict[str, Any]], lines: list[str]) -> None:
    assert sum('jit_compile="auto" becomes False' in line for line in lines) == 1
    mistakes, others = (rank["mistakes"] for rank in trained)
    assert mistakes == others
    for name, words in {
        "shapes": "1 rank 1 has float32 (2, 2), but rank 0, which sends, has float32 (2, 1)",
        "shapes in a graph": "0 rank 0 has float32 (2, 1), but rank 1, which sends, has float32 (2, 2)",
        "numbers": "1 rank 1 has float32 (1,), but rank 0, which sends, has no variable",
    }.items():
        assert mistakes[name].startswith(f"ValueError: broadcast_variables: at position {words}: every rank must ")
    assert mistakes["elastic state"] == mistakes["elastic"]
    assert mistakes["elastic"].startswith("RuntimeError: horovod.elastic does not work here, ")
    assert "jit_compile=True with a DistributedOptimizer" in mistakes["jit"]
    assert mistakes["twice"] == "ValueError: this SGD is already a DistributedOptimizer: wrap it once"
    assert mistakes["no optimizer"].startswith("TypeError: DistributedOptimizer was given builtins.str")
    assert mistakes["an idiom of Horovod"] == ""


@pytest.mark.usefixtures("new_interpreters")
def test_a_function_without_keras_does_not_pay_for_it() -> None:
    assert BarrierRunner(None, 1).run(lambda: sorted({"tensorflow", "keras", "horovod"} & set(sys.modules))) == []


def train_with_tf_keras() -> tuple[str, Weights, dict[str, list[float]]]:
    """A classic notebook: everything comes from `tensorflow.keras`, which is tf_keras here."""
    import horovod.tensorflow.keras as hvd
    from tensorflow import keras

    hvd.init()
    model, optimizer = network(seed=hvd.rank()), hvd.DistributedOptimizer(keras.optimizers.SGD(0.1, momentum=0.9))
    model.compile(optimizer, loss(), experimental_run_tf_function=False)
    callbacks = [
        hvd.callbacks.BroadcastGlobalVariablesCallback(0),
        hvd.callbacks.MetricAverageCallback(),
        hvd.callbacks.LearningRateWarmupCallback(initial_lr=0.1, warmup_epochs=2),
    ]
    images, classes = (share(array, hvd.rank()) for array in samples())
    history = model.fit(images, classes, batch_size=BATCH, epochs=3, verbose=0, callbacks=callbacks)
    return type(model).__module__, model.get_weights(), history.history


@pytest.mark.long
def test_tf_keras(tmp_path: Path) -> None:
    series, pip = ".".join(version("tensorflow-cpu").split(".")[:2]), shutil.which("pip") or "pip"
    command = [pip, "install", "--quiet", "--no-deps", "--target", str(tmp_path), f"tf_keras=={series}.*"]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        pytest.skip(f"tf_keras cannot be installed: {done.stderr.strip().splitlines()[-1:]}")
    python_path = os.pathsep.join([str(tmp_path), *filter(None, sys.path)])
    runner = BarrierRunner(None, RANKS, env={"TF_USE_LEGACY_KERAS": "1", "PYTHONPATH": python_path})
    (module, first, history), (_, second, other) = runner.run_all(train_with_tf_keras)
    assert module.startswith("tf_keras.")
    assert equal(first, second)
    assert history == other
    assert history["lr"] == pytest.approx([0.075, 0.1, 0.1])


@pytest.mark.parametrize(
    ("name", "version_of_it", "is_3"),
    [
        ("keras._tf_keras.keras", "3.15.1", True),
        ("keras._tf_keras.keras", None, True),  # `tensorflow.keras` of TensorFlow 2.16
        ("tf_keras.api._v2.keras", "2.21.0", False),
        ("tf_keras.api._v2.keras", None, False),
    ],
)
def test_keras_3_is_told_from_tf_keras_also_without_a_version(name: str, version_of_it: str | None, is_3: bool) -> None:
    module = ModuleType(name)
    if version_of_it is not None:
        vars(module)["__version__"] = version_of_it
    assert is_keras_3(module) == is_3
