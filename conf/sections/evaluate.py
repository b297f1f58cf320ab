"""The settings of the evaluation of a model on a labelled split."""

from typing import Literal

from pydantic import Field

from conf.sections.section import Section


class EvaluateConfig(Section):
    """The options of `evaluate` in addition to the usual scores."""

    tune_thresholds: bool = True
    """Whether to choose, if samples have several labels, each class's threshold with the largest F1 on the validation
    split. The scores with these thresholds are then reported too."""
    test_time_augmentation: Literal["mirror", "flips", "dihedral"] | None = None
    """Images whose probabilities are averaged for each sample: the image and its mirror image (mirror); also upside
    down (flips, 4 images); also rotated by quarter turns (dihedral, 8; square images only). Null: the image alone. The
    scores have separate names, such as test_mirror/top_1."""
    report: str | None = Field(default=None, min_length=1)
    """File for a copy of the report (HTML); it may replace only an earlier report. Null: the report is only an artifact
    of the run."""
