import pickle
from pathlib import Path

import pytest

from conf.codecs import TopKConfig
from conf.load import load, shipped_names
from conf.schema import RunConfig


@pytest.mark.parametrize("name", shipped_names())
def test_every_shipped_config_is_valid(name: str) -> None:
    assert isinstance(load(name), RunConfig)


def test_override_changes_one_value() -> None:
    assert load("smoke", ["schedule.warmup_epochs=0.5"]).schedule.warmup_epochs == 0.5


def test_scientific_notation_without_a_point_is_a_number() -> None:
    assert load("smoke", ["optimizer.weight_decay=1e-5"]).optimizer.weight_decay == 1e-5


def test_a_path_is_read_like_a_name(tmp_path: Path) -> None:
    path = tmp_path / "mine.yaml"
    path.write_text((Path(__file__).parents[2] / "conf" / "smoke.yaml").read_text())
    assert load(str(path)) == load("smoke")


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("optimizer.warmup_epoch=2", r"optimizer\.warmup_epoch: unknown key"),
        ("optimizer.weight_dekay=0", r"unknown key \(did you mean weight_decay\?\)"),
        ("training.epochs='3'", r"training\.epochs='3': should be a valid integer"),
        ("training.epochs=0", r"training\.epochs=0: should be greater than 0"),
        ("model.depth=49", r"model\.depth=49: should be 18, 34, 50, 101 or 152"),
        ("model.augmentation=rotate", r"model\.augmentation='rotate': should be 'none', 'flips' or 'dihedral'"),
        ("schedule.warmup_epochs=99", r"schedule\.warmup_epochs=99\.0 is longer than training\.epochs=2"),
        ("schedule.milestones=[{epoch: 2, factor: 0.1}, {epoch: 1, factor: 0.01}]", r"milestones must rise"),
        ("training.epochs", r"not of the form section\.key=value"),
        ("exchange.codec.name=gzip", r"exchange\.codec\.name: should be one of none, fp16, bf16, onebit"),
        (
            "exchange.codec={name: topk, densty: 0.1}",
            r"densty: unknown key \(did you mean density\?\)",
        ),
        ("exchange.codec={name: qsgd, bits: 9}", r"exchange\.codec\.bits=9: should be less than or equal to 8"),
        ("exchange.codec=threshold", r"exchange\.codec\.tau: missing"),
        (
            "exchange.codec=dgc",
            r"dgc hands accumulated velocities .* for which lars has no known recipe",
        ),
        ("exchange.codec=onebit_adam", r"two halves of one method, got codec onebit_adam and optimizer lars"),
        ("optimizer.name=onebit_adam", r"two halves of one method, got codec none and optimizer onebit_adam"),
        ("training.epochs.x=1", r"'epochs' is a value, not a section"),
        ("training.epochs=[1", r"not YAML"),
    ],
)
def test_a_bad_override_is_one_readable_line(override: str, message: str) -> None:
    with pytest.raises(ValueError, match=message) as caught:
        load("smoke", [override])
    assert "\n" not in str(caught.value)


def test_a_missing_key_is_named(tmp_path: Path) -> None:
    path = tmp_path / "mine.yaml"
    path.write_text("archive: {kind: bigearthnet_v2, root: x}\n")
    with pytest.raises(ValueError, match="dataset: missing"):
        load(str(path))


def test_an_unknown_name_lists_the_shipped_ones() -> None:
    with pytest.raises(FileNotFoundError, match="demo"):
        load("nonsense")


def test_survives_pickling_to_executors() -> None:
    config = load("smoke")
    assert pickle.loads(pickle.dumps(config)) == config


def test_a_codec_is_a_name_or_a_section() -> None:
    for value in ("topk", "{name: topk}", "{name: topk, density: 0.01}"):
        assert load("smoke", [f"exchange.codec={value}"]).exchange.codec == TopKConfig(name="topk")


def test_deep_gradient_compression_needs_an_optimizer_without_momentum() -> None:
    plain = ["exchange.codec=dgc", "optimizer.name=sgd", "optimizer.nesterov=false"]
    with pytest.raises(ValueError, match=r"has its own momentum, and optimizer\.momentum=0\.9 would apply a second"):
        load("smoke", [*plain, "optimizer.momentum=0.9"])
    assert load("smoke", [*plain, "optimizer.momentum=0.0"]).exchange.codec.name == "dgc"


def test_one_bit_adam_warms_up_in_both_halves() -> None:
    pair = ["exchange.codec=onebit_adam", "optimizer.name=onebit_adam", "exchange.warmup_steps=5"]
    with pytest.raises(ValueError, match=r"exchange\.warmup_steps=5 and optimizer\.warmup_steps=0"):
        load("smoke", pair)
    assert load("smoke", [*pair, "optimizer.warmup_steps=5"]).optimizer.warmup_steps == 5


def test_global_batch_size() -> None:
    config = load("smoke", ["training.batch_size_per_worker=6", "launch.num_workers=3"])
    assert config.global_batch_size == 18
