"""BigEarthNet v1.0 as its authors publish it: patches of 1,200 m, 12 bands of Sentinel-2, 43 or 19 classes.

```
<root>/BigEarthNet-v1.0/<patch>/<patch>_B01.tif ... <patch>_B12.tif    (or <root>/<patch>/...)
<root>/BigEarthNet-v1.0/<patch>/<patch>_labels_metadata.json
<root>/splits/train.csv, val.csv, test.csv                             (or .csv.gz: one patch name per line)
<root>/splits/patches_with_cloud_and_shadow.csv, patches_with_seasonal_snow.csv, patches_with_no_19_class_targets.csv
```

Pixels are uint16, reflectance x 10,000. Many patches are also in v2.0, and some of its test patches are in the
training split here. So never test a model on the other version.

Source: Sumbul et al., "BigEarthNet: A Large-Scale Benchmark Archive for Remote Sensing Image Understanding", 2019.
"""

from collections.abc import Mapping, Sequence
from dataclasses import KW_ONLY, dataclass
from functools import cached_property
from typing import Any, ClassVar

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from conf.sections.archives import BigEarthNetV1Config
from pipelines.archives.archive import (
    ArchiveDescription,
    ArchiveIndex,
    Georeference,
    index_table,
)
from pipelines.archives.bigearthnet.nomenclature import BIGEARTHNET_19, BIGEARTHNET_43, TO_19
from pipelines.archives.bigearthnet.patch import GROUPS, dates_and_seasons, flag_lists, path_lists, read_patch
from pipelines.archives.bigearthnet.v1_metadata import (
    CLOUD_LIST,
    NO_19_LIST,
    SNOW_LIST,
    list_file,
    read_labels,
    read_list,
    read_splits,
)
from pipelines.archives.bigearthnet.v2_metadata import METADATA
from pipelines.archives.checked_rows import CheckedRows
from pipelines.archives.files import join, list_subfolders, refuse_link
from pipelines.sample import SettingValue
from pipelines.storage.folder import Location

KIND = "bigearthnet_v1"
IMAGES = "BigEarthNet-v1.0"
PATCHES = "S2[AB]_MSIL2A_????????T??????_[0-9]*_[0-9]*"
"""Pattern of the names of patches; a name of v2.0 has further fields between."""
_CLASS_NAMES = {19: BIGEARTHNET_19, 43: BIGEARTHNET_43}


@dataclass(frozen=True)
class BigEarthNetV1:
    """An extracted BigEarthNet v1.0 archive; each object reads the labels once."""

    root: str
    """Folder of the patches, or the folder that holds `BigEarthNet-v1.0`."""
    _: KW_ONLY
    nomenclature: int = BigEarthNetV1Config.default("nomenclature")
    """Number of classes: 19 of the later nomenclature or the original 43."""
    splits: str | None = BigEarthNetV1Config.default("splits")
    """Folder of the lists of patches; None: `splits` in `root`."""
    include_flagged: bool = BigEarthNetV1Config.default("include_flagged")
    """Whether to take listed patches that are also in the lists of clouds, snow and (of 19 classes) missing classes.

    The official splits contain none of them."""
    subset: bool = BigEarthNetV1Config.default("subset")
    """Whether the lists may name patches that the archive lacks."""
    read_settings: ClassVar[Mapping[str, SettingValue]] = {}
    """No settings: pixels are read as they are stored."""

    def __post_init__(self) -> None:
        if self.nomenclature not in _CLASS_NAMES:
            raise ValueError(f"nomenclature is {self.nomenclature}, expected 19 or 43")

    def __getstate__(self) -> dict[str, Any]:
        """Leave the index out of the pickle for an executor."""
        return {name: value for name, value in vars(self).items() if name != "_index"}

    @property
    def description(self) -> ArchiveDescription:
        """The classes, several per patch, and the bands in three groups by resolution."""
        return ArchiveDescription(KIND, "multi_label", _CLASS_NAMES[self.nomenclature], GROUPS)

    def index(self) -> ArchiveIndex:
        """List every patch of the splits, sorted by id; patches that no split lists are left out.

        Raises:
            FileNotFoundError: The archive or a list is missing.
            ValueError: A list is damaged, no patch exists, or the folder of images is a link out of the archive.
        """
        return self._index

    def read(self, paths: Sequence[str], out: Mapping[str, NDArray[Any]]) -> Georeference | None:
        """Read the 12 bands of one patch: uint16 `(120, 120, 4)`, `(60, 60, 6)` and `(20, 20, 2)`.

        Raises:
            BadRecordError: A band file is missing, truncated, of the wrong size or dtype.
        """
        return read_patch(join(self.root, paths[0]), GROUPS, out)

    @cached_property
    def _index(self) -> ArchiveIndex:
        if not Location(self.root).is_folder():
            raise FileNotFoundError(f"{self.root}: no such folder, expected the BigEarthNet v1.0 archive")
        if Location(join(self.root, METADATA)).is_file():
            raise ValueError(f"{self.root}: this is BigEarthNet v2.0: set archive.kind=bigearthnet_v2")
        patches = read_splits(self._splits())
        if not self.include_flagged:
            patches.rows = patches.rows.filter(pc.invert(pc.is_in(patches.rows["id"], self._flagged())))
        self._mark_missing(patches)
        self._add_labels(patches)
        rows = patches.rows.combine_chunks()
        ids = rows["id"].combine_chunks()
        folders = pc.binary_join_element_wise(self._images(), ids, "/") if self._images() else ids
        columns = {
            "id": ids,
            "split": rows["split"],
            "labels": rows["labels"],
            "paths": path_lists([folders]),
            "tile": rows["tile"],
            "flags": self._flags(ids),
            **dates_and_seasons(ids),
        }
        return ArchiveIndex(index_table(columns), patches.rejected(), patches.unusable())

    def _images(self) -> str:
        """Return the folder of the patches, relative to the root; empty if it is the root."""
        return IMAGES if Location(join(self.root, IMAGES)).is_folder() else ""

    def _splits(self) -> str:
        return join(self.root, "splits") if self.splits is None else self.splits

    def _flagged(self) -> pa.Array:
        """Return the patches that are skipped unless `include_flagged`."""
        names = [CLOUD_LIST, SNOW_LIST, *([NO_19_LIST] if self.nomenclature == 19 else [])]
        lists = [found for name in names if (found := self._list(name)) is not None]
        return pa.concat_arrays([pa.array([], pa.string()), *lists])

    def _flags(self, ids: pa.Array) -> pa.ListArray:
        lists = [self._list(name) for name in (SNOW_LIST, CLOUD_LIST)]
        return flag_lists(
            *(pa.nulls(len(ids), pa.bool_()) if names is None else pc.is_in(ids, names) for names in lists)
        )

    def _list(self, name: str) -> pa.Array | None:
        path = list_file(self._splits(), name)
        return None if path is None else read_list(path)

    def _mark_missing(self, patches: CheckedRows) -> None:
        top = join(self.root, self._images())
        if self._images():
            refuse_link(self.root, top)
        inside, leading_out = list_subfolders(self.root, [self._images() or "."])
        prefix = len(f"{IMAGES}/") if self._images() else 0
        found, links = (pc.utf8_slice_codeunits(names, prefix).combine_chunks() for names in (inside, leading_out))
        if not pc.any(pc.is_in(patches.rows["id"], pa.concat_arrays([found, links]))).as_py():
            raise ValueError(f"{top}: none of the {len(patches.rows)} patches of {self._splits()} exists")
        patches.mark_unusable(
            pc.is_in(patches.rows["id"], links), "symbolic link", file=self._folders(patches.rows["id"])
        )
        missing = pc.invert(pc.is_in(patches.rows["id"], found))
        if self.subset:
            patches.rows = patches.rows.filter(pc.invert(missing))
        else:
            patches.mark_unusable(missing, "missing folder", file=self._folders(patches.rows["id"]))

    def _add_labels(self, patches: CheckedRows) -> None:
        """Read the labels of the patches whose folder exists; the others, like bad files, get none."""
        ids = patches.rows["id"]
        there = pc.invert(pc.is_in(ids, patches.unusable()["id"].combine_chunks())).to_numpy(zero_copy_only=False)
        top, names = join(self.root, self._images()), ids.filter(pa.array(there)).to_pylist()
        indices = TO_19 if self.nomenclature == 19 else range(len(BIGEARTHNET_43))
        labels, tiles, errors = read_labels(
            [f"{top}/{name}/{name}_labels_metadata.json" for name in names],
            dict(zip(BIGEARTHNET_43, indices, strict=True)),
        )
        places = pa.array(np.where(there, np.cumsum(there) - 1, len(labels)))  # an empty list comes last
        labels = pa.concat_arrays([labels, pa.array([[]], labels.type)]).take(places)
        tiles = pa.concat_arrays([tiles, pa.nulls(1, tiles.type)]).take(places)
        patches.rows = patches.rows.append_column("labels", labels).append_column("tile", tiles)
        found = iter(errors)
        by_row = [next(found) if here else None for here in there]
        file, reason, detail = (
            pa.array([getattr(error, part, "") for error in by_row], pa.string())
            for part in ("file", "reason", "detail")
        )
        bad = pa.array([error is not None for error in by_row], pa.bool_())
        patches.mark_unusable(bad, reason, file=file, detail=detail)

    def _folders(self, ids: pa.ChunkedArray) -> pa.ChunkedArray:
        return pc.binary_join_element_wise(join(self.root, self._images()), ids, "/")
