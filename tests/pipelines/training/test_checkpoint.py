import dataclasses
import logging
from pathlib import Path

import keras
import numpy as np
import pytest

from conf.optimizers import LARSConfig
from pipelines.training.checkpoint import (
    KEPT,
    TrainingState,
    check_rank_states,
    list_checkpoints,
    newest_checkpoint,
    read_rank_states,
    restore,
    save_checkpoint,
    save_rank_state,
)
from pipelines.training.recipe import make_optimizer


def state(epochs_done: int) -> TrainingState:
    return TrainingState(epochs_done, epochs_done * 7, 0, 16, "run", "data", [{"train/loss": 0.5}] * epochs_done)


@pytest.fixture
def variables(tiny_model: keras.Model) -> list[keras.Variable]:
    optimizer = make_optimizer(LARSConfig(), tiny_model)
    return [*tiny_model.variables, *optimizer.variables]


def values(variables: list[keras.Variable]) -> list[np.ndarray]:
    return [np.array(variable) for variable in variables]


def test_round_trip(tmp_path: Path, variables: list[keras.Variable]) -> None:
    before = values(variables)
    save_checkpoint(tmp_path, state(1), variables)
    for variable in variables:
        variable.assign(np.zeros(variable.shape, variable.dtype) + 1)
    path, found = newest_checkpoint(tmp_path)
    assert found == state(1)
    restore(path, variables)
    for old, new in zip(before, values(variables), strict=True):
        np.testing.assert_array_equal(old, new)


def test_the_history_of_an_older_checkpoint_has_todays_names(tmp_path: Path, variables: list[keras.Variable]) -> None:
    old = {
        "train_loss": 0.5,
        "images_per_second": 9.0,
        "input_wait_fraction": 0.1,
        "val_loss": 0.6,
        "val_f1_micro": 0.2,
    }
    save_checkpoint(tmp_path, dataclasses.replace(state(1), history=[old]), variables)
    assert newest_checkpoint(tmp_path)[1].history == [
        {
            "train/loss": 0.5,
            "speed/images_per_second": 9.0,
            "time/input_wait_fraction": 0.1,
            "val/loss": 0.6,
            "val/f1_micro": 0.2,
        }
    ]


def test_no_checkpoint_says_where(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match=r"absent: is training\.output that of the first run\?"):
        newest_checkpoint(tmp_path / "absent")


def test_damaged_ones_only_are_an_error_and_do_not_push_out_a_new_one(
    tmp_path: Path, variables: list[keras.Variable]
) -> None:
    for epoch in (9, 10):
        save_checkpoint(tmp_path, state(epoch), variables).write_bytes(b"")
    with pytest.raises(ValueError, match=r"every checkpoint in .* is damaged"):
        newest_checkpoint(tmp_path)
    assert save_checkpoint(tmp_path, state(1), variables).is_file()
    assert newest_checkpoint(tmp_path)[1] == state(1)


def test_only_the_newest_are_kept(tmp_path: Path, variables: list[keras.Variable]) -> None:
    for epoch in range(1, 5):
        save_checkpoint(tmp_path, state(epoch), variables)
    assert [path.name for path in list_checkpoints(tmp_path)] == ["step-00000021.npz", "step-00000028.npz"]
    assert len(list(tmp_path.iterdir())) == KEPT


@pytest.mark.parametrize("damage", ["truncated", "flipped", "empty"])
def test_a_damaged_checkpoint_is_skipped_for_the_one_before(
    tmp_path: Path, variables: list[keras.Variable], damage: str, caplog: pytest.LogCaptureFixture
) -> None:
    save_checkpoint(tmp_path, state(1), variables)
    newest = save_checkpoint(tmp_path, state(2), variables)
    content = bytearray(newest.read_bytes())
    if damage == "flipped":
        content[len(content) // 2] ^= 0xFF
    newest.write_bytes(content[: {"truncated": len(content) // 2, "flipped": len(content), "empty": 0}[damage]])
    with caplog.at_level(logging.WARNING):
        assert newest_checkpoint(tmp_path)[1] == state(1)
    assert "step-00000014.npz is damaged" in caplog.text


def test_an_interrupted_write_leaves_the_old_ones(
    tmp_path: Path, variables: list[keras.Variable], monkeypatch: pytest.MonkeyPatch
) -> None:
    save_checkpoint(tmp_path, state(1), variables)

    def full(*_: object, **__: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(np, "savez", full)
    with pytest.raises(OSError, match="No space left"):
        save_checkpoint(tmp_path, state(2), variables)
    assert [path.name for path in tmp_path.iterdir()] == ["step-00000007.npz"]


def test_another_model_is_refused(tmp_path: Path, variables: list[keras.Variable]) -> None:
    path = save_checkpoint(tmp_path, state(1), variables)
    with pytest.raises(ValueError, match="another model or optimizer"):
        restore(path, variables[1:])


def test_the_state_of_every_rank_belongs_to_a_checkpoint(
    tmp_path: Path, variables: list[keras.Variable], caplog: pytest.LogCaptureFixture
) -> None:
    for epoch in (1, 2, 3):
        for rank in range(2):
            save_rank_state(tmp_path, 7 * epoch, rank, {"residual/a": np.full(3, 10.0 * epoch + rank)})
        save_checkpoint(tmp_path, dataclasses.replace(state(epoch), exchange_ranks=2), variables)
    path, found = newest_checkpoint(tmp_path)
    assert [values["residual/a"][0] for values in read_rank_states(path, found.exchange_ranks)] == [30.0, 31.0]
    # Those of a checkpoint that was removed went with it.
    assert len(list(tmp_path.iterdir())) == KEPT * 3
    (tmp_path / "step-00000021.rank-00001.npz").unlink()
    with caplog.at_level(logging.WARNING):
        assert newest_checkpoint(tmp_path)[1].step == 14
    assert "step-00000021.npz is damaged" in caplog.text


def test_ranks_that_write_elsewhere_are_noticed(tmp_path: Path) -> None:
    save_rank_state(tmp_path, 7, 0, {"step": np.zeros(1)})
    check_rank_states(tmp_path, 7, 1)
    with pytest.raises(RuntimeError, match=r"rank 1 wrote its part .*: set training.output to storage"):
        check_rank_states(tmp_path, 7, 2)
