import os
from pathlib import Path

from pipelines.archives.files import list_subfolders, stays_inside


def listed(root: Path, *folders: str) -> tuple[list[str], list[str]]:
    inside, leading_out = list_subfolders(str(root), folders)
    return sorted(inside.to_pylist()), sorted(leading_out.to_pylist())


def test_folders_are_listed_and_files_are_not(tmp_path: Path) -> None:
    for name in ("a/x", "a/y", "b/x"):
        (tmp_path / name).mkdir(parents=True)
    (tmp_path / "a/file").touch()
    assert (listed(tmp_path, "a", "b", "missing", "a/file"), listed(tmp_path, "."), listed(tmp_path)) == (
        (["a/x", "a/y", "b/x"], []),
        (["a", "b"], []),
        ([], []),
    )


def test_links(tmp_path: Path) -> None:
    root = tmp_path / "root"
    (root / "a/x").mkdir(parents=True)
    (tmp_path / "outside/z").mkdir(parents=True)
    (root / "a/inside").symlink_to("x")
    (root / "a/absolute").symlink_to(root / "a/x")
    (root / "a/out").symlink_to("../../outside")
    (root / "a/nowhere").symlink_to("missing")
    (root / "a/circle").symlink_to("circle")
    (root / "b").symlink_to(tmp_path / "outside")
    assert listed(root, "a", "b") == (["a/absolute", "a/inside", "a/x"], ["a/circle", "a/nowhere", "a/out", "b/z"])


def test_a_sibling_with_a_longer_name_is_outside(tmp_path: Path) -> None:
    (tmp_path / "root").mkdir()
    (tmp_path / "root2").mkdir()
    assert [
        stays_inside(str(tmp_path / "root"), str(tmp_path / path))
        for path in ("root2", "root/../root2", "root2/../root")
    ] == [False, False, True]


def test_names_that_are_not_utf8_do_not_stop_the_others(tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    (tmp_path / os.fsdecode(b"\xff")).mkdir()
    assert listed(tmp_path, ".") == (["a"], [])
