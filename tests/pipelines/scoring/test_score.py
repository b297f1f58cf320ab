"""`groundswell score`, from the command line to the files, beside Keras's own `predict`."""

import json
import re
import shutil
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import mlflow
import pyarrow.parquet as pq
import pytest
from pyspark.sql import SparkSession

import jobs.score
from jobs.shell import cli
from pipelines.dataset.format.manifest import read_manifest
from pipelines.dataset.read.reader import ReaderSettings
from pipelines.scoring.identity import ScoreSettings, check_score
from pipelines.scoring.output.output import begin
from pipelines.scoring.predict.model import ModelDescription, describe
from pipelines.scoring.source import dataset_source
from pipelines.spark.tasks import run_until_done
from pipelines.storage.folder import Location
from pipelines.tracking.store.served import find_model

pytestmark = [pytest.mark.spark, pytest.mark.timeout(280), pytest.mark.usefixtures("_use_store")]


Score = Callable[..., str]
ARGUMENTS = ("model", "input", "output", "set", "map")
SETTINGS = ScoreSettings(5, (0.5,) * 19, None, "keras", None, as_delta=False)


def command(model: str, location: Path, output: Path | str, *settings: str) -> list[str]:
    arguments = ["--model", model, "--input", str(location), "--output", str(output)]
    # Another test may have tuned the model's own thresholds. One batch size is one compiled function.
    settings = ("score.threshold=0.5", "score.batch_size=5", *settings)
    return ["score", *arguments, *(part for text in settings for part in ("--set", text))]


@pytest.fixture
def score(logged: Any, small_dataset: Path, capsys: pytest.CaptureFixture[str]) -> Score:
    """Scores the small dataset, or another place, and must end with a code: what is printed to both streams."""

    def run(
        output: Path | str, *settings: str, of: Path = small_dataset, model: str = logged.uri, code: int = 0
    ) -> str:
        capsys.readouterr()
        assert cli.execute(command(model, of, output, *settings)) == code
        return "".join(capsys.readouterr())

    return run


def times_of(output: Path) -> dict[Path, int]:
    """When each part was written."""
    return {path: path.stat().st_mtime_ns for path in output.glob("*-part-*.parquet")}


@pytest.fixture
def copied(scored: Path, tmp_path: Path) -> Path:
    """A copy of the predictions of the small dataset."""
    return Path(shutil.copytree(scored, tmp_path / "predictions"))


@pytest.fixture(scope="module")
def scored(spark: SparkSession, logged: Any, small_dataset: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Predictions of the small dataset."""
    output = tmp_path_factory.mktemp("scored") / "predictions"
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("MLFLOW_TRACKING_URI", logged.store)
        assert cli.execute(command(logged.uri, small_dataset, output)) == 0
    return output


def test_predictions_of_a_dataset_are_those_of_keras(
    scored: Path,
    small_dataset: Path,
    expected: Any,
    predictions_of: Any,
    check_predictions: Any,
) -> None:
    rows, manifest = predictions_of(scored), json.loads((scored / "predictions.json").read_text())
    check_predictions(rows, expected)
    names = manifest["class_names"]
    assert (names, manifest["settings"]) == (
        list(read_manifest(small_dataset).class_names),
        {"score.batch_size": 5, "score.format": "parquet"},
    )
    for row in rows:
        assert row["labels"] == [name for name, value in zip(names, row["probabilities"], strict=True) if value >= 0.5]
        assert None not in (row["epsg"], row["x0"])
    assert {len(row["model_version"].removeprefix("m-")) for row in rows} == {32}  # MLflow 2 has no prefix
    assert len({tuple(row["labels"]) for row in rows}) > 1, "the model tells samples apart"


def test_a_second_run_does_nothing_and_does_not_start_spark(
    scored: Path, logged: Any, small_dataset: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(jobs.score, "spark_session", None)
    before, result = {path: path.stat().st_mtime_ns for path in scored.iterdir()}, scored.with_name("result.json")
    assert cli.execute([*command(logged.uri, small_dataset, scored), "--result", str(result)]) == 0
    assert "is finished already; left as it is" in capsys.readouterr().out
    assert {path: path.stat().st_mtime_ns for path in scored.iterdir()} == before
    assert (
        json.loads(result.read_text()).items() >= {"verb": "score", "exit_code": 0, "predictions": str(scored)}.items()
    )


def test_predictions_become_a_delta_table(
    copied: Path, score: Score, monkeypatch: pytest.MonkeyPatch, predictions_of: Any
) -> None:
    from deltalake import DeltaTable, QueryBuilder

    wanted, log = {row["id"]: row["probabilities"] for row in predictions_of(copied)}, copied / "_delta_log"
    first = log / "00000000000000000000.json"

    def table_rows() -> dict[str, Any]:
        query = QueryBuilder().register("predictions", DeltaTable(str(copied)))
        found = query.execute("select id, probabilities from predictions").read_all().to_struct_array()
        rows = [row.as_py() for row in found]  # type: ignore[attr-defined]  # as arro3 describes its iterators
        assert len(rows) == len(wanted)
        return {row["id"]: row["probabilities"] for row in rows}

    times = times_of(copied)
    score(copied, "score.format=delta")
    assert (times_of(copied), table_rows()) == (times, wanted), "the files stay"
    table = DeltaTable(str(copied))
    assert table.version() == 0
    assert str(copied) in table.history()[0]["operationParameters"]["location"]
    assert "is finished already" in score(copied, "score.format=delta")

    min(times).unlink()
    score(copied)  # it stays a table without saying so again
    assert table_rows().keys() == wanted.keys()

    begin(Location.at(copied), json.loads((copied / "predictions.json").read_text())["identity"])
    (copied / "predictions.json").unlink()  # as where a job ends between the log and it

    def write(*arguments: Any, **settings: Any) -> Any:
        assert not first.exists(), "it names files that may change"
        return run_until_done(*arguments, **settings)

    monkeypatch.setattr("pipelines.scoring.job.run_until_done", write)
    score(copied)
    assert table_rows().keys() == wanted.keys()

    first.with_stem("00000000000000000001").write_text("{}")  # somebody has changed the table
    assert "_delta_log/00000000000000000001.json" in score(copied, code=2)


def test_a_map_is_drawn_of_finished_predictions_too(
    scored: Path,
    logged: Any,
    small_dataset: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    predictions_of: Any,
) -> None:
    monkeypatch.setattr(jobs.score, "spark_session", None)
    line = [*command(logged.uri, small_dataset, scored), "--map", str(tmp_path / "map.geojson")]

    def drawn(*more: str) -> list[str]:
        assert cli.execute([*line, *more]) == 0
        return sorted(
            each["properties"]["id"] for each in json.loads((tmp_path / "map.geojson").read_text())["features"]
        )

    ids = drawn()
    assert ids == sorted(row["id"] for row in predictions_of(scored))
    assert (tmp_path / "map.png").stat().st_size > 10_000
    tile = ids[0].split("_")[-3]
    of_tile = [name for name in ids if f"_{tile}_" in name]
    assert drawn("--set", f"score.map_tile={tile.removeprefix('T')}") == of_tile != ids
    assert cli.execute([*line[:-1], str(tmp_path / "map.jpg")]) == 2


def test_unfinished_predictions_keep_their_thresholds_when_the_model_gets_others(
    scored: Path,
    copied: Path,
    score: Score,
    monkeypatch: pytest.MonkeyPatch,
    predictions_of: Any,
) -> None:
    own = "score.threshold=null"  # those of the model
    monkeypatch.setattr(jobs.score, "describe", lambda served: replace(describe(served), thresholds=(0.9,) * 19))
    # Finished ones are not those that are asked for.
    assert "score.threshold 0.5 there" in score(copied, own, code=2)
    min(copied.glob("*-part-*.parquet")).unlink()
    score(copied, "score.threshold=0.9", code=2)
    output = score(copied, own)
    assert "started with other thresholds than the model has now, and continues with" in output
    assert re.search(r"\d+ of \d+ parts are finished already", output)
    assert predictions_of(copied) == predictions_of(scored)


def test_a_raw_archive_gives_the_predictions_of_its_dataset(
    logged: Any,
    score: Score,
    small_archive: Path,
    expected: Any,
    tmp_path: Path,
    predictions_of: Any,
    check_predictions: Any,
) -> None:
    archive, output = Path(shutil.copytree(small_archive, tmp_path / "BigEarthNet")), tmp_path / "predictions"
    damaged = sorted((archive / "BigEarthNet-S2").glob("*/*"))[5]
    (damaged / f"{damaged.name}_B04.tif").write_bytes(b"no TIFF")
    logged.client.set_registered_model_alias("scored", "champion", "1")
    settings = ("archive=bigearthnet_v2", "score.samples_per_file=7", "score.max_rejected_fraction=0.1")
    again = partial(score, output, *settings, "launch.master=local[2]", of=archive, model="models:/scored@champion")
    again()
    rows = predictions_of(output)
    check_predictions(rows, {name: values for name, values in expected.items() if name != damaged.name})
    assert {(row["model_version"], row["x0"] is None) for row in rows} == {("scored/1", False)}
    assert json.loads((output / "predictions.json").read_text())["settings"]["score.samples_per_file"] == 7
    assert len(list(output.glob("train-part-*"))) == 5  # 32 samples, 7 at most in each
    (rejected,) = pq.read_table(output / "_rejected.parquet").to_pylist()
    assert (rejected["id"], rejected["file"].endswith("_B04.tif")) == (damaged.name, True)
    # The file is mended: its part is scored again, and no other one.
    times = times_of(output)
    shutil.copytree(small_archive, archive, dirs_exist_ok=True)
    again()
    assert (len(times_of(output).items() - times.items()), sorted(row["id"] for row in predictions_of(output))) == (
        1,
        sorted(expected),
    )
    # The archive has changed since: another sample is gone.
    pq.write_table(pq.read_table(small_archive / "metadata.parquet").slice(1), archive / "metadata.parquet")
    again(code=2)


def test_predictions_behind_a_url_are_those_on_disk(
    scored: Path, score: Score, s3_folder: str, predictions_of: Any
) -> None:
    output = f"{s3_folder}/predictions"
    score(output)
    assert predictions_of(output) == predictions_of(scored)
    assert "is finished already" in score(output)


def test_a_damaged_row_is_rejected_until_it_is_mended_and_its_neighbours_are_not(
    score: Score,
    small_dataset: Path,
    expected: Any,
    tmp_path: Path,
    predictions_of: Any,
    check_predictions: Any,
) -> None:
    dataset, output = Path(shutil.copytree(small_dataset, tmp_path / "dataset")), tmp_path / "predictions"
    shard = min((dataset / "test").glob("part-*.parquet"))
    content = bytearray(whole := shard.read_bytes())
    content[len(content) // 3] ^= 0xFF
    shard.write_bytes(content)
    refusal = (
        f"1 of {len(expected)} samples are bad \\(damaged row 1\\), more than score.max_rejected_fraction=0.01; the "
        r"first: .+: damaged row; mend the files, or allow more, and the same command continues; all of them: "
        f"{output}/_rejected.parquet"
    )
    strict, lenient = (partial(score, output, *more, of=dataset) for more in ([], ["score.max_rejected_fraction=0.1"]))
    for _ in range(2):
        assert re.search(refusal, strict(code=2))
    assert not (output / "predictions.json").exists()
    times = times_of(output)
    lenient()
    assert "is finished already" in lenient(), "it is as damaged as before"
    assert times_of(output) == times
    (rejected,) = pq.read_table(output / "_rejected.parquet").to_pylist()
    assert (rejected["reason"], "checksum" in rejected["detail"]) == ("damaged row", True)
    others = {name: values for name, values in expected.items() if name != rejected["id"]}
    check_predictions(predictions_of(output), others)
    # Another part is lost: what is finished is not begun anew by a call that allows fewer bad samples.
    min(output.glob("train-part-*.parquet")).unlink()
    assert "more than score.max_rejected_fraction=0.01" in strict(code=2)
    assert (output / "predictions.json").exists()
    lenient()
    assert len(predictions_of(output)) == len(others)
    shard.write_bytes(whole)  # as `prepare.verify=true` leaves it, with the same dataset.json
    assert "1 parts are scored again, as samples that were rejected can be read now" in strict()
    assert (
        pq.read_table(output / "_rejected.parquet").num_rows,
        sorted(row["id"] for row in predictions_of(output)),
    ) == (0, sorted(expected))


def test_an_exported_model_has_its_thresholds_with_it(
    logged: Any,
    score: Score,
    small_dataset: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    predictions_of: Any,
) -> None:
    exported, output = tmp_path / "exported", tmp_path / "predictions"
    mlflow.artifacts.download_artifacts(logged.uri, dst_path=str(exported), tracking_uri=logged.store)
    # MLflow 2 keeps a second copy of that file beside a registered model's, in a folder `metadata`.
    (folder,) = (path.parent for path in exported.rglob("MLmodel") if path.parent.name != "metadata")
    monkeypatch.setenv("MLFLOW_TRACKING_URI", f"sqlite:///{tmp_path / 'elsewhere.db'}")
    score(output, "score.threshold=null", model=str(folder))
    names, thresholds = read_manifest(small_dataset).class_names, [0.3 + 0.01 * index for index in range(19)]
    for row in predictions_of(output):
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
    source = dataset_source(Location.at(small_dataset), ReaderSettings())
    with pytest.raises(ValueError, match=message):
        check_score(change(model), source, Location.at(scored), SETTINGS)


def test_an_archive_whose_index_has_too_many_bad_samples_is_refused_before_spark_starts(
    model: ModelDescription, small_dataset: Path, tmp_path: Path
) -> None:
    bad = {"id": "S2A_1", "file": "S2A_1", "reason": "missing file", "detail": ""}
    source = replace(dataset_source(Location.at(small_dataset), ReaderSettings()), rejected=(bad,))
    message = r"1 of \d+ samples are bad \(missing file 1\), .*the first: S2A_1: missing file"
    with pytest.raises(ValueError, match=message):
        check_score(model, source, Location.at(tmp_path / "output"), SETTINGS)
    assert not (tmp_path / "output").exists()
    check_score(model, source, Location.at(tmp_path / "output"), replace(SETTINGS, max_rejected_fraction=0.1))


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
        ({"file": "thesis.txt"}, "holds thesis.txt, which is no predictions"),
        (
            {"file": "test-part-00000.parquet"},
            r"holds test-part-00000\.parquet and no predictions\.json, which would name the model",
        ),
        ({"output": "dataset/train"}, "--output .*/dataset/train is in --input .*/dataset: choose another --output"),
        ({"map": "dataset/map.geojson"}, "--map .*map.geojson is in --input .*dataset: choose a file outside of that"),
        ({"set": "score.samples_per_file=5"}, "has no effect: --input .* is a prepared dataset"),
        ({"set": "archive=bigearthnet_v2"}, "has no effect: --input .* is a prepared dataset"),
        ({"set": "score.threshold=1.5"}, r"score\.threshold=1\.5"),
        ({"set": "training.epochs=3"}, "score reads archive, score"),
        ({"set": "score.map_tile=33UWP"}, "score.map_tile=33UWP has no effect without --map FILE"),
        ({"set": "score.max_f1_drop=0.1"}, "score.runtime=keras converts nothing"),
        ({"store": "http://127.0.0.1:9"}, "no answer from MLflow at http:"),
    ],
)
def test_bad_input_is_one_line_before_spark_starts(
    arguments: dict[str, str],
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
    (tmp_path / "predictions").mkdir()
    if "file" in arguments:
        (tmp_path / "predictions" / arguments["file"]).touch()
    given = {"model": logged.uri, "input": "dataset", "output": "predictions", **arguments}
    line = ["score", *(part for name in ARGUMENTS if name in given for part in (f"--{name}", given[name]))]
    monkeypatch.setenv("MLFLOW_TRACKING_URI", given.get("store", logged.store))
    assert cli.execute(line) == (4 if "store" in given else 2)
    printed = capsys.readouterr().err
    assert printed.count("\n") == (2 if "store" in given else 1), "the line, and how to continue where that may help"
    assert re.search(message, printed), printed


def test_a_reference_dataset_is_read_with_the_readers_settings(
    small_archive: Path, small_dataset: Path, error_line: Callable[..., str]
) -> None:
    line = ("score", "--model", "nowhere", "--input", str(small_archive), "--output", "predictions")
    settings = ["archive=bigearthnet_v2", "reader.cache_folder=cache"]
    assert "nowhere is no model" in error_line(
        *line, settings=[*settings, f"score.reference_dataset={small_dataset}", "score.runtime=int8"]
    )
    assert "--set reader.cache_folder has no effect: --input " in error_line(*line, settings=settings)
