"""The rivals' readers, in an environment of their own: writes their files, measures their rates, resumes their epochs.

    python rival_readers.py write NAME FOLDER
    python rival_readers.py rates NAME FOLDER SECONDS
    python rival_readers.py resume NAME FOLDER SAVE_AFTER STATE STATE_FILE

Every reader has two threads or worker processes, and gives batches of uint16 images by group. `FOLDER/rows` has all
rows as NumPy files. Ranks are told by RANK and WORLD_SIZE. The last line is JSON.

LitData and MosaicML Streaming are read by their own loaders, whose worker processes hand batches over in shared memory
(`litdata`, `streaming`). The same without workers, in the process that trains, is cheaper and not ahead of it
(`litdata, no workers`, `streaming, no workers`). Grain reads ArrayRecord with two threads, each a whole batch. Lance
reads by `take`, two batches at once.
"""

import json
import os
import sys
import tempfile
from collections import deque
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
from measures import Batches, Steps, describe, rates, resume

WORKERS = 2
SHARD_BYTES = 1 << 26
"""Of a chunk of LitData and a shard of MosaicML Streaming: what both recommend."""


def rows_of(folder: Path) -> Iterator[dict[str, Any]]:
    """Each row's image groups and labels."""
    arrays = {path.stem: np.load(path, mmap_mode="r") for path in sorted((folder / "rows").glob("*.npy"))}
    for number in range(describe(folder)["rows"]):
        yield {name: np.ascontiguousarray(values[number]) for name, values in arrays.items()}


def split(batch: dict[str, Any]) -> tuple[int, Any, dict[str, Any]]:
    """The batch as `measures` wants it."""
    return len(batch["labels"]), batch["labels"], {name: value for name, value in batch.items() if name != "labels"}


def write_litdata(folder: Path, data: Path) -> None:
    """In one process: its `optimize` does the same in several."""
    from litdata.streaming.cache import Cache

    cache = Cache(str(data), chunk_bytes=SHARD_BYTES)
    for number, row in enumerate(rows_of(folder)):
        cache[number] = row
    cache.done()
    cache.merge(1)


def litdata_loader(data: Path, batch_size: int, workers: int) -> Any:
    """Its loader; chunks are shuffled, and the rows within them.

    `batch_decode=0` decodes each row once. By default it decodes windows of 256 rows, of which rows in another order
    find few in its cache: 58 rows were decoded for each that was given, at over 20 times the processor time.
    """
    from litdata import StreamingDataLoader, StreamingDataset

    dataset = StreamingDataset(str(data), shuffle=True, drop_last=True, seed=0, batch_decode=0)
    persistent = {"persistent_workers": True} if workers else {}
    return StreamingDataLoader(dataset, batch_size=batch_size, num_workers=workers, drop_last=True, **persistent)


def litdata(folder: Path, workers: int = WORKERS) -> Batches:
    """Its own loader."""
    batch_size = describe(folder.parent)["batch_size"]
    loader = litdata_loader(folder, batch_size, workers)
    while True:
        for batch in loader:
            if len(batch["labels"]) == batch_size:
                yield split(batch)


def litdata_steps(folder: Path, rank: int, size: int, state: Any) -> Steps:
    """State: `StreamingDataLoader.state_dict()`."""
    return steps_of(litdata_loader(folder, describe(folder.parent)["batch_size"] // size, WORKERS), state)


def steps_of(loader: Any, state: Any) -> Steps:
    """The rest of an epoch of a loader that has a state."""
    if state is not None:
        loader.load_state_dict(state)
    for batch in loader:
        yield split(batch)[2], loader.state_dict


def write_streaming(folder: Path, data: Path) -> None:
    """Its arrays of a fixed dtype and shape, uncompressed."""
    import_streaming()
    from streaming import MDSWriter

    description = describe(folder)
    columns = {name: f"ndarray:uint16:{','.join(map(str, shape))}" for name, shape in description["groups"].items()}
    columns["labels"] = f"ndarray:uint8:{description['classes']}"
    with MDSWriter(out=str(data), columns=columns, size_limit=SHARD_BYTES) as writer:
        for row in rows_of(folder):
            writer.write(row)


def import_streaming() -> None:
    """It imports torchvision for datasets that are not used here; a PyTorch for CPUs may have none that fits."""
    import importlib.machinery
    import types

    try:
        import torchvision  # noqa: F401
    except (ImportError, RuntimeError):
        for name in [name for name in sys.modules if name.partition(".")[0] == "torchvision"]:
            del sys.modules[name]
        members = {"datasets": "VisionDataset", "transforms": "", "transforms.functional": "to_tensor"}
        for part, member in {"": "", **members}.items():
            name = f"torchvision.{part}".rstrip(".")
            sys.modules[name] = types.ModuleType(name)
            sys.modules[name].__spec__ = importlib.machinery.ModuleSpec(name, None)
            if member:
                setattr(sys.modules[name], member, object)


def streaming_loader(data: Path, batch_size: int, workers: int) -> Any:
    """Its loader, with its default shuffle `py1e`."""
    import_streaming()
    from streaming import StreamingDataLoader, StreamingDataset

    dataset = StreamingDataset(local=str(data), shuffle=True, batch_size=batch_size, shuffle_seed=0)
    persistent = {"persistent_workers": True} if workers else {}
    return StreamingDataLoader(dataset, batch_size=batch_size, num_workers=workers, drop_last=True, **persistent)


def streaming(folder: Path, workers: int = WORKERS) -> Batches:
    """Its own loader."""
    loader = streaming_loader(folder, describe(folder.parent)["batch_size"], workers)
    while True:
        yield from map(split, loader)


def streaming_steps(folder: Path, rank: int, size: int, state: Any) -> Steps:
    """State: `StreamingDataLoader.state_dict()`."""
    return steps_of(streaming_loader(folder, describe(folder.parent)["batch_size"] // size, WORKERS), state)


def write_grain(folder: Path, data: Path) -> None:
    """ArrayRecord as Grain wants it for random access, uncompressed."""
    from array_record.python.array_record_module import ArrayRecordWriter

    data.mkdir()
    writer = ArrayRecordWriter(str(data / "rows.array_record"), "group_size:1,uncompressed")
    for row in rows_of(folder):
        writer.write(b"".join(row[name].tobytes() for name in sorted(row)))
    writer.close()


def grain_rows(data: Path) -> Any:
    """All rows in a global shuffle, parsed without a copy."""
    import grain

    description = describe(data.parent)
    fields: dict[str, tuple[tuple[int, ...], Any]] = {
        name: (shape, np.uint16) for name, shape in description["groups"].items()
    }
    fields["labels"] = ((description["classes"],), np.uint8)

    def parse(record: bytes) -> dict[str, Any]:
        row, start = {}, 0
        for name, (shape, dtype) in sorted(fields.items()):
            count = int(np.prod(shape))
            row[name] = np.frombuffer(record, dtype, count, start).reshape(shape)
            start += row[name].nbytes
        return row

    source = grain.sources.ArrayRecordDataSource([str(data / "rows.array_record")])
    return grain.MapDataset.source(source).shuffle(seed=0).map(parse)


def grain_options() -> Any:
    """Two threads."""
    import grain

    return grain.ReadOptions(num_threads=WORKERS, prefetch_buffer_size=4)


def grain(folder: Path) -> Batches:
    """A `MapDataset` whose batches two threads make."""
    batch_size = describe(folder.parent)["batch_size"]
    rows = grain_rows(folder)
    batches = rows.repeat().batch(batch_size, drop_remainder=True)
    yield from map(split, batches.to_iter_dataset(grain_options()))


def grain_steps(folder: Path, rank: int, size: int, state: Any) -> Steps:
    """State: that of its `ElasticIterator`, which is meant for another number of shards."""
    from grain import experimental, sharding

    shards = sharding.ShardOptions(rank, size, drop_remainder=True)
    batch_size, rows = describe(folder.parent)["batch_size"], grain_rows(folder)
    # It does not drop the last rows of an epoch by itself.
    whole = rows[: len(rows) // batch_size * batch_size]
    iterator = iter(experimental.ElasticIterator(whole, batch_size, shards, read_options=grain_options()))
    if state is not None:
        iterator.set_state(state)
    for batch in iterator:
        yield split(batch)[2], iterator.get_state


def write_lance(folder: Path, data: Path) -> None:
    """Columns of lists of fixed size, in its default version of the format."""
    import lance
    import pyarrow as pa

    fields = {name: (shape, pa.uint16()) for name, shape in describe(folder)["groups"].items()}
    fields["labels"] = ((describe(folder)["classes"],), pa.uint8())
    schema = pa.schema([(name, pa.list_(dtype, int(np.prod(shape)))) for name, (shape, dtype) in fields.items()])

    def parts() -> Iterator[pa.RecordBatch]:
        for row in rows_of(folder):
            values = [pa.array(row[field.name].ravel(), field.type.value_type) for field in schema]
            columns = [
                pa.FixedSizeListArray.from_arrays(value, field.type.list_size)
                for value, field in zip(values, schema, strict=True)
            ]
            yield pa.record_batch(columns, schema=schema)

    lance.write_dataset(pa.RecordBatchReader.from_batches(schema, parts()), str(data))


def lance(folder: Path) -> Batches:
    """`take` by a permutation of all rows; two threads take batches ahead."""
    import lance

    description = describe(folder.parent)
    shapes = {**description["groups"], "labels": (description["classes"],)}
    batch_size, rows = description["batch_size"], description["rows"]
    dataset, random = lance.dataset(str(folder)), np.random.default_rng(0)

    def take(part: Any) -> tuple[int, Any, dict[str, Any]]:
        table = dataset.take(part)
        columns = {name: table[name].combine_chunks().flatten().to_numpy() for name in shapes}
        return split({name: column.reshape(-1, *shapes[name]) for name, column in columns.items()})

    with ThreadPoolExecutor(WORKERS) as threads:
        ahead: deque[Any] = deque()
        while True:
            order = random.permutation(rows)[: rows // batch_size * batch_size]
            for part in order.reshape(-1, batch_size):
                ahead.append(threads.submit(take, part))
                if len(ahead) > WORKERS:
                    yield ahead.popleft().result()


WRITERS = {"litdata": write_litdata, "streaming": write_streaming, "grain": write_grain, "lance": write_lance}
READERS = {
    "litdata": litdata,
    "litdata, no workers": lambda folder: litdata(folder, workers=0),
    "streaming": streaming,
    "streaming, no workers": lambda folder: streaming(folder, workers=0),
    "grain": grain,
    "lance": lance,
}
STEPS = {"litdata": litdata_steps, "streaming": streaming_steps, "grain": grain_steps}


def join_ranks(rank: int, size: int, meeting: Path) -> None:
    """For readers that ask PyTorch who they are; the ranks find each other by a file and talk over loopback."""
    if size > 1:
        import torch.distributed as dist

        os.environ["GLOO_SOCKET_IFNAME"] = "lo"
        dist.init_process_group("gloo", init_method=f"file://{meeting}", rank=rank, world_size=size)


def main(task: str, name: str, folder: Path, *rest: str) -> Any:
    """Do the task."""
    data = folder / name.partition(",")[0]
    if task == "write":
        WRITERS[name](folder, data)
        return {"mib": sum(path.stat().st_size for path in data.rglob("*") if path.is_file()) / 2**20}
    if task == "rates":
        return rates(folder, data, READERS[name], float(rest[0]), pixels=True)
    if name != "grain":
        join_ranks(int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"]), Path(rest[2]).with_suffix(".meeting"))
    return resume(STEPS[name], data, *rest)


if __name__ == "__main__":
    # What libraries leave behind, and print, must neither keep the process nor stand behind the last line.
    with tempfile.TemporaryDirectory() as scratch:
        os.chdir(scratch)
        result = main(sys.argv[1], sys.argv[2], Path(sys.argv[3]), *sys.argv[4:])
        print(json.dumps(result), flush=True)
