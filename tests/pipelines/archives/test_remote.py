"""Every kind of archive reads the same behind a URL as from a local folder."""

from pathlib import Path

import numpy as np
import pytest
import rasterio
from PIL import Image

from pipelines.archives.archive import BadRecordError, read_sample
from pipelines.archives.files import is_folder, is_plain_name, join
from pipelines.archives.table import open_archive
from pipelines.storage import Folder


def upload(root: Path, url: str) -> str:
    for path in sorted(root.rglob("*")):
        if path.is_file():
            Folder.at(url).write(str(path.relative_to(root)), path.read_bytes())
    return url


@pytest.mark.filterwarnings("ignore::rasterio.errors.NotGeoreferencedWarning")
@pytest.mark.parametrize("kind", ["bigearthnet_v1", "bigearthnet_v2", "eurosat_ms", "eurosat_rgb", "image_folder"])
def test_every_kind(kind: str, tmp_path: Path, s3_folder: str, request: pytest.FixtureRequest) -> None:
    root, settings = tmp_path / "archive", {}
    match kind:
        case "bigearthnet_v1":
            root, settings = request.getfixturevalue("shared_data") / "bigearthnet_v1", {"subset": True}
        case "bigearthnet_v2":
            root = request.getfixturevalue("archive")
        case "eurosat_ms":
            pixels = np.random.default_rng(0).integers(0, 3000, (13, 64, 64), dtype=np.uint16)
            for name in ("Forest", "River"):
                (root / name).mkdir(parents=True)
                for number in range(1, 4):
                    compress = {1: None, 2: "deflate", 3: "lzw"}[number]
                    path = root / name / f"{name}_{number}.tif"
                    with rasterio.open(
                        path, "w", driver="GTiff", width=64, height=64, count=13, dtype="uint16", compress=compress
                    ) as file:
                        file.write(pixels)
        case _:
            for name in ("Forest", "River"):
                (root / name).mkdir(parents=True)
                for number in range(1, 4):
                    Image.new("RGB", (64, 64), (number, 9, 200)).save(root / name / f"{name}_{number}.jpg")
    local = open_archive(kind, root=str(root), **settings)
    remote = open_archive(kind, root=upload(root, s3_folder), **settings)
    assert remote.read_settings == local.read_settings
    assert remote.description == local.description
    assert remote.index().samples.equals(local.index().samples)
    paths = local.index().samples["paths"].to_pylist()
    assert paths
    for path in paths[:4]:
        expected = read_sample(local, path)
        for name, image in read_sample(remote, path).items():
            np.testing.assert_array_equal(image, expected[name])


def test_missing_empty_and_odd_things(s3_folder: str) -> None:
    with pytest.raises(FileNotFoundError, match=r"no BigEarthNet v2\.0 archive"):
        open_archive("bigearthnet_v2", root=s3_folder).index()
    with pytest.raises(FileNotFoundError, match="no such folder"):
        open_archive("image_folder", root=s3_folder).index()
    folder = Folder.at(s3_folder)
    for name in ("a/1.png", "a/back\\slash.png", "b/2.png", "b/empty.png"):
        folder.write(name, b"")
    archive = open_archive("image_folder", root=s3_folder, image_size=8)
    assert [row["id"] for row in archive.index().rejected.to_pylist()] == ["a/back\\slash.png"]
    with pytest.raises(BadRecordError, match="not a readable JPEG or PNG"):
        read_sample(archive, ["a/1.png"])
    with pytest.raises(BadRecordError, match="missing file"):
        read_sample(archive, ["a/none.png"])
    assert not is_folder(f"{s3_folder}/a/1.png")


@pytest.mark.parametrize("root", ["/archive", "s3://bucket/archive"])
@pytest.mark.parametrize("path", ["../x", "a/../../x", "/etc/passwd", "a\\x", ".."])
def test_paths_out_of_the_archive_are_refused(root: str, path: str) -> None:
    with pytest.raises(ValueError, match="no path within the archive"):
        join(root, path)


def test_names() -> None:
    assert join("s3://bucket/x/", "a..b/c") == "s3://bucket/x/a..b/c"
    assert join("/", "a") == "/a"
    assert [name for name in ("a", "..", ".", "", "a\\b", "a/b", "a\nb", "a..b") if is_plain_name(name)] == [
        "a",
        "a..b",
    ]
