"""Scoring of a folder of images as a job. The model is a stand-in, and tasks are calls in this process."""

import io
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest
from PIL import Image

from pipelines import tasks
from pipelines.archives.image_folder import ImageFolder
from pipelines.scoring.job import Scored, ScoreSettings, score
from pipelines.scoring.model import ModelDescription, ModelInput
from pipelines.scoring.source import archive_source
from pipelines.storage import Folder
from pipelines.tasks import LostWorkerError

pytestmark = pytest.mark.usefixtures("_without_spark")
MODEL = ModelDescription(
    "models:/fake/1", "m-1", "fake/1", "single_label", ("land", "sea"), (ModelInput("rgb", (8, 8, 3), "uint8", None),)
)
SETTINGS = ScoreSettings(4, (0.5, 0.5), 1, "keras", None, as_delta=False, max_rejected_fraction=0.0)


def write_image(path: Path, seed: int) -> None:
    Image.fromarray(np.random.default_rng(seed).integers(0, 256, (8, 8, 3), np.uint8)).save(path)


@pytest.fixture
def images(tmp_path: Path) -> Path:
    """An archive of 12 images in `train/<class>/`, of which each three become a part."""
    for number in range(12):
        folder = tmp_path / "images" / "train" / MODEL.class_names[number // 6]
        folder.mkdir(parents=True, exist_ok=True)
        write_image(folder / f"{number:02d}.png", number)
    return tmp_path / "images"


def score_images(images: Path, output: Path, say: Callable[[str], None] = print, allowed: float = 0.0) -> Scored:
    source = archive_source(ImageFolder(str(images), validation_fraction=0.0), samples_per_file=3)
    settings = replace(SETTINGS, max_rejected_fraction=allowed)
    return score(None, MODEL, b"", source, Folder.at(output), settings, say=say)  # type: ignore[arg-type]


def test_an_output_that_cannot_be_written_is_named_by_its_argument(images: Path, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    message = r"file/a/b cannot be written \(.*: Not a directory\): choose another --output, or change its permissions"
    with pytest.raises(ValueError, match=message):
        score_images(images, tmp_path / "file" / "a" / "b")


def test_a_part_that_is_scored_again_is_not_finished_when_its_worker_dies(
    images: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    output, bad = tmp_path / "output", images / "train" / "land" / "01.png"
    size = bad.stat().st_size
    bad.write_bytes(bytes(size))
    with pytest.raises(ValueError, match="1 of 12 samples are bad"):
        score_images(images, output)
    write_image(bad, 1)
    assert bad.stat().st_size == size
    run, seen = tasks.run_tasks, []

    def dying(*arguments: Any, **settings: Any) -> list[Any]:
        seen.append(sorted(path.name for path in (output / "_progress").glob("*.parquet.json")))
        if len(seen) == 1:
            raise LostWorkerError("a Python worker died")
        return run(*arguments, **settings)

    monkeypatch.setattr(tasks, "run_tasks", dying)
    lines: list[str] = []
    scored = score_images(images, output, lines.append)
    assert "a Python worker died; what is not finished is tried again, attempt 2 of 4" in lines
    assert seen == [[f"train-part-{number:05d}.parquet.json" for number in (1, 2, 3)]] * 2
    assert (scored.predictions, scored.rejected, scored.new) == (12, 0, 3)
    assert pq.read_table(output / "_rejected.parquet").num_rows == 0


@pytest.mark.parametrize(
    ("output", "relation"),
    [("images/train", "is in"), ("images", "is"), ("", "contains"), ("link/new", "is in"), ("other/../images", "is")],
)
def test_output_and_input_may_not_contain_each_other(output: str, relation: str, images: Path, tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to(images)
    (tmp_path / "other").mkdir()
    with pytest.raises(ValueError, match=f"^--output .* {relation} --input {images}: choose another --output"):
        score_images(images, tmp_path / output)
    assert sorted(path.name for path in images.iterdir()) == ["train"]


def test_output_and_input_may_not_contain_each_other_behind_urls(s3_folder: str) -> None:
    folder = Folder.at(f"{s3_folder}/images/train")
    for name in ("land/1.png", "sea/2.png"):
        content = io.BytesIO()
        Image.new("RGB", (8, 8)).save(content, "png")
        folder.write(name, content.getvalue())
    output = s3_folder.replace("s3://", "s3a://")
    source = archive_source(ImageFolder(f"{s3_folder}/images", validation_fraction=0.0), samples_per_file=3)
    with pytest.raises(ValueError, match=r"^--output s3a://.* is in --input s3://.*: choose another --output"):
        score(None, MODEL, b"", source, Folder.at(f"{output}/images/new"), SETTINGS)  # type: ignore[arg-type]
