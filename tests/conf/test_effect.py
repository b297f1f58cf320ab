import re
from pathlib import Path

import pytest

from conf.describe import to_yaml
from conf.effect import RULES, idle_keys, refuse_without_effect
from conf.keys import paths
from conf.load import load, override, resolve, shipped_names
from jobs.shell.verbs import VERBS

NO_EPOCHS = ["schedule.recipe_epochs=5", "schedule.decay=cosine", "schedule.warmup=none"]


def refusal(verb: str, *settings: str) -> str:
    """Why settings of a verb are refused; empty where each has an effect."""
    chosen, keys = VERBS[verb], [setting.partition("=")[0] for setting in settings]
    try:
        refuse_without_effect(resolve("smoke", settings), keys, verb=verb, reads=chosen.reads, ignores=chosen.ignores)
    except ValueError as error:
        return str(error)
    return ""


@pytest.mark.parametrize(
    ("verb", "setting", "reason"),
    [
        ("prepare", "training.epochs=3", "prepare reads archive, dataset, prepare, launch.master"),
        ("prepare", "launch.num_workers=3", "prepare reads"),
        ("train", "prepare.seed=3", "train reads dataset"),
        ("train", "archive.root=/x", "train reads dataset"),
        ("evaluate", "optimizer.weight_decay=0.1", "evaluate reads dataset"),
        ("evaluate", "training.epochs=3", "evaluate reads dataset"),
        ("evaluate", "reader.name=petastorm", "evaluate does not read it"),
        ("evaluate", "launch.num_workers=2", "evaluate reads dataset"),
        ("probe", "optimizer.weight_decay=0.1", "probe reads dataset"),
        ("probe", "training.metrics={own: {path: 'a:b'}}", "probe reads dataset"),
        ("probe", "launch.gpus_per_worker=1", "probe does not read it"),
        ("probe", "launch.recover=in_place", "probe does not read it"),
        ("train", "probe.l2=0.1", "train reads dataset"),
        ("demo", "dataset.path=/x", "demo does not read it"),
        ("train", "launch.allow_fewer_workers=true", "launch.retries=0 allows no further attempt"),
        ("train", "exchange.warmup_steps=3", "with exchange.codec=none"),
        ("train", "exchange.dense_below=3", "with exchange.codec=none"),
        ("train", "exchange.rescale_residual=false", "this exchange.codec keeps no residual"),
        ("train", "training.tensorflow_profiler=true", "training.trace_steps=null records no steps"),
        ("find-rate", "training.trace_steps=[2, 3]", "find-rate does not read it"),
        ("find-rate", "input.resolution_schedule=[]", "find-rate does not read it"),
        ("find-batch", "input.resolution_schedule=[]", "find-batch does not read it"),
        ("find-rate", "launch.recover=in_place", "find-rate does not read it"),
        ("find-rate", "launch.allow_fewer_workers=true", "find-rate does not read it"),
        ("find-rate", "training.mode=delayed", "find-rate does not read it"),
        ("find-rate", "training.selection.metric=val/loss", "find-rate does not read it"),
        ("find-rate", "training.metrics={own: {path: 'a:b'}}", "find-rate does not read it"),
        ("find-rate", "training.ema=0.9", "find-rate does not read it"),
        ("find-rate", "tracking.target=0.5", "find-rate does not read it"),
        ("find-rate", "tracking.system_seconds=1", "find-rate does not read it"),
        ("find-batch", "launch.recover=in_place", "find-batch does not read it"),
        ("find-batch", "training.selection.metric=val/loss", "find-batch does not read it"),
        ("find-batch", "optimizer.learning_rate_per_256=1", "find-batch does not read it"),
        ("find-batch", "optimizer.scaling=linear", "find-batch does not read it"),
        ("schedule", "optimizer.weight_decay=0.1", "schedule reads dataset.path, optimizer.name"),
        ("schedule", "optimizer.momentum=0.1", "schedule reads dataset.path, optimizer.name"),
    ],
)
def test_a_setting_without_effect_is_refused(verb: str, setting: str, reason: str) -> None:
    assert refusal(verb, setting).startswith(f"--set {setting.partition('=')[0]} has no effect: {reason}")


@pytest.mark.parametrize(
    ("settings", "reason"),
    [
        (NO_EPOCHS, "no place of the schedule is in epochs"),
        (["model.batch_norm_ranks=all", "launch.num_workers=1"], "launch.num_workers=1 has no other ranks"),
        (
            ["optimizer={name: lars, learning_rate: 7.4}", "optimizer.scaling=sqrt"],
            "optimizer.learning_rate is absolute",
        ),
        *(
            ([f"exchange.codec={codec}", "exchange.rescale_residual=true"], "keeps no residual")
            for codec in ("qsgd", "{name: bf16}", "{name: topk, error_feedback: false}", "fp16")
        ),
    ],
)
def test_a_setting_without_effect_beside_others_is_refused(settings: list[str], reason: str) -> None:
    assert reason in refusal("train", *settings)


@pytest.mark.parametrize(
    ("verb", "settings"),
    [
        ("prepare", ["archive.root=/x", "dataset.path=/y", "prepare.seed=3", "launch.master=local[4]"]),
        ("train", ["launch.allow_fewer_workers=true", "launch.retries=2"]),
        ("train", ["exchange.codec=topk", "exchange.codec.density=0.1", "exchange.warmup_steps=3"]),
        ("train", ["exchange.codec=topk", "exchange.rescale_residual=false", "exchange.dense_below=3"]),
        ("train", ["exchange={codec: topk}"]),
        ("evaluate", ["dataset.path=/y", "training.batch_size_per_worker=3", "evaluate.tune_thresholds=false"]),
        ("probe", ["probe.l2=0.1", "probe.solver=cocoa", "probe.solver.max_rounds=5", "launch.num_workers=3"]),
        ("train", ["tracking.run_name=x"]),
        ("schedule", ["optimizer=sgd", "optimizer.learning_rate_per_256=1", "optimizer.scaling=linear"]),
        ("schedule", ["input.resolution_schedule=[{until: {steps: 4}, scale: 0.5}]"]),
        ("find-rate", ["optimizer.momentum=0.8", "exchange.codec=onebit", "launch.retries=1", "training.mixup=0.2"]),
        ("find-batch", ["optimizer=adamw", "training.ema=0.9", "training.accumulation_steps=2", "launch.retries=1"]),
        ("find-batch", ["training.mixup=0.2"]),  # the sizes that it tries are even then
        # Places in epochs give the length of the recipe its meaning.
        ("train", ["schedule.recipe_epochs=5"]),
        ("train", ["schedule.recipe_epochs=5", "schedule.decay=cosine"]),
        ("train", [*NO_EPOCHS, "input.resolution_schedule=[{until: {epochs: 2}, scale: 0.5}]"]),
        ("train", ["model.batch_norm_ranks=all"]),
        ("train", ["optimizer={name: lars, learning_rate: 7.4}"]),
        ("train", ["optimizer.scaling=sqrt"]),
        # The same command continues a run.
        *(
            ("train", [setting, *resumed])
            for setting in (
                *("warm_start={source: /x.npz}", "warm_start.source=/x.npz"),
                *("tracking.run_name=x", "tracking.experiment=x"),
            )
            for resumed in ([], ["training.resume_run=0123"])
        ),
    ],
)
def test_a_setting_with_an_effect_is_not(verb: str, settings: list[str]) -> None:
    assert refusal(verb, *settings) == ""


ALL_ROLES = "optimizer.unadapted_roles=[kernel, bias, gain, shift]"
NO_MOMENTUM = "optimizer={name: sgd, momentum: 0.0}"


@pytest.mark.parametrize(
    ("settings", "key", "reason"),
    [
        ([NO_MOMENTUM, "optimizer.nesterov=true"], "optimizer.nesterov=True", "nothing to look ahead with"),
        ([ALL_ROLES, "optimizer.epsilon=1e-5"], "optimizer.epsilon=1e-05", "no variable has a ratio of norms"),
        (
            [ALL_ROLES, "optimizer.trust_coefficient=0.1"],
            "optimizer.trust_coefficient=0.1",
            "unadapted_roles has every",
        ),
        (
            ["optimizer={name: adamw, weight_decay: 0.0, excluded_roles: []}"],
            "optimizer.excluded_roles=[]",
            "no variab",
        ),
        (
            ["launch.num_workers=1", "launch.retries=1", "launch.allow_fewer_workers=true"],
            "launch.allow_fewer_workers=True",
            "launch.num_workers=1 has no other ranks",
        ),
        *(
            (
                ["launch.retries=1", "launch.allow_fewer_workers=true", setting],
                "launch.allow_fewer_workers=True",
                "no smaller number of workers makes up the global batch",
            )
            for setting in (
                "training.mode={name: pipeline, stages: 2}",
                "training.mode={name: parameter_server, synchrony: backup}",
                "model.batch_norm_ranks=2",
            )
        ),
        (
            ["model={name: resnet_cifar, depth: 8, preactivation: true, zero_init_residual: false}"],
            "model.zero_init_residual=False",
            "no normalisation ends a block",
        ),
        (["launch.num_workers=1", "exchange.bucket_mib=2"], "exchange.bucket_mib=2.0", "launch.num_workers=1 has no"),
        (
            ["launch.num_workers=1", "launch.exchange_timeout_seconds=5"],
            "launch.exchange_timeout_seconds=5",
            "launch.num_workers=1 has no other ranks",
        ),
        (
            [NO_MOMENTUM, "optimizer.nesterov=false", "exchange.codec={name: dgc, momentum: 0.0, nesterov: false}"],
            "exchange.codec.nesterov=False",
            "exchange.codec.momentum=0 has nothing to look ahead with",
        ),
    ],
)
def test_a_value_without_effect_is_refused_wherever_it_is_chosen(settings: list[str], key: str, reason: str) -> None:
    with pytest.raises(ValueError, match=rf"^config smoke: {re.escape(key)} has no effect: .*{reason}") as caught:
        load("smoke", settings)
    assert "\n" not in str(caught.value)
    with pytest.raises(ValueError, match=rf"^override: {re.escape(key)} has no effect: .*{reason}"):
        override(load("smoke"), *settings)


def test_a_file_is_refused_for_what_has_no_effect_in_it_and_what_it_holds_for_other_verbs_is_not(
    tmp_path: Path,
) -> None:
    file = tmp_path / "mine.yaml"
    file.write_text("exchange: {warmup_steps: 5}\nlaunch: {allow_fewer_workers: true}\nprepare: {seed: 3}\n")
    with pytest.raises(
        ValueError, match=r"mine\.yaml: 2 problems\n  exchange\.warmup_steps=5 has no .*\n  launch\.allow"
    ):
        load(str(file))
    assert load(str(file), ["launch={num_workers: 2, retries: 1}", "exchange.codec=topk"]).prepare.seed == 3
    # The archive's import path is missing: the settings complete the file, and are looked at with it.
    file.write_text("archive: {kind: import}\nexchange: {codec: topk, warmup_steps: 5}\n")
    assert load(str(file), ["archive.path=somewhere:Archive"]).exchange.warmup_steps == 5
    # So do values for its other runs.
    file.write_text("tracking: {experiment: mine}\nexchange: {bucket_mib: 2.0}\n")
    assert (
        load(str(file), ["training.resume_run=0123"]).tracking.experiment,
        load(str(file), launch={"num_workers": 1}).exchange.bucket_mib,
    ) == ("mine", 2.0)


def test_a_change_may_take_the_effect_of_what_the_file_has_chosen(tmp_path: Path) -> None:
    changed = load("smoke", ["schedule.decay=cosine", "schedule.warmup=none"])
    assert (
        changed.schedule.recipe_epochs,
        idle_keys(changed),
        override(changed, "training.epochs=3").training.epochs,
    ) == (2, ["schedule.recipe_epochs"], 3)
    # What is printed is read back: with the default.
    file = tmp_path / "printed.yaml"
    for comments in (False, True):
        file.write_text(to_yaml(changed, comments=comments))
        assert load(str(file)).schedule.recipe_epochs == 90


@pytest.mark.parametrize("name", shipped_names())
def test_every_value_of_a_shipped_config_has_an_effect(name: str) -> None:
    assert idle_keys(load(name)) == []


def test_every_key_that_is_named_exists() -> None:
    named = {key for verb in VERBS.values() for key in (*verb.reads, *verb.ignores)} | {rule.key for rule in RULES}
    assert named <= {*paths()}


def test_every_key_is_read_by_some_verb() -> None:
    for key in paths():
        assert any(
            key not in verb.ignores and any(key == read or f"{key}.".startswith(f"{read}.") for read in verb.reads)
            for verb in VERBS.values()
        ) or any(path.startswith(f"{key}.") for path in paths()), key
