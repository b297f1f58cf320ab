"""ResNet-50's training step on one GPU: TensorFlow and JAX with XLA, float32 and bfloat16, beside torch and timm.

Ours is the whole model on stored integers: upsampling of 120x120x12 in three image groups, or 224x224x3; 43 or 1,000
outputs; LARS. Each row is a fresh process. The rival, where torch and timm are installed, is timm's `resnet50` under
`torch.compile` with ready float32 images, channels last, and fused SGD. Float32 is as the frameworks run it, with TF32
on cards that have it. The share of the peak is the arithmetic of convolutions and dense layers over the card's peak.
The arithmetic is counted forward and twice backward. The peak is what the card's data sheet gives for that precision
without sparsity. `--smoke` runs one small row of each. Without a GPU the result says why there is none.
"""

import argparse
import importlib.util
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

PROJECT = Path(__file__).resolve().parents[2]
BATCHES = (128, 256, 512, 1024)
FRAMEWORKS = {"tensorflow": ("tensorflow",), "jax": ("jax",), "torch": ("torch", "timm")}
"""What must be installed for each."""
_CHILD_SECONDS = 900


@dataclass(frozen=True)
class Row:
    """One thing that is measured."""

    framework: str
    images: str
    """Height, width and bands."""
    precision: str
    batch: int
    warmup_steps: int = 5
    measured_steps: int = 10
    rounds: int = 5
    """Groups of measured steps, of whose times the median is taken."""


def shape_of(row: Row) -> tuple[int, int, int]:
    """Height, width and bands of the images."""
    height, width, bands = map(int, row.images.split("x"))
    return height, width, bands


def classes_of(row: Row) -> int:
    """43 for satellite patches (BigEarthNet), 1,000 for images of three bands (ImageNet)."""
    return 43 if shape_of(row)[2] == 12 else 1000


def measured(row: Row, step: Callable[[], Any], wait: Callable[[Any], object]) -> float:
    """Seconds per step: the median over rounds, each of which waits for its last step only."""
    for _ in range(row.warmup_steps):
        wait(step())
    seconds = []
    for _ in range(row.rounds):
        started = time.perf_counter()
        for _ in range(row.measured_steps):
            last = step()
        wait(last)
        seconds.append((time.perf_counter() - started) / row.measured_steps)
    return statistics.median(seconds)


def built(row: Row) -> tuple[Any, Any, Any, dict[str, Any], Any]:
    """Our model, optimizer and loss, and a batch as numpy arrays."""
    import numpy as np

    from conf.sections.networks import ResNetConfig
    from conf.sections.optimizers import LARSConfig
    from models.layers.preprocessing import InputGroup
    from models.losses import classification_loss
    from models.networks.model import build_model
    from models.optimizers.layerwise import variables_with_roles
    from models.optimizers.table import OPTIMIZERS

    height, width, bands = shape_of(row)
    parts = [("10m", 1, 4), ("20m", 2, 6), ("60m", 6, 2)] if bands == 12 else [("rgb", 1, bands)]
    dtype = "uint16" if bands == 12 else "uint8"
    groups = [
        InputGroup(name, (height // part, width // part, count), dtype, (100.0,) * count, (50.0,) * count)
        for name, part, count in parts
    ]
    model = build_model(
        groups,
        network="resnet",
        classes=classes_of(row),
        upsampling="nearest",
        augmentation=None,
        precision=row.precision,
        **ResNetConfig().arguments(),
    )
    config = LARSConfig()
    roles = {argument: variables_with_roles(model, chosen) for argument, chosen in config.roles().items()}
    optimizer = OPTIMIZERS["lars"](**roles, **config.arguments())
    optimizer.build(model.trainable_variables)
    optimizer.learning_rate = 0.1
    random = np.random.default_rng(0)
    images = {group.name: random.integers(0, 200, (row.batch, *group.shape)).astype(dtype) for group in groups}
    targets = (random.random((row.batch, classes_of(row))) > 0.9).astype(np.float32)
    return model, optimizer, classification_loss("multi_label"), images, targets


def operations(model: Any) -> float:
    """Multiplications and additions of a training step for one sample: three times the forward pass's."""
    from models.networks.operations import forward_flops

    return 3.0 * forward_flops(model)


def run_tensorflow(row: Row) -> dict[str, float]:
    """One training step as a graph of TensorFlow, compiled by XLA."""
    import tensorflow as tf

    tf.config.experimental.set_memory_growth(tf.config.list_physical_devices("GPU")[0], True)
    model, optimizer, loss, images, targets = built(row)
    images, targets = {name: tf.constant(value) for name, value in images.items()}, tf.constant(targets)
    variables = model.trainable_variables

    @tf.function(jit_compile=True)
    def step() -> Any:
        with tf.GradientTape() as tape:
            value = tf.reduce_mean(loss(targets, model(images, training=True)))
        optimizer.apply(tape.gradient(value, [variable.value for variable in variables]), variables)
        return value

    seconds = measured(row, step, float)
    return {
        "seconds": seconds,
        "memory_mib": tf.config.experimental.get_memory_info("GPU:0")["peak"] / 2**20,
        "operations": operations(model),
    }


def run_jax(row: Row) -> dict[str, float]:
    """The same step as a compiled function of JAX, whose state is given away at every call."""
    import jax
    import keras

    model, optimizer, loss, images, targets = built(row)
    images, targets = jax.device_put(images), jax.device_put(targets)

    def loss_of(weights: Any, others: Any) -> Any:
        logits, others = model.stateless_call(weights, others, images, training=True)
        return keras.ops.mean(loss(targets, logits)), others

    def update(state: Any) -> Any:
        weights, others, moments = state
        (value, others), gradients = jax.value_and_grad(loss_of, has_aux=True)(weights, others)
        weights, moments = optimizer.stateless_apply(moments, gradients, weights)
        return (weights, others, moments), value

    compiled = jax.jit(update, donate_argnums=0)
    parts = (model.trainable_variables, model.non_trainable_variables, optimizer.variables)
    state = tuple([variable.value for variable in part] for part in parts)

    def step() -> Any:
        nonlocal state
        state, value = compiled(state)
        return value

    seconds = measured(row, step, float)
    peak = (jax.local_devices()[0].memory_stats() or {}).get("peak_bytes_in_use", 0)
    return {"seconds": seconds, "memory_mib": peak / 2**20, "operations": operations(model)}


def run_torch(row: Row) -> dict[str, float]:
    """The rival: timm's network, compiled, with automatic bfloat16 where it is asked for."""
    import timm
    import torch

    torch.set_float32_matmul_precision("high")
    torch.backends.cudnn.benchmark = True
    height, width, bands = shape_of(row)
    network = timm.create_model("resnet50", in_chans=bands, num_classes=classes_of(row))
    network = network.to("cuda", memory_format=torch.channels_last)
    optimizer = torch.optim.SGD(
        network.parameters(), lr=0.1, momentum=0.9, nesterov=True, weight_decay=1e-4, fused=True
    )
    images = torch.randn(row.batch, bands, height, width, device="cuda").to(memory_format=torch.channels_last)
    targets = (torch.rand(row.batch, classes_of(row), device="cuda") > 0.9).float()
    forward, loss = torch.compile(network), torch.nn.BCEWithLogitsLoss()

    def step() -> Any:
        with torch.autocast("cuda", torch.bfloat16, enabled=row.precision == "bfloat16"):
            value = loss(forward(images), targets)
        optimizer.zero_grad(set_to_none=True)
        value.backward()
        optimizer.step()
        return value

    seconds = measured(row, step, float)
    return {"seconds": seconds, "memory_mib": torch.cuda.max_memory_allocated() / 2**20, "operations": 0.0}


RUNNERS = {"tensorflow": run_tensorflow, "jax": run_jax, "torch": run_torch}


def run_child(row: Row) -> dict[str, Any]:
    """Measure a row in a process of its own, whose memory is its own."""
    environment = {
        **os.environ,
        "KERAS_BACKEND": "jax" if row.framework == "jax" else "tensorflow",
        "PYTHONPATH": os.pathsep.join([str(PROJECT), os.environ.get("PYTHONPATH", "")]),
        "TF_CPP_MIN_LOG_LEVEL": "2",
        "XLA_PYTHON_CLIENT_PREALLOCATE": "false",
    }
    command = [sys.executable, __file__, "--row", json.dumps(asdict(row))]
    try:
        done = subprocess.run(
            command, env=environment, capture_output=True, text=True, timeout=_CHILD_SECONDS, check=False
        )
    except subprocess.TimeoutExpired:
        return {"error": f"no result in {_CHILD_SECONDS} s"}
    if done.returncode == 0:
        return dict(json.loads(done.stdout.splitlines()[-1]))
    out_of_memory = any(text in done.stderr for text in ("RESOURCE_EXHAUSTED", "ResourceExhausted", "OutOfMemory"))
    return {"error": "out of memory" if out_of_memory else (done.stderr.strip().splitlines() or ["no message"])[-1]}


def visible_gpu() -> tuple[str | None, str | None]:
    """Name of the first GPU, and why there is none."""
    command = ["nvidia-smi", "--query-gpu=name", "--format=csv,noheader"]
    if os.environ.get("CUDA_VISIBLE_DEVICES") in ("", "-1"):
        return None, "CUDA_VISIBLE_DEVICES hides all GPUs"
    try:
        names = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True).stdout.split("\n")
    except OSError:
        return None, "there is no nvidia-smi"
    except subprocess.SubprocessError as error:
        return None, f"nvidia-smi failed: {error}"
    return (names[0], None) if names[0] else (None, "nvidia-smi lists no GPU")


def figures(row: Row, gpu: str, values: dict[str, Any]) -> dict[str, Any]:
    """A row of the result."""
    from pipelines.training.tracing.gpu_peaks import flops_per_second_of_gpu

    if "error" in values:
        return {**asdict(row), "error": values["error"]}
    peak, rate = flops_per_second_of_gpu(gpu, row.precision), row.batch / values["seconds"]
    share = values["operations"] * rate / peak if peak and values["operations"] else None
    return {
        **asdict(row),
        "images_per_second": round(rate, 1),
        "milliseconds_per_step": round(1000 * values["seconds"], 2),
        "share_of_peak": None if share is None else round(share, 4),
        "memory_mib": round(values["memory_mib"]),
    }


def rows(*, smoke: bool) -> list[Row]:
    """What is measured, of the frameworks that are installed."""
    installed = [name for name, needs in FRAMEWORKS.items() if all(map(importlib.util.find_spec, needs))]
    if smoke:
        return [Row(name, "48x48x12", "bfloat16", 8, 1, 2, 1) for name in installed]
    return [
        Row(name, images, precision, batch)
        for images in ("120x120x12", "224x224x3")
        for precision in ("float32", "bfloat16")
        for batch in BATCHES
        for name in installed
    ]


def main() -> None:
    """Measure all rows; print a line for each, and the JSON line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--smoke", action="store_true", help="one small row for each framework")
    parser.add_argument("--row", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.row:
        row = Row(**json.loads(arguments.row))
        print(json.dumps(RUNNERS[row.framework](row)))
        return
    sys.path.insert(0, str(PROJECT))  # there may be JAX or PyTorch without this project
    gpu, reason = visible_gpu()
    if gpu is None:
        print(json.dumps({"gpu": None, "reason": reason}))
        return
    results = []
    for row in rows(smoke=arguments.smoke):
        results.append(figures(row, gpu, run_child(row)))
        print(json.dumps(results[-1]), flush=True)
    print(json.dumps({"gpu": gpu, "reason": None, "rows": results}))


if __name__ == "__main__":
    main()
