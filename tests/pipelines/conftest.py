"""A real browser for the pages that pipelines write; a small model as training logs it, without training."""

import base64
import itertools
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from io import BufferedReader
from pathlib import Path
from typing import Any

import pytest

Ask = Callable[..., Any]
BROWSER = shutil.which("chromium")
OPTIONS = (
    "--headless --no-sandbox --disable-gpu --disable-quic --no-first-run --disable-background-networking "
    "--disable-component-update --disable-sync --hide-scrollbars --remote-debugging-pipe"
)
NARROW = 600
PROBE = """<script>addEventListener("load", () => {
  const all = [...document.images], seen = all.filter(image => image.offsetParent);
  const width = image => image.complete ? image.naturalWidth : 0;
  document.title = JSON.stringify({images: all.map(width), seen: seen.map(width),
  right: seen.map(image => image.getBoundingClientRect().right),
  overflow: document.documentElement.scrollWidth - document.documentElement.clientWidth,
  scripts: document.scripts.length, width: innerWidth}); });</script>"""


@pytest.fixture
def show_page(tmp_path: Path) -> Callable[..., tuple[dict[str, Any], Path]]:
    """Shows a page in a window of some width; what a script in it found, and a screenshot.

    The script finds the widths of all images, of those that are visible and where each of these ends, by how much the
    page is wider than the window, the number of scripts (1 is its own), and the width of the window.
    """
    if BROWSER is None:
        pytest.skip("chromium is not installed")

    def show(page: str, width: int, *, height: int = 1000, screenshot: Path | None = None) -> tuple[Any, Path]:
        # The page's policy stays, except that it allows the probe, and with it any script that got in.
        policy = "default-src 'none'"
        assert policy in page
        probed = tmp_path / "probed.html"
        allowed = page.replace(policy, f"{policy}; script-src 'unsafe-inline'")
        probed.write_text(allowed.replace("</body>", PROBE + "</body>"))
        picture = screenshot or tmp_path / "page.png"
        with browser(tmp_path / "profile") as ask:
            target = ask("Target.createTarget", {"url": "about:blank"})["targetId"]
            session = ask("Target.attachToTarget", {"targetId": target, "flatten": True})["sessionId"]
            # A headless window is at least 500 pixels wide, a device may be narrower.
            device = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": width < NARROW}
            ask("Emulation.setDeviceMetricsOverride", device, session)
            ask("Page.enable", {}, session)
            ask("Page.navigate", {"url": probed.as_uri()}, session, until="Page.loadEventFired")
            found = ask("Runtime.evaluate", {"expression": "document.title"}, session)["result"]["value"]
            picture.write_bytes(base64.b64decode(ask("Page.captureScreenshot", {}, session)["data"]))
        return json.loads(found), picture

    return show


@contextmanager
def browser(profile: Path) -> Iterator[Ask]:
    """Start a browser that is asked by its debugging protocol: JSON over two pipes, each message ended by a zero."""
    assert BROWSER is not None
    (theirs_in, ours_out), (ours_in, theirs_out) = os.pipe(), os.pipe()
    command = [BROWSER, *OPTIONS.split(), f"--user-data-dir={profile}"]
    process = subprocess.Popen(
        ["bash", "-c", f'exec "$@" 3<&{theirs_in} 4>&{theirs_out}', "bash", *command],
        pass_fds=(theirs_in, theirs_out),
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    os.close(theirs_in)
    os.close(theirs_out)
    numbers = itertools.count(1)
    try:
        with os.fdopen(ours_in, "rb") as answers, os.fdopen(ours_out, "wb") as questions:
            messages = _messages(answers)

            def ask(method: str, parameters: dict[str, Any], session: str | None = None, *, until: str = "") -> Any:
                question = {"id": next(numbers), "method": method, "params": parameters}
                question |= {"sessionId": session} if session else {}
                questions.write(json.dumps(question).encode() + b"\0")
                questions.flush()
                answer, happened = None, not until
                while answer is None or not happened:
                    message = next(messages)
                    assert "error" not in message, message
                    happened |= message.get("method") == until
                    answer = message["result"] if message.get("id") == question["id"] else answer
                return answer

            yield ask
    finally:
        process.kill()
        process.wait()


def _messages(stream: BufferedReader) -> Iterator[dict[str, Any]]:
    rest = b""
    while data := stream.read1(1 << 16):
        *whole, rest = (rest + data).split(b"\0")
        yield from map(json.loads, whole)
    raise AssertionError("the browser has ended")


@dataclass(frozen=True)
class Logged:
    """A logged model."""

    uri: str
    """`runs:/...`"""
    store: str
    """Of MLflow."""
    file: Path
    """Its `.keras` file."""


_LOG = """
import json, sys
from dataclasses import replace
import keras, numpy as np
from conf.load import load
from models.networks.model import inputs_of, with_probabilities
from pipelines.dataset.manifest import read_manifest
from pipelines.dataset.reader import SplitReader
from pipelines.tracking.models import log_model
from pipelines.tracking.runs import start_run
from pipelines.training.recipe import make_model
from pipelines.training.description import metadata_of_model

dataset, file, seed, fitted = sys.argv[1:]
config = load("smoke", [f"dataset.path={dataset}"])
manifest = read_manifest(dataset)
keras.utils.set_random_seed(int(seed))
model = with_probabilities(make_model(config, manifest), manifest.task)
random = np.random.default_rng(int(seed))
for layer in model.layers:  # fresh, every block is its shortcut and every class has the same probability
    for weight in layer.weights:
        if weight.path.endswith("gamma"):
            weight.assign(random.uniform(0.3, 0.7, weight.shape))
for weight in model.layers[-2].weights:
    weight.assign(random.normal(0, 1, weight.shape))
if fitted:
    reader = SplitReader(dataset, fitted)
    batch, head = reader.gather(np.arange(len(reader))), model.layers[-2]
    features = np.asarray(keras.Model(model.inputs, head.input)(inputs_of(model, batch.images), training=False))
    weights, *_ = np.linalg.lstsq(np.c_[features, np.ones(len(features))], 12.0 * batch.targets - 6, rcond=None)
    head.set_weights([weights[:-1], weights[-1]])
run = start_run("scoring", None, {}, {})
thresholds = [0.3 + 0.01 * index for index in range(len(manifest.class_names))]
metadata = replace(metadata_of_model(manifest, config), thresholds=tuple(thresholds))
uri = log_model(run, model, metadata, "scored", step=1)
model.save(file)
print(json.dumps(uri))
"""


@pytest.fixture(scope="session")
def log_model(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Logged]:
    """Logs and registers a model of random weights for a dataset, in a process of its own."""

    def log(dataset: Path, *, store: str | None = None, seed: int = 0, fitted: str = "") -> Logged:
        folder = tmp_path_factory.mktemp("model")
        store = store or f"sqlite:///{folder / 'mlflow.db'}"
        command = [sys.executable, "-c", _LOG, str(dataset), str(folder / "model.keras"), str(seed), fitted]
        environment = {**os.environ, "MLFLOW_TRACKING_URI": store, "PYTHONPATH": os.pathsep.join(sys.path)}
        done = subprocess.run(command, env=environment, cwd=folder, capture_output=True, text=True, timeout=250)
        assert done.returncode == 0, done.stderr[-4000:]
        return Logged(json.loads(done.stdout.splitlines()[-1]), store, folder / "model.keras")

    return log


@pytest.fixture(scope="session")
def logged(log_model: Callable[..., Logged], small_dataset: Path) -> Logged:
    """The model of the small dataset."""
    return log_model(small_dataset)
