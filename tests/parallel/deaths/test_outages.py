"""`groundswell train` on two ranks while a real MLflow server dies, with the retries that users have."""

import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from mlflow import MlflowClient

from pipelines.tracking.models.models import model_metadata
from tests.patience import patient

if TYPE_CHECKING:
    from outages.server import Door, Server

pytestmark = [pytest.mark.spark, pytest.mark.parallel, pytest.mark.long, pytest.mark.timeout(600)]

COMMAND = Path(sys.executable).parent / "groundswell"
EPOCHS = 40  # of 4 steps; a rank notices an outage after MLflow's own retries, up to 7 seconds
AWAY = "MLflow does not answer; training continues, and what it records is kept on disk"
BACK = "MLflow answers again and gets what was kept"


@pytest.fixture
def servers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> "Iterator[tuple[Server, Server, Door]]":
    """Two processes of one server, of which the first is behind a door."""
    monkeypatch.syspath_prepend(str(Path(__file__).parents[2] / "benchmarks"))
    from outages.server import Door, Server

    (tmp_path / "server").mkdir()
    first, second = Server(tmp_path / "server"), Server(tmp_path / "server")
    door = Door(first)
    monkeypatch.setenv("MLFLOW_TRACKING_URI", door.uri)
    try:
        first.start()
        second.start()
        yield first, second, door
    finally:
        door.close()
        first.kill()
        second.kill()


def train(arguments: list[str], on_line: Callable[[str], None]) -> tuple[int, str]:
    """Exit code and output of a training whose lines are seen as they come."""
    command, lines = [COMMAND, "train", "--config", "smoke", *arguments], []
    with subprocess.Popen(
        command,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env={**os.environ, "PYTHONUNBUFFERED": "1"},
    ) as driver:
        assert driver.stdout is not None
        for line in driver.stdout:
            lines.append(line)
            on_line(line)
    return driver.returncode, "".join(lines)


@pytest.mark.parametrize("comes_back", [True, False])
def test_a_server_that_dies_costs_no_record(
    servers: "tuple[Server, Server, Door]", small_dataset: Path, small_network: str, tmp_path: Path, comes_back: bool
) -> None:
    first, second, _ = servers
    output = tmp_path / "out"
    arguments = [
        *("--set", f"dataset.path={small_dataset}", "--set", f"training.output={output}"),
        *("--set", small_network, "--set", f"training.epochs={EPOCHS}"),
    ]

    def act(line: str) -> None:
        if line.startswith("epoch 1/"):
            first.kill()
        elif line.startswith(AWAY) and comes_back:
            first.port = second.port  # as after a new start, which takes longer than this training

    code, text = train(arguments, act)
    assert text.count(AWAY) == 1, text
    assert f"epoch {EPOCHS}/{EPOCHS}" in text
    assert text.count(BACK) == comes_back, text
    if comes_back:
        assert code == 0, text
    else:
        assert code == 4, text
        assert "training is done, but MLflow" in text
        first.port = second.port
        done = subprocess.run(
            [COMMAND, "sync", "--output", output], capture_output=True, text=True, timeout=patient(200)
        )
        assert done.returncode == 0, done.stdout + done.stderr
    (folder,) = (path for path in output.iterdir() if path.is_dir())
    assert not (folder / "journal").exists(), "everything is delivered"
    client = MlflowClient(second.uri)
    assert client.get_run(folder.name).info.status == "FINISHED"
    ends = [4 * epoch for epoch in range(1, EPOCHS + 1)]
    for name, steps in (("train/loss", ends), ("val/loss", ends), ("train/step_loss", list(range(4 * EPOCHS)))):
        assert [metric.step for metric in client.get_metric_history(folder.name, name)] == steps, name
    assert model_metadata(f"runs:/{folder.name}/model").optimizer_steps == 4 * EPOCHS
