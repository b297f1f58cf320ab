import pytest

from conf.effect import RULES, refuse_without_effect
from conf.keys import paths
from conf.load import load
from jobs.verbs import VERBS


def refuse(verb: str, *settings: str, config: str = "smoke") -> None:
    chosen = VERBS[verb]
    keys = [setting.partition("=")[0] for setting in settings]
    refuse_without_effect(load(config, settings), keys, verb=verb, reads=chosen.reads, ignores=chosen.ignores)


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
        ("evaluate", "launch.allow_fewer_workers=true", "evaluate does not read it"),
        ("demo", "dataset.path=/x", "demo does not read it"),
        ("train", "launch.allow_fewer_workers=true", r"launch\.retries=0 allows no further attempt"),
        ("train", "exchange.warmup_steps=3", r"with exchange\.codec=none"),
        ("train", "exchange.dense_below=3", r"with exchange\.codec=none"),
        ("train", "exchange.rescale_residual=false", r"this exchange\.codec keeps no residual"),
    ],
)
def test_a_setting_without_effect_is_refused(verb: str, setting: str, reason: str) -> None:
    with pytest.raises(ValueError, match=rf"^--set {setting.partition('=')[0]} has no effect: {reason}"):
        refuse(verb, setting)


@pytest.mark.parametrize(
    ("verb", "settings"),
    [
        ("prepare", ["archive.root=/x", "dataset.path=/y", "prepare.seed=3", "launch.master=local[4]"]),
        ("train", ["launch.allow_fewer_workers=true", "launch.retries=2"]),
        ("train", ["exchange.codec=topk", "exchange.codec.density=0.1", "exchange.warmup_steps=3"]),
        ("train", ["exchange.codec=topk", "exchange.rescale_residual=false", "exchange.dense_below=3"]),
        ("train", ["exchange={codec: topk}"]),
        ("evaluate", ["dataset.path=/y", "training.batch_size_per_worker=3", "launch.num_workers=1"]),
        ("train", ["tracking.run_name=x"]),
    ],
)
def test_a_setting_with_an_effect_is_not(verb: str, settings: list[str]) -> None:
    refuse(verb, *settings)  # raises where one of them is refused


def test_places_in_epochs_give_the_length_of_the_recipe_its_meaning() -> None:
    refuse("train", "schedule.recipe_epochs=5")
    refuse("train", "schedule.recipe_epochs=5", "schedule.decay=cosine")
    with pytest.raises(ValueError, match="no place of the schedule is in epochs"):
        refuse("train", "schedule.recipe_epochs=5", "schedule.decay=cosine", "schedule.warmup=none")


def test_batch_norm_over_all_needs_other_ranks() -> None:
    refuse("train", "model.batch_norm_ranks=all")
    with pytest.raises(ValueError, match=r"launch\.num_workers=1 has no other ranks"):
        refuse("train", "model.batch_norm_ranks=all", "launch.num_workers=1")


def test_an_absolute_rate_is_not_scaled() -> None:
    refuse("train", "optimizer={name: lars, learning_rate: 7.4}")
    refuse("train", "optimizer.scaling=sqrt")
    with pytest.raises(ValueError, match=r"optimizer\.learning_rate is absolute"):
        refuse("train", "optimizer={name: lars, learning_rate: 7.4}", "optimizer.scaling=sqrt")


def test_a_resumed_run_has_weights() -> None:
    refuse("train", "warm_start.source=/x.npz")
    with pytest.raises(ValueError, match=r"warm_start\.source has no effect: training\.resume_run continues with the"):
        refuse("train", "warm_start.source=/x.npz", "training.resume_run=0123")


def test_a_resumed_run_has_its_name_and_experiment() -> None:
    for setting in ("tracking.run_name=x", "tracking.experiment=x"):
        with pytest.raises(ValueError, match="continues a run"):
            refuse("train", setting, "training.resume_run=0123")
        refuse("train", setting, "training.resume_run=latest")


@pytest.mark.parametrize("codec", ["qsgd", "{name: bf16}", "{name: topk, error_feedback: false}", "fp16"])
def test_a_codec_without_error_feedback_has_no_residual(codec: str) -> None:
    with pytest.raises(ValueError, match="keeps no residual"):
        refuse("train", f"exchange.codec={codec}", "exchange.rescale_residual=true")


def test_every_key_that_is_named_exists() -> None:
    known = {*paths()}
    assert {rule.key for rule in RULES} <= known
    for verb in VERBS.values():
        assert {*verb.reads, *verb.ignores} <= known


def test_every_key_is_read_by_some_verb() -> None:
    for key in paths():
        assert any(
            key not in verb.ignores and any(key == read or f"{key}.".startswith(f"{read}.") for read in verb.reads)
            for verb in VERBS.values()
        ) or any(path.startswith(f"{key}.") for path in paths()), key
