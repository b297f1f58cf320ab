"""Changes to a configuration in Python, as a notebook makes them."""

import pytest

from conf.keys import choices
from conf.load import load, override, shipped_names
from conf.schema import RunConfig
from conf.sections.codecs import ExchangeConfig, TopKConfig
from conf.sections.optimizers import SGDConfig
from conf.sections.training import TrainingConfig


@pytest.mark.parametrize("name", shipped_names())
def test_no_change_changes_nothing(name: str) -> None:
    config, same = load(name), override(load(name))
    assert (same, same.model_fields_set) == (config, config.model_fields_set)


def test_texts_and_values_say_the_same() -> None:
    by_texts = load("demo", ["training.epochs=3", "exchange.codec=powersgd", "exchange.codec.rank=2"])
    changes = {"training": {"epochs": 3}, "exchange": {"codec": {"name": "powersgd", "rank": 2}}}
    assert (
        load("demo", **changes),
        override(load("demo"), **changes),
        override(load("demo"), "training.epochs=3", exchange={"codec": {"name": "powersgd", "rank": 2}}),
    ) == (by_texts, by_texts, by_texts)


def test_a_section_keeps_the_keys_that_are_not_named_or_is_taken_whole() -> None:
    config = load("demo", training={"seed": 7})
    assert (
        override(config, training={"epochs": 3}).training,
        override(load("demo"), exchange=ExchangeConfig(bucket_mib=2.0)).exchange,
    ) == (config.training.model_copy(update={"epochs": 3}), ExchangeConfig(bucket_mib=2.0))


def test_another_kind_replaces_its_section_and_the_same_kind_does_not() -> None:
    config = load("smoke", optimizer={"name": "lars", "momentum": 0.5})
    assert isinstance(override(config, optimizer="sgd").optimizer, SGDConfig)
    same = override(config, optimizer={"name": "lars", "weight_decay": 0.1}).optimizer
    assert (same.name, same.model_dump()["momentum"], same.weight_decay) == ("lars", 0.5, 0.1)


def test_sections_that_were_made_alone_stay_of_their_kind() -> None:
    made = RunConfig(
        optimizer=SGDConfig(momentum=0.5), exchange=ExchangeConfig(codec=TopKConfig(density=0.1), bucket_mib=2.0)
    )
    changed = override(made, "training.epochs=3")
    assert (changed.optimizer, changed.exchange, changed.training) == (
        made.optimizer,
        made.exchange,
        TrainingConfig(epochs=3),
    )


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"training": {"epochs": -3}}, r"^override: training\.epochs=-3: should be greater than 0$"),
        ({"training": {"epochs": "3"}}, r"training\.epochs='3': should be a valid integer$"),
        ({"training": {"epoch": 3}}, r"^training\.epoch: unknown key \(did you mean epochs\?\)$"),
        ({"trainig": {"epochs": 3}}, r"^trainig: unknown section \(did you mean training\?\)$"),
        ({"training": 3}, r"training=3: training is a section: set training\.epochs"),
        ({"optimizer": "sdg"}, r"optimizer\.name='sdg': should be one of .* \(did you mean sgd\?\)"),
        ({"model": {"batch_norm_ranks": 3}}, r"does not divide into groups of model\.batch_norm_ranks=3"),
    ],
)
def test_a_mistake_is_one_line(changes: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message) as caught:
        override(load("demo"), **changes)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("section", "values", "message"),
    [
        ("training", {"epochs": -3}, r"^TrainingConfig: epochs=-3: input should be greater than 0$"),
        ("training", {"epoch": 3}, r"^TrainingConfig: epoch=3: extra inputs are not permitted$"),
        ("model", {"batch_norm_ranks": 3}, r"does not divide into groups of model\.batch_norm_ranks=3"),
    ],
)
def test_a_copy_is_validated_too(section: str, values: dict[str, int], message: str) -> None:
    config = load("demo")
    with pytest.raises(ValueError, match=message):
        config.model_copy(update={section: getattr(config, section).model_copy(update=values)})
    copied = config.training.model_copy(update={"epochs": 3})
    assert (copied, config.training.model_copy(), config.model_copy(update={"training": copied}).training.epochs) == (
        TrainingConfig(**{**config.training.model_dump(), "epochs": 3}),
        config.training,
        3,
    )


def test_sections_are_made_alone() -> None:
    unions = ("archive", "model", "optimizer")
    alone = [field.annotation() for name, field in RunConfig.model_fields.items() if name not in unions]
    assert all(section == type(section)() for section in alone)


def test_members_are_made_with_what_only_the_user_knows() -> None:
    needed = {}
    for place, choice in choices().items():
        for name, section in choice.members.items():
            keys = {key for key, field in section.model_fields.items() if field.is_required()} - {choice.tag}
            if keys:
                needed[f"{place}={name}"] = keys
            else:
                assert getattr(section(**{choice.tag: name}), choice.tag) == name
    assert needed == {
        "archive=synthetic": {"train", "validation", "test"},
        "exchange.codec=threshold": {"tau"},
        **{
            f"{place}=import": {"path"}
            for place in ("archive", "input.augmentation", "model", "training.loss", "training.mode")
        },
    }
