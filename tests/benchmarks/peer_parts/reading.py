"""The reader half of `peers`: the same rows for all readers, each measurement a process of its own, all in turn."""

import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack, suppress
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import reader
from peer_parts import environment
from peer_parts.measures import DESCRIPTION, digest_file, digests

from tests.benchmarks.parts.figures import head, ratio, row
from tests.patience import patient

PARTS = Path(__file__).parent
NAMES = {
    "ours always": "",
    "ours": "",
    "limit": "",
    "litdata": "litdata",
    "litdata, no workers": "litdata",
    "streaming": "streaming",
    "streaming, no workers": "streaming",
    "grain": "grain",
    "lance": "lance",
    "tfrecord": "",
    "petastorm": "",
}
"""What is measured, and what must be installed for it in the rivals' environment."""
PEERS = [name for name in NAMES if name not in ("ours", "ours always", "limit")]
RESUMED = {"ours": "ours always", "litdata": "litdata", "streaming": "streaming", "grain": "grain"}
"""Readers with a state of their own, and whose rows in the table it belongs to."""
CHANGES = ((1, 1), (1, 2), (2, 1))
"""Ranks before and after the state is saved; the first is a control."""
SHUFFLES = {
    "ours": "all rows",
    "ours always": "all rows",
    "limit": "independent draws",
    "litdata": "chunks, and the rows of a chunk",
    "streaming": "shards, and the rows of a block around them (`py1e`)",
    "grain": "all rows",
    "lance": "all rows (our permutation)",
    "tfrecord": "files, and a buffer of 512 rows",
    "petastorm": "row groups, and the rows of a row group",
}
STATES = {
    "ours": "epoch and step",
    "ours always": "epoch and step",
    "limit": "-",
    "litdata": "`StreamingDataLoader.state_dict`",
    "streaming": "`StreamingDataLoader.state_dict`",
    "grain": "`ElasticIterator.get_state`",
    "lance": "none: the caller keeps the permutation and the place in it",
    "tfrecord": "`tf.train.Checkpoint(iterator)` holds the shuffle buffer, and is for one process",
    "petastorm": "none: `reset` begins a new epoch",
}
SETTINGS = {
    **{"CUDA_VISIBLE_DEVICES": "-1", "TF_CPP_MIN_LOG_LEVEL": "3", "OMP_NUM_THREADS": "1"},
    **{"LANCE_CPU_THREADS": "2", "LANCE_IO_THREADS": "2"},
    # LitData would ask a package index for its newest version at every start.
    "LITDATA_DISABLE_VERSION_CHECK": "1",
}
"""Of every measurement's environment, beside the launcher's settings of the allocator."""
SECONDS, EXIT_SECONDS = 300, 20
"""After which a measurement is ended: with no result, and with its result."""


def write_rows(folder: Path) -> None:
    """Write our dataset and its TFRecord twin, then its rows for the rivals: NumPy files, digests, a description."""
    from pipelines.dataset.read.reader import ReaderSettings, SplitReader

    reader.write_dataset(folder / "ours")
    rows = SplitReader(folder / "ours", "train", ReaderSettings(verify="always"))
    groups = {group.name: group.shape for group in rows.manifest.groups}
    description = {"rows": len(rows), "batch_size": reader.BATCH_SIZE, "classes": reader.CLASSES, "groups": groups}
    (folder / DESCRIPTION).write_text(json.dumps(description))
    (folder / "rows").mkdir()
    shapes = {**dict.fromkeys(groups, np.uint16), "labels": np.uint8}
    arrays = {
        name: np.lib.format.open_memmap(
            folder / "rows" / f"{name}.npy", "w+", dtype, (len(rows), *groups.get(name, (reader.CLASSES,)))
        )
        for name, dtype in shapes.items()
    }
    with digest_file(folder).open("w") as lines:
        for first in range(0, len(rows), reader.BATCH_SIZE):
            batch = rows.gather(np.arange(first, min(first + reader.BATCH_SIZE, len(rows))))
            for name, values in {**batch.images, "labels": batch.targets}.items():
                arrays[name][first : first + len(batch.rows)] = values
            lines.writelines(f"{digest}\n" for digest in digests(batch.images))


class Measurement:
    """A process that measures one reader, with the launcher's environment; leaving the `with` block ends it."""

    def __init__(self, name: str, task: str, folder: Path, *rest: str, **variables: str) -> None:
        from pipelines.launch.rank.process import ALLOCATOR

        rival = NAMES.get(name, "")
        script = PARTS / ("rival_readers.py" if rival else "own_readers.py")
        command = [str(environment.PYTHON if rival else sys.executable), str(script), task, name, str(folder), *rest]
        if reader.SMOKE and not rival:
            command.append("--smoke")
        inherited = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
        own = {} if rival else {"PYTHONPATH": str(environment.PROJECT)}
        self._log = tempfile.TemporaryFile("w+")  # noqa: SIM115  open as long as the process is
        self._process = subprocess.Popen(
            command,
            env={**inherited, **ALLOCATOR, **SETTINGS, **own, **variables},
            stdout=subprocess.PIPE,
            stderr=self._log,
            text=True,
            start_new_session=True,
        )

    def __enter__(self) -> "Measurement":
        return self

    def __exit__(self, *_: object) -> None:
        # Workers that it may have left are in its group; Python's process that removes shared memory ends after them.
        with suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGTERM)
            if self._process.poll() is None:
                time.sleep(1)
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.communicate()
        self._log.close()

    def answer(self) -> Any:
        """The JSON of its last line.

        Raises:
            RuntimeError: It failed; with what it said last.
        """
        assert self._process.stdout is not None
        timer = threading.Timer(patient(SECONDS), self._process.kill)
        timer.start()
        line = ""
        for line in self._process.stdout:
            if line.startswith("{"):
                break
        timer.cancel()
        # Some loaders now and then wait for their workers at the end, whose figures are complete nevertheless.
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(timeout=EXIT_SECONDS)
        if not line.startswith("{"):
            self._log.seek(0)
            raise RuntimeError(last_line(self._log.read()))
        return json.loads(line)


def last_line(errors: str) -> str:
    """The line of a traceback that says what happened."""
    lines = [line for line in errors.splitlines() if line.strip()]
    told = [line for line in lines if "Error" in line and not line.startswith(" ")]
    return (told or lines or ["it failed without a word"])[-1][:300]


def measured_in_turn(names: Sequence[str], folder: Path, reasons: dict[str, str]) -> dict[str, list[dict[str, Any]]]:
    """What `measures.rates` finds of each reader in each round; one that fails is left out from then on."""
    found: dict[str, list[dict[str, Any]]] = {name: [] for name in names}
    for number in range(reader.ROUNDS):
        for name in names:
            if name in reasons:
                continue
            try:
                with Measurement(name, "rates", folder, str(reader.SECONDS)) as measurement:
                    found[name].append(measurement.answer())
            except RuntimeError as error:
                reasons[name] = str(error)
                print(f"{name}: {error}", flush=True)
                continue
            rates = found[name][-1]
            print(
                f"round {number + 1}: {name:22} {rates['rows_per_second']:8,.0f} rows/s, "
                f"{rates['cpu_seconds_per_1000_rows']:.4f} CPU s per 1,000 rows, cold "
                f"{rates['cold_rows_per_second']:7,.0f} rows/s, {rates['kinds']}",
                flush=True,
            )
    return found


def epoch(name: str, folder: Path, size: int, save_after: int | None, state: str, new_state: Path) -> dict[str, Any]:
    """One epoch of several ranks at once: the rows of each step, sorted, and the bytes of the state it began with."""
    with ExitStack() as stack:
        ranks = [
            stack.enter_context(
                Measurement(
                    name,
                    "resume",
                    folder,
                    *(json.dumps(save_after), state, str(new_state)),
                    **{variable: str(rank) for variable in ("RANK", "GLOBAL_RANK", "LOCAL_RANK")},
                    **{variable: str(size) for variable in ("WORLD_SIZE", "LOCAL_WORLD_SIZE")},
                )
            )
            for rank in range(size)
        ]
        answers = [rank.answer() for rank in ranks]
    steps = [sorted(chain(*parts)) for parts in zip(*(each["steps"] for each in answers), strict=True)]
    return {"steps": steps, "state_bytes": answers[0]["state_bytes"]}


def resumptions(name: str, folder: Path, changes: Sequence[tuple[int, int]]) -> dict[str, Any]:
    """Whether each step after a resumption has the rows of the epoch without one, pixel by pixel.

    Returns:
        `bit_equal`, of all changes of the number of ranks; `state_bytes`; and of each change whether its steps are
        equal, whether the rows of all its steps together are, and the reason where the reader refused.
    """
    description = json.loads((folder / DESCRIPTION).read_text())
    save_after = max(1, description["rows"] // description["batch_size"] // 3)
    found: dict[str, Any] = {"bit_equal": None, "state_bytes": None, "changes": {}}
    whole: dict[int, list[list[str]]] = {}
    with tempfile.TemporaryDirectory() as temporary:
        try:
            for size in sorted({before for before, _ in changes}):
                state = Path(temporary, f"state-{size}-")
                whole[size] = epoch(name, folder, size, save_after, "", state)["steps"]
        except RuntimeError as error:
            return {**found, "reason": str(error)}
        for before, after in changes:
            state = Path(temporary, f"state-{before}-")
            change: dict[str, Any] = {"steps_equal": False, "rows_equal": False}
            found["changes"][f"{before} to {after}"] = change
            try:
                rest = epoch(name, folder, after, None, str(state), Path(temporary, f"rest-{before}-{after}-"))
            except RuntimeError as error:
                change["reason"] = str(error)
                continue
            expected = whole[before][save_after:]
            change["steps_equal"] = rest["steps"] == expected
            change["rows_equal"] = sorted(chain(*rest["steps"])) == sorted(chain(*expected))
            found["state_bytes"] = rest["state_bytes"]
    others = [change for name, change in found["changes"].items() if name[0] != name[-1]]
    found["bit_equal"] = all(change["steps_equal"] for change in others)
    if 1 in whole and 2 in whole:
        found["same_order_with_2_ranks"] = whole[1] == whole[2]
    return found


def measure() -> dict[str, Any]:
    """All figures of the reader half; prints its table."""
    reasons = {name: environment.missing(rival) for name, rival in NAMES.items() if rival}
    reasons = {name: reason for name, reason in reasons.items() if reason}
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        write_rows(folder)
        for rival in dict.fromkeys(filter(None, NAMES.values())):
            if rival in reasons:
                continue
            try:
                with Measurement(rival, "write", folder) as measurement:
                    print(f"{rival}: {measurement.answer()['mib']:,.0f} MiB written", flush=True)
            except RuntimeError as error:
                reasons |= {name: f"writing failed: {error}" for name, needed in NAMES.items() if needed == rival}
        for name, reason in reasons.items():
            print(f"{name}: skipped, {reason}", flush=True)
        rounds = measured_in_turn(list(NAMES), folder, reasons)
        resumes: dict[str, dict[str, Any]] = {}
        for name, row in RESUMED.items():
            if row in reasons:
                continue
            resumes[row] = resumptions(name, folder, CHANGES[1:2] if reader.SMOKE else CHANGES)
            print(f"{name}: resumed {resumes[row]}", flush=True)
    return figures(rounds, resumes, reasons)


def figures(
    rounds: Mapping[str, list[dict[str, Any]]], resumes: Mapping[str, dict[str, Any]], reasons: Mapping[str, str]
) -> dict[str, Any]:
    """The reader's part of the last line; prints the table."""

    def median(name: str, key: str, digits: int | None) -> float | None:
        values = [found[key] for found in rounds[name] if found[key] is not None]
        return round(statistics.median(values), digits) if values else None

    def cost_of(one: str, other: str) -> float | None:
        costs = [[found["cpu_seconds_per_1000_rows"] for found in rounds[name]] for name in (one, other)]
        least = min(map(len, costs))  # one that failed has fewer rounds
        return ratio(costs[0][:least], costs[1][:least])

    per_row = {name: median(name, "cpu_seconds_per_1000_rows", 5) for name in NAMES}
    measured = [name for name in PEERS if per_row[name] is not None]
    best = min(measured, key=lambda name: per_row[name] or 0.0) if measured else None
    result: dict[str, Any] = {
        "cpu_per_row_vs_best_peer": cost_of(best, "ours always") if best else None,
        "best_peer": best,
        "cpu_per_row_vs_gather": cost_of("ours always", "limit"),
        "cpu_per_row_vs_gather_never": cost_of("ours", "limit"),
        "cpu_per_row_of_peer_vs_ours": {name: cost_of(name, "ours always") for name in PEERS},
        "cpu_seconds_per_1000_rows": per_row,
        "rows_per_second": {name: median(name, "rows_per_second", None) for name in NAMES},
        "cold_rows_per_second": {name: median(name, "cold_rows_per_second", None) for name in NAMES},
        "mixing_entropy": {name: median(name, "entropy", 3) for name in NAMES} | {"ideal": reader.expected_entropy()},
        "resume_bit_equal": {name: resumes.get(name, {}).get("bit_equal") for name in ("ours always", *PEERS)},
        "state_bytes": {name: resumes.get(name, {}).get("state_bytes") for name in ("ours always", *PEERS)},
        "resumed": dict(resumes),
        "rows": reader.ROWS,
        "reader_reasons": dict(reasons),
        "versions": environment.PACKAGES,
    }
    print(table(result), flush=True)
    return result


def table(result: Mapping[str, Any]) -> str:
    """A line for each reader."""
    costs = ("CPU s per 1,000 rows", "to ours, always", "rows/s", "cold rows/s")
    resumed = ("resumed on other ranks, bit-equal", "state, bytes", "kind of state")
    lines = [head(["reader", *costs, "entropy, bits", "shuffled", *resumed])]
    for name in NAMES:
        plain = name.partition(",")[0]
        cells = [
            result["cpu_seconds_per_1000_rows"][name],
            result["cpu_per_row_of_peer_vs_ours"].get(name),
            result["rows_per_second"][name],
            result["cold_rows_per_second"][name],
            result["mixing_entropy"][name],
            SHUFFLES[plain],
            result["resume_bit_equal"].get(name),
            result["state_bytes"].get(name),
            STATES[plain],
        ]
        lines.append(row([name, *cells]))
    return "\n".join([*lines, f"Independent draws: {result['mixing_entropy']['ideal']} bits."])
