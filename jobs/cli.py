"""`groundswell VERB ...`: one verb per job."""

import importlib
import sys

_VERBS = {
    "prepare": "write a raw archive as a dataset",
    "train": "train on a dataset, one worker per Spark task",
    "evaluate": "score a logged model on the test split",
    "benchmark-reader": "measure how fast a dataset can be read",
    "demo": "generate a small archive and run all of the above on it",
}


def main() -> int:
    """Console entry."""
    verb = sys.argv[1] if len(sys.argv) > 1 else ""
    if verb not in _VERBS:
        lines = ["usage: groundswell VERB [--help]", *(f"  {name:<18}{text}" for name, text in _VERBS.items())]
        print("\n".join(lines), file=sys.stdout if verb in ("-h", "--help") else sys.stderr)
        return 0 if verb in ("-h", "--help") else 2
    # Imported on demand: `groundswell --help` should not wait for Spark.
    return int(importlib.import_module(f"jobs.{verb.replace('-', '_')}").main(sys.argv[2:]))


if __name__ == "__main__":
    sys.exit(main())
