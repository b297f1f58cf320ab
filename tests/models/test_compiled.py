"""Libraries in C++: what is built, what stays, and what a digest in the name is for."""

import ast
import ctypes
import re
import shutil

import pytest

from models import compiled
from models.compiled import Library
from models.compression import kernels
from pipelines.dataset import gather

needs_compiler = pytest.mark.skipif(shutil.which("g++") is None, reason="no g++")


def test_the_project_builds_what_is_loaded(project):
    # Hatchling, which the file imports, is only there while a wheel is built.
    lines = ast.parse((project / "hatch_build.py").read_text()).body
    (folders,) = (ast.literal_eval(line.value) for line in lines if isinstance(line, ast.Assign))
    assert {Library(project / folder).path for folder in folders} == {kernels.LIBRARY, gather.LIBRARY}


def test_changed_flags_or_sources_find_no_library(tmp_path, monkeypatch):
    paths = [Library(tmp_path).path]
    for number in (1, 2):
        (tmp_path / "one.cc").write_text(f"int one() {{ return {number}; }}")
        paths.append(Library(tmp_path).path)
    monkeypatch.setattr(compiled, "FLAGS", (*compiled.FLAGS, "-g"))
    assert len({*paths, Library(tmp_path).path}) == 4


@needs_compiler
def test_a_failed_compilation_keeps_what_serves(tmp_path, monkeypatch):
    old, source = tmp_path / f"{compiled.PREFIX}old.so", tmp_path / "one.cc"
    old.touch()
    source.write_text("int one() { return 1 }")
    library, problem = Library(tmp_path).renew()
    assert (library, old.exists()) == (None, True)
    assert re.search("one.cc.*error", problem, re.DOTALL)
    source.write_text("int one() { return 1; }")
    library, problem = Library(tmp_path).renew()
    assert (problem, sorted(path.name for path in tmp_path.iterdir())) == ("", [library.name, "one.cc"])
    monkeypatch.setenv("CXX", "no-such-compiler")
    again, problem = Library(tmp_path).renew()
    assert (again, library.exists(), "no-such-compiler" in problem) == (library, True, True), problem


@needs_compiler
def test_a_library_that_is_missing_at_the_build_is_asked_for_where_it_is_loaded(tmp_path):
    (tmp_path / "one.cc").write_text('extern "C" __attribute__((visibility("default"))) int one() { return 1; }')
    library, problem = Library(tmp_path, "libnowhere.so.9").renew()
    assert problem == ""
    with pytest.raises(OSError, match=r"libnowhere\.so\.9"):
        ctypes.CDLL(str(library))


@pytest.mark.parametrize(
    ("module", "loads", "without"),
    [
        (kernels, kernels._load, "compression runs without C++ kernels"),
        (gather, gather.load, "rows are read in Python"),
    ],
    ids=["kernels", "gather"],
)
def test_a_library_that_is_not_there_or_does_not_load(tmp_path, monkeypatch, caplog, module, loads, without):
    (tmp_path / "broken.so").write_bytes(b"not a library")
    for name in ("missing.so", "broken.so"):
        monkeypatch.setattr(module, "LIBRARY", tmp_path / name)
        assert loads.__wrapped__() is None
    first, second = (record.getMessage() for record in caplog.records)
    assert first.startswith(f"there is no {tmp_path}/missing.so: {without}")
    assert second.startswith(f"{tmp_path}/broken.so does not load: {without}")
