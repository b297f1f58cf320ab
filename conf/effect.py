"""Settings without effect, which are mistakes of the user."""

from collections.abc import Sequence

from conf.schema import RunConfig
from conf.sections.mode_declaration import Idle
from conf.sections.modes import ALONE
from conf.sections.section import Section, value_at

RULES = (
    Idle("launch.allow_fewer_workers", "launch.retries=0 allows no further attempt", {"launch.retries": (0,)}),
    *(
        Idle(key, ALONE, {"launch.num_workers": (1,)}, per_run=True)
        for key in ("launch.allow_fewer_workers", "launch.exchange_timeout_seconds", "exchange.bucket_mib")
    ),
    Idle(
        "launch.allow_fewer_workers",
        "no smaller number of workers makes up the global batch with this training.mode and model.batch_norm_ranks",
        {"smaller_sizes": ([],)},
        per_run=True,
    ),
    Idle("launch.recover_every_steps", "launch.recover=restart keeps nothing", {"launch.recover": ("restart",)}),
    Idle(
        "training.tensorflow_profiler", "training.trace_steps=null records no steps", {"training.trace_steps": (None,)}
    ),
    Idle("schedule.recipe_epochs", "no place of the schedule is in epochs", {"places_in_epochs": ([],)}),
    Idle("optimizer.scaling", "optimizer.learning_rate is absolute", {"optimizer.learning_rate_per_256": (None,)}),
    Idle(
        "optimizer.nesterov",
        "optimizer.momentum=0 has nothing to look ahead with",
        # False is what happens without momentum, and the value that optimizers ask the user to set with it.
        {"optimizer.nesterov": (True,), "optimizer.momentum": (0,)},
    ),
    *(
        Idle(
            key,
            "optimizer.unadapted_roles has every role, so that no variable has a ratio of norms",
            {"optimizer.adapted_roles": (set(),)},
        )
        for key in ("optimizer.trust_coefficient", "optimizer.epsilon")
    ),
    Idle(
        "optimizer.excluded_roles",
        "optimizer.weight_decay=0 decays no variable",
        {"optimizer.uses_excluded_roles": (False,)},
    ),
    Idle(
        "model.batch_norm_ranks",
        ALONE,
        {"model.batch_norm_ranks": ("all",), "launch.num_workers": (1,)},
        per_run=True,
    ),
    Idle(
        "model.zero_init_residual",
        "with model.preactivation no normalisation ends a block",
        {"model.preactivation": (True,)},
    ),
    *(
        Idle(key, "with exchange.codec=none all is float32", {"exchange.codec": ("none",)})
        for key in ("exchange.dense_below", "exchange.warmup_steps")
    ),
    Idle(
        "exchange.rescale_residual",
        "this exchange.codec keeps no residual",
        {"exchange.codec.keeps_residual": (False,)},
    ),
    Idle(
        "exchange.codec.nesterov",
        "exchange.codec.momentum=0 has nothing to look ahead with",
        {"exchange.codec.momentum": (0,)},
    ),
    *(
        Idle(key, "tracking.registered_model=null registers nothing", {"tracking.registered_model": (None,)})
        for key in ("tracking.promote_metric", "tracking.promote_margin")
    ),
    *(
        Idle(key, "score.runtime=keras converts nothing", {"score.runtime": ("keras",)})
        for key in ("score.reference_dataset", "score.acceptance_samples", "score.max_f1_drop")
    ),
    Idle("score.calibration_samples", "score.runtime is not int8", {"score.runtime": ("keras", "bf16")}),
)


def _rules(config: RunConfig) -> list[Idle]:
    """Return the rules that always hold, and those of the training mode."""
    return [*RULES, *config.training.mode.declaration.idle()]


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
        if any(is_within(key, ignored) for ignored in ignores):
            raise ValueError(f"--set {key} has no effect: {verb} does not read it")
        if not any(is_within(key, read) or is_within(read, key) for read in reads):
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
    mistaken = [*changes, *(idle_keys(base) if base is not None else ())]
    found = {
        rule.key: rule.reason
        for rule in reversed(_rules(config))
        if any(is_within(rule.key, place) for place in mistaken)
        and (rule.key in changes or _is_chosen(config, rule.key))
        and rule.is_idle(config)
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
    return getattr(section, name) not in (None, section.default(name))


def is_within(key: str, section: str) -> bool:
    """Return whether a key is a section or lies in it."""
    return key == section or key.startswith(f"{section}.")
