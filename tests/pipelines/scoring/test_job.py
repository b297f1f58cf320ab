"""Scoring of a folder of images as a job. The model is a stand-in, and tasks are calls in this process."""

import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from datetime import datetime
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from PIL import Image
from pyspark.sql import SparkSession

from conf.load import load, override
from jobs.prepare import configured_archive, prepare
from pipelines.archives.archive import INDEX_SCHEMA, REJECTED_SCHEMA, ArchiveIndex, index_table
from pipelines.archives.images.image_folder import ImageFolder
from pipelines.archives.images.image_table import ImageTable
from pipelines.dataset.read.reader import ReaderSettings
from pipelines.dataset.read.verify import verify_dataset
from pipelines.sample import ImageGroup
from pipelines.scoring.identity import ScoreSettings
from pipelines.scoring.job import Scored, score
from pipelines.scoring.predict.model import ModelDescription
from pipelines.scoring.source import archive_source, dataset_source
from pipelines.spark import tasks
from pipelines.spark.columns import select_columns
from pipelines.spark.tasks import LostWorkerError
from pipelines.storage.folder import Location
from pipelines.storage.lock import hold

pytestmark = pytest.mark.usefixtures("_without_spark")
MODEL = ModelDescription(
    "models:/fake/1",
    "m-1",
    "fake/1",
    "single_label",
    ("land", "sea"),
    (ImageGroup("rgb", (8, 8, 3), "uint8", ("red", "green", "blue")),),
)
SETTINGS = ScoreSettings(4, (0.5, 0.5), 1, "keras", None, as_delta=False, max_rejected_fraction=0.0)


def write_image(path: Path, seed: int) -> None:
    Image.fromarray(np.random.default_rng(seed).integers(0, 256, (8, 8, 3), np.uint8)).save(path)


@pytest.fixture
def images(tmp_path: Path) -> Path:
    """An archive of 12 images in `train/<class>/`, of which each three become a part."""
    for name in MODEL.class_names:
        (tmp_path / "images" / "train" / name).mkdir(parents=True)
    for number in range(12):
        write_image(tmp_path / "images" / name_of(number), number)
    return tmp_path / "images"


def name_of(number: int) -> str:
    return f"train/{MODEL.class_names[number // 6]}/{number:02d}.png"


def score_archive(archive: Any, output: Path | str, say: Callable[[str], None] = print, **settings: Any) -> Scored:
    """Score an archive in parts of three samples."""
    source = archive_source(archive, samples_per_file=3)
    return score(None, MODEL, b"", source, Location.at(output), replace(SETTINGS, **settings), say=say)  # type: ignore[arg-type]


def score_images(images: Path, output: Path, say: Callable[[str], None] = print, allowed: float = 0.0) -> Scored:
    return score_archive(ImageFolder(str(images), validation_fraction=0.0), output, say, max_rejected_fraction=allowed)


def figures(scored: Scored) -> tuple[int, int, int]:
    """Predictions, rejected samples, and samples that this job has scored."""
    return scored.predictions, scored.rejected, scored.new


def test_an_output_that_cannot_be_written_is_named_by_its_argument(images: Path, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    message = r"file/a/b cannot be written \(.*: Not a directory\): choose another place, or change its"
    with pytest.raises(ValueError, match=message):
        score_images(images, tmp_path / "file" / "a" / "b")


def written_parts(output: Path) -> dict[str, int]:
    return {path.name: path.stat().st_mtime_ns for path in output.glob("*-part-*.parquet")}


def changed_parts(output: Path, before: dict[str, int]) -> list[int]:
    now = written_parts(output)
    assert now.keys() == before.keys()
    return [number for number, name in enumerate(sorted(now)) if now[name] != before[name]]


def test_mended_and_replaced_files_of_other_sizes_have_their_parts_scored_again(images: Path, tmp_path: Path) -> None:
    output, files = tmp_path / "output", sorted(images.glob("train/*/*.png"))
    good = files[4].read_bytes()
    files[4].write_bytes(good[:50])
    for _ in range(2):
        with pytest.raises(ValueError, match=r"1 of 12 samples are bad .* and the same command continues"):
            score_images(images, output)
    parts = written_parts(output)
    files[4].write_bytes(good[:60])
    assert score_images(images, output, allowed=0.1).rejected == 1
    assert changed_parts(output, parts) == [], "it is as bad as before"

    files[4].write_bytes(good)
    assert (figures(score_images(images, output)), changed_parts(output, parts)) == ((12, 0, 3), [1])

    parts, lines = written_parts(output), list[str]()
    Image.new("RGB", (8, 8), "white").save(files[9])
    assert (score_images(images, output, lines.append).new, changed_parts(output, parts)) == (3, [3])
    assert any(line.startswith("1 parts are scored again, as ") for line in lines)
    (first, *others) = pq.read_table(output / "train-part-00003.parquet")["probabilities"].to_pylist()
    assert (first, [1.0, 1.0] in others, score_images(images, output).new) == ([1.0, 1.0], False, 0), others


def test_a_mended_row_of_a_table_has_the_parts_of_its_file_scored_again(images: Path, tmp_path: Path) -> None:
    output, folder = tmp_path / "output", tmp_path / "table"
    folder.mkdir()

    def write_table(number: int, contents: list[bytes]) -> None:
        columns = {"image": [{"bytes": content} for content in contents], "label": ["land", "sea"] * 3}
        pq.write_table(pa.table(columns), folder / f"train-{number}.parquet")

    def run() -> Scored:
        return score_archive(ImageTable(str(folder), validation_fraction=0.0), output)

    contents = [file.read_bytes() for file in sorted(images.glob("train/*/*.png"))]
    write_table(0, [contents[0][:50], *contents[1:6]])
    write_table(1, contents[6:])
    with pytest.raises(ValueError, match="1 of 12 samples are bad"):
        run()
    parts = written_parts(output)
    write_table(0, contents[:6])
    scored = run()
    assert (scored.predictions, scored.rejected, changed_parts(output, parts)) == (12, 0, [0, 1])


@pytest.mark.spark
@pytest.mark.parametrize("as_dataset", [pytest.param(True, marks=pytest.mark.long), False])
def test_predictions_join_their_table_by_its_key(
    spark: SparkSession, images: Path, tmp_path: Path, as_dataset: bool
) -> None:
    from deltalake import DeltaTable, QueryBuilder

    output, path = tmp_path / "output", tmp_path / "dataset"
    rows = [
        (number, file.read_bytes(), MODEL.class_names[number // 6], f"site {number}", datetime(2024, 1, 1, number))
        for number, file in enumerate(sorted(images.glob("train/*/*.png")))
    ]
    table = spark.createDataFrame(
        rows, "patch bigint, image binary, label string, `geo.site` string, `since``` timestamp_ntz"
    )
    archive = {"kind": "table", "root": str(tmp_path / "table"), "id": "patch", "keep": ["geo.site", "since`"]}
    config = load(None, archive=archive, dataset={"path": str(path)})
    manifest = prepare(config, table=table)
    if as_dataset:
        source = dataset_source(Location.at(path), ReaderSettings())
    else:
        source = archive_source(configured_archive(config), samples_per_file=3)
    scored = score(None, MODEL, b"", source, Location.at(output), replace(SETTINGS, as_delta=True))  # type: ignore[arg-type]
    predictions = spark.read.parquet(*map(str, output.glob("*-part-*.parquet")))
    names, plain = ["patch", "geo.site", "since`"], ["patch", "site", "since"]
    mine = select_columns(predictions, ["id", *names]).toDF("id", *plain)
    joined = mine.join(select_columns(table, names).toDF(*plain), plain)
    assert (scored.predictions, {row.id for row in joined.collect()}) == (12, {*map(str, range(12))})
    query = QueryBuilder().register("predictions", DeltaTable(str(output)))
    assert len(query.execute('select "geo.site" from predictions where patch < 9').read_all()) == 9

    assert prepare(config).fingerprint == manifest.fingerprint
    assert verify_dataset(path).is_whole
    schemas = [pq.read_schema(path / "train" / name) for name in ("part-00000.parquet", "_common_metadata")]
    assert schemas[0].names == schemas[1].names
    with pytest.raises(
        ValueError, match=r"kept_columns \['patch', 'geo\.site', 'since`'\] there, \['patch'\] asked for"
    ):
        prepare(override(config, "archive.keep=[]"))


def test_metadata_that_a_mended_sample_brings_along_is_no_other_input(images: Path, tmp_path: Path) -> None:
    """As in BigEarthNet v1.0, whose labels and tile are in a file of each patch."""
    output, first = tmp_path / "output", min(images.glob("train/*/*.png"))

    class Labelled(ImageFolder):
        def index(self) -> ArchiveIndex:
            found = super().index()
            rows = [{**row, "tile": "33UWP"} for row in found.samples.to_pylist()]
            rows[0] |= {"tile": "", "labels": []} if first.stat().st_size == 50 else {}
            return replace(found, samples=pa.Table.from_pylist(rows, INDEX_SCHEMA))

    def run() -> tuple[int, int, int]:
        return figures(score_archive(Labelled(str(images), validation_fraction=0.0), output, max_rejected_fraction=0.1))

    good = first.read_bytes()
    first.write_bytes(good[:50])
    assert run() == (11, 1, 12)
    first.write_bytes(good)
    assert run() == (12, 0, 3)


def test_an_archive_in_another_place_continues_by_names_and_sizes(images: Path, tmp_path: Path) -> None:
    output, moved, another = tmp_path / "output", tmp_path / "moved", tmp_path / "another"
    score_images(images, output)
    shutil.copytree(images, another)
    Image.new("RGB", (8, 8), "white").save(another / "train" / "land" / "00.png")
    images.rename(moved)
    message = r"holds other predictions \(input .*images there, .*{} asked for\)"
    with pytest.raises(ValueError, match=message.format("moved")):  # nothing is left to be done there
        score_images(moved, output)
    (output / "train-part-00002.parquet").unlink()
    parts = written_parts(output)
    with pytest.raises(ValueError, match=message.format("another")):
        score_images(another, output)
    assert (written_parts(output), score_images(moved, output).new) == (parts, 3)
    assert written_parts(output).items() > parts.items()
    assert score_images(moved, output).new == 0


def test_a_part_that_is_scored_again_is_not_finished_when_its_worker_dies(
    images: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    output, bad = tmp_path / "output", images / name_of(1)
    size = bad.stat().st_size
    bad.write_bytes(bytes(size))
    with pytest.raises(ValueError, match="1 of 12 samples are bad"):
        score_images(images, output)
    write_image(bad, 1)
    assert bad.stat().st_size == size
    run, seen, lines = tasks.run_tasks, [], list[str]()

    def dying(*arguments: Any, **settings: Any) -> list[Any]:
        seen.append(sorted(path.name for path in (output / "_progress").glob("train-*.parquet.json")))
        if len(seen) == 1:
            raise LostWorkerError("a Python worker died")
        return run(*arguments, **settings)

    monkeypatch.setattr(tasks, "run_tasks", dying)
    assert figures(score_images(images, output, lines.append)) == (12, 0, 3)
    assert "a Python worker died; what is not finished is tried again, attempt 2 of 4" in lines
    assert (seen, pq.read_table(output / "_rejected.parquet").num_rows) == (
        [[f"train-part-{number:05d}.parquet.json" for number in (1, 2, 3)]] * 2,
        0,
    )


class Listed(ImageFolder):
    """An archive whose metadata name its samples, whether or not their files are there."""

    tells_missing = False
    """Whether the index says which files are missing, as that of BigEarthNet does of folders."""

    def index(self) -> ArchiveIndex:
        names = [name_of(number) for number in range(12)]
        columns = {"id": names, "split": ["train"] * 12, "labels": [[0]] * 12, "paths": [[name] for name in names]}
        missing = [name for name in names if self.tells_missing and not Path(self.root, name).exists()]
        unusable = [{"id": name, "file": name, "reason": "missing file", "detail": ""} for name in missing]
        return ArchiveIndex(
            index_table(columns), REJECTED_SCHEMA.empty_table(), pa.Table.from_pylist(unusable, REJECTED_SCHEMA)
        )


def score_listed(images: Path, output: Path, say: Callable[[str], None] = print) -> Scored:
    return score_archive(Listed(str(images), validation_fraction=0.0), output, say, max_rejected_fraction=0.1)


@pytest.mark.parametrize("tells_missing", [True, False])
@pytest.mark.parametrize("is_stopped", [False, True])
def test_a_part_keeps_predictions_whose_samples_are_gone(
    images: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    tells_missing: bool,
    is_stopped: bool,
) -> None:
    """A rejected sample of it was mended, also where a job was stopped that began to score it again."""
    monkeypatch.setattr(Listed, "tells_missing", tells_missing)
    output, files = tmp_path / "output", sorted(images.glob("train/*/*.png"))
    good, gone = files[4].read_bytes(), files[3].read_bytes()
    files[4].write_bytes(good[:50])
    assert score_listed(images, output).predictions == 11
    parts, lines = written_parts(output), list[str]()
    files[4].write_bytes(good)
    if is_stopped:
        with monkeypatch.context() as patch:
            patch.setattr(tasks, "run_tasks", lambda *_, **__: (_ for _ in ()).throw(KeyboardInterrupt))
            with pytest.raises(KeyboardInterrupt):
                score_listed(images, output)
    files[3].unlink()
    for _ in range(2):
        assert (figures(score_listed(images, output, lines.append)), changed_parts(output, parts)) == ((11, 1, 0), [])
        assert {path.name for path in output.iterdir() if "part" not in path.name} == {
            "_rejected.parquet",
            "predictions.json",
        }
    told = "train-part-00001.parquet is not scored again, as samples of it would be lost: 1 cannot"
    kept = "1 parts stay as they are, as samples of them cannot be read any more, such as train-part-00001"
    if not (tells_missing and is_stopped):
        assert (told in caplog.text) if tells_missing else (kept in str(lines))
    files[3].write_bytes(gone)
    assert (figures(score_listed(images, output)), changed_parts(output, parts)) == ((12, 0, 3), [1])


def test_sizes_are_those_of_the_files_and_not_of_another_attempt(
    images: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    output, run = tmp_path / "output", tasks.run_tasks

    monkeypatch.setattr(
        tasks,
        "run_tasks",
        lambda *arguments, **settings: [replace(part, size=part.size + 1) for part in run(*arguments, **settings)],
    )
    score_archive(ImageFolder(str(images), validation_fraction=0.0), output, as_delta=True)
    sizes = {path.name: path.stat().st_size for path in output.glob("*-part-*.parquet")}
    assert {
        part["file"]: part["size"] for part in json.loads((output / "predictions.json").read_text())["parts"]
    } == sizes
    actions = map(json.loads, (output / "_delta_log/00000000000000000000.json").read_text().splitlines())
    assert {action["add"]["path"]: action["add"]["size"] for action in actions if "add" in action} == sizes


def test_a_file_of_another_attempt_than_its_note_is_told_and_written_again(
    images: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    output, run = tmp_path / "output", tasks.run_tasks

    def overtaken(*arguments: Any, **settings: Any) -> list[Any]:
        parts, part = run(*arguments, **settings), output / "train-part-00002.parquet"
        part.write_bytes(part.read_bytes() + b"x")
        return parts

    message = r"written 1 parts at the same time, the first is train-part-00002\.parquet: the same command continues"
    with monkeypatch.context() as patch:
        patch.setattr(tasks, "run_tasks", overtaken)
        with pytest.raises(RuntimeError, match=message):
            score_images(images, output)
    assert figures(score_images(images, output)) == (12, 0, 3)


def test_an_output_is_held_by_every_link(images: Path, tmp_path: Path) -> None:
    for name in ("output", "elsewhere"):
        (tmp_path / name).mkdir()
    (tmp_path / "elsewhere" / "link").symlink_to(tmp_path / "output")
    with hold(Location.at(tmp_path / "output")), pytest.raises(RuntimeError, match="another job is writing"):
        score_images(images, tmp_path / "elsewhere" / "link")


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


def test_output_and_input_may_not_contain_each_other_behind_urls(images: Path, s3_folder: str) -> None:
    for number in (0, 6):
        Location.at(f"{s3_folder}/images").write(name_of(number), (images / name_of(number)).read_bytes())
    archive = ImageFolder(f"{s3_folder}/images", validation_fraction=0.0)
    with pytest.raises(ValueError, match=r"^--output s3a://.* is in --input s3://.*: choose another --output"):
        score_archive(archive, f"{s3_folder}/images/new".replace("s3://", "s3a://"))
