"""The settings of every kind of raw archive, by kind; their defaults are stated here only."""

from typing import Annotated, Any, Literal, get_args

from pydantic import Field

from conf.sections.section import ImportPath, Section, member_names


class FolderArchive(Section):
    """A raw archive that `prepare` reads from a folder."""

    root: str = ""
    """Folder of the archive, as published: a path, or a URL that fsspec supports (`s3://bucket/folder`). `prepare`
    needs it."""


class DrawnSplitsArchive(FolderArchive):
    """The settings of archives whose splits are drawn, in proportion in every class, if the archive has none."""

    seed: int = Field(default=0, ge=0, lt=2**32)
    """Seed of the draw."""
    split_fractions: list[float] = Field(default=[0.7, 0.15, 0.15])
    """Fractions of train, validation and test, if the splits are drawn; they add up to 1."""


class ImagesArchive(DrawnSplitsArchive):
    """The settings that archives of JPEG and PNG images share."""

    image_size: int | None = Field(default=None, gt=0)
    """Side in pixels of the squares to which images are resized and cropped; null: the most frequent size."""
    validation_fraction: float = Field(default=0.1, ge=0, lt=1)
    """Part of train that becomes validation, if the archive has splits and none is called validation."""


class BigEarthNetV2Config(FolderArchive):
    """BigEarthNet v2.0 (reBEN): 19 classes, 12 Sentinel-2 bands, Sentinel-1 where it is present."""

    kind: Literal["bigearthnet_v2"]
    include_flagged: bool = False
    """Whether to include the patches with snow, clouds or shadows, which have a separate metadata file."""
    sentinel1: bool | None = None
    """Whether to read `BigEarthNet-S1` as another image group; null reads it if it exists."""


class BigEarthNetV1Config(FolderArchive):
    """BigEarthNet v1.0: 19 or 43 classes, 12 Sentinel-2 bands."""

    kind: Literal["bigearthnet_v1"]
    nomenclature: Literal[19, 43] = 19
    """Number of classes: the 19 of the later nomenclature or the original 43."""
    splits: str | None = None
    """Folder of the official lists of patches; null means `splits` in the archive."""
    include_flagged: bool = False
    """Whether to include the patches with snow, clouds or shadows."""
    subset: bool = False
    """Whether the lists may name patches that the archive lacks."""


class EuroSATConfig(DrawnSplitsArchive):
    """EuroSAT: 10 classes, multispectral GeoTIFF, 13 bands."""

    kind: Literal["eurosat_ms"]


class EuroSATRGBConfig(DrawnSplitsArchive):
    """EuroSAT: 10 classes, RGB JPEG, 3 bands."""

    kind: Literal["eurosat_rgb"]


class ImageFolderConfig(ImagesArchive):
    """JPEG and PNG files in `<split>/<class>/`, or in `<class>/` if the splits are drawn."""

    kind: Literal["image_folder"]


class TableConfig(ImagesArchive):
    """Parquet files, as Hugging Face's, or a DataFrame with a column of images; its key is set by archive.id."""

    kind: Literal["table"]
    image: str = Field(default="image", min_length=1)
    """Column of JPEG or PNG images: their bytes, or a struct with a field `bytes`."""
    label: str = Field(default="label", min_length=1)
    """Column of labels: a text or an integer for one class, a list for several classes."""
    labels: Literal["auto", "indices", "multi_hot"] = "auto"
    """Meaning of a list of integers: the numbers of classes (indices), or 1 and 0 for each class (multi_hot). Auto
    means indices, and refuses lists that may be either."""
    split: str | None = Field(default=None, min_length=1)
    """Column of the splits' names; null: names of files or folders give the split, or the splits are drawn."""
    id: str | None = Field(default=None, min_length=1)
    """Column of texts or integers, a different one in each row, which become the samples' ids. It also travels under
    its own name and type, for joins; null: file and row number are the id."""
    keep: list[str] = Field(default=[])
    """Further columns that travel unchanged to the dataset and the predictions: of texts, numbers, booleans, dates or
    timestamps."""


class SyntheticConfig(Section):
    """Invented BigEarthNet patches, rendered when they are read."""

    kind: Literal["synthetic"]
    train: int = Field(gt=0)
    """Number of training patches."""
    validation: int = Field(ge=0)
    """Number of validation patches."""
    test: int = Field(ge=0)
    """Number of test patches."""
    seed: int = Field(default=0, ge=0, lt=2**32)
    """Seed of the patches."""


class ImportedArchiveConfig(Section):
    """Your own archive: a class or function that returns a `pipelines.archives.archive.Archive`."""

    kind: Literal["import"]
    path: ImportPath
    """What to import, `package.module:object`; driver and executors need its module."""
    settings: dict[str, Any] = Field(default={})
    """Keyword arguments of the imported object."""


ArchiveConfig = Annotated[
    BigEarthNetV2Config
    | BigEarthNetV1Config
    | EuroSATConfig
    | EuroSATRGBConfig
    | ImageFolderConfig
    | TableConfig
    | SyntheticConfig
    | ImportedArchiveConfig,
    Field(discriminator="kind"),
]

ROOTED_KINDS = tuple(
    kind
    for member in get_args(get_args(ArchiveConfig)[0])
    if issubclass(member, FolderArchive)
    for kind in member_names(member, "kind")
)
"""Kinds of archives that are read from a folder."""
