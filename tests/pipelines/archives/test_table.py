import pickle
from pathlib import Path

import pytest

from conf.archives import ARCHIVE_KINDS
from pipelines.archives.archive import Archive, read_sample
from pipelines.archives.table import ARCHIVES, open_archive


def test_the_table_and_the_configuration_know_the_same_kinds() -> None:
    assert set(ARCHIVES) == set(ARCHIVE_KINDS)


@pytest.mark.parametrize("kind", ["bigearthnet_v1", "bigearthnet_v2", "eurosat_ms", "eurosat_rgb"])
def test_an_archive_knows_its_kind_and_travels_to_executors(kind: str) -> None:
    archive: Archive = open_archive(kind, root="/archive")
    assert archive.description.kind == kind
    assert pickle.loads(pickle.dumps(archive)) == archive


def test_an_opened_archive_reads(generated: Path) -> None:
    archive = open_archive("bigearthnet_v2", root=str(generated))
    images = read_sample(archive, archive.index().samples["paths"][0].as_py())
    for group in archive.description.groups:
        group.check(images[group.name])
        assert images[group.name].any()


def test_an_unknown_kind_lists_the_known() -> None:
    with pytest.raises(ValueError, match=r"'bigearthnet_v3' is unknown, expected one of: .*bigearthnet_v2"):
        open_archive("bigearthnet_v3", root="/archive")
