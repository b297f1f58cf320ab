import io
import struct
import warnings
import zlib
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray
from PIL import Image, ImageFile, PngImagePlugin

from pipelines.archives.archive import BadRecordError
from pipelines.archives.pixels.rgb_image import read_rgb, upright_size
from tests.pipelines.archives.files import check_bad_file
from tests.pipelines.archives.pixels.damage import damaged

ORIENTATION = 0x0112


def pixels(height: int = 24, width: int = 32) -> NDArray[np.uint8]:
    """A smooth picture with noise, so that JPEG has something to do."""
    rows, columns = np.mgrid[:height, :width]
    noise = np.random.default_rng(0).integers(0, 20, (height, width, 3))
    return np.asarray(np.stack([rows * 5, columns * 5, rows + columns], -1) + noise, np.uint8)


def encoded(image: Image.Image, suffix: str, **options: Any) -> bytes:
    stream = io.BytesIO()
    image.save(stream, suffix, **options)
    return stream.getvalue()


def read(path: Path, height: int = 24, width: int = 32, **options: Any) -> NDArray[np.uint8]:
    out = np.zeros((height, width, 3), np.uint8)
    read_rgb(path, out, **options)
    return out


@pytest.mark.parametrize(
    ("mode", "suffix"),
    [
        ("RGB", "JPEG"),
        ("RGB", "PNG"),
        ("L", "JPEG"),
        ("CMYK", "JPEG"),
        ("L", "PNG"),
        ("LA", "PNG"),
        ("P", "PNG"),
        ("1", "PNG"),
        ("RGBA", "PNG"),
    ],
)
def test_pixels_are_those_of_the_decoder_in_rgb(tmp_path: Path, mode: str, suffix: str) -> None:
    path = tmp_path / "image.PNG"  # whatever the name says
    path.write_bytes(encoded(Image.fromarray(pixels()).convert(mode), suffix))
    with Image.open(path) as image:
        assert (image.mode, image.format) == (mode, suffix)
        np.testing.assert_array_equal(read(path), np.asarray(image.convert("RGB")))


def test_sixteen_bits_are_scaled_and_not_clipped(tmp_path: Path) -> None:
    values = np.linspace(0, 65535, 24 * 32).astype(np.uint16).reshape(24, 32)
    Image.fromarray(values).save(tmp_path / "image.png")
    np.testing.assert_array_equal(read(tmp_path / "image.png"), np.repeat((values >> 8)[..., None], 3, -1))


@pytest.mark.parametrize("suffix", ["JPEG", "PNG"])
@pytest.mark.parametrize("orientation", range(10))
def test_images_are_turned_upright(tmp_path: Path, orientation: int, suffix: str) -> None:
    exif = Image.Exif()
    exif[ORIENTATION] = orientation
    path = tmp_path / "image"
    path.write_bytes(encoded(Image.fromarray(pixels()), suffix, exif=exif.tobytes()))
    with Image.open(path) as image:
        stored = np.asarray(image)
    turned = {
        2: stored[:, ::-1],
        3: stored[::-1, ::-1],
        4: stored[::-1],
        5: stored.swapaxes(0, 1),
        6: np.rot90(stored, -1),
        7: stored[::-1, ::-1].swapaxes(0, 1),
        8: np.rot90(stored),
    }
    upright = turned.get(orientation, stored)
    assert upright_size(path) == upright.shape[:2]
    np.testing.assert_array_equal(read(path, *upright.shape[:2]), upright)


@pytest.mark.parametrize(("height", "width"), [(40, 100), (100, 40), (64, 64)])
def test_the_centre_is_cut_out(tmp_path: Path, height: int, width: int) -> None:
    """Of a ramp of slope 2 along both axes: 40 pixels scaled to 20 are the means of pairs around the centre."""
    rows, columns = np.mgrid[:height, :width]
    Image.fromarray(np.stack([rows * 2, columns * 2, 0 * rows], -1).astype(np.uint8)).save(tmp_path / "image.png")
    side = 20
    scale, fitted = min(height, width) / side, read(tmp_path / "image.png", side, side, fit=True).astype(float)
    centres = (np.arange(side) - (side - 1) / 2) * scale
    # At the border the filter reaches over the edge of the square and has fewer pixels.
    inner = slice(2, -2)
    np.testing.assert_allclose(fitted[inner, side // 2, 0], 2 * ((height - 1) / 2 + centres)[inner], atol=1)
    np.testing.assert_allclose(fitted[side // 2, inner, 1], 2 * ((width - 1) / 2 + centres)[inner], atol=1)


def test_scaling_down_averages_and_does_not_skip(tmp_path: Path) -> None:
    stripes = np.zeros((64, 64, 3), np.uint8)
    stripes[:, ::2] = 200
    Image.fromarray(stripes).save(tmp_path / "image.png")
    assert np.abs(read(tmp_path / "image.png", 8, 8, fit=True).astype(int) - 100).max() <= 4


def test_an_image_of_the_right_size_is_not_changed_by_fitting(tmp_path: Path) -> None:
    Image.fromarray(pixels(24, 24)).save(tmp_path / "image.png")
    np.testing.assert_array_equal(read(tmp_path / "image.png", 24, 24, fit=True), pixels(24, 24))


def test_another_size_a_missing_file_and_a_folder(tmp_path: Path) -> None:
    Image.fromarray(pixels()).save(tmp_path / "image.png")
    for path, message in (
        (tmp_path / "image.png", r"wrong size \(\(24, 32\) pixels \(height, width\), expected \(32, 24\)"),
        (tmp_path / "absent.jpg", r"absent\.jpg: missing file"),
        (tmp_path, "missing file"),
    ):
        check_bad_file(message, read, path, 32, 24)


@pytest.mark.parametrize("content", [b"", b"not an image", bytes(2000), encoded(Image.fromarray(pixels()), "GIF")])
def test_another_format_has_a_reason_that_is_always_the_same(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "image.jpg").write_bytes(content)
    with pytest.raises(BadRecordError) as caught:
        read(tmp_path / "image.jpg")
    assert (caught.value.reason, caught.value.detail) == ("not a readable JPEG or PNG", "")


def test_an_animation(tmp_path: Path) -> None:
    frames = [Image.fromarray(pixels() + n) for n in range(3)]
    frames[0].save(tmp_path / "image.png", save_all=True, append_images=frames[1:])
    check_bad_file(r"image\.png: animated image \(3 frames", read, tmp_path / "image.png")


@pytest.mark.parametrize("limit", [500, 300], ids=["warning", "error"])
def test_a_decompression_bomb(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, limit: int) -> None:
    """Pillow warns above its limit and fails above twice the limit; the image has 768 pixels."""
    Image.fromarray(pixels()).save(tmp_path / "image.png")
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", limit)
    check_bad_file(r"image\.png: too many pixels", read, tmp_path / "image.png")


def test_the_header_is_enough_to_refuse_a_size(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    Image.fromarray(pixels()).save(tmp_path / "image.png")
    Image.new("1", (6000, 6000)).save(tmp_path / "huge.png")
    monkeypatch.delattr(ImageFile.ImageFile, "load")  # which decodes
    check_bad_file(r"wrong size \(\(24, 32\) pixels", read, tmp_path / "image.png", 24, 31)
    for fit, reason in ((False, "wrong size"), (True, r"too many pixels \(36,000,000, at most 33,554,432\)")):
        check_bad_file(reason, read, tmp_path / "huge.png", 8, 8, fit=fit)


def chunk(kind: bytes, content: bytes, *, damage: int = 0) -> bytes:
    return struct.pack(">I", len(content)) + kind + content + struct.pack(">I", zlib.crc32(kind + content) ^ damage)


HUGE = zlib.compress(bytes(2 * PngImagePlugin.MAX_TEXT_CHUNK))
ORIENTED = b"MM\0*" + struct.pack(">IHHHIHHI", 8, 1, ORIENTATION, 3, 1, 6, 0, 0)
METADATA = {
    "EXIF with a wrong checksum": chunk(b"eXIf", ORIENTED, damage=1),
    "EXIF of another format": chunk(b"eXIf", b"nonsense"),
    "truncated EXIF": chunk(b"eXIf", ORIENTED[:-9]),
    "EXIF in hexadecimal text": chunk(b"tEXt", b"Raw profile type exif\0exif\n4\nno hex\n"),
    "a huge text": chunk(b"zTXt", b"comment\0\0" + HUGE),
    "a huge international text": chunk(b"iTXt", b"XML:com.adobe.xmp\0\1\0\0\0" + HUGE),
    "a huge colour profile": chunk(b"iCCP", b"profile\0\0" + HUGE),
    "text of an unknown compression": chunk(b"zTXt", b"comment\0\7" + HUGE),
    "text with a wrong checksum": chunk(b"tEXt", b"comment\0text", damage=1),
}


@pytest.mark.parametrize("end", [-12, 33], ids=["behind the pixels", "before the pixels"])
@pytest.mark.parametrize("found", METADATA.values(), ids=METADATA)
def test_unreadable_metadata_of_readable_pixels_have_no_orientation(tmp_path: Path, found: bytes, end: int) -> None:
    complete, path = encoded(Image.fromarray(pixels()), "PNG"), tmp_path / "image.png"
    path.write_bytes(complete[:end] + found + complete[end:])
    assert upright_size(path) == (24, 32)
    np.testing.assert_array_equal(read(path), pixels())
    path.write_bytes(encoded(Image.fromarray(pixels()), "JPEG", exif=found[8:-4]))
    assert read(path).any()
    assert upright_size(path) == (24, 32)


def test_pillow_must_not_fill_what_is_missing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "image.jpg").write_bytes(encoded(Image.fromarray(pixels()), "JPEG")[:-100])
    monkeypatch.setattr(ImageFile, "LOAD_TRUNCATED_IMAGES", True)
    with pytest.raises(RuntimeError, match="set it to False"):
        read(tmp_path / "image.jpg")


@pytest.mark.parametrize(
    ("suffix", "options"), [("JPEG", {}), ("JPEG", {"progressive": True}), ("PNG", {}), ("PNG", {"bits": 4})]
)
def test_no_truncated_file_is_read(tmp_path: Path, suffix: str, options: dict[str, Any]) -> None:
    image = Image.fromarray(pixels()).convert("P" if "bits" in options else "RGB")
    complete, path = encoded(image, suffix, **options), tmp_path / "truncated"
    # The last 4 bytes of a PNG are the checksum of its empty last chunk.
    for length in range(len(complete) - (4 if suffix == "PNG" else 0)):
        path.write_bytes(complete[:length])
        check_bad_file("truncated: not a readable JPEG or PNG", read, path)


@pytest.mark.parametrize("suffix", ["JPEG", "PNG"])
def test_damage_never_breaks_the_reader(tmp_path: Path, suffix: str) -> None:
    """A damaged PNG is never read with other pixels either, if perhaps not upright; in a JPEG no checksum tells."""
    exif = Image.Exif()
    exif[ORIENTATION] = 3
    complete, path = encoded(Image.fromarray(pixels()), suffix, exif=exif.tobytes()), tmp_path / "image"
    path.write_bytes(complete)
    intact, generator = read(path), np.random.default_rng(0)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for _ in range(1000):
            path.write_bytes(damaged(complete, generator))
            try:
                found = read(path)
            except BadRecordError:
                continue
            assert suffix == "JPEG" or found.tobytes() in (intact.tobytes(), intact[::-1, ::-1].tobytes())
