"""Models in OpenVINO's format: loaded for a fixed batch, from the bytes that the driver sends."""

import io
import tempfile
import zipfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from pipelines.scoring.predict.model import ModelDescription
from pipelines.scoring.predict.predictor import LoadSettings, Predict
from pipelines.scoring.predict.processor import Runtime, used_features

_GRAPH, _WEIGHTS = "model.xml", "model.bin"


def pack(folder: Path) -> bytes:
    """Give a saved model as bytes."""
    stream = io.BytesIO()
    with zipfile.ZipFile(stream, "w", zipfile.ZIP_STORED) as archive:
        for name in (_GRAPH, _WEIGHTS):
            archive.write(folder / name, name)
    return stream.getvalue()


def load_converted(model: ModelDescription, file: bytes, runtime: Runtime, settings: LoadSettings) -> Predict:
    """Load a model that `pack` gave.

    Args:
        model: What it takes and gives.
        file: The bytes.
        runtime: "bf16" or "int8".
        settings: Batch size and threads.
    """
    import openvino

    core = openvino.Core()
    with tempfile.TemporaryDirectory(prefix="groundswell-") as folder:
        with zipfile.ZipFile(io.BytesIO(file)) as archive:
            archive.extractall(folder)
        graph = core.read_model(Path(folder, _GRAPH))
        return compiled(core, graph, model, runtime, settings)


def compiled(core: Any, graph: Any, model: ModelDescription, runtime: Runtime, settings: LoadSettings) -> Predict:
    """Compile a graph of OpenVINO, whose inputs have the names of the image groups, for a fixed batch size."""
    graph.reshape({each.name: [settings.batch_size, *each.shape] for each in model.inputs})
    options = {
        # What is not in 8 bits is in bfloat16 too, where the processor has it.
        "INFERENCE_PRECISION_HINT": "bf16" if runtime == "bf16" or used_features("bf16") else "f32",
        "INFERENCE_NUM_THREADS": settings.threads,
        "NUM_STREAMS": 1,
        # Several workers of one host would all pin their threads to the same cores.
        "ENABLE_CPU_PINNING": False,
    }
    request = core.compile_model(graph, "CPU", options).create_infer_request()
    names = [each.name for each in model.inputs]

    def predict(images: Mapping[str, NDArray[np.generic]]) -> NDArray[np.float32]:
        request.infer({name: np.ascontiguousarray(images[name]) for name in names}, share_inputs=True)
        return np.array(request.get_output_tensor().data, np.float32)

    return predict
