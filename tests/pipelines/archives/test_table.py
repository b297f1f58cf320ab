import inspect
import pickle
from typing import get_args

import pytest
from pydantic import TypeAdapter

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


@pytest.mark.parametrize(
    ("kind", "setting", "value"),
    [
        ("image_folder", "image_size", 0),
        ("image_folder", "validation_fraction", 1.0),
        ("table", "validation_fraction", -0.1),
        ("table", "image_size", 0),
        ("eurosat_ms", "seed", -1),
        ("synthetic", "seed", -1),
    ],
)
def test_bounds_that_only_the_configuration_checks(kind: str, setting: str, value: float) -> None:
    required = {"train": 1, "validation": 0, "test": 0} if kind == "synthetic" else {}
    with pytest.raises(ValueError, match=rf"1 validation error .*\n{kind}\.{setting}\n"):
        TypeAdapter(ArchiveConfig).validate_python({"kind": kind, **required, setting: value})


@pytest.mark.parametrize("kind", ["bigearthnet_v1", "bigearthnet_v2", "eurosat_ms", "eurosat_rgb"])
def test_an_archive_knows_its_kind_and_travels_to_executors(kind: str) -> None:
    archive: Archive = open_archive(kind, root="/archive")
    assert (archive.description.kind, pickle.loads(pickle.dumps(archive))) == (kind, archive)
