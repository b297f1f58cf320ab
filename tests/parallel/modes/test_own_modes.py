"""Training modes by import path: they train, and what a killed rank costs is nothing."""

import re
from collections.abc import Callable
from pathlib import Path

import pytest
from pyspark.sql import SparkSession

from conf.load import load
from pipelines.training.modes.table import mode_maker
from tests.parallel.trainings import SETTINGS, Trained, assert_equal

OWN = Path(__file__).with_name("own_modes")
MODES = {
    "averaging": "{name: import, path: 'declared_modes:Averaging', settings: {every_steps: 4}}",
    "halves": "{name: import, path: 'declared_modes:Halves'}",
    "alone": "{name: import, path: 'declared_modes:Alone'}",
}
BESIDE = {
    "averaging": ("launch.recover=in_place",),
    "halves": (),
    "alone": ("training.checkpoint_every_steps=null",),
}


@pytest.fixture(autouse=True)
def own_modes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(OWN))


@pytest.mark.spark
@pytest.mark.parallel
@pytest.mark.long
@pytest.mark.timeout(900)
@pytest.mark.parametrize("mode", MODES)
def test_a_killed_rank_costs_no_bit_in_a_mode_of_the_users(
    spark: SparkSession,
    disturbed: Callable[..., Trained],
    tmp_path: Path,
    mode: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for module in OWN.glob("*.py"):  # as `spark-submit --py-files` brings them
        spark.sparkContext.addPyFile(str(module))
    monkeypatch.setitem(SETTINGS, "own", ())
    settings = (f"training.mode={MODES[mode]}", "training.batch_size_per_worker=4", *BESIDE[mode])
    expected, found = (
        disturbed("own", deaths, "launch.retries=1", f"training.output={tmp_path / name}", *settings)
        for name, deaths in (("undisturbed", []), ("disturbed", [(1, 6)]))
    )
    assert_equal(found, expected)
    # Two ranks that hold one copy take 8 steps of 4 samples an epoch; rank 0 computes the first half of each batch.
    assert [row.get("exchange/halves") for row in found.run.summary.history] == (
        [8.0, 16.0, 24.0] if mode == "halves" else [None] * 3
    )


@pytest.mark.parametrize(
    ("path", "settings", "message"),
    [
        ("nowhere:Mode", "{}", "nowhere:Mode: ModuleNotFoundError: No module named 'nowhere'"),
        ("declared_modes:Absent", "{}", "AttributeError: module 'declared_modes' has no attribute 'Absent'"),
        ("declared_modes:Averaging", "{}", "TypeError: Averaging.__init__() missing 1 required positional argument"),
        ("declared_modes:Averaging", "{every_steps: 3}", "training.checkpoint_every_steps=4 has a checkpoint between"),
        ("made_modes:TrainsAlone", "{inputs: 1}", "module made_modes imports TensorFlow, and the driver reads it"),
        ("collections:Counter", "{}", "collections:Counter: Counter is no ModeDeclaration"),
        ("declared_modes:Halves", "{}", "launch.num_workers=3 does not divide into copies of the model of 2 workers"),
        ("declared_modes:Halves", "{}", "model.batch_norm_ranks=2 makes groups of workers"),
    ],
)
def test_a_declaration_that_does_not_fit_is_one_line(path: str, settings: str, message: str) -> None:
    mode = f"training.mode={{name: import, path: '{path}', settings: {settings}}}"
    workers = 3 if "num_workers=3" in message else 2
    beside = ["model.batch_norm_ranks=2"] if "batch_norm" in message else []
    with pytest.raises(ValueError, match=re.escape(message)) as caught:
        load("smoke", [mode, "training.checkpoint_every_steps=4", f"launch.num_workers={workers}", *beside])
    assert len(str(caught.value).splitlines()) == 1


def test_what_a_declaration_names_is_found_on_the_driver(monkeypatch: pytest.MonkeyPatch) -> None:
    config = load("smoke", [f"training.mode={MODES['alone']}"])
    assert mode_maker(config.training.mode).__name__ == "make_alone"  # type: ignore[attr-defined]
    monkeypatch.setattr(type(config.training.mode.declaration), "implementation", "made_modes:absent")
    with pytest.raises(ValueError, match=r"^Alone\.implementation=made_modes:absent: made_modes has no absent$"):
        mode_maker(config.training.mode)
