"""Rows of an archive's metadata, checked one by one: a bad row is recorded and does not stop the others."""

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from pipelines.archives.archive import REJECTED_SCHEMA


class CheckedRows:
    """Metadata rows; bad rows are rejected, each for the first reason found."""

    def __init__(self, rows: pa.Table) -> None:
        """Start with all rows.

        Args:
            rows: A table with at least the columns `id` and `file`, the file that names the sample.
        """
        self.rows = rows
        """Rows that were not rejected."""
        self._rejected: list[pa.Table] = []
        self._unusable: list[pa.Table] = []

    def reject(
        self,
        bad: pa.Array | pa.ChunkedArray,
        reason: pa.Array | str,
        *,
        detail: pa.Array | pa.ChunkedArray | str = "",
        file: pa.Array | pa.ChunkedArray | None = None,
    ) -> None:
        """Reject rows that are no samples.

        Args:
            bad: One boolean per row of `rows`; null counts as true.
            reason: One of a few short texts, for all rows or per row; rejected rows are counted by it.
            detail: Text that says what was found, for all rows or per row.
            file: The bad file per row; by default the row's `file`.
        """
        bad = pc.fill_null(bad, True)
        if pc.any(bad).as_py():  # a copy of half a million rows takes time
            self._rejected.append(self._report(bad, reason, detail, file))
            self.rows = self.rows.filter(pc.invert(bad))

    def reject_repeated_ids(self) -> None:
        """Reject every row with the id of the row before; the rows must be sorted by id."""
        ids = self.rows["id"].combine_chunks()
        repeated = np.zeros(len(ids), bool)
        repeated[1:] = pc.equal(ids[1:], ids[:-1]).to_numpy(zero_copy_only=False)
        self.reject(pa.array(repeated), "repeated id")

    def mark_unusable(
        self,
        bad: pa.Array | pa.ChunkedArray,
        reason: pa.Array | str,
        *,
        detail: pa.Array | pa.ChunkedArray | str = "",
        file: pa.Array | pa.ChunkedArray | None = None,
    ) -> None:
        """Mark rows whose files cannot be used, without removing them; the arguments are those of `reject`.

        If a row has several reasons, the first one counts.
        """
        again = pc.is_in(self.rows["id"].combine_chunks(), self.unusable()["id"].combine_chunks())
        bad = pc.and_(pc.fill_null(bad, True), pc.invert(again))
        self._unusable.append(self._report(bad, reason, detail, file))

    def rejected(self) -> pa.Table:
        """Return the rejected rows as `REJECTED_SCHEMA`, sorted by id."""
        return _sorted(self._rejected)

    def unusable(self) -> pa.Table:
        """Return the unusable rows as `REJECTED_SCHEMA`, sorted by id."""
        return _sorted(self._unusable)

    def _report(
        self,
        bad: pa.Array | pa.ChunkedArray,
        reason: pa.Array | str,
        detail: pa.Array | pa.ChunkedArray | str,
        file: pa.Array | pa.ChunkedArray | None,
    ) -> pa.Table:
        ids, files = self.rows["id"].filter(bad), (self.rows["file"] if file is None else file).filter(bad)
        texts = [pa.repeat(text, len(ids)) if isinstance(text, str) else text.filter(bad) for text in (reason, detail)]
        return pa.table(
            [pc.fill_null(column.cast(pa.string()), "") for column in (ids, files, *texts)], schema=REJECTED_SCHEMA
        )


def _sorted(tables: list[pa.Table]) -> pa.Table:
    table = pa.concat_tables([REJECTED_SCHEMA.empty_table(), *tables])
    return table.take(pc.sort_indices(table, [(name, "ascending") for name in ("id", "reason", "detail")]))
