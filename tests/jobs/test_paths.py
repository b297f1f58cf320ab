from pathlib import Path

import pytest

from conf.load import load
from jobs.paths import with_absolute_paths
from jobs.prepare import configured_archive


def test_every_path_of_the_configuration_is_absolute(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", "/home/somebody")
    settings = ["dataset.path=$HOME/data", "training.output=~/out", "reader.cache_folder=cache", "archive.root=~/a"]
    config = load("smoke", settings)
    absolute = with_absolute_paths(config)
    assert absolute.dataset.path == "/home/somebody/data"
    assert absolute.training.output == "/home/somebody/out"
    assert absolute.reader.cache_folder == f"{tmp_path}/cache"
    assert configured_archive(config).root == "/home/somebody/a"
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("setting", ["dataset.path", "training.output", "reader.cache_folder"])
def test_a_misspelt_path_names_its_setting(setting: str) -> None:
    with pytest.raises(ValueError, match=rf"{setting}: s3:/b/x: .*expected s3://b/x"):
        with_absolute_paths(load("smoke", [f"{setting}=s3:/b/x"]))


@pytest.mark.parametrize("setting", ["root", "splits"])
def test_a_misspelt_path_of_the_archive_names_its_setting(setting: str) -> None:
    settings = ["archive={kind: bigearthnet_v1, root: /data}", f"archive.{setting}=s3:/b/x"]
    with pytest.raises(ValueError, match=rf"archive\.{setting}: s3:/b/x: .*expected s3://b/x"):
        configured_archive(load("smoke", settings))
