"""The dataset report, as text and in a real browser."""

import html
import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from numpy.typing import NDArray

from pipelines.archives.archive import INDEX_SCHEMA, REJECTED_SCHEMA, ArchiveDescription, ArchiveIndex
from pipelines.dataset.format.manifest import Manifest, Split, write_manifest
from pipelines.dataset.prepare.shard import ShardPlan, write_shard
from pipelines.dataset.report.figures import preview, shown_bins
from pipelines.dataset.report.page import Histograms, write_report
from pipelines.dataset.report.published_statistics import PUBLISHED
from pipelines.dataset.report.tables import classes_by_frequency, decode_labels, label_cooccurrence
from pipelines.sample import ImageGroup, Task

MULTISPECTRAL = (
    ImageGroup("bands_10m", (12, 12, 4), "uint16", ("B02", "B03", "B04", "B08")),
    ImageGroup("radar", (12, 12, 2), "float32", ("VV", "VH")),
)
RGB = (ImageGroup("rgb", (32, 32, 3), "uint8", ("red", "green", "blue")),)
NOTHING = REJECTED_SCHEMA.empty_table()
SCRIPT = "<script>document.title = 'owned'</script>"


@dataclass(frozen=True)
class Invented:
    """Random pixels; a path is the seed of one sample."""

    description: ArchiveDescription
    root: str = ""

    def index(self) -> ArchiveIndex:
        raise NotImplementedError

    @property
    def read_settings(self) -> dict[str, int | None]:
        return {}

    def read(self, paths: Sequence[str], out: Mapping[str, NDArray[Any]]) -> None:
        random = np.random.default_rng(int(paths[0]))
        for image in out.values():
            image[:] = (
                random.normal(-12, 3, image.shape) if image.dtype.kind == "f" else random.integers(0, 250, image.shape)
            )


def make_dataset(
    folder: Path, kind: str, task: Task, names: Sequence[str], groups: tuple[ImageGroup, ...], labels: list[list[int]]
) -> tuple[Manifest, Histograms]:
    """A finished dataset with one sample per entry of `labels` in each of two splits."""
    description = ArchiveDescription(kind, task, tuple(names), groups)
    known = {"country": SCRIPT, "season": "winter", "flags": ["snow", "cloud_or_shadow"]} if len(groups) > 1 else {}
    rows = [
        {"id": f"{SCRIPT}{i}", "split": "", "labels": classes, "paths": [str(i)]} | (known if i % 3 == 0 else {})
        for i, classes in enumerate(labels)
    ]
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, INDEX_SCHEMA) as writer:
        writer.write_table(pa.Table.from_pylist(rows, schema=INDEX_SCHEMA))
    written = {}
    for split in ("train", "validation"):
        for name in (split, "_progress"):
            (folder / name).mkdir(parents=True, exist_ok=True)
        samples = sink.getvalue().to_pybytes()
        plan = ShardPlan(f"{split}/part-00000.parquet", samples, len(rows), rows_per_group=7, digest="")
        written[split] = write_shard(plan, Invented(description), folder)
    sums = written["train"].band_sums
    manifest = Manifest(
        archive=kind,
        task=task,
        class_names=tuple(names),
        groups=groups,
        splits={
            split: Split(shards=(result.shard,), class_counts=tuple(result.class_counts))
            for split, result in written.items()
        },
        statistics={name: value.statistics() for name, value in sums.items()},
        settings={"seed": 0},
        read_settings={},
        source_fingerprint="0123456789abcdef",
    )
    write_manifest(manifest, folder)
    return manifest, {name: value.histogram for name, value in sums.items()}


def make_page(folder: Path, kind: str, classes: int, rejected: pa.Table = NOTHING) -> str:
    names = [f"{i} a class with <b>a</b> $long$ name{'-without-a-break' * 5 if i == 3 else ''}" for i in range(classes)]
    random = np.random.default_rng(classes)
    if kind.startswith("bigearthnet"):
        labels = [sorted(random.choice(classes, 3, replace=False).tolist()) for _ in range(40)]
        made = make_dataset(folder, kind, "multi_label", names, MULTISPECTRAL, labels)
    else:
        made = make_dataset(
            folder, kind, "single_label", names, RGB, [[int(random.integers(classes))] for _ in range(40)]
        )
    return Path(write_report(folder, *made, rejected)).read_text()


def rejected_rows(count: int) -> pa.Table:
    rows = [
        {
            "id": f"{SCRIPT}-{i}",
            "file": 'a/"onerror="b' + "x" * 900,
            "reason": "wrong size" if i % 3 else "no file",
            "detail": "<i>",
        }
        for i in range(count)
    ]
    return pa.Table.from_pylist(rows, schema=REJECTED_SCHEMA)


def cells(page: str) -> list[str]:
    """The text of every table cell."""
    return [
        " ".join(html.unescape(re.sub(r"<[^>]*>", "", cell)).split())
        for cell in re.findall(r"<t[dh][^>]*>(.*?)</t[dh]>", page, re.DOTALL)
    ]


def section(page: str, name: str) -> str:
    return page.split(f'<section id="{name}">')[1].split("</section>")[0]


@pytest.fixture(scope="module")
def multi_label(tmp_path_factory: pytest.TempPathFactory) -> str:
    return make_page(tmp_path_factory.mktemp("multi"), "bigearthnet_v2", 19, rejected_rows(130))


@pytest.fixture(scope="module")
def thousand_classes(tmp_path_factory: pytest.TempPathFactory) -> str:
    return make_page(tmp_path_factory.mktemp("single"), "image_folder", 1000)


def test_counts_of_splits_and_classes(tmp_path: Path) -> None:
    made = make_dataset(
        tmp_path, "eurosat_ms", "multi_label", ["sea", "land", "ice"], MULTISPECTRAL, [[0, 1], [1], [1]]
    )
    page = Path(write_report(tmp_path, *made, NOTHING)).read_text()
    assert cells(section(page, "splits"))[6:11] == ["train", "3", "50.0 %", "1", "1"]
    # Most frequent first: index, name, and per split count and share.
    assert cells(section(page, "classes"))[4:] == [
        *("1", "land", "3 100.0 %", "3 100.0 %"),
        *("0", "sea", "1 33.3 %", "1 33.3 %"),
        *("2", "ice", "0 0.0 %", "0 0.0 %"),
    ]
    assert "1 of 3 classes have no training" in section(page, "classes")
    # Of 3 with land 1 has sea, 33 %; of 1 with sea 1 has land.
    assert cells(section(page, "cooccurrence"))[4:] == ["land", "", "33", "", "sea", "100", "", "", "ice", "", "", ""]
    assert "every record of the archive" in section(page, "rejected")


def test_countries_seasons_and_flags_are_counted_where_they_are_known(multi_label: str, thousand_classes: str) -> None:
    shown, of_each = cells(section(multi_label, "metadata")), ["14 35.0 %", "14 35.0 %"]
    others = ["unknown", "26 65.0 %", "26 65.0 %"]
    assert shown == [
        *("Country", "train", "validation", SCRIPT, *of_each, *others),
        *("Season", "train", "validation", "winter", *of_each, *others),
        *("Flag", "train", "validation", "snow", *of_each, "cloud or shadow", *of_each, *others),
    ]
    assert 'id="metadata"' not in thousand_classes


def test_a_report_replaces_the_one_before_and_is_the_same(tmp_path: Path) -> None:
    made = make_dataset(tmp_path, "image_folder", "single_label", ["a", "b"], RGB, [[0], [1], [1]])
    first = Path(write_report(tmp_path, *made, NOTHING)).read_bytes()
    assert (Path(write_report(tmp_path, *made, NOTHING)).read_bytes(), list(tmp_path.glob(".report*"))) == (first, [])


@pytest.mark.parametrize("kind", ["bigearthnet_v1", "bigearthnet_v2", "eurosat_ms"])
def test_published_statistics_stand_beside_bigearthnets_only(tmp_path: Path, kind: str) -> None:
    (manifest, histograms) = make_dataset(tmp_path, kind, "multi_label", ["a", "b"], MULTISPECTRAL, [[0], [1]])
    bands = section(Path(write_report(tmp_path, manifest, histograms, NOTHING)).read_text(), "bands")
    assert ("Published" in bands) == (kind in PUBLISHED)
    if kind in PUBLISHED:
        theirs, ours = PUBLISHED[kind]["B02"]["mean"], manifest.statistics["bands_10m"].mean[0]
        difference = f"{100 * (ours - theirs) / theirs:+.1f} %"
        assert cells(bands)[8:13] == ["bands_10m", "B02", f"{ours:,.2f}", f"{theirs:,.2f}", difference]
        assert bands.count("&ndash;") == 8  # of the two radar bands nothing is published
    assert bands.count("<figure>") == 4  # the floating-point bands have no histogram


def test_published_statistics_are_the_recorded_ones(shared_data: Path) -> None:
    recorded = json.loads((shared_data / "constants" / "band_statistics.json").read_text())
    for version in ("v1", "v2"):
        published = PUBLISHED[f"bigearthnet_{version}"]
        assert (
            list(published),
            [band["mean"] for band in published.values()],
            [band["std"] for band in published.values()],
        ) == (recorded["bands"], recorded[version]["mean"], recorded[version]["std"])


def test_texts_of_the_archive_are_escaped(multi_label: str) -> None:
    assert [text for text in ("<script", "<b>a</b>", '"onerror="') if text in multi_label] == []
    escaped = ("&lt;script&gt;document.title = &#39;owned&#39;", html.escape("<b>a</b>"))
    assert [text for text in escaped if text not in multi_label] == []


def test_rejected_records_are_counted_and_the_first_shown(multi_label: str) -> None:
    rejected = cells(section(multi_label, "rejected"))
    assert rejected[:6] == ["Reason", "Records", "wrong size", "86", "no file", "44"]
    assert (f"{SCRIPT}-99" in rejected, f"{SCRIPT}-100" in rejected) == (True, False), rejected
    assert max(map(len, rejected)) <= 300


@pytest.mark.parametrize("page", ["multi_label", "thousand_classes"])
def test_the_page_needs_nothing_else(page: str, request: pytest.FixtureRequest) -> None:
    text = request.getfixturevalue(page)
    assert not re.search(r"https?:|//\w|@import|url\(|<link|<iframe", re.sub(r"data:[^\"]*", "data:", text))
    sources = re.findall(r"\b(?:src|srcset|href)=(\S{6})", text)
    assert len(sources) > 24
    assert set(sources) == {'"data:'}
    assert len(text) < 3_000_000
    assert "default-src 'none'" in text


def test_of_many_classes_both_ends_are_shown(thousand_classes: str) -> None:
    classes = section(thousand_classes, "classes")
    assert (classes.count('<th class="name">'), "940 classes between" in classes) == (60, True), classes
    assert 'id="cooccurrence"' not in thousand_classes
    assert "median 0" in section(thousand_classes, "balance")


def test_cooccurrence_counts_pairs(tmp_path: Path) -> None:
    labels = [sorted(np.random.default_rng(i).choice(9, 1 + i % 4, replace=False).tolist()) for i in range(30)]
    manifest, _ = make_dataset(tmp_path, "any", "multi_label", [str(i) for i in range(9)], MULTISPECTRAL, labels)
    assert label_cooccurrence(tmp_path, manifest.splits["train"].shards, 9, [8, 0, 3]).tolist() == [
        [sum(a in row and b in row for row in labels) for b in (8, 0, 3)] for a in (8, 0, 3)
    ]


def test_labels_of_another_width_or_type_are_refused(tmp_path: Path) -> None:
    for widths in ((131, 131), (130, 131)):
        with pytest.raises(ValueError, match="uint8 vectors of 3 values"):
            decode_labels(pa.array([b"x" * width for width in widths]), 3)
    assert decode_labels(pa.array([], pa.binary()), 3).shape == (0, 3)


def test_classes_by_frequency() -> None:
    assert (classes_by_frequency([1, 5, 3, 5], 4), classes_by_frequency([10, 9, 8, 7, 6, 5], 4)) == (
        [1, 3, 2, 0],
        [0, 1, 4, 5],
    )


def test_sixteen_bit_axes_end_with_nearly_all_pixels() -> None:
    dark, bright = [0] * 256, [0] * 256
    dark[3], dark[200] = 10_000, 1  # a single bright pixel in 10,000
    bright[40] = 500
    assert (shown_bins([dark, bright], "uint16"), shown_bins([dark], "uint8")) == (41, 256)


def test_previews_of_constant_large_and_floating_images() -> None:
    for dtype, shape in {"uint16": (1, 1, 3), "uint8": (300, 200, 3), "float32": (4, 9, 1)}.items():
        group = ImageGroup("image", shape, dtype, ("B02", "B03", "B04")[: shape[2]])
        image = np.full(shape, 7, dtype)
        if dtype == "float32":
            image[0] = np.nan
        assert preview({"image": image}, [group]).startswith("data:image/png;base64,")


@pytest.mark.timeout(120)
@pytest.mark.parametrize(
    ("kind", "classes", "width"),  # of a desktop and of a phone
    [
        *(("bigearthnet_v2", 19, 1280), ("bigearthnet_v2", 19, 390), ("bigearthnet_v1", 43, 390)),
        *(("eurosat_rgb", 10, 1280), ("image_folder", 1000, 1280), ("image_folder", 1000, 390)),
    ],
)
def test_a_browser_shows_the_whole_page(
    show_page: Callable[..., Any], tmp_path: Path, kind: str, classes: int, width: int
) -> None:
    page = make_page(tmp_path / "dataset", kind, classes, rejected_rows(5))
    found, _ = show_page(page, width)
    assert (found["width"], len(found["images"])) == (width, page.count("<img "))
    assert min(found["images"]) >= 12
    assert (found["overflow"], found["scripts"]) == (0, 0)
