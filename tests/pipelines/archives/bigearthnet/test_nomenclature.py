import json
from pathlib import Path

from pipelines.archives.bigearthnet.nomenclature import BIGEARTHNET_19, BIGEARTHNET_43, TO_19


def test_nineteen_different_names_in_alphabetical_order() -> None:
    assert (list(BIGEARTHNET_19), len(BIGEARTHNET_19)) == (sorted(set(BIGEARTHNET_19)), 19)


def test_forty_three_names_of_which_thirty_two_have_a_counterpart() -> None:
    assert len(set(BIGEARTHNET_43)) == len(TO_19) == 43
    assert (TO_19.count(None), {index for index in TO_19 if index is not None}) == (11, set(range(19)))


def test_the_published_mapping(shared_data: Path) -> None:
    published = json.loads((shared_data / "constants" / "clc43_to_19.json").read_text())
    ours = {
        name: None if place is None else BIGEARTHNET_19[place]
        for name, place in zip(BIGEARTHNET_43, TO_19, strict=True)
    }
    assert (ours, list(ours)) == (published, list(published))
