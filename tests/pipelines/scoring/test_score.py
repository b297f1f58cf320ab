"""`groundswell score`, from the command line to the files, beside Keras's own `predict`."""

import json
import os
import re
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import mlflow
import numpy as np
import pyarrow.parquet as pq
import pytest
from mlflow import MlflowClient
from pyspark.sql import SparkSession

import jobs.score
from jobs import cli
from pipelines.dataset.manifest import read_manifest
from pipelines.dataset.reader import ReaderSettings
from pipelines.scoring.job import ScoreSettings, _write, check_score
from pipelines.scoring.model import ModelDescription, describe
from pipelines.scoring.output import begin
from pipelines.scoring.source import dataset_source
from pipelines.storage import Folder
from pipelines.tracking.served import find_model

pytestmark = [pytest.mark.spark, pytest.mark.timeout(280), pytest.mark.usefixtures("_use_store")]


def run(model: str, location: Path, output: Path, *settings: str) -> int:
    arguments = ["--model", model, "--input", str(location), "--output", str(output)]
    result = ["--result", str(output.with_name("result.json"))]
    # Another test may have tuned the model's own thresholds.
    settings = ("score.threshold=0.5", *settings)
    return cli.execute(["score", *arguments, *result, *(part for text in settings for part in ("--set", text))])


def read_predictions(output: Path) -> list[dict[str, Any]]:
    """All rows of a folder of predictions, in the order of its manifest."""
    manifest = json.loads((output / "predictions.json").read_text())
    files = [part["file"] for part in manifest["parts"]]
    assert sorted(files) == sorted(path.name for path in output.glob("*.parquet") if not path.name.startswith("_"))
    assert {path.name for path in output.iterdir()} == {*files, "predictions.json", "_rejected.parquet"}
    rows = [row for file in files for row in pq.read_table(output / file).to_pylist()]
    assert len(rows) == manifest["predictions"]
    return rows


@pytest.fixture(scope="module")
def scored(spark: SparkSession, logged: Any, small_dataset: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Predictions of the small dataset."""
    output = tmp_path_factory.mktemp("scored") / "predictions"
    before = os.environ.get("MLFLOW_TRACKING_URI")
    os.environ["MLFLOW_TRACKING_URI"] = logged.store
    try:
        assert run(logged.uri, small_dataset, output, "score.batch_size=5") == 0
    finally:
        os.environ.pop("MLFLOW_TRACKING_URI")
        if before is not None:
            os.environ["MLFLOW_TRACKING_URI"] = before
    return output


def test_predictions_of_a_dataset_are_those_of_keras(scored: Path, small_dataset: Path, expected: Any) -> None:
    rows = read_predictions(scored)
    assert sorted(row["id"] for row in rows) == sorted(expected)
    manifest = json.loads((scored / "predictions.json").read_text())
    assert manifest["settings"] == {"score.batch_size": 5, "score.format": "parquet"}
    names = manifest["class_names"]
    assert names == list(read_manifest(small_dataset).class_names)
    for row in rows:
        np.testing.assert_allclose(row["probabilities"], expected[row["id"]], atol=1e-5)
        likely = [name for name, value in zip(names, row["probabilities"], strict=True) if value >= 0.5]
        assert row["labels"] == likely
        assert len(row["model_version"].removeprefix("m-")) == 32  # MLflow 2 has no prefix
        assert row["epsg"] is not None
        assert row["x0"] is not None
    assert len({tuple(row["labels"]) for row in rows}) > 1, "the model tells samples apart"
    result = json.loads(scored.with_name("result.json").read_text())
    assert (result["verb"], result["exit_code"], result["predictions"]) == ("score", 0, str(scored))


def test_a_second_run_does_nothing_and_does_not_start_spark(
    scored: Path, logged: Any, small_dataset: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(jobs.score, "spark_session", None)
    before = {path: path.stat().st_mtime_ns for path in scored.iterdir()}
    assert run(logged.uri, small_dataset, scored) == 0
    assert "is finished already; left as it is" in capsys.readouterr().out
    assert {path: path.stat().st_mtime_ns for path in scored.iterdir()} == before


def test_predictions_become_a_delta_table(
    scored: Path,
    logged: Any,
    small_dataset: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    from deltalake import DeltaTable, QueryBuilder

    output = tmp_path / "predictions"
    shutil.copytree(scored, output)
    wanted = {row["id"]: row["probabilities"] for row in read_predictions(scored)}

    def table_rows() -> dict[str, Any]:
        query = QueryBuilder().register("predictions", DeltaTable(str(output)))
        found = query.execute("select id, probabilities from predictions").read_all().to_struct_array()
        rows = [row.as_py() for row in found]  # type: ignore[attr-defined]  # as arro3 describes its iterators
        assert len(rows) == len(wanted)
        return {row["id"]: row["probabilities"] for row in rows}

    times = {path: path.stat().st_mtime_ns for path in output.glob("*-part-*.parquet")}
    assert run(logged.uri, small_dataset, output, "score.format=delta") == 0
    assert {path: path.stat().st_mtime_ns for path in times} == times, "the files stay"
    assert table_rows() == wanted
    table = DeltaTable(str(output))
    assert table.version() == 0
    assert str(output) in table.history()[0]["operationParameters"]["location"]
    capsys.readouterr()
    assert run(logged.uri, small_dataset, output, "score.format=delta") == 0
    assert "is finished already" in capsys.readouterr().out

    min(times).unlink()
    assert run(logged.uri, small_dataset, output) == 0, "it stays a table without saying so again"
    assert table_rows().keys() == wanted.keys()

    identity = json.loads((output / "predictions.json").read_text())["identity"]
    begin(Folder.at(output), identity)
    (output / "predictions.json").unlink()  # as where a job ends between the log and it

    def write(*arguments: Any) -> Any:
        assert not (output / "_delta_log/00000000000000000000.json").exists(), "it names files that may change"
        return _write(*arguments)

    monkeypatch.setattr("pipelines.scoring.job._write", write)
    assert run(logged.uri, small_dataset, output) == 0
    assert table_rows().keys() == wanted.keys()

    (output / "_delta_log/00000000000000000001.json").write_text("{}")
    assert run(logged.uri, small_dataset, output) == 2, "somebody has changed the table"
    assert "_delta_log/00000000000000000001.json" in capsys.readouterr().err


def test_a_map_is_drawn_of_finished_predictions_too(
    scored: Path, logged: Any, small_dataset: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(jobs.score, "spark_session", None)
    line = ["score", "--model", logged.uri, "--input", str(small_dataset), "--output", str(scored)]
    line += ["--set", "score.threshold=0.5", "--map", str(tmp_path / "map.geojson")]
    assert cli.execute(line) == 0
    features = json.loads((tmp_path / "map.geojson").read_text())["features"]
    assert sorted(each["properties"]["id"] for each in features) == sorted(
        row["id"] for row in read_predictions(scored)
    )
    assert (tmp_path / "map.png").stat().st_size > 10_000
    tile = features[0]["properties"]["id"].split("_")[-3].removeprefix("T")
    assert cli.execute([*line, "--set", f"score.map_tile={tile}"]) == 0
    of_tile = json.loads((tmp_path / "map.geojson").read_text())["features"]
    assert 0 < len(of_tile) < len(features)
    assert all(f"_T{tile}_" in each["properties"]["id"] for each in of_tile)
    assert cli.execute([*line[:-1], str(tmp_path / "map.jpg")]) == 2


def test_a_lost_part_is_scored_again_alone(
    scored: Path, logged: Any, small_dataset: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    output = tmp_path / "predictions"
    shutil.copytree(scored, output)
    lost, *kept = sorted(path for path in output.glob("*-part-*.parquet"))
    lost.unlink()
    before = {path: path.stat().st_mtime_ns for path in kept}
    assert run(logged.uri, small_dataset, output) == 0
    assert f"{len(kept)} of {len(kept) + 1} parts are finished already" in capsys.readouterr().out
    assert {path: path.stat().st_mtime_ns for path in kept} == before
    again, first = read_predictions(output), read_predictions(scored)
    assert [row["id"] for row in again] == [row["id"] for row in first]


def test_unfinished_predictions_keep_their_thresholds_when_the_model_gets_others(
    scored: Path,
    logged: Any,
    small_dataset: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    output = tmp_path / "predictions"
    shutil.copytree(scored, output)
    tuned = (0.9,) * len(json.loads((output / "predictions.json").read_text())["class_names"])
    monkeypatch.setattr(jobs.score, "describe", lambda served: replace(describe(served), thresholds=tuned))
    command = ["score", "--model", logged.uri, "--input", str(small_dataset), "--output", str(output)]
    assert cli.execute(command) == 2, "finished ones are not those that are asked for"
    assert "score.threshold 0.5 there" in capsys.readouterr().err
    min(output.glob("*-part-*.parquet")).unlink()
    assert cli.execute([*command, "--set", "score.threshold=0.9"]) == 2
    assert cli.execute(command) == 0
    assert "begun with other thresholds than the model has now, and continues with" in capsys.readouterr().out
    assert read_predictions(output) == read_predictions(scored)


def test_a_raw_archive_gives_the_predictions_of_its_dataset(
    logged: Any, small_archive: Path, expected: Any, tmp_path: Path
) -> None:
    archive, output = tmp_path / "BigEarthNet", tmp_path / "predictions"
    shutil.copytree(small_archive, archive)
    damaged = sorted((archive / "BigEarthNet-S2").glob("*/*"))[5]
    (damaged / f"{damaged.name}_B04.tif").write_bytes(b"no TIFF")
    MlflowClient(logged.store).set_registered_model_alias("scored", "champion", "1")
    settings = ("archive=bigearthnet_v2", "score.samples_per_file=7", "score.batch_size=4", "launch.master=local[2]")
    settings += ("score.max_rejected_fraction=0.1",)
    assert run("models:/scored@champion", archive, output, *settings) == 0
    rows = read_predictions(output)
    assert sorted(row["id"] for row in rows) == sorted(set(expected) - {damaged.name})
    for row in rows:
        np.testing.assert_allclose(row["probabilities"], expected[row["id"]], atol=1e-5)
        assert row["model_version"] == "scored/1"
        assert row["x0"] is not None
    assert json.loads((output / "predictions.json").read_text())["settings"]["score.samples_per_file"] == 7
    assert len(list(output.glob("train-part-*"))) == 5  # 32 samples, 7 at most in each
    (rejected,) = pq.read_table(output / "_rejected.parquet").to_pylist()
    assert rejected["id"] == damaged.name
    assert rejected["file"].endswith("_B04.tif")
    # The file is mended: its part is scored again, and no other one.
    times = {path: path.stat().st_mtime_ns for path in output.glob("*-part-*.parquet")}
    shutil.copytree(small_archive, archive, dirs_exist_ok=True)
    assert run("models:/scored@champion", archive, output, *settings) == 0
    assert sum(path.stat().st_mtime_ns != time for path, time in times.items()) == 1
    assert sorted(row["id"] for row in read_predictions(output)) == sorted(expected)
    # The archive has changed since: another sample is gone.
    shutil.copy(small_archive / "metadata.parquet", archive / "metadata.parquet")
    table = pq.read_table(archive / "metadata.parquet")
    pq.write_table(table.slice(1), archive / "metadata.parquet")
    assert run("models:/scored@champion", archive, output, *settings) == 2


def test_predictions_behind_a_url_are_those_on_disk(
    scored: Path, logged: Any, small_dataset: Path, s3_folder: str, capsys: pytest.CaptureFixture[str]
) -> None:
    output = f"{s3_folder}/predictions"
    line = ["score", "--model", logged.uri, "--input", str(small_dataset), "--output", output]
    line += ["--set", "score.threshold=0.5", "--set", "score.batch_size=5"]
    assert cli.execute(line) == 0
    folder, local = Folder.at(output), read_predictions(scored)
    manifest = json.loads(folder.read("predictions.json"))
    assert set(folder.files()) == {part["file"] for part in manifest["parts"]} | {
        "predictions.json",
        "_rejected.parquet",
    }
    rows = []
    for part in manifest["parts"]:
        with folder.open(part["file"]) as file:
            rows += pq.read_table(file).to_pylist()
    assert [row["id"] for row in rows] == [row["id"] for row in local]
    assert [row["labels"] for row in rows] == [row["labels"] for row in local]
    capsys.readouterr()
    assert cli.execute(line) == 0
    assert "is finished already" in capsys.readouterr().out


def test_a_damaged_row_is_rejected_until_it_is_mended_and_its_neighbours_are_not(
    logged: Any, small_dataset: Path, expected: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    dataset, output = tmp_path / "dataset", tmp_path / "predictions"
    shutil.copytree(small_dataset, dataset)
    shard = sorted((dataset / "test").glob("part-*.parquet"))[0]
    whole = shard.read_bytes()
    content = bytearray(whole)
    content[len(content) // 3] ^= 0xFF
    shard.write_bytes(content)
    for _ in range(2):
        assert run(logged.uri, dataset, output) == 2
        text = (
            f"1 of {len(expected)} samples are bad (damaged row 1), more than score.max_rejected_fraction=0.01; the "
            r"first: .+: damaged row; mend the files, or allow more, and the same command continues; all of them: "
            f"{output}/_rejected.parquet"
        )
        assert re.search(text.replace("(", r"\(").replace(")", r"\)"), capsys.readouterr().err)
    assert not (output / "predictions.json").exists()
    times = {path: path.stat().st_mtime_ns for path in output.glob("*-part-*.parquet")}
    for _ in range(2):
        assert run(logged.uri, dataset, output, "score.max_rejected_fraction=0.1") == 0
    assert {path: path.stat().st_mtime_ns for path in output.glob("*-part-*.parquet")} == times
    assert "is finished already" in capsys.readouterr().out, "it is as damaged as before"
    (rejected,) = pq.read_table(output / "_rejected.parquet").to_pylist()
    assert rejected["reason"] == "damaged row"
    assert "checksum" in rejected["detail"]
    rows = read_predictions(output)
    assert sorted([*(row["id"] for row in rows), rejected["id"]]) == sorted(expected)
    for row in rows:
        np.testing.assert_allclose(row["probabilities"], expected[row["id"]], atol=1e-5)
    # Another part is lost: what is finished is not begun anew by a call that allows fewer bad samples.
    sorted(output.glob("train-part-*.parquet"))[0].unlink()
    assert run(logged.uri, dataset, output) == 2
    assert "more than score.max_rejected_fraction=0.01" in capsys.readouterr().err
    assert (output / "predictions.json").exists()
    assert run(logged.uri, dataset, output, "score.max_rejected_fraction=0.1") == 0
    assert len(read_predictions(output)) == len(expected) - 1
    shard.write_bytes(whole)  # as `prepare.verify=true` leaves it, with the same dataset.json
    assert run(logged.uri, dataset, output) == 0
    assert "1 parts are scored again, as samples that were rejected can be read now" in capsys.readouterr().out
    assert pq.read_table(output / "_rejected.parquet").num_rows == 0
    assert sorted(row["id"] for row in read_predictions(output)) == sorted(expected)


def test_an_exported_model_has_its_thresholds_with_it(
    logged: Any, small_dataset: Path, expected: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    exported, output = tmp_path / "exported", tmp_path / "predictions"
    mlflow.artifacts.download_artifacts(logged.uri, dst_path=str(exported), tracking_uri=logged.store)
    # MLflow 2 keeps a second copy of that file beside a registered model's, in a folder `metadata`.
    (folder,) = (path.parent for path in exported.rglob("MLmodel") if path.parent.name != "metadata")
    monkeypatch.setenv("MLFLOW_TRACKING_URI", f"sqlite:///{tmp_path / 'elsewhere.db'}")
    line = ["score", "--model", str(folder), "--input", str(small_dataset), "--output", str(output)]
    assert cli.execute(line) == 0
    thresholds = np.array([0.3 + 0.01 * index for index in range(19)])
    names = list(read_manifest(small_dataset).class_names)
    rows = read_predictions(output)
    assert sorted(row["id"] for row in rows) == sorted(expected)
    for row in rows:
        np.testing.assert_allclose(row["probabilities"], expected[row["id"]], atol=1e-5)
        likely = zip(names, row["probabilities"], thresholds, strict=True)
        assert row["labels"] == [name for name, value, threshold in likely if value >= threshold]


@pytest.fixture
def model(logged: Any) -> ModelDescription:
    return describe(find_model(logged.uri))


def with_input(model: ModelDescription, **changes: Any) -> ModelDescription:
    return replace(model, inputs=(replace(model.inputs[0], **changes), *model.inputs[1:]))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda model: replace(model, model_id="m-other"), "holds other predictions .model_id .* choose another"),
        (lambda model: replace(model, class_names=("a", "b")), r"knows 2 classes .a, \.\.\..*has 19"),
        (lambda model: replace(model, task="single_label"), "is a single_label model"),
        (lambda model: with_input(model, name="sar"), "takes the image group 'sar'"),
        (lambda model: with_input(model, shape=(60, 60, 4)), r"takes 'bands_10m' as uint16 \(60, 60, 4\)"),
        (
            lambda model: with_input(model, bands=("B08", "B04", "B03", "B02")),
            "takes the bands B08, B04, B03, B02 in 'bands_10m'",
        ),
    ],
)
def test_another_model_is_refused(
    change: Callable[[ModelDescription], ModelDescription],
    message: str,
    model: ModelDescription,
    scored: Path,
    small_dataset: Path,
) -> None:
    source = dataset_source(Folder.at(small_dataset), ReaderSettings())
    settings = ScoreSettings(5, (0.5,) * 19, None, "keras", None, as_delta=False)
    with pytest.raises(ValueError, match=message):
        check_score(change(model), source, Folder.at(scored), settings)


def test_an_archive_whose_index_has_too_many_bad_samples_is_refused_before_spark_starts(
    model: ModelDescription, small_dataset: Path, tmp_path: Path
) -> None:
    bad = {"id": "S2A_1", "file": "S2A_1", "reason": "missing file", "detail": ""}
    source = replace(dataset_source(Folder.at(small_dataset), ReaderSettings()), rejected=(bad,))
    settings = ScoreSettings(5, (0.5,) * 19, None, "keras", None, as_delta=False)
    message = r"1 of \d+ samples are bad \(missing file 1\), .*the first: S2A_1: missing file"
    with pytest.raises(ValueError, match=message):
        check_score(model, source, Folder.at(tmp_path / "output"), settings)
    assert not (tmp_path / "output").exists()
    check_score(model, source, Folder.at(tmp_path / "output"), replace(settings, max_rejected_fraction=0.1))


def foreign(folder: Path) -> str:
    (folder / "output").mkdir()
    (folder / "output" / "thesis.txt").write_text("mine")
    return "output"


def nobodys(folder: Path) -> str:
    (folder / "output").mkdir()
    (folder / "output" / "test-part-00000.parquet").write_bytes(b"of another model")
    return "output"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"model": "models:/scored@nobody"}, "nobody"),
        ({"model": "models:/scored/77"}, "77"),
        ({"model": "models:/absent/latest"}, "there is no registered model absent"),
        ({"model": "model.keras"}, "is a Keras file, which does not say its classes"),
        ({"model": "exported"}, "exported is no model: expected runs:/"),
        ({"input": "nowhere"}, "nowhere does not exist"),
        ({"input": "archive"}, "is no prepared dataset: if it is a raw archive, say its layout with --set archive="),
        ({"output": foreign}, "holds thesis.txt, which is no predictions"),
        (
            {"output": nobodys},
            r"holds test-part-00000\.parquet and no predictions\.json, which would say by",
        ),
        ({"output": "dataset/train"}, "--output .*/dataset/train is in --input .*/dataset: choose another --output"),
        ({"map": "dataset/map.geojson"}, "--map .*map.geojson is in --input .*dataset: choose a file outside of that"),
        ({"set": "score.samples_per_file=5"}, "has no effect: --input .* is a prepared dataset"),
        ({"set": "archive=bigearthnet_v2"}, "has no effect: --input .* is a prepared dataset"),
        ({"set": "score.threshold=1.5"}, r"score\.threshold=1\.5"),
        ({"set": "training.epochs=3"}, "score reads archive, score"),
        ({"set": "score.map_tile=33UWP"}, "score.map_tile=33UWP has no effect without --map FILE"),
        ({"set": "score.max_f1_drop=0.1"}, "score.runtime=keras converts nothing"),
        ({"store": "http://127.0.0.1:9"}, "no answer from MLflow, see MLFLOW_TRACKING_URI: API request to"),
    ],
)
def test_bad_input_is_one_line_before_spark_starts(
    arguments: dict[str, Any],
    message: str,
    logged: Any,
    small_dataset: Path,
    small_archive: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(jobs.score, "spark_session", None)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "dataset").symlink_to(small_dataset)
    (tmp_path / "archive").symlink_to(small_archive)
    given = {"model": logged.uri, "input": "dataset", "output": "predictions", **arguments}
    output = given["output"](tmp_path) if callable(given["output"]) else given["output"]
    settings = [part for name in ("set", "map") if name in given for part in (f"--{name}", given[name])]
    line = ["score", "--model", given["model"], "--input", given["input"], "--output", output, *settings]
    monkeypatch.setenv("MLFLOW_TRACKING_URI", given.get("store", logged.store))
    assert cli.execute(line) == (4 if "store" in given else 2)
    printed = capsys.readouterr().err
    assert printed.count("\n") == (2 if "store" in given else 1), "the line, and how to continue where that may help"
    assert re.search(message, printed), printed


def test_a_reference_dataset_is_read_with_the_readers_settings(
    small_archive: Path, small_dataset: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    line = ["score", "--model", "nowhere", "--input", str(small_archive), "--output", "predictions"]
    for setting in ("archive=bigearthnet_v2", "reader.cache_folder=cache", f"score.reference_dataset={small_dataset}"):
        line += ["--set", setting]
    assert cli.execute([*line, "--set", "score.runtime=int8"]) == 2
    assert "nowhere is no model" in capsys.readouterr().err
    assert cli.execute(line[:-2]) == 2
    assert "--set reader.cache_folder has no effect: --input " in capsys.readouterr().err
