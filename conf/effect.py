"""Settings without effect, which are mistakes of the user."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import get_args

from conf.schema import RunConfig, choice_at, value_at
from conf.sections.codecs import DGCConfig
from conf.sections.mode_declaration import Idle
from conf.sections.modes import ALONE
from conf.sections.networks import ResNetCifarConfig
from conf.sections.optimizers import LARSConfig, LayerwiseConfig, Role, SGDConfig
from conf.sections.section import Section


@dataclass(frozen=True)
class IdleRule:
    """A key that has an effect only if another key has a certain value."""

    key: str
    is_idle: Callable[[RunConfig], bool]
    """Whether the key has no effect in a configuration."""
    reason: str
    per_run: bool = False
    """Whether the other key usually differs between runs. If so, a file may set this key without an error."""


def _without_epochs(config: RunConfig) -> bool:
    return all(place.epochs is None for _, place in [*config.schedule.places(), *config.input.places()])


def _is_alone(config: RunConfig) -> bool:
    return config.launch.num_workers == 1


def _looks_ahead_without_momentum(config: RunConfig) -> bool:
    # False is what happens without momentum, and the value that optimizers ask the user to set with it.
    optimizer = config.optimizer
    return isinstance(optimizer, LARSConfig | SGDConfig) and optimizer.nesterov and not optimizer.momentum


def _adapts_nothing(config: RunConfig) -> bool:
    optimizer = config.optimizer
    return isinstance(optimizer, LARSConfig) and {*optimizer.roles()["unadapted"]} >= {*get_args(Role)}


def _excludes_from_nothing(config: RunConfig) -> bool:
    optimizer = config.optimizer
    gives_unadapted = isinstance(optimizer, LayerwiseConfig) and optimizer.unadapted_roles is None
    return not optimizer.weight_decay and not gives_unadapted


def _registers_nothing(config: RunConfig) -> bool:
    return config.tracking.registered_model is None


def _scores_with_keras(config: RunConfig) -> bool:
    return config.score.runtime == "keras"


_ALL_UNADAPTED = "optimizer.unadapted_roles has every role, so that no variable has a ratio of norms"
_CONVERTS_NOTHING = "score.runtime=keras converts nothing"
RULES = (
    IdleRule(
        "launch.allow_fewer_workers", lambda c: not c.launch.retries, "launch.retries=0 allows no further attempt"
    ),
    IdleRule("launch.allow_fewer_workers", _is_alone, ALONE, per_run=True),
    IdleRule(
        "launch.allow_fewer_workers",
        lambda c: not c.smaller_sizes(),
        "no smaller number of workers makes up the global batch with this training.mode and model.batch_norm_ranks",
        per_run=True,
    ),
    IdleRule(
        "launch.recover_every_steps", lambda c: c.launch.recover == "restart", "launch.recover=restart keeps nothing"
    ),
    IdleRule(
        "training.tensorflow_profiler",
        lambda c: c.training.trace_steps is None,
        "training.trace_steps=null records no steps",
    ),
    IdleRule("schedule.recipe_epochs", _without_epochs, "no place of the schedule is in epochs"),
    IdleRule(
        "optimizer.scaling", lambda c: c.optimizer.learning_rate is not None, "optimizer.learning_rate is absolute"
    ),
    IdleRule(
        "optimizer.nesterov", _looks_ahead_without_momentum, "optimizer.momentum=0 has nothing to look ahead with"
    ),
    IdleRule("optimizer.trust_coefficient", _adapts_nothing, _ALL_UNADAPTED),
    IdleRule("optimizer.epsilon", _adapts_nothing, _ALL_UNADAPTED),
    IdleRule("optimizer.excluded_roles", _excludes_from_nothing, "optimizer.weight_decay=0 decays no variable"),
    IdleRule(
        "model.batch_norm_ranks", lambda c: c.model.batch_norm_ranks == "all" and _is_alone(c), ALONE, per_run=True
    ),
    IdleRule(
        "model.zero_init_residual",
        lambda c: isinstance(c.model, ResNetCifarConfig) and c.model.preactivation,
        "with model.preactivation no normalisation ends a block",
    ),
    IdleRule("launch.exchange_timeout_seconds", _is_alone, ALONE, per_run=True),
    IdleRule("exchange.bucket_mib", _is_alone, ALONE, per_run=True),
    IdleRule(
        "exchange.dense_below", lambda c: c.exchange.codec.name == "none", "with exchange.codec=none all is float32"
    ),
    IdleRule(
        "exchange.warmup_steps", lambda c: c.exchange.codec.name == "none", "with exchange.codec=none all is float32"
    ),
    IdleRule(
        "exchange.rescale_residual",
        lambda c: not c.exchange.codec.keeps_residual,
        "this exchange.codec keeps no residual",
    ),
    IdleRule(
        "exchange.codec.nesterov",
        lambda c: isinstance(c.exchange.codec, DGCConfig) and not c.exchange.codec.momentum,
        "exchange.codec.momentum=0 has nothing to look ahead with",
    ),
    IdleRule("tracking.promote_metric", _registers_nothing, "tracking.registered_model=null registers nothing"),
    IdleRule("tracking.promote_margin", _registers_nothing, "tracking.registered_model=null registers nothing"),
    IdleRule("score.reference_dataset", _scores_with_keras, _CONVERTS_NOTHING),
    IdleRule("score.calibration_samples", lambda c: c.score.runtime != "int8", "score.runtime is not int8"),
    IdleRule("score.acceptance_samples", _scores_with_keras, _CONVERTS_NOTHING),
    IdleRule("score.max_f1_drop", _scores_with_keras, _CONVERTS_NOTHING),
)


def _rules(config: RunConfig) -> list[IdleRule]:
    """Return the rules that always hold, and those of the training mode."""
    return [*RULES, *map(_rule, config.training.mode.declaration.idle())]


def _rule(idle: Idle) -> IdleRule:
    def is_idle(config: RunConfig) -> bool:
        return all(choice_at(config, key) in values for key, values in idle.where.items())

    return IdleRule(idle.key, is_idle, idle.reason, idle.per_run)


def refuse_without_effect(
    config: RunConfig, keys: Sequence[str], *, verb: str, reads: Sequence[str], ignores: Sequence[str] = ()
) -> None:
    """Refuse single keys that do not change what a verb does.

    Args:
        config: The configuration with these keys.
        keys: Keys as `section.key`.
        verb: Name of the verb, for the message.
        reads: Sections and keys that the verb reads.
        ignores: Keys of these sections, or sections within them, that the verb does not read.

    Raises:
        ValueError: A key has no effect; the message names the first such key and the reason.
    """
    for key in keys:
        if any(_is_within(key, ignored) for ignored in ignores):
            raise ValueError(f"--set {key} has no effect: {verb} does not read it")
        if not any(_is_within(key, read) or _is_within(read, key) for read in reads):
            raise ValueError(f"--set {key} has no effect: {verb} reads {', '.join(reads)}")
        for rule in _rules(config):
            if key == rule.key and rule.is_idle(config):
                raise ValueError(f"--set {key} has no effect: {rule.reason}")


def refuse_idle(config: RunConfig, base: RunConfig | None, changes: Sequence[str], where: str) -> None:
    """Refuse values that have no effect in any verb.

    A change of one key may make a value of the base ineffective, which is no mistake. A value of the base is refused
    only if it has no effect in the base itself and is not the default.

    Args:
        config: The configuration with all changes.
        base: The configuration without the changes, such as a file's; None: it is incomplete without them, or was
            checked before.
        changes: Keys and sections that were changed.
        where: First words of the error message.

    Raises:
        ValueError: Values have no effect; the message has a line with the reason for every such key.
    """
    lasting = {*idle_keys(base)} if base is not None else set()

    def is_mistake(key: str) -> bool:
        within = key in lasting or any(_is_within(key, change) for change in changes)
        return key in changes or (within and _is_chosen(config, key))

    found = {
        rule.key: rule.reason for rule in reversed(_rules(config)) if is_mistake(rule.key) and rule.is_idle(config)
    }
    lines = [f"{key}={value_at(config, key)} has no effect: {reason}" for key, reason in sorted(found.items())]
    if lines:
        raise ValueError(where + "\n  ".join([f"{len(lines)} problems", *lines] if len(lines) > 1 else lines))


def idle_keys(config: RunConfig) -> list[str]:
    """Return the keys with values that are not defaults and have no effect, in this run or in others."""
    return [
        rule.key
        for rule in _rules(config)
        if not rule.per_run and _is_chosen(config, rule.key) and rule.is_idle(config)
    ]


def _is_chosen(config: RunConfig, key: str) -> bool:
    """Return whether the value of a key is neither its default nor null."""
    path, _, name = key.rpartition(".")
    section = value_at(config, path)
    if not isinstance(section, Section) or name not in section.model_fields_set:
        return False
    value = getattr(section, name)
    return value is not None and value != section.default(name)


def _is_within(key: str, section: str) -> bool:
    return key == section or key.startswith(f"{section}.")
