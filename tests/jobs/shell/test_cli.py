"""The `groundswell` command as a user meets it."""

import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import yaml

from conf.load import load
from jobs.shell import cli
from jobs.shell.verbs import VERBS
from tests.patience import patient, wait_until

COMMAND = Path(sys.executable).parent / "groundswell"
HEAVY = ("pyspark", "pyarrow", "tensorflow", "keras", "mlflow", "horovod", "petastorm")


def groundswell(*arguments: str, cwd: Path | None = None) -> subprocess.CompletedProcess[str]:
    return subprocess.run([COMMAND, *arguments], capture_output=True, text=True, timeout=patient(120), cwd=cwd)


def test_the_real_command_answers_and_ends_with_its_code(tmp_path: Path) -> None:
    version = groundswell("--version")
    assert version.returncode == 0
    assert re.search(r"^groundswell 0\.[\s\S]*pyspark 4", version.stdout)
    missing = groundswell("train", "--config", "smoke", "--set", "dataset.path=nowhere", cwd=tmp_path)
    assert missing.returncode == 2
    assert re.search(r"^groundswell train: error: .*nowhere is not a finished dataset", missing.stderr)
    assert list(tmp_path.iterdir()) == []


_IMPORTED = """
import sys
from jobs.shell import cli
for line in {lines!r}:
    try:
        code = cli.execute(line.split())
    except SystemExit as end:
        code = end.code
    assert code in (0, 2), code
heavy = sorted(set({heavy!r}) & set(sys.modules))
assert not heavy, heavy
"""


def test_help_lists_and_mistakes_are_answered_before_anything_heavy_is_imported() -> None:
    lines = [
        "--help",
        "--version",
        *(f"{verb} --help" for verb in VERBS),
        "list",
        "config --config demo --comments",
        "train --config smoke --set training.epochs=many",
        "train --config smoke --set archive.root=x",
        "trian",
    ]
    script = _IMPORTED.format(lines=lines, heavy=HEAVY)
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=patient(120))
    assert done.returncode == 0, done.stderr
    told = [text for verb in VERBS for text in (f"usage: groundswell {verb}", f"  {verb} ", VERBS[verb].summary)]
    assert [text for text in told if text not in done.stdout] == []
    assert done.stdout.count("130 interrupted") == len(VERBS) + 1, "exit codes are part of every help"


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("trian --config smoke", "'trian' is not a verb: did you mean train?"),
        ("benchmark", "did you mean benchmark-reader?"),
        ("xyz", "'xyz' is not a verb: expected one of prepare, train, evaluate, "),
        ("--config smoke train", "the verb comes first: groundswell train --config ..."),
        ("", "usage: groundswell VERB"),
        ("train", "--config NAME|PATH is missing: a YAML file, or one of: bigearthnet_v2_resnet50, demo, "),
        ("train --config", "argument --config: expected one argument"),
        ("train smoke", "smoke: a configuration is given as --config smoke"),
        ("train my.yaml", "my.yaml: a configuration is given as --config my.yaml"),
        ("train --conf smoke", "unknown argument --conf (did you mean --config?)"),
        ("train --config smoke --epochs 3", "--epochs: a setting is given as --set training.epochs=3"),
        ("train --config smoke --epochs", "--epochs: a setting is given as --set training.epochs=VALUE"),
        ("train --batch-size-per-worker=8", "a setting is given as --set training.batch_size_per_worker=8"),
        ("train --cofnig=smoke", "unknown argument --cofnig=smoke (did you mean --config?)"),
        ("train --config smoke --xyz", "unknown argument --xyz; known: -h, --help, --result, --config, --set"),
        ("train --config smok", "'smok' is neither a YAML file nor one of the shipped ones: bigearthnet_v2_resnet50"),
        (
            "train --config smoke --set training.epochs=1 launch.retries=2",
            "launch.retries=2: each setting is given by an argument of its own, --set launch.retries=2",
        ),
        ("train --config smoke --dataset.path=x", "own, --set dataset.path=x"),
        ("train --config smoke --dataset.path x", "own, --set dataset.path=x"),
        ("train --config smoke dataset.path=x", "own, --set dataset.path=x"),
        ("train --config smoke --set dataset.path x", "a setting is one argument, --set dataset.path=x"),
        ("train --config smoke --set dataset.path", "is not of the form section.key=value"),
        (
            "train --config smoke --set exchange.codec={name: powersgd, rank: 2}",
            "quote a value that has spaces, as in --set 'exchange.codec={name: topk, density: 0.01}'",
        ),
        ("evaluate --config smoke", "--model URI is missing: runs:/<run id>/model, models:/<name>/<version>, "),
        ("benchmark-reader --dataset x --batch-size 0", "--batch-size: should be a whole number above 0, got '0'"),
        ("benchmark-reader --dataset x --batch-size 2.5", "should be a whole number above 0, got '2.5'"),
        ("benchmark-reader --dataset x --cache-limit-gib nan", "should be a number above 0, got 'nan'"),
        ("benchmark-reader --dataset x --images-per-second -1", "should be a number above 0, got '-1'"),
        ("benchmark-reader --dataset x --verify often", "choose from 'first_epoch', 'always', 'never'"),
        ("benchmark-reader --config smoke", "unknown argument --config"),
        ("list codec", "choose from 'archives', 'codecs'"),
    ],
)
def test_a_mistake_gets_an_answer(line: str, message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.execute(line.split()) == 2
    captured = capsys.readouterr()
    assert (message in captured.err, captured.out, "Traceback" in captured.err) == (True, "", False), captured.err


def test_a_line_for_everything_that_can_be_chosen(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.execute(["list"]) == 0
    everything = capsys.readouterr().out
    for name, line in (
        ("powersgd", r"\(Vogels et al. 2019\)"),
        ("eurosat_ms", "EuroSAT"),
        ("sgd", "Momentum SGD"),
        ("resnet", "ResNet v1.5"),
        ("smoke", "A tiny ResNet"),
        ("val/f1_micro", "each epoch: F1 of all decisions"),
    ):
        assert re.search(rf"  {name} .*{line}", everything), name
    described = [line.split(maxsplit=1)[1] for line in everything.splitlines() if line.startswith("  ")]
    assert sorted(described) == sorted({*described}), "no two have one description"
    assert cli.execute(["list", "codecs"]) == 0
    codecs = capsys.readouterr().out
    assert codecs in everything
    assert "eurosat" not in codecs


def test_config_prints_what_config_reads(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def printed(*arguments: str) -> str:
        assert cli.execute(["config", *arguments]) == 0
        return capsys.readouterr().out

    settings = ["--set", "exchange.codec=powersgd", "--set", "exchange.codec.rank=2"]
    text, file = printed("--config", "demo", *settings), tmp_path / "mine.yaml"
    file.write_text(text)
    assert (load(str(file)), printed("--config", str(file))) == (load("demo", settings[1::2]), text)
    assert "every other verb reads" in printed("--comments")
    assert "# Number of passes over the training split." in printed("--config", "demo", "--comments")


def test_a_note_is_said_once_beside_what_config_prints(capsys: pytest.CaptureFixture[str]) -> None:
    settings = ["--set", "training.resume_run=0123", "--set", "tracking.run_name=again"]
    assert cli.execute(["config", "--config", "smoke", *settings]) == 0
    printed = capsys.readouterr()
    assert yaml.safe_load(printed.out)["tracking"]["run_name"] == "again"
    (note,) = printed.err.splitlines()
    assert note.startswith("groundswell config: --set tracking.run_name is not used: training.resume_run continues")


@pytest.mark.parametrize(
    "line", ["train --conf smoke", "train --config smoke --set training.epochs=0", "benchmark-reader --dataset no"]
)
def test_the_result_of_a_mistake_is_written(line: str, tmp_path: Path, error_line: Callable[..., str]) -> None:
    path = tmp_path / "result.json"
    path.write_text('{"exit_code": 0, "ended": "finished"}')
    verb, *rest = line.split()
    told, result = error_line(verb, "--result", str(path), *rest), json.loads(path.read_text())
    assert (result["verb"], result["exit_code"], result["ended"] in told) == (verb, 2, True)
    assert list(tmp_path.iterdir()) == [path], "nothing half written is left"


def test_a_result_that_cannot_be_written_is_found_out_first(
    small_dataset: Path, tmp_path: Path, error_line: Callable[..., str]
) -> None:
    for path, message in (
        (tmp_path / "nowhere" / "result.json", "cannot be written: No such file"),
        (small_dataset / "result.json", "would write into the dataset"),
    ):
        assert f"--result {path} {message}" in error_line("list", "--result", str(path))
        assert not path.exists()


def test_the_master_is_spark_submits(monkeypatch: pytest.MonkeyPatch, error_line: Callable[..., str]) -> None:
    monkeypatch.setenv("PYSPARK_GATEWAY_PORT", "1")
    assert "--set launch.master has no effect: spark-submit has chosen the master" in error_line(
        "train", "--config", "smoke", settings=["launch.master=local[2]"]
    )


def submitted(project: Path, small_dataset: Path, tmp_path: Path, *settings: str) -> subprocess.Popen[str]:
    command = [
        *(str(COMMAND.parent / "spark-submit"), "--master", "local[1]", str(project / "jobs" / "train.py")),
        *("--config", "smoke", *(word for each in settings for word in ("--set", each))),
    ]
    return subprocess.Popen(
        [*command, "--set", f"dataset.path={small_dataset}"],
        env={**os.environ, "PATH": f"{COMMAND.parent}:{os.environ['PATH']}", "PYTHONPATH": str(tmp_path)},
        cwd=tmp_path,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )


# A loss of the user's own that works on the driver, which tries it, and not in a rank.
BROKEN_LOSS = """
import os
import keras

def loss(targets, logits):
    if "HOROVOD_RANK" in os.environ:
        raise LookupError("this loss is broken")
    return keras.ops.mean(keras.ops.square(targets - logits), axis=-1)
"""


@pytest.mark.long
@pytest.mark.parametrize(
    ("settings", "code", "message"),
    [
        (["training.epochs=0"], 2, "--set training.epochs=0: should be greater than 0"),
        (["launch.num_workers=3"], 4, "3 workers do not fit 1 slot"),
        (
            ["launch.num_workers=1", "training.loss={name: import, path: 'broken:loss'}"],
            3,
            "LookupError: this loss is broken",
        ),
    ],
)
def test_spark_submit_ends_with_the_jobs_code(
    project: Path, small_dataset: Path, tmp_path: Path, settings: list[str], code: int, message: str
) -> None:
    (tmp_path / "broken.py").write_text(BROKEN_LOSS)
    job = submitted(project, small_dataset, tmp_path, *settings)
    output, _ = job.communicate(timeout=patient(200))
    assert job.returncode == code, output
    assert (message in output, "groundswell train: error: " in output) == (True, True), output


@pytest.mark.long
def test_spark_submit_that_is_interrupted_says_so(project: Path, small_dataset: Path, tmp_path: Path) -> None:
    settings = ["launch.num_workers=1", "training.epochs=500", f"training.output={tmp_path / 'out'}"]
    job, shown = submitted(project, small_dataset, tmp_path, *settings), []
    while not any(line.startswith("epoch 1/") for line in shown[-1:]):
        shown.append(job.stdout.readline())
        assert shown[-1], shown
    os.killpg(job.pid, signal.SIGINT)  # as a terminal does
    output, _ = job.communicate(timeout=patient(200))
    assert job.returncode == 130, "".join(shown) + output
    assert "stopping; Ctrl-C again stops at once" in output


@pytest.mark.long
@pytest.mark.spark
@pytest.mark.parametrize("twice", [False, True])
def test_ctrl_c_says_how_to_continue_and_twice_ends_at_once(tmp_path: Path, twice: bool) -> None:
    """A preparation that would take minutes is interrupted while it writes."""
    arguments = [
        *("--set", "archive={kind: synthetic, train: 20000, validation: 10, test: 10}"),
        *("--set", f"dataset.path={tmp_path / 'my data'}", "--result", str(tmp_path / "result.json")),
    ]
    process = subprocess.Popen(
        [COMMAND, "prepare", "--config", "smoke", *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        cwd=tmp_path,
        start_new_session=True,  # as a terminal does, which signals the whole group
    )
    wait_until(lambda: list(tmp_path.rglob("*.parquet*")) or process.poll() is not None, 200)
    assert process.poll() is None, process.communicate()
    os.killpg(process.pid, signal.SIGINT)
    if twice:
        assert any(line == "stopping; Ctrl-C again stops at once\n" for line in process.stderr)
        os.killpg(process.pid, signal.SIGINT)
    _, err = process.communicate(timeout=patient(120))
    assert process.returncode == 130
    assert not re.search("Traceback|[Pp]y4[jJ]|Errno", err), err
    assert json.loads((tmp_path / "result.json").read_text())["exit_code"] == 130
    if not twice:
        assert "groundswell prepare: interrupted\n" in err
        assert "groundswell prepare: to continue: groundswell prepare --config smoke --set 'archive={kind: " in err
        assert err.endswith(f"--set 'dataset.path={tmp_path}/my data' --result {tmp_path}/result.json\n")
