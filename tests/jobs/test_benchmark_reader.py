import re
from collections.abc import Callable
from pathlib import Path

import pytest

from jobs.shell import cli
from pipelines.dataset.format.rows import row_checksum
from pipelines.dataset.read import reader

pytestmark = pytest.mark.spark


def benchmark(dataset: Path, capsys: pytest.CaptureFixture[str], *arguments: str) -> list[str]:
    """The lines that the command prints."""
    assert cli.execute(["benchmark-reader", "--dataset", str(dataset), "--batch-size", "8", *arguments]) == 0
    return capsys.readouterr().out.splitlines()


def test_it_prints_rates_and_the_wait(small_dataset: Path, capsys: pytest.CaptureFixture[str]) -> None:
    lines = benchmark(small_dataset, capsys, "--images-per-second", "100")
    assert "32 rows of 160,547 bytes" in lines[0]
    assert lines[1] == "checksums: computed in the first epoch only"
    rates = r"(.+): ([\d,]+) rows/s, [\d,]+ MB/s, waited \d+\.\d% of \d+\.\d s"
    found = [re.fullmatch(rates, line) for line in lines[2:]]
    heads = ["from disk", "from memory", "from memory", "training at 100 images/s"]
    assert [match and match[1] for match in found] == heads, lines
    # A consumer that takes 8 rows every 80 ms, or later.
    assert 0 < float(found[-1][2]) <= 100  # type: ignore[index]


@pytest.mark.parametrize(
    ("verify", "checked", "words"),
    [
        ("never", 0, "never computed"),
        ("always", 4 * 32, "computed in every epoch"),
        ("first_epoch", 32, "computed in the first epoch only"),
    ],
)
def test_checksums_are_computed_as_asked(
    small_dataset: Path,
    verify: str,
    checked: int,
    words: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    rows, original = [], row_checksum
    # Only what reads in Python can be counted; test_reader compares both ways under each setting.
    monkeypatch.setattr(reader, "make_gather", lambda columns: None)
    monkeypatch.setattr(reader, "row_checksum", lambda values: (found := original(values), rows.append(found))[0])
    line = benchmark(small_dataset, capsys, "--verify", verify)[1]
    assert (len(rows), line) == (checked, f"checksums: {words}")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--dataset", "nowhere"], "nowhere is not a finished dataset"),
        (["--dataset", "SMALL", "--split", "val"], "only test, train, validation"),
        (["--dataset", "SMALL", "--batch-size", "33"], "has 32 rows of 'train', fewer than --batch-size 33"),
    ],
)
def test_bad_input_is_one_message(
    small_dataset: Path, arguments: list[str], message: str, error_line: Callable[..., str]
) -> None:
    assert message in error_line(
        "benchmark-reader", *[argument.replace("SMALL", str(small_dataset)) for argument in arguments]
    )
