"""Training modes beside the settings of other sections."""

import re

import pytest

from conf.codecs import CODEC_NAMES
from conf.combinations import PUSHED_CODECS, check_length
from conf.effect import refuse_without_effect
from conf.load import load
from conf.modes import SynchronousConfig
from conf.optimizers import OPTIMIZER_NAMES

LOCAL = "training.mode={name: local, every_steps: 4}"


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (["exchange.codec=dgc", "optimizer={name: sgd, momentum: 0.0, nesterov: false}"], "exchange.codec=dgc keeps"),
        (
            [
                "exchange.codec=onebit_adam",
                "exchange.warmup_steps=5",
                "optimizer={name: onebit_adam, warmup_steps: 5}",
            ],
            "exchange.codec=onebit_adam keeps",
        ),
        (["training.precision=float16"], "training.precision=float16 has a loss scale"),
        (["training.ema=0.9"], "training.ema=0.9 averages the weights after every step"),
        (["model.batch_norm_ranks=2"], "model.batch_norm_ranks=2 exchanges statistics in every step"),
        (["training.checkpoint_every_steps=6"], "6 is no multiple of training.mode.every_steps=4"),
    ],
)
def test_what_does_not_go_with_local_updates_is_refused(settings: list[str], message: str) -> None:
    load("smoke", settings)
    with pytest.raises(ValueError, match=message):
        load("smoke", [*settings, LOCAL])


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (["exchange.codec=dgc", "optimizer={name: sgd, momentum: 0.0, nesterov: false}"], "exchange.codec=dgc has"),
        (
            [
                "exchange.codec=onebit_adam",
                "exchange.warmup_steps=5",
                "optimizer={name: onebit_adam, warmup_steps: 5}",
            ],
            "exchange.codec=onebit_adam has",
        ),
        (["training.precision=float16"], "training.precision=float16 skips the step"),
    ],
)
def test_what_does_not_go_with_delayed_gradients_is_refused(settings: list[str], message: str) -> None:
    load("smoke", settings)
    with pytest.raises(ValueError, match=message):
        load("smoke", [*settings, "training.mode=delayed"])


SHARDED = "training.mode={name: synchronous, shard_optimizer: true}"


@pytest.mark.parametrize(
    "settings",
    [
        ["exchange.codec=powersgd"],
        ["exchange.codec=onebit_adam", "exchange.warmup_steps=5", "optimizer={name: onebit_adam, warmup_steps: 5}"],
    ],
)
def test_what_does_not_go_with_a_sharded_optimizer_is_refused(settings: list[str]) -> None:
    load("smoke", settings)
    message = r"exchange\.codec=\w+ gives every worker all of the mean .* set exchange\.codec=none"
    with pytest.raises(ValueError, match=message):
        load("smoke", [*settings, SHARDED])


@pytest.mark.parametrize("mode", ["local", "delayed"])
def test_only_synchronous_training_shards_its_optimizer(mode: str) -> None:
    with pytest.raises(ValueError, match="shard_optimizer"):
        load("smoke", [f"training.mode={{name: {mode}, shard_optimizer: true}}"])


@pytest.mark.parametrize("optimizer", [name for name in OPTIMIZER_NAMES if name != "onebit_adam"])
@pytest.mark.parametrize(
    "beside",
    [
        ["training.gradient_clipping=1.0", "training.ema=0.9", "training.precision=float16"],
        ["warm_start.rate_factors={stem*: 0.1}", "training.accumulation_steps=2", "launch.recover=in_place"],
    ],
)
def test_a_sharded_optimizer_goes_with_everything_else(optimizer: str, beside: list[str]) -> None:
    config = load("smoke", [SHARDED, f"optimizer={optimizer}", *beside])
    assert config.optimizer.name == optimizer
    assert config.training.mode == SynchronousConfig(shard_optimizer=True)


@pytest.mark.parametrize(
    ("settings", "reason"),
    [
        (["optimizer={name: sgd, momentum: 0.0, nesterov: false}"], "keeps no moments to divide"),
        (["launch.num_workers=1"], "has no other ranks"),
    ],
)
def test_sharding_where_nothing_can_be_divided_is_refused(settings: list[str], reason: str) -> None:
    with pytest.raises(ValueError, match=f"training.mode.shard_optimizer=True has no effect: .*{reason}"):
        load("smoke", [SHARDED, *settings])


PIPELINE = "training.mode={name: pipeline, stages: 2}"


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (["launch.num_workers=3"], "launch.num_workers=3 does not divide into pipelines of training.mode.stages=2"),
        (["exchange.codec=powersgd"], "exchange.codec=powersgd keeps what is left to send by worker"),
        (["training.precision=float16"], "training.precision=float16 skips the step"),
        (["training.gradient_clipping=1.0"], "training.gradient_clipping=1.0 is for the norm over all layers"),
        (["training.ema=0.9"], "training.ema=0.9 averages the weights of the whole network"),
        (["model.batch_norm_ranks=2"], "model.batch_norm_ranks=2 sums over workers with the same layers"),
        (
            ["input.resolution_schedule=[{until: {fraction: 0.5}, scale: 0.5}]"],
            "input.resolution_schedule changes the size of images",
        ),
        (["training.trace_steps=[2, 3]"], "each tick is one: set training.trace_steps=null"),
        (["launch.recover=in_place"], "launch.recover=in_place replaces one worker by a spare"),
        (["reader.name=petastorm"], "reader.name=petastorm gives samples in an order that depends on its threads"),
    ],
)
def test_what_does_not_go_with_a_pipeline_is_refused(settings: list[str], message: str) -> None:
    load("smoke", settings)
    with pytest.raises(ValueError, match=re.escape(message)):
        load("smoke", [*settings, PIPELINE])


@pytest.mark.parametrize("stages", [1, 5])
def test_a_pipeline_has_two_to_four_stages(stages: int) -> None:
    with pytest.raises(ValueError, match="stages"):
        load("smoke", ["launch.num_workers=20", f"training.mode={{name: pipeline, stages: {stages}}}"])


def test_a_pipeline_takes_the_samples_of_one_worker() -> None:
    sizes = ["launch.num_workers=6", "training.batch_size_per_worker=4", "training.accumulation_steps=5"]
    config = load("smoke", [*sizes, "training.mode={name: pipeline, stages: 3}"])
    assert config.global_batch_size == 2 * 4 * 5
    # As many workers as stages, or a multiple; what they take beside each other they take one after the other.
    assert [config.accumulation_steps(workers) for workers in (1, 2, 3, 4, 5, 6)] == [None, None, 10, None, None, 5]
    whole = config.with_whole_networks()
    assert (whole.training.mode.name, whole.global_batch_size, whole.accumulation_steps(5)) == ("synchronous", 40, 2)
    assert load("smoke").with_whole_networks() == load("smoke")


def test_a_bucket_has_no_effect_in_one_pipeline() -> None:
    config = load("smoke", [PIPELINE, "launch.num_workers=2"])
    with pytest.raises(ValueError, match="one pipeline exchanges no gradients"):
        refuse_without_effect(config, ["exchange.bucket_mib"], verb="train", reads=["training", "exchange"])


def accepts(*settings: str) -> bool:
    try:
        load("smoke", ["training.checkpoint_every_steps=8", *settings])
    except ValueError:
        return False
    return True


# Settings without which these codecs go with no optimizer.
SERVER = "training.mode={name: parameter_server, synchrony: %s%s}"


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (["exchange.codec=powersgd"], "exchange.codec=powersgd is for an exchange among all workers"),
        (["training.precision=float16"], "training.precision=float16 skips the step"),
        (["training.gradient_clipping=1.0"], "training.gradient_clipping=1.0 is for the norm over all layers"),
        (["training.ema=0.9"], "training.ema=0.9 averages the weights after every step"),
        (["model.batch_norm_ranks=2"], "model.batch_norm_ranks=2 exchanges statistics in every step"),
        (["training.trace_steps=[2, 3]"], "training.trace_steps=[2, 3] compares the same steps of all workers"),
        (["launch.recover=in_place"], "launch.recover=in_place lets a spare continue"),
    ],
)
def test_what_does_not_go_with_a_parameter_server_is_refused(settings: list[str], message: str) -> None:
    load("smoke", settings)
    with pytest.raises(ValueError, match=re.escape(message)):
        load("smoke", [*settings, SERVER % ("async", "")])


@pytest.mark.parametrize("codec", PUSHED_CODECS)
@pytest.mark.parametrize("optimizer", [name for name in OPTIMIZER_NAMES if name != "onebit_adam"])
def test_a_parameter_server_takes_every_optimizer_and_these_codecs(codec: str, optimizer: str) -> None:
    settings = [SERVER % ("ssp", ", bound: 0"), f"exchange.codec={codec}", f"optimizer={optimizer}"]
    config = load("smoke", [*settings, "training.accumulation_steps=2", "warm_start.rate_factors={stem*: 0.1}"])
    assert (config.exchange.codec.name, config.optimizer.name) == (codec, optimizer)


def test_a_step_waits_for_one_worker_at_least() -> None:
    for backup, fits in ((1, True), (2, False)):
        settings = ["launch.num_workers=2", SERVER % ("backup", f", backup_workers: {backup}")]
        assert accepts(*settings) == fits


@pytest.mark.parametrize(
    ("synchrony", "key", "value"),
    [
        ("async", "bound", "5"),
        ("backup", "bound", "5"),
        ("async", "backup_workers", "0"),
        ("ssp", "fetch_every", "2"),
        ("ssp", "push_every", "2"),
        ("backup", "push_every", "2"),
        ("backup", "staleness_aware", "true"),
        ("backup", "synchronous_steps", "5"),
    ],
)
def test_settings_of_another_synchrony_are_refused(synchrony: str, key: str, value: str) -> None:
    with pytest.raises(ValueError, match=rf"training\.mode\.{key}=\w+ has no effect"):
        load("smoke", [SERVER % (synchrony, f", {key}: {value}")])


@pytest.mark.parametrize("key", ["exchange.bucket_mib=2", "exchange.codec.owner_factor=3"])
def test_settings_of_an_exchange_among_all_are_refused_with_a_parameter_server(key: str) -> None:
    with pytest.raises(ValueError, match="has no effect"):
        load("smoke", ["exchange.codec=topk", SERVER % ("async", ""), key])


def test_workers_of_a_parameter_server_leave_lock_step_before_the_end() -> None:
    settings = [SERVER % ("async", ", synchronous_steps: 20"), "training.epochs=2"]
    assert check_length(load("smoke", settings), 11) is None
    with pytest.raises(ValueError, match="synchronous_steps=20 is not before the end of the run, which has 20 steps"):
        check_length(load("smoke", settings), 10)


def test_ssp_has_no_periods_of_async() -> None:
    mode = "training.mode={name: parameter_server, synchrony: async, push_every: 5, fetch_every: 4}"
    config = load("smoke", [mode])
    assert [config.training.mode.arguments()[key] for key in ("push_every", "fetch_every")] == [5, 4]
    changed = config.override("training.mode.synchrony=ssp")
    assert [changed.training.mode.arguments()[key] for key in ("push_every", "fetch_every")] == [1, 1]


def test_a_codec_begins_before_the_end() -> None:
    settings = ["exchange.codec=onebit", "training.epochs=2", "exchange.warmup_steps=20"]
    assert check_length(load("smoke", settings), 11) is None
    message = (
        r"warmup_steps=20 is not before the end of the run, which has 20 steps, so that exchange\.codec=onebit never"
    )
    with pytest.raises(ValueError, match=message):
        check_length(load("smoke", settings), 10)
    local = [*settings, "training.mode={name: local, every_steps: 2}"]
    assert check_length(load("smoke", local), 22) is None
    with pytest.raises(ValueError, match="which has 20 exchanges"):
        check_length(load("smoke", local), 20)


@pytest.mark.parametrize(
    ("codec", "settings", "message"),
    [
        (
            "{name: topk, density: 0.001, density_schedule: [{before_step: 4, density: 0.25}, "
            "{before_step: 20, density: 0.01}]}",
            [],
            r"density_schedule ends with before_step=20, which is not before the end of the run of 20 steps, so that "
            r"exchange\.codec\.density=0\.001 never holds",
        ),
        (
            "{name: powersgd, rank_schedule: [{before_step: 5, rank: 8}]}",
            ["exchange.warmup_steps=5"],
            r"rank_schedule begins with before_step=5, and until exchange\.warmup_steps=5 gradients travel in float32",
        ),
    ],
)
def test_every_part_of_a_codecs_schedule_holds_for_a_while(codec: str, settings: list[str], message: str) -> None:
    config = load("smoke", [f"exchange.codec={codec}", "training.epochs=2", *settings])
    with pytest.raises(ValueError, match=message):
        check_length(config, 10)
    if not settings:
        assert check_length(config, 11) is None


NEEDS = {
    "dgc": ["optimizer={name: sgd, momentum: 0.0, nesterov: false}"],
    "onebit_adam": ["optimizer={name: onebit_adam, warmup_steps: 5}", "exchange.warmup_steps=5"],
    "threshold": ["exchange.codec.tau=0.01"],
}


@pytest.mark.parametrize("codec", CODEC_NAMES)
def test_each_mode_takes_what_synchronous_training_takes_but_codecs_with_momentum(codec: str) -> None:
    needs, taken = NEEDS.get(codec, []), 0
    for optimizer in (None, *OPTIMIZER_NAMES):
        settings = [f"exchange.codec={codec}", *needs, *([f"optimizer={optimizer}"] if optimizer else [])]
        fits = accepts(*settings)
        taken += fits
        for mode in ("training.mode=synchronous", LOCAL, "training.mode=delayed"):
            refused = codec in ("dgc", "onebit_adam") and mode != "training.mode=synchronous"
            for recover in ("restart", "in_place"):
                found = accepts(*settings, mode, f"launch.recover={recover}")
                assert found == (fits and not refused), (settings, mode, recover)
    assert taken, "no optimizer goes with this codec"


def test_settings_of_another_mode_are_refused() -> None:
    with pytest.raises(ValueError, match="every_steps"):
        load("smoke", ["training.mode={name: synchronous, every_steps: 4}"])
    with pytest.raises(ValueError, match="momentum"):
        load("smoke", ["training.mode={name: local, outer: {momentum: 1.0}}"])


@pytest.mark.parametrize(
    ("keys", "reason"),
    [
        (["exchange.rescale_residual"], "does not depend on the learning rate"),
        (["training.mode.outer.nesterov"], "nothing to look ahead with"),
    ],
)
def test_settings_without_effect_on_local_updates_are_refused(keys: list[str], reason: str) -> None:
    config = load("smoke", [LOCAL, "exchange.codec=onebit"])
    with pytest.raises(ValueError, match=reason):
        refuse_without_effect(config, keys, verb="train", reads=["training", "exchange"])


@pytest.mark.parametrize(
    ("setting", "message"),
    [
        ("training.trace_steps=[2, 3]", "training.trace_steps brings the clocks of processes together"),
        ("reader.name=petastorm", "reader.name=petastorm begins epochs only at their start"),
        ("launch.num_workers=1", "launch.num_workers=1 has none"),
    ],
)
def test_what_does_not_go_with_recovery_in_place_is_refused(setting: str, message: str) -> None:
    load("smoke", [setting])
    with pytest.raises(ValueError, match=message):
        load("smoke", [setting, "launch.recover=in_place"])


def test_workers_train_alone_before_the_end() -> None:
    local = "training.mode={name: local, every_steps: 2, local_after_steps: %d}"
    assert check_length(load("smoke", [local % 19, "training.epochs=2"]), 10) is None
    message = (
        r"local_after_steps=20 is not before the end of the run, which has 20 steps, .* training\.mode=synchronous$"
    )
    with pytest.raises(ValueError, match=message):
        check_length(load("smoke", [local % 20, "training.epochs=2"]), 10)


@pytest.mark.parametrize(
    ("momentum", "epochs", "warns"),
    # 20 steps an epoch, the last of them an exchange too: 7 exchanges.
    [(0.9, 14, True), (0.9, 15, False), (0.5, 2, True), (0.5, 3, False), (0.0, 1, False)],
)
def test_a_short_run_is_warned_of_a_large_outer_momentum(momentum: float, epochs: int, warns: bool) -> None:
    mode = f"training.mode={{name: local, every_steps: 3, outer: {{momentum: {momentum}}}}}"
    warning = check_length(load("smoke", [mode, f"training.epochs={epochs}"]), 20)
    text = f"training.mode.outer.momentum={momentum:g} wants about {round(10 / (1 - momentum))} exchanges, and this run"
    assert (warning is not None and warning.startswith(text)) == warns
