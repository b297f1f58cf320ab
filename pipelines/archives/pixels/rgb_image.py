"""Reads one JPEG or PNG file as RGB pixels."""

import io
import math
import struct
import warnings
import zlib
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from os import PathLike
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from PIL import Image, ImageFile, UnidentifiedImageError

from pipelines.archives.archive import BadRecordError
from pipelines.archives.files import DECODING, MISSING_FILE, whole_remote

_SIZES_READ = 33  # number of images whose size is read; odd, so that two sizes cannot be equally frequent
_MOST_PIXELS = 1 << 25
"""Limit to the pixels of an image that is scaled: 100 MB in RGB."""
_ORIENTATION = 0x0112  # EXIF tag
_UPRIGHT = {
    2: Image.Transpose.FLIP_LEFT_RIGHT,
    3: Image.Transpose.ROTATE_180,
    4: Image.Transpose.FLIP_TOP_BOTTOM,
    5: Image.Transpose.TRANSPOSE,
    6: Image.Transpose.ROTATE_270,
    7: Image.Transpose.TRANSVERSE,
    8: Image.Transpose.ROTATE_90,
}
_SIDEWAYS = (5, 6, 7, 8)
# Chunks of a PNG that decide no pixel, and the places in them where Pillow finds an orientation.
_METADATA = (b"tEXt", b"zTXt", b"iTXt", b"eXIf", b"iCCP")
_ORIENTED = (b"eXIf", b"Raw profile type exif", b"XML:com.adobe.xmp")
# Errors of Pillow's parsers that were observed on damaged files.
_DAMAGE = (
    OSError,
    SyntaxError,
    ValueError,
    TypeError,
    LookupError,
    ArithmeticError,
    EOFError,
    struct.error,
    zlib.error,
)


def read_rgb(
    path: str | PathLike[str], out: NDArray[np.uint8], *, fit: bool = False, data: bytes | None = None
) -> None:
    """Decode an image into `out`, `(height, width, 3)`, in its upright orientation.

    The orientation in EXIF is applied; metadata that cannot be read have none. Grey, palette and CMYK images become
    RGB; transparency is dropped; of 16-bit samples the upper 8 bits are used. The format counts, not the suffix.

    All chunks of a PNG but its metadata are checked against their checksums. A JPEG has none: truncated data is found,
    flipped bits mostly are not.

    Args:
        path: Path or URL of the file.
        out: Array in which every pixel is written.
        fit: Whether to scale the shorter side to that of `out`, a square, and to cut it from the centre (antialiased
            bilinear). Otherwise the image must have the size of `out`.
        data: The encoded image, if it is not a file; then `path` is only its name.

    Raises:
        BadRecordError: The file is missing, damaged, animated, of another format or of the wrong size, or has more
            than 33,554,432 pixels. Its header is checked before any pixel is decoded.
        RuntimeError: Other code made Pillow fill truncated images with grey.
    """
    height, width = out.shape[:2]
    with _opened(path, data) as (image, data):
        if not fit and sorted(image.size) != sorted((width, height)):  # not even sideways
            raise _wrong_size(path, image, (height, width))
        if math.prod(image.size) > _MOST_PIXELS:
            raise BadRecordError(path, "too many pixels", f"{math.prod(image.size):,}, at most {_MOST_PIXELS:,}")
        # Palettes cannot be interpolated, so the conversion to RGB comes before the resizing.
        upright = _to_rgb(image)
        orientation = _orientation(image, data)
        if orientation in _UPRIGHT:
            upright = upright.transpose(_UPRIGHT[orientation])
        if fit:
            upright = _centre_square(upright, width)
        elif upright.size != (width, height):
            raise _wrong_size(path, upright, (height, width))
        out[...] = np.asarray(upright)


def _wrong_size(path: str | PathLike[str], image: Image.Image, expected: tuple[int, int]) -> BadRecordError:
    return BadRecordError(path, "wrong size", f"{image.size[::-1]} pixels (height, width), expected {expected}")


def upright_size(path: str | PathLike[str], data: bytes | None = None) -> tuple[int, int]:
    """Return height and width that `read_rgb` gives without `fit`; pixels are decoded only if EXIF follows them.

    Raises:
        BadRecordError: `read_rgb` would fail, as far as the header shows it.
    """
    with _opened(path, data) as (image, data):
        width, height = image.size
        return (width, height) if _orientation(image, data) in _SIDEWAYS else (height, width)


@contextmanager
def _opened(path: str | PathLike[str], data: bytes | None) -> Iterator[tuple[Image.Image, bytes]]:
    """Yield an image without the metadata of a PNG, and the whole file."""
    if ImageFile.LOAD_TRUNCATED_IMAGES:
        raise RuntimeError("PIL.ImageFile.LOAD_TRUNCATED_IMAGES is set: truncated images would pass, set it to False")
    data = whole_remote(str(path)) if data is None else data
    if data is None and not Path(path).is_file():
        raise BadRecordError(path, MISSING_FILE)
    try:
        data = Path(path).read_bytes() if data is None else data
        with DECODING, warnings.catch_warnings(action="ignore"):  # remarks about unusual metadata
            warnings.simplefilter("error", Image.DecompressionBombWarning)
            pixels = _without_metadata(data)
            with Image.open(io.BytesIO(pixels), formats=("JPEG", "PNG")) as image:
                if image.format == "PNG":
                    _check_png(path, pixels, image)
                yield image, data
    except BadRecordError:
        raise
    except UnidentifiedImageError as error:  # its text contains a memory address
        raise BadRecordError(path, "not a readable JPEG or PNG") from error
    except (Image.DecompressionBombWarning, Image.DecompressionBombError) as error:
        raise BadRecordError(path, "too many pixels", " ".join(str(error).split())) from error
    except _DAMAGE as error:
        raise BadRecordError(path, "not a readable JPEG or PNG", " ".join(str(error).split())) from error


def _check_png(path: str | PathLike[str], data: bytes, image: Image.Image) -> None:
    if getattr(image, "is_animated", False):
        raise BadRecordError(path, "animated image", f"{getattr(image, 'n_frames', 0)} frames")
    # Every chunk's checksum, which decoding skips; the image cannot be used afterwards.
    Image.open(io.BytesIO(data), formats=("PNG",)).verify()


def _without_metadata(data: bytes) -> bytes:
    """Return a PNG without chunks that could hide its pixels by errors or huge texts; other data are not changed."""
    if data[1:4] != b"PNG":
        return data
    kept, start, kind = [data[:8]], 8, b""
    while start < len(data) and kind != b"IEND":
        end = start + 12 + int.from_bytes(data[start : start + 4])  # length, kind and checksum have 4 bytes each
        kind = data[start + 4 : start + 8]
        if kind not in _METADATA:
            kept.append(data[start:end])
        start = end
    return b"".join(kept)


def _orientation(image: Image.Image, data: bytes) -> int | None:
    """Return the orientation in the metadata of the whole file; None if they contain none or cannot be read."""
    with suppress(*_DAMAGE):
        if any(place in data for place in _ORIENTED):
            Image.open(io.BytesIO(data), formats=("JPEG", "PNG")).verify()
            image = Image.open(io.BytesIO(data), formats=("JPEG", "PNG"))
        return image.getexif().get(_ORIENTATION)
    return None


def _to_rgb(image: Image.Image) -> Image.Image:
    if image.mode.startswith("I"):  # 16-bit grey; Pillow's own conversion clips at 255
        return Image.fromarray((np.asarray(image) >> 8).astype(np.uint8)).convert("RGB")
    return image.convert("RGB")


def _centre_square(image: Image.Image, side: int) -> Image.Image:
    """Cut the largest square from the centre and scale it; in one step this equals scaling first."""
    width, height = image.size
    shorter = min(width, height)
    left, top = (width - shorter) / 2, (height - shorter) / 2
    return image.resize((side, side), Image.Resampling.BILINEAR, box=(left, top, left + shorter, top + shorter))


def common_size(root: str, images: int, size_of: Callable[[int], tuple[int, int]]) -> tuple[int, int]:
    """Return the height and width of more than half of some images of an archive; others will be rejected.

    Args:
        root: The archive, for messages.
        images: Number of images. Some of them, spread over all, are read.
        size_of: Reads the height and width of the image with this number.

    Raises:
        ValueError: No image can be read, or no size occurs in more than half of them.
    """
    numbers = np.unique(np.linspace(0, images - 1, min(_SIZES_READ, images), dtype=np.int64)).tolist()
    sizes: Counter[tuple[int, int]] = Counter()
    for number in numbers:
        with suppress(BadRecordError):  # the bad image is counted when it is read
            sizes[size_of(number)] += 1
    if not sizes:
        raise ValueError(f"{root}: none of {len(numbers)} images can be read")
    size, count = sizes.most_common(1)[0]
    if count * 2 <= sizes.total():
        found = ", ".join(f"{height} x {width}" for (height, width), _ in sizes.most_common(3))
        raise ValueError(
            f"{root}: the images have different sizes ({found} pixels, ...): set archive.image_size, to which all are "
            "scaled and cropped"
        )
    return size
