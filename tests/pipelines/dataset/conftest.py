"""Datasets that the tests of this folder may damage."""

import shutil
from pathlib import Path

import pytest


@pytest.fixture
def copied(small_dataset: Path, tmp_path: Path) -> Path:
    """A copy of the small dataset."""
    return Path(shutil.copytree(small_dataset, tmp_path / "copy"))
