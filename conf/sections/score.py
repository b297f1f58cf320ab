"""The settings of applying a model to a dataset or an archive."""

from typing import Literal

from pydantic import Field

from conf.sections.section import Section


class ScoreConfig(Section):
    """How `score` applies a model."""

    batch_size: int = Field(default=32, gt=0)
    """Samples that a task gives to the model at a time; the last batch of a file is padded to this size."""
    threshold: float | None = Field(default=None, gt=0, le=1)
    """Least probability of a predicted label, where samples have several; null: those of the model's classes, which
    training or `evaluate` has tuned on validation, or 0.5. Where samples have one label, it is the likeliest class."""
    samples_per_file: int = Field(default=2048, gt=0)
    """Samples in one file of predictions, and in one Spark task, of a raw archive; of a dataset, each shard is one."""
    max_rejected_fraction: float = Field(default=0.01, ge=0, le=1)
    """The job fails when a larger fraction of the samples is rejected; what is scored is kept, and counts when more are
    allowed."""
    format: Literal["parquet", "delta"] = "parquet"
    """Format of the predictions: Parquet files, or the same files as a Delta table (the extra `score`)."""
    runtime: Literal["keras", "bf16", "int8"] = "keras"
    """What computes the predictions: Keras in float32, or OpenVINO with bfloat16 or 8-bit numbers, on processors that
    have instructions for them (the extra `score`). A converted model is used only where it is as good as Keras's."""
    reference_dataset: str | None = Field(default=None, min_length=1)
    """Prepared dataset that calibrates and accepts a converted model; null: the input, where it is a dataset."""
    calibration_samples: int = Field(default=256, ge=64, le=512)
    """Training samples of the reference dataset by which int8 chooses its ranges."""
    acceptance_samples: int = Field(default=1000, gt=0)
    """Validation samples of the reference dataset on which a converted model is compared with Keras. With fewer than
    1,000, a line warns that they say little."""
    max_f1_drop: float = Field(default=0.005, ge=0, le=1)
    """Largest fall of the macro F1 on these samples with which a converted model is accepted."""
    map_tile: str | None = Field(default=None, min_length=1)
    """Tile that `--map` draws, such as 33UWP; null: all."""
