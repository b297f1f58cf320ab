"""Whether the files of a split are mapped."""

import os
import resource
from collections.abc import Mapping

from pipelines.host_memory import host_memory

_MOST_FILES = 10_000
"""The kernel allows 65,530 maps in a process, of which others need some too."""


def is_wise(split_bytes: int, files: int, environment: Mapping[str, str] = os.environ) -> bool:
    """Say whether rows of a split may be copied from maps of its files; otherwise they are read.

    They may where the split fits half of the memory. Of a larger one most rows come from disk, and the kernel's tables
    of the maps take 2 GiB of memory for each TiB, in every process.

    Args:
        split_bytes: Size of all rows.
        files: Number of files.
        environment: YARN sets `CONTAINER_ID`. It counts the mapped pages as the container's memory, and would kill it.
    """
    address_space, _ = resource.getrlimit(resource.RLIMIT_AS)  # `spark.executor.pyspark.memory` sets it
    if address_space != resource.RLIM_INFINITY or "CONTAINER_ID" in environment or files > _MOST_FILES:
        return False
    memory, _ = host_memory()
    return split_bytes <= memory // 2
