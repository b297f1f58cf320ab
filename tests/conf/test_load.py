import pickle
from collections.abc import Callable, Iterator
from contextlib import suppress
from functools import reduce
from pathlib import Path
from typing import Any

import pytest
import yaml

from conf.describe import to_yaml
from conf.keys import choices
from conf.load import load, shipped_names, shipped_text
from conf.schema import RunConfig
from conf.sections.codecs import PowerSGDConfig, TopKConfig
from conf.sections.networks import ResNetConfig
from conf.sections.optimizers import LARSConfig, SGDConfig


@pytest.mark.parametrize("name", shipped_names())
def test_a_shipped_config_says_only_what_differs_from_the_defaults(
    name: str, changed: Callable[[Any, str, Any], Any]
) -> None:
    def leaves(values: dict[str, Any], path: str = "") -> Iterator[str]:
        for key, value in values.items():
            yield from leaves(value, f"{path}{key}/") if isinstance(value, dict) else [f"{path}{key}"]

    values, full = yaml.safe_load(shipped_text(name)), load(name)
    for path in leaves(values):
        if path.endswith(("/name", "/kind")):
            continue  # says whose keys follow
        with suppress(ValueError):  # has no default, or does not fit the others
            assert RunConfig.model_validate(changed(values, path, None)) != full, (
                f"{path} in {name}.yaml is the default"
            )


@pytest.mark.parametrize("name", shipped_names())
@pytest.mark.parametrize("start", ["#   groundswell ", "# Expected result: "])
def test_a_shipped_config_begins_with_its_command_and_the_expected_result(name: str, start: str) -> None:
    assert any(line.startswith(start) for line in shipped_text(name).splitlines())


def value_of(config: RunConfig, key: str) -> Any:
    return reduce(getattr, key.split("."), config)


TEXTS = ("001", "2024-01-31", "2024-31-12", "1e5", "yes", "0x10", "a: b")
COMMENTS = (
    ("/data/my set #2", "/data/my set #2"),
    ("'/data/my set #2'", "/data/my set #2"),
    ("/data/set#2", "/data/set#2"),
    ('"a # b" # c', "a # b"),
    ("#1", "#1"),
)


@pytest.mark.parametrize(
    ("settings", "key", "value"),
    [
        (["exchange.bucket_mib=0.5"], "exchange.bucket_mib", 0.5),
        (["training.epochs=5", "training.epochs=7"], "training.epochs", 7),  # the last one counts
        (["optimizer.weight_decay=1e-5"], "optimizer.weight_decay", 1e-5),
        (["training.batch_size_per_worker=6", "launch.num_workers=3"], "global_batch_size", 18),
        *(([f"tracking.run_name={text}"], "tracking.run_name", text) for text in TEXTS),
        *(([f"{key}={text}"], key, value) for key in ("dataset.path", "tracking.run_name") for text, value in COMMENTS),
        *(
            ([f"{key}=null"], key, None)
            for key in ("tracking.run_name", "training.checkpoint_every_steps", "reader.cache_folder")
        ),
    ],
)
def test_a_setting_changes_one_value(settings: list[str], key: str, value: object) -> None:
    assert value_of(load("smoke", settings), key) == value


def test_a_tilde_is_the_home_folder_where_a_key_takes_any_text() -> None:
    config = load(None, ["dataset.path=~", "reader.cache_folder=~", "evaluate.report=~/a.html"])
    assert (config.dataset.path, config.reader.cache_folder, config.evaluate.report) == ("~", "~", "~/a.html")
    nulls = ["training.checkpoint_every_steps=~", "input.bands=~", "evaluate.test_time_augmentation=~"]
    assert load("smoke", nulls) == load("smoke"), "elsewhere it is YAML's null"
    assert load(None).dataset.path == "", "it may be named later"


@pytest.mark.parametrize(
    "settings",
    [
        ["exchange.codec=powersgd", "exchange.codec.rank=2"],
        ["exchange.codec.rank=2", "exchange.codec=powersgd"],
        ["exchange.codec.name=powersgd", "exchange.codec.rank=2"],
        ["exchange.codec.rank=2", "exchange.codec.name=powersgd"],
        ["exchange.codec={name: powersgd, rank: 2}"],
        ["exchange.codec={name: powersgd}", "exchange.codec.rank=2"],
        ["exchange={codec: powersgd}", "exchange.codec.rank=2"],
        ["exchange.codec=topk", "exchange.codec=powersgd", "exchange.codec.rank=2"],
    ],
)
def test_a_name_and_its_keys_in_any_order(settings: list[str]) -> None:
    assert load("smoke", settings).exchange.codec == PowerSGDConfig(name="powersgd", rank=2)


def test_another_name_leaves_the_keys_of_the_files_member_behind(tmp_path: Path) -> None:
    path = tmp_path / "mine.yaml"
    path.write_text(shipped_text("smoke"))
    assert load(str(path)) == load("smoke"), "a path is read like a name"
    path.write_text(shipped_text("smoke") + "exchange: {codec: {name: topk, density: 0.5}}\n")
    assert load(str(path), ["exchange.codec=powersgd"]).exchange.codec == PowerSGDConfig(name="powersgd")
    kept = load(str(path), ["exchange.codec=topk", "exchange.codec.owner_factor=3.0"]).exchange.codec
    assert kept == TopKConfig(name="topk", density=0.5, owner_factor=3.0)
    archive = load("smoke", ["archive.root=/x", "archive.image_size=8", "archive=image_folder"]).archive
    assert (archive.kind, archive.model_dump()["image_size"]) == ("image_folder", 8)


@pytest.mark.parametrize(
    ("setting", "message"),
    [
        ("optimzer.name=sgd", r"^optimzer: unknown section \(did you mean optimizer\?\)$"),
        ("learning_rate=0.1", r"^learning_rate: unknown section \(did you mean optimizer\.learning_rate\?\)$"),
        ("foo=1", r"^foo: unknown section; expected one of archive, dataset, prepare, reader, input, model, "),
        ("training.epoch=2", r"^training\.epoch: unknown key \(did you mean epochs\?\)$"),
        (
            "training.foo=2",
            r"^training\.foo: unknown key; expected one of epochs, batch_size_per_worker, accumulation_steps, ",
        ),
        ("training.epochs='3'", r"training\.epochs='3': should be a valid integer"),
        (
            "training={mixup: 0.2, batch_size_per_worker: 3}",
            r"training\.mixup mixes .*: set .* to an even number, not 3",
        ),
        ("training.mixup=1.5", r"training\.mixup=1\.5: should be less than or equal to 1"),
        ("training.epochs=0", r"training\.epochs=0: should be greater than 0"),
        ("training.seed=4294967296", r"training\.seed=4294967296: should be less than 4294967296"),
        ("model.depth=49", r"model\.depth=49: should be 18, 34, 50, 101 or 152"),
        (
            "input.augmentation=rotate",
            r"input\.augmentation\.name='rotate': should be one of none, flips, dihedral, pad_crop, import",
        ),
        (
            "input.augmentation=No",
            r"input\.augmentation\.name=False: should be one of none, flips, dihedral, pad_crop, import",
        ),
        ("input.augmentation.padding=2", r"input\.augmentation is none, which has no such key; pad_crop has: choose"),
        (
            "input.augmentation={name: pad_crop, padding: 0}",
            r"input\.augmentation\.padding=0: should be greater than 0",
        ),
        (
            "input.resolution_schedule=[{until: {steps: 4}, scale: 1.0}]",
            r"input\.resolution_schedule\[0\]\.scale=1\.0: should be less than 1$",
        ),
        (
            "input.resolution_schedule=[{until: {steps: 4}, scale: 0.5}, {until: {steps: 8}, scale: 0.5}]",
            r"input\.resolution_schedule\[1\]: scale=0\.5 is not above 0\.5, that of the part before it: images must",
        ),
        ("input.resolution_schedule=[{scale: 0.5}]", r"input\.resolution_schedule\.0\.until is missing$"),
        (
            "input.resolution_schedule=[{until: {steps: 4, epochs: 1}, scale: 0.5}]",
            r"a place in schedule has exactly one of steps, epochs, fraction, got steps=4 and epochs=1\.0$",
        ),
        (
            "input.resolution_schedule=[3]",
            r"resolution_schedule\[0\]=3: should be \{until: \.\.\., scale: \.\.\.\}",
        ),
        (
            "input.resolution_schedule=[{until: {epochs: 3}, scale: 0.5}]",
            r"resolution_schedule\[0\]\.until is at epoch 3, beyond the end of the run \(schedule\.recipe_epochs=2\)$",
        ),
        ("warm_start.frozen_layers=[stem_*]", r"would keep weights that nobody trained: set warm_start\.source$"),
        ("model=vgg", r"model\.name='vgg': should be one of resnet, resnet_cifar, resnet9, airbench, import$"),
        ("model.preactivation=true", r"model is resnet, which has no such key; resnet_cifar has: choose with model="),
        ("model={name: resnet_cifar, depth: 18}", r"model\.depth=18: should be 2, 8, 20, 32, 44, 56 or 110"),
        ("model=import", r"model\.path is missing: What to import, `package\.module:object`"),
        ("model={name: import, path: mynet}", r"model\.path='mynet': should be package\.module:object$"),
        ("model={name: import, path: 'a b:c'}", r"model\.path='a b:c': should be package\.module:object$"),
        ("model={name: import, path: 'a:b', settings: 3}", r"model\.settings=3: should be a section with keys"),
        ("input.bands=[]", r"input\.bands=\[\]: should have at least 1 item"),
        ("input.bands=B02", r"input\.bands='B02': should be a valid list"),
        ("input.bands=[B02, B03, B02]", r"input\.bands names B02 more than once"),
        ("model.batch_norm_ranks=0", r"model\.batch_norm_ranks=0: should be all, or a number of ranks from 1"),
        ("model.batch_norm_ranks=some", r"model\.batch_norm_ranks='some': should be all, or a number of ranks"),
        (
            "model.batch_norm_ranks=3",
            r"launch\.num_workers=2 does not divide into groups of model\.batch_norm_ranks=3: set a number that",
        ),
        ("launch.master=", r"launch\.master='': should have at least 1 character"),
        ("dataset=/x", r"dataset='/x': dataset is a section: set dataset\.path$"),
        ("schedule.warmup.epochs=99", r"schedule\.warmup is at epoch 99, beyond .* \(schedule\.recipe_epochs=2\)$"),
        ("schedule.warmup={epochs: 1, steps: 4}", r"exactly one of steps, epochs, fraction, got steps=4 and epochs=1"),
        ("schedule.warmup.fraction=0.1", r"exactly one of steps, epochs, fraction, got epochs=1\.0 and fraction=0\.1$"),
        ("schedule.decay={power: 2}", r"schedule\.decay is multi_step, which has no such key; polynomial has: choose"),
        ("schedule.decay={name: cosine, power: 2}", r"schedule\.decay\.power: .*; polynomial has: choose with "),
        (
            "schedule.decay.milestones=[30]",
            r"schedule\.decay\.milestones\[0\]=30: should be \{steps: .*factor: \.\.\.\}",
        ),
        ("schedule.decay.milestones=[]", r"schedule\.decay\.milestones=\[\]: should have at least 1 item"),
        (
            "schedule.decay.milestones=[{epochs: 2, factor: 0.1}, {fraction: 0.9, factor: 0.01}]",
            r"decay\.milestones\[1\] is at epoch 1\.8, before schedule\.decay\.milestones\[0\] at epoch 2: must rise",
        ),
        (
            "schedule.decay.milestones=[{epochs: 0.5, factor: 0.1}]",
            r"schedule\.decay\.milestones\[0\] is at epoch 0\.5, before schedule\.warmup at epoch 1: must rise",
        ),
        ("schedule.decay.milestones=[{factor: 0.1}]", r"has exactly one of steps, epochs, fraction, got none$"),
        ("training.epochs", r"not of the form section\.key=value"),
        (".epochs=3", r"not of the form section\.key=value"),
        ("training.epochs.x=1", r"^training\.epochs\.x: training\.epochs is a value, not a section"),
        ("training.epochs=[1", r"--set training\.epochs=\[1: no valid YAML at line 1, column 3: expected"),
        ("training={epochs: 1, epochs: 2}", r"^--set training=.*: no valid YAML at line 1, column 13: the key"),
        (
            "tracking.registered_model=eo/resnet50",
            r"tracking\.registered_model=eo/resnet50: a name in MLflow's registry has no /, expected one such as",
        ),
        ("tracking.registered_model=bob's", r"tracking\.registered_model=bob's: .* registry has no ',"),
        ("training.trace_steps=[4, 4]", r"training\.trace_steps=\[4, 4\]: the first step must be before the last one"),
        ("training.trace_steps=[0, 4]", r"training\.trace_steps\[0\]=0: should be greater than 0$"),
        ("training.trace_steps=[4]", r"training\.trace_steps=\[4\]: should have at least 2 items"),
        ("exchange.codec=null", r"exchange\.codec\.name: should be one of none, fp16, bf16"),
        ("exchange.codec=gzip", r"exchange\.codec\.name='gzip': should be one of none, fp16, bf16, onebit, "),
        ("exchange.codec.name=gzip", r"exchange\.codec\.name='gzip': should be one of none"),
        ("exchange.codec=power_sgd", r"\(did you mean powersgd\?\)"),
        ("exchange.codec=TopK", r"\(did you mean topk\?\)"),
        ("archive.kind=imagefolder", r"archive\.kind='imagefolder': .*\(did you mean image_folder\?\)"),
        (
            "exchange.codec.rank=2",
            r"^exchange\.codec\.rank: exchange\.codec is none, which has no such key; powersgd has: choose with "
            r"exchange\.codec=powersgd$",
        ),
        ("exchange.codec.density=2", r"; adaptive and dgc and randomk and topk have: choose with "),
        ("exchange.codec.foo=2", r"^exchange\.codec\.foo: unknown key, exchange\.codec=none has none$"),
        (
            "exchange.codec={name: topk, densty: 0.1}",
            r"exchange\.codec\.densty: unknown key of exchange\.codec=topk \(did you mean density\?\)",
        ),
        (
            "exchange.codec={name: topk, foo: 0.1}",
            r"exchange\.codec\.foo: unknown key of exchange\.codec=topk; expected one of density, density_schedule, ",
        ),
        ("exchange.codec={name: qsgd, bits: 9}", r"exchange\.codec\.bits=9: should be less than or equal to 8"),
        ("exchange.codec=threshold", r"exchange\.codec\.tau is missing: Threshold in units of the gradient"),
        ("exchange.codec=dgc", r"dgc hands accumulated velocities .* for which lars has no known recipe"),
        ("exchange.codec=onebit_adam", r"two halves of one method, got codec onebit_adam and optimizer lars"),
        *(
            (
                f"optimizer={{name: {name}, {key}: {value}}}",
                rf"^--set optimizer\.{key}: .*(no such key|unknown key)",
            )
            for name, key, value in (
                ("sgd", "trust_coefficient", "0.02"),
                ("lars", "beta_1", "0.9"),
                ("adamw", "momentum", "0.9"),
                ("sgd", "unadapted_roles", "[]"),
                ("lamb", "variant", "larc"),
                ("onebit_adam", "momentum", "0.9"),
            )
        ),
        (
            "exchange.codec={name: topk, density_schedule: [{before_step: 9, density: 0.5}, "
            "{before_step: 5, density: 0.1}]}",
            r"exchange\.codec\.density_schedule must have rising values of before_step, got \[9, 5\]",
        ),
        (
            "exchange.codec={name: powersgd, rank_schedule: [{before_step: 5, rank: 2}, {before_step: 5, rank: 1}]}",
            r"exchange\.codec\.rank_schedule must have rising values of before_step, got \[5, 5\]",
        ),
    ],
)
def test_a_bad_setting_is_one_readable_line(setting: str, message: str) -> None:
    with pytest.raises(ValueError, match=message) as caught:
        load("smoke", [setting])
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("fitting", "refused", "message"),
    [
        (
            ["warm_start.rate_factors={'stage*': 0.1}", "optimizer.variant=outside"],
            "optimizer.variant=larc",
            r"warm_start\.rate_factors multiplies .*: choose another optimizer\.variant, or",
        ),
        (
            ["model.batch_norm_ranks=all"],
            "training.jit_compile=true",
            r"batch_norm_ranks=all sums over ranks .* set training\.jit_compile=false",
        ),
        (
            ["exchange.codec=dgc", "optimizer={name: sgd}", "optimizer.nesterov=false", "optimizer.momentum=0.0"],
            "optimizer.momentum=0.9",
            r"has its own momentum, and optimizer\.momentum=0\.9 would apply a second",
        ),
        (
            ["exchange.codec=onebit_adam", "optimizer={name: onebit_adam, warmup_steps: 5}", "exchange.warmup_steps=5"],
            "optimizer.warmup_steps=0",
            r"exchange\.warmup_steps=5 and optimizer\.warmup_steps=0",
        ),
        (
            ["training.global_batch_size=48", "training.batch_size_per_worker=4"],
            "training.accumulation_steps=2",
            r"global_batch_size=48 decides .*: set accumulation_steps=1, not 2",
        ),
    ],
)
def test_settings_that_do_not_go_together_are_refused(fitting: list[str], refused: str, message: str) -> None:
    load("smoke", fitting)
    with pytest.raises(ValueError, match=message):
        load("smoke", [*fitting, refused])


def test_batch_norm_spans_some_ranks_or_all() -> None:
    models = (load("smoke", [f"model.batch_norm_ranks={ranks}"]).model for ranks in ("all", "1"))
    assert [model.batch_norm_span(5) for model in models] == [5, 1]


def test_every_problem_is_a_line() -> None:
    with pytest.raises(
        ValueError, match=r"^config smoke: 2 problems\n  --set training.epochs='ten': .*\n  --set training.seed"
    ):
        load("smoke", ["training.epochs=ten", "training.seed=-1"])


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"archive: [1,2\n", r"mine\.yaml: no valid YAML at line 2, column 1: expected ',' or '\]'"),
        (b"training:\n\tepochs: 1\n", r"mine\.yaml: no valid YAML at line 2, column 1: found character '\\t'"),
        (
            b"training:\n  epochs: 3\ntraining:\n  output: x\n",
            r"mine\.yaml: no valid YAML at line 3, column 1: the key 'training' is there twice",
        ),
        (b"training: {epochs: 3, epochs: 4}\n", r"mine\.yaml: no valid YAML at line 1, column 23: the key 'epochs'"),
        (b"- a\n", r"mine\.yaml: expected sections of keys, got list"),
        (b"", r"mine\.yaml: expected sections of keys, got NoneType"),
        (b"\xff\xfe\x00", r"mine\.yaml: not a text file"),
        (b"training: 5\n", r"training=5: training is a section: set training\.epochs"),
        (b"optimzer: {}\n", r"optimzer: unknown section \(did you mean optimizer\?\)"),
        (b"archive: {kind: import}\n", r"archive\.path is missing: What to import"),
    ],
)
def test_a_file_that_is_no_configuration(tmp_path: Path, content: bytes, message: str) -> None:
    path = tmp_path / "mine.yaml"
    path.write_bytes(content)
    with pytest.raises(ValueError, match=message):
        load(str(path))
    with pytest.raises(FileNotFoundError, match="demo"):
        load("nonsense")


def test_survives_pickling_to_executors() -> None:
    assert pickle.loads(pickle.dumps(load("smoke"))) == load("smoke")


_NEEDED: dict[str, dict[str, object]] = {
    "archive": {"root": "/data", "train": 8, "validation": 4, "test": 2},
    "exchange.codec": {"tau": 0.5},
}


_BESIDE = {
    "dgc": ["optimizer.name=sgd", "optimizer.momentum=0.0", "optimizer.nesterov=false"],
    "onebit_adam": [
        *("exchange.codec=onebit_adam", "optimizer.name=onebit_adam"),
        *("exchange.warmup_steps=5", "optimizer.warmup_steps=5"),
    ],
}


_DECLARED = """
from conf.sections.mode_declaration import ModeDeclaration

class Mode(ModeDeclaration):
    def __init__(self, depth, names): ...
"""


@pytest.mark.parametrize(
    ("path", "name"), [(path, name) for path, choice in choices().items() for name in choice.members]
)
def test_what_config_prints_is_read_back_unchanged(
    tmp_path: Path, path: str, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    member = choices()[path].members[name]
    needed = {key: value for key, value in _NEEDED.get(path, {}).items() if key in member.model_fields}
    settings = [f"{path}={name}", *(f"{path}.{key}={value}" for key, value in needed.items()), *_BESIDE.get(name, [])]
    if name == "import":
        monkeypatch.syspath_prepend(str(tmp_path))
        (tmp_path / "package_of_ours.py").write_text(_DECLARED)  # read with the configuration
        settings += [f"{path}.path=package_of_ours:Mode", f"{path}.settings={{depth: 3, names: [a, b]}}"]
    if path == "schedule.warmup" and name != "none":
        settings.append("schedule.warmup.epochs=1")
    check_printed(load("smoke", settings), tmp_path)


def check_printed(config: RunConfig, folder: Path) -> None:
    for comments in (False, True):
        (folder / "printed.yaml").write_text(to_yaml(config, comments=comments))
        assert load(str(folder / "printed.yaml")) == config


@pytest.mark.parametrize("name", shipped_names())
def test_a_shipped_config_is_printed_and_read_back_unchanged(tmp_path: Path, name: str) -> None:
    settings = ["optimizer.weight_decay=1e-7", "tracking.run_name='null'", "launch.hang_timeout_seconds=1e20"]
    check_printed(load(name, settings), tmp_path)


@pytest.mark.parametrize(
    ("name", "key", "value", "expected"),
    [
        *(
            ("smoke", "exchange.codec", value, TopKConfig(name="topk"))
            for value in ("topk", "{name: topk}", "{name: topk, density: 0.01}")
        ),
        *(("smoke", "optimizer", value, SGDConfig()) for value in ("sgd", "{name: sgd}", "{name: sgd, momentum: 0.9}")),
        # A section without name is one of the default member.
        ("smoke", "optimizer", "{weight_decay: 0.0}", LARSConfig(weight_decay=0.0)),
        *(("demo", "model", value, ResNetConfig()) for value in ("resnet", "{name: resnet}")),
    ],
)
def test_a_member_is_a_name_or_a_section(name: str, key: str, value: str, expected: object) -> None:
    assert value_of(load(name, [f"{key}={value}"]), key) == expected


@pytest.mark.parametrize(
    ("settings", "rates"),
    [
        (["optimizer=adamw", "optimizer.learning_rate=0.001"], (0.001, None)),
        (["optimizer={learning_rate: 0.001}"], (0.001, None)),
        (["optimizer.learning_rate=7.4", "optimizer.learning_rate_per_256=null"], (7.4, None)),
        (["optimizer.learning_rate=7.4"], r"learning_rate=7\.4 and optimizer\.learning_rate_per_256=8\.0"),
        (["optimizer.learning_rate_per_256=null"], r"learning_rate=None and optimizer\.learning_rate_per_256=None"),
    ],
)
def test_the_rate_is_absolute_or_per_256(settings: list[str], rates: tuple[float, None] | str) -> None:
    if isinstance(rates, str):
        with pytest.raises(ValueError, match=rf"^(--set |config smoke: )optimizer\.{rates}: exactly one of them is"):
            load("smoke", settings)
    else:
        optimizer = load("smoke", settings).optimizer
        assert (optimizer.learning_rate, optimizer.learning_rate_per_256) == rates


@pytest.mark.parametrize(
    ("settings", "workers", "steps"),
    [
        (["training.global_batch_size=48", "launch.num_workers=3"], (1, 2, 3, 4, 5), [12, 6, 4, 3, None]),
        (["training.accumulation_steps=6"], (1,), [12]),  # on two workers
    ],
)
def test_accumulation_follows_from_a_fixed_global_batch(
    settings: list[str], workers: tuple[int, ...], steps: list[int | None]
) -> None:
    config = load("smoke", [*settings, "training.batch_size_per_worker=4"])
    assert (config.global_batch_size, [config.accumulation_steps(each) for each in workers]) == (48, steps)


# Files of the time when every key had to be written out, before optimizers and networks had keys of their own.
COMPLETE = Path(__file__).parent / "complete"


@pytest.mark.parametrize("name", sorted(path.stem for path in COMPLETE.glob("*.yaml")))
def test_a_complete_file_means_what_it_meant(name: str) -> None:
    assert load(str(COMPLETE / f"{name}.yaml")) == load(name)


def test_a_key_that_the_chosen_optimizer_does_not_have_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "mine.yaml"
    text = (COMPLETE / "smoke.yaml").read_text().replace("name: lars", "name: sgd")
    path.write_text(text)
    with pytest.raises(ValueError, match=r"\.trust_coefficient: optimizer is sgd, which has no such key; lars"):
        load(str(path))
    path.write_text(text.replace("  trust_coefficient: 0.02\n", ""))
    assert load(str(path)).optimizer.name == "sgd"
