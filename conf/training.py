"""The settings of the epoch loop."""

from pydantic import Field

from conf.section import Section


class TrainingConfig(Section):
    """The epoch loop."""

    epochs: int = Field(default=90, gt=0)
    """Number of passes over the training split."""
    batch_size_per_worker: int = Field(default=32, gt=0)
    """Samples per step of one worker; times launch.num_workers it is the global batch."""
    seed: int = Field(default=0, ge=0, lt=2**32)
    """Seed of the initial weights, the order of samples, augmentation and the codecs' random choices."""
    output: str = Field(default="outputs", min_length=1)
    """Folder of the checkpoints; with several hosts, on storage that all of them mount."""
    checkpoint_every_steps: int | None = Field(default=None, gt=0)
    """Steps between checkpoints within an epoch, beside the one at its end; null: none. A failure costs at most so
    many steps."""
    resume_run: str | None = None
    """MLflow run to continue from its newest checkpoint; `latest`: the newest that is not finished; null: a new run."""
    jit_compile: bool = False
    """Whether XLA compiles forward and backward pass: slower on a CPU (RESULTS.md), faster on most GPUs."""
