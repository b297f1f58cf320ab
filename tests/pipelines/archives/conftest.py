"""A small generated archive, shared by the tests of this folder."""

import shutil
from pathlib import Path

import pytest

from pipelines.archives.synthetic.files import generate_bigearthnet_v2


@pytest.fixture(scope="session")
def generated(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Generated archive of 12 train, 4 validation and 4 test patches; read only."""
    root = tmp_path_factory.mktemp("archives") / "generated"
    generate_bigearthnet_v2(root, train=12, validation=4, test=4, processes=1)
    return root


@pytest.fixture
def archive(generated: Path, tmp_path: Path) -> Path:
    """A copy of the generated archive that the test may damage."""
    return Path(shutil.copytree(generated, tmp_path / "archive"))
