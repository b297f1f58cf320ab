"""Where the demo puts its files, and which of them `make clean` removes."""

import shutil
import subprocess
from pathlib import Path
from types import SimpleNamespace

import pytest

from conf.load import load
from conf.schema import RunConfig
from jobs import demo
from jobs.demo import demo_folder
from jobs.shell import cli
from jobs.shell.command import Result
from tests.patience import patient


@pytest.mark.parametrize(
    ("archive", "expected"),
    [
        (None, "demo"),
        *((archive, "demo-BigEarthNet") for archive in ("/data/BigEarthNet/", "s3://bucket/BigEarthNet")),
        *((archive, "demo-somebody") for archive in ("$HOME", "~")),
        *((".", "demo-HERE"), ("..", "demo-ABOVE")),
    ],
)
def test_the_demos_folder(archive: str | None, expected: str, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/home/somebody")
    assert demo_folder(archive) == Path(expected.replace("HERE", folder.name).replace("ABOVE", folder.parent.name))


@pytest.mark.parametrize("is_generated", [True, False])
def test_clean_removes_only_what_the_generated_demo_made(project: Path, tmp_path: Path, is_generated: bool) -> None:
    shutil.copy(project / "Makefile", tmp_path)
    kept = ["demo-mine/dataset/part.parquet", "demo/notes.txt", "datasets/a/part.parquet"]
    removed = [".venv/bin/python", "models/compression/kernels/x.so"]
    made = ["demo/dataset/part.parquet", "demo/outputs/run/log"]
    if is_generated:
        removed += [*made, "demo/BigEarthNet-generated/metadata.parquet"]
    else:  # somebody's own folder of that name
        kept += made
    for name in (*kept, *removed):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text("")
    subprocess.run(["make", "clean"], cwd=tmp_path, check=True, capture_output=True, timeout=patient(60))
    assert {str(path.relative_to(tmp_path)) for path in tmp_path.rglob("*") if path.is_file()} == {*kept, "Makefile"}


@pytest.mark.parametrize("target", ["clean", "setup"])
def test_a_path_with_spaces_is_refused_before_anything_is_removed(project: Path, tmp_path: Path, target: str) -> None:
    checkout = tmp_path / "my documents" / "groundswell"
    kept = (tmp_path / "my" / "kept", checkout / ".venv" / "kept")
    for file in kept:
        file.parent.mkdir(parents=True)
        file.touch()
    shutil.copy(project / "Makefile", checkout)
    done = subprocess.run(["make", target], cwd=checkout, capture_output=True, text=True, timeout=patient(60))
    assert done.returncode == 2
    assert f"groundswell: make does not work in a path with spaces: {checkout}" in done.stderr
    assert all(file.exists() for file in kept)


@pytest.mark.usefixtures("folder")
def test_what_an_interrupted_demo_prints_continues_it(monkeypatch: pytest.MonkeyPatch) -> None:
    continued = []

    def train(config: RunConfig, *more: object) -> None:
        continued.append(config.training.resume_run)
        raise ValueError("that is enough")

    monkeypatch.setattr(demo, "demo", train)
    assert (cli.execute(["demo", "--set", "training.resume_run=0123"]), continued) == (2, ["0123"])


@pytest.mark.parametrize(
    ("splits", "task", "message"),
    [
        (("train", "validation"), "multi_label", "the demo needs train, validation and test; the archive lacks test"),
        (
            ("train", "validation", "test"),
            "single_label",
            r"the demo's table is of archives with several labels an image; .* prepared",
        ),
    ],
)
def test_an_archive_that_the_demo_cannot_use_is_refused_before_training(
    splits: tuple[str, ...], task: str, message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    prepared = SimpleNamespace(splits=dict.fromkeys(splits, 1), task=task)
    monkeypatch.setattr(demo, "prepare", lambda config: prepared)
    with pytest.raises(ValueError, match=message):
        demo.demo(load("demo"), None, Result("demo"))
