"""JSON of others is an error and no crash, however deep it is."""

from pathlib import Path

import pytest

from pipelines.machine.json_text import parse_json
from tests.house import sources


@pytest.mark.parametrize("text", ["[" * 100_000, b'{"a":' * 100_000, "{", b"\xff", "nope"])
def test_what_is_no_json_is_a_value_error(text: str | bytes) -> None:
    with pytest.raises(ValueError, match=r"nested too deeply|Expecting|decode"):
        parse_json(text)


def test_other_parsers_read_what_we_have_sent_ourselves(project: Path) -> None:
    assert [file.name for file in sources(project) if "json.load" in file.text] == [
        "pipelines/launch/rank/fork_server.py",
        "pipelines/launch/rank/rank_main.py",
        "pipelines/launch/wire/encoding.py",
        "pipelines/machine/json_text.py",
        "pipelines/machine/packages.py",  # Keras's own settings, which Keras has read before
        "pipelines/scoring/predict/convert.py",
        "pipelines/tracking/journal/guard_main.py",
        "pipelines/tracking/models/model_metadata.py",
        "pipelines/training/checkpoint/in_memory.py",
        "pipelines/training/ranks/collective.py",
    ]
