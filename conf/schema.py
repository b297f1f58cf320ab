"""Typed configuration: one frozen model per section, one complete YAML file per run."""

from typing import Annotated, Literal

from pydantic import Field, field_validator, model_validator

from conf.codecs import CodecConfig
from conf.section import Section


class FolderArchive(Section):
    """A raw archive that `prepare` reads from a folder."""

    root: str = Field(min_length=1)
    """Folder of the archive, as published: a path, or a URL that fsspec knows (`s3://bucket/folder`)."""


class BigEarthNetV2Config(FolderArchive):
    """BigEarthNet v2.0 (reBEN)."""

    kind: Literal["bigearthnet_v2"]
    include_flagged: bool = False
    """Take the patches with snow, clouds or shadows too, which have a metadata file of their own."""
    sentinel1: bool | None = None
    """Read `BigEarthNet-S1` as a further image group; null: where it is there."""


class BigEarthNetV1Config(FolderArchive):
    """BigEarthNet v1.0."""

    kind: Literal["bigearthnet_v1"]
    nomenclature: Literal[19, 43] = 19
    """Number of classes: the 19 of the later nomenclature or the original 43."""
    splits: str | None = None
    """Folder of the official lists of patches; null: `splits` in the archive."""
    include_flagged: bool = False
    """Take the patches with snow, clouds or shadows too."""
    subset: bool = False
    """Whether the lists may name patches that are not there."""


class EuroSATConfig(FolderArchive):
    """EuroSAT, multispectral GeoTIFF or RGB JPEG."""

    kind: Literal["eurosat_ms", "eurosat_rgb"]
    seed: int = Field(default=0, ge=0)
    """Of the stratified splits."""
    split_fractions: list[float] = Field(default=[0.7, 0.15, 0.15])
    """Of train, validation and test."""


class ImageFolderConfig(FolderArchive):
    """JPEG and PNG files in `<split>/<class>/` or `<class>/`."""

    kind: Literal["image_folder"]
    image_size: int | None = Field(default=None, gt=0)
    """Resize and crop to squares of this side, in pixels; null: all images have one size."""
    seed: int = Field(default=0, ge=0)
    """Of the stratified splits."""
    split_fractions: list[float] = Field(default=[0.7, 0.15, 0.15])
    """Of train, validation and test, where the folders are classes."""
    validation_fraction: float = Field(default=0.1, ge=0, lt=1)
    """Part of train that becomes validation, where the folders are splits without one."""


class SyntheticConfig(Section):
    """Invented BigEarthNet patches, rendered as they are asked for."""

    kind: Literal["synthetic"]
    train: int = Field(gt=0)
    validation: int = Field(ge=0)
    test: int = Field(ge=0)
    seed: int = Field(default=0, ge=0)


ArchiveConfig = Annotated[
    BigEarthNetV2Config | BigEarthNetV1Config | EuroSATConfig | ImageFolderConfig | SyntheticConfig,
    Field(discriminator="kind"),
]

ARCHIVE_KINDS = ("bigearthnet_v2", "bigearthnet_v1", "eurosat_ms", "eurosat_rgb", "image_folder", "synthetic")


class DatasetConfig(Section):
    """The prepared dataset: written by `prepare`, read by everything else."""

    path: str = Field(min_length=1)
    """Folder: a path, or a URL that fsspec knows (`s3://bucket/folder`)."""


class PrepareConfig(Section):
    """How the dataset is laid out on disk."""

    row_group_mib: int = Field(gt=0, le=1024)
    """Uncompressed size of one Parquet row group."""
    row_groups_per_shard: int = Field(gt=0)
    """Row groups of one Parquet file."""
    seed: int = Field(ge=0)
    """Rows are shuffled once, within their split, by this seed."""
    max_rejected_fraction: float = Field(ge=0, le=1)
    """More bad records than this part of all samples fail the job."""
    overwrite: bool
    """Replace a dataset that another archive or other settings made."""


class ReaderConfig(Section):
    """How workers read the dataset."""

    name: Literal["groundswell", "petastorm"]
    """`petastorm`: its own reader, for comparison; slower, its order depends on the number of workers."""
    threads: int = Field(gt=0, le=64)
    """That gather batches."""
    batches_in_flight: int = Field(gt=0, le=64)
    """Gathered ahead of the training step."""
    cache_folder: str | None = Field(min_length=1)
    """On a local disk, for datasets that are remote or compressed; null: in the temporary folder (TMPDIR)."""
    cache_limit_gib: float = Field(gt=0, allow_inf_nan=False)
    """A larger dataset is read, and shuffled, in windows that fit."""


class ModelConfig(Section):
    """ResNet v1.5 on all bands."""

    depth: Literal[18, 34, 50, 101, 152]
    width_factor: float = Field(gt=0, le=4)
    """Scales every channel count; 1.0 is the published network."""
    upsampling: Literal["nearest", "bilinear", "bicubic"]
    """How coarser image groups reach the finest one's resolution."""
    augmentation: Literal["none", "flips", "dihedral"]
    """Training images are flipped, or flipped and turned by quarters (squares only); drawn anew every epoch."""


class OptimizerConfig(Section):
    """LARS, momentum SGD or 1-bit Adam, applied after the exchange."""

    name: Literal["lars", "sgd", "onebit_adam"]
    learning_rate_per_256: float = Field(gt=0)
    """Peak learning rate for a global batch of 256."""
    scaling: Literal["linear", "sqrt"]
    """How the peak follows the global batch size."""
    momentum: float = Field(ge=0, lt=1)
    nesterov: bool
    weight_decay: float = Field(ge=0)
    """Not applied to biases and normalisation parameters; inside the gradient for LARS (L2), beside it for SGD."""
    trust_coefficient: float = Field(gt=0)
    """LARS only."""
    beta_1: float = Field(default=0.9, ge=0, lt=1)
    """1-bit Adam only, which has no use for momentum and nesterov."""
    beta_2: float = Field(default=0.999, ge=0, lt=1)
    """1-bit Adam only."""
    warmup_steps: int = Field(default=0, ge=0)
    """1-bit Adam only: steps of plain Adam; the same as exchange.warmup_steps."""


class Milestone(Section):
    """From a point of the run on, the peak learning rate is multiplied by `factor`."""

    epoch: float = Field(gt=0)
    """Epochs done, in a run of `schedule.recipe_epochs`."""
    factor: float = Field(gt=0)


class ScheduleConfig(Section):
    """Learning rate over the run, a pure function of the step."""

    warmup_epochs: float = Field(ge=0)
    """Gradual warm-up, raised every step."""
    recipe_epochs: float = Field(gt=0)
    """Length of the run that the milestones are stated for; in a shorter run they come proportionally earlier."""
    milestones: list[Milestone]
    """In rising order; none keeps the peak."""


class ExchangeConfig(Section):
    """What travels between the ranks."""

    codec: CodecConfig
    """Its name with its settings; a name alone takes the defaults."""
    dense_below: int = Field(default=1024, ge=0)
    """Tensors with fewer elements travel in float32, as all biases and gains do."""
    bucket_mib: float | None = Field(default=8.0, gt=0)
    """Gradients up to this size travel together, last layers first, during the backward pass; null: all at once."""
    warmup_steps: int = Field(default=0, ge=0)
    """Everything travels in float32 for so many optimizer steps."""
    rescale_residual: bool = True
    """Keep what was left behind at its weight when the learning rate changes."""

    @field_validator("codec", mode="before")
    @classmethod
    def _name_alone(cls, value: object) -> object:
        return {"name": value} if isinstance(value, str) else value


class TrainingConfig(Section):
    """The epoch loop."""

    epochs: int = Field(gt=0)
    batch_size_per_worker: int = Field(gt=0)
    seed: int = Field(ge=0)
    output: str = Field(min_length=1)
    """Folder of the checkpoints; with several hosts, on storage that all of them mount."""
    checkpoint_every_steps: int | None = Field(gt=0)
    """Checkpoints within an epoch, beside the one at its end; null: none. What a failure costs is at most so much."""
    resume_run: str | None
    """MLflow run to continue from its newest checkpoint; null starts a new one."""
    jit_compile: bool
    """Compile forward and backward pass with XLA."""


class LaunchConfig(Section):
    """Where the workers run."""

    master: str = Field(min_length=1)
    """Spark master, where spark-submit or the notebook has not chosen one."""
    num_workers: int = Field(gt=0)
    gpus_per_worker: int = Field(ge=0, le=1)
    """A worker trains on one GPU, or on the CPU."""
    threads_per_worker: int | None = Field(gt=0)
    """TensorFlow's threads; null: the cores of the worker's Spark task (`spark.task.cpus`)."""
    start_timeout_seconds: int = Field(gt=0)
    """How long ranks wait for each other: to start, and for Gloo in one operation."""
    retries: int = Field(ge=0)
    """Further attempts, each from the newest checkpoint, after a process, executor or host died, or a hang."""
    hang_timeout_seconds: float | None = Field(gt=0, allow_inf_nan=False)
    """End the attempt when a rank gives no sign of life for so long; must cover the first step, which compiles."""
    allow_fewer_workers: bool
    """Whether a further attempt may have fewer workers where slots are lost; the global batch stays as it is."""
    accept_unencrypted: bool
    """Run although Spark was told to encrypt or authenticate, which neither control channel nor gradients are."""


class TrackingConfig(Section):
    """MLflow; the store is MLFLOW_TRACKING_URI, or sqlite under `mlruns/`."""

    experiment: str = Field(min_length=1)
    run_name: str | None
    registered_model: str | None
    """Register the logged model under this name."""


class RunConfig(Section):
    """Everything one run depends on."""

    archive: ArchiveConfig
    dataset: DatasetConfig
    prepare: PrepareConfig
    reader: ReaderConfig
    model: ModelConfig
    optimizer: OptimizerConfig
    schedule: ScheduleConfig
    exchange: ExchangeConfig
    training: TrainingConfig
    launch: LaunchConfig
    tracking: TrackingConfig

    @model_validator(mode="after")
    def _schedule_fits_the_run(self) -> "RunConfig":
        if self.schedule.warmup_epochs > self.training.epochs:
            raise ValueError(
                f"schedule.warmup_epochs={self.schedule.warmup_epochs} is longer than training.epochs="
                f"{self.training.epochs}"
            )
        epochs = [milestone.epoch for milestone in self.schedule.milestones]
        if epochs != sorted(set(epochs)) or (epochs and epochs[-1] > self.schedule.recipe_epochs):
            raise ValueError(
                f"schedule.milestones must rise and end by schedule.recipe_epochs={self.schedule.recipe_epochs}, "
                f"got epochs {epochs}"
            )
        return self

    @model_validator(mode="after")
    def _folders_are_local(self) -> "RunConfig":
        for name, path in (
            ("training.output", self.training.output),
            ("reader.cache_folder", self.reader.cache_folder or ""),
        ):
            if "://" in path:
                raise ValueError(f"{name}={path} is a URL: it must be a folder that the workers mount")
        return self

    @model_validator(mode="after")
    def _reader_can_resume(self) -> "RunConfig":
        if self.reader.name == "petastorm" and self.training.checkpoint_every_steps is not None:
            raise ValueError(
                "Petastorm's reader cannot resume within an epoch: set training.checkpoint_every_steps=null or "
                "reader.name=groundswell"
            )
        return self

    @model_validator(mode="after")
    def _codec_fits_the_optimizer(self) -> "RunConfig":
        codec, optimizer = self.exchange.codec.name, self.optimizer
        if codec == "dgc" and optimizer.name != "sgd":
            raise ValueError(
                f"exchange.codec=dgc hands accumulated velocities to the optimizer, for which {optimizer.name} has no "
                "known recipe: set optimizer.name=sgd"
            )
        if codec == "dgc" and optimizer.momentum > 0:
            raise ValueError(
                f"exchange.codec=dgc has its own momentum, and optimizer.momentum={optimizer.momentum} would apply a "
                "second one: set optimizer.momentum=0 and optimizer.nesterov=false"
            )
        if (codec == "onebit_adam") != (optimizer.name == "onebit_adam"):
            raise ValueError(
                f"exchange.codec=onebit_adam and optimizer.name=onebit_adam are two halves of one method, got codec "
                f"{codec} and optimizer {optimizer.name}: one without the other would apply the first moment twice or "
                "never"
            )
        if codec == "onebit_adam" and not 0 < self.exchange.warmup_steps == optimizer.warmup_steps:
            raise ValueError(
                "exchange.codec=onebit_adam needs some steps of plain Adam, which both halves must know, got "
                f"exchange.warmup_steps={self.exchange.warmup_steps} and optimizer.warmup_steps="
                f"{optimizer.warmup_steps}"
            )
        return self

    @property
    def global_batch_size(self) -> int:
        """Samples per step over all workers."""
        return self.training.batch_size_per_worker * self.launch.num_workers
