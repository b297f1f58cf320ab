"""The process of one rank and, with spares, the process that takes its place when it dies."""

import os
from dataclasses import replace

from pipelines.launch.rank.process import RankProcess
from pipelines.launch.rank.rank_log import RankLog
from pipelines.launch.rank.rank_main import FunctionHeader
from pipelines.launch.wire.messages import TakeOver

_MEMORY_FILES = 3


class RankProcesses:
    """The current process of the rank, and its spare."""

    def __init__(
        self, environment: dict[str, str], threads: int, *, spares: bool, fork_server: str | None = None
    ) -> None:
        """Start the first process; it waits for `begin`.

        Args:
            environment: The same as in `RankProcess`.
            threads: The same as in `RankProcess`.
            spares: Whether the rank has a spare.
            fork_server: The same as in `RankProcess`.
        """
        self.log = RankLog()
        self._environment, self._threads, self.can_replace = environment, threads, spares
        self._fork_server = fork_server
        # Only these processes can open these files, which disappear when the task ends.
        self._memory = [os.memfd_create(f"groundswell-{n}") for n in range(_MEMORY_FILES)] if spares else []
        self.current = self._start()
        self._spare: RankProcess | None = None
        self._dead: list[RankProcess] = []

    def begin(self, header: FunctionHeader, payload: bytes) -> None:
        """Hand over the pickled function."""
        self._header, self._payload = header, payload
        self.current.begin(header, payload)

    def prepare_spare(self) -> None:
        """Start a spare that calls the function and waits for its turn, if spares are on and there is none."""
        if self.can_replace and self._spare is None:
            self._spare = self._start()
            self._spare.begin(replace(self._header, is_spare=True), self._payload)

    def replace(self) -> RankProcess:
        """End the children of the dead current process, and let the spare take its place; return the dead process.

        If the spare has died or was not started, a new one starts now, which takes longer.
        """
        dead = self.current
        dead.end()
        self._dead.append(dead)
        if self._spare is not None and not self._spare.running():
            self._spare.end()
            self._dead.append(self._spare)
            self._spare = None
        self.prepare_spare()
        assert self._spare is not None
        self.current, self._spare = self._spare, None
        self.current.order(TakeOver())
        return dead

    def end(self) -> None:
        """Kill the processes and all their children."""
        for process in filter(None, (self.current, self._spare)):
            process.end()
        self.log.finish()

    def close(self) -> None:
        """Close files and pipes, after `end`."""
        for process in filter(None, (self.current, self._spare, *self._dead)):
            process.close()
        self.log.close()
        for descriptor in self._memory:
            os.close(descriptor)

    def _start(self) -> RankProcess:
        return RankProcess(
            self._environment, self._threads, log=self.log, memory=self._memory, fork_server=self._fork_server
        )
