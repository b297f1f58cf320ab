"""The settings that README.md shows."""

import re
from pathlib import Path

import pytest

from conf.load import load

README = (Path(__file__).parents[2] / "README.md").read_text()
# A text in quotes may go on in the next line.
SETTINGS = [
    " ".join(quoted.split()) or plain for quoted, plain in re.findall(r"--set\s+(?:'([^']+)'|([^'\s`)]+))", README)
]
BESIDE = {"training.selection.patience=5": ["training.selection.metric=val/f1_micro"]}
"""What README.md shows together with a setting."""
ALREADY_SO = {"launch.retries=2"}
"""What the configuration has already."""
PLACEHOLDER = re.compile(r"NAME|<|^section\.key=")


def test_the_settings_are_found() -> None:
    assert len(SETTINGS) == len(re.findall(r"--set\s", README))
    assert {
        "training.mode={name: local, every_steps: 8}",
        "training.mode={name: pipeline, stages: 2}",
        "training.mode=delayed",
        'model={name: import, path: "keras.applications:MobileNet", settings: {alpha: 0.5}}',
        "optimizer=sgd",
    } <= {*SETTINGS}


@pytest.mark.parametrize("setting", [setting for setting in SETTINGS if not PLACEHOLDER.search(setting)])
def test_a_documented_setting_is_taken_with_the_documented_configuration(setting: str) -> None:
    beside = BESIDE.get(setting, [])
    taken = load("bigearthnet_v2_resnet50", [*beside, setting])
    assert (taken == load("bigearthnet_v2_resnet50", beside)) == (setting in ALREADY_SO)
