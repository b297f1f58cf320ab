import hashlib
import re
import subprocess
from importlib.metadata import version
from pathlib import Path

import pytest

from pipelines.tracking.store import revision


@pytest.fixture
def repository(tmp_path: Path) -> Path:
    """A repository that tracks one file, `package.py`."""
    repository = tmp_path / "repository"
    repository.mkdir()
    (repository / "package.py").write_text("1")
    git = ["git", "-C", str(repository), "-c", "user.name=t", "-c", "user.email=t@localhost"]
    for command in (["init", "-q"], ["add", "package.py"], ["commit", "-qm", "one"]):
        subprocess.run([*git, *command], check=True)
    return repository


def test_the_commit_of_a_tracked_file(repository: Path) -> None:
    commit = revision.git_revision(repository / "package.py")
    assert re.fullmatch("[0-9a-f]{40}", str(commit))
    (repository / "package.py").write_text("2")
    assert revision.git_revision(repository / "package.py") == f"{commit}-dirty"


def test_a_package_outside_a_repository_or_installed_inside_somebodys_checkout_has_no_commit(repository: Path) -> None:
    outside, installed = repository.parent / "outside", repository / ".venv" / "site-packages"
    for folder in (outside, installed):
        folder.mkdir(parents=True)
        (folder / "package.py").write_text("1")
        assert revision.git_revision(folder / "package.py") is None


@pytest.mark.skipif("site-packages" in revision.__file__, reason="the package is installed, and comes from no checkout")
def test_the_locks_of_a_checkout_have_digests(project: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert (
        revision.locks()["requirements.lock"]
        == hashlib.sha256((project / "requirements.lock").read_bytes()).hexdigest()
    )
    monkeypatch.setattr(revision, "git_revision", lambda file: None)
    assert revision.locks() == {}, "an installed package is from no lock"


def test_tags_name_the_package_and_leave_out_an_unknown_commit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(revision, "git_revision", lambda file: None)
    assert revision.tags() == {"groundswell.version": version("groundswell")}
    monkeypatch.setattr(revision, "git_revision", lambda file: "abc")
    assert revision.tags()["mlflow.source.git.commit"] == "abc"
