"""Published scaling tables: the model fitted on their first two rows, the others predicted.

What is fitted is what the first two rows can tell; nothing was chosen by the errors of the others:

* V100: computing from one GPU, the link inside the machine from the second row; the speed of the link between machines
  is the nominal one of the table.
* A100 on three links: computing (in proportion to the batch of a GPU) from one machine, the link from two machines.
* H100: computing as a fixed time and a time for each image from the first two rows, which differ in the batch of a GPU;
  and beside it what a constant computing time says.
* Lecture: 49,400 s alone gives computing in proportion to the batch, which predicts 3,400 s without any overhead; both
  rows give an overhead of each step on 128 GPUs, which predicts the last two.
"""

import csv
import math
from typing import Any

from pipelines.scaling.step import CodecCosts, Topology, Wire, Worker, step_seconds

TABLE = "scaling_tables.csv"
NAMES = (
    "v100_tensorflow_horovod",
    "a100_1x100_opa",
    "a100_2x100_opa",
    "a100_1x100_edr",
    "h100",
    "h100_constant_compute",
    "lecture_first_row",
    "lecture",
)
_A100_LINKS = {"a100_1x100_opa": "1x100Gb OPA", "a100_2x100_opa": "2x100Gb OPA", "a100_1x100_edr": "1x100Gb EDR"}
# Batch, GPUs, seconds of the training: BigEarthNet, ResNet-50, LARS.
_LECTURE = ((512, 8, 49_400.0), (8_000, 128, 3_400.0), (16_000, 128, 2_800.0), (32_000, 128, 2_500.0))
_INFINIBAND_100 = 100e9 / 8


def missing(folder):
    """Why the published tables cannot be read; empty where they can."""
    return "" if (folder / TABLE).is_file() else f"{folder / TABLE} is not there"


def predictions(folder):
    """Rows by name of the table: what, measured, predicted and signed error of each row that was not fitted.

    Seconds of a step; of the lecture's table, seconds of the training.
    """
    with (folder / TABLE).open() as file:
        rows: list[dict[str, Any]] = [
            {
                "source": row["source"],
                "link": row["link_per_node"],
                "nodes": int(row["nodes"]),
                "gpus": int(row["gpus"] or 0),
                "batch": int(row["global_batch"]),
                "bytes": 1e6 * float(row["gradient_MB"]),
                "seconds": int(row["global_batch"]) / float(row["images_per_s"]),
            }
            for row in csv.DictReader(file)
            if row["gpus"].isdecimal() and row["gradient_MB"] != "-"
        ]
    found = {"v100_tensorflow_horovod": _v100([row for row in rows if row["source"].startswith("DLPerf")])}
    dell = [row for row in rows if "R750xa" in row["source"]]
    for name, link in _A100_LINKS.items():
        found[name] = _a100([row for row in dell if row["nodes"] == 1 or row["link"] == link])
    h100 = [row for row in rows if row["gpus"] >= 8 and ("H100" in row["source"] or "XE9680" in row["source"])]
    found["h100"], found["h100_constant_compute"] = _h100(h100)
    found["lecture_first_row"], found["lecture"] = _lecture()
    return found


def _v100(rows):
    first, second = rows[:2]
    per_image = first["seconds"] / first["batch"]
    # 2 (N - 1) / N bytes over the link inside make the difference of the second row.
    moved = 2 * (second["gpus"] - 1) / second["gpus"] * second["bytes"]
    inside = Wire(0.0, 0.0, moved / (second["seconds"] - first["seconds"]))
    topology = Topology({"allreduce": Wire(0.0, 0.0, _INFINIBAND_100)}, {"allreduce": inside}, 8)
    return [_told(row, _step(row, row["gpus"], 0.0, per_image, topology)) for row in rows[2:]]


def _a100(rows):
    first, second = rows[:2]
    per_image = first["seconds"] / (first["batch"] / first["gpus"])
    moved = 2 * (second["nodes"] - 1) / second["nodes"] * second["bytes"]
    between = Wire(0.0, 0.0, moved / (second["seconds"] - first["seconds"]))
    # What the link inside a machine takes is a part of its computing here: one machine cannot tell them apart.
    return [_told(row, _step(row, row["nodes"], 0.0, per_image, Topology({"allreduce": between}))) for row in rows[2:]]


def _h100(rows):
    first, second = rows[:2]
    images = [row["batch"] / row["gpus"] for row in (first, second)]
    per_image = (first["seconds"] - second["seconds"]) / (images[0] - images[1])
    fixed = first["seconds"] - per_image * images[0]
    free = Topology({"allreduce": Wire(0.0, 0.0, math.inf)})
    fitted = [_told(row, _step(row, row["nodes"], fixed, per_image, free)) for row in rows[2:]]
    return fitted, [_told(row, first["seconds"]) for row in rows[2:]]


def _lecture():
    """Trainings of the same images: seconds of a step are seconds of the training times batch over all images."""
    (batch, gpus, seconds), second, *later = _LECTURE
    per_image = seconds * batch / (batch / gpus)  # times all images, which cancel out
    overhead = second[2] * second[0] - per_image * second[0] / second[1]

    def predicted(row, more):
        return (per_image * row[0] / row[1] + more) / row[0]

    told = [
        {"what": f"batch {row[0]:,} on {row[1]} GPUs", "workers": row[1], "measured": row[2]}
        | _error(row[2], predicted(row, more))
        for row, more in ((second, 0.0), *((row, overhead) for row in later))
    ]
    return told[:1], told[1:]


def _step(row, workers, fixed, per_image, topology):
    worker = Worker(fixed, per_image, 0.0, ((row["bytes"], 1.0),))
    return step_seconds(
        worker, CodecCosts("none", (), row["bytes"], 0.0, 0.0), topology, workers, row["batch"] / row["gpus"], None
    )


def _told(row, predicted):
    what = f"{row['gpus']} GPUs, batch {row['batch']:,}"
    return {"what": what, "workers": row["gpus"], "measured": row["seconds"]} | _error(row["seconds"], predicted)


def _error(measured, predicted):
    return {"predicted": predicted, "error": predicted / measured - 1}
