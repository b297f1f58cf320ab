"""Names and locations of synthetic patches: invented acquisitions over real tiles of the Sentinel-2 grid."""

from dataclasses import dataclass

PATCH_METRES = 1200
_PATCHES_ACROSS = 91  # rows and columns of patches in a tile of 109.8 km


@dataclass(frozen=True)
class Scene:
    """One acquisition of one tile."""

    name: str
    """Mission, level, sensing time, baseline, orbit and tile, as in a patch's id."""
    epsg: int
    """Code of the tile's UTM zone."""
    west: int
    """Left edge of the tile in metres."""
    north: int
    """Upper edge of the tile in metres."""
    country: str

    @property
    def tile(self) -> str:
        """Name of the tile in the Sentinel-2 grid, e.g. `29SNB`."""
        return self.name.rpartition("_T")[2]


@dataclass(frozen=True)
class Patch:
    """One patch of a scene."""

    scene: Scene
    column: int
    row: int

    @property
    def id(self) -> str:
        """Name in v2.0, with padded column and row."""
        return f"{self.scene.name}_{self.column:02d}_{self.row:02d}"

    @property
    def s2v1_name(self) -> str:
        """Name of the patch in v1.0: no baseline, orbit and tile, no padding."""
        acquisition = "_".join(self.scene.name.split("_")[:3])
        return f"{acquisition}_{self.column}_{self.row}"

    @property
    def s1_name(self) -> str:
        """Name of the radar patch: the same day at 06:00."""
        sensing = self.scene.name.split("_")[2]
        return f"S1A_IW_GRDH_1SDV_{sensing[:8]}T060000_{self.scene.tile}_{self.column}_{self.row}"

    @property
    def west(self) -> int:
        """Left edge in metres."""
        return self.scene.west + self.column * PATCH_METRES

    @property
    def north(self) -> int:
        """Upper edge in metres."""
        return self.scene.north - self.row * PATCH_METRES


SCENES = (
    Scene("S2A_MSIL2A_20170608T112121_N9999_R037_T29SNB", 32629, 499980, 4200000, "Portugal"),
    Scene("S2B_MSIL2A_20170724T114349_N9999_R123_T29UPU", 32629, 600000, 5900040, "Ireland"),
    Scene("S2A_MSIL2A_20170821T105031_N9999_R051_T31UGS", 32631, 699960, 5700000, "Belgium"),
    Scene("S2B_MSIL2A_20170907T103019_N9999_R108_T32TMT", 32632, 399960, 5200020, "Switzerland"),
    Scene("S2A_MSIL2A_20171012T100031_N9999_R122_T33UWP", 32633, 499980, 5400000, "Austria"),
    Scene("S2B_MSIL2A_20171118T094029_N9999_R036_T34TCR", 32634, 300000, 5100000, "Serbia"),
    Scene("S2A_MSIL2A_20180114T093031_N9999_R136_T34TEN", 32634, 499980, 4800000, "Kosovo"),
    Scene("S2B_MSIL2A_20180311T095029_N9999_R079_T34UEG", 32634, 499980, 6200040, "Lithuania"),
    Scene("S2A_MSIL2A_20180406T101021_N9999_R022_T34WFS", 32634, 600000, 7200000, "Finland"),
    Scene("S2B_MSIL2A_20180423T093029_N9999_R136_T35UMB", 32635, 399960, 6200040, "Lithuania"),
    Scene("S2A_MSIL2A_20180517T094031_N9999_R036_T35VLG", 32635, 300000, 6700020, "Finland"),
    Scene("S2B_MSIL2A_20180528T095029_N9999_R079_T35VNK", 32635, 499980, 7000020, "Finland"),
)
CAPACITY = len(SCENES) * _PATCHES_ACROSS**2
"""Largest number of patches: no two patches of an archive share a location."""


def check_counts(counts: dict[str, int]) -> None:
    """Check the number of patches of every split.

    Raises:
        ValueError: A number is negative, or there are no patches or too many.
    """
    if min(counts.values()) < 0 or not 1 <= sum(counts.values()) <= CAPACITY:
        raise ValueError(f"patches are {counts}, expected 0 or more of each and 1 to {CAPACITY} in all")


def patch(number: int) -> Patch:
    """Return the patch with this number, from 0 to `CAPACITY - 1`; neighbouring numbers are in different scenes."""
    cell, scene = divmod(number, len(SCENES))
    column, row = divmod(cell, _PATCHES_ACROSS)
    return Patch(SCENES[scene], column, row)
