import argparse
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import groundswell
from conf.load import load
from conf.schema import RunConfig
from jobs.compare import compare
from jobs.prepare import configured_archive, prepare
from jobs.shell.command import Result, model_uri_of, run
from jobs.shell.paths import setting_of, with_absolute_paths
from jobs.shell.verbs import VERBS, parser_of
from pipelines.launch.runner import BarrierRunner

SPELLINGS = {
    "~/x.{0}": "/home/somebody/x.{0}",
    "$HOME/x.{0}": "/home/somebody/x.{0}",
    "file:/data/x.{0}": "/data/x.{0}",
    "dbfs:/x.{0}": "this machine has no /dbfs",
    "s3:/bucket/x.{0}": "expected s3://bucket/x.{0}",
}
"""What a user writes, and what it means or why it is refused."""


@pytest.mark.parametrize("folder", ["/data/Ünï 😀", "/data/it's: {a} #1", '/data/"x"\\\ty', "null", "7"])
def test_a_path_stays_as_it_is_on_its_way_through_a_setting(folder: str) -> None:
    assert load("smoke", [setting_of("dataset.path", folder)]).dataset.path == folder


@pytest.fixture
def elsewhere(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty working directory, and a home folder that does not exist."""
    monkeypatch.setenv("HOME", "/home/somebody")
    return folder


def of_this_machine() -> list[tuple[str, argparse.Action]]:
    """The arguments of all verbs that are files or folders, with their verbs."""
    return [
        (verb, action) for verb in VERBS for action in parser_of(verb)._actions if action.metavar in ("FILE", "FOLDER")
    ]


@pytest.mark.parametrize("spelling", SPELLINGS)
def test_no_argument_becomes_a_folder_of_its_spelling(
    elsewhere: Path, monkeypatch: pytest.MonkeyPatch, spelling: str
) -> None:
    assert {"--save", "--saved", "--output", "--grid", "--results", "--map", "--plot", "--folder", "--result"} <= {
        action.option_strings[0] for _, action in of_this_machine()
    }
    monkeypatch.setattr(Path, "is_dir", lambda self: self == Path("/home/somebody") or self == Path("/data"))
    for verb, action in of_this_machine():
        suffix = "png" if action.option_strings[0] == "--plot" else "json"
        text, meaning, parser = spelling.format(suffix), SPELLINGS[spelling].format(suffix), parser_of(verb)
        for other in parser._actions:
            other.required = False
        command = [action.option_strings[0], text]
        if meaning.startswith("/"):
            value: Any = getattr(parser.parse(command), action.dest)
            assert [str(each) for each in (value if isinstance(value, list) else [value])] == [meaning], (verb, text)
        else:
            with pytest.raises(ValueError, match=rf"^argument {command[0]}: .*{meaning}"):
                parser.parse(command)
    assert list(elsewhere.iterdir()) == []


@pytest.mark.parametrize(
    ("verb", "argument", "typed", "meaning"),
    [
        ("compare", "output", "a/b", "a/b"),
        ("compare", "save", "/data/runs.json", "/data/runs.json"),
        ("compare", "output", "./s3:/x", "FOLDER/s3:/x"),
        ("config", "config", "./mine.yaml", "./mine.yaml"),
        ("config", "config", "~/mine.yaml", "/home/somebody/mine.yaml"),
    ],
)
def test_ordinary_paths_stay_as_they_were_typed(
    elsewhere: Path, verb: str, argument: str, typed: str, meaning: str
) -> None:
    assert str(getattr(parser_of(verb).parse([f"--{argument}", typed]), argument)) == meaning.replace(
        "FOLDER", str(elsewhere)
    )


@pytest.mark.parametrize("spelling", ["s3:/bucket/x", "dbfs:/x", "s3://bucket/x"])
@pytest.mark.parametrize(
    ("job", "name"),
    [
        (lambda text: BarrierRunner(None, 2, log_folder=text), "log_folder {}"),
        (lambda text: compare(saved=[text]), "saved {}"),
        (lambda text: model_uri_of(f"{text}.json"), r"--model {}\.json"),
        (groundswell.load, "config {}"),
    ],
    ids=["log_folder", "saved", "model", "config"],
)
def test_names_of_files_in_a_notebook(elsewhere: Path, spelling: str, job: Callable[[str], Any], name: str) -> None:
    with pytest.raises(ValueError, match=f"^{name.format(spelling)}: "):
        job(spelling)
    assert list(elsewhere.iterdir()) == []


@pytest.mark.parametrize("verb", [groundswell.evaluate, groundswell.score, groundswell.probe])
@pytest.mark.parametrize(
    ("model", "message"),
    [
        ("s3:/bucket/m", r"^--model s3:/bucket/m: .*expected s3://bucket/m"),
        ("$HOME/train.json", r"^--model \$HOME/train\.json is no result of a training: "),
    ],
)
def test_models_are_named_in_a_notebook_as_on_the_command_line(
    verb: Callable[..., Any], model: str, message: str, elsewhere: Path
) -> None:
    more = ["in", "out"] if verb is groundswell.score else []
    with pytest.raises(ValueError, match=message):
        verb(load("smoke", ["dataset.path=nothing"]), model, *more)
    assert list(elsewhere.iterdir()) == []


def test_a_configuration_may_be_in_the_home_folder(elsewhere: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(elsewhere))
    (elsewhere / "mine.yaml").write_text("training: {epochs: 7}\n")
    spellings = ("~/mine.yaml", "$HOME/mine.yaml", f"file:{elsewhere}/mine.yaml", elsewhere / "mine.yaml")
    assert ([groundswell.load(spelling).training.epochs for spelling in spellings], groundswell.load("smoke")) == (
        [7] * 4,
        load("smoke"),
    )


def test_the_result_of_a_job_is_where_its_name_says(elsewhere: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(elsewhere))
    assert (
        run("list", ["--result", "~/r.json"], lambda result: None),
        [each.name for each in elsewhere.iterdir()],
    ) == (0, ["r.json"])
    Result("train", model_uri="runs:/1/model").write(elsewhere / "train.json")
    meanings = {
        **dict.fromkeys(("$HOME/train.json", f"file:{elsewhere}/train.json"), "runs:/1/model"),
        "~/exported": str(elsewhere / "exported"),
        **{uri: uri for uri in ("runs:/1/model", "models:/name@champion", "s3://bucket/model")},
    }
    assert {text: model_uri_of(text) for text in meanings} == meanings


def test_every_path_of_the_configuration_is_absolute(elsewhere: Path) -> None:
    settings = ["dataset.path=$HOME/data", "training.output=~/out", "reader.cache_folder=cache", "archive.root=~/a"]
    config = load("smoke", settings)
    absolute, home = with_absolute_paths(config), "/home/somebody"
    found = (absolute.dataset.path, absolute.training.output, absolute.reader.cache_folder)
    assert (found, configured_archive(config).root, list(elsewhere.iterdir())) == (
        (f"{home}/data", f"{home}/out", f"{elsewhere}/cache"),
        f"{home}/a",
        [],
    )


@pytest.mark.parametrize(
    "setting", ["dataset.path", "training.output", "reader.cache_folder", "archive.root", "archive.splits"]
)
def test_a_misspelt_path_names_its_setting(setting: str) -> None:
    config = load("smoke", ["archive={kind: bigearthnet_v1, root: /data}", f"{setting}=s3:/b/x"])
    job: Callable[[RunConfig], Any] = configured_archive if setting.startswith("archive") else with_absolute_paths
    with pytest.raises(ValueError, match=rf"{setting}: s3:/b/x: .*expected s3://b/x"):
        job(config)


def test_a_dataset_that_is_not_named_is_refused_where_it_is_needed() -> None:
    config = load(None, ["archive.kind=synthetic", "archive.train=8", "archive.validation=4", "archive.test=4"])
    for job in (with_absolute_paths, prepare):
        with pytest.raises(ValueError, match=r"^dataset\.path is not set: name the folder or URL of the prepared"):
            job(config)
    assert with_absolute_paths(config, reads_dataset=False).dataset.path == ""
