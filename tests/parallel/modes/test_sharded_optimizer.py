"""A sharded optimizer on real rings: what it equals, what it holds, and what its checkpoints are."""

from collections.abc import Callable, Iterator, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.parallel.ring import on_ring
from tests.parallel.trainings import arrays_of

pytestmark = [pytest.mark.parallel, pytest.mark.long, pytest.mark.timeout(600)]

STEPS = 12
OPTIMIZERS = {
    "sgd": "{name: sgd, weight_decay: 0.01}",
    "sgd, classical": "{name: sgd, nesterov: false}",
    "lars": "{name: lars, trust_coefficient: 0.02}",
    "lars, outside": "{name: lars, trust_coefficient: 0.02, variant: outside}",
    "larc": "{name: lars, trust_coefficient: 0.02, variant: larc}",
    "lars, model garden": "{name: lars, trust_coefficient: 0.02, variant: tensorflow_models, nesterov: false}",
    "lars without ratios": "{name: lars, unadapted_roles: [kernel, bias, gain, shift]}",
    # With the epsilon of their defaults, rounding of gradients near 0 would move whole steps.
    "lamb": "{name: lamb, epsilon: 0.001}",
    "adamw": "{name: adamw, epsilon: 0.001}",
    "adagrad": "{name: adagrad, epsilon: 0.001}",
}
RATES = {"lamb": 0.01, "adamw": 0.01, "adagrad": 0.01, "lars without ratios": 0.05}
BESIDE: dict[str, dict[str, Any]] = {
    "clipped": {"optimizer": "lars", "clipping": 0.05},
    "clipped, adamw": {"optimizer": "adamw", "clipping": 0.05},
    "factors": {"optimizer": "sgd", "factor": 0.25},
    "averaged": {"optimizer": "lamb", "ema": 0.9},
    "accumulated": {"optimizer": "sgd", "micro_batches": 2},
    "scaled": {"optimizer": "lars", "scaled": True},
    "constrained": {"optimizer": "adamw", "constrained": True},
}
RUNS = {name: {"optimizer": name} for name in OPTIMIZERS} | BESIDE
RUNS["every variable by itself"] = {"optimizer": "lars", "bucket_mib": 1e-6}
NAMES: dict[int, Sequence[str]] = {1: ("sgd", "lamb"), 2: ("sgd", "lars", "lamb"), 3: tuple(RUNS)}
"""What is trained on so many ranks: the parts of three ranks differ in size, and all that can differ is tried there."""


class Ring:
    """One rank's trainings on fixed batches."""

    def __init__(self) -> None:
        from pipelines.training.ranks.collective import HorovodCollective

        self.collective = HorovodCollective()

    def model(self, *, constrained: bool = False) -> Any:
        """1,966 parameters; `narrow` has one number, of which only one rank can have a part."""
        import keras

        keras.utils.set_random_seed(0)
        inputs = keras.Input((8, 8, 3), name="bands")
        features = keras.layers.BatchNormalization(name="norm")(
            keras.layers.Conv2D(8, 3, use_bias=False, name="conv")(inputs)
        )
        flat = keras.layers.Flatten()(keras.layers.Activation("relu")(features))
        limit = keras.constraints.MaxNorm(0.5) if constrained else None
        narrow = keras.layers.Dense(1, name="narrow", kernel_constraint=limit)(flat)
        return keras.Model({"bands": inputs}, keras.layers.Dense(5, name="wide")(flat) + narrow)

    def exchange(self, bucket_mib: float = 0.002) -> Any:
        """As the configuration makes it, but without XLA, which would take most of the time."""
        from models.compression.codecs.none import NoneCodec
        from models.compression.exchange.exchange import GradientExchange

        return GradientExchange(
            NoneCodec(),
            self.collective,
            dense_below=0,
            bucket_mib=bucket_mib,
            warmup_steps=0,
            rescale_residual=False,
            seed=0,
            jit_compile=False,
        )

    def batches(self, count: int) -> Iterator[tuple[Any, Any]]:
        import tensorflow as tf

        random = np.random.default_rng(1 + self.collective.rank)
        for _ in range(count):
            images = random.standard_normal((6, 8, 8, 3)).astype(np.float32)
            yield {"bands": tf.constant(images)}, tf.constant(random.integers(0, 2, (6, 5)).astype(np.float32))

    def train(
        self,
        optimizer: str,
        *,
        sharded: bool,
        bucket_mib: float = 0.002,
        clipping: float | None = None,
        factor: float | None = None,
        ema: float | None = None,
        micro_batches: int = 1,
        scaled: bool = False,
        constrained: bool = False,
    ) -> dict[str, Any]:
        """Train; the weights, moments and averages afterwards, whole, and what this rank holds of them."""
        from conf.load import resolve
        from models.compression.exchange.shards import ShardExchange
        from models.losses import classification_loss
        from pipelines.training.checkpoint.scattered import Scattered, whole_variables
        from pipelines.training.modes.synchronous import Synchronous
        from pipelines.training.ranks.stop import StopAgreement
        from pipelines.training.setup.recipe import make_optimizer
        from pipelines.training.step.accumulation import Accumulation
        from pipelines.training.step.loss_scale import LossScale
        from pipelines.training.step.step import make_accumulate, make_train_step
        from pipelines.training.step.weight_average import WeightAverage

        config = resolve("smoke", [f"optimizer={OPTIMIZERS[optimizer]}"])
        model, exchange = self.model(constrained=constrained), self.exchange(bucket_mib)
        shards = ShardExchange(exchange, self.collective, model.trainable_variables) if sharded else None
        adapt = make_optimizer(config.optimizer, model, gradient_clipping=clipping, shards=shards)
        stop = StopAgreement(self.collective, requested=lambda: False)
        loss = classification_loss("multi_label")
        accumulation = Accumulation(model, micro_batches) if micro_batches > 1 else None
        average = None if ema is None else WeightAverage(model, ema)
        scale = LossScale(initial=4.0) if scaled else None
        step = make_train_step(
            model,
            loss,
            adapt,
            exchange,
            Synchronous(adapt, exchange, stop),
            jit_compile=False,
            accumulation=accumulation,
            loss_scale=scale,
            average=average,
            rate_factors=() if factor is None else [(each, factor) for each in model.trainable_variables[:3]],
        )
        add: Any = None
        if accumulation is not None:
            add = make_accumulate(model, loss, accumulation, jit_compile=False, loss_scale=scale)
        adapt.learning_rate = RATES.get(optimizer, 0.5)
        start = [np.array(each) for each in model.trainable_variables]
        for number, batch in enumerate(self.batches(STEPS * micro_batches), start=1):
            function = add if number % micro_batches else step
            function(*batch)
        state = [
            each.gather(self.collective) if isinstance(each, Scattered) else each for each in whole_variables(adapt)
        ]
        return {
            "weights": [np.array(each) for each in model.trainable_variables],
            "start": start,
            "state": {each.path.partition("/")[2]: np.array(np.asarray(each.value)) for each in state},
            "averages": [] if average is None else [np.array(each) for each in average.variables],
            "held": sum(np.asarray(each).nbytes for each in adapt.variables[2:]),
            "payload": exchange.metrics().payload_bytes,
        }

    def broken(self, kind: str) -> str:
        """What an exchange raises of numbers whose mean is too large, or of one rank's that is not finite."""
        import tensorflow as tf

        from models.compression.exchange.shards import ShardExchange

        model, exchange = self.model(), self.exchange()
        shards = ShardExchange(exchange, self.collective, model.trainable_variables)
        gradients = [np.zeros(each.shape, np.float32) for each in model.trainable_variables]
        gradients[0].flat[5] = 3e38 if kind == "mean" else np.nan
        try:
            tf.function(shards.exchange)([tf.constant(each) for each in gradients])
        except tf.errors.InvalidArgumentError as error:
            return str(error.message)
        return ""


def trainings(names: Sequence[str]) -> dict[str, Any]:
    """Some of the trainings that the tests below compare, on one ring."""
    ring = Ring()
    found: dict[str, Any] = {
        name: {sharded: ring.train(sharded=sharded, **RUNS[name]) for sharded in (False, True)} for name in names
    }
    found["again"] = ring.train("lamb", sharded=True)
    found["mean is not finite"] = ring.broken("mean") if ring.collective.size > 1 else ""
    found["gradient is not finite"] = ring.broken("gradient")
    return found


def on_rings(*arguments: str, cases: Sequence[tuple[Any, ...]] = ((),)) -> pytest.MarkDecorator:
    """Run a test on each ring, with those cases whose first value is a training of that ring."""
    chosen = [
        pytest.param(ranks, *case, id="-".join(map(str, (ranks, *case))))
        for ranks, names in NAMES.items()
        for case in cases
        if not case or case[0] in names
    ]
    return pytest.mark.parametrize(("everyones", *arguments), chosen, indirect=["everyones"])


@cache
def trained_on(ranks: int) -> list[dict[str, Any]]:
    """What `trainings` gives on each rank."""
    return on_ring(ranks, trainings, NAMES[ranks])


@pytest.fixture
def everyones(request: pytest.FixtureRequest) -> list[dict[str, Any]]:
    """What `trainings` gives on each rank of a ring, which starts once."""
    return trained_on(request.param)


def joined(arrays: Sequence[np.ndarray]) -> np.ndarray:
    return np.concatenate([np.ravel(each) for each in arrays]).astype(np.float64)


def difference(one: Sequence[np.ndarray], other: Sequence[np.ndarray]) -> float:
    """Length of the difference over the length of the other."""
    first, second = joined(one), joined(other)
    return float(np.linalg.norm(first - second) / np.linalg.norm(second))


@on_rings("name", cases=[(name,) for name in RUNS])
def test_a_sharded_optimizer_is_the_whole_one(everyones: list[dict[str, Any]], name: str) -> None:
    for found in everyones:
        whole, sharded = found[name][False], found[name][True]
        assert difference(whole["weights"], whole["start"]) > 1e-3
        assert difference(sharded["weights"], whole["weights"]) < 1e-6
        assert (sharded["state"].keys(), list(sharded["state"])) == (whole["state"].keys(), list(whole["state"]))
        for path, value in whole["state"].items():
            assert sharded["state"][path].shape == value.shape, path
        assert difference(list(sharded["state"].values()), list(whole["state"].values())) < 1e-5
        if whole["averages"]:
            assert difference(sharded["averages"], whole["averages"]) < 1e-6
        np.testing.assert_equal(sharded["weights"], everyones[0][name][True]["weights"])


@pytest.mark.parametrize("everyones", [3], indirect=True)
def test_what_the_rings_train_differs(everyones: list[dict[str, Any]]) -> None:
    """Otherwise equal weights would say nothing about clipping, factors and the rest."""
    first = everyones[0]
    for name, run in BESIDE.items():
        if name not in ("averaged", "scaled"):
            assert difference(first[name][True]["weights"], first[run["optimizer"]][True]["weights"]) > 1e-4, name


@on_rings()
def test_a_repetition_is_the_same_bit_for_bit(everyones: list[dict[str, Any]]) -> None:
    for found in everyones:
        np.testing.assert_equal(found["again"]["weights"], found["lamb"][True]["weights"])


@on_rings("name", "moments", cases=[("sgd", 1), ("lars", 1), ("adagrad", 1), ("adamw", 2), ("lamb", 2)])
def test_a_rank_holds_its_part_of_the_moments(everyones: list[dict[str, Any]], name: str, moments: int) -> None:
    parameters = sum(each.size for each in everyones[0][name][True]["weights"])
    held = [found[name][True]["held"] for found in everyones]
    assert sum(held) == 4 * moments * parameters == everyones[0][name][False]["held"]
    # Each of 3 buckets is divided to one element.
    assert max(held) - min(held) <= 4 * moments * 3


@pytest.mark.parametrize("everyones", [2, 3], indirect=True)
def test_the_bytes_are_those_of_one_allreduce_and_of_a_few_numbers(everyones: list[dict[str, Any]]) -> None:
    whole, sharded = everyones[0]["lars"][False], everyones[0]["lars"][True]
    variables, kernels = len(whole["weights"]), 3
    assert sharded["payload"] == whole["payload"] + 4 * variables + 2 * 4 * kernels


@on_rings()
def test_what_is_not_finite_stops_every_rank_with_one_message(everyones: list[dict[str, Any]]) -> None:
    for rank, found in enumerate(everyones):
        assert f"rank {rank}: these gradients are not finite" in found["gradient is not finite"]
        assert "conv/kernel" in found["gradient is not finite"]
        if len(everyones) > 1:  # a mean of one gradient is as finite as that
            assert "codec none: these means of finite gradients are not finite" in found["mean is not finite"]
            assert "conv/kernel" in found["mean is not finite"]


def runs_of_any_number(dataset: str, output: str) -> dict[str, str]:
    """The last checkpoint of each of some trainings, by name; one of them goes on with other workers in each epoch."""
    from conf.load import load
    from jobs.shell.session import spark_session
    from jobs.train import train

    fixed = (
        f"dataset.path={dataset}",
        "model={name: resnet_cifar, depth: 2, width_factor: 0.5}",
        "training.global_batch_size=6",
        "training.batch_size_per_worker=1",  # so that batch norm sees the same on every number of workers
        "training.checkpoint_every_steps=3",
        "training.jit_compile=false",
        "schedule={recipe_epochs: null, warmup: none, decay: constant}",  # the same in runs of any length
        "optimizer.learning_rate_per_256=1.0",
    )
    sharded = "training.mode={name: synchronous, shard_optimizer: true}"

    def run(name: str, workers: int, epochs: int, *settings: str) -> tuple[str, str]:
        chosen = (f"training.output={output}/{name}", f"launch.num_workers={workers}", f"training.epochs={epochs}")
        done = train(load("smoke", [*fixed, *chosen, *settings]))
        return done.run.run_id, str(done.summary.checkpoint)

    with spark_session("sharded", "local[3]"):
        _, whole = run("whole", 1, 4)
        first, _ = run("any", 1, 1)
        run("any", 2, 2, f"training.resume_run={first}", sharded)
        run("any", 3, 3, f"training.resume_run={first}", sharded)
        _, last = run("any", 1, 4, f"training.resume_run={first}")
        _, straight = run("two", 2, 2, sharded)
        begun, _ = run("again", 2, 1, sharded)
        _, resumed = run("again", 2, 2, f"training.resume_run={begun}", sharded)
    return {"whole": whole, "any": last, "straight": straight, "resumed": resumed}


@pytest.mark.spark
def test_a_checkpoint_is_read_by_any_number_of_workers_sharded_or_not(
    in_fresh_process: Callable[..., Any], small_dataset: Path, tmp_path: Path, mlflow_store: str
) -> None:
    """1 worker, then 2, then 3, then 1 that is not sharded; and 2 with a break, which have every bit of 2 without."""
    paths = in_fresh_process(runs_of_any_number, str(small_dataset), str(tmp_path / "runs"), timeout=550)
    found = {name: arrays_of(path) for name, path in paths.items()}
    for name, arrays in found.items():
        assert list(arrays) == list(found["whole"]), name
        assert [each.shape for each in arrays.values()] == [each.shape for each in found["whole"].values()]
    assert difference(list(found["any"].values()), list(found["whole"].values())) < 1e-5
    np.testing.assert_equal(found["resumed"], found["straight"])
