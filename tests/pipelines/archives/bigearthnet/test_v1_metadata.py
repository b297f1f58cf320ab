import gzip
import json
import os
from collections.abc import Callable
from pathlib import Path

import pyarrow.compute as pc
import pytest

from pipelines.archives.bigearthnet.v1_metadata import (
    CLOUD_LIST,
    NO_19_LIST,
    SNOW_LIST,
    list_file,
    read_labels,
    read_list,
    read_splits,
)

SCENE, INDICES = "S2A_MSIL2A_20170613T101031", {"Pastures": 7, "Airports": None, "Sea and ocean": 3}


def lists(folder: Path, **names: list[str]) -> Path:
    for split in ("train", "val", "test"):
        (folder / f"{split}.csv").write_text("".join(f"{name}\n" for name in names.get(split, [])))
    return folder


def test_splits_are_sorted_and_named_as_ours(tmp_path: Path) -> None:
    folder = lists(tmp_path, train=[f"{SCENE}_1_2", f"{SCENE}_0_45"], val=[f"{SCENE}_1_1"], test=[f"{SCENE}_9_9"])
    patches = read_splits(folder)
    assert [(row["id"][-3:], row["split"], Path(row["file"]).name) for row in patches.rows.to_pylist()] == [
        ("_45", "train", "train.csv"),
        ("1_1", "validation", "val.csv"),
        ("1_2", "train", "train.csv"),
        ("9_9", "test", "test.csv"),
    ]
    assert len(patches.rejected()) == 0


@pytest.mark.parametrize("ending", ["\n", "\r\n", "\n\n"])
@pytest.mark.parametrize("compressed", [False, True])
def test_lines_end_in_any_way(tmp_path: Path, ending: str, compressed: bool) -> None:
    text = ending.join(["first", "second", "third"]).encode()
    path = tmp_path / ("list.csv.gz" if compressed else "list.csv")
    path.write_bytes(gzip.compress(text) if compressed else text)
    assert (list_file(tmp_path, "list"), read_list(path).to_pylist()) == (str(path), ["first", "second", "third"])


@pytest.mark.parametrize(
    "name",
    [
        "../../etc",
        f"{SCENE}_0_45/..",
        f"{SCENE}_0_45\0",
        f"{SCENE}_0",
        f"{SCENE}_T33UUP_0_45",
        "S2A,S1A",
        f"{SCENE}_100_1",
    ],
)
def test_malformed_names_are_rejected(tmp_path: Path, name: str) -> None:
    patches = read_splits(lists(tmp_path, train=[name, f"{SCENE}_0_45"]))
    assert (patches.rows["id"].to_pylist(), patches.rejected().to_pylist()) == (
        [f"{SCENE}_0_45"],
        [{"id": name, "file": str(tmp_path / "train.csv"), "reason": "malformed id", "detail": ""}],
    )


def test_a_name_counts_in_its_first_list(tmp_path: Path) -> None:
    name = f"{SCENE}_0_45"
    patches = read_splits(lists(tmp_path, train=[name], test=[name], val=[name]))
    assert patches.rows["split"].to_pylist() == ["train"]
    assert [(row["reason"], Path(row["file"]).name) for row in patches.rejected().to_pylist()] == [
        ("repeated id", "val.csv"),
        ("repeated id", "test.csv"),
    ]


@pytest.mark.parametrize(
    ("folder_of", "error", "message"),
    [
        (lambda path: path, FileNotFoundError, r"no train\.csv or train\.csv\.gz"),
        (lists, ValueError, "the lists of the splits are empty"),
    ],
    ids=["missing", "empty"],
)
def test_missing_and_empty_lists(
    tmp_path: Path, folder_of: Callable[[Path], Path], error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        read_splits(folder_of(tmp_path))


@pytest.mark.parametrize(
    ("name", "data"),
    [
        ("list.csv", b"S2A\xff"),
        ("list.csv.gz", b"no gzip"),
        ("list.csv.gz", gzip.compress(b"S2A" * 1000)[:-9]),
        ("list.csv.gz", gzip.compress(os.urandom(1000))[:500] + bytes(600)),
    ],
    ids=["no text", "no gzip", "truncated", "damaged"],
)
def test_damaged_lists(tmp_path: Path, name: str, data: bytes) -> None:
    (tmp_path / name).write_bytes(data)
    with pytest.raises(ValueError, match=r"list\.csv.*: not a list of patches, download it again"):
        read_list(tmp_path / name)


def test_the_official_lists(shared_data: Path) -> None:
    folder = shared_data / "bigearthnet_v1" / "splits"
    patches = read_splits(folder)
    assert (
        len(patches.rejected()),
        {split: pc.sum(pc.equal(patches.rows["split"], split)).as_py() for split in ("train", "validation", "test")},
    ) == (0, {"train": 269_695, "validation": 123_723, "test": 125_866})
    ids = set(patches.rows["id"].to_pylist())
    for name, count in ((CLOUD_LIST, 9280), (SNOW_LIST, 61_707), (NO_19_LIST, 57)):
        path = list_file(folder, name)
        assert path is not None
        flagged = read_list(path).to_pylist()
        assert len(flagged) == count
        assert not ids & set(flagged)


@pytest.mark.parametrize(
    ("text", "reason", "detail"),
    [
        (json.dumps({"labels": ["Pastures", "Forest", "Lake"]}), "unknown label", "Forest"),
        (json.dumps({"labels": []}), "no labels", ""),
        (json.dumps({"labels": ["Airports"]}), "no labels", "of those that count: Airports"),
        *(
            (json.dumps(value), "malformed labels", "expected a list of class names under the key labels")
            for value in ({"labels": "Pastures"}, {"labels": [3]}, {"labels": [["Pastures"]]}, {}, ["Pastures"])
        ),
        ("", "malformed JSON", "Expecting value: line 1 column 1 (char 0)"),
        ('{"labels": ["Pastures"', "malformed JSON", "Expecting ',' delimiter: line 1 column 23 (char 22)"),
        ("[" * 200_000, "malformed JSON", None),
        ("9" * 10_000, "malformed JSON", None),
        (" " * (1 << 20) + '{"labels": ["Pastures"]}', "malformed JSON", None),
    ],
    ids=lambda value: str(value)[:20],
)
def test_bad_label_files(tmp_path: Path, text: str, reason: str, detail: str | None) -> None:
    good, bad = tmp_path / "good.json", tmp_path / "bad.json"
    good.write_text(json.dumps({"labels": ["Pastures", "Sea and ocean", "Airports", "Pastures"]}))
    bad.write_text(text)
    labels, _, errors = read_labels([str(good), str(bad), str(good)], INDICES)
    assert (labels.to_pylist(), errors[0], errors[2]) == ([[3, 7], [], [3, 7]], None, None)
    assert (errors[1].file, errors[1].reason) == (str(bad), reason)
    assert detail is None or errors[1].detail == detail


def test_label_files_that_are_none(tmp_path: Path) -> None:
    (tmp_path / "good.json").write_text(json.dumps({"labels": ["Pastures"]}))
    (tmp_path / "latin.json").write_bytes(b'{"labels": ["P\xe4stures"]}')
    (tmp_path / "link.json").symlink_to("good.json")
    (tmp_path / "folder.json").mkdir()
    paths = [str(tmp_path / f"{name}.json") for name in ("absent", "folder", "link", "latin")]
    *_, errors = read_labels(paths, INDICES)
    assert [error and error.reason for error in errors] == [
        "missing file",
        "missing file",
        "symbolic link",
        "malformed JSON",
    ]


def test_many_label_files_come_back_in_order(tmp_path: Path) -> None:
    names = ["Pastures", "Sea and ocean"]
    for number, name in enumerate(names):
        (tmp_path / f"{number}.json").write_text(json.dumps({"labels": [name]}))
    order = [number * number % 3 % 2 for number in range(3000)]
    labels, _, errors = read_labels([str(tmp_path / f"{number}.json") for number in order], INDICES)
    assert labels.to_pylist() == [[INDICES[names[number]]] for number in order]
    assert not any(errors)
    assert read_labels([], INDICES)[0].to_pylist() == []


def test_tiles_by_the_name_of_the_product(tmp_path: Path) -> None:
    sources = ["S2A_MSIL1C_20170613T101031_N0205_R022_T33UUP_20170613T101608.SAFE", "", None, 7]
    for number, source in enumerate(sources):
        (tmp_path / f"{number}.json").write_text(json.dumps({"labels": ["Pastures"], "tile_source": source}))
    _, tiles, errors = read_labels([str(tmp_path / f"{number}.json") for number in range(5)], {"Pastures": 0})
    assert (tiles.to_pylist(), [error is not None for error in errors]) == (
        ["33UUP", None, None, None, None],
        [False, False, False, False, True],
    )
