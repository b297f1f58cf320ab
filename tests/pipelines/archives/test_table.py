import importlib
import inspect
import pickle
from pathlib import Path
from typing import get_args

import pyarrow.parquet as pq
import pytest

from conf.archives import ARCHIVE_KINDS, ArchiveConfig
from conf.section import Section
from pipelines.archives.archive import Archive, read_sample
from pipelines.archives.table import ARCHIVES, open_archive
from pipelines.dataset.plan import plan_shards
from pipelines.dataset.shard import write_shard


def test_the_table_and_the_configuration_know_the_same_kinds() -> None:
    assert set(ARCHIVES) == set(ARCHIVE_KINDS)


def test_a_new_archive_is_one_file_and_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Beside the line in the table it may have a section with its settings, which is a line in a union."""
    source = (
        "from pipelines.archives.archive import ArchiveDescription, ArchiveIndex, REJECTED_SCHEMA, index_table\n"
        "from pipelines.sample import ImageGroup\n"
        "class Toy:\n"
        "    root = ''\n"
        "    read_settings = {}\n"
        "    description = ArchiveDescription(\n"
        "        'toy', 'single_label', ('a', 'b'), (ImageGroup('grey', (2, 2, 1), 'uint8', ('grey',)),))\n"
        "    def index(self):\n"
        "        columns = {'id': list('xy'), 'split': ['train'] * 2, 'labels': [[0], [1]], 'paths': [['1']] * 2}\n"
        "        return ArchiveIndex(index_table(columns), REJECTED_SCHEMA.empty_table())\n"
        "    def read(self, paths, out):\n"
        "        out['grey'][...] = int(paths[0])\n"
    )
    (tmp_path / "toy_archive.py").write_text(source)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setitem(ARCHIVES, "toy", importlib.import_module("toy_archive").Toy)
    archive = open_archive("toy")
    plans = plan_shards(archive, archive.index(), row_group_mib=1, row_groups_per_shard=1, seed=0)
    (tmp_path / "train").mkdir()
    (tmp_path / "_progress").mkdir()
    written = write_shard(plans["train"][0], archive, tmp_path)
    assert written.shard.rows == 2
    assert pq.read_table(tmp_path / written.shard.file)["grey"].null_count == 0


@pytest.mark.parametrize("config", get_args(get_args(ArchiveConfig)[0]))
def test_settings_and_defaults_are_those_of_the_configuration(config: type[Section]) -> None:
    kinds = get_args(config.model_fields["kind"].annotation)
    for kind in kinds:
        accepted = inspect.signature(ARCHIVES[kind]).parameters
        for name, field in config.model_fields.items():
            if name == "kind":
                continue
            assert name in accepted, (kind, name)
            if not field.is_required():
                default = accepted[name].default
                assert (list(default) if isinstance(default, tuple) else default) == config.default(name)


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
