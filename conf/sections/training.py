"""The settings of the epoch loop: its loss and metrics, the choice of the best epoch, and the weights at the start."""

import math
from typing import Annotated, Any, Literal

from pydantic import Field, StringConstraints, field_validator, model_validator

from conf.sections.modes import ModeConfig, SynchronousConfig
from conf.sections.section import Imported, NamedSection, Section, refuse, value_at


class CrossEntropyConfig(NamedSection):
    """Cross-entropy of the dataset's task, with `training.label_smoothing` and `training.class_weights`."""

    name: Literal["cross_entropy"] = "cross_entropy"


class ImportedLossConfig(Imported):
    """Your own function, or one of Keras, from targets and logits to one loss per sample."""


LossConfig = Annotated[CrossEntropyConfig | ImportedLossConfig, Field(discriminator="name")]


class MetricConfig(Imported):
    """A function from targets and probabilities to a number, as in scikit-learn; higher is better."""


class SelectionConfig(Section):
    """The choice of the best epoch, and the end of training if no better one follows."""

    metric: str | None = None
    """Validation metric that compares epochs, such as val/f1_micro or val_ema/loss. A metric whose name ends in loss is
    better when lower, others when higher. The checkpoint of the best epoch is always kept. Null: epochs are not
    compared."""
    min_delta: float = Field(default=0.0, ge=0)
    """Smallest improvement on the earlier best epoch that counts as better."""
    patience: int | None = Field(default=None, gt=0)
    """Number of consecutive epochs without a better one after which training ends; null: all epochs are trained."""
    model: Literal["best", "last"] = "best"
    """Epoch that provides the weights of the logged model."""

    @model_validator(mode="after")
    def _needs_a_metric(self) -> "SelectionConfig":
        refuse(
            *(
                (
                    self.metric is None and getattr(self, key) != self.default(key),
                    f"training.selection.{key}={getattr(self, key)} has no effect without training.selection.metric: "
                    "set it to a metric of validation, such as val/loss",
                )
                for key in ("min_delta", "patience", "model")
            )
        )
        return self


class TrainingConfig(Section):
    """The epoch loop."""

    epochs: int = Field(default=90, gt=0)
    """Number of passes over the training split."""
    batch_size_per_worker: int = Field(default=32, gt=0)
    """Samples per worker and micro-batch; batch norm takes its statistics over these samples."""
    accumulation_steps: int = Field(default=1, gt=0)
    """Micro-batches per optimizer step and worker; the global batch is this number times batch size and
    launch.num_workers. With training.mode=pipeline, the micro-batches of a pipeline, times the number of pipelines."""
    global_batch_size: int | None = Field(default=None, gt=0)
    """Samples per optimizer step over all workers; accumulation_steps then follows from it. Null: the product."""
    seed: int = Field(default=0, ge=0, lt=2**32)
    """Seed of the initial weights, the order of samples, augmentation and the codecs' random choices."""
    output: str = Field(default="outputs", min_length=1)
    """Folder of the checkpoints. With several hosts, it is on storage that all of them mount, or a URL that fsspec
    supports (`s3://bucket/folder`)."""
    checkpoint_every_steps: int | None = Field(default=None, gt=0)
    """Steps between checkpoints within an epoch, in addition to the one at its end; null: none. A failure repeats at
    most this many steps."""
    resume_run: str | None = None
    """MLflow run to continue from its newest checkpoint; `latest`: the newest unfinished run; null: a new run."""
    trace_steps: list[Annotated[int, Field(gt=0)]] | None = Field(default=None, min_length=2, max_length=2)
    """First and last optimizer step, counted from 1, whose parts are traced on every rank with Horovod's timeline. The
    artifact trace.json is for Perfetto (ui.perfetto.dev) and Chrome. Null: no trace."""
    tensorflow_profiler: bool = False
    """Whether TensorFlow's profiler also records the steps of trace_steps, on every rank, for TensorBoard."""
    mode: ModeConfig = SynchronousConfig()
    """Method with which the workers train one common model."""
    precision: Literal["float32", "bfloat16", "float16"] = "float32"
    """Number format in forward and backward pass: bfloat16 is for processors with AVX-512 BF16 or AMX; float16 has a
    loss scale. Weights, moments, batch-norm statistics, gradients between ranks and the logged model are float32."""
    loss: LossConfig = CrossEntropyConfig()
    """Loss that training minimises; val/loss is the cross-entropy with every loss."""
    metrics: dict[Annotated[str, StringConstraints(pattern=r"^[a-z][a-z0-9_]*$")], MetricConfig] = Field(default={})
    """Your own metrics by name, each `{path: "package.module:function"}`, such as functions of sklearn.metrics.
    Validation writes them as val/NAME, evaluation as test/NAME."""
    label_smoothing: float = Field(default=0.0, ge=0, lt=1)
    """Part of the training targets that is spread over all answers; validation and evaluation have no smoothing."""
    class_weights: Literal["balanced"] | dict[str, float] | None = None
    """Weights of the classes in the training loss, by name (1 for others); with several labels, weights of positive
    answers. `balanced`: by the counts of the training split, more for rare classes. Null: equal weights."""
    mixup: float | None = Field(default=None, gt=0, le=1)
    """Alpha of mixup, such as 0.2. Images and targets of every training sample become weighted means with the neighbour
    in the global order; the weight is drawn from Beta(alpha, alpha). Null: no mixup."""
    gradient_clipping: float | None = Field(default=None, gt=0)
    """Largest global norm of the mean gradient, after the exchange; a longer gradient is scaled down to it. The loss
    scale is divided out before. A codec's residual does not contain what clipping removes. Null: no clipping."""
    ema: float | None = Field(default=None, gt=0, lt=1)
    """Decay per step of an exponential moving average of weights and batch-norm statistics, such as 0.999. The average
    is validated (val_ema/...) and logged (model_ema) in addition to the model. Null: no average."""
    selection: SelectionConfig = SelectionConfig()
    jit_compile: bool = False
    """Whether XLA compiles forward and backward pass: slower on a CPU (RESULTS.md), faster on most GPUs."""

    @field_validator("trace_steps")
    @classmethod
    def _steps_rise(cls, steps: list[int] | None) -> list[int] | None:
        if steps is not None and steps[0] >= steps[1]:
            raise ValueError(
                f"training.trace_steps={steps}: the first step must be before the last one, such as [20, 24]"
            )
        return steps

    @field_validator("class_weights", mode="before")
    @classmethod
    def _are_weights(cls, value: Any) -> Any:
        if value is None or value == "balanced":
            return value
        if not isinstance(value, dict) or not value:
            raise ValueError(
                f"training.class_weights={value!r}: should be balanced, null or a mapping of class names to weights"
            )
        for name, weight in value.items():
            if isinstance(weight, bool) or not isinstance(weight, int | float) or not 0 < weight < math.inf:
                raise ValueError(f"training.class_weights: the weight of {name!r} is {weight!r}, not a number above 0")
        return {str(name): float(weight) for name, weight in value.items()}

    @model_validator(mode="after")
    def _settings_fit_together(self) -> "TrainingConfig":
        refuse(
            *(
                (
                    isinstance(self.loss, ImportedLossConfig) and getattr(self, key) != self.default(key),
                    f"training.{key}={getattr(self, key)} is for training.loss=cross_entropy, and training.loss is "
                    f"{value_at(self.loss, 'path')}: give your function such an argument in training.loss.settings",
                )
                for key in ("label_smoothing", "class_weights")
            ),
            (
                self.mixup is not None and self.batch_size_per_worker % 2,
                f"training.mixup mixes the samples of a batch in pairs: set training.batch_size_per_worker to an even "
                f"number, not {self.batch_size_per_worker}, or training.mixup=null",
            ),
            (
                self.global_batch_size is not None and self.accumulation_steps > 1,
                f"global_batch_size={self.global_batch_size} decides how often gradients are accumulated: set "
                f"accumulation_steps=1, not {self.accumulation_steps}, or global_batch_size=null",
            ),
        )
        return self


class WarmStartConfig(Section):
    """Weights of an earlier training as the start of this one."""

    source: str | None = Field(default=None, min_length=1)
    """Logged model (`runs:/...`, `models:/...`), checkpoint (`.npz`) or Keras file (`.keras`); null: new weights.
    Variables are taken by name and shape, bands by name. If the classes differ, the head starts with new weights."""
    frozen_layers: list[str] = Field(default=[])
    """Names of layers, with `*` and `?`, that keep the weights of the source."""
    rate_factors: dict[str, Annotated[float, Field(gt=0)]] = Field(default={})
    """Factors of the learning rate by names with `*` and `?`, of layers, such as {"stage*": 0.1}, or of their
    variables, such as {"*/beta": 64}. If several names fit a variable, the last one counts; if none fits, the factor is
    1."""

    @model_validator(mode="after")
    def _only_weights_that_were_trained_are_frozen(self) -> "WarmStartConfig":
        if self.frozen_layers and self.source is None:
            raise ValueError(
                f"warm_start.frozen_layers={self.frozen_layers} would keep weights that nobody trained: set "
                "warm_start.source"
            )
        return self

    @property
    def is_logged(self) -> bool:
        """Whether the source is a model in MLflow, not a file."""
        return (self.source or "").startswith(("runs:/", "models:/"))
