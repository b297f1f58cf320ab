"""Where the demo puts its files, and which of them `make clean` removes."""

import shutil
import subprocess
from pathlib import Path
from types import SimpleNamespace

import pytest

from conf.load import load
from conf.schema import RunConfig
from jobs import cli, demo
from jobs.demo import demo_folder
from jobs.result import Result
from tests.patience import patient


def test_the_demos_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert demo_folder(None) == Path("demo")
    assert demo_folder("/data/BigEarthNet/") == Path("demo-BigEarthNet")
    assert demo_folder("s3://bucket/BigEarthNet") == Path("demo-BigEarthNet")
    monkeypatch.setenv("HOME", "/home/somebody")
    assert demo_folder("$HOME") == demo_folder("~") == Path("demo-somebody")
    assert demo_folder(".") == Path(f"demo-{tmp_path.name}")
    assert demo_folder("..") == Path(f"demo-{tmp_path.parent.name}")


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
    left = {str(path.relative_to(tmp_path)) for path in tmp_path.rglob("*") if path.is_file()}
    assert left == {*kept, "Makefile"}


def test_a_path_with_spaces_is_refused_before_anything_is_removed(project: Path, tmp_path: Path) -> None:
    checkout = tmp_path / "my documents" / "groundswell"
    for name in ("my/kept", "my documents/groundswell/.venv/kept"):
        (tmp_path / name).parent.mkdir(parents=True)
        (tmp_path / name).touch()
    shutil.copy(project / "Makefile", checkout)
    for target in ("clean", "setup"):
        done = subprocess.run(
            ["make", target], cwd=checkout, capture_output=True, text=True, check=False, timeout=patient(60)
        )
        assert done.returncode == 2
        assert f"groundswell: make does not work in a path with spaces: {checkout}" in done.stderr
    assert (tmp_path / "my" / "kept").exists()
    assert (checkout / ".venv" / "kept").exists()


def test_what_an_interrupted_demo_prints_continues_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    continued = []

    def train(config: RunConfig, *more: object) -> None:
        continued.append(config.training.resume_run)
        raise ValueError("that is enough")

    monkeypatch.setattr(demo, "demo", train)
    assert cli.execute(["demo", "--set", "training.resume_run=0123"]) == 2
    assert continued == ["0123"]


def test_an_archive_without_a_test_split_is_refused_before_training(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(demo, "prepare", lambda config: SimpleNamespace(splits={"train": 1, "validation": 1}))
    with pytest.raises(ValueError, match="the demo needs train, validation and test; the archive lacks test"):
        demo.demo(load("demo"), None, Result("demo"))


def test_an_archive_with_one_label_an_image_is_refused_before_training(monkeypatch: pytest.MonkeyPatch) -> None:
    splits = dict.fromkeys(("train", "validation", "test"), 1)
    monkeypatch.setattr(demo, "prepare", lambda config: SimpleNamespace(splits=splits, task="single_label"))
    with pytest.raises(ValueError, match=r"the demo's table is of archives with several labels an image; .* prepared"):
        demo.demo(load("demo"), None, Result("demo"))
