"""Training whose output is on storage that takes whole files only, as a volume of Databricks."""

import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from pipelines.storage.whole_files import copy_folder, copy_whole, takes_whole_files_only
from tests.patience import patient


@pytest.fixture(scope="module")
def volume(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Variables of a process for which a folder is such a volume: seeks, appends and locks fail there."""
    folder = tmp_path_factory.mktemp("volume")
    library, source = folder.parent / "whole_files_only.so", Path(__file__).with_name("whole_files_only.c")
    built = subprocess.run(["gcc", "-shared", "-fPIC", "-o", str(library), str(source), "-ldl"], capture_output=True)
    if built.returncode:
        pytest.skip(f"the stand-in cannot be compiled: {built.stderr.decode()[-300:]}")
    return {"WHOLE_FILES_ONLY": str(folder), "LD_PRELOAD": str(library)}


def run(volume: dict[str, str], *command: str) -> str:
    environment = {**os.environ, **volume, "PYSPARK_PYTHON": sys.executable}
    done = subprocess.run(
        [sys.executable, *command], env=environment, capture_output=True, text=True, timeout=patient(280)
    )
    assert done.returncode == 0, f"{done.stdout[-3000:]}\n{done.stderr[-5000:]}"
    return done.stdout


def test_such_storage_is_recognised(volume: dict[str, str], tmp_path: Path) -> None:
    assert not takes_whole_files_only(tmp_path / "new")
    code = (
        "import sys; from pathlib import Path\n"
        "from pipelines.storage.whole_files import takes_whole_files_only as only\n"
        "print(*[only(Path(path)) for path in sys.argv[1:]])"
    )
    assert (
        run(volume, "-c", code, f"{volume['WHOLE_FILES_ONLY']}/new", str(tmp_path)),
        list(Path(volume["WHOLE_FILES_ONLY"], "new").iterdir()),
    ) == ("True False\n", [])


def test_a_copy_is_compared_with_what_was_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    data = np.random.default_rng(0).bytes(5 << 20)
    (tmp_path / "local").write_bytes(data)
    with (tmp_path / "local").open("rb") as file:
        copy_whole(file, tmp_path / "copy")
        assert (tmp_path / "copy").read_bytes() == data
        monkeypatch.setattr(os, "fsync", lambda number: os.pwrite(number, b"damage", 1 << 20))
        with pytest.raises(OSError, match="what was read back differs from what was written"):
            copy_whole(file, tmp_path / "copy")


def test_a_folder_is_made_equal(tmp_path: Path) -> None:
    source, target = tmp_path / "source", tmp_path / "target"
    (source / "files/1").mkdir(parents=True)
    (source / "files/1/plot.png").write_bytes(b"plot")
    (source / "entries.jsonl").write_text("ab")
    copy_folder(source, target)
    (source / "entries.jsonl").write_text("cd")
    (source / "files/1/plot.png").unlink()
    (source / "files/1").rmdir()
    copy_folder(source, target)
    assert (sorted(path.name for path in target.rglob("*")), (target / "entries.jsonl").read_text()) == (
        ["entries.jsonl", "files"],
        "cd",
    )


@pytest.mark.spark
@pytest.mark.long
@pytest.mark.timeout(600)
def test_training_writes_and_resumes_there(
    volume: dict[str, str], small_dataset: Path, small_network: str, mlflow_store: str
) -> None:
    folder = Path(volume["WHOLE_FILES_ONLY"])
    arguments = [
        *("-m", "jobs.shell.cli", "train", "--config", "smoke", "--result", f"{folder}/result.json"),
        *("--set", small_network, "--set", f"dataset.path={small_dataset}"),
        *("--set", f"training.output={folder}/outputs"),
    ]
    run(volume, *arguments, "--set", "training.epochs=1")
    first = json.loads((folder / "result.json").read_text())
    (output,) = (folder / "outputs").iterdir()
    with np.load(first["checkpoint"]) as checkpoint:
        assert "state.json" in checkpoint.files
    assert sorted(path.name for path in (output / "logs").iterdir()) == ["rank-0.log", "rank-1.log"]
    assert not (output / "journal").exists() or list((output / "journal").iterdir()) == []
    run(volume, *arguments, "--set", f"training.resume_run={first['run_id']}", "--set", "training.epochs=2")
    assert json.loads((folder / "result.json").read_text())["checkpoint"] > first["checkpoint"]
    assert not [path for path in folder.rglob(".*") if path.is_file()]
