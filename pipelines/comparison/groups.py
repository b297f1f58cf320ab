"""The groups of trainings that differ only in their seed, and the differences between groups.

Runs of several versions are compared: settings that a run does not have, without effect or of later versions, get their
defaults.
"""

import math
import re
import statistics
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, get_args

from conf.keys import find, nested
from pipelines.comparison.facts import Facts, facts_of, number
from pipelines.comparison.run import DEFAULT_READER, EPOCH, PAYLOAD, SECONDS, SEED, STEP, ComparedRun
from pipelines.tracking.metrics import is_lower_better

_FIRST = (
    "optimizer.name",
    "global_batch_size",
    "launch.num_workers",
    "exchange.codec.name",
    "optimizer.learning_rate",
    "optimizer.learning_rate_per_256",
    "optimizer.scaling",
    "schedule.warmup.name",
    "training.precision",
    "model.name",
    "model.depth",
    "training.epochs",
)
"""Settings that come first in a label."""
# These follow from the global batch and the workers, or determine them.
_FOLLOWING = ("micro_batches_per_step", "training.batch_size_per_worker")
_WORDS = {
    "global_batch_size": "batch",
    "launch.num_workers": "workers",
    "optimizer.learning_rate": "rate",
    "optimizer.learning_rate_per_256": "rate per 256",
    "schedule.warmup.name": "warm-up",
}
_SELF_EXPLAINING = ("optimizer.name", "training.precision", "model.name")
_ALWAYS_NAMED = ("optimizer.name", "global_batch_size")
_USUAL = 2 / 3
"""Fraction of groups that must share a value of another setting, so that labels contain only the other values."""
_ABSENT = "not set"


@dataclass(frozen=True)
class Spread:
    """The mean, deviation and range over seeds."""

    mean: float
    deviation: float | None
    """Standard deviation of a sample (divided by n - 1); None for a single value."""
    count: int
    low: float
    high: float


@dataclass(frozen=True)
class Reached:
    """The cost of reaching a target, as means over the seeds that reached it."""

    seeds: int
    """Number of seeds with a training that reached the target."""
    epochs: float
    steps: float
    samples: float | None
    seconds: float | None
    payload_bytes: float | None


@dataclass(frozen=True)
class Group:
    """The trainings on one dataset with the same settings except the seed."""

    number: int
    """Position in the table, from 1."""
    label: str
    """Settings that distinguish the group from the others."""
    members: tuple[Facts, ...]

    @property
    def first(self) -> Facts:
        """The first training, for properties that all have in common."""
        return self.members[0]

    @property
    def settings(self) -> dict[str, str]:
        """The settings of the trainings except the seed."""
        return {key: value for key, value in self.first.run.settings.items() if key != SEED}

    @property
    def score(self) -> Spread | None:
        """The best value of the metric over the epochs, for trainings that ended well."""
        return self.spread(lambda facts: facts.best)

    @property
    def diverged(self) -> int:
        """Number of trainings that diverged."""
        return sum(facts.is_diverged for facts in self.members)

    @property
    def score_with_diverged(self) -> Spread | None:
        """The same as `score`, together with the trainings that diverged; None if there are none."""
        return self.spread(lambda facts: facts.best, diverged=True) if self.diverged else None

    @property
    def seeds(self) -> int:
        """Number of seeds; a seed may have been trained several times."""
        return len({_seed(facts) for facts in self.members})

    def spread(self, value: Callable[[Facts], float | None], *, diverged: bool = False) -> Spread | None:
        """Return mean and deviation of a value over the seeds of trainings that ended well; None if there is none.

        Args:
            value: The value of a training.
            diverged: Whether trainings that diverged are included.
        """
        values = self._by_seed(value, diverged=diverged)
        if not values:
            return None
        deviation = statistics.stdev(values) if len(values) > 1 else None
        return Spread(statistics.fmean(values), deviation, len(values), min(values), max(values))

    def reached(self, metric: str, target: float) -> Reached | None:
        """Return the cost of reaching a value of the metric; None if no training that ended well reached it."""
        rows = {facts.run.run_id: _first_row(facts.run, metric, target) for facts in self.members}

        def of(column: str) -> list[float]:
            return self._by_seed(lambda facts: rows[facts.run.run_id].get(column))

        if not of(STEP):
            return None
        batch, steps = self.first.global_batch_size, statistics.fmean(of(STEP))
        return Reached(
            seeds=len(of(STEP)),
            epochs=statistics.fmean(of(EPOCH)),
            steps=steps,
            samples=None if batch is None else steps * batch,
            seconds=_mean(of(SECONDS)),
            payload_bytes=_mean(of(PAYLOAD)),
        )

    def _by_seed(self, value: Callable[[Facts], float | None], *, diverged: bool = False) -> list[float]:
        """Return a value for each seed: the mean over its trainings that ended well and have the value."""
        found: dict[str, list[float]] = {}
        for facts in self.members:
            if (facts.counts or (diverged and facts.is_diverged)) and (one := value(facts)) is not None:
                found.setdefault(_seed(facts), []).append(one)
        return [statistics.fmean(values) for values in found.values()]


def _seed(facts: Facts) -> str:
    """Return the seed of a training; a training without a recorded seed gets a unique one."""
    return facts.run.settings.get(SEED, facts.run.run_id)


@dataclass(frozen=True)
class DatasetGroups:
    """The groups of one dataset: only these may be compared."""

    dataset: str
    archive: str
    groups: tuple[Group, ...]
    differing: tuple[str, ...]
    """Settings that are not the same in all groups."""
    common: int
    """Number of settings that are the same in all groups."""

    @property
    def named(self) -> list[str]:
        """The settings that differ, without those that only follow from others."""
        return named_keys([group.settings for group in self.groups], self.differing)

    @cached_property
    def baselines(self) -> dict[tuple[tuple[str, str], ...], Group]:
        """The baseline group of the speed-up, by network; a network without times has none."""
        timed = [group for group in self.groups if group.spread(lambda facts: facts.images_per_second)]
        timed.sort(
            key=lambda group: (group.first.workers or math.inf, group.first.global_batch_size or math.inf, group.number)
        )
        return {_network(group): group for group in reversed(timed)}


def alike_troubles(members: Sequence[Facts]) -> list[list[Facts]]:
    """Return the trainings without a score by reason; texts that differ only in their numbers are one reason."""
    found: dict[str, list[Facts]] = {}
    for facts in members:
        found.setdefault(re.sub(r"\d[\d.e+-]*", "", facts.trouble), []).append(facts)
    return [same for reason, same in found.items() if reason]


def parts_of(runs: Sequence[ComparedRun], metric: str) -> list[DatasetGroups]:
    """Sort trainings into groups, by dataset, and then by optimizer, batch size, workers and the other settings."""
    datasets: dict[str, list[Facts]] = {}
    for run in with_defaults(runs):
        datasets.setdefault(run.dataset, []).append(facts_of(run, metric))
    return [_part(dataset, members) for dataset, members in datasets.items()]


def _part(dataset: str, members: Sequence[Facts]) -> DatasetGroups:
    same: dict[tuple[tuple[str, str], ...], list[Facts]] = {}
    for facts in members:
        key = tuple(sorted((name, value) for name, value in facts.run.settings.items() if name != SEED))
        same.setdefault(key, []).append(facts)
    keys = sorted({name for settings in same for name, _ in settings})
    settings = [dict(each) for each in same]
    varied = [key for key in keys if len({each.get(key) for each in settings}) > 1]
    differing = sorted(varied, key=lambda key: (_FIRST.index(key) if key in _FIRST else len(_FIRST), key))
    choices = zip(settings, labels_of(settings, differing), same.values(), strict=True)
    ordered = sorted(choices, key=lambda choice: [sortable(choice[0].get(key)) for key in differing])
    return DatasetGroups(
        dataset,
        archive=members[0].run.settings.get("archive.kind", ""),
        groups=tuple(Group(place, label, tuple(alike)) for place, (_, label, alike) in enumerate(ordered, 1)),
        differing=tuple(differing),
        common=len(keys) - len(differing),
    )


def labels_of(settings: Sequence[dict[str, str]], differing: Sequence[str]) -> list[str]:
    """Return short labels with the settings that distinguish each of several choices from the others.

    A value that most choices share is left out; labels always contain optimizer and batch size.
    """
    keys = named_keys(settings, differing)
    commonest = {key: Counter(each.get(key) for each in settings).most_common(1)[0] for key in keys}
    usual = {
        key: value
        for key, (value, count) in commonest.items()
        if key not in _ALWAYS_NAMED and count >= _USUAL * len(settings)
    }

    def label(each: dict[str, str]) -> str:
        named = [key for key in keys if key not in usual or each.get(key) != usual[key]]
        return ", ".join(_words(key, each.get(key)) for key in named or keys) or "all"

    return [label(each) for each in settings]


def named_keys(settings: Sequence[dict[str, str]], differing: Sequence[str]) -> list[str]:
    """Return all keys that differ, except those that only follow from others.

    A setting that only one optimizer has follows from the optimizer if it is the same wherever it exists. It is named
    only if the others do not distinguish all settings.
    """

    def combinations(keys: Sequence[str]) -> int:
        return len({tuple(each.get(key) for key in keys) for each in settings})

    def follows(key: str) -> bool:
        is_of_a_choice = f"{key.rpartition('.')[0]}.name" in {*differing} - {key}
        return key in _FOLLOWING or (is_of_a_choice and len({each[key] for each in settings if key in each}) == 1)

    chosen = [key for key in differing if not follows(key)]
    for key in differing:
        if combinations([*chosen, key]) > combinations(chosen):
            chosen.append(key)
    return chosen


def word_of(key: str) -> str:
    """Return a short name of a setting: `epochs`, or with its section `warmup epochs` where that is a nested one."""
    words = key.removesuffix(".name").split(".")
    return _WORDS.get(key, " ".join(words[-2:] if len(words) > 2 else words[-1:]).replace("_", " "))


def _words(key: str, value: str | None) -> str:
    return value or _ABSENT if key in _SELF_EXPLAINING else f"{word_of(key)} {readable(value)}"


def best_group(groups: Sequence[Group], metric: str) -> Group | None:
    """Return the group with the best mean score."""
    best = min(groups, key=lambda group: rank(group, metric), default=None)
    return None if best is None or best.score is None else best


def rank(group: Group, metric: str) -> tuple[bool, float]:
    """Return a key that sorts groups by their mean score, the best first; groups without a score are last."""
    if group.score is None:
        return True, 0.0
    return False, group.score.mean if is_lower_better(metric) else -group.score.mean


def default_target(groups: Sequence[Group], metric: str) -> float | None:
    """Return a value near the best: 5 % below the best score, or 5 % above the lowest loss."""
    best = best_group(groups, metric)
    if best is None or best.score is None:
        return None
    mean = best.score.mean
    return float(f"{mean + abs(mean) * (0.05 if is_lower_better(metric) else -0.05):.3g}")


def baseline_of(part: DatasetGroups, group: Group) -> Group | None:
    """Return the baseline of the same network: the group with the fewest workers, then the smallest global batch."""
    return part.baselines.get(_network(group))


def _network(group: Group) -> tuple[tuple[str, str], ...]:
    return tuple(sorted(each for each in group.settings.items() if each[0].startswith(("model.", "input."))))


def _first_row(run: ComparedRun, metric: str, target: float) -> dict[str, float | None]:
    """Return the first row of the history at which the metric has reached the target; empty if there is none."""
    sign = 1 if is_lower_better(metric) else -1
    values = enumerate(run.history.get(metric, []))
    row = next((row for row, value in values if value is not None and sign * value <= sign * target), None)
    return {} if row is None else {name: column[row] for name, column in run.history.items()}


def sortable(text: str | None) -> tuple[int, float, str]:
    """Return a key that sorts the values of a setting: numbers by size, and then texts."""
    value = number(text)
    return (0, value, "") if value is not None else (1, 0.0, text or "")


def readable(text: str | None) -> str:
    """Return the value of a setting with the digits that people read."""
    value = number(text)
    if text is None or value is None:
        return text or _ABSENT
    return f"{int(value):,}" if value == int(value) and abs(value) < 1e9 else f"{value:.4g}"


def _mean(values: Sequence[float]) -> float | None:
    return statistics.fmean(values) if values else None


def with_defaults(runs: Sequence[ComparedRun]) -> list[ComparedRun]:
    """Give runs the default of each setting that only other runs have.

    The default of a new setting is the behaviour of earlier versions. So trainings of two versions are one recipe if
    nothing else differs.

    Args:
        runs: Trainings to compare.
    """
    keys = sorted({key for run in runs for key in run.settings})
    return [run.model_copy(update={"settings": _filled(run.settings, keys)}) for run in runs]


def _filled(settings: dict[str, str], keys: Sequence[str]) -> dict[str, str]:
    named = {key.rpartition(".")[0] for key in settings}
    values = nested(settings)
    filled = {key: DEFAULT_READER[key] for key in keys if key in DEFAULT_READER} | settings
    for key in keys:
        section = key.rpartition(".")[0]
        # A section without any setting was not chosen: another optimizer has other settings.
        if key not in filled and section and section in named and (value := _default(key, values)) is not None:
            filled[key] = value
    return filled


def _default(key: str, settings: Mapping[str, Any]) -> str | None:
    """Return the default as runs store it; None: the chosen sections lack the key, or its absence is a value."""
    field = find(key.split("."), settings)
    if field is None or type(None) in get_args(field.annotation):
        return None
    value = field.get_default(call_default_factory=True)
    return str(value) if isinstance(value, (bool, int, float)) else None
