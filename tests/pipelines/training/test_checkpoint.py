import dataclasses
import json
import logging
import resource
from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest

from conf.optimizers import LARSConfig
from pipelines.training.checkpoint import (
    KEPT,
    RankStates,
    TrainingState,
    assign_arrays,
    check_rank_states,
    newest_state,
    readable_checkpoints,
    save_checkpoint,
    save_rank_state,
)
from pipelines.training.checkpoint_files import DamagedError, check_writable, list_checkpoints
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
    path, found, arrays = next(readable_checkpoints(tmp_path))
    assert found == newest_state(tmp_path)[1] == state(1)
    assign_arrays(path, arrays, variables)
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
    assert newest_state(tmp_path)[1].history == [
        {
            "train/loss": 0.5,
            "speed/images_per_second": 9.0,
            "time/input_wait_fraction": 0.1,
            "val/loss": 0.6,
            "val/f1_micro": 0.2,
        }
    ]


def test_todays_names_stay_as_they_are(tmp_path: Path, variables: list[keras.Variable]) -> None:
    history = [{"train/loss": 0.5, "val/loss": 0.6, "val_ema/loss": 0.7}]
    save_checkpoint(tmp_path, dataclasses.replace(state(1), history=history), variables)
    assert newest_state(tmp_path)[1].history == history


def test_no_checkpoint_says_where(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match=r"absent: is training\.output that of the first run\?"):
        newest_state(tmp_path / "absent")


def test_damaged_ones_only_are_an_error_and_do_not_push_out_a_new_one(
    tmp_path: Path, variables: list[keras.Variable]
) -> None:
    for epoch in (9, 10):
        save_checkpoint(tmp_path, state(epoch), variables).write_bytes(b"")
    with pytest.raises(ValueError, match=r"every checkpoint in .* is damaged"):
        newest_state(tmp_path)
    assert save_checkpoint(tmp_path, state(1), variables).is_file()
    assert newest_state(tmp_path)[1] == state(1)


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
        assert next(readable_checkpoints(tmp_path))[1] == state(1)
    assert "step-00000014.npz is damaged" in caplog.text


def test_no_bit_of_the_list_of_its_parts_hides_an_older_checkpoint(
    tmp_path: Path, variables: list[keras.Variable]
) -> None:
    save_checkpoint(tmp_path, state(1), variables)
    newest = save_checkpoint(tmp_path, state(2), variables)
    content = newest.read_bytes()
    for position in range(content.index(b"PK\x01\x02"), len(content)):
        for bit in range(8):
            changed = bytearray(content)
            changed[position] ^= 1 << bit
            newest.write_bytes(changed)
            _, found, arrays = next(readable_checkpoints(tmp_path))
            assert found in (state(1), state(2))
            assert len(arrays) == len(variables), f"bit {bit} of byte {position}"


def test_another_model_is_refused(tmp_path: Path, variables: list[keras.Variable]) -> None:
    path = save_checkpoint(tmp_path, state(1), variables)
    with pytest.raises(ValueError, match="another model or optimizer"):
        assign_arrays(path, next(readable_checkpoints(tmp_path))[2], variables[1:])


def save_with_rank_states(folder: Path, epoch: int, variables: list[keras.Variable], ranks: int = 2) -> None:
    for rank in range(ranks):
        save_rank_state(folder, 7 * epoch, rank, {"residual/a": np.full(3, 10.0 * epoch + rank)})
    save_checkpoint(folder, dataclasses.replace(state(epoch), exchange_ranks=ranks), variables)


def test_the_state_of_every_rank_belongs_to_a_checkpoint(tmp_path: Path, variables: list[keras.Variable]) -> None:
    for epoch in (1, 2, 3):
        save_with_rank_states(tmp_path, epoch, variables)
    path, found = newest_state(tmp_path)
    assert [values["residual/a"][0] for values in RankStates(path, found.exchange_ranks)] == [30.0, 31.0]
    # Those of a checkpoint that was removed went with it.
    assert len(list(tmp_path.iterdir())) == KEPT * 3
    (tmp_path / "step-00000021.rank-00001.npz").unlink()
    with pytest.raises(DamagedError, match=r"step-00000021\.rank-00001"):
        RankStates(path, 2)[1]


def test_rank_states_without_their_checkpoint_are_removed_with_the_next_one(
    tmp_path: Path, variables: list[keras.Variable]
) -> None:
    save_with_rank_states(tmp_path, 1, variables)
    save_rank_state(tmp_path, 9, 1, {"residual/a": np.zeros(3)})  # rank 0 died before it wrote
    (tmp_path / "step-notes.rank-1.npz").write_text("somebody else's")
    (tmp_path / ".step-00000009.npz.4711").write_bytes(b"PK")
    save_with_rank_states(tmp_path, 2, variables)
    assert not (tmp_path / ".step-00000009.npz.4711").exists()
    assert sorted(path.name for path in tmp_path.glob("*rank*")) == [
        *[f"step-{step:08d}.rank-{rank:05d}.npz" for step in (7, 14) for rank in (0, 1)],
        "step-notes.rank-1.npz",
    ]


@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_values_that_are_not_finite_are_never_written(
    tmp_path: Path, variables: list[keras.Variable], bad: float
) -> None:
    save_checkpoint(tmp_path, state(1), variables)
    wrong = np.array(variables[0])
    wrong.flat[-1] = bad
    variables[0].assign(wrong)
    with pytest.raises(FloatingPointError, match=rf"{variables[0].path.replace('/', '.')} is not finite"):
        save_checkpoint(tmp_path, state(2), variables)
    with pytest.raises(FloatingPointError, match="residual/a is not finite"):
        save_rank_state(tmp_path, 14, 0, {"residual/a": np.array([0.0, bad])})
    assert [path.name for path in tmp_path.iterdir()] == ["step-00000007.npz"]


def test_an_old_checkpoint_that_is_not_finite_is_passed_over(
    tmp_path: Path, variables: list[keras.Variable], caplog: pytest.LogCaptureFixture
) -> None:
    save_checkpoint(tmp_path, state(1), variables)
    path = save_checkpoint(tmp_path, state(2), variables)
    with np.load(path) as file:
        arrays = {name: file[name] for name in file.files}
    arrays["00000:conv.kernel"][0] = np.nan
    np.savez(path, **arrays)  # as an earlier version could have written it
    assert next(readable_checkpoints(tmp_path))[1] == state(1)
    assert "step-00000014.npz is damaged (conv.kernel is not finite)" in caplog.text


def test_a_checkpoint_of_format_1_is_read(tmp_path: Path, variables: list[keras.Variable]) -> None:
    path = save_checkpoint(tmp_path, state(1), variables)
    rewrite_header(path, {"format_version": 1, "settings": None, "history": [{"train_loss": 0.5, "val_loss": 0.7}]})
    assert newest_state(tmp_path)[1].history == [{"train/loss": 0.5, "val/loss": 0.7}]
    assert next(readable_checkpoints(tmp_path))[1].settings == {}


def test_a_checkpoint_of_a_later_format_is_an_error_and_not_damage(
    tmp_path: Path, variables: list[keras.Variable]
) -> None:
    save_checkpoint(tmp_path, state(1), variables)
    rewrite_header(save_checkpoint(tmp_path, state(2), variables), {"format_version": 3})
    for read in (newest_state, lambda folder: next(readable_checkpoints(folder))):
        with pytest.raises(ValueError, match=r"14.npz has format 3, and this version .* reads formats 1 to 2"):
            read(tmp_path)


def rewrite_header(path: Path, changes: dict[str, Any]) -> None:
    """Change fields of a checkpoint's state; those that are None are removed."""
    with np.load(path) as file:
        arrays = {name: file[name] for name in file.files}
    header = json.loads(arrays["state.json"].tobytes()) | changes
    content = json.dumps({name: value for name, value in header.items() if value is not None}).encode()
    np.savez(path, **{**arrays, "state.json": np.frombuffer(content, np.uint8)})


def test_the_driver_reads_no_arrays(
    tmp_path: Path, variables: list[keras.Variable], monkeypatch: pytest.MonkeyPatch
) -> None:
    save_with_rank_states(tmp_path, 1, variables)
    read = []
    original = np.lib.npyio.NpzFile.__getitem__
    monkeypatch.setattr(
        np.lib.npyio.NpzFile, "__getitem__", lambda self, name: (read.append(name), original(self, name))[1]
    )
    assert newest_state(tmp_path)[1].exchange_ranks == 2
    assert read == ["state.json"]


def test_a_file_that_grows_too_large_leaves_no_part(tmp_path: Path, variables: list[keras.Variable]) -> None:
    """The operating system refuses the write in the middle of the file, as a full disk does."""
    save_checkpoint(tmp_path, state(1), variables)
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1000, limits[1]))
    try:
        with pytest.raises(OSError, match="File too large"):
            save_checkpoint(tmp_path, state(2), variables)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert [path.name for path in tmp_path.iterdir()] == ["step-00000007.npz"]


def test_a_folder_is_probed(tmp_path: Path) -> None:
    check_writable(tmp_path / "new" / "run", 1000)
    assert list((tmp_path / "new" / "run").iterdir()) == []
    (tmp_path / "file").write_text("")
    with pytest.raises(RuntimeError, match=r"cannot write to .*file/run \(Not a directory\): set training\.output"):
        check_writable(tmp_path / "file" / "run")
    with pytest.raises(RuntimeError, match=r"MiB of free space, and the checkpoints take 1,099,511,627,776 MiB"):
        check_writable(tmp_path, 1 << 60)


def test_ranks_that_write_elsewhere_are_noticed(tmp_path: Path) -> None:
    save_rank_state(tmp_path, 7, 0, {"step": np.zeros(1)})
    check_rank_states(tmp_path, 7, 1)
    with pytest.raises(RuntimeError, match=r"rank 1 wrote elsewhere than .*: set training.output to storage"):
        check_rank_states(tmp_path, 7, 2)


def test_steps_of_more_ranks_weigh_no_more_in_the_mean_of_an_epoch() -> None:
    """Two steps of loss 1 on four ranks, then two of loss 3 on two."""
    within = dataclasses.replace(state(1), step=7 + 2, loss_sum=8.0, loss_count=8)
    on_two = within.with_losses_of(2, steps_per_epoch=7)
    assert (on_two.loss_sum + 2 * 2 * 3.0) / (on_two.loss_count + 2 * 2) == 2.0
    assert within.with_losses_of(4, steps_per_epoch=7) == within
    assert state(1).with_losses_of(2, steps_per_epoch=7) == state(1)
