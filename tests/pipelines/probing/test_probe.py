"""`groundswell probe` on a small dataset: its features, its scores, its run, and what it refuses."""

import io
import json
import re
import shutil
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest
from pyspark.sql import SparkSession
from sklearn.metrics import f1_score

from jobs.shell import cli
from models.probes.head import LinearHead
from pipelines.dataset.format.manifest import read_manifest
from pipelines.dataset.read.reader import ReaderSettings, SplitReader
from pipelines.probing.extract import extract_features
from pipelines.probing.features import FILE_NAME, Features, find_features, folder_of, identity_of
from pipelines.scoring.predict.model import describe
from pipelines.scoring.source import dataset_source
from pipelines.storage.folder import Location
from pipelines.storage.lock import hold
from pipelines.tracking.store.served import find_model, read_model_file
from pipelines.tracking.store.store import TrackingError
from tests.pipelines.dataset.files import flip_bit

pytestmark = [pytest.mark.spark, pytest.mark.timeout(280)]


@pytest.fixture(scope="module")
def extract(spark: SparkSession, logged: Any, small_dataset: Path) -> Callable[..., Features]:
    """Extracts the features of the small dataset; what it says is added to a list."""

    def run(output: Path, said: list[str], *, file: bytes | None = None, dataset: Path = small_dataset) -> Features:
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("MLFLOW_TRACKING_URI", logged.store)
            served = find_model(logged.uri)
            file = file or read_model_file(served)
        model, source = describe(served), dataset_source(Location.at(dataset), ReaderSettings())
        identity = identity_of(model, file, read_manifest(dataset))
        folder = folder_of(Location.at(output), identity)
        # Batches of five: in most shards the last one has padding.
        return extract_features(spark, model, file, source, folder, identity, batch_size=5, threads=1, say=said.append)

    return run


@pytest.fixture(scope="module")
def features(extract: Callable[..., Features], tmp_path_factory: pytest.TempPathFactory) -> Features:
    return extract(tmp_path_factory.mktemp("features"), [])


def test_features_are_what_the_head_takes_in_the_order_of_the_dataset(
    features: Features, logged: Any, small_dataset: Path
) -> None:
    kernel, bias = (np.asarray(weight, np.float64) for weight in logged.head)
    for split, rows in (("train", 32), ("validation", 12), ("test", 12)):
        reader, found = SplitReader(small_dataset, split), features.array(split, "features")
        assert (found.shape, [name for table in features.read(split, ["id"]) for name in table["id"].to_pylist()]) == (
            (rows, len(kernel)),
            list(reader.ids()),
        )
        np.testing.assert_array_equal(features.array(split, "targets"), reader.gather(np.arange(rows)).targets)
        np.testing.assert_allclose(
            features.array(split, "probabilities"), 1 / (1 + np.exp(-(found @ kernel + bias))), atol=1e-5
        )
    assert features.array("train", "features").std(axis=0).max() > 1e-3, "samples differ"


def test_any_rows_can_be_read(features: Features) -> None:
    whole = features.array("train", "features")
    assert len([file for file in features.files if file.split == "train"]) > 1
    for start in range(0, 32, 5):
        for stop in (start + 1, start + 9, 32):
            np.testing.assert_array_equal(features.array("train", "features", start, stop), whole[start:stop])
    assert features.array("train", "features", 4, 4).shape == (0, 0)


def test_they_are_extracted_once_for_a_model_and_a_dataset(
    extract: Callable[..., Features], features: Features, logged: Any, tmp_path: Path
) -> None:
    said: list[str] = []
    folder, there = features.folder.path, {path.name for path in features.folder.path.iterdir()}
    killed = [folder.with_name(f".{folder.name}.incomplete.lock"), folder / f".features.json.{'0' * 32}"]
    for path in killed:
        path.touch()
    assert (extract(folder.parent, said), said) == (features, [f"the features in {features.folder} are used again"])
    assert ({path.name for path in folder.iterdir()}, killed[0].exists()) == (there, False)
    # One byte more behind the archive is another file with the same model.
    assert extract(features.folder.path.parent, said, file=logged.file.read_bytes() + b"\n").folder != features.folder
    assert said[1].startswith("extracting the features of 56 of 56 samples")


def test_two_do_not_extract_the_same_features_at_once(
    extract: Callable[..., Features], features: Features, tmp_path: Path
) -> None:
    taken = Location.at(tmp_path / features.folder.path.name)
    with hold(taken), pytest.raises(RuntimeError, match=f"another job is writing {taken}: wait for it, or stop it"):
        extract(tmp_path, [])
    assert not list(tmp_path.iterdir())
    with hold(features.folder):
        assert extract(features.folder.path.parent, []) == features, "finished ones are read by everybody"


@pytest.mark.parametrize("loss", ["unfinished", "truncated", "lost"])
def test_features_that_are_not_whole_are_not_used(
    extract: Callable[..., Features], features: Features, tmp_path: Path, loss: str
) -> None:
    folder, first = tmp_path / features.folder.path.name, features.files[0]
    shutil.copytree(features.folder.path, folder)
    content = (folder / first.file).read_bytes()
    (folder / first.file).unlink()
    if loss != "lost":
        (folder / first.file).write_bytes(content[:-10])
    if loss == "unfinished":
        (folder / FILE_NAME).unlink()
    identity = json.loads((features.folder.path / FILE_NAME).read_text())["identity"]
    files, said = [each.file for each in features.files], list[str]()
    assert find_features(Location.at(folder), identity, files) is None
    again = extract(tmp_path, said)
    assert said == [f"extracting the features of {first.rows} of 56 samples into {folder}"]
    np.testing.assert_array_equal(again.array("train", "features"), features.array("train", "features"))
    assert find_features(again.folder, identity, files) == again


def test_a_damaged_row_ends_it_with_the_name_of_the_sample(
    extract: Callable[..., Features], small_dataset: Path, tmp_path: Path
) -> None:
    dataset = Path(shutil.copytree(small_dataset, tmp_path / "dataset"))
    shard = dataset / read_manifest(dataset).splits["test"].shards[0].file
    flip_bit(shard, shard.stat().st_size // 3)
    with pytest.raises(ValueError, match="checksum"):
        extract(tmp_path / "features", [], dataset=dataset)
    assert not list((tmp_path / "features").glob(f"*/{FILE_NAME}"))


@pytest.mark.parallel
@pytest.mark.long
@pytest.mark.usefixtures("_use_store")
def test_the_whole_way(
    spark: SparkSession,
    features: Features,
    logged: Any,
    small_dataset: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    result, folder = tmp_path / "result.json", features.folder
    settings = (f"dataset.path={small_dataset}", f"probe.output={folder.path.parent}", "probe.l2=[1, 0.1]")
    command = ["probe", "--config", "smoke", "--model", logged.uri, "--result", str(result)]
    command += [word for setting in settings for word in ("--set", setting)]
    assert cli.execute(command) == 0
    output = capsys.readouterr().out.splitlines()
    assert f"the features in {folder} are used again" in output
    values, client = json.loads(result.read_text()), logged.client
    run = client.get_run(values["run_id"])
    assert run.info.status == "FINISHED"
    assert (run.data.tags["mlflow.parentRunId"], run.data.tags["mlflow.source.name"]) == (
        logged.run_id,
        "groundswell probe",
    )
    assert {item.path for item in client.list_artifacts(values["run_id"])} == {
        "head.npz",
        "penalties.json",
        "per_class_test.json",
        "per_class_test.png",
    }
    head = LinearHead.from_npz(
        Path(client.download_artifacts(values["run_id"], "head.npz", str(tmp_path))).read_bytes()
    )
    f1, own = (
        f1_score(features.array("test", "targets"), each >= 0.5, average="micro", zero_division=0)
        for each in (head.probabilities(features.array("test", "features")), features.array("test", "probabilities"))
    )
    assert run.data.metrics["test/f1_micro"] == values["metrics"]["test/f1_micro"] == pytest.approx(f1)
    assert run.data.metrics["own_head/f1_micro"] == pytest.approx(own)
    assert f1 > own, "the logged model has a head of random weights"
    (line,) = (line for line in output if line.startswith("test/f1_micro "))
    assert line.split()[1:] == [f"{f1:.4f}", f"{own:.4f}"]
    (chosen,) = (line for line in output if line.endswith("  chosen"))
    assert float(chosen.split()[0]) == float(run.data.params["l2"])

    gone = Mock(side_effect=TrackingError("no answer from MLflow"))
    monkeypatch.setattr("jobs.shell.records.has_run", gone)
    assert cli.execute(command) == 4
    assert re.search(
        rf"did not take the scores \(no answer from MLflow\): test/loss .*test/f1_micro {f1:.4f}",
        capsys.readouterr().err,
    )
    # What MLflow has of the run that made the model stays as it was.
    assert "test/f1_micro" not in client.get_run(logged.run_id).data.metrics


@pytest.fixture
def error_of(
    logged: Any,
    _use_store: None,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    error_line: Callable[..., str],
) -> Callable[..., str]:
    """Runs a probe that must fail before Spark does anything; the line that it prints."""
    monkeypatch.setattr("jobs.probe.spark_session", None)

    def run(dataset: Path, *more: str) -> str:
        settings = (f"dataset.path={dataset}", f"probe.output={tmp_path / 'features'}", *more)
        line = error_line("probe", "--config", "smoke", "--model", logged.uri, settings=settings)
        assert not (tmp_path / "features").exists()
        return line

    return run


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ("probe.l2=[0.1, 0.1]", "probe.l2=[0.1, 0.1]: the same penalty is there twice"),
        ("probe.l2=[0]", "probe.l2[0]=0"),
        ("optimizer.momentum=0.5", "--set optimizer.momentum has no effect: probe reads"),
        ("launch.recover=in_place", "--set launch.recover has no effect"),
        *(
            (
                f"probe.output={place}/features",
                f"probe.output={place}/features is in the dataset DATASET: choose a folder",
            )
            for place in ("DATASET", "FOLDER/../NAME/link")
        ),
    ],
)
def test_settings_that_cannot_be_used(
    error_of: Callable[..., str], small_dataset: Path, tmp_path: Path, settings: str, message: str
) -> None:
    (tmp_path / "link").symlink_to(small_dataset)
    for name, value in {"DATASET": str(small_dataset), "FOLDER": str(tmp_path), "NAME": tmp_path.name}.items():
        settings, message = settings.replace(name, value), message.replace(name, value)
    assert message in error_of(small_dataset, settings)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            lambda values: values["splits"].pop("test"),
            "no split 'test', which a probe measures on; it has train, validation",
        ),
        (
            lambda values: values["splits"].pop("validation"),
            "has no validation split that could choose one: set probe.l2 to one penalty",
        ),
        (
            lambda values: values["groups"][0].update(bands=["X1", "X2", "X3", "X4"]),
            "takes the bands B02, B03, B04, B08 in 'bands_10m', ",
        ),
    ],
)
def test_a_dataset_that_cannot_be_probed_is_one_line_before_spark_starts(
    error_of: Callable[..., str],
    small_dataset: Path,
    edit_manifest: Callable[..., None],
    tmp_path: Path,
    change: Callable[[dict[str, Any]], None],
    message: str,
) -> None:
    edit_manifest(shutil.copytree(small_dataset, tmp_path / "changed"), change)
    assert message in error_of(tmp_path / "changed")


def test_a_model_without_a_head_is_one_line_before_spark_starts(
    error_of: Callable[..., str], small_dataset: Path, logged: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = io.BytesIO()
    with zipfile.ZipFile(logged.file) as model, zipfile.ZipFile(file, "w") as headless:
        headless.writestr("config.json", model.read("config.json").replace(b'"units": 19', b'"units": 18'))
    monkeypatch.setattr("jobs.probe.read_model_file", lambda served: file.getvalue())
    assert "has no dense layer with 19 units, one for each of its classes" in error_of(small_dataset)
