"""A training mode is its file, its line in the table and its class of settings; nothing else knows which it has."""

import ast
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from conf.sections.mode_declaration import ModeDeclaration
from conf.sections.modes import MODES as DECLARED
from pipelines.training.modes.table import MODES

PACKAGES = ("conf", "jobs", "models", "pipelines")
OF_ALL = {"table.py", "whole_networks.py", "synchronous.py", "optimizer_state.py", "__init__.py"}
"""Files of the folder that belong to no mode but the default."""
OWN_FILES = {
    "local": {"local.py"},
    "delayed": {"delayed.py"},
    "pipeline": {"pipeline.py", "ticks.py"},
    "parameter_server": {"server_step.py", "parameter_server.py", "shard.py"},
}
STEPS = """
import keras, numpy as np, tensorflow as tf
from conf.load import load
from conf.sections.modes import MODES as DECLARED
from pipelines.training.modes.table import MODES
from pipelines.training.ranks.collective import HorovodCollective
from pipelines.training.setup.recipe import make_mode
from pipelines.training import worker
import jobs.shell.verbs

class One(HorovodCollective):
    rank, size = 0, 1
    def __init__(self): pass
    def allreduce(self, tensors, name=None): return list(tensors)
    def sum(self, values): return values
    def concatenate(self, values): return values
    def broadcast(self, variables, root=0): pass
one = One(); one.group = one.peers = one
assert set(MODES) == set(DECLARED), (MODES, DECLARED)
for name in set(MODES) - {"pipeline"}:
    keras.utils.set_random_seed(0)
    image = keras.Input((4,), name="image")
    model = keras.Model({"image": image}, keras.layers.Dense(3)(image))
    config = load("smoke", [f"training.mode={name}", "optimizer=sgd"])
    mode = make_mode(config, model, keras.losses.mean_squared_error, one, steps_per_epoch=2)
    mode.begin(0)
    mode.optimizer.learning_rate = 0.01
    batch = {"image": tf.ones((2, 4))}, tf.zeros((2, 3))
    losses = [float(mode.step(*batch)) for _ in range(3)]
    mode.come_together()
    assert losses[2] < losses[0], (name, losses)
    print(name, sorted(mode.figures()))
"""


def copy_without(name: str, project: Path, folder: Path) -> None:
    """Copy the product without the files of a mode, its line in the table and its class of settings."""
    for package in PACKAGES:
        shutil.copytree(project / package, folder / package, ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copy(project / "groundswell.py", folder)
    modes, settings = folder / "pipelines/training/modes", folder / "conf/sections/modes.py"
    for file in OWN_FILES[name]:
        (modes / file).unlink()
    table = modes / "table.py"
    lines = table.read_text().splitlines(keepends=True)
    kept = [line for line in lines if not line.startswith(f'    "{name}": ')]
    assert len(kept) == len(lines) - 1
    table.write_text("".join(kept))
    text, of_class = settings.read_text(), DECLARED[name].__name__
    (node,) = (each for each in ast.parse(text).body if isinstance(each, ast.ClassDef) and each.name == of_class)
    source = ast.get_source_segment(text, node) or ""
    settings.write_text(re.sub(rf"( \| {of_class}\b|\b{of_class} \| )", "", text.replace(source, "")))


@pytest.mark.long
@pytest.mark.parametrize("name", OWN_FILES)
def test_the_rest_trains_without_a_mode(name: str, project: Path, tmp_path: Path) -> None:
    copy_without(name, project, tmp_path)
    done = subprocess.run([sys.executable, "-P", "-c", STEPS], cwd=tmp_path, env={"PYTHONPATH": str(tmp_path)},
                          capture_output=True, text=True)  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    trained = {line.split()[0] for line in done.stdout.splitlines() if line.split()[0] in MODES}
    assert trained == set(MODES) - {name, "pipeline"}


def test_every_file_of_the_folder_belongs_to_a_mode_or_to_all(project: Path) -> None:
    assert {path.name for path in (project / "pipelines/training/modes").glob("*.py")} == OF_ALL.union(
        *OWN_FILES.values()
    )


def test_the_contract_is_what_a_declaration_has() -> None:
    contract = {name for name in vars(ModeDeclaration) if not name.startswith("_")}
    assert len(contract) == 14
    assert contract <= {name for mode in DECLARED.values() for name in dir(mode)}
