"""The settings of the predictions of a model for a dataset or an archive, and of its evaluation on a labelled split."""

from typing import Literal

from pydantic import Field

from conf.sections.section import Section


class ScoreConfig(Section):
    """The settings with which `score` applies a model."""

    batch_size: int = Field(default=32, gt=0)
    """Number of samples per batch of a task; the last batch of a file is padded to this size."""
    threshold: float | None = Field(default=None, gt=0, le=1)
    """Least probability of a predicted label, if samples have several. Null: the thresholds of the model's classes,
    which training or `evaluate` tuned on validation, or 0.5. If samples have one label, the likeliest class is
    predicted."""
    samples_per_file: int = Field(default=2048, gt=0)
    """Number of a raw archive's samples per file of predictions and Spark task; for a dataset, each shard is one
    task."""
    max_rejected_fraction: float = Field(default=0.01, ge=0, le=1)
    """Largest fraction of rejected samples; the job fails if more are rejected. The finished predictions are kept, and
    a repetition with a larger value uses them."""
    format: Literal["parquet", "delta"] = "parquet"
    """Format of the predictions: Parquet files, or the same files as a Delta table (the extra `score`)."""
    runtime: Literal["keras", "bf16", "int8"] = "keras"
    """Runtime of the predictions: Keras in float32, or OpenVINO with bfloat16 or 8-bit numbers, on processors with such
    instructions (the extra `score`). A converted model is used only if it is as good as Keras's."""
    reference_dataset: str | None = Field(default=None, min_length=1)
    """Prepared dataset for the calibration and the test of a converted model; null: the input, if it is a dataset."""
    calibration_samples: int = Field(default=256, ge=64, le=512)
    """Number of training samples of the reference dataset from which int8 chooses its ranges."""
    acceptance_samples: int = Field(default=1000, gt=0)
    """Number of validation samples of the reference dataset for the comparison of a converted model with Keras. With
    fewer than 1,000, a line warns that the comparison is weak."""
    max_f1_drop: float = Field(default=0.005, ge=0, le=1)
    """Largest accepted loss of macro F1 of a converted model on these samples."""
    map_tile: str | None = Field(default=None, min_length=1)
    """Tile that `--map` draws, such as 33UWP; null: all."""


class EvaluateConfig(Section):
    """The options of `evaluate` in addition to the usual scores."""

    tune_thresholds: bool = True
    """Whether to choose, if samples have several labels, each class's threshold with the largest F1 on the validation
    split. The scores with these thresholds are then reported too."""
    test_time_augmentation: Literal["mirror", "flips", "dihedral"] | None = None
    """Images whose probabilities are averaged for each sample: the image and its mirror image (mirror). With flips (4
    images) also upside down, with dihedral (8, square images only) also rotated by quarter turns. Null: the image
    alone. The scores have separate names, such as test_mirror/top_1."""
    report: str | None = Field(default=None, min_length=1)
    """File for a copy of the report (HTML); it may replace only an earlier report. Null: the report is only an artifact
    of the run."""
