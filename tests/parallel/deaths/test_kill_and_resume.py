"""A rank is killed at some step; a new attempt ends with the weights of a training that was never disturbed."""

import re
import signal
from pathlib import Path

import numpy as np
import pytest
from mlflow import MlflowClient

from conf.load import load
from pipelines.storage.folder import Location
from pipelines.tracking.models.models import averaged_model_uri, load_model
from pipelines.training.checkpoint.files import list_checkpoints
from tests.parallel.trainings import Disturbed, Undisturbed, assert_equal

pytestmark = [pytest.mark.spark, pytest.mark.parallel, pytest.mark.long, pytest.mark.timeout(900)]


@pytest.mark.usefixtures("new_interpreters")
def test_killed_ranks_cost_no_bit(
    undisturbed: Undisturbed, disturbed: Disturbed, capsys: pytest.CaptureFixture[str]
) -> None:
    """The ranks are new interpreters; a codec's residuals and the draws of dropout go on where they were."""
    expected = undisturbed("codec")
    capsys.readouterr()
    deaths = [
        (1, 0),  # before any checkpoint
        (0, 4, -1.0),  # while the checkpoint at the end of the first epoch is written: four steps have theirs
        (1, 7),  # in the middle of the second epoch
    ]
    found = disturbed("codec", deaths, f"launch.retries={len(deaths)}")
    assert_equal(found, expected)
    tags = MlflowClient(found.store).get_run(found.run.run.run_id).data.tags
    assert tags["attempt"] == str(len(deaths) + 1)
    shown = capsys.readouterr().out
    for number, (rank, *_) in enumerate(deaths, start=2):
        reason = tags[f"attempt_{number}_after"]
        assert (f"rank {rank}" in reason, signal.SIGKILL.name in reason) == (True, True), reason
        assert f"attempt {number} after: " in shown
    assert (shown.count("starting 2 workers"), re.findall(r"step-0000000(\d)\.npz: epoch (\d)", found.log(0))) == (
        len(deaths) + 1,
        [("4", "1"), ("5", "2")],
    )
    checkpoints = Path(found.run.folder) / "checkpoints"
    assert not [path for path in checkpoints.iterdir() if path.name.startswith(".")]
    # Two checkpoints are kept, each with the state of two ranks.
    states = sorted(path.name for path in checkpoints.glob("*.rank-*"))
    assert states == [f"step-{step:08d}.rank-{rank:05d}.npz" for step in (12, 15) for rank in (0, 1)]
    first, second = (np.load(checkpoints / name) for name in states[::2])
    residual = next(name for name in first.files if name.startswith("residual/"))
    assert (first[residual] != second[residual]).any()
    ratios = found.points("exchange/compression_ratio")
    assert [(step, ratio > 2) for step, ratio in ratios] == [(step, True) for step in range(15)]


@pytest.mark.parametrize(("mode", "kept"), [("local", "outer"), ("delayed", "has_pending")])
def test_a_killed_rank_costs_no_bit_in_a_mode(
    undisturbed: Undisturbed, disturbed: Disturbed, mode: str, kept: str
) -> None:
    """The moments or gradients of each rank, the codec's residual and the outer momentum all are in the checkpoint."""
    expected = undisturbed(mode)
    assert any(kept in name for name in expected.weights())
    found = disturbed(mode, [(1, 7)], "launch.retries=1")  # in the middle of a block of the second epoch
    assert_equal(found, expected)
    assert {path.name[:13] for path in (Path(found.run.folder) / "checkpoints").glob("step-*.rank-*")} == {
        "step-00000012",
        "step-00000015",
    }


def test_a_regularised_training_with_a_best_epoch_goes_on_as_it_was(
    undisturbed: Undisturbed, disturbed: Disturbed, capsys: pytest.CaptureFixture[str]
) -> None:
    """It dies within a part of its schedule of sizes, and continues at that size."""
    expected = undisturbed("regularised")
    capsys.readouterr()
    found = disturbed("regularised", [(1, 7), (0, 10)], "launch.retries=2")  # each one step behind a checkpoint
    assert_equal(found, expected)
    sizes = "60 x 60 pixels in epoch 1, 90 x 90 pixels in epoch 2, 120 x 120 pixels in "
    assert f"images of {sizes}" in capsys.readouterr().out
    run, summary = MlflowClient(found.store).get_run(found.run.run.run_id), found.run.summary
    assert run.data.tags["attempt"] == "3"
    assert run.data.params["input.resolution_schedule"].startswith("[{'until': {'steps': 4}, 'scale': 0.5}")
    assert (found.points("train/image_height"), summary.ended) == (
        [(4, 60), (8, 90), (12, 120)],
        "after 3 of 5 epochs: 2 in a row without a better val_ema/loss",
    )
    assert (run.data.tags["training_ended"], run.data.tags["best_epoch"], run.data.tags["best_value"]) == (
        summary.ended,
        "1",
        f"{summary.history[0]['val_ema/loss']:.6g}",
    )
    assert all(row["val/loss"] != row["val_ema/loss"] for row in summary.history)
    # The checkpoint of the best epoch is there beside the newest two, and both models are those of this epoch.
    checkpoints = Path(found.run.folder) / "checkpoints"
    assert ([path.name for path in list_checkpoints(Location.at(checkpoints))], summary.model_epoch) == (
        [f"step-{step:08d}.npz" for step in (4, 9, 12)],
        1,
    )
    with np.load(checkpoints / "step-00000004.npz") as file:
        saved = {name.partition(":")[2]: file[name] for name in file.files}
    assert summary.averaged_model_uri == averaged_model_uri(summary.model_uri)
    for uri, ending in ((summary.model_uri, ""), (summary.averaged_model_uri, "_average")):
        model = load_model(uri)[0]
        assert {tensor.shape[1] for tensor in model.inputs} == {120, 60, 20}
        for layer, names in (("logits", ("kernel", "bias")), ("stem_bn", ("gamma", "moving_mean"))):
            for name in names:
                (value,) = (saved[key] for key in saved if key.endswith(f"{layer}.{name}{ending}"))
                np.testing.assert_array_equal(np.array(getattr(model.get_layer(layer), name)), value)


def test_the_sizes_of_a_further_attempt_make_up_the_global_batch_from_the_same_batches() -> None:
    for batch, sizes in (("batch_size_per_worker=4", [1, 2, 3]), ("global_batch_size=240", [1, 2, 3, 4, 5])):
        # 240: 60, 30, 20, 15 and 12 micro-batches of 4.
        assert load("smoke", ["launch.num_workers=6", f"training.{batch}"]).smaller_sizes == sizes
