from pathlib import Path

import numpy as np
import pytest

from pipelines.dataset.format.manifest import read_manifest
from pipelines.dataset.read.petastorm_reader import petastorm_batches
from pipelines.dataset.read.reader import Batch, SplitReader

pytestmark = [
    pytest.mark.spark,
    pytest.mark.filterwarnings("ignore::FutureWarning:petastorm"),
    pytest.mark.filterwarnings("ignore::FutureWarning:pyarrow"),
]


def batches(dataset: Path, epoch: int, rank: int = 0, size: int = 1, steps: int = 4) -> list[Batch]:
    return list(
        petastorm_batches(
            dataset,
            "train",
            read_manifest(dataset),
            seed=0,
            epoch=epoch,
            batch_size=8 // size,
            steps=steps,
            threads=1,
            rank=rank,
            size=size,
        )
    )


def pixels(found: list[Batch]) -> list[bytes]:
    return [image.tobytes() for batch in found for image in batch.images["bands_10m"]]


def test_one_rank_sees_every_sample_in_another_order_each_epoch(small_dataset: Path) -> None:
    whole = SplitReader(small_dataset, "train").gather(np.arange(32))
    first, second = batches(small_dataset, 0), batches(small_dataset, 1)
    assert sorted(pixels(first)) == sorted(pixels([whole])) == sorted(pixels(second))
    assert pixels(first) != pixels(second)
    labels = dict(zip(pixels([whole]), whole.targets.tolist(), strict=True))
    for batch in first:
        assert batch.images["bands_20m"].dtype == np.uint16
        assert [labels[image] for image in pixels([batch])] == batch.targets.tolist()


@pytest.mark.parametrize("size", [2, 4])
def test_every_rank_has_the_same_number_of_steps(small_dataset: Path, size: int) -> None:
    # Row groups of 6 rows and less: no rank's share is a multiple of its batch.
    parts = [batches(small_dataset, 0, rank, size, steps=4) for rank in range(size)]
    assert [[len(batch.targets) for batch in part] for part in parts] == [[8 // size] * 4] * size
    assert not set(pixels(parts[0])) & set(pixels(parts[1]))


def test_a_remote_dataset_is_refused(small_dataset: Path) -> None:
    found = petastorm_batches(
        "memory://dataset",
        "train",
        read_manifest(small_dataset),
        seed=0,
        epoch=0,
        batch_size=1,
        steps=1,
        threads=1,
    )
    with pytest.raises(ValueError, match=r"memory://dataset: set reader.name=groundswell"):
        next(found)
