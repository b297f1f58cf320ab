"""EuroSAT as its authors publish it: Sentinel-2 patches of 640 m, each with one of 10 classes.

```
<root>/<Class>/<Class>_<n>.tif        multispectral: uint16, 64 x 64 pixels, 13 bands, reflectance x 10,000
<root>/<Class>/<Class>_<n>.jpg        RGB: the same patches, red, green and blue stretched to 8 bits
```

It has no splits. Ours depend on the name without suffix, so both variants are split alike.

Band order: B8A comes last, after B12. The paper's table lists it after B08, and other software follows the table. But
the files differ: the tenth band is nearly black, as only the cirrus band B10 is, and the last is close to B08.

Source: Helber et al., "EuroSAT: A Novel Dataset and Deep Learning Benchmark for Land Use and Land Cover
Classification", 2019.
"""

import functools
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, replace
from typing import Any, ClassVar, Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

from conf.sections.archives import EuroSATConfig
from pipelines.archives.archive import ArchiveDescription, ArchiveIndex, Georeference
from pipelines.archives.files import join
from pipelines.archives.images.class_folders import (
    ClassFiles,
    check_none_empty,
    index_of,
    list_class_files,
    list_folder,
    refuse_linked_folders,
    rejection,
)
from pipelines.archives.pixels.geotiff import read_bands
from pipelines.archives.pixels.rgb_image import read_rgb
from pipelines.archives.stratified import check_split, stratified_split
from pipelines.sample import SPLITS, ImageGroup, SettingValue

CLASSES = (
    "AnnualCrop",
    "Forest",
    "HerbaceousVegetation",
    "Highway",
    "Industrial",
    "Pasture",
    "PermanentCrop",
    "Residential",
    "River",
    "SeaLake",
)
BANDS = ("B01", "B02", "B03", "B04", "B05", "B06", "B07", "B08", "B09", "B10", "B11", "B12", "B8A")


class _Variant(NamedTuple):
    group: ImageGroup
    suffixes: str
    """Regular expression of the file suffixes."""
    read: Callable[[str, NDArray[Any]], Georeference | None]


_VARIANTS = {
    "eurosat_ms": _Variant(ImageGroup("bands", (64, 64, 13), "uint16", BANDS), "tiff?", read_bands),
    "eurosat_rgb": _Variant(ImageGroup("rgb", (64, 64, 3), "uint8", ("red", "green", "blue")), "jpe?g", read_rgb),
}


@dataclass(frozen=True)
class EuroSAT:
    """An extracted EuroSAT archive, or some of its class folders; each object lists the files once."""

    kind: Literal["eurosat_ms", "eurosat_rgb"]
    root: str
    """Folder that holds the class folders."""
    _: KW_ONLY
    seed: int = EuroSATConfig.default("seed")
    """Seed of the splits."""
    split_fractions: Sequence[float] = tuple(EuroSATConfig.default("split_fractions"))
    """Fractions of train, validation and test within every class."""
    read_settings: ClassVar[Mapping[str, SettingValue]] = {}
    """No settings: pixels are read as they are stored."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "split_fractions", check_split(self.split_fractions))

    def __getstate__(self) -> dict[str, Any]:
        """Leave the list of files out of the pickle for an executor."""
        return {name: value for name, value in vars(self).items() if name != "_files"}

    @property
    def description(self) -> ArchiveDescription:
        """The 10 classes, one per patch, and one image group: `bands` or `rgb`."""
        return ArchiveDescription(self.kind, "single_label", CLASSES, (_VARIANTS[self.kind].group,))

    def index(self) -> ArchiveIndex:
        """List every file of the class folders, by class and name.

        Raises:
            FileNotFoundError: The folder does not exist.
            ValueError: It holds no class folders, unknown class folders, or empty ones.
        """
        files = self._files
        labels = np.array([CLASSES.index(path.split("/")[0]) for path in files.paths.to_pylist()], np.int16)
        keys = [path.rpartition(".")[0] for path in files.paths.to_pylist()]
        splits = stratified_split(keys, labels, self.split_fractions, self.seed)
        return index_of(files, np.array(SPLITS)[splits], labels)

    def read(self, paths: Sequence[str], out: Mapping[str, NDArray[Any]]) -> Georeference | None:
        """Read one patch: `bands` uint16 `(64, 64, 13)`, or `rgb` uint8 `(64, 64, 3)`.

        Raises:
            BadRecordError: The file is missing, truncated, of the wrong size or dtype.
        """
        variant = _VARIANTS[self.kind]
        return variant.read(join(self.root, paths[0]), out[variant.group.name])

    @functools.cached_property
    def _files(self) -> ClassFiles:
        top = list_folder(self.root)
        refuse_linked_folders(self.root, top.rejected)
        unknown = [name for name in top.folders if name not in CLASSES]
        if unknown or not top.folders:
            found = f"a folder {unknown[0]!r}" if unknown else "no folders"
            raise ValueError(f"{self.root}: holds {found}, expected the class folders {', '.join(CLASSES)}")
        suffixes = _VARIANTS[self.kind].suffixes
        is_image = re.compile(rf".*\.({suffixes})", re.IGNORECASE)
        is_named_so = re.compile(rf"({'|'.join(CLASSES)})_[0-9]+\.(?i:{suffixes})")

        def why_not(folder: str, name: str) -> str | None:
            if not is_image.fullmatch(name):
                return "not an image file"
            match = is_named_so.fullmatch(name)
            return None if match and match[1] == folder else "name does not fit its class folder"

        files = list_class_files(self.root, top.folders, why_not)
        check_none_empty(self.root, top.folders, files)
        outside = [
            rejection(self.root, name, "not in a class folder") for name, _ in top.files if is_image.fullmatch(name)
        ]
        return replace(files, rejected=top.rejected + outside + files.rejected)


EuroSATMultispectral = functools.partial(EuroSAT, "eurosat_ms")
EuroSATRGB = functools.partial(EuroSAT, "eurosat_rgb")
