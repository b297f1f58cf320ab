"""Which files of an output are ours and complete; the jobs that keep such an inventory have tests of their own."""

import json
import re
from pathlib import Path

import pytest

from pipelines.storage.folder import Location
from pipelines.storage.inventory import (
    complete_files,
    differences,
    final_name,
    progress_pattern,
    read_markers,
    refuse_foreign,
)

HEX = "0123456789abcdef" * 2


@pytest.fixture
def output(tmp_path: Path) -> Location:
    location = Location.at(tmp_path)
    location.make("_progress")
    return location


def test_a_file_that_a_killed_attempt_left_counts_as_the_file_that_it_would_have_become() -> None:
    assert [final_name(name) for name in (f"a/.b.parquet.{HEX}", "a/.b.parquet.0", "b")] == [
        "a/b.parquet",
        "a/.b.parquet.0",
        "b",
    ]
    names = ["x.parquet", f".x.parquet.{HEX}"]
    refuse_foreign("folder", names, {"x.parquet"}.__contains__, "no part")
    with pytest.raises(ValueError, match=r"^folder holds mine and 1 more files, which are no part: move it$"):
        refuse_foreign("folder", [*names, "mine", "yours"], {"x.parquet"}.__contains__, "no part: move it")


def test_progress_is_the_mark_markers_and_leases() -> None:
    names = ["plan.json", "part-1.json", f"lease-{HEX}.json", "lease-1.json", "other.json"]
    pattern = progress_pattern(r"part-\d\.json")
    assert [bool(re.fullmatch(pattern, f"_progress/{name}")) for name in names] == [True, True, True, False, False]


def test_missing_and_damaged_markers_are_left_out(output: Location) -> None:
    for name, content in (("a", b"[1]"), ("b", b"[1"), ("d", b"[2]")):
        output.write(f"_progress/{name}.json", content)
    markers = {name: f"_progress/{name}.json" for name in ("d", "a", "b", "c")}
    assert list(read_markers(output, markers, json.loads).items()) == [("d", [2]), ("a", [1])]


def test_a_complete_file_has_its_recorded_size(output: Location) -> None:
    output.write("a", b"123")
    output.write("b", b"12")
    assert complete_files(output, {"a": 3, "b": 3, "c": 0, "_progress": 0}) == {"a"}


def test_differences_are_those_of_the_wanted_settings() -> None:
    assert differences({"a": 1, "b": 2, "c": 3}, {"a": 1, "b": 3, "d": 4}) == [
        "b 2 there, 3 asked for",
        "d None there, 4 asked for",
    ]
