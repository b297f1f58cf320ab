"""Preparation end to end, beside rasterio + rows of Python objects + `createDataFrame`, on a generated archive.

    make bench NAME=prepare
    make bench NAME=prepare ARGS=--smoke

Also measured: the memory of the executors' Python workers. Where the sample data exists, so are the time and memory to
plan the 549,488 patches of the official metadata; otherwise those figures are null.

The last line is JSON. `--smoke` prepares a few patches once and plans none; its figures mean nothing.
"""

import json
import multiprocessing
import os
import resource
import shutil
import statistics
import sys
import tempfile
import threading
import time
import warnings
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pyarrow.parquet as pq
from pyspark.sql import SparkSession

from jobs.shell.session import spark_session
from pipelines.archives.bigearthnet.nomenclature import BIGEARTHNET_19
from pipelines.archives.bigearthnet.patch import GROUPS
from pipelines.archives.bigearthnet.v2 import BigEarthNetV2
from pipelines.archives.synthetic.files import generate_bigearthnet_v2
from pipelines.dataset.format.rows import fixed_fields
from pipelines.dataset.prepare.writer import prepare_dataset
from tests.benchmarks.parts.figures import ratio

SMOKE = "--smoke" in sys.argv
PATCHES = 40 if SMOKE else int(os.environ.get("PATCHES", "5000"))
ROWS_PATCHES = 8 if SMOKE else 200
ROUNDS = 1 if SMOKE else 3
OFFICIAL = Path(__file__).parents[3] / "shared" / "data" / "bigearthnet_v2_full_metadata"


@contextmanager
def peak_memory() -> Iterator[list[float]]:
    """Sample the resident sets of Spark's Python workers; give a list that has all sizes in MiB at the end."""
    sizes, stop = [0.0], threading.Event()

    def watch() -> None:
        while not stop.wait(0.05):
            for process in psutil.Process().children(recursive=True):
                with suppress(psutil.Error):
                    command = " ".join(process.cmdline())
                    if "pyspark.daemon" in command or "pyspark/daemon" in command:
                        sizes.append(process.memory_info().rss / 2**20)

    thread = threading.Thread(target=watch, daemon=True)
    thread.start()
    yield sizes
    stop.set()
    thread.join()


def rate_of_rows(spark: SparkSession, root: Path, folder: Path) -> float:
    """Measure the usual way, in patches per second: rasterio, a Row per patch, `createDataFrame`, `write.parquet`."""
    from petastorm.codecs import NdarrayCodec, ScalarCodec
    from petastorm.etl.dataset_metadata import materialize_dataset
    from petastorm.unischema import Unischema, UnischemaField
    from pyspark.sql.types import StringType

    fields = [UnischemaField("id", np.str_, (), ScalarCodec(StringType()), False)]
    for name, (shape, dtype) in fixed_fields(GROUPS, len(BIGEARTHNET_19)).items():
        fields.append(UnischemaField(name, dtype.type, shape, NdarrayCodec(), False))
    schema = Unischema("Sample", fields)
    table = pq.read_table(root / "metadata.parquet").slice(0, ROWS_PATCHES)
    records = [(row["patch_id"], row["labels"]) for row in table.to_pylist()]

    def to_row(record: tuple[str, list[str]]) -> Any:
        import rasterio
        from petastorm.unischema import dict_to_spark_row

        name, labels = record
        patch = root / "BigEarthNet-S2" / name.rsplit("_", 2)[0] / name
        images = {}
        for group in GROUPS:
            bands = []
            for band in group.bands:
                with rasterio.open(patch / f"{name}_{band}.tif") as file:
                    bands.append(file.read(1))
            images[group.name] = np.stack(bands, axis=-1)
        vector = np.array([name in labels for name in BIGEARTHNET_19], np.uint8)
        return dict_to_spark_row(schema, {"id": name, "labels": vector, **images})

    started = time.perf_counter()
    with materialize_dataset(spark, (folder / "rows").as_uri(), schema, 40):
        rows = spark.sparkContext.parallelize(records, 2).map(to_row)
        frame = spark.createDataFrame(rows, schema.as_spark_schema())
        frame.write.option("compression", "none").parquet((folder / "rows").as_uri())
    seconds = time.perf_counter() - started
    shutil.rmtree(folder / "rows")
    return len(records) / seconds


def plan_official() -> tuple[int, int, float, float]:
    """Index and plan every official patch, its folder on disk; patches, shards, seconds and this process's peak MiB."""
    from pipelines.dataset.prepare.plan import plan_shards

    with tempfile.TemporaryDirectory() as temporary:
        root = Path(temporary)
        for file in OFFICIAL.iterdir():
            shutil.copy(file, root)
            for name in pq.read_table(file, columns=["patch_id"])["patch_id"].to_pylist():
                (root / "BigEarthNet-S2" / name.rsplit("_", 2)[0] / name).mkdir(parents=True)
        archive = BigEarthNetV2(str(root), include_flagged=True)
        started = time.perf_counter()
        index = archive.index()
        plans = plan_shards(archive, index, row_group_mib=40, row_groups_per_shard=4, seed=0)
        seconds = time.perf_counter() - started
    assert len(index.rejected) == len(index.unusable) == 0
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    return len(index.samples), sum(map(len, plans.values())), seconds, peak


def main() -> None:
    """Generate an archive, prepare it, and print one line per round and the JSON line."""
    warnings.simplefilter("ignore")
    figures: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as temporary, spark_session("benchmark", "local[2]") as spark:
        root, folder = Path(temporary, "BigEarthNet"), Path(temporary)
        validation = test = PATCHES // 10
        started = time.perf_counter()
        generate_bigearthnet_v2(root, train=PATCHES - validation - test, validation=validation, test=test)
        print(f"generated {PATCHES} patches in {time.perf_counter() - started:.0f} s")
        ours, rows = [], []
        with peak_memory() as sizes:  # before the rival runs in the same workers
            prepare_dataset(spark, BigEarthNetV2(str(root)), folder / "dataset")
        figures["peak_executor_mib"] = round(max(sizes))
        shutil.rmtree(folder / "dataset")
        for number in range(ROUNDS):
            started = time.perf_counter()
            prepare_dataset(spark, BigEarthNetV2(str(root)), folder / "dataset")
            ours.append(PATCHES / (time.perf_counter() - started))
            shutil.rmtree(folder / "dataset")
            rows.append(rate_of_rows(spark, root, folder))
            print(f"round {number + 1}: {ours[-1]:.0f} patches/s, rows {rows[-1]:.1f} patches/s")
        figures = {
            "patches_per_second": round(statistics.median(ours), 1),
            "ratio_vs_rows": ratio(ours, rows, 1),
            "rows_patches_per_second": round(statistics.median(rows), 1),
            **figures,
            "patches": PATCHES,
            "cores": os.cpu_count(),
            "plan_seconds_549k": None,
            "plan_peak_mib_549k": None,
            "plan_patches": None,
        }
    if OFFICIAL.is_dir() and not SMOKE:
        with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as one_process:
            patches, shards, seconds, peak_mib = one_process.submit(plan_official).result()
        print(f"planned {patches} official patches as {shards} shards, peak {peak_mib:.0f} MiB")
        figures |= {
            "plan_seconds_549k": round(seconds, 2),
            "plan_peak_mib_549k": round(peak_mib),
            "plan_patches": patches,
        }
    print(json.dumps(figures))


if __name__ == "__main__":
    main()
