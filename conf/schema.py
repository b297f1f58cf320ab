"""Typed configuration: one frozen section per concern, each in its own file, and checks across sections."""

from collections.abc import Mapping
from typing import Any

from pydantic import model_validator

from conf.sections.archives import ArchiveConfig
from conf.sections.codecs import ExchangeConfig
from conf.sections.dataset import DatasetConfig, PrepareConfig, ReaderConfig
from conf.sections.input import InputConfig
from conf.sections.launch import LaunchConfig, TrackingConfig
from conf.sections.modes import SynchronousConfig
from conf.sections.networks import ModelConfig, ResNetConfig
from conf.sections.optimizers import LARSConfig, OptimizerConfig
from conf.sections.probe import ProbeConfig
from conf.sections.schedules import GradualWarmupConfig, ScheduleConfig
from conf.sections.score import EvaluateConfig, ScoreConfig
from conf.sections.section import Section, choice_at, refuse, value_at
from conf.sections.training import TrainingConfig, WarmStartConfig


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
    def _reader_can_do_it(self) -> "RunConfig":
        refuse(
            (
                "://" in (self.reader.cache_folder or ""),
                f"reader.cache_folder={self.reader.cache_folder} is a URL: it must be a folder that the workers mount",
            ),
            (
                self.reader.name == "petastorm" and self.training.checkpoint_every_steps is not None,
                "Petastorm's reader cannot resume within an epoch: set training.checkpoint_every_steps=null or "
                "reader.name=groundswell",
            ),
            (
                self.reader.name == "petastorm" and self.reader.verify == "always",
                "Petastorm's reader knows no checksums: reader.verify=always needs reader.name=groundswell",
            ),
        )
        return self

    @model_validator(mode="after")
    def _batch_norm_fits_the_ranks(self) -> "RunConfig":
        ranks, workers = self.model.batch_norm_ranks, self.launch.num_workers
        refuse(
            (
                ranks != 1 and self.training.jit_compile,
                f"model.batch_norm_ranks={ranks} sums over ranks within the forward pass, which XLA cannot compile: "
                "set training.jit_compile=false or model.batch_norm_ranks=1",
            ),
            (
                workers % self.model.batch_norm_span(workers),
                f"launch.num_workers={workers} does not divide into groups of model.batch_norm_ranks={ranks}: set "
                "a number that divides it, or all",
            ),
        )
        return self

    @model_validator(mode="after")
    def _optimizer_fits_the_rest(self) -> "RunConfig":
        codec, optimizer, clipping = self.exchange.codec.name, self.optimizer.name, self.training.gradient_clipping
        momentum, warmup_steps = (value_at(self.optimizer, key) for key in ("momentum", "warmup_steps"))
        refuse(
            (
                codec == "dgc" and optimizer != "sgd",
                f"exchange.codec=dgc hands accumulated velocities to the optimizer, for which {optimizer} has no known "
                "recipe: set optimizer={name: sgd, momentum: 0, nesterov: false}",
            ),
            (
                codec == "dgc" and momentum,
                f"exchange.codec=dgc has its own momentum, and optimizer.momentum={momentum} would apply a second one: "
                "set optimizer.momentum=0 and optimizer.nesterov=false",
            ),
            (
                (codec == "onebit_adam") != (optimizer == "onebit_adam"),
                f"exchange.codec=onebit_adam and optimizer.name=onebit_adam are two halves of one method, got codec "
                f"{codec} and optimizer {optimizer}: one without the other would apply the first moment twice or never",
            ),
            (
                optimizer == "onebit_adam" and not 0 < self.exchange.warmup_steps == warmup_steps,
                "exchange.codec=onebit_adam needs some steps of plain Adam, which both halves must know, got "
                f"exchange.warmup_steps={self.exchange.warmup_steps} and optimizer.warmup_steps={warmup_steps}",
            ),
            (
                clipping is not None and codec == "dgc",
                f"exchange.codec=dgc gives accumulated velocities, and training.gradient_clipping={clipping} is for "
                "gradients: set training.gradient_clipping=null and exchange.codec.clip_norm, which clips them before",
            ),
            (
                clipping is not None and codec == "onebit_adam",
                f"exchange.codec=onebit_adam gives first moments, and training.gradient_clipping={clipping} is for "
                "gradients: set training.gradient_clipping=null",
            ),
            (
                self.warm_start.rate_factors and value_at(self.optimizer, "variant") == "larc",
                "warm_start.rate_factors multiplies the update of a layer, and optimizer.variant=larc gives an update "
                "that is not in proportion to the rate: choose another optimizer.variant, or leave out "
                "warm_start.rate_factors",
            ),
        )
        return self

    @model_validator(mode="after")
    def _mode_fits_the_rest(self) -> "RunConfig":
        chosen, mode = self.training.mode.name, self.training.mode.declaration
        if self.launch.num_workers % mode.ranks_per_copy:
            raise ValueError(
                f"launch.num_workers={self.launch.num_workers} does not divide into copies of the model of "
                f"{mode.ranks_per_copy} workers each, as training.mode={chosen} has them: set a multiple of "
                f"{mode.ranks_per_copy}"
            )
        for key, allowed, reason, remedy in mode.refusals():
            value = choice_at(self, key)
            if value is not None and value != [] and value not in allowed:
                is_long = isinstance(value, list) and isinstance(value[0], Section)
                raise ValueError(f"{key if is_long else f'{key}={value}'} {reason}: {remedy}")
        ranks = self.model.batch_norm_ranks
        refuse(
            (
                mode.ranks_per_copy > 1 and ranks != 1,
                f"model.batch_norm_ranks={ranks} makes groups of workers, and training.mode={chosen} makes those that "
                "hold one copy of the model: set model.batch_norm_ranks=1",
            ),
        )
        return self

    @model_validator(mode="after")
    def _recovery_fits_the_rest(self) -> "RunConfig":
        in_place, refused = self.launch.recover == "in_place", self.training.mode.declaration.not_in_place
        refuse(
            (
                in_place and refused,
                f"launch.recover=in_place {refused}: set launch.recover=restart, and launch.retries",
            ),
            (
                in_place and self.launch.num_workers == 1,
                "launch.recover=in_place continues with the other workers, and launch.num_workers=1 has none: set "
                "launch.recover=restart, and launch.retries",
            ),
            (
                in_place and self.training.trace_steps is not None,
                "training.trace_steps brings the clocks of processes together, and launch.recover=in_place may replace "
                "one of them: set launch.recover=restart",
            ),
            (
                in_place and self.reader.name == "petastorm",
                "launch.recover=in_place continues within an epoch, and reader.name=petastorm begins epochs only at "
                "their start: set reader.name=groundswell",
            ),
        )
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

    @property
    def places_in_epochs(self) -> list[str]:
        """Keys of the places of the run that are in epochs."""
        return [key for key, place in [*self.schedule.places(), *self.input.places()] if place.epochs is not None]

    def with_values(self, **sections: Mapping[str, Any]) -> "RunConfig":
        """Return a copy with new values by section and key, validated as a whole."""
        changed = {name: getattr(self, name).model_copy(update=values) for name, values in sections.items()}
        return self.model_copy(update=changed)

    def with_synchronous_mode(self) -> "RunConfig":
        """Return the same global batch in the mode `synchronous`, for jobs that train in no other mode."""
        return self.with_values(
            training={
                "mode": SynchronousConfig(),
                "accumulation_steps": 1,
                "global_batch_size": self.global_batch_size,
            }
        )

    def accumulation_steps(self, workers: int) -> int | None:
        """Return each copy's micro-batches per optimizer step; None: these workers cannot divide the batch."""
        copies, left = divmod(workers, self.training.mode.declaration.ranks_per_copy)
        if not copies or left:
            return None
        steps, left = divmod(self.global_batch_size, copies * self.training.batch_size_per_worker)
        return None if left else steps

    @property
    def smaller_sizes(self) -> list[int]:
        """The smaller numbers of workers that reach the global batch by accumulation, with the same batch size.

        Batch norm over groups of ranks keeps its groups; batch norm over all ranks then has fewer samples. If steps do
        not wait for some workers, other workers must remain.
        """
        sizes = range(self.training.mode.declaration.unawaited_workers + 1, self.launch.num_workers)
        return [
            size for size in sizes if self.accumulation_steps(size) and size % self.model.batch_norm_span(size) == 0
        ]


def check_length(training: TrainingConfig, exchange: ExchangeConfig, steps_per_epoch: int) -> str | None:
    """Check that the training mode has an effect in a run of this length.

    Args:
        training: The epochs and their mode.
        exchange: The codec and its warm-up.
        steps_per_epoch: Optimizer steps per epoch on the dataset.

    Returns:
        A warning; None: there is no problem.

    Raises:
        ValueError: The run ends before the mode or the codec begins.
    """
    mode, epochs = training.mode.declaration, training.epochs
    steps, beginning = epochs * steps_per_epoch, mode.beginning()
    if beginning is not None and beginning.steps >= steps:
        raise ValueError(
            f"{beginning.key}={beginning.steps} is not before the end of the run, which has {steps} steps, so that "
            f"{beginning.meaning}: lower it, or set training.mode=synchronous"
        )
    exchanges, wanted = mode.exchanges(epochs, steps_per_epoch), mode.wanted_exchanges()
    number, unit = (steps, "steps") if exchanges is None else (exchanges, "exchanges")
    _check_warmup_ends(exchange, number, unit)
    if exchanges is None or wanted is None or exchanges >= wanted[1]:
        return None
    return (
        f"{wanted[0]} wants about {wanted[1]} exchanges, and this run has {exchanges}: lower it or have workers "
        f"exchange more often, or train longer"
    )


def _check_warmup_ends(exchange: ExchangeConfig, number: int, unit: str) -> None:
    if exchange.codec.name != "none" and exchange.warmup_steps >= number:
        raise ValueError(
            f"exchange.warmup_steps={exchange.warmup_steps} is not before the end of the run, which has {number} "
            f"{unit}, so that exchange.codec={exchange.codec.name} never begins: lower it, train longer, or set "
            "exchange.codec=none"
        )
    for name in ("density", "rank"):
        key = f"exchange.codec.{name}_schedule"
        bounds = [entry.before_step for entry in getattr(exchange.codec, f"{name}_schedule", [])]
        if bounds:
            refuse(
                (
                    bounds[-1] >= number,
                    f"{key} ends with before_step={bounds[-1]}, which is not before the end of the run of {number} "
                    f"{unit}, so that exchange.codec.{name}={getattr(exchange.codec, name)} never holds: lower it, or "
                    "train longer",
                ),
                (
                    bounds[0] <= exchange.warmup_steps,
                    f"{key} begins with before_step={bounds[0]}, and until exchange.warmup_steps="
                    f"{exchange.warmup_steps} gradients travel in float32: raise the one or lower the other",
                ),
            )
