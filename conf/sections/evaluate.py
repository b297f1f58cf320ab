"""The settings of measuring a model on a labelled split."""

from typing import Literal

from pydantic import Field

from conf.sections.section import Section


class EvaluateConfig(Section):
    """What `evaluate` does beside the usual scores."""

    tune_thresholds: bool = True
    """Whether to choose for each class the threshold with the largest F1 on the validation split, where samples have
    several labels, and to report the scores with these thresholds too."""
    test_time_augmentation: Literal["mirror", "flips", "dihedral"] | None = None
    """Images whose probabilities are averaged for each sample: itself and its mirror image (mirror); also upside down
    (flips, 4 images); also turned by quarters (dihedral, 8; squares only). Null: the image alone. The scores have a
    name of their own, such as test_mirror/top_1."""
    report: str | None = Field(default=None, min_length=1)
    """File that gets the report (HTML) as well, in place of an earlier report only; null: it is only among the run's
    artifacts."""
