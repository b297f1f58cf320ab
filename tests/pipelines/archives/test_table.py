import inspect
import pickle
from typing import get_args

import pytest

from conf.sections.archives import ArchiveConfig
from conf.sections.section import Section, member_names
from pipelines.archives.archive import Archive
from pipelines.archives.table import ARCHIVES, open_archive


def test_the_table_and_the_configuration_know_the_same_kinds() -> None:
    assert set(ARCHIVES) == set(member_names(ArchiveConfig, "kind"))


@pytest.mark.parametrize("config", get_args(get_args(ArchiveConfig)[0]))
def test_settings_and_defaults_are_those_of_the_configuration(config: type[Section]) -> None:
    for kind in get_args(config.model_fields["kind"].annotation):
        accepted = inspect.signature(ARCHIVES[kind]).parameters
        for name, field in config.model_fields.items():
            if name == "kind":
                continue
            assert name in accepted, (kind, name)
            if not field.is_required() and name != "root":  # without one, only `prepare` refuses
                default = accepted[name].default
                assert (list(default) if isinstance(default, tuple) else default) == config.default(name)


@pytest.mark.parametrize("kind", ["bigearthnet_v1", "bigearthnet_v2", "eurosat_ms", "eurosat_rgb"])
def test_an_archive_knows_its_kind_and_travels_to_executors(kind: str) -> None:
    archive: Archive = open_archive(kind, root="/archive")
    assert (archive.description.kind, pickle.loads(pickle.dumps(archive))) == (kind, archive)


def test_an_unknown_kind_lists_the_known() -> None:
    with pytest.raises(ValueError, match=r"'bigearthnet_v3' is unknown, expected one of: .*bigearthnet_v2"):
        open_archive("bigearthnet_v3", root="/archive")
