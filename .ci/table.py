"""Prints what a run took: python3 .ci/table.py FOLDER, with a line for each step in `steps`, and pytest's reports."""

import sys
from pathlib import Path
from xml.etree import ElementTree

SLOWEST = 30


def main(folder: Path) -> None:
    """Print the steps, and then the slowest tests."""
    slowest: list[tuple[float, str]] = []
    print(f"\n{'step':<14}{'tests':>8}{'seconds':>10}{'budget':>10}")
    for line in (folder / "steps").read_text().splitlines() if (folder / "steps").exists() else []:
        step, seconds, budget = line.split()
        report = folder / f"{step}.xml"
        cases = list(ElementTree.parse(report).iter("testcase")) if report.exists() else []
        slowest += [(float(case.get("time", 0)), f"{case.get('classname')}::{case.get('name')}") for case in cases]
        print(f"{step:<14}{len(cases) or '':>8}{seconds:>10}{budget:>10}")
    if slowest:
        print(f"\nthe {SLOWEST} slowest tests, with what they set up")
    for seconds, name in sorted(slowest, reverse=True)[:SLOWEST]:
        print(f"{seconds:8.1f} s  {name}")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
