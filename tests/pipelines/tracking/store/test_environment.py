import os
from importlib.metadata import version

from pipelines.tracking.store.environment import host_facts, packages


def test_packages_are_listed_with_their_versions() -> None:
    lines = packages().splitlines()
    assert (f"mlflow=={version('mlflow')}" in lines, lines) == (True, sorted(lines)), lines


def test_this_host() -> None:
    facts = host_facts()
    assert facts["cores"] == len(os.sched_getaffinity(0))
    assert facts["memory_mib"] > 100
    assert facts["processor"]
