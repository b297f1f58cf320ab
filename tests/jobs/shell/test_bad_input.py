"""Each mistake of a user: one line on standard error, an exit code, no stage started, nothing left behind."""

import functools
import json
import os
import re
import shutil
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, NamedTuple

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from mlflow import MlflowClient
from pyspark.sql import SparkSession

from pipelines.dataset.format.manifest import read_manifest
from pipelines.tracking.store.runs import check_store, start_run
from tests.patience import patient

pytestmark = pytest.mark.spark


@pytest.fixture
def error_of(
    spark: SparkSession,
    mlflow_store: str,
    folder: Path,
    error_line: Callable[..., str],
) -> Callable[..., str]:
    """Run a job that must fail; the line that it prints."""

    def run(verb: str, *settings: str, code: int = 2) -> str:
        stages, before = spark.sparkContext.statusTracker().getJobIdsForGroup(None), set(folder.rglob("*"))
        verb, *more = verb.split()
        line = error_line(verb, "--config", "smoke", *more, settings=settings, code=code)
        assert spark.sparkContext.statusTracker().getJobIdsForGroup(None) == stages, "a stage was started"
        assert not {path for path in folder.rglob("*") if "mlruns" not in path.parts} - before
        assert line.startswith("groundswell ")
        return line

    return run


@pytest.fixture
def archive_copy(small_archive: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(small_archive, tmp_path / "BigEarthNet"))


EVALUATE = "evaluate --model runs:/0123456789abcdef0123456789abcdef/model"


class Mistake(NamedTuple):
    """What a user typed, and what the one line of the answer says."""

    line: str
    message: str
    code: int = 2
    env: tuple[str, str] = ("", "")
    """A variable of the environment, and its value."""


JAVA_25 = next(map(str, Path("/usr/lib/jvm").glob("*-25-*")), "")
TRAIN = "train --config smoke --set dataset.path=DATASET"
PREPARE = "prepare --config smoke --set archive.root=ARCHIVE"
EVALUATE_ABC = "evaluate --config smoke --set dataset.path=DATASET --model runs:/abc/model"
MISTAKES = {
    # What was answered badly once.
    "an option that is a setting": Mistake(f"{TRAIN} --epochs 3", "as --set training.epochs=3"),
    "a global batch beyond the samples": Mistake(
        f"{TRAIN} --set training.global_batch_size=8192",
        "32 training samples, fewer than one global batch of 8192 (2 workers x 1024 micro-batches x 4): lower "
        "training.global_batch_size",
    ),
    "a master that does not answer": Mistake(
        f"{TRAIN} --set launch.master=spark://127.0.0.1:9",
        "no Spark master answers at spark://127.0.0.1:9: is it running, and the address right?",
        4,
    ),
    "a master that is another program": Mistake(
        f"{TRAIN} --set launch.master=spark://127.0.0.1:PORT",
        "no Spark master answers at spark://127.0.0.1:PORT: is it running, and the address right?",
        4,
    ),
    "no archive": Mistake("prepare --config smoke --set archive.root=/nope/x", "archive.root=/nope/x does not exist"),
    "an archive one level too deep": Mistake(
        f"{PREPARE}/BigEarthNet-S2", "no BigEarthNet v2.0 archive, its parent is one: set archive.root=ARCHIVE"
    ),
    "an archive of another version": Mistake(
        "prepare --config smoke --set archive.root=FOLDER/v1",
        "this is BigEarthNet v1.0: set archive.kind=bigearthnet_v1",
    ),
    "patches of another version": Mistake(
        "prepare --config smoke --set archive.root=FOLDER/v1/BigEarthNet-v1.0",
        "this is BigEarthNet v1.0: set archive.kind=bigearthnet_v1",
    ),
    "an archive of a later version": Mistake(
        f"{PREPARE} --set archive.kind=bigearthnet_v1", "this is BigEarthNet v2.0: set archive.kind=bigearthnet_v2"
    ),
    "a dataset in a file": Mistake(
        f"{PREPARE} --set dataset.path=FOLDER/file/x",
        "dataset.path=FOLDER/file/x cannot be written (FOLDER/file: File exists): choose another",
    ),
    "a dataset below a file": Mistake(
        f"{PREPARE} --set dataset.path=FOLDER/file/x/y", "(FOLDER/file/x: Not a directory): choose another"
    ),
    "a dataset where no file can be": Mistake(
        f"{PREPARE} --set dataset.path=/proc/x", "dataset.path=/proc/x cannot be written (/proc: it takes no files)"
    ),
    "GPUs of a local session": Mistake(
        f"{TRAIN} --set launch.gpus_per_worker=1",
        "a local session (local[2]) has no GPUs for its tasks: use those of this machine by spark-submit --master",
    ),
    **{
        f"a dead store, {verb}": Mistake(
            f"{verb} --config smoke --set dataset.path=DATASET",
            "no answer from MLflow at http://127.0.0.1:9 (Connection refused): see MLFLOW_TRACKING_URI, or train "
            "without MLflow, with --set tracking.offline=true",
            4,
            ("MLFLOW_TRACKING_URI", "http://127.0.0.1:9"),
        )
        for verb in ("train", "find-rate")
    },
    "a word for a number": Mistake(
        f"{TRAIN} --set training.epochs=three", "error: --set training.epochs='three': should be a valid integer"
    ),
    "no run to resume": Mistake(
        f"{TRAIN} --set training.resume_run=latest", "resume_run=latest: no run to resume in FOLDER/cwd/outputs"
    ),
    "a model of a new store": Mistake(
        EVALUATE_ABC, "runs:/abc/model: MLflow's store sqlite:///FOLDER/cwd/mlflow.db does not exist: set MLFLOW"
    ),
    "a model that a store does not have": Mistake(
        EVALUATE_ABC, "runs:/abc/model in STORE: Run with id=abc not found", env=("MLFLOW_TRACKING_URI", "STORE")
    ),
    "a folder without Java": Mistake(
        TRAIN, "JAVA_HOME=/nope has no bin/java: set JAVA_HOME to Java 17 or 21", env=("JAVA_HOME", "/nope")
    ),
    "a Java that does not start": Mistake(
        TRAIN, "Spark does not start: [JAVA_GATEWAY_EXITED]", 4, ("JAVA_HOME", "FOLDER/java")
    ),
    "a kind of archive alone": Mistake("config --set archive.kind=table", "", 0),
    # What was answered well.
    "a verb": Mistake("trian --config smoke", "'trian' is not a verb: did you mean train?"),
    "a configuration": Mistake("train --config smok", "'smok' is neither a YAML file nor one of the shipped ones"),
    "a section": Mistake(f"{TRAIN} --set trainig.epochs=3", "trainig: unknown section (did you mean training?)"),
    "a setting": Mistake(f"{TRAIN} --set training.epoch=3", "training.epoch: unknown key (did you mean epochs?)"),
    "no dataset": Mistake("train --config smoke --set dataset.path=/nope/ds", "/nope/ds is not a finished dataset: it"),
    "a raw archive as dataset": Mistake(
        "train --config smoke --set dataset.path=ARCHIVE", "has no dataset.json; make it with `groundswell prepare`"
    ),
    "a batch that does not divide": Mistake(
        f"{TRAIN} --set training.global_batch_size=13",
        "training.global_batch_size=13 does not divide into batches of 4 on each of 2 workers: make it a multiple of 8",
    ),
    "a codec": Mistake(f"{TRAIN} --set exchange.codec=foo", "exchange.codec.name='foo': should be one of none, fp16"),
    "a codec's foreign setting": Mistake(
        f"{TRAIN} --set exchange.codec=topk --set exchange.codec.rank=2",
        "exchange.codec is topk, which has no such key; powersgd has: choose with exchange.codec=powersgd",
    ),
    "quotes": Mistake(
        f"{TRAIN} --set exchange.codec={{name: topk}}",
        "quote a value that has spaces, as in --set 'exchange.codec={name: topk, density: 0.01}'",
    ),
    "a module": Mistake(f"{TRAIN} --set 'model={{name: import, path: \"nosuch.module:net\"}}'", "nosuch"),
    "no Java": Mistake(
        "prepare --config smoke --set 'archive={kind: synthetic, train: 8, validation: 4, test: 4}'",
        "Spark does not start: there is no Java: set JAVA_HOME to Java 17 or 21",
        env=("PATH", "/nope"),
    ),
    "Java 25": Mistake(
        TRAIN, "This Java is too new for Spark: set JAVA_HOME to Java 17 or 21", 4, ("JAVA_HOME", JAVA_25)
    ),
    "nothing to estimate": Mistake("estimate", "nothing to predict from: name --measurements FILE"),
    # Further ones.
    **{
        f"a misspelt setting of {verb}": Mistake(
            f"{verb} --config smoke --set optimizer.momentun=0.8",
            "optimizer.momentun: unknown key of optimizer=lars (did you mean momentum?)",
        )
        for verb in ("prepare", "train")
    },
    "a number out of range": Mistake(f"{TRAIN} --set optimizer.momentum=1.5", "optimizer.momentum=1.5: should be less"),
    "Petastorm within an epoch": Mistake(
        f"{TRAIN} --set reader.name=petastorm --set training.checkpoint_every_steps=5",
        "Petastorm's reader cannot resume within an epoch",
    ),
    "Petastorm with checksums": Mistake(
        f"{TRAIN} --set reader.name=petastorm --set training.checkpoint_every_steps=null --set reader.verify=always",
        "reader.verify=always needs reader.name=groundswell",
    ),
    "records behind a URL": Mistake(
        f"{TRAIN} --set training.output=s3://b/c --set tracking.offline=true",
        "`groundswell sync` look for them, and training.output=s3://b/c is a URL: set it to a folder",
    ),
    "a cache behind a URL": Mistake(f"{TRAIN} --set reader.cache_folder=s3://b/c", "reader.cache_folder=s3://b/c is a"),
    "an output in the dataset": Mistake(
        f"{TRAIN} --set training.output=DATASET/outputs",
        "training.output=DATASET/outputs is in the dataset DATASET: choose a folder outside",
    ),
    "an empty folder as archive": Mistake(
        "prepare --config smoke --set archive.root=FOLDER/empty", "FOLDER/empty: no BigEarthNet v2.0 archive, expected"
    ),
    "an archive that is not named": Mistake("prepare --config smoke --set archive.root=", "archive.root is not set"),
    "an empty folder as dataset": Mistake("train --config smoke --set dataset.path=FOLDER/empty", "no dataset.json"),
    "fewer samples than a batch": Mistake(
        f"{TRAIN} --set training.batch_size_per_worker=17",
        "fewer than one global batch of 34 (2 workers x 17): lower training.batch_size_per_worker or launch.num",
    ),
    "a run that does not exist": Mistake(f"{TRAIN} --set training.resume_run=nosuchrun", "nosuchrun"),
    "a split that does not exist": Mistake(
        f"{EVALUATE} --config smoke --set dataset.path=DATASET --split tst",
        "no split 'tst', only test, train, validation",
    ),
    "a long name of a dataset": Mistake(
        f"{PREPARE} --set dataset.path={240 * 'x'}",
        f"cannot be written (FOLDER/cwd/.{240 * 'x'}.incomplete.lease: File name too long): choose another",
    ),
    "a name beyond all limits": Mistake(f"list --result {256 * 'x'}", "cannot be written: File name too long"),
}
STARTING_SPARK = ("Java 25", "a Java that does not start")
_ANSWERS = """
import json, os, shlex, sys, tempfile
from pathlib import Path
from jobs.shell import cli

def answer(line, variable, value):
    before, kept = {**os.environ}, [os.dup(1), os.dup(2)]
    with tempfile.TemporaryFile("w+") as out, tempfile.TemporaryFile("w+") as err:
        os.dup2(out.fileno(), 1), os.dup2(err.fileno(), 2)
        os.environ.update({variable: value} if variable else {})
        if variable == "PATH":
            os.environ.pop("JAVA_HOME", None)
        code = cli.execute(shlex.split(line))
        for stream, descriptor in zip((sys.stdout, sys.stderr), kept):
            stream.flush()
            os.dup2(descriptor, stream.fileno())
        os.environ.clear(), os.environ.update(before)
        texts = [(file.seek(0), file.read())[1] for file in (out, err)]
    return [code, *texts, [str(path) for path in Path().rglob("*")]]

print(json.dumps([answer(*each) for each in json.loads(sys.argv[1])]))
"""
"""Runs commands one after the other, also what other programs print for them."""


@pytest.fixture(scope="module")
def port_of_another_program() -> Iterator[int]:
    with ThreadingHTTPServer(("127.0.0.1", 0), BaseHTTPRequestHandler) as server:
        threading.Thread(target=server.serve_forever).start()
        yield server.server_port
        server.shutdown()


@pytest.fixture(scope="module")
def answers(
    small_dataset: Path,
    small_archive: Path,
    new_store: Callable[[Path], str],
    port_of_another_program: int,
    tmp_path_factory: pytest.TempPathFactory,
) -> dict[str, tuple[str, list[Any]]]:
    """By mistake: the message that is expected, and code, output, errors and files of the command.

    All commands run in one process that has no session, in an empty folder.
    """
    folder = tmp_path_factory.mktemp("mistakes")
    for name in ("cwd", "empty", "v1/BigEarthNet-v1.0/S2A_MSIL2A_20170613T101031_0_45"):
        (folder / name).mkdir(parents=True)
    (folder / "file").touch()
    (folder / "java/bin").mkdir(parents=True)
    (folder / "java/bin/java").symlink_to(shutil.which("false") or "")
    places = {
        "DATASET": small_dataset,
        "ARCHIVE": small_archive,
        "STORE": new_store(folder / "store.db"),
        "PORT": port_of_another_program,
    }

    def filled(text: str) -> str:
        return functools.reduce(lambda made, place: made.replace(*map(str, place)), places.items(), text)

    places["FOLDER"] = folder
    lines = [[*map(filled, (each.line, *each.env))] for each in MISTAKES.values()]
    environment = {name: value for name, value in os.environ.items() if not name.startswith("MLFLOW")}
    command = [sys.executable, "-c", _ANSWERS, json.dumps(lines)]
    done = subprocess.run(
        command, cwd=folder / "cwd", env=environment, capture_output=True, text=True, timeout=patient(250)
    )
    assert done.returncode == 0, done.stderr
    given = zip(MISTAKES.items(), json.loads(done.stdout.splitlines()[-1]), strict=True)
    return {name: (filled(mistake.message), answer) for (name, mistake), answer in given}


@pytest.mark.parametrize("name", MISTAKES)
def test_a_mistake_is_answered_in_one_line_before_spark_starts(
    answers: dict[str, tuple[str, list[Any]]], name: str
) -> None:
    message, (code, out, err, left) = answers[name]
    if name == "Java 25" and not JAVA_25:
        pytest.skip("needs a Java 25 beside the one of the tests")
    assert (code, left, "starting Spark" in out) == (MISTAKES[name].code, [], name in STARTING_SPARK), err
    assert message in err
    lines = re.sub(r"^(WARNING: |.*/spark-class: ).*\n", "", err, flags=re.MULTILINE)  # of Java and of Spark's script
    own = [line for line in lines.splitlines() if line]
    assert len(own) == (code != 0), err


def test_more_workers_than_slots(error_of: Callable[..., str], small_dataset: Path) -> None:
    assert "3 workers do not fit 2 slots" in error_of(
        "train", f"dataset.path={small_dataset}", "launch.num_workers=3", code=4
    )


@pytest.mark.parametrize(
    ("splits", "message"), [([], "metadata.parquet"), (["test"] * 56, "no samples of the split 'train'")]
)
def test_metadata_without_training_samples(
    error_of: Callable[..., str], archive_copy: Path, splits: list[str], message: str
) -> None:
    path = archive_copy / "metadata.parquet"
    table = pq.read_table(path).slice(0, len(splits))
    place = table.schema.get_field_index("split")
    pq.write_table(table.set_column(place, "split", pa.array(splits, pa.string())), path)
    assert message in error_of("prepare", f"archive.root={archive_copy}", "dataset.path=dataset")


def test_metadata_that_names_what_is_not_there(error_of: Callable[..., str], archive_copy: Path) -> None:
    patch = next(archive_copy.glob("BigEarthNet-S2/*/*"))
    shutil.rmtree(patch)
    assert patch.name in error_of("prepare", f"archive.root={archive_copy}")


@pytest.fixture
def dataset_copy(small_dataset: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(small_dataset, tmp_path / "dataset"))


@pytest.mark.parametrize(("split", "verb"), [("train", "train"), ("validation", "train"), ("test", EVALUATE)])
def test_a_shard_that_is_missing(error_of: Callable[..., str], dataset_copy: Path, split: str, verb: str) -> None:
    (dataset_copy / split / "part-00000.parquet").unlink()
    assert f"{split}/part-00000.parquet is missing: the same `groundswell prepare` command writes" in error_of(
        verb, f"dataset.path={dataset_copy}"
    )


def test_a_cache_of_less_than_three_row_groups(
    error_of: Callable[..., str], dataset_copy: Path, edit_manifest: Callable[..., None]
) -> None:
    path = dataset_copy / "validation" / "part-00000.parquet"
    rows = read_manifest(dataset_copy).splits["validation"].shards[0].row_groups[0]
    pq.write_table(pq.read_table(path), path, compression="zstd", row_group_size=rows)
    size = path.stat().st_size
    edit_manifest(dataset_copy, lambda values: values["splits"]["validation"]["shards"][0].update(size=size))
    assert "reader.cache_limit_gib=0.0001 is less than three row groups" in error_of(
        "train", f"dataset.path={dataset_copy}", "reader.cache_limit_gib=0.0001"
    )


def test_class_names_that_were_swapped_by_hand(error_of: Callable[..., str], dataset_copy: Path) -> None:
    values = json.loads((dataset_copy / "dataset.json").read_text())
    values["class_names"].reverse()
    (dataset_copy / "dataset.json").write_text(json.dumps(values))
    assert "dataset.json was changed after it was written" in error_of("train", f"dataset.path={dataset_copy}")


@pytest.mark.parametrize("verb", ["train", "find-rate"])
def test_a_deleted_experiment_is_told_before_spark_starts(
    error_of: Callable[..., str], small_dataset: Path, mlflow_store: str, monkeypatch: pytest.MonkeyPatch, verb: str
) -> None:
    start_run("gone", None, {}, {})
    client = MlflowClient(mlflow_store)
    experiment = client.get_experiment_by_name("gone").experiment_id
    client.delete_experiment(experiment)
    monkeypatch.setattr(f"jobs.{verb.replace('-', '_')}.spark_session", None)
    line = error_of(verb, f"dataset.path={small_dataset}", "tracking.experiment=gone")
    expected = f"choose another name, or restore it with `mlflow experiments restore --experiment-id {experiment}`"
    assert f"tracking.experiment=gone is deleted in {mlflow_store}: {expected}" in line
    with pytest.raises(ValueError, match=r"tracking\.experiment=gone is deleted"):
        start_run("gone", None, {}, {})
    client.restore_experiment(experiment)
    assert check_store("gone") == f"{mlflow_store} answers"
