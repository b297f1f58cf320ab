"""Arguments of `pipelines` that are keys of the configuration have their defaults: `launch` states them, others ask."""

import argparse
import inspect
from collections.abc import Callable, Mapping
from typing import Any

import pytest

from conf.sections.dataset import PrepareConfig, ReaderConfig
from conf.sections.launch import LaunchConfig
from conf.sections.section import Section
from jobs.shell.verbs import parser_of
from pipelines.dataset.prepare.writer import prepare_dataset
from pipelines.dataset.read.reader import ReaderSettings
from pipelines.launch.runner import BarrierRunner

# Arguments with another meaning: without `exchange_timeout` ranks wait for `start_timeout`, as those that never call
# `join` do; `cache_folder` is the folder itself, where the key may be null.
OTHER = {"exchange_timeout", "cache_folder"}


@pytest.mark.parametrize(
    ("function", "section", "expected"),
    [
        (
            prepare_dataset,
            PrepareConfig,
            {
                "row_group_mib",
                "row_groups_per_shard",
                "seed",
                "max_rejected_fraction",
                "overwrite",
                "restart",
                "verify",
            },
        ),
        (ReaderSettings, ReaderConfig, {"threads", "batches_in_flight", "verify"}),
        (
            BarrierRunner.__init__,
            LaunchConfig,
            {"gpus_per_worker", "threads_per_worker", "start_timeout", "hang_timeout", "stop_grace", "retries"}
            | {"accept_unencrypted"},
        ),
    ],
)
def test_arguments_have_the_defaults_of_their_keys(
    function: Callable[..., Any], section: type[Section], expected: set[str]
) -> None:
    keys = {key.removesuffix("_seconds").removesuffix("_gib"): key for key in section.model_fields}
    found = {
        name: parameter.default
        for name, parameter in inspect.signature(function).parameters.items()
        if name in keys and parameter.default is not parameter.empty and name not in OTHER
    }
    assert (set(found), found) == (expected, {name: section.default(keys[name]) for name in expected})
    # They are equal because they are taken from the section. Only `launch` states them: it knows no `conf`.
    source = inspect.getsource(function)
    assert {name for name in expected if f'{section.__name__}.default("{keys[name]}")' in source} == (
        set() if section is LaunchConfig else expected
    )


def test_the_cache_of_the_reader_has_its_keys_limit() -> None:
    assert ReaderSettings().cache_limit_bytes == ReaderConfig.default("cache_limit_gib") * 2**30


def test_benchmark_reader_measures_with_the_readers_defaults() -> None:
    parser: argparse.ArgumentParser = parser_of("benchmark-reader")
    defaults: Mapping[str, Any] = {action.dest: action.default for action in parser._actions}
    for key in ("threads", "verify", "cache_limit_gib"):
        assert defaults[key] == ReaderConfig.default(key)
