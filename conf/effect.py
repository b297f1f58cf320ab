"""Settings that would have no effect, which is a mistake of whoever typed them."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from conf.schema import RunConfig


@dataclass(frozen=True)
class Rule:
    """A key that only counts where another key has a certain value."""

    key: str
    is_idle: Callable[[RunConfig], bool]
    """Whether the key has no effect in a configuration."""
    reason: str


def _without_residual(config: RunConfig) -> bool:
    return not config.exchange.codec.keeps_residual


def _without_epochs(config: RunConfig) -> bool:
    return all(place.epochs is None for _, place in config.schedule.places())


def _resumes_by_id(config: RunConfig) -> bool:
    return config.training.resume_run not in (None, "latest")


def _is_one_rank_of_all(config: RunConfig) -> bool:
    return config.model.batch_norm_ranks == "all" and config.launch.num_workers == 1


RULES = (
    Rule("launch.allow_fewer_workers", lambda c: not c.launch.retries, "launch.retries=0 allows no further attempt"),
    Rule("schedule.recipe_epochs", _without_epochs, "no place of the schedule is in epochs"),
    Rule("optimizer.scaling", lambda c: c.optimizer.learning_rate is not None, "optimizer.learning_rate is absolute"),
    Rule("model.batch_norm_ranks", _is_one_rank_of_all, "launch.num_workers=1 has no other ranks"),
    Rule("exchange.dense_below", lambda c: c.exchange.codec.name == "none", "with exchange.codec=none all is float32"),
    Rule("exchange.warmup_steps", lambda c: c.exchange.codec.name == "none", "with exchange.codec=none all is float32"),
    Rule("exchange.rescale_residual", _without_residual, "this exchange.codec keeps no residual"),
    Rule(
        "warm_start.source",
        lambda c: c.training.resume_run is not None,
        "training.resume_run continues with the weights of a checkpoint",
    ),
    Rule("tracking.experiment", _resumes_by_id, "training.resume_run continues a run, in its experiment"),
    Rule("tracking.run_name", _resumes_by_id, "training.resume_run continues a run, under its name"),
)


def refuse_without_effect(
    config: RunConfig, keys: Sequence[str], *, verb: str, reads: Sequence[str], ignores: Sequence[str] = ()
) -> None:
    """Refuse keys, given one by one, that change nothing in what a verb does.

    Args:
        config: The configuration with them.
        keys: Keys as `section.key`.
        verb: Name of the verb, for the message.
        reads: Sections and keys that the verb reads.
        ignores: Keys of these sections that it does not read.

    Raises:
        ValueError: Names the first such key and says why.
    """
    for key in keys:
        if key in ignores:
            raise ValueError(f"--set {key} has no effect: {verb} does not read it")
        if not any(_is_within(key, read) or _is_within(read, key) for read in reads):
            raise ValueError(f"--set {key} has no effect: {verb} reads {', '.join(reads)}")
        for rule in RULES:
            if key == rule.key and rule.is_idle(config):
                raise ValueError(f"--set {key} has no effect: {rule.reason}")


def _is_within(key: str, section: str) -> bool:
    return key == section or key.startswith(f"{section}.")
