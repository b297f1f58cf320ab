"""Training modes beside the settings of other sections."""

import re

import pytest

from conf.effect import refuse_without_effect
from conf.load import load, override
from conf.schema import check_length
from conf.sections.codecs import CodecConfig
from conf.sections.modes import PUSHED_CODECS, SynchronousConfig
from conf.sections.optimizers import OptimizerConfig
from conf.sections.section import member_names

LOCAL = "training.mode={name: local, every_steps: 4}"
SHARDED = "training.mode={name: synchronous, shard_optimizer: true}"
PIPELINE = "training.mode={name: pipeline, stages: 2}"
SERVER = "training.mode={name: parameter_server, synchrony: %s%s}"
IN_PLACE = "launch.recover=in_place"
PLAIN_SGD = "optimizer={name: sgd, momentum: 0.0, nesterov: false}"
ONEBIT_ADAM = [
    "exchange.codec=onebit_adam",
    "exchange.warmup_steps=5",
    "optimizer={name: onebit_adam, warmup_steps: 5}",
]


def of_mode(mode: str, *refused: tuple[list[str], str]) -> list[tuple[list[str], str, str]]:
    return [(settings, mode, message) for settings, message in refused]


FOR_ALL_WORKERS = "exchange.codec=%s gives every worker all of the mean"


@pytest.mark.parametrize(
    ("settings", "mode", "message"),
    [
        *of_mode(
            LOCAL,
            (["exchange.codec=dgc", PLAIN_SGD], "exchange.codec=dgc keeps"),
            (ONEBIT_ADAM, "exchange.codec=onebit_adam keeps"),
            (["training.precision=float16"], "training.precision=float16 has a loss scale"),
            (["training.ema=0.9"], "training.ema=0.9 averages the weights after every step"),
            (["model.batch_norm_ranks=2"], "model.batch_norm_ranks=2 exchanges statistics in every step"),
            (["training.checkpoint_every_steps=6"], "6 is no multiple of training.mode.every_steps=4"),
        ),
        *of_mode(
            "training.mode=delayed",
            (["exchange.codec=dgc", PLAIN_SGD], "exchange.codec=dgc has"),
            (ONEBIT_ADAM, "exchange.codec=onebit_adam has"),
            (["training.precision=float16"], "training.precision=float16 skips the step"),
        ),
        *of_mode(
            SHARDED,
            (["exchange.codec=powersgd"], FOR_ALL_WORKERS % "powersgd"),
            (ONEBIT_ADAM, FOR_ALL_WORKERS % "onebit_adam"),
            ([PLAIN_SGD], "shard_optimizer=True has no effect: optimizer.momentum=0 keeps no moments"),
            (["launch.num_workers=1"], "launch.num_workers=1 has no other ranks"),
        ),
        *of_mode(
            PIPELINE,
            (["launch.num_workers=3"], "launch.num_workers=3 does not divide into copies of the model of 2 workers"),
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
            ([IN_PLACE], "launch.recover=in_place replaces one worker by a spare"),
            (["reader.name=petastorm"], "reader.name=petastorm gives samples in an order that depends on its threads"),
        ),
        *of_mode(
            SERVER % ("async", ""),
            (["exchange.codec=powersgd"], "exchange.codec=powersgd is for an exchange among all workers"),
            (["training.precision=float16"], "training.precision=float16 skips the step"),
            (["training.gradient_clipping=1.0"], "training.gradient_clipping=1.0 is for the norm over all layers"),
            (["training.ema=0.9"], "training.ema=0.9 averages the weights after every step"),
            (["model.batch_norm_ranks=2"], "model.batch_norm_ranks=2 exchanges statistics in every step"),
            (["training.trace_steps=[2, 3]"], "training.trace_steps=[2, 3] compares the same steps of all workers"),
            ([IN_PLACE], "launch.recover=in_place lets a spare continue"),
            (["exchange.bucket_mib=2"], "exchange.bucket_mib=2.0 has no effect"),
            (["exchange.codec={name: topk, owner_factor: 3.0}"], "exchange.codec.owner_factor=3.0 has no effect"),
        ),
        *of_mode(
            IN_PLACE,
            (["training.trace_steps=[2, 3]"], "training.trace_steps brings the clocks of processes together"),
            (["reader.name=petastorm"], "reader.name=petastorm begins epochs only at their start"),
            (["launch.num_workers=1"], "launch.num_workers=1 has none"),
        ),
        (["launch.num_workers=2"], SERVER % ("backup", ", backup_workers: 2"), "backup_workers=2"),
        *(
            ([], SERVER % (synchrony, f", {key}: {value}"), f"training.mode.{key}={str(value).title()} has no effect")
            for synchrony, key, value in (
                *(("async", "bound", 5), ("backup", "bound", 5), ("async", "backup_workers", 0)),
                *(("ssp", "fetch_every", 2), ("ssp", "push_every", 2), ("backup", "push_every", 2)),
                *(("backup", "staleness_aware", "true"), ("backup", "synchronous_steps", 5)),
            )
        ),
        *(
            ([], f"training.mode={{name: {mode}}}", key)
            for mode, key in (
                ("local, shard_optimizer: true", "shard_optimizer"),
                ("delayed, shard_optimizer: true", "shard_optimizer"),
                ("synchronous, every_steps: 4", "every_steps"),
                ("local, outer: {momentum: 1.0}", "momentum"),
            )
        ),
        *((["launch.num_workers=20"], f"training.mode={{name: pipeline, stages: {n}}}", "stages") for n in (1, 5)),
    ],
)
def test_what_does_not_go_together_is_refused(settings: list[str], mode: str, message: str) -> None:
    load("smoke", settings)
    with pytest.raises(ValueError, match=re.escape(message)):
        load("smoke", [*settings, mode])


@pytest.mark.parametrize(
    ("settings", "steps", "message"),
    [
        # Steps of one epoch with which they fit, and with one less they do not; there are two epochs.
        (
            [SERVER % ("async", ", synchronous_steps: 20")],
            11,
            "synchronous_steps=20 is not before the end of the run, which has 20 steps",
        ),
        (
            ["exchange.codec=onebit", "exchange.warmup_steps=20"],
            11,
            r"warmup_steps=20 is not before the end of the run, which has 20 steps, so that exchange\.codec=onebit "
            "never",
        ),
        (
            [
                *("exchange.codec=onebit", "exchange.warmup_steps=20"),
                "training.mode={name: local, every_steps: 2}",
            ],
            21,
            "which has 20 exchanges",
        ),
        (
            [
                "exchange.codec={name: topk, density: 0.001, density_schedule: [{before_step: 4, density: 0.25}, "
                "{before_step: 20, density: 0.01}]}"
            ],
            11,
            r"density_schedule ends with before_step=20, which is not before the end of the run of 20 steps, so that "
            r"exchange\.codec\.density=0\.001 never holds",
        ),
        (
            [
                "exchange.codec={name: powersgd, rank_schedule: [{before_step: 5, rank: 8}]}",
                "exchange.warmup_steps=5",
            ],
            None,
            r"rank_schedule begins with before_step=5, and until exchange\.warmup_steps=5 gradients travel in float32",
        ),
        (
            ["training.mode={name: local, every_steps: 2, local_after_steps: 20}"],
            11,
            r"local_after_steps=20 is not before the end of the run, which has 20 steps, .* training\.mode=synchro",
        ),
    ],
)
def test_a_part_of_the_run_begins_before_its_end(settings: list[str], steps: int | None, message: str) -> None:
    config = load("smoke", [*settings, "training.epochs=2"])
    assert steps is None or check_length(config.training, config.exchange, steps) is None
    with pytest.raises(ValueError, match=message):
        check_length(config.training, config.exchange, 10 if steps is None else steps - 1)


@pytest.mark.parametrize("optimizer", [name for name in member_names(OptimizerConfig) if name != "onebit_adam"])
@pytest.mark.parametrize(
    "beside",
    [
        ["training.gradient_clipping=1.0", "training.ema=0.9", "training.precision=float16"],
        ["warm_start.rate_factors={stem*: 0.1}", "training.accumulation_steps=2", "launch.recover=in_place"],
    ],
)
def test_a_sharded_optimizer_goes_with_everything_else(optimizer: str, beside: list[str]) -> None:
    config = load("smoke", [SHARDED, f"optimizer={optimizer}", *beside])
    assert (config.optimizer.name, config.training.mode) == (optimizer, SynchronousConfig(shard_optimizer=True))


def test_a_pipeline_takes_the_samples_of_one_worker() -> None:
    sizes = ["launch.num_workers=6", "training.batch_size_per_worker=4", "training.accumulation_steps=5"]
    config = load("smoke", [*sizes, "training.mode={name: pipeline, stages: 3}"])
    assert config.global_batch_size == 2 * 4 * 5
    # As many workers as stages, or a multiple; what they take beside each other they take one after the other.
    assert [config.accumulation_steps(workers) for workers in (1, 2, 3, 4, 5, 6)] == [None, None, 10, None, None, 5]
    whole = config.with_synchronous_mode()
    assert (whole.training.mode.name, whole.global_batch_size, whole.accumulation_steps(5)) == ("synchronous", 40, 2)
    assert load("smoke").with_synchronous_mode().training.mode == SynchronousConfig()


def accepts(*settings: str) -> bool:
    try:
        load("smoke", ["training.checkpoint_every_steps=8", *settings])
    except ValueError:
        return False
    return True


@pytest.mark.parametrize("codec", PUSHED_CODECS)
@pytest.mark.parametrize("optimizer", [name for name in member_names(OptimizerConfig) if name != "onebit_adam"])
def test_a_parameter_server_takes_every_optimizer_and_these_codecs(codec: str, optimizer: str) -> None:
    settings = [SERVER % ("ssp", ", bound: 0"), f"exchange.codec={codec}", f"optimizer={optimizer}"]
    config = load("smoke", [*settings, "training.accumulation_steps=2", "warm_start.rate_factors={stem*: 0.1}"])
    assert (config.exchange.codec.name, config.optimizer.name) == (codec, optimizer)


def test_ssp_has_no_periods_of_async() -> None:
    of_async = load("smoke", [SERVER % ("async", ", push_every: 5, fetch_every: 4")])
    modes = [
        config.training.mode.arguments() for config in (of_async, override(of_async, "training.mode.synchrony=ssp"))
    ]
    assert [(mode["push_every"], mode["fetch_every"]) for mode in modes] == [(5, 4), (1, 1)]


NEEDS = {
    "dgc": [PLAIN_SGD],
    "onebit_adam": ONEBIT_ADAM,
    "threshold": ["exchange.codec.tau=0.01"],
}


@pytest.mark.parametrize("codec", member_names(CodecConfig))
def test_each_mode_takes_what_synchronous_training_takes_but_codecs_with_momentum(codec: str) -> None:
    needs, taken = NEEDS.get(codec, []), 0
    for optimizer in (None, *member_names(OptimizerConfig)):
        settings = [f"exchange.codec={codec}", *needs, *([f"optimizer={optimizer}"] if optimizer else [])]
        fits = accepts(*settings)
        taken += fits
        for mode in ("training.mode=synchronous", LOCAL, "training.mode=delayed"):
            refused = codec in ("dgc", "onebit_adam") and mode != "training.mode=synchronous"
            for recover in ("restart", "in_place"):
                found = accepts(*settings, mode, f"launch.recover={recover}")
                assert found == (fits and not refused), (settings, mode, recover)
    assert taken, "no optimizer goes with this codec"


@pytest.mark.parametrize(
    ("mode", "key", "reason"),
    [
        (LOCAL, "exchange.rescale_residual", "does not depend on the learning rate"),
        (LOCAL, "training.mode.outer.nesterov", "nothing to look ahead with"),
        (PIPELINE, "exchange.bucket_mib", "one pipeline exchanges no gradients"),
    ],
)
def test_settings_without_effect_in_a_mode_are_refused(mode: str, key: str, reason: str) -> None:
    config = load("smoke", [mode, *(["exchange.codec=onebit"] if mode == LOCAL else [])])
    with pytest.raises(ValueError, match=reason):
        refuse_without_effect(config, [key], verb="train", reads=["training", "exchange"])


@pytest.mark.parametrize(
    ("momentum", "epochs", "warns"),
    # 20 steps an epoch, the last of them an exchange too: 7 exchanges.
    [(0.9, 14, True), (0.9, 15, False), (0.5, 2, True), (0.5, 3, False), (0.0, 1, False)],
)
def test_a_short_run_is_warned_of_a_large_outer_momentum(momentum: float, epochs: int, warns: bool) -> None:
    mode = f"training.mode={{name: local, every_steps: 3, outer: {{momentum: {momentum}}}}}"
    config = load("smoke", [mode, f"training.epochs={epochs}"])
    warning = check_length(config.training, config.exchange, 20)
    text = f"training.mode.outer.momentum={momentum:g} wants about {round(10 / (1 - momentum))} exchanges, and this run"
    assert (warning is not None and warning.startswith(text)) == warns
