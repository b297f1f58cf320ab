"""BigEarthNet v2.0 (reBEN) as its authors publish it: patches of 1,200 m, 12 bands of Sentinel-2, 19 classes.

```
<root>/metadata.parquet
<root>/BigEarthNet-S2/<tile>/<patch>/<patch>_B01.tif ... <patch>_B12.tif
<root>/metadata_for_patches_with_snow_cloud_or_shadow.parquet     (optional: more patches)
<root>/BigEarthNet-S1/<scene>/<s1_name>/<s1_name>_VV.tif, _VH.tif  (optional: every patch as Sentinel-1 sees it)
```

A tile's name is the patch's without its last two fields; a scene's is the first five fields of `s1_name`. Sentinel-2 is
uint16, reflectance x 10,000; Sentinel-1 is float32, dB.

Source: Clasen et al., "reBEN: Refined BigEarthNet Dataset for Remote Sensing Image Analysis", 2024.
"""

import functools
from collections.abc import Mapping, Sequence
from dataclasses import KW_ONLY, dataclass
from typing import Any, ClassVar

import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from conf.sections.archives import BigEarthNetV2Config
from pipelines.archives.archive import ArchiveDescription, ArchiveIndex, Georeference, index_table
from pipelines.archives.bigearthnet.nomenclature import BIGEARTHNET_19
from pipelines.archives.bigearthnet.patch import GROUPS as GROUPS
from pipelines.archives.bigearthnet.patch import SENTINEL1, dates_and_seasons, flag_lists, path_lists, read_patch
from pipelines.archives.bigearthnet.v1 import IMAGES as V1_IMAGES
from pipelines.archives.bigearthnet.v1 import PATCHES as V1_PATCHES
from pipelines.archives.bigearthnet.v2_metadata import FLAG_COLUMNS, class_indices, read_metadata
from pipelines.archives.bigearthnet.v2_metadata import METADATA as METADATA
from pipelines.archives.checked_rows import CheckedRows
from pipelines.archives.files import join, list_subfolders, refuse_link
from pipelines.sample import SettingValue
from pipelines.storage.folder import Location

KIND = "bigearthnet_v2"
FLAGGED_METADATA = "metadata_for_patches_with_snow_cloud_or_shadow.parquet"
IMAGES = "BigEarthNet-S2"
S1_IMAGES = "BigEarthNet-S1"

_LAYOUT = f"expected {METADATA} and {IMAGES}/<tile>/<patch>/<patch>_B01.tif in it"
_COLUMN_AND_ROW = len("_00_00")
_TILE_IN_ID = (len("S2A_MSIL2A_20170613T101031_N9999_R022_T"), len("S2A_MSIL2A_20170613T101031_N9999_R022_T33UUP"))
_SCENE = len("S1A_IW_GRDH_1SDV_20170613T165043")


@dataclass(frozen=True)
class BigEarthNetV2:
    """An extracted BigEarthNet v2.0 archive."""

    root: str
    """Folder that holds `metadata.parquet` and `BigEarthNet-S2`."""
    _: KW_ONLY
    include_flagged: bool = BigEarthNetV2Config.default("include_flagged")
    """Whether to include the patches with snow, clouds or shadows, which have their own metadata file."""
    sentinel1: bool | None = BigEarthNetV2Config.default("sentinel1")
    """Whether to read `BigEarthNet-S1` as a further image group; None: yes if it exists."""
    read_settings: ClassVar[Mapping[str, SettingValue]] = {}
    """No settings: pixels are read as they are stored."""

    @property
    def description(self) -> ArchiveDescription:
        """The 19 classes, several per patch, the bands in three groups by resolution, and Sentinel-1 in a fourth."""
        groups = (*GROUPS, SENTINEL1) if self._reads_sentinel1 else GROUPS
        return ArchiveDescription(KIND, "multi_label", BIGEARTHNET_19, groups)

    def index(self) -> ArchiveIndex:
        """List every patch of the metadata, sorted by id; patches without a folder are unusable.

        `paths` are the Sentinel-2 folder and, where it is read, the Sentinel-1 folder.

        Raises:
            FileNotFoundError: The archive, its metadata or a folder of images is missing.
            ValueError: The metadata is malformed or empty, or a folder of images is a link out of the archive.
        """
        sentinel1 = self._reads_sentinel1
        patches = read_metadata(self._metadata_files(), sentinel1=sentinel1)
        # Column of names, folder of images, and end of a name's part that is the tile or the scene.
        layouts = (("id", IMAGES, -_COLUMN_AND_ROW), ("s1_name", S1_IMAGES, _SCENE))[: 1 + sentinel1]
        for column, images, end in layouts:
            names = patches.rows[column]
            folders = pc.binary_join_element_wise(images, pc.utf8_slice_codeunits(names, 0, end), names, "/")
            patches.rows = patches.rows.append_column(images, folders)
            self._mark_missing(patches, images)
        rows = patches.rows.combine_chunks()
        columns = {
            "id": rows["id"],
            "split": rows["split"],
            "labels": class_indices(rows["labels"].combine_chunks()),
            "paths": path_lists([rows[images].combine_chunks() for _, images, _ in layouts]),
            "country": rows["country"],
            "tile": tiles(rows["id"]),
            "flags": flag_lists(*(rows[name].combine_chunks() for name in FLAG_COLUMNS)),
            **dates_and_seasons(rows["id"]),
        }
        return ArchiveIndex(index_table(columns), patches.rejected(), patches.unusable())

    def read(self, paths: Sequence[str], out: Mapping[str, NDArray[Any]]) -> Georeference | None:
        """Read one patch: uint16 `(120, 120, 4)`, `(60, 60, 6)`, `(20, 20, 2)`, Sentinel-1 float32 `(120, 120, 2)`.

        Raises:
            BadRecordError: A band file is missing, truncated, of the wrong size or dtype, or has NaN.
        """
        georeference = read_patch(join(self.root, paths[0]), GROUPS, out)
        if len(paths) > 1:
            read_patch(join(self.root, paths[1]), (SENTINEL1,), out)
        return georeference

    @functools.cached_property
    def _reads_sentinel1(self) -> bool:
        """Whether Sentinel-1 is read, decided once per job: a folder that appears later does not change the samples."""
        return Location(join(self.root, S1_IMAGES)).is_folder() if self.sentinel1 is None else self.sentinel1

    def _metadata_files(self) -> list[str]:
        path, flagged = join(self.root, METADATA), join(self.root, FLAGGED_METADATA)
        if not Location(path).is_file():
            raise FileNotFoundError(f"{self.root}: no BigEarthNet v2.0 archive, {self._what_it_is()}")
        if self.include_flagged and not Location(flagged).is_file():
            raise FileNotFoundError(f"{flagged} does not exist: download it, or set archive.include_flagged=false")
        return [path, flagged] if self.include_flagged else [path]

    def _what_it_is(self) -> str:
        """Return what a root without metadata probably is, and what to set."""
        root = Location(self.root.rstrip("/"))
        if root.parent.is_file(METADATA):
            return f"its parent is one: set archive.root={root.parent}"
        if root.is_folder(V1_IMAGES) or root.glob(V1_PATCHES):
            return "this is BigEarthNet v1.0: set archive.kind=bigearthnet_v1"
        return _LAYOUT

    def _mark_missing(self, patches: CheckedRows, images: str) -> None:
        """Mark the rows whose folder, in the column `images`, does not exist, with one listing per tile or scene."""
        top = join(self.root, images)
        if not Location(top).is_folder():
            raise FileNotFoundError(f"{self.root}: no folder {images}, {_LAYOUT}")
        refuse_link(self.root, top)
        parents = pc.unique(pc.list_element(pc.split_pattern(patches.rows[images], "/"), 1)).to_pylist()
        inside, leading_out = list_subfolders(self.root, [f"{images}/{parent}" for parent in parents])
        for found, value_set, reason in ((True, leading_out, "symbolic link"), (False, inside, "missing folder")):
            folders = patches.rows[images]
            bad = pc.equal(pc.is_in(folders, value_set.combine_chunks()), found)
            patches.mark_unusable(bad, reason, file=pc.binary_join_element_wise(self.root.rstrip("/"), folders, "/"))


def tiles(ids: pa.Array | pa.ChunkedArray) -> pa.Array | pa.ChunkedArray:
    """Return the tile of the Sentinel-2 grid in every patch's id, e.g. `33UUP`."""
    return pc.utf8_slice_codeunits(ids, *_TILE_IN_ID)
