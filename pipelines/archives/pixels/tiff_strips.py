"""Copies the pixels of a GeoTIFF without GDAL if the file is a header followed by the pixels as in memory.

GDAL needs about a millisecond to open a file, mostly for the georeference. But GDAL decides how a file is read. So a
file is copied only under two conditions. Its directory is of the plain kind that `is_plain` describes. And GDAL has
read, in this process, a file with the same header, byte by byte, and got the same pixels as a copy. Only the corner's
coordinates may differ, because they differ between the patches of an archive.
"""

import itertools
import struct
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from pipelines.archives.archive import Georeference

_SHORT, _LONG, _DOUBLE = 3, 4, 12
_VALUE_BYTES = {2: 1, _SHORT: 2, _LONG: 4, _DOUBLE: 8}  # 2 is ASCII
_WIDTH, _HEIGHT, _BITS, _COMPRESSION, _PHOTOMETRIC, _STRIP_OFFSETS, _SAMPLES = 256, 257, 258, 259, 262, 273, 277
_ROWS_PER_STRIP, _STRIP_BYTES, _PLANES, _SAMPLE_FORMAT = 278, 279, 284, 339
# Description, software, date, pixel scale, corner, affine matrix, coordinate system (3), GDAL's metadata and nodata.
_BESIDE_THE_PIXELS = {270, 305, 306, 33550, 33922, 34264, 34735, 34736, 34737, 42112, 42113}
# Tag 33922, the corner: one pair of pixel and map coordinates, so 6 doubles.
_CORNER = struct.pack("<HHI", 33922, _DOUBLE, 6)
_CORNER_BYTES = 48
_MAP_COORDINATES = 24  # byte within the corner, after the pixel's three doubles
_DIRECTORY = 10  # after byte order, version, the directory's offset and the number of its entries
_ENTRY_BYTES = 12

_Key = tuple[int, int, bytes, tuple[int, ...], str]


@dataclass(frozen=True)
class TiffHeader:
    """The knowledge about all files whose headers differ only in the corner's coordinates."""

    first: Georeference | None
    """Location that GDAL found in the first of these files."""
    corner: int | None
    """Byte of the corner's map coordinates; None if the header has no corner."""

    def georeference(self, data: bytes) -> Georeference | None:
        """Return the location of the image whose file contains `data`."""
        if self.first is None or self.corner is None:
            return self.first
        x, y = struct.unpack_from("<dd", data, self.corner)
        return Georeference(self.first.epsg, x, y)


known_headers: dict[_Key, TiffHeader] = {}
"""Headers of files that GDAL has read in this process."""
MOST_HEADERS = 4096  # an archive has some tens; this limits the memory if every header differs


def copy_pixels(data: bytes, out: NDArray[np.generic]) -> TiffHeader | None:
    """Copy the pixels of a whole file into `out`, `(height, width)`, if GDAL has read another file of its kind.

    Args:
        data: All bytes of the file.
        out: Array, possibly strided; unchanged if the result is None.

    Returns:
        The knowledge about the file's header. If None, nothing was copied, and GDAL has to read the file.
    """
    start = len(data) - out.nbytes
    header = known_headers.get(_key(data[:start], out)) if start > 0 else None
    if header is not None:
        out[...] = np.frombuffer(data, out.dtype, offset=start).reshape(out.shape)
    return header


def learn(data: bytes, pixels: NDArray[np.generic], georeference: Georeference | None) -> None:
    """Allow copying of files like this one from now on, if that is safe.

    Args:
        data: All bytes of a file.
        pixels: Pixels that GDAL read from the file, `(height, width)`.
        georeference: Location that GDAL found in the file.
    """
    start = len(data) - pixels.nbytes
    if (
        start <= 0
        or len(known_headers) >= MOST_HEADERS
        or not is_plain(data[:start], pixels)
        or data[start:] != pixels.tobytes()
    ):
        return
    key = _key(data[:start], pixels)
    corner = key[1] + _MAP_COORDINATES if key[1] < start else None
    header = TiffHeader(georeference, corner)
    # A corner inside the image, or the centre of a pixel, is left to GDAL and its rounding.
    if header.georeference(data) == georeference:
        known_headers[key] = header


def _key(header: bytes, pixels: NDArray[np.generic]) -> _Key:
    """Return the header without the corner's map coordinates, and the position of the corner."""
    entry = header.find(_CORNER)
    place = int.from_bytes(header[entry + 8 : entry + _ENTRY_BYTES], "little") if entry >= 0 else len(header)
    # The corner's first three doubles are a pixel, which says how far the map coordinates are from the edge.
    rest = header[: place + _MAP_COORDINATES] + header[place + _CORNER_BYTES :]
    return len(header), place, rest, pixels.shape, pixels.dtype.str


def is_plain(header: bytes, pixels: NDArray[np.generic]) -> bool:
    """Return whether, according to the header, rows of pixels follow it without gaps to the end of the file.

    Such a file is a classic little-endian TIFF with one directory at its start. It has one band, in uncompressed
    strips in order and without gaps. All of its tags are known not to change the pixels.

    Args:
        header: The file without its last bytes, as many as the pixels take.
        pixels: An array of the expected size and dtype, `(height, width)`.
    """
    end = _DIRECTORY + _ENTRY_BYTES * int.from_bytes(header[8:10], "little")
    # The directory is at byte 8, and no other one follows it.
    if header[:8] != b"II*\0\x08\0\0\0" or len(header) < end + 4 or header[end : end + 4] != bytes(4):
        return False
    entries = list(struct.iter_unpack("<HHII", header[_DIRECTORY:end]))
    tags = [entry[0] for entry in entries]
    values = {tag: _integers(header, *entry) for tag, *entry in entries}
    rows_per_strip = values.get(_ROWS_PER_STRIP) or (0,)
    if rows_per_strip[0] == 0 or any(first >= second for first, second in itertools.pairwise(tags)):
        return False
    needed = _needed_values(len(header), pixels, rows_per_strip[0])
    return (
        all(values.get(tag) == value for tag, value in needed.items())
        and set(tags) - set(needed) <= _BESIDE_THE_PIXELS
        and _only_the_corner_is_left_out(header, end, entries)
    )


def _needed_values(start: int, pixels: NDArray[np.generic], rows_per_strip: int) -> dict[int, tuple[int, ...]]:
    height, width = pixels.shape
    strip_rows = [min(rows_per_strip, height - row) for row in range(0, height, rows_per_strip)]
    strip_bytes = [rows * width * pixels.itemsize for rows in strip_rows]
    return {
        _WIDTH: (width,),
        _HEIGHT: (height,),
        _BITS: (8 * pixels.itemsize,),
        _COMPRESSION: (1,),  # none
        _PHOTOMETRIC: (1,),  # 0 is black
        _STRIP_OFFSETS: tuple(itertools.accumulate(strip_bytes[:-1], initial=start)),
        _SAMPLES: (1,),
        _ROWS_PER_STRIP: (rows_per_strip,),
        _STRIP_BYTES: tuple(strip_bytes),
        _PLANES: (1,),  # chunky
        _SAMPLE_FORMAT: ({"u": 1, "i": 2, "f": 3}.get(pixels.dtype.kind, 0),),
    }


def _integers(header: bytes, kind: int, count: int, field: int) -> tuple[int, ...] | None:
    """Return the values of an entry; None if they are not 16 or 32 bit integers or not in the header."""
    if kind not in (_SHORT, _LONG) or count == 0:
        return None
    size = count * _VALUE_BYTES[kind]
    raw = struct.pack("<I", field)[:size] if size <= 4 else header[field : field + size]
    if len(raw) != size:
        return None
    return struct.unpack(f"<{count}{'H' if kind == _SHORT else 'I'}", raw)


def _only_the_corner_is_left_out(header: bytes, end: int, entries: list[tuple[int, ...]]) -> bool:
    """Return whether the bytes that `_key` leaves out are the corner's coordinates and no other entry's value."""
    entry = header.find(_CORNER)
    if entry < 0:
        return True
    number, misplaced = divmod(entry - _DIRECTORY, _ENTRY_BYTES)
    if misplaced or not 0 <= number < len(entries):
        return False
    place = entries[number][3]
    if not end + 4 <= place <= len(header) - _CORNER_BYTES:
        return False
    others = entries[:number] + entries[number + 1 :]
    sizes = [count * _VALUE_BYTES.get(kind, len(header)) for _, kind, count, _ in others]
    return not any(
        size > 4 and field < place + _CORNER_BYTES and field + size > place
        for (_, _, _, field), size in zip(others, sizes, strict=True)
    )
