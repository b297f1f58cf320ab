"""Converts a Keras model to a smaller and faster one in OpenVINO's format, accepted only if its labels are as good.

A separate process does the work, so that the driver imports no TensorFlow and gets its memory back.
"""

import io
import json
import logging
import os
import pickle
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from pipelines.dataset.format.manifest import read_manifest
from pipelines.dataset.read.reader import ReaderSettings, SplitReader, check_readable, evaluation_batches
from pipelines.sample import TRAINING_SPLIT, VALIDATION_SPLIT
from pipelines.scoring.predict.model import ModelDescription, check_fits, predicted_classes
from pipelines.scoring.predict.predictor import Predict, load_keras
from pipelines.scoring.predict.processor import Runtime, used_features
from pipelines.storage.folder import Location

_SECONDS = 3600
_BATCH = 16
_MODEL, _REPORT = "model.zip", "report.json"
_GRAPH, _WEIGHTS = "model.xml", "model.bin"


@dataclass(frozen=True)
class Reference:
    """The labelled samples that a conversion needs."""

    dataset: Location
    fingerprint: str
    calibration_samples: int
    """Number of training samples whose activations give the ranges of 8-bit numbers."""
    acceptance_samples: int
    """Number of validation samples on which the converted model is compared with Keras."""
    max_f1_drop: float
    """Largest accepted decrease of the macro F1."""
    thresholds: tuple[float, ...]
    settings: ReaderSettings


@dataclass(frozen=True)
class Acceptance:
    """The comparison of a converted model with Keras on the same validation samples."""

    runtime: Runtime
    f1_macro: float
    f1_macro_keras: float
    samples: int
    calibration_samples: int
    """Number of calibration samples; 0 if the conversion needs none."""
    same_labels: float
    """Fraction of all decisions in which both agree."""
    openvino: str
    """Version of OpenVINO."""

    def __str__(self) -> str:
        """Return the two figures that decide."""
        return (
            f"macro F1 {self.f1_macro:.4f} with {self.runtime}, {self.f1_macro_keras:.4f} with Keras, on "
            f"{self.samples} validation samples"
        )


def open_reference(
    dataset: Location, model: ModelDescription, runtime: Runtime, settings: ReaderSettings, **chosen: Any
) -> Reference:
    """Check that a dataset is suitable to calibrate and accept a model.

    Args:
        dataset: Folder of a prepared dataset.
        model: Description of the model.
        runtime: "bf16" or "int8".
        settings: Settings for reading rows.
        **chosen: Further fields of `Reference`.

    Raises:
        FileNotFoundError: The dataset does not exist.
        ValueError: The dataset does not fit the model, or has too few samples.
    """
    manifest = read_manifest(dataset)
    where = str(dataset)
    check_fits(model, where=where, task=manifest.task, class_names=manifest.class_names, groups=manifest.groups)
    reference = Reference(dataset, manifest.fingerprint, settings=settings, **chosen)
    needed = {VALIDATION_SPLIT: ("acceptance", reference.acceptance_samples)}
    if runtime == "int8":
        needed[TRAINING_SPLIT] = ("calibration", reference.calibration_samples)
    for split, (what, samples) in needed.items():
        rows = manifest.splits[split].rows if split in manifest.splits else 0
        if rows < samples:
            raise ValueError(
                f"score.runtime={runtime} needs {samples} {split} samples (score.{what}_samples), {where} has {rows}: "
                "set score.reference_dataset to a dataset that has them"
            )
    check_readable(dataset, manifest, needed, settings)
    return reference


def convert(model: ModelDescription, file: bytes, runtime: Runtime, reference: Reference) -> tuple[bytes, Acceptance]:
    """Convert a `.keras` file in another process, and compare the result with it.

    Returns:
        Input of `load_converted`, and its comparison with Keras; `check_accepted` decides whether it is good enough.

    Raises:
        RuntimeError: The conversion failed.
    """
    with tempfile.TemporaryDirectory(prefix="groundswell-") as temporary:
        folder = Path(temporary)
        (folder / "model.keras").write_bytes(file)
        (folder / "request.pickle").write_bytes(pickle.dumps((model, runtime, reference)))
        environment = {
            **os.environ,
            "PYTHONPATH": os.pathsep.join(path for path in sys.path if path),
            "CUDA_VISIBLE_DEVICES": "-1",
            "TF_CPP_MIN_LOG_LEVEL": "2",
        }
        command = [sys.executable, "-P", "-m", "pipelines.scoring.predict.convert", temporary]
        try:
            done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=_SECONDS)
        except subprocess.TimeoutExpired:
            raise RuntimeError(
                f"score.runtime={runtime}: the conversion took more than {_SECONDS} s: lower score.acceptance_samples"
                + " or score.calibration_samples" * (runtime == "int8")
            ) from None
        if done.returncode:
            last = next(iter(done.stderr.strip().splitlines()[::-1]), "no message")
            raise RuntimeError(
                f"score.runtime={runtime}: the conversion ended with exit code {done.returncode}: {last}"
            )
        return (folder / _MODEL).read_bytes(), Acceptance(**json.loads((folder / _REPORT).read_text()))


def check_accepted(acceptance: Acceptance, max_f1_drop: float) -> None:
    """Refuse a converted model that is worse by more than the allowed difference.

    Raises:
        ValueError: It is worse; the message has both figures.
    """
    if acceptance.f1_macro < acceptance.f1_macro_keras - max_f1_drop:
        raise ValueError(
            f"score.runtime={acceptance.runtime} is refused: {acceptance}, which is more than "
            f"score.max_f1_drop={max_f1_drop} apart: use score.runtime=keras, or more score.calibration_samples"
        )


def _batches(reference: Reference, split: str, samples: int) -> Iterator[tuple[dict[str, Any], NDArray[Any], int]]:
    """Yield the first samples of a split, in batches of one size: images, targets, and the number of real samples."""
    reader = SplitReader(reference.dataset, split, reference.settings)
    left = samples
    for batch in evaluation_batches(reader, batch_size=_BATCH):
        count = min(left, int(batch.weights.sum()))
        yield batch.images, batch.targets, count
        left -= count
        if not left:
            return


def _to_graph(file: Path, model: ModelDescription) -> Any:
    """Return the model in OpenVINO's format; its inputs have the names of the image groups."""
    import keras
    import openvino

    network = keras.saving.load_model(file, compile=False)
    saved = file.with_name("saved_model")
    # Not `format="onnx"`, because it makes the constants of the normalisation required inputs.
    network.export(saved, format="tf_saved_model", verbose=False)
    graph = openvino.convert_model(saved)
    for each in model.inputs:
        ((port, _),) = [
            (port, name)
            for port in graph.inputs
            for name in {text.removeprefix("serving_default_").partition(":")[0] for text in port.get_names()}
            if name == each.name
        ]
        port.get_tensor().set_names({each.name})
    return graph


def _quantized(graph: Any, model: ModelDescription, reference: Reference) -> Any:
    import nncf

    logging.getLogger("nncf").setLevel(logging.ERROR)
    samples = [
        {each.name: np.array(images[each.name]) for each in model.inputs}
        for images, _, _ in _batches(reference, TRAINING_SPLIT, reference.calibration_samples)
    ]
    return nncf.quantize(graph, nncf.Dataset(samples), preset=nncf.QuantizationPreset.MIXED, subset_size=len(samples))


def _compare(
    predictors: dict[str, Predict], model: ModelDescription, reference: Reference
) -> tuple[dict[str, float], float]:
    """Return the macro F1 of each, and the fraction of all decisions in which they agree."""
    from models.metrics import f1_macro, multi_label_counts

    scores: dict[str, list[NDArray[np.float32]]] = {name: [] for name in predictors}
    targets = []
    for images, wanted, count in _batches(reference, VALIDATION_SPLIT, reference.acceptance_samples):
        for name, predict in predictors.items():
            scores[name].append(predict(images)[:count])
        targets.append(wanted[:count])
    truth = np.concatenate(targets)
    decisions = {
        name: predicted_classes(np.concatenate(parts), model.task, reference.thresholds).astype(np.float32)
        for name, parts in scores.items()
    }
    f1 = {name: f1_macro(multi_label_counts(each, truth)) for name, each in decisions.items()}
    one, other = decisions.values()
    return f1, float((one == other).mean())


def load_converted(model: ModelDescription, file: bytes, runtime: Runtime, batch_size: int, threads: int) -> Predict:
    """Load a model that `convert` returned.

    Args:
        model: Description of the model.
        file: The bytes that `convert` returned.
        runtime: "bf16" or "int8".
        batch_size: Number of samples of every call.
        threads: Number of threads of one operation.
    """
    import openvino

    core = openvino.Core()
    with tempfile.TemporaryDirectory(prefix="groundswell-") as folder:
        with zipfile.ZipFile(io.BytesIO(file)) as archive:
            archive.extractall(folder)
        graph = core.read_model(Path(folder, _GRAPH))
        return _compiled(core, graph, model, runtime, batch_size, threads)


def _compiled(
    core: Any, graph: Any, model: ModelDescription, runtime: Runtime, batch_size: int, threads: int
) -> Predict:
    """Compile an OpenVINO graph for a fixed batch size; its inputs have the names of the image groups."""
    graph.reshape({each.name: [batch_size, *each.shape] for each in model.inputs})
    options = {
        # Operations that are not in 8 bits use bfloat16 too, if the processor has it.
        "INFERENCE_PRECISION_HINT": "bf16" if runtime == "bf16" or used_features("bf16") else "f32",
        "INFERENCE_NUM_THREADS": threads,
        "NUM_STREAMS": 1,
        # Otherwise several workers of one host would pin their threads to the same cores.
        "ENABLE_CPU_PINNING": False,
    }
    request = core.compile_model(graph, "CPU", options).create_infer_request()

    def predict(images: Mapping[str, NDArray[np.generic]]) -> NDArray[np.float32]:
        request.infer({each.name: np.ascontiguousarray(images[each.name]) for each in model.inputs}, share_inputs=True)
        return np.array(request.get_output_tensor().data, np.float32)

    return predict


def _main(folder: Path) -> None:
    sys.modules["openvino_telemetry"] = None  # type: ignore[assignment]  # nothing is reported to anybody
    import openvino

    model, runtime, reference = pickle.loads((folder / "request.pickle").read_bytes())
    threads = len(os.sched_getaffinity(0))
    keras_file = folder / "model.keras"
    keras_predict = load_keras(model, keras_file.read_bytes(), _BATCH, threads)
    graph = _to_graph(keras_file, model)
    if runtime == "int8":
        graph = _quantized(graph, model, reference)
    openvino.save_model(graph, folder / _GRAPH, compress_to_fp16=False)
    with zipfile.ZipFile(folder / _MODEL, "w") as archive:
        for name in (_GRAPH, _WEIGHTS):
            archive.write(folder / name, name)
    predictors = {runtime: _compiled(openvino.Core(), graph, model, runtime, _BATCH, threads), "keras": keras_predict}
    f1, same = _compare(predictors, model, reference)
    acceptance = Acceptance(
        runtime,
        f1[runtime],
        f1["keras"],
        reference.acceptance_samples,
        reference.calibration_samples if runtime == "int8" else 0,
        same,
        openvino.__version__,
    )
    (folder / _REPORT).write_text(json.dumps(asdict(acceptance)))


if __name__ == "__main__":
    _main(Path(sys.argv[1]))
