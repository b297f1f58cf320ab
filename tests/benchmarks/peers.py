"""Peers measured side by side: readers of the same rows, PyTorch's DDP over a slow link, a killed worker.

    make bench NAME=peers
    make bench NAME=peers ARGS="--part reader"
    make bench NAME=peers ARGS=--smoke

The first run without `--smoke` makes an environment in `build/peers`, with exact versions
(`peer_parts/environment.py`). It has LitData, Grain with ArrayRecord, Lance, MosaicML Streaming and PyTorch. Petastorm
and TensorFlow are in the project's.

**Readers** (`--part reader`). 6,000 rows (ROWS) of 160 kB in three uint16 image groups, and labels, sorted by 19
classes; batches of 256, shuffled, until each group is an array or tensor. Beside ours, with every row's checksum
computed (`ours always`) and without (`ours`), and the peers, is the limit: the same gather from mapped files into warm
memory, and nothing else. Each measurement is a process of its own, with two threads or worker processes that read:
LitData's and Streaming's loaders with two workers, and once without any; Grain with two threads, each a whole batch;
Lance's `take` in two threads; Petastorm with two; `tf.data` with two parallel calls. OMP_NUM_THREADS is 1 for all.
LitData decodes single rows (`batch_decode=0`), since its default costs far more here. Petastorm gives int32. In turn,
three rounds, medians; ratios are medians of the rounds' ratios. A process first reads an epoch with none of its files
in the page cache. It gives the cold rows/s, without the first batch, and the entropy of a batch's classes. Another
epoch warms up, and 6 seconds follow. Processor time is that of the whole tree of processes in these seconds. The kernel
counts it for live processes and for children that have ended; start-up is not in it. One warm batch of each is compared
with the rows that were written, by digests of the pixels.

Who shuffles how: ours, Grain (an index shuffle) and Lance (a permutation that the caller draws, read by `take`) draw
each batch from all rows. LitData shuffles chunks and the rows of a chunk. Streaming spreads shards over canonical nodes
and shuffles rows in a range around their shard. TFRecord has a buffer of 512 rows, Petastorm shuffles row groups and
the rows in them. The limit draws rows independently.

Resumption: an epoch is read by one rank and by two. After a third of the steps the reader's own call saves the state,
and two ranks or one read the rest. `resume_bit_equal` says whether every step has the same rows, pixel by pixel, as the
epoch that was not interrupted had; null: no such state. Lance leaves the permutation to the caller. Petastorm has none.
A checkpoint of `tf.data` holds its buffer of rows, and belongs to one process.

**Link** (`--part link`; needs root). Two network namespaces have a rank and a core each, with 100 Mbit/s and 1 Gbit/s
between them. They train the ResNet-50 of `compression` (12 bands, 120x120, batch 8). Ours has the codecs none, fp16,
bf16 and powersgd of rank 4. PyTorch's DDP runs on Gloo in float32, with its fp16 and bf16 hooks and its PowerSGD hook
of rank 4. DDP refuses its bf16 hook on Gloo by name, so that it runs here behind another name; the PowerSGD hook has
one bucket. The peer's network has as many parameters, takes ready float images, and has SGD with momentum; ours takes
stored integers and has LARS. Median seconds of a step, the slower rank's; bytes by the interface's counter.

**A killed worker** (with the link). Seconds from `kill -9` of one of two workers to the end of the next step: ours as
`modes` measures it, in place and by a restart from a checkpoint of every step, two rounds; the peer under torchrun with
`--max-restarts` and a checkpoint of every step, without data to open, three rounds.

Tables in Markdown, then the last line, JSON. `cpu_per_row_vs_best_peer` is the best peer's processor time per row over
ours with checksums; `cpu_per_row_vs_gather` is ours with checksums over the limit's. What could not be measured is
null, and `reader_reasons` and `link_reasons` say why. `--smoke` takes a few rows for a moment, makes no environment,
has no link, and its figures mean nothing.
"""

import json
import os
from typing import Any

from tests.benchmarks.parts.command import clean_up_on_sigterm, command

PARTS = ("reader", "link")
KEYS: dict[str, tuple[str, ...]] = {
    "reader": (
        *("cpu_per_row_vs_best_peer", "best_peer", "cpu_per_row_vs_gather", "cpu_per_row_vs_gather_never"),
        *("cpu_per_row_of_peer_vs_ours", "cpu_seconds_per_1000_rows", "rows_per_second", "cold_rows_per_second"),
        *("mixing_entropy", "resume_bit_equal", "state_bytes", "resumed", "rows", "reader_reasons", "versions"),
    ),
    "link": ("link_steps", "link_ratio_peer_to_ours", "parameters", "recovery", "link_reasons"),
}
"""Of the last line, by part."""


def main() -> None:
    """Make the environment where it is missing, measure, print the JSON line."""
    parser = command(__doc__, "a few rows, no link, no new environment")
    parser.add_argument("--part", choices=PARTS, help="measure this part only")
    chosen = parser.parse_args()
    clean_up_on_sigterm()
    from peer_parts import environment, reading, slow_link

    if not chosen.smoke:
        environment.make()
    figures: dict[str, Any] = {key: None for part in PARTS for key in KEYS[part]}
    if chosen.part != "link":
        figures |= reading.measure()
    if chosen.part != "reader":
        figures |= slow_link.measure(smoke=chosen.smoke)
    print(json.dumps({**figures, "cores": os.cpu_count()}))


if __name__ == "__main__":
    main()
