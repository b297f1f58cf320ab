"""The predictions as a Delta table: the same Parquet files, and a log of one version that lists them."""

import json
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path, PurePosixPath

from pipelines.scoring.output.output import DELTA_LOG_FILE, WrittenPart
from pipelines.scoring.output.write import PREDICTION_SCHEMA
from pipelines.storage.folder import Location


def write_delta_log(output: Location, parts: Sequence[WrittenPart], description: str) -> None:
    """Make a folder of predictions a Delta table, of protocol version 1 for readers and 2 for writers.

    The log is made in a temporary folder and written like every other file here: atomically, with the storage's own
    credentials. Delta's own commit needs a rename that fails if the name exists, which not every storage has.

    Args:
        output: Folder of the predictions.
        parts: All parts of the predictions, which are the files of the table.
        description: Description of the table.
    """
    from deltalake import Schema
    from deltalake.transaction import AddAction, create_table_with_add_actions

    now = int(time.time() * 1000)
    actions = [
        AddAction(part.file, part.size, {}, now, True, json.dumps({"numRecords": part.rows}))
        for part in parts
        if part.rows
    ]
    with tempfile.TemporaryDirectory(prefix="groundswell-") as temporary:
        create_table_with_add_actions(
            temporary, Schema.from_arrow(PREDICTION_SCHEMA), actions, name="predictions", description=description
        )
        lines = Path(temporary, DELTA_LOG_FILE).read_text().splitlines()
    committed = json.loads(lines[0])
    committed["commitInfo"]["operationParameters"]["location"] = str(output)
    output.make(str(PurePosixPath(DELTA_LOG_FILE).parent))
    output.write(DELTA_LOG_FILE, "\n".join([json.dumps(committed), *lines[1:], ""]).encode())
