"""Every kind of archive reads the same behind a URL as from a local folder."""

from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from pipelines.archives.archive import read_sample
from pipelines.archives.files import is_plain_name, join
from pipelines.archives.table import open_archive
from pipelines.storage.folder import Location
from tests.pipelines.archives.files import check_bad_record, random_pixels, write_geotiff
from tests.pipelines.dataset.files import upload


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
            for number, compress in enumerate((None, "deflate", "lzw"), 1):
                path = root / "Forest" / f"Forest_{number}.tif"
                write_geotiff(path, random_pixels(13, 64, 64), compress=compress, crs=None, transform=None)
        case _:
            for name in ("Forest", "River"):
                (root / name).mkdir(parents=True)
                Image.new("RGB", (64, 64), (1, 9, 200)).save(root / name / f"{name}_1.jpg")
    local = open_archive(kind, root=str(root), **settings)
    remote = open_archive(kind, root=upload(root, s3_folder), **settings)
    assert (remote.read_settings, remote.description) == (local.read_settings, local.description)
    assert remote.index().samples.equals(local.index().samples)
    for path in local.index().samples["paths"].to_pylist()[:4]:
        np.testing.assert_equal(read_sample(remote, path), read_sample(local, path))


def test_missing_empty_and_odd_things(s3_folder: str) -> None:
    for kind, message in (("bigearthnet_v2", r"no BigEarthNet v2\.0 archive"), ("image_folder", "no such folder")):
        with pytest.raises(FileNotFoundError, match=message):
            open_archive(kind, root=s3_folder).index()
    folder = Location.at(s3_folder)
    for name in ("a/1.png", "a/back\\slash.png", "b/2.png", "b/empty.png"):
        folder.write(name, b"")
    archive = open_archive("image_folder", root=s3_folder, image_size=8)
    assert [row["id"] for row in archive.index().rejected.to_pylist()] == ["a/back\\slash.png"]
    for path, message in (("a/1.png", "not a readable JPEG or PNG"), ("a/none.png", "missing file")):
        check_bad_record(archive, [path], message)
    assert not folder.is_folder("a/1.png")


@pytest.mark.parametrize("root", ["/archive", "s3://bucket/archive"])
@pytest.mark.parametrize("path", ["../x", "a/../../x", "/etc/passwd", "a\\x", ".."])
def test_paths_out_of_the_archive_are_refused(root: str, path: str) -> None:
    with pytest.raises(ValueError, match="no path within the archive"):
        join(root, path)


def test_names() -> None:
    assert (join("s3://bucket/x/", "a..b/c"), join("/", "a")) == ("s3://bucket/x/a..b/c", "/a")
    assert [name for name in ("a", "..", ".", "", "a\\b", "a/b", "a\nb", "a..b") if is_plain_name(name)] == [
        "a",
        "a..b",
    ]
