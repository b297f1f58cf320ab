"""Typed configuration: one frozen section per concern, each in its own file, and checks across sections."""

from pydantic import model_validator

from conf.combinations import check_mode, check_recovery
from conf.sections.archives import ArchiveConfig
from conf.sections.dataset import DatasetConfig, PrepareConfig, ReaderConfig
from conf.sections.evaluate import EvaluateConfig
from conf.sections.exchange import ExchangeConfig
from conf.sections.input import InputConfig
from conf.sections.launch import LaunchConfig
from conf.sections.modes import SynchronousConfig
from conf.sections.networks import ModelConfig, ResNetConfig
from conf.sections.optimizers import LARSConfig, OneBitAdamConfig, OptimizerConfig, SGDConfig
from conf.sections.probe import ProbeConfig
from conf.sections.schedules import GradualWarmupConfig, ScheduleConfig
from conf.sections.score import ScoreConfig
from conf.sections.section import Section
from conf.sections.tracking import TrackingConfig
from conf.sections.training import TrainingConfig
from conf.sections.warm_start import WarmStartConfig


class RunConfig(Section):
    """All settings of one run."""

    archive: ArchiveConfig | None = None
    """The raw archive; only `prepare` needs it."""
    dataset: DatasetConfig = DatasetConfig()
    prepare: PrepareConfig = PrepareConfig()
    reader: ReaderConfig = ReaderConfig()
    input: InputConfig = InputConfig()
    model: ModelConfig = ResNetConfig()
    warm_start: WarmStartConfig = WarmStartConfig()
    optimizer: OptimizerConfig = LARSConfig()
    schedule: ScheduleConfig = ScheduleConfig()
    exchange: ExchangeConfig = ExchangeConfig()
    training: TrainingConfig = TrainingConfig()
    launch: LaunchConfig = LaunchConfig()
    tracking: TrackingConfig = TrackingConfig()
    score: ScoreConfig = ScoreConfig()
    evaluate: EvaluateConfig = EvaluateConfig()
    probe: ProbeConfig = ProbeConfig()

    @model_validator(mode="after")
    def _schedule_fits_the_run(self) -> "RunConfig":
        for places in (self.schedule.places(), self.input.places()):
            self.schedule.check_in_epochs(places, self.training.epochs)
        warmup = self.schedule.warmup
        if isinstance(warmup, GradualWarmupConfig) and warmup.start == "base" and self.optimizer.learning_rate:
            raise ValueError(
                "schedule.warmup.start=base is the rate for a global batch of 256: set optimizer.learning_rate_per_256 "
                "instead of optimizer.learning_rate, or schedule.warmup.start=zero"
            )
        return self

    @model_validator(mode="after")
    def _cache_is_local(self) -> "RunConfig":
        if "://" in (self.reader.cache_folder or ""):
            raise ValueError(
                f"reader.cache_folder={self.reader.cache_folder} is a URL: it must be a folder that the workers mount"
            )
        return self

    @model_validator(mode="after")
    def _reader_can_do_it(self) -> "RunConfig":
        if self.reader.name == "petastorm" and self.training.checkpoint_every_steps is not None:
            raise ValueError(
                "Petastorm's reader cannot resume within an epoch: set training.checkpoint_every_steps=null or "
                "reader.name=groundswell"
            )
        if self.reader.name == "petastorm" and self.reader.verify == "always":
            raise ValueError(
                "Petastorm's reader knows no checksums: reader.verify=always needs reader.name=groundswell"
            )
        return self

    @model_validator(mode="after")
    def _batch_norm_fits_the_ranks(self) -> "RunConfig":
        ranks, workers = self.model.batch_norm_ranks, self.launch.num_workers
        if ranks != 1 and self.training.jit_compile:
            raise ValueError(
                f"model.batch_norm_ranks={ranks} sums over ranks within the forward pass, which XLA cannot compile: "
                "set training.jit_compile=false or model.batch_norm_ranks=1"
            )
        if workers % self.model.batch_norm_span(workers):
            raise ValueError(
                f"launch.num_workers={workers} does not divide into groups of model.batch_norm_ranks={ranks}: set "
                "a number that divides it, or all"
            )
        return self

    @model_validator(mode="after")
    def _codec_fits_the_optimizer(self) -> "RunConfig":
        codec, optimizer = self.exchange.codec.name, self.optimizer
        if codec == "dgc" and not isinstance(optimizer, SGDConfig):
            raise ValueError(
                f"exchange.codec=dgc hands accumulated velocities to the optimizer, for which {optimizer.name} has no "
                "known recipe: set optimizer={name: sgd, momentum: 0, nesterov: false}"
            )
        if codec == "dgc" and isinstance(optimizer, SGDConfig) and optimizer.momentum > 0:
            raise ValueError(
                f"exchange.codec=dgc has its own momentum, and optimizer.momentum={optimizer.momentum} would apply a "
                "second one: set optimizer.momentum=0 and optimizer.nesterov=false"
            )
        if (codec == "onebit_adam") != isinstance(optimizer, OneBitAdamConfig):
            raise ValueError(
                f"exchange.codec=onebit_adam and optimizer.name=onebit_adam are two halves of one method, got codec "
                f"{codec} and optimizer {optimizer.name}: one without the other would apply the first moment twice or "
                "never"
            )
        if isinstance(optimizer, OneBitAdamConfig) and not 0 < self.exchange.warmup_steps == optimizer.warmup_steps:
            raise ValueError(
                "exchange.codec=onebit_adam needs some steps of plain Adam, which both halves must know, got "
                f"exchange.warmup_steps={self.exchange.warmup_steps} and optimizer.warmup_steps="
                f"{optimizer.warmup_steps}"
            )
        return self

    @model_validator(mode="after")
    def _clipping_is_of_gradients(self) -> "RunConfig":
        codec, clipping = self.exchange.codec.name, self.training.gradient_clipping
        if clipping is not None and codec == "dgc":
            raise ValueError(
                f"exchange.codec=dgc gives accumulated velocities, and training.gradient_clipping={clipping} is for "
                "gradients: set training.gradient_clipping=null and exchange.codec.clip_norm, which clips them before"
            )
        if clipping is not None and codec == "onebit_adam":
            raise ValueError(
                f"exchange.codec=onebit_adam gives first moments, and training.gradient_clipping={clipping} is for "
                "gradients: set training.gradient_clipping=null"
            )
        return self

    @model_validator(mode="after")
    def _rate_factors_are_those_of_the_rate(self) -> "RunConfig":
        optimizer = self.optimizer
        if self.warm_start.rate_factors and isinstance(optimizer, LARSConfig) and optimizer.variant == "larc":
            raise ValueError(
                "warm_start.rate_factors multiplies the update of a layer, and optimizer.variant=larc gives an update "
                "that is not in proportion to the rate: choose another optimizer.variant, or leave out "
                "warm_start.rate_factors"
            )
        return self

    @model_validator(mode="after")
    def _mode_fits_the_rest(self) -> "RunConfig":
        check_mode(self.training.mode, self.launch, self)
        check_recovery(self.launch, self.training, self.reader)
        return self

    @property
    def global_batch_size(self) -> int:
        """Samples per optimizer step over all workers."""
        training = self.training
        product = training.batch_size_per_worker * self.copies(self.launch.num_workers) * training.accumulation_steps
        return training.global_batch_size or product

    def copies(self, workers: int) -> int:
        """Return the number of model copies that these workers train, each on its own samples."""
        return workers // self.training.mode.declaration.ranks_per_copy

    def with_synchronous_mode(self) -> "RunConfig":
        """Return the same global batch in the mode `synchronous`, for jobs that train in no other mode."""
        training = {
            "mode": SynchronousConfig(),
            "accumulation_steps": 1,
            "global_batch_size": self.global_batch_size,
        }
        return self.model_copy(update={"training": self.training.model_copy(update=training)})

    def accumulation_steps(self, workers: int) -> int | None:
        """Return each copy's micro-batches per optimizer step; None: these workers cannot divide the batch."""
        copies, left = divmod(workers, self.training.mode.declaration.ranks_per_copy)
        if not copies or left:
            return None
        steps, left = divmod(self.global_batch_size, copies * self.training.batch_size_per_worker)
        return None if left else steps

    def smaller_sizes(self) -> list[int]:
        """Return the smaller numbers of workers that reach the global batch by accumulation, with the same batch size.

        Batch norm over groups of ranks keeps its groups; batch norm over all ranks then has fewer samples. If steps do
        not wait for some workers, other workers must remain.
        """
        sizes = range(self.training.mode.declaration.unawaited_workers + 1, self.launch.num_workers)
        span = self.model.batch_norm_span
        return [size for size in sizes if self.accumulation_steps(size) and size % span(size) == 0]
