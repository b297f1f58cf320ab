"""The archives that can be opened by name."""

from collections.abc import Callable
from typing import Any

from pipelines.archives.archive import Archive
from pipelines.archives.bigearthnet.v1 import BigEarthNetV1
from pipelines.archives.bigearthnet.v2 import BigEarthNetV2
from pipelines.archives.images.eurosat import EuroSATMultispectral, EuroSATRGB
from pipelines.archives.images.image_folder import ImageFolder
from pipelines.archives.images.image_table import ImageTable
from pipelines.archives.imported import imported_archive
from pipelines.archives.synthetic.archive import SyntheticBigEarthNet

ARCHIVES: dict[str, Callable[..., Archive]] = {
    "bigearthnet_v2": BigEarthNetV2,
    "bigearthnet_v1": BigEarthNetV1,
    "eurosat_ms": EuroSATMultispectral,
    "eurosat_rgb": EuroSATRGB,
    "image_folder": ImageFolder,
    "table": ImageTable,
    "synthetic": SyntheticBigEarthNet,
    "import": imported_archive,
}
"""Constructor of every kind of archive; its arguments are the settings of its class in `conf.sections.archives`.

A new kind is one file in this folder, one line here, and its class of settings with a line in
`conf.sections.archives`.
"""


def open_archive(kind: str, **settings: Any) -> Archive:
    """Open the archive of the given kind; nothing is read before `index` or `read` is called."""
    return ARCHIVES[kind](**settings)
