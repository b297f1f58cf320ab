"""Scoring from files to written predictions, beside Keras's `predict`, MLflow's `spark_udf` and `predict_batch_udf`.

    make bench NAME=score
    make bench NAME=score ARGS=--smoke

A ResNet-50 is trained for one epoch on a generated archive. Ours reads a prepared dataset, or the raw archive, and
writes Parquet, on `local[2]` with one thread each, in parts of 256 samples: small beside the default, but whole batches
of 32, as nearly all of a default part are. `predict` runs in one process with two threads, its images in memory and
warm. The two functions of MLflow and Spark get the dataset's columns by `flat_columns`, because they cannot read them,
and write Parquet; they score fewer patches, in two tasks as ours. These columns are in memory before, which favours the
two functions. The start of the session and the loading and conversion of models are left out everywhere. A converted
model that `groundswell score` would refuse is left out. Rounds in turn (`ROUNDS`, 3); medians. `worker_mib` is the
largest resident set of a Python worker. It is taken after Keras has scored a quarter of the dataset, and after all of
it.

The last line is JSON. `--smoke` scores a few patches with a tiny network; its figures mean nothing.
"""

import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import Any

import mlflow
import psutil
from pyspark.ml.functions import predict_batch_udf
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql.types import ArrayType, FloatType

from conf.sections.score import ScoreConfig
from jobs.shell.session import spark_session
from pipelines.archives.bigearthnet.v2 import BigEarthNetV2
from pipelines.archives.synthetic.files import generate_bigearthnet_v2
from pipelines.dataset.prepare.writer import prepare_dataset
from pipelines.dataset.read.reader import ReaderSettings
from pipelines.scoring.identity import ScoreSettings, check_score
from pipelines.scoring.job import score
from pipelines.scoring.output.conversion import converted_model
from pipelines.scoring.output.output import begin
from pipelines.scoring.predict.convert import Acceptance, Reference, open_reference
from pipelines.scoring.predict.frames import flat_columns
from pipelines.scoring.predict.model import ModelDescription, describe
from pipelines.scoring.predict.processor import Runtime, why_unusable
from pipelines.scoring.source import Source, archive_source, dataset_source
from pipelines.storage.folder import Location
from pipelines.tracking.store.served import find_model, read_model_file
from tests.benchmarks.parts.figures import ratio

SMOKE = "--smoke" in sys.argv
PATCHES = int(os.environ.get("PATCHES", "2048"))
TRAIN, VALIDATION = (64, 16) if SMOKE else (PATCHES // 2, PATCHES // 2)
UDF_PATCHES = 8 if SMOKE else 24
ROUNDS = 1 if SMOKE else int(os.environ.get("ROUNDS", "3"))
MODEL = (
    ["model={name: resnet_cifar, depth: 2, width_factor: 0.5}"]
    if SMOKE
    else ["model.depth=50", "model.width_factor=1.0"]
)
OFFICIAL_PATCHES = 549_488
INPUTS = ("bands_10m", "bands_20m", "bands_60m")
SHAPES = [[120, 120, 4], [60, 60, 6], [20, 20, 2]]

_TRAIN = """
import json, sys
import keras, tensorflow as tf
from conf.load import load
from models.losses import classification_loss
from models.networks.model import with_probabilities
from pipelines.dataset.format.manifest import read_manifest
from pipelines.dataset.read.reader import SplitReader, training_batches
from pipelines.tracking.models.models import log_model
from pipelines.tracking.store.runs import start_run
from pipelines.training.setup.recipe import make_model
from pipelines.training.setup.description import metadata_of_model

dataset, file, *model = sys.argv[1:]
config = load("smoke", [f"dataset.path={dataset}", *model])
manifest = read_manifest(dataset)
keras.utils.set_random_seed(0)
model = make_model(config, manifest)
loss, optimizer = classification_loss(manifest.task), keras.optimizers.SGD(0.05, momentum=0.9)
optimizer.build(model.trainable_variables)

@tf.function
def step(images, targets):
    with tf.GradientTape() as tape:
        value = tf.reduce_mean(loss(targets, model(images, training=True)))
    weights = model.trainable_variables
    optimizer.apply(tape.gradient(value, [weight.value for weight in weights]), weights)
    return value

for batch in training_batches(SplitReader(dataset, "train"), seed=0, epoch=0, global_batch_size=32):
    images = {name: tf.constant(pixels) for name, pixels in batch.images.items()}
    value = step(images, tf.constant(batch.targets, tf.float32))
print(f"trained: loss {float(value):.3f}", file=sys.stderr)
served = with_probabilities(model, manifest.task)
served.save(file)
run, description = start_run("benchmark", None, {}, {}), metadata_of_model(manifest, config.input.bands, config.model)
print(json.dumps(log_model(run, served, description, None, step=1)))
"""

_PREDICT = """
import json, sys, time
import keras, numpy as np
from pipelines.dataset.read.reader import SplitReader

file, dataset = sys.argv[1:]
model = keras.saving.load_model(file, compile=False)
images = {}
for split in ("train", "validation"):
    reader = SplitReader(dataset, split)
    for name, pixels in reader.gather(np.arange(len(reader))).images.items():
        images.setdefault(name, []).append(pixels)
images = {name: np.concatenate(pixels) for name, pixels in images.items()}
model.predict({name: pixels[:64] for name, pixels in images.items()}, verbose=0)
for line in sys.stdin:
    started = time.perf_counter()
    found = model.predict(images, verbose=0)
    print("=" + json.dumps(len(found) / (time.perf_counter() - started)), flush=True)
"""


class Predict:
    """Keras's `predict` in a process of its own, which loads once and is asked for each round."""

    def __init__(self, file: Path, dataset: Path, environment: dict[str, str]) -> None:
        command = [sys.executable, "-c", _PREDICT, str(file), str(dataset)]
        self._process = subprocess.Popen(
            command,
            env=environment,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
        )

    def __call__(self) -> float:
        """Patches per second of one more pass."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write("again\n")
        self._process.stdin.flush()
        for line in self._process.stdout:
            if line.startswith("="):
                return float(line[1:])
        raise RuntimeError("predict ended")

    def close(self) -> None:
        """End the process."""
        self._process.kill()
        self._process.wait()


class Ours:
    """`groundswell score` without the command line."""

    def __init__(
        self,
        spark: SparkSession,
        model: ModelDescription,
        file: bytes,
        reference: Callable[[Runtime], Reference],
        folder: Path,
    ) -> None:
        self._spark, self._model, self._file, self._folder = spark, model, file, folder
        self._reference = reference
        self._number = 0

    def convert(self, runtime: Runtime) -> Acceptance:
        """Convert the model once for all rounds.

        Raises:
            ValueError: It is worse than Keras's by more than `groundswell score` accepts.
        """
        kept = Location.at(self._kept(runtime))
        converted = converted_model(self._model, self._file, runtime, self._reference(runtime), kept, say=print)
        assert converted is not None
        kept.make()
        converted.store(kept)
        return converted.acceptance

    def __call__(self, source: Source, runtime: Runtime) -> float:
        """Patches per second from files to written predictions, after the model is loaded in every worker."""
        settings = ScoreSettings(
            ScoreConfig.default("batch_size"),
            self._model.thresholds_or(None),
            1,
            runtime,
            None if runtime == "keras" else self._reference(runtime),
            as_delta=False,
        )
        self._score(replace(source, parts=source.parts[:2]), settings)
        return self._score(source, settings)

    def _score(self, source: Source, settings: ScoreSettings) -> float:
        self._number += 1
        output = self._folder / f"out-{self._number}"
        if settings.runtime != "keras":  # as after a stop behind the conversion
            identity, _ = check_score(self._model, source, Location.at(output), settings)
            begin(Location.at(output), identity)
            shutil.copytree(self._kept(settings.runtime), output, dirs_exist_ok=True)
        started = time.perf_counter()
        scored = score(self._spark, self._model, self._file, source, Location.at(output), settings, say=print)
        seconds = time.perf_counter() - started
        shutil.rmtree(output)
        return scored.predictions / seconds

    def _kept(self, runtime: Runtime) -> Path:
        """Folder of the converted model."""
        return self._folder / f"kept-{runtime}"


def rate_of_udf(spark: SparkSession, uri: str, dataset: Path, make: Callable[[], Any], folder: Path) -> float:
    """Patches per second of a function that takes arrays of numbers, from columns in memory to Parquet."""
    patches, function = spark.read.parquet(str(dataset / "train")), make()

    def first(rows: int) -> DataFrame:
        # `limit` gives one partition: without another shuffle after it, one task would do all the work.
        frame = flat_columns(patches.limit(rows).repartition(2), uri).cache()
        # Computed in the measured stage, they would need two more Python workers, and the four change their roles:
        # a worker that has not loaded the model would load it then.
        frame.count()
        return frame

    def write(frame: DataFrame) -> float:
        started = time.perf_counter()
        frame.select("id", function(*INPUTS).alias("probabilities")).write.mode("overwrite").parquet(
            str(folder / "udf")
        )
        return time.perf_counter() - started

    warm_up, measured = first(8), first(UDF_PATCHES)
    write(warm_up)
    return UDF_PATCHES / write(measured)


def mlflow_udf(spark: SparkSession, uri: str) -> Any:
    """MLflow's function."""
    return mlflow.pyfunc.spark_udf(spark, uri, result_type="array<float>", env_manager="local")


def batch_udf(file: str) -> Any:
    """Spark's function of batches."""

    def load() -> Any:
        import keras

        model = keras.saving.load_model(file, compile=False)

        def predict(first: Any, second: Any, third: Any) -> Any:  # Spark counts the arguments
            images = zip(INPUTS, (first, second, third), strict=True)
            return model.predict_on_batch({name: image.astype("uint16") for name, image in images})

        return predict

    return predict_batch_udf(load, return_type=ArrayType(FloatType()), batch_size=16, input_tensor_shapes=SHAPES)


def largest_worker_mib() -> float:
    """The largest resident set that a Python worker of Spark has had until now."""
    sizes = [0.0]
    for process in psutil.Process().children(recursive=True):
        with suppress(psutil.Error, OSError):  # it has ended
            if "pyspark.daemon" in " ".join(process.cmdline()):
                status = Path(f"/proc/{process.pid}/status").read_text()
                sizes.append(int(status.split("VmHWM:")[1].split()[0]) / 1024)
    return max(sizes)


def main() -> None:
    """Train, score in turn, and print one line per round and the JSON line."""
    warnings.simplefilter("ignore")
    os.environ["TF_CPP_MIN_LOG_LEVEL"] = "2"
    runtimes: list[Runtime] = ["keras"]
    rates: dict[str, list[float]] = {}
    acceptance: dict[str, dict[str, float]] = {}
    worker_mib: dict[str, float] = {}
    with tempfile.TemporaryDirectory() as temporary, spark_session("benchmark", "local[2]") as spark:
        folder = Path(temporary)
        root, dataset, file = folder / "BigEarthNet", folder / "dataset", folder / "model.keras"
        os.environ["MLFLOW_TRACKING_URI"] = f"sqlite:///{folder / 'mlflow.db'}"
        generate_bigearthnet_v2(root, train=TRAIN, validation=VALIDATION, test=0)
        prepare_dataset(spark, BigEarthNetV2(str(root)), dataset, row_group_mib=8, row_groups_per_shard=5)
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
        command = [sys.executable, "-c", _TRAIN, str(dataset), str(file), *MODEL]
        done = subprocess.run(command, env=environment, cwd=folder, capture_output=True, text=True, check=False)
        if done.returncode:
            raise RuntimeError(done.stderr[-3000:])
        print(done.stderr.strip().splitlines()[-1])
        uri = json.loads(done.stdout.splitlines()[-1])
        served = find_model(uri)
        model = describe(served)

        def reference(runtime: Runtime) -> Reference:
            return open_reference(
                Location.at(dataset),
                model,
                runtime,
                ReaderSettings(),
                calibration_samples=64 if SMOKE else ScoreConfig.default("calibration_samples"),
                acceptance_samples=min(VALIDATION, ScoreConfig.default("acceptance_samples")),
                max_f1_drop=ScoreConfig.default("max_f1_drop"),
                thresholds=model.thresholds_or(None),
            )

        ours = Ours(spark, model, read_model_file(served), reference, folder)
        prepared = dataset_source(Location.at(dataset), ReaderSettings())
        raw = archive_source(BigEarthNetV2(str(root)), samples_per_file=256)
        predict = Predict(file, dataset, environment)
        spark.conf.set("spark.sql.execution.arrow.maxRecordsPerBatch", "32")
        mlflow.set_tracking_uri(os.environ["MLFLOW_TRACKING_URI"])
        ours(replace(prepared, parts=prepared.parts[: max(1, len(prepared.parts) // 4)]), "keras")
        worker_mib["quarter"] = largest_worker_mib()
        for runtime in ("bf16",) if SMOKE else ("bf16", "int8"):
            reason = why_unusable(runtime)
            if reason is not None:
                print(f"{runtime}: {reason}")
                continue
            try:
                accepted = asdict(ours.convert(runtime))
            except ValueError as error:
                print(error)
                continue
            acceptance[runtime] = {name: accepted[name] for name in ("f1_macro", "f1_macro_keras", "same_labels")}
            runtimes.append(runtime)
        print(f"acceptance: {acceptance}", flush=True)
        try:
            predict()
            for number in range(ROUNDS):
                found = {}
                for runtime in runtimes:
                    found[f"ours {runtime}"] = ours(prepared, runtime)
                    if "all" not in worker_mib:  # with Keras, as the quarter
                        worker_mib["all"] = largest_worker_mib()
                best_now = max(runtimes, key=lambda runtime: found[f"ours {runtime}"])
                found |= {f"ours {runtime}, raw archive": ours(raw, runtime) for runtime in {"keras", best_now}}
                found["predict"] = predict()
                for name, make in (
                    ("spark_udf", partial(mlflow_udf, spark, uri)),
                    ("predict_batch_udf", partial(batch_udf, str(file))),
                ):
                    found[name] = rate_of_udf(spark, uri, dataset, make, folder)
                for name, rate in found.items():
                    rates.setdefault(name, []).append(rate)
                print(
                    f"round {number + 1}: {', '.join(f'{name} {rate:.1f}' for name, rate in found.items())}", flush=True
                )
        finally:
            predict.close()
    medians = {name: statistics.median(values) for name, values in rates.items()}
    best = max(runtimes, key=lambda runtime: medians[f"ours {runtime}"])

    figures = {
        "ratio_keras_vs_predict": ratio(rates["ours keras"], rates["predict"]),
        "ratio_best_vs_predict": ratio(rates[f"ours {best}"], rates["predict"]),
        "best_runtime": best,
        "ratio_vs_spark_udf": ratio(rates["ours keras"], rates["spark_udf"]),
        "ratio_vs_predict_batch_udf": ratio(rates["ours keras"], rates["predict_batch_udf"]),
        "patches_per_second": round(medians[f"ours {best}"], 1),
        "ratio_raw_keras_vs_predict": ratio(rates["ours keras, raw archive"], rates["predict"]),
        "raw_archive_best_patches_per_second": round(
            max(value for name, value in medians.items() if name.endswith("raw archive")), 1
        ),
        "patches_per_second_of": {name: round(value, 1) for name, value in medians.items()},
        "acceptance": acceptance,
        "worker_mib": {name: round(value) for name, value in worker_mib.items()},
        "hours_549k_extrapolated": round(OFFICIAL_PATCHES / medians[f"ours {best}"] / 3600, 2),
        "patches": TRAIN + VALIDATION,
        "cores": os.cpu_count(),
    }
    print(json.dumps(figures))


if __name__ == "__main__":
    main()
