"""Which splits are mapped."""

import resource

import pytest

from pipelines.dataset.read.split_files import is_mapping_wise
from pipelines.machine import proc

GIB = 1 << 30


@pytest.fixture(autouse=True)
def memory_of_8_gib(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(proc, "total_of_host", lambda: 16 * GIB)
    monkeypatch.setattr(proc, "limit_of_control_group", lambda: 8 * GIB)


@pytest.mark.parametrize(
    ("split_bytes", "files", "environment", "expected"),
    [
        (4 * GIB, 1, {}, True),
        (4 * GIB + 1, 1, {}, False),
        (GIB, 10_000, {}, True),
        (GIB, 10_001, {}, False),
        (1, 1, {"CONTAINER_ID": "container_1_0001_01_000002"}, False),  # of YARN
    ],
)
def test_few_files_are_mapped_that_fit_half_of_the_memory(
    split_bytes: int, files: int, environment: dict[str, str], expected: bool
) -> None:
    assert is_mapping_wise(split_bytes, files, environment) is expected


def test_nothing_is_mapped_where_the_address_space_is_limited(monkeypatch: pytest.MonkeyPatch) -> None:
    """As `spark.executor.pyspark.memory` limits it."""
    monkeypatch.setattr(resource, "getrlimit", lambda which: (4 * GIB, resource.RLIM_INFINITY))
    assert not is_mapping_wise(1, 1, {})
