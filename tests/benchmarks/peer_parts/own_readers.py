"""Our reader, the bare gather, Petastorm and `tf.data` over TFRecord, from `reader.py`, in the project's environment.

    python own_readers.py rates NAME FOLDER SECONDS [--smoke]
    python own_readers.py resume ours FOLDER SAVE_AFTER STATE STATE_FILE [--smoke]

The arguments and the last line are those of `rival_readers.py`.
"""

import json
import sys
from pathlib import Path
from typing import Any

from measures import Steps, describe, rates, resume

# At the end: a script there has the name of a module of Python's own.
sys.path.append(str(Path(__file__).parents[1]))

import reader

NAMES = {"ours": "ours", "ours always": "ours always", "limit": "limit", "tfrecord": "tfrecord"}
NAMES["petastorm"] = "petastorm 2"
"""Our names of what `reader.py` has; Petastorm with two threads, as all others."""


def our_steps(folder: Path, rank: int, size: int, state: Any) -> Steps:
    """State: epoch and step, which with the seed are all that the order depends on."""
    from pipelines.dataset.read.reader import ReaderSettings, SplitReader, training_batches

    rows = SplitReader(folder, "train", ReaderSettings(verify="always"))
    epoch, step = state or (0, 0)
    batch_size = describe(folder.parent)["batch_size"]
    batches = training_batches(
        rows, seed=0, epoch=epoch, global_batch_size=batch_size, rank=rank, size=size, start_step=step
    )
    for done, batch in enumerate(batches, step + 1):
        yield batch.images, lambda done=done: (epoch, done)  # type: ignore[misc]


def main(task: str, name: str, folder: Path, *rest: str) -> Any:
    """Do the task."""
    data = folder / "ours"
    if task == "rates":
        return rates(folder, data, reader.SOURCES[NAMES[name]], float(rest[0]), pixels=name != "limit")
    return resume(our_steps, data, *rest)


if __name__ == "__main__":
    arguments = [argument for argument in sys.argv[1:] if argument != "--smoke"]
    print(json.dumps(main(arguments[0], arguments[1], Path(arguments[2]), *arguments[3:])), flush=True)
