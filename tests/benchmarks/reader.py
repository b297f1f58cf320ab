"""Reading 160 kB rows (three image groups) as batches of 256 in a shuffled order, until they are tensors.

    make bench NAME=reader
    make bench NAME=reader ARGS=--smoke

`ours` reads with `verify=never`, which is also what `first_epoch` does from the second epoch on; `ours always` computes
every row's checksum. Beside them, on the same rows: Petastorm's `make_petastorm_dataset` with 2, 4 and 10 threads, a
`tf.data` pipeline over TFRecord, and the limit: numpy copies the same rows from mapped files into warm memory on 2
threads, and does nothing else. Ours may exceed it, since its copies go past the processor's caches. Each measurement is
a process of its own with the launcher's environment. All run in turn, several rounds. Also measured: two processes at
once, a cold page cache, memory over ten epochs, and how well the shuffles mix rows that are sorted by class. The last
figure is the part of a ResNet-50 training step that waits for input in the first epoch, with `verify=first_epoch`.

The last line is JSON. `--smoke` measures a few rows for a moment, all in one process; what needs several processes is
null then, and the figures mean nothing.
"""

import io
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray
from peer_parts.measures import drop_from_memory, entropy

from tests.benchmarks.parts.figures import ratio
from tests.patience import patient

SMOKE = "--smoke" in sys.argv
ROWS = 96 if SMOKE else int(os.environ.get("ROWS", "6000"))
CLASSES = 19
BATCH_SIZE = 16 if SMOKE else 256
ROW_GROUP_ROWS, ROW_GROUPS_PER_SHARD = (12, 4) if SMOKE else (262, 4)
SECONDS = 0.1 if SMOKE else 6.0
ROUNDS = 1 if SMOKE else 3
TRAINING_STEPS, TRAINING_BATCH = (1, 2) if SMOKE else (12, 32)
MEMORY_EPOCHS = 2 if SMOKE else 10
THREAD_COUNTS = (2, 4, 10)
Source = Iterator[tuple[int, NDArray[Any], Mapping[str, Any]]]
"""Of each batch: how many rows, their labels, and the images by group, uint16 but for Petastorm."""


class Noise:
    """An archive without files, whose samples have random pixels."""

    root, read_settings = "", {}

    def __init__(self) -> None:
        from pipelines.archives.archive import ArchiveDescription
        from pipelines.archives.bigearthnet.patch import GROUPS

        names = tuple(f"class {number}" for number in range(CLASSES))
        self.description = ArchiveDescription("bigearthnet_v2", "multi_label", names, GROUPS)
        self._random = np.random.default_rng(0)

    def read(self, paths: Sequence[str], out: Mapping[str, NDArray[Any]]) -> None:
        """Fill the arrays."""
        for pixels in out.values():
            pixels[...] = self._random.integers(0, 10_000, pixels.shape)


def write_dataset(folder: Path) -> None:
    """Write rows sorted by class as a dataset; the same rows as TFRecord."""
    import pyarrow as pa

    from pipelines.archives.archive import index_table
    from pipelines.dataset.format.manifest import write_manifest
    from pipelines.dataset.format.petastorm import write_petastorm_metadata
    from pipelines.dataset.prepare.notes import summarise
    from pipelines.dataset.prepare.shard import ShardPlan, write_shard
    from pipelines.storage.folder import Location
    from pipelines.storage.lease import PROGRESS_FOLDER

    for name in ("train", PROGRESS_FOLDER):
        (folder / name).mkdir(parents=True)
    archive, written, whole = Noise(), [], ROW_GROUP_ROWS * ROW_GROUPS_PER_SHARD
    for number, first in enumerate(range(0, ROWS, whole)):
        rows = range(first, min(first + whole, ROWS))
        labels, nothing = [[row * CLASSES // ROWS] for row in rows], [[] for _ in rows]
        ids, split = [f"{row:07d}" for row in rows], ["train"] * len(rows)
        samples, stream = index_table({"id": ids, "split": split, "labels": labels, "paths": nothing}), io.BytesIO()
        with pa.ipc.new_stream(stream, samples.schema) as writer:
            writer.write_table(samples)
        name = f"train/part-{number:05d}.parquet"
        plan = ShardPlan(name, stream.getvalue(), len(rows), ROW_GROUP_ROWS, digest="benchmark")
        written.append(write_shard(plan, archive, folder))
    manifest = summarise(archive.description, {"train": written}, {}, {}, "benchmark", [])
    write_petastorm_metadata(Location.at(folder / "train"), manifest.splits["train"].shards, manifest.groups, CLASSES)
    write_manifest(manifest, folder)
    write_tfrecords(folder, whole)


def write_tfrecords(folder: Path, rows_per_file: int) -> None:
    """Write the rows of the dataset as TFRecord."""
    import tensorflow as tf

    from pipelines.dataset.read.reader import SplitReader

    reader = SplitReader(folder, "train")
    for number, first in enumerate(range(0, ROWS, rows_per_file)):
        with tf.io.TFRecordWriter(str(folder / f"{number:05d}.tfrecord")) as records:
            for row in range(first, min(first + rows_per_file, ROWS)):
                batch = reader.gather(np.array([row]))
                values = {**batch.images, "labels": batch.targets.astype(np.uint8)}
                features = {
                    name: tf.train.Feature(bytes_list=tf.train.BytesList(value=[value.tobytes()]))
                    for name, value in values.items()
                }
                example = tf.train.Example(features=tf.train.Features(feature=features))
                records.write(example.SerializeToString())


def ours(folder: Path, verify: Literal["first_epoch", "always", "never"] = "never") -> Source:
    """Batches without end."""
    from pipelines.dataset.read.reader import ReaderSettings, SplitReader, training_batches
    from pipelines.training.step.tensors import image_tensors

    reader = SplitReader(folder, "train", ReaderSettings(verify=verify))
    pool = reader.pool(BATCH_SIZE)
    for epoch in range(1_000_000):
        for batch in training_batches(reader, seed=0, epoch=epoch, global_batch_size=BATCH_SIZE, pool=pool):
            tensors = image_tensors(batch.images)
            yield len(batch.rows), batch.targets, tensors
            del tensors, batch


def petastorm(folder: Path, threads: int) -> Source:
    """Petastorm's own way to `tf.data`."""
    from petastorm import make_reader
    from petastorm.tf_utils import make_petastorm_dataset

    from pipelines.archives.bigearthnet.patch import GROUPS

    warnings.simplefilter("ignore")
    with make_reader(
        (folder / "train").as_uri(), num_epochs=None, workers_count=threads, shuffle_rows=True, seed=1
    ) as reader:
        for batch in make_petastorm_dataset(reader).batch(BATCH_SIZE, drop_remainder=True).prefetch(2):
            yield BATCH_SIZE, batch.labels.numpy(), {group.name: getattr(batch, group.name) for group in GROUPS}


def tfrecord(folder: Path) -> Source:
    """A `tf.data` pipeline as its guide recommends it."""
    import tensorflow as tf

    from pipelines.archives.bigearthnet.patch import GROUPS

    features = {name: tf.io.FixedLenFeature([], tf.string) for name in ("labels", *(group.name for group in GROUPS))}

    def decode(examples: Any) -> Any:
        parsed = tf.io.parse_example(examples, features)
        images = {
            group.name: tf.reshape(tf.io.decode_raw(parsed[group.name], tf.uint16), (-1, *group.shape))
            for group in GROUPS
        }
        return images, tf.io.decode_raw(parsed["labels"], tf.uint8)

    files = sorted(map(str, folder.glob("*.tfrecord")))
    data = tf.data.Dataset.from_tensor_slices(files).shuffle(len(files)).interleave(tf.data.TFRecordDataset, 2)
    data = data.repeat().shuffle(512).batch(BATCH_SIZE, drop_remainder=True)
    for images, labels in data.map(decode, num_parallel_calls=2).prefetch(2):
        yield BATCH_SIZE, labels.numpy(), images


def limit(folder: Path) -> Source:
    """Random rows of the mapped files copied into warm memory by 2 threads, and nothing else."""
    import mmap

    from pipelines.dataset.format.layout import open_row_groups, value_bytes, value_prefix
    from pipelines.dataset.format.manifest import read_manifest
    from pipelines.dataset.format.rows import fixed_fields

    manifest = read_manifest(folder)
    fields = fixed_fields(manifest.groups, CLASSES)
    del fields["labels"]
    views: list[list[NDArray[np.uint8]]] = [[] for _ in fields]
    for shard in manifest.splits["train"].shards:
        for group in open_row_groups(folder / shard.file, fields, checksums=False):
            file = np.frombuffer(mmap.mmap(group.file.descriptor, 0, access=mmap.ACCESS_READ), np.uint8)
            for column, (start, field) in enumerate(zip(group.starts, fields.values(), strict=True)):
                stride, prefix = value_bytes(*field), len(value_prefix(*field))
                whole = file[start : start + group.rows * stride].reshape(group.rows, stride)
                views[column] += list(whole[:, prefix:])
    memory = [[np.zeros((BATCH_SIZE, len(view[0])), np.uint8) for view in views] for _ in range(4)]
    random = np.random.default_rng(0)

    def copy(rows: list[int], out: list[NDArray[np.uint8]], first: int) -> None:
        for view, target in zip(views, out, strict=True):
            for place, row in enumerate(rows, first):
                target[place] = view[row]

    with ThreadPoolExecutor(2) as threads:
        for number in range(1_000_000):
            rows = random.integers(0, ROWS, BATCH_SIZE).tolist()
            half = BATCH_SIZE // 2
            parts = [threads.submit(copy, rows[first : first + half], memory[number % 4], first) for first in (0, half)]
            for part in parts:
                part.result()
            yield BATCH_SIZE, np.zeros(0), {}


SOURCES: dict[str, Callable[[Path], Source]] = {
    "ours": ours,
    "ours always": lambda folder: ours(folder, "always"),
    "limit": limit,
    "tfrecord": tfrecord,
    **{f"petastorm {count}": lambda folder, count=count: petastorm(folder, count) for count in THREAD_COUNTS},
}


def measure_rate(folder: Path, name: str) -> float:
    """Rows per second after one epoch that warms memory and caches up."""
    batches = SOURCES[name](folder)
    warmed, rows = 0, 0
    while warmed < ROWS:
        warmed += next(batches)[0]
    started = time.perf_counter()
    while time.perf_counter() - started < SECONDS:
        rows += next(batches)[0]
    return rows / (time.perf_counter() - started)


def measure_cold(folder: Path, _: str) -> float:
    """Rows per second of the first epoch, verified, with nothing in the page cache."""
    import tensorflow as tf

    tf.zeros(1)
    drop_from_memory(folder / "train")
    batches, rows = ours(folder, "first_epoch"), 0
    started = time.perf_counter()
    while rows < ROWS - BATCH_SIZE:
        rows += next(batches)[0]
    return rows / (time.perf_counter() - started)


def measure_entropy(folder: Path, name: str) -> float:
    """Mean over one epoch's batches of the entropy of their classes, in bits; the rows are sorted by class."""
    batches = SOURCES[name](folder)
    return statistics.mean(entropy(next(batches)[1], CLASSES) for _ in range(ROWS // BATCH_SIZE))


def measure_memory(folder: Path, _: str) -> list[float]:
    """Resident MiB after each of ten epochs, files' pages not counted."""
    import psutil

    batches, curve = ours(folder), []
    for _ in range(MEMORY_EPOCHS):
        for _ in range(ROWS // BATCH_SIZE):
            next(batches)
        memory = psutil.Process().memory_info()
        curve.append(round((memory.rss - memory.shared) / 2**20, 1))
    return curve


def measure_training(folder: Path, _: str) -> float:
    """Part of the time in which ResNet-50's training step waits for its batch, in the first epoch, on all cores."""
    import keras

    from conf.sections.networks import ResNetCifarConfig, ResNetConfig
    from pipelines.dataset.read.reader import SplitReader, training_batches
    from pipelines.training.ranks.collective import HorovodCollective
    from pipelines.training.setup.recipe import input_groups
    from pipelines.training.step.loop import Trainer, train_epoch
    from tests.benchmarks.parts import training

    keras.utils.set_random_seed(0)
    reader = SplitReader(folder, "train")
    network = ResNetCifarConfig(depth=2) if SMOKE else ResNetConfig()
    model = training.network(input_groups(reader.manifest, None), network, CLASSES)
    collective = HorovodCollective()
    parts = training.lars_training(model, training.exchange_of(collective, bucket_mib=None))
    last = len(reader) // TRAINING_BATCH - TRAINING_STEPS
    batches = training_batches(reader, seed=0, epoch=0, global_batch_size=TRAINING_BATCH, start_step=last)
    result = train_epoch(batches, Trainer(parts.step, parts.optimizer, lambda number: 0.001, collective), first_step=0)
    return result.input_wait_fraction


MEASURES: dict[str, Callable[[Path, str], Any]] = {
    "rate": measure_rate,
    "cold": measure_cold,
    "entropy": measure_entropy,
    "memory": measure_memory,
    "training": measure_training,
}


def measure(folder: Path, name: str, source: str = "ours", *, times: int = 1) -> list[Any]:
    """Measure in as many processes of their own at once; in a smoke run once, in this process."""
    from pipelines.launch.rank.process import ALLOCATOR

    if SMOKE:
        return [MEASURES[name](folder, source)]
    environment = {**os.environ, **ALLOCATOR, "CUDA_VISIBLE_DEVICES": "-1", "TF_CPP_MIN_LOG_LEVEL": "3"}
    command = [sys.executable, __file__, str(folder), name, source]
    processes = [
        subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
        for _ in range(times)
    ]
    values = []
    for process in processes:
        output, _ = process.communicate(timeout=patient(300))
        if process.returncode:
            raise RuntimeError(f"{process.args!r} failed")
        values.append(json.loads(output.splitlines()[-1]))
    return values


def main() -> None:
    """Write, measure in turn, print the table and the JSON line."""
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        write_dataset(folder)
        rates: dict[str, list[float]] = {name: [] for name in SOURCES}
        pairs: list[float] = []
        for number in range(ROUNDS):
            for name in SOURCES:
                rates[name] += measure(folder, "rate", name)
            line = ", ".join(f"{name} {values[-1]:,.0f}" for name, values in rates.items())
            print(f"round {number + 1}: {line} rows/s", flush=True)
            if not SMOKE:
                pairs.append(sum(measure(folder, "rate", times=2)))
                print(f"two processes of ours {pairs[-1]:,.0f} rows/s", flush=True)
        cold = statistics.median([measure(folder, "cold")[0] for _ in range(ROUNDS)])
        entropy = {name: measure(folder, "entropy", name)[0] for name in ("ours", "petastorm 10", "tfrecord")}
        (memory,) = measure(folder, "memory")
        (wait,) = measure(folder, "training")
    median = {name: statistics.median(values) for name, values in rates.items()}
    best = max((name for name in rates if name.startswith("petastorm")), key=lambda name: median[name])

    ideal = expected_entropy()
    print(f"cold page cache {cold:,.0f} rows/s; memory by epoch, MiB: {memory}")
    print(f"class entropy of a batch, bits: {entropy}, independent draws {ideal:.3f}")
    figures = {
        "rows_per_second": round(median["ours"]),
        "ratio_vs_petastorm": ratio(rates["ours"], rates[best], 2),
        "ratio_vs_limit": ratio(rates["ours"], rates["limit"], 2),
        "ratio_vs_tfrecord": ratio(rates["ours"], rates["tfrecord"], 2),
        "ratio_always_vs_never": ratio(rates["ours always"], rates["ours"], 2),
        "ratio_always_vs_petastorm": ratio(rates["ours always"], rates[best], 2),
        "input_wait_fraction": round(wait, 4),
        "two_processes_ratio_vs_petastorm": ratio(pairs, rates[best], 2),
        "two_processes_ratio_vs_limit": ratio(pairs, rates["limit"], 2),
        "cold_rows_per_second": round(cold),
        "cold_ratio_vs_petastorm_warm": round(cold / median[best], 2),
        "rows_per_second_of": {name: round(value) for name, value in median.items()},
        "memory_mib_by_epoch": memory,
        "class_entropy_bits": {**{name: round(value, 3) for name, value in entropy.items()}, "ideal": ideal},
        "rows": ROWS,
        "cores": os.cpu_count(),
    }
    print(json.dumps(figures))


def expected_entropy() -> float:
    """Of batches drawn without any order from equally frequent classes, simulated."""
    random = np.random.default_rng(0)
    order = [random.permutation(np.arange(ROWS) * CLASSES // ROWS)[:BATCH_SIZE] for _ in range(50)]
    return round(statistics.mean(entropy(np.eye(CLASSES)[batch], CLASSES) for batch in order), 3)


if __name__ == "__main__":
    if len(sys.argv) > 2:
        print(json.dumps(MEASURES[sys.argv[2]](Path(sys.argv[1]), sys.argv[3])))
    else:
        main()
