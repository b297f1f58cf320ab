import pickle
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from pipelines.archives.archive import INDEX_SCHEMA, REJECTED_SCHEMA
from pipelines.archives.bigearthnet.v2 import GROUPS, BigEarthNetV2
from pipelines.archives.synthetic import archive as synthetic_archive
from pipelines.archives.synthetic.archive import SyntheticBigEarthNet
from pipelines.archives.synthetic.scenes import CAPACITY


def test_it_is_the_archive_that_is_written_as_files(generated: Path) -> None:
    archive, files = SyntheticBigEarthNet(train=12, validation=4, test=4), BigEarthNetV2(str(generated))
    samples = archive.index().samples
    samples.validate(full=True)
    assert samples.schema.equals(INDEX_SCHEMA)
    columns = [name for name in INDEX_SCHEMA.names if name != "paths"]
    assert samples.select(columns).sort_by("id").equals(files.index().samples.select(columns).sort_by("id"))
    for row in samples.to_pylist()[::5]:
        drawn, written = ({group.name: np.empty(group.shape, group.dtype) for group in GROUPS} for _ in range(2))
        assert archive.read(row["paths"], drawn) == files.read(
            [f"BigEarthNet-S2/{row['id'][:-6]}/{row['id']}"], written
        )
        for group in archive.description.groups:
            assert (drawn[group.name].shape, str(drawn[group.name].dtype)) == (group.shape, group.dtype)
            np.testing.assert_array_equal(drawn[group.name], written[group.name])


def test_it_has_its_own_kind_and_no_bad_records() -> None:
    archive = SyntheticBigEarthNet(train=1, validation=0, test=2)
    assert (archive.description.kind, archive.description.task) == ("synthetic", "multi_label")
    index = archive.index()
    assert index.samples["split"].to_pylist() == ["train", "test", "test"]
    assert index.rejected.equals(REJECTED_SCHEMA.empty_table())


def test_several_processes_give_the_same_index(monkeypatch: pytest.MonkeyPatch) -> None:
    archive = SyntheticBigEarthNet(train=40, validation=0, test=0, seed=3)
    alone = archive.index().samples
    monkeypatch.setattr(synthetic_archive, "PATCHES_IN_PROCESS", 10)
    monkeypatch.setattr(synthetic_archive, "PATCHES_PER_TASK", 7)
    assert archive.index().samples.equals(alone)


def test_the_seed_decides_what_is_read() -> None:
    recipe: dict[str, Any] = {"train": 3, "validation": 2, "test": 1, "seed": 0}
    original = SyntheticBigEarthNet(**recipe)
    assert SyntheticBigEarthNet("elsewhere", **recipe).read_settings == original.read_settings
    assert SyntheticBigEarthNet(**(recipe | {"seed": 5})).read_settings != original.read_settings
    assert pickle.loads(pickle.dumps(original)) == original


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"train": 0}, "patches are .*'train': 0.*expected 0 or more of each and 1 to 99372 in all"),
        ({"test": -1}, "patches are .*'test': -1"),
        ({"validation": CAPACITY}, "patches are"),
    ],
)
def test_numbers_out_of_range(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        SyntheticBigEarthNet(**({"train": 1, "validation": 0, "test": 0} | changes))
