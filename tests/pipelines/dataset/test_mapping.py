"""Which splits are mapped."""

import resource

import pytest

from pipelines import host_memory
from pipelines.dataset.mapping import is_wise

GIB = 1 << 30


@pytest.fixture(autouse=True)
def memory_of_8_gib(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host_memory, "_total_of_host", lambda: 16 * GIB)
    monkeypatch.setattr(host_memory, "_limit_of_control_group", lambda: 8 * GIB)


def test_a_split_is_mapped_that_fits_half_of_the_memory() -> None:
    assert is_wise(4 * GIB, 1, {})
    assert not is_wise(4 * GIB + 1, 1, {})


def test_files_without_number_are_not_mapped() -> None:
    assert is_wise(GIB, 10_000, {})
    assert not is_wise(GIB, 10_001, {})


def test_nothing_is_mapped_in_a_container_of_yarn() -> None:
    assert not is_wise(1, 1, {"CONTAINER_ID": "container_1_0001_01_000002"})


def test_nothing_is_mapped_where_the_address_space_is_limited(monkeypatch: pytest.MonkeyPatch) -> None:
    """As `spark.executor.pyspark.memory` limits it."""
    monkeypatch.setattr(resource, "getrlimit", lambda which: (4 * GIB, resource.RLIM_INFINITY))
    assert not is_wise(1, 1, {})
