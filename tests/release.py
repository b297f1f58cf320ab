"""Slow lanes of tests, which run when their inputs have changed: python tests/release.py [--run].

`release.json` holds, for each lane, a hash of its inputs and the day of its last run without a failure. Without
`--run`, as in `make check`, this only says which lanes have other inputs now. With `--run` it runs those lanes.
"""

import argparse
import datetime
import hashlib
import json
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

PROJECT, RECORD = Path(__file__).parents[1], Path(__file__).with_suffix(".json")


class Lane(NamedTuple):
    """Tests that share inputs."""

    tests: tuple[str, ...]
    """Arguments of pytest."""
    inputs: tuple[str, ...]
    """Patterns of files, below the project."""


LANES = {
    # Benchmarks whose subject is a rival. All others run in `make test-long`.
    "rivals": Lane(
        ("tests/test_benchmarks.py",),
        (
            "pyproject.toml",
            "requirements.lock",
            "tests/test_benchmarks.py",
            *(f"tests/benchmarks/{name}.py" for name in ("launch", "peers", "prepare", "reader", "score", "train")),
            "tests/benchmarks/parts/**/*.py",
            "tests/benchmarks/peer_parts/**/*.py",
        ),
    ),
    "extras": Lane(("tests/test_wheel.py",), ("pyproject.toml", "tests/test_wheel.py")),
}


def hash_of(lane: Lane) -> str:
    """Hash the names and contents of a lane's inputs."""
    digest = hashlib.sha256()
    for path in sorted({path for pattern in lane.inputs for path in PROJECT.glob(pattern)}):
        content = path.read_bytes()
        digest.update(f"{path.relative_to(PROJECT)} {len(content)}\n".encode() + content)
    return digest.hexdigest()


def main() -> int:
    """Check or run the lanes; return the exit status."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--run", action="store_true", help="run the lanes whose inputs have changed")
    record = json.loads(RECORD.read_text())
    changed = {name: lane for name, lane in LANES.items() if record.get(name, {}).get("inputs") != hash_of(lane)}
    if not parser.parse_args().run:
        for name in changed:
            print(f"the inputs of the slow tests '{name}' have changed since their last run: run make test-release")
        return 1 if changed else 0
    for name, lane in changed.items():
        print(f"{name}: {' '.join(lane.tests)}", flush=True)
        subprocess.run([sys.executable, "-m", "pytest", "-m", "release", *lane.tests], cwd=PROJECT, check=True)
        record[name] = {"inputs": hash_of(lane), "passed": datetime.datetime.now(datetime.UTC).date().isoformat()}
        RECORD.write_text(json.dumps(record, indent=2) + "\n")
    print(f"{len(changed)} of {len(LANES)} lanes have run and passed; the others' inputs are those of their last run")
    return 0


if __name__ == "__main__":
    sys.exit(main())
