"""Tries which mutations the tests find:

    python tests/mutations/run.py FOLDER [--project PATH] [--output results.json] [--only NUMBER ...]

FOLDER is what `measure.py` wrote for the same checkout. Each mutation of `drawn.json` is applied to its file, and the
tests run that run its lines, fast ones first, until one fails. That test runs twice more by itself: it has to fail with
the mutation again, and to pass without. A run of pytest that takes much too long counts as a failure. The results are
written after each mutation, and what has a result is not tried again: the run can be stopped and continued.
`reworded.json` has the mutations whose lines say the same in other words today.
"""

import argparse
import json
import signal
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tests.mutations.guards import Guards, batches
from tests.mutations.moved import DRAWN, PROJECT, drawn_commit
from tests.mutations.mutated import Place, applied, locate, restore
from tests.mutations.pytest_run import Ended, adopt_orphans, run_pytest

_TIMES_LONGER, _MORE_SECONDS = 3.0, 300.0


class Trial:
    """One mutation and the tests that could find it."""

    def __init__(self, place: Place, guards: Guards, project: Path, backup: Path, log: Path) -> None:
        self._place, self._guards, self._project, self._backup, self._log = place, guards, project, backup, log
        self.unstable: list[str] = []
        """Tests that failed once, but not again, or also without the mutation."""

    def first_failure(self, tests: Sequence[str]) -> str | None:
        """The first test that fails because of the mutation; None: all pass."""
        renamed: list[str] = []
        for batch in batches(tests, self._guards.seconds):
            if (found := self._fails(batch, renamed)) is not None:
                return found
        # Tests whose parameters have other names with the mutation run as whole files.
        files = sorted({test.partition("::")[0] for test in renamed})
        return self._fails(files, []) if files else None

    def _fails(self, batch: list[str], renamed: list[str]) -> str | None:
        while batch:
            ended = self._run(batch)
            if ended.is_late:
                return f"time-out of {len(batch)} tests, the first is {batch[0]}"
            if ended.code == 0:
                return None
            if ended.unknown:
                gone = {test.partition("[")[0] for test in ended.unknown}  # pytest names them without parameters
                renamed += gone
                batch = [test for test in batch if test.partition("[")[0] not in gone]
                continue
            # Where pytest cannot begin, no test has failed.
            suspects = ended.failed or batch[:1]
            known = [test if test in self._guards.seconds else test.partition("::")[0] for test in suspects]
            if self._run(suspects).code and not self._run(known, mutated=False).code:
                return suspects[0]
            self.unstable += suspects
            batch = [test for test in batch if test not in suspects and test.partition("::")[0] not in suspects]
        return None

    def _run(self, tests: Sequence[str], mutated: bool = True) -> Ended:
        seconds = sum(
            value for test, value in self._guards.seconds.items() if test in tests or test.partition("::")[0] in tests
        )
        limit = _TIMES_LONGER * seconds + _MORE_SECONDS
        if not mutated:
            return run_pytest(self._project, tests, limit, self._log)
        with applied(self._place.path, self._place.text, self._backup):
            return run_pytest(self._project, tests, limit, self._log)


def result_of(mutation: dict[str, Any], guards: Guards, project: Path, backup: Path, log: Path) -> dict[str, Any]:
    """Try one mutation."""
    place = locate(mutation, drawn_commit(), project)
    if place is None:
        return {"result": "gone"}
    where = {"file": str(place.path.relative_to(project)), "line": place.line}
    tests = guards.tests_of(place, project)
    if not tests:
        return {"result": "not covered", **where}
    trial, start = Trial(place, guards, project, backup, log), time.monotonic()
    found = trial.first_failure(tests)
    return {
        "result": "survived" if found is None else "found",
        "found_by": found,
        **where,
        "tests": len(tests),
        "unstable": trial.unstable,
        "seconds": round(time.monotonic() - start, 1),
    }


def main() -> int:
    """Try the mutations that have no result yet; return the exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--project", type=Path, default=PROJECT, help="another checkout, with its own .venv")
    parser.add_argument("--output", type=Path, default=Path("results.json"))
    parser.add_argument("--only", type=int, nargs="*", help="numbers of mutations, from 0")
    arguments = parser.parse_args()
    output, project = arguments.output.absolute(), arguments.project.resolve()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("ended by SIGTERM"))
    adopt_orphans()
    backup = output.with_suffix(".original")
    restore(backup)
    guards, drawn = Guards(arguments.folder), json.loads(DRAWN.read_text())
    for number, today in json.loads(DRAWN.with_name("reworded.json").read_text()).items():
        drawn[int(number)] |= {**today, "line": 0}
    results: dict[str, Any] = json.loads(output.read_text()) if output.exists() else {}
    logs = output.with_suffix(".logs")
    logs.mkdir(exist_ok=True)
    for number in range(len(drawn)) if arguments.only is None else arguments.only:
        if str(number) not in results:
            results[str(number)] = result = result_of(drawn[number], guards, project, backup, logs / f"{number}.log")
            new = output.with_suffix(".new")
            new.write_text(json.dumps(results, indent=1) + "\n")
            new.replace(output)
            print(number, drawn[number]["area"], result["result"], result.get("found_by") or "", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
