"""The trace of some steps on every rank, from the wait for their first batch to the end of the last update.

The parts are meaningful on a CPU. On a GPU their times are those at which TensorFlow has submitted the work. There its
profiler (`training.tensorflow_profiler`) shows the kernels. If XLA compiles forward and backward pass
(`training.jit_compile`), they are one part, and no exchange starts before its end.
"""

import json
import math
import secrets
import shutil
import socket
import struct
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import tensorflow as tf

from models.compression.arithmetic.graph import Marks
from models.layers.grids import Size
from pipelines.dataset.read.reader import Batch
from pipelines.launch.rank.report import log_to_driver
from pipelines.launch.wire.transport import SECRET_BYTES, ConnectionServer, FrameConnection, connect, frame
from pipelines.storage.whole_files import copy_folder
from pipelines.training.ranks.collective import HorovodCollective, gather_json, own_address
from pipelines.training.step.loop import Trainer
from pipelines.training.step.step import Images
from pipelines.training.tracing.spans import TRACE_FILE, RankTrace, Span, chrome_trace
from pipelines.training.tracing.timeline import Timeline, read_timeline

PROFILES = "profile"
"""The folder with TensorFlow's profiles, one subfolder per rank, in the run's folder and among its artifacts.

TensorBoard shows them: every operation and, on a GPU, every kernel.
"""

_HOROVOD = "horovod.json"
_QUESTIONS = 25
_SECONDS_FOR_AN_ANSWER = 5.0
_ANSWER = struct.Struct("!d")


@dataclass(frozen=True)
class ClockOffset:
    """The offset to add to a rank's time to get the time of rank 0."""

    seconds: float
    error: float
    """Largest error in seconds. If the clocks could not be compared, it is infinite and `seconds` is 0."""


@dataclass
class _Recording:
    """The state of a recording while steps are traced."""

    offset: ClockOffset
    folder: Path
    """Temporary folder of Horovod's timeline and TensorFlow's profile."""
    spans: list[Span] = field(default_factory=list)


class StepTracer:
    """Traces the requested range of steps; every rank makes the same calls."""

    def __init__(
        self,
        steps: Sequence[int],
        *,
        done: int,
        marks: Marks,
        collective: HorovodCollective,
        folder: Path | None,
        write: Callable[[str, Path | None, int], None],
        profiles: bool,
        about: Mapping[str, Any],
    ) -> None:
        """Wait for the first step.

        Args:
            steps: First and last traced optimizer step, counted from 1.
            done: Number of steps in the checkpoint from which training continues.
            marks: Marks with the times of each step's parts.
            collective: The ranks.
            folder: Folder of the run, which all ranks can access; None: it is behind a URL and gets no files.
            write: Called on rank 0 after the last traced step with the trace, the folder of TensorFlow's profiles or
                None, and that step.
            profiles: Whether TensorFlow's profiler also records, into the folder.
            about: Further facts to write into the trace.
        """
        self._first, self._last = steps
        self._done = done
        self._marks, self._collective, self._folder, self._write = marks, collective, folder, write
        self._profiles = folder / PROFILES if profiles and folder is not None else None
        self._about = about
        self._timeline = Timeline(collective.rank)
        self._recording: _Recording | None = None
        self._step_ended: float | None = None
        if self._last <= done and collective.rank == 0:
            log_to_driver(f"training.trace_steps={list(steps)}: {done} steps are done already, so nothing is traced")

    def of_trainer(self, trainer: Trainer) -> Trainer:
        """Return a trainer whose steps are traced."""
        step, accumulate = trainer.step, trainer.accumulate

        def traced_step(
            images: Images, targets: tf.Tensor, seeds: tf.Tensor | None = None, size: Size | None = None
        ) -> tf.Tensor:
            self._done += 1
            if self._recording is None:
                return step(images, targets, seeds, size)
            self._marks.clear()
            started = time.time()
            loss = step(images, targets, seeds, size)
            float(loss)  # wait: an accelerator may have only started the step
            self._step_ended = time.time()
            self._note("step", f"step {self._done}", started, self._step_ended, self._done)
            for mark, start, end in self._marks.read():
                self._recording.spans.append(Span(mark.phase, mark.name, start, end, self._done, mark.tensors))
            if self._done == self._last:
                self.finish()
            return loss

        def traced_accumulate(
            images: Images, targets: tf.Tensor, seeds: tf.Tensor | None = None, size: Size | None = None
        ) -> None:
            assert accumulate is not None
            started = time.time()
            accumulate(images, targets, seeds, size)
            self._note("compute", "micro-batch", started, time.time(), self._done + 1)

        return replace(trainer, step=traced_step, accumulate=None if accumulate is None else traced_accumulate)

    def of_batches(self, batches: Iterator[Batch]) -> Iterator[Batch]:
        """Return the batches of an epoch and trace the waits for them."""
        while True:
            if self._recording is None and self._first <= self._done + 1 <= self._last:
                self._begin()
            asked = time.time()
            batch = next(batches, None)
            if batch is None:
                return
            if self._step_ended is not None:
                self._note("between", "between steps", self._step_ended, asked, self._done + 1)
                self._step_ended = None
            self._note("input", "next batch", asked, time.time(), self._done + 1)
            yield batch
            del batch  # the reader may reuse its memory

    def finish(self) -> None:
        """Stop, gather and write the trace if one was started; all ranks call this together."""
        recording, self._recording, self._step_ended = self._recording, None, None
        if recording is None:
            return
        self._timeline.stop()
        if self._profiles is not None:
            tf.profiler.experimental.stop()
            copy_folder(recording.folder / PROFILES, self._profiles / f"rank-{self._collective.rank}")
        offset = recording.offset
        mine = RankTrace(tuple(recording.spans), socket.gethostname(), offset.seconds, offset.error)
        ranks = [RankTrace.of_json(each) for each in gather_json(asdict(mine), self._collective)]
        if self._collective.rank == 0:
            text = json.dumps(chrome_trace(ranks, read_timeline(recording.folder / _HOROVOD), self._about))
            self._write(text, self._profiles, self._done)
            location = f"artifact {TRACE_FILE}"
            if self._folder is not None:
                (self._folder / TRACE_FILE).write_text(text)
                location = str(self._folder / TRACE_FILE)
            log_to_driver(_described(ranks, location))
        shutil.rmtree(recording.folder, ignore_errors=True)

    def _begin(self) -> None:
        offset = compare_clocks(self._collective)
        folder = Path(tempfile.mkdtemp(prefix="groundswell-timeline-"))
        self._timeline.start(folder / _HOROVOD)
        if self._profiles is not None:
            tf.profiler.experimental.start(str(folder / PROFILES))
        self._recording = _Recording(offset, folder)

    def _note(self, phase: str, name: str, start: float, end: float, step: int) -> None:
        if self._recording is not None:
            self._recording.spans.append(Span(phase, name, start, end, step))


def _described(ranks: Sequence[RankTrace], location: str) -> str:
    steps = sorted({span.step for rank in ranks for span in rank.spans})
    unknown = [number for number, rank in enumerate(ranks) if math.isinf(rank.error)]
    clocks = (
        f"the clocks of ranks {unknown} could not be compared, and their times are as they are"
        if unknown
        else f"the clocks of all ranks agree to {1000 * max(rank.error for rank in ranks):.2f} ms"
    )
    return f"trace of steps {steps[0]} to {steps[-1]}: {location}, for https://ui.perfetto.dev; {clocks}"


def compare_clocks(collective: HorovodCollective) -> ClockOffset:
    """Compare this rank's clock with that of rank 0; all ranks call this together.

    Rank 0 answers each question with its time. For the fastest of 25 answers

        offset = time in the answer - (time of the question + time of the answer's arrival) / 2
        error <= (time of the answer's arrival - time of the question) / 2

    Source: Mills 1991, "Internet time synchronization: the network time protocol", with the minimum-delay filter.

    Args:
        collective: The ranks.
    """
    secret = secrets.token_bytes(SECRET_BYTES)
    server = serve(own_address(), secret) if collective.rank == 0 else None
    address = None if server is None else [own_address(), server.port, secret.hex()]
    host, port, key = gather_json(address, collective)[0]
    offset = ClockOffset(0.0, 0.0) if collective.rank == 0 else ask(host, port, bytes.fromhex(key))
    gather_json(None, collective)  # rank 0 answers until every rank has asked
    if server is not None:
        server.close()
    return offset


def ask(host: str, port: int, secret: bytes) -> ClockOffset:
    """Ask the clock at an address; see `compare_clocks`."""
    try:
        with closing(connect(host, port, secret)) as connection:
            connection.settimeout(_SECONDS_FOR_AN_ANSWER)
            return min((_ask_once(connection) for _ in range(_QUESTIONS)), key=lambda offset: offset.error)
    except (OSError, ValueError, struct.error):  # a firewall, or half an answer: a trace must not end a training
        return ClockOffset(0.0, math.inf)


def _ask_once(connection: FrameConnection) -> ClockOffset:
    asked = time.time()
    connection.send(frame(b""))
    answer, _ = connection.receive()
    arrived = time.time()
    (there,) = _ANSWER.unpack(answer)
    return ClockOffset(there - (asked + arrived) / 2, (arrived - asked) / 2)


def serve(host: str, secret: bytes) -> ConnectionServer:
    """Answer the questions of other ranks until the server is closed."""
    return ConnectionServer(host, secret, _answer, maximum_data_bytes=0, name="groundswell-clock")


def _answer(connection: FrameConnection) -> None:
    while True:
        connection.receive()
        connection.send(frame(_ANSWER.pack(time.time())))
