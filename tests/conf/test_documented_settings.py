"""The settings that the documents show."""

import re
from pathlib import Path

import pytest

from conf.load import load

PROJECT = Path(__file__).parents[2]
DOCUMENTS = [PROJECT / "README.md", *(PROJECT / "jobs").rglob("*.md"), *(PROJECT / "pipelines").rglob("*.md")]
# The modules of the page "write your own" exist only where its test writes them (tests/parallel/test_own_parts.py).
TEXT = "\n\n".join(path.read_text() for path in DOCUMENTS if path.name != "WRITE_YOUR_OWN.md")
# A text in quotes may go on in the next line.
SETTINGS = [
    " ".join(quoted.split()) or plain for quoted, plain in re.findall(r"--set\s+(?:'([^']+)'|([^'\s`)]+))", TEXT)
]
BESIDE = {"training.selection.patience=5": ["training.selection.metric=val/f1_micro"]}
"""What they show together with a setting."""
ALREADY_SO = {"launch.retries=2"}
"""What the configuration has already."""
PLACEHOLDER = re.compile(r"NAME|<|^section\.key=")


def test_the_settings_are_found() -> None:
    assert len(SETTINGS) == len(re.findall(r"--set\s", TEXT))
    assert {
        "training.mode={name: local, every_steps: 8}",
        "training.mode={name: pipeline, stages: 2}",
        "training.mode=delayed",
        'model={name: import, path: "keras.applications:MobileNet", settings: {alpha: 0.5}}',
        "optimizer=sgd",
    } <= {*SETTINGS}


@pytest.mark.parametrize("setting", sorted({setting for setting in SETTINGS if not PLACEHOLDER.search(setting)}))
def test_a_documented_setting_is_taken_with_the_documented_configuration(setting: str) -> None:
    beside = BESIDE.get(setting, [])
    taken = load("bigearthnet_v2_resnet50", [*beside, setting])
    assert (taken == load("bigearthnet_v2_resnet50", beside)) == (setting in ALREADY_SO)
