"""Models in OpenVINO's format: loaded for a fixed batch size, from the bytes that the driver sends."""

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
    """Return a saved model as bytes."""
    stream = io.BytesIO()
    with zipfile.ZipFile(stream, "w", zipfile.ZIP_STORED) as archive:
        for name in (_GRAPH, _WEIGHTS):
            archive.write(folder / name, name)
    return stream.getvalue()


def load_converted(model: ModelDescription, file: bytes, runtime: Runtime, settings: LoadSettings) -> Predict:
    """Load a model that `pack` returned.

    Args:
        model: Description of the model.
        file: The bytes that `pack` returned.
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
    """Compile an OpenVINO graph for a fixed batch size; its inputs have the names of the image groups."""
    graph.reshape({each.name: [settings.batch_size, *each.shape] for each in model.inputs})
    options = {
        # Operations that are not in 8 bits use bfloat16 too, if the processor has it.
        "INFERENCE_PRECISION_HINT": "bf16" if runtime == "bf16" or used_features("bf16") else "f32",
        "INFERENCE_NUM_THREADS": settings.threads,
        "NUM_STREAMS": 1,
        # Otherwise several workers of one host would pin their threads to the same cores.
        "ENABLE_CPU_PINNING": False,
    }
    request = core.compile_model(graph, "CPU", options).create_infer_request()
    names = [each.name for each in model.inputs]

    def predict(images: Mapping[str, NDArray[np.generic]]) -> NDArray[np.float32]:
        request.infer({name: np.ascontiguousarray(images[name]) for name in names}, share_inputs=True)
        return np.array(request.get_output_tensor().data, np.float32)

    return predict
