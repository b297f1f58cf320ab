"""The archive's index as a dataset keeps it, to find out what changed in the archive since."""

import hashlib

import pyarrow as pa


def index_digest(samples: pa.Table) -> str:
    """SHA-256 hex digest of all rows and columns of an index.

    Args:
        samples: `INDEX_SCHEMA`.
    """
    sink = _DigestSink()
    with pa.ipc.new_stream(pa.PythonFile(sink, mode="w"), samples.schema) as writer:
        writer.write_table(samples.combine_chunks(), max_chunksize=1 << 16)
    return sink.digest.hexdigest()


class _DigestSink:
    """A file that keeps the digest of what is written to it."""

    def __init__(self) -> None:
        self.digest = hashlib.sha256()
        self.closed = False

    def write(self, data: bytes) -> int:
        self.digest.update(data)
        return len(data)

    def flush(self) -> None:
        """Nothing waits to be written."""

    def close(self) -> None:
        self.closed = True
