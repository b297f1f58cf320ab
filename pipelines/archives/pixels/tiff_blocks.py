"""Checks that GDAL does not make: missing or damaged blocks (strips or tiles) of a GeoTIFF, and further pages."""

import io
import itertools
import zlib
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import rasterio
from rasterio.enums import Compression, Interleaving

from pipelines.archives.archive import BadRecordError

_LARGEST_BLOCK = 1 << 24  # pixels


def check_profile(path: str, source: rasterio.DatasetReader, shape: tuple[int, ...], dtype: str) -> None:
    """Check the pages, the size and the blocks of an opened file before its pixels are read.

    Args:
        path: Path of the file.
        source: The opened file.
        shape: Expected `(bands, height, width)`.
        dtype: Expected dtype of every band.

    Raises:
        BadRecordError: The file has several pages (TIFF directories): GDAL would read the first without a warning.
            Overviews (pages of lower resolution) and masks belong to the first page and are not counted. Or it has
            another size, dtype or number of bands, or a huge block: GDAL allocates a whole one even for a small image.
    """
    dtypes = sorted(set(source.dtypes))
    height, width = source.block_shapes[0]
    for is_wrong, reason, detail in (
        (source.subdatasets, "several pages", f"{len(source.subdatasets)}, expected 1 with all bands in it"),
        (source.count != shape[0], "wrong number of bands", f"{source.count}, expected {shape[0]}"),
        (source.shape != shape[1:], "wrong size", f"{source.shape} pixels (height, width), expected {shape[1:]}"),
        (dtypes != [dtype], "wrong dtype", f"{', '.join(dtypes)}, expected {dtype}"),
        (height * width > _LARGEST_BLOCK, "wrong blocks", f"of {height} x {width} pixels"),
    ):
        if is_wrong:
            raise BadRecordError(path, reason, detail)


def check_blocks(path: str, source: rasterio.DatasetReader, data: bytes | None = None) -> None:
    """Check the blocks of every band.

    Args:
        path: Path of the file.
        source: The opened file.
        data: All bytes of a remote file.

    Raises:
        BadRecordError: A block has no bytes in the file, as after an interrupted write: GDAL invents its pixels. Or a
            deflated block fails its checksum. GDAL skips the checksum if damaged bytes inflate to more than the block.
            It then returns wrong pixels, and the last of them are uninitialised memory.
    """
    blocks = list(_blocks(path, source))
    if source.compression == Compression.deflate:
        with Path(path).open("rb") if data is None else io.BytesIO(data) as file:
            for name, offset, size, values in blocks:
                file.seek(offset)
                _check_deflated(path, name, file.read(size), values * np.dtype(source.dtypes[0]).itemsize)


def _blocks(path: str, source: rasterio.DatasetReader) -> Iterator[tuple[str, int, int, int]]:
    """Yield name, offset, file bytes and values of every block; a strip ends with the image, a tile need not."""
    block_height, block_width = source.block_shapes[0]
    rows, columns = -(-source.height // block_height), -(-source.width // block_width)
    # With pixel interleaving every band lists the same blocks, which hold all bands.
    interleaved = source.count > 1 and source.interleaving == Interleaving.pixel
    bands = [1] if interleaved else source.indexes
    for band, row, column in itertools.product(bands, range(rows), range(columns)):
        name = f"block {row * columns + column} of {rows * columns}" + (f", band {band}" if len(bands) > 1 else "")
        offset, size = (
            source.get_tag_item(f"BLOCK_{what}_{column}_{row}", "TIFF", bidx=band) for what in ("OFFSET", "SIZE")
        )
        if offset is None or size is None:
            raise BadRecordError(path, "pixels missing", name)
        block_rows = min(block_height, source.height - row * block_height)
        yield name, int(offset), int(size), block_rows * block_width * (source.count if interleaved else 1)


def _check_deflated(path: str, name: str, data: bytes, least: int) -> None:
    stream = zlib.decompressobj()
    try:
        inflated = len(stream.decompress(data, 8 * _LARGEST_BLOCK))
    except zlib.error as error:
        raise BadRecordError(path, "damaged block", f"{name}: {error}") from error
    if not stream.eof or inflated < least:
        raise BadRecordError(path, "damaged block", f"{name} inflates to {inflated} bytes, needs {least}")
