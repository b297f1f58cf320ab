"""What all sections have in common, and their keys as a mapping."""

import math
from collections.abc import Iterator
from typing import Any, get_args, get_origin

import pytest

from conf.keys import TAGS, nested
from conf.load import validated
from conf.schema import RunConfig
from conf.sections.section import Section

_OWN_WORDS = "training.class_weights.name"


def places(kind: Any, number: float) -> Iterator[tuple[str, Any]]:
    """Values of a type that hold a number in one place, after the name of that place: every place once."""
    if kind is float:
        yield "", number
    elif isinstance(kind, type) and issubclass(kind, Section):
        fields = kind.model_fields
        tags = {tag: names[0] for tag in TAGS if tag in fields and (names := get_args(fields[tag].annotation))}
        for key, field in fields.items():
            yield from ((f".{key}{name}", {**tags, key: value}) for name, value in places(field.annotation, number))
    elif get_origin(kind) is list:
        yield from ((f"[0]{name}", [value]) for name, value in places(get_args(kind)[0], number))
    elif get_origin(kind) is dict:
        yield from ((f".name{name}", {"name": value}) for name, value in places(get_args(kind)[1], number))
    else:
        for argument in get_args(kind):
            yield from places(argument, number)


def test_every_number_is_tried() -> None:
    assert {
        ".optimizer.trust_coefficient",
        ".training.mode.outer.rate",
        ".warm_start.rate_factors.name",
        ".probe.l2[0]",
        ".schedule.decay.milestones[0].factor",
        ".input.resolution_schedule[0].until.fraction",
        f".{_OWN_WORDS}",
    } <= {name for name, _ in places(RunConfig, math.inf)}


@pytest.mark.parametrize("number", [math.inf, -math.inf, math.nan])
def test_a_number_that_is_not_finite_is_one_readable_line(number: float) -> None:
    for place, values in places(RunConfig, number):
        name = place.removeprefix(".")
        with pytest.raises(ValueError, match=r"problem|number") as caught:
            validated(values, "")
        # Some sections lack further keys here, each of which is a line of its own.
        lines = [line.strip() for line in str(caught.value).splitlines()]
        expected = f"{name}={number}: should be a finite number"
        if name == _OWN_WORDS:
            expected = f"training.class_weights: the weight of 'name' is {number}, not a number above 0"
        assert [line for line in lines if str(number) in line] == [expected]


@pytest.mark.parametrize(
    ("settings", "mapping"),
    [
        ({"a.b": "1", "a.c.d": "2", "e": "3"}, {"a": {"b": "1", "c": {"d": "2"}}, "e": "3"}),
        # A key within a value is left out.
        ({"a.b": "x", "a.b.c": "1"}, {"a": {"b": "x"}}),
    ],
)
def test_settings_become_a_mapping_per_section(settings: dict[str, str], mapping: dict[str, object]) -> None:
    assert nested(settings) == nested(dict(reversed(settings.items()))) == mapping
