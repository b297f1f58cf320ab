"""Files of the time when every key had to be written out, before optimizers and networks had keys of their own."""

from pathlib import Path

import pytest

from conf.load import load

COMPLETE = Path(__file__).parent / "complete"


def changed(tmp_path: Path, *replacements: tuple[str, str]) -> str:
    text = (COMPLETE / "smoke.yaml").read_text()
    for old, new in replacements:
        assert old in text
        text = text.replace(old, new)
    path = tmp_path / "mine.yaml"
    path.write_text(text)
    return str(path)


@pytest.mark.parametrize("name", sorted(path.stem for path in COMPLETE.glob("*.yaml")))
def test_a_complete_file_means_what_it_meant(name: str) -> None:
    assert load(str(COMPLETE / f"{name}.yaml")) == load(name)


def test_a_key_that_the_chosen_optimizer_does_not_have_is_refused(tmp_path: Path) -> None:
    path = changed(tmp_path, ("name: lars", "name: sgd"))
    with pytest.raises(ValueError, match=r"\.trust_coefficient: optimizer is sgd, which has no such key; lars"):
        load(path)
    path = changed(tmp_path, ("name: lars", "name: sgd"), ("  trust_coefficient: 0.02\n", ""))
    assert load(path).optimizer.name == "sgd"


def test_a_key_that_was_renamed_is_refused_with_its_new_name(tmp_path: Path) -> None:
    path = changed(tmp_path, ("  warmup: {name: gradual, epochs: 1}\n", "  warmup_epochs: 1\n"))
    with pytest.raises(ValueError, match=r"schedule\.warmup_epochs has a new spelling: write schedule\.warmup="):
        load(path)
    codec = "{name: topk, stages: [{before_step: 5, density: 0.5}]}"
    path = changed(tmp_path, ("  codec:\n    name: none\n", f"  codec: {codec}\n"))
    with pytest.raises(ValueError, match=r"exchange\.codec\.stages has a new name: .*density_schedule"):
        load(path)
