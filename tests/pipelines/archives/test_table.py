import pickle
from pathlib import Path

import pytest

from pipelines.archives.archive import Archive, read_sample
from pipelines.archives.table import ARCHIVES, open_archive


@pytest.mark.parametrize("kind", sorted(ARCHIVES))
def test_an_archive_knows_its_kind_and_travels_to_executors(kind: str) -> None:
    archive: Archive = open_archive(kind, "/archive")
    assert archive.description.kind == kind
    assert pickle.loads(pickle.dumps(archive)) == archive


def test_an_opened_archive_reads(generated: Path) -> None:
    archive = open_archive("bigearthnet_v2", str(generated))
    images = read_sample(archive, archive.index()["paths"][0].as_py())
    for group in archive.description.groups:
        group.check(images[group.name])


def test_an_unknown_kind_lists_the_known() -> None:
    with pytest.raises(ValueError, match=r"'bigearthnet_v3' is unknown, expected one of: .*bigearthnet_v2"):
        open_archive("bigearthnet_v3", "/archive")
