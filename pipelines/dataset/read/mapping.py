"""Decides whether the files of a split are mapped."""

import os
import resource
from collections.abc import Mapping

from pipelines.machine.proc import host_memory

_MOST_FILES = 10_000
"""The kernel allows 65,530 maps in a process, and other parts of it need maps too."""


def is_wise(split_bytes: int, files: int, environment: Mapping[str, str] = os.environ) -> bool:
    """Return whether rows may be copied from maps of their files; otherwise they are read.

    Maps are used if all rows of a reader fit half of the memory. Most rows of a larger reader come from disk. The
    kernel's tables of the maps take 2 GiB of memory for each TiB, in every process.

    Args:
        split_bytes: Size of all rows of the reader: those of a split, or of the shards that one task scores.
        files: Largest number of files.
        environment: Environment variables. YARN sets `CONTAINER_ID`; it kills containers with too many mapped pages.
    """
    address_space, _ = resource.getrlimit(resource.RLIMIT_AS)  # `spark.executor.pyspark.memory` sets it
    if address_space != resource.RLIM_INFINITY or "CONTAINER_ID" in environment or files > _MOST_FILES:
        return False
    memory, _ = host_memory()
    return split_bytes <= memory // 2
