import re
from pathlib import Path

import pytest

from jobs import cli
from pipelines.dataset import reader
from pipelines.dataset.rows import row_checksum

pytestmark = pytest.mark.spark


def test_it_prints_rates_and_the_wait(small_dataset: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert (
        cli.execute(
            ["benchmark-reader", "--dataset", str(small_dataset), "--batch-size", "8", "--images-per-second", "100"]
        )
        == 0
    )
    lines = capsys.readouterr().out.splitlines()
    assert "32 rows of 160,547 bytes" in lines[0]
    assert lines[1] == "checksums: computed in the first epoch only"
    assert [line.split(":")[0] for line in lines[2:]] == [
        "from disk",
        "from memory",
        "from memory",
        "training at 100 images/s",
    ]
    for line in lines[2:]:
        assert re.search(r": [\d,]+ rows/s, [\d,]+ MB/s, waited \d+\.\d% of \d+\.\d s$", line), line
    # A consumer that takes 8 rows every 80 ms, or later.
    assert 0 < float(re.search(r": ([\d,]+) rows/s", lines[-1])[1]) <= 100  # type: ignore[index]


@pytest.mark.parametrize(("verify", "checked"), [("never", 0), ("first_epoch", 32), ("always", 4 * 32)])
def test_checksums_are_computed_as_asked(
    small_dataset: Path,
    verify: str,
    checked: int,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    rows: list[int] = []
    original = row_checksum
    # Only what reads in Python can be counted; test_reader compares both ways under each setting.
    monkeypatch.setattr(reader, "make_gather", lambda columns: None)
    monkeypatch.setattr(reader, "row_checksum", lambda values: (found := original(values), rows.append(found))[0])
    arguments = ["--dataset", str(small_dataset), "--batch-size", "8", "--verify", verify]
    assert cli.execute(["benchmark-reader", *arguments]) == 0
    assert len(rows) == checked
    words = {"never": "never computed", "first_epoch": "computed in the first epoch only"}
    assert f"checksums: {words.get(verify, 'computed in every epoch')}\n" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--dataset", "nowhere"], "nowhere is not a finished dataset"),
        (["--dataset", "SMALL", "--split", "val"], "only test, train, validation"),
        (["--dataset", "SMALL", "--batch-size", "33"], "has 32 rows of 'train', fewer than --batch-size 33"),
    ],
)
def test_bad_input_is_one_message(
    small_dataset: Path, arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert (
        cli.execute(
            ["benchmark-reader", *(str(small_dataset) if argument == "SMALL" else argument for argument in arguments)]
        )
        == 2
    )
    assert message in capsys.readouterr().err
