"""Checkpoints on a disk: whole or not there, found again, and damaged ones passed over."""

import dataclasses
import json
import os
import resource
from collections.abc import Callable
from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest

from conf.sections.optimizers import LARSConfig
from pipelines.storage.folder import Location
from pipelines.training.checkpoint.files import DamagedError, check_writable, list_checkpoints
from pipelines.training.checkpoint.state import (
    RETAINED,
    RankStates,
    TrainingState,
    assign_arrays,
    newest_state,
    read_checkpoint,
    readable,
    save_checkpoint,
    save_rank_state,
)
from pipelines.training.setup.recipe import make_optimizer


def state(epochs_done: int) -> TrainingState:
    return TrainingState(epochs_done, epochs_done * 7, 0, 16, "run", "data", [{"train/loss": 0.5}] * epochs_done)


def newest_readable(folder: Location) -> TrainingState:
    return next(readable(folder, read_checkpoint))[1][0]  # type: ignore[no-any-return]


@pytest.fixture
def folder(tmp_path: Path) -> Location:
    return Location.at(tmp_path)


@pytest.fixture
def variables(tiny_model: keras.Model) -> list[keras.Variable]:
    """Of a small model and its optimizer."""
    return [*tiny_model.variables, *make_optimizer(LARSConfig(), tiny_model).variables]


def test_round_trip(folder: Location, variables: list[keras.Variable]) -> None:
    before = [np.array(variable) for variable in variables]
    save_checkpoint(folder, state(1), variables)
    for variable in variables:
        variable.assign(np.zeros(variable.shape, variable.dtype) + 1)
    path, (found, arrays) = next(readable(folder, read_checkpoint))
    assert found == newest_state(folder)[1] == state(1)
    assign_arrays(path, arrays, variables)
    np.testing.assert_equal([np.array(variable) for variable in variables], before)
    with pytest.raises(ValueError, match="another model or optimizer"):
        assign_arrays(path, arrays, variables[1:])


def test_no_checkpoint_says_where(folder: Location) -> None:
    with pytest.raises(FileNotFoundError, match=r"absent: is training\.output that of the first run\?"):
        newest_state(folder / "absent")


def test_damaged_ones_only_are_an_error_and_do_not_push_out_a_new_one(folder: Location) -> None:
    for epoch in (9, 10):
        save_checkpoint(folder, state(epoch), []).path.write_bytes(b"")
    with pytest.raises(ValueError, match=r"every checkpoint in .* is damaged"):
        newest_state(folder)
    assert (save_checkpoint(folder, state(1), []).is_file(), newest_state(folder)[1]) == (True, state(1))


def flip_a_byte(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 0xFF
    path.write_bytes(content)


@pytest.mark.parametrize(
    ("damage", "reason"),
    [
        (lambda path: os.truncate(path, path.stat().st_size // 2), ""),
        (lambda path: os.truncate(path, 0), ""),
        (flip_a_byte, ""),
        (
            lambda path: rewrite(path, {"00000:conv.kernel": np.full((3, 3, 2, 4), np.nan)}),
            r"conv.kernel is not finite)",
        ),
    ],
    ids=["truncated", "empty", "flipped", "not finite"],
)
def test_a_damaged_checkpoint_is_skipped_for_the_one_before(
    folder: Location,
    variables: list[keras.Variable],
    damage: Callable[[Path], None],
    reason: str,
    caplog: pytest.LogCaptureFixture,
) -> None:
    _, newest = (save_checkpoint(folder, state(epoch), variables) for epoch in (1, 2))
    damage(newest.path)
    assert newest_readable(folder) == state(1)
    assert f"step-00000014.npz is damaged ({reason}" in caplog.text


def test_no_bit_of_the_list_of_its_parts_hides_an_older_checkpoint(
    folder: Location, variables: list[keras.Variable]
) -> None:
    variables = variables[:2]  # every entry of the list is like any other, and each bit takes a millisecond
    _, newest = (save_checkpoint(folder, state(epoch), variables) for epoch in (1, 2))
    content = newest.path.read_bytes()
    for bit in range(8 * content.index(b"PK\x01\x02"), 8 * len(content)):
        changed = bytearray(content)
        changed[bit // 8] ^= 1 << bit % 8
        newest.path.write_bytes(changed)
        _, (found, arrays) = next(readable(folder, read_checkpoint))
        assert found in (state(1), state(2))
        assert len(arrays) == len(variables), f"bit {bit % 8} of byte {bit // 8}"


def save_with_rank_states(folder: Location, epoch: int, ranks: int = 2) -> None:
    for rank in range(ranks):
        save_rank_state(folder, 7 * epoch, rank, {"residual/a": np.full(3, 10.0 * epoch + rank)})
    save_checkpoint(folder, dataclasses.replace(state(epoch), exchange_ranks=ranks), [])


def test_the_state_of_every_rank_belongs_to_a_checkpoint(folder: Location) -> None:
    for epoch in (1, 2, 3):
        save_with_rank_states(folder, epoch)
    path, found = newest_state(folder)
    assert [values["residual/a"][0] for values in RankStates(path, found.exchange_ranks)] == [30.0, 31.0]
    # Those of a checkpoint that was removed went with it.
    assert ([path.name for path in list_checkpoints(folder)], len(folder.names())) == (
        ["step-00000014.npz", "step-00000021.npz"],
        RETAINED * 3,
    )
    folder.remove("step-00000021.rank-00001.npz")
    with pytest.raises(DamagedError, match=r"step-00000021\.rank-00001"):
        RankStates(path, 2)[1]


def test_rank_states_without_their_checkpoint_are_removed_with_the_next_one(folder: Location) -> None:
    save_with_rank_states(folder, 1)
    save_rank_state(folder, 9, 1, {"residual/a": np.zeros(3)})  # rank 0 died before it wrote
    for others in ("step-notes.rank-1.npz", ".step-00000009.npz.0123456789abcdef0123456789abcdef"):
        folder.write(others, b"PK")
    save_with_rank_states(folder, 2)
    assert folder.names() == [
        *[f"step-{step:08d}{part}.npz" for step in (7, 14) for part in ("", ".rank-00000", ".rank-00001")],
        "step-notes.rank-1.npz",  # somebody else's
    ]


@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_values_that_are_not_finite_are_never_written(folder: Location, bad: float) -> None:
    save_checkpoint(folder, state(1), [])
    wrong = keras.Variable(np.array([0.0, bad]), name="wrong")
    with pytest.raises(FloatingPointError, match=r"wrong is not finite"):
        save_checkpoint(folder, state(2), [wrong])
    with pytest.raises(FloatingPointError, match="residual/a is not finite"):
        save_rank_state(folder, 14, 0, {"residual/a": np.array([0.0, bad])})
    assert folder.names() == ["step-00000007.npz"]


def test_fields_of_a_later_version_are_ignored(folder: Location) -> None:
    rewrite_header(save_checkpoint(folder, state(1), []).path, {"cluster": "large"})
    assert newest_state(folder)[1] == newest_readable(folder) == state(1)


@pytest.mark.parametrize("version", [1, 3])
@pytest.mark.parametrize("read", [newest_state, newest_readable])
def test_a_checkpoint_of_another_format_is_an_error_and_not_damage(
    folder: Location, read: Callable[[Location], object], version: int
) -> None:
    _, newest = (save_checkpoint(folder, state(epoch), []) for epoch in (1, 2))
    rewrite_header(newest.path, {"format_version": version})
    with pytest.raises(ValueError, match=rf"14.npz has format {version}, this program reads 2: start a new run"):
        read(folder)


def rewrite_header(path: Path, changes: dict[str, Any]) -> None:
    """Change fields of a checkpoint's state."""
    with np.load(path) as file:
        header = json.loads(file["state.json"].tobytes()) | changes
    rewrite(path, {"state.json": np.frombuffer(json.dumps(header).encode(), np.uint8)})


def rewrite(path: Path, changes: dict[str, np.ndarray]) -> None:
    """Change arrays of a checkpoint."""
    with np.load(path) as file:
        arrays = {name: file[name] for name in file.files}
    np.savez(path, **(arrays | changes))


def test_the_driver_reads_no_arrays(folder: Location, monkeypatch: pytest.MonkeyPatch) -> None:
    save_with_rank_states(folder, 1)
    read, original = [], np.lib.npyio.NpzFile.__getitem__
    monkeypatch.setattr(
        np.lib.npyio.NpzFile, "__getitem__", lambda self, name: (read.append(name), original(self, name))[1]
    )
    assert (newest_state(folder)[1].exchange_ranks, read) == (2, ["state.json"])


def test_a_file_that_grows_too_large_leaves_no_part(
    folder: Location, variables: list[keras.Variable], request: pytest.FixtureRequest
) -> None:
    """The operating system refuses the write in the middle of the file, as a full disk does."""
    save_checkpoint(folder, state(1), variables)
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    request.addfinalizer(lambda: resource.setrlimit(resource.RLIMIT_FSIZE, limits))
    resource.setrlimit(resource.RLIMIT_FSIZE, (1000, limits[1]))
    with pytest.raises(OSError, match="File too large"):
        save_checkpoint(folder, state(2), variables)
    assert folder.names() == ["step-00000007.npz"]


@pytest.mark.parametrize(
    ("folder", "size", "message"),
    [
        ("file/run", 0, r"cannot write to .*file/run \(Not a directory\): set training\.output"),
        ("run", 1 << 60, r"MiB of free space, and the checkpoints take 1,099,511,627,776 MiB"),
    ],
)
def test_a_folder_is_probed(tmp_path: Path, folder: str, size: int, message: str) -> None:
    check_writable(Location.at(tmp_path) / "new" / "run", 1000)
    assert list((tmp_path / "new" / "run").iterdir()) == []
    (tmp_path / "file").write_text("")
    with pytest.raises(RuntimeError, match=message):
        check_writable(Location.at(tmp_path) / folder, size)


def test_steps_of_more_ranks_weigh_no_more_in_the_mean_of_an_epoch() -> None:
    """Two steps of loss 1 on four ranks, then two of loss 3 on two."""
    within = dataclasses.replace(state(1), step=7 + 2, loss_sum=8.0, loss_count=8)
    on_two = within.with_losses_of(2, steps_per_epoch=7)
    assert (on_two.loss_sum + 2 * 2 * 3.0) / (on_two.loss_count + 2 * 2) == 2.0
    for unchanged, ranks in ((within, 4), (state(1), 2)):
        assert unchanged.with_losses_of(ranks, steps_per_epoch=7) == unchanged
