"""The file of measurements: it comes back as it was, and what is wrong with one is one line."""

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from pipelines.scaling.measurements import Measurements, read_measurements

Make = Callable[..., dict[str, Any]]


def test_a_file_comes_back_as_it_was(scaling_measurements: Make, tmp_path: Path) -> None:
    measurements = Measurements.model_validate(scaling_measurements(), strict=False)
    (tmp_path / "file.json").write_text(measurements.model_dump_json())
    assert (read_measurements(tmp_path / "file.json"), measurements.gradient_bytes) == (measurements, 30_000_000)


@pytest.mark.parametrize(
    ("path", "value", "message"),
    [
        ("format_version", 2, "format_version: Input should be 1"),
        ("compute", [], "compute: Tuple should have at least 1 item"),
        ("compute/0/batch_size", 0, "compute.0.batch_size: Input should be greater than 0"),
        ("compute/0/batch_size", 8, "a batch size is there twice in [8, 8, 16]"),
        ("compute/0/seconds", [], "compute.0.seconds: Tuple should have at least 1 item"),
        ("compute/0/seconds", [-1.0], "compute.0.seconds.0: Input should be greater than 0"),
        ("straggler_deviation", -0.1, "straggler_deviation: Input should be greater than or equal to 0"),
        ("gradients/0/ready", 1.5, "gradients.0.ready: Input should be less than or equal to 1"),
        ("gradients/0/ready", 0.6, "gradients: they should be in the order in which they are ready"),
        ("links/0/bytes_per_second", 0.0, "links.0.bytes_per_second: Input should be greater than 0"),
        ("links/0/name", "unshaped", "links: a name is there twice"),
        ("collectives/0/link", "absent", "collectives: the link 'absent' is none of ['mbit_100', "),
        ("collectives/0/collective", "broadcast", "collectives.0.collective: Input should be 'allreduce', "),
        ("collectives/0/ranks", 1, "collectives.0.ranks: Input should be greater than or equal to 2"),
        ("collectives/0/bytes", "many", "collectives.0.bytes: Input should be a valid integer"),
        ("codecs/1/name", "none", "codecs: a name is there twice in ['none', 'none']"),
        ("codecs/0/encode_seconds", [-1.0], "codecs.0.encode_seconds.0: Input should be greater than or equal to 0"),
    ],
)
def test_a_mistake_is_one_line_that_says_where(
    scaling_measurements: Make,
    changed: Callable[[Any, str, Any], Any],
    tmp_path: Path,
    path: str,
    value: Any,
    message: str,
) -> None:
    file = tmp_path / "file.json"
    file.write_text(json.dumps(changed(scaling_measurements(), path, value)))
    start = f"--measurements {file} is no file of `make bench NAME=network`: "
    with pytest.raises(ValueError, match=rf"^{re.escape(start)}[^\n]*{re.escape(message)}[^\n]*\Z"):
        read_measurements(file)


@pytest.mark.parametrize(
    ("name", "error", "message"),
    [
        ("text", ValueError, "text is no file of `make bench NAME=network`: Invalid JSON"),
        ("absent", FileNotFoundError, "absent cannot be read: No such file or directory"),
    ],
)
def test_what_is_no_json_or_not_there_is_one_line(
    tmp_path: Path, name: str, error: type[Exception], message: str
) -> None:
    (tmp_path / "text").write_text("no JSON")
    with pytest.raises(error, match=message):
        read_measurements(tmp_path / name)
