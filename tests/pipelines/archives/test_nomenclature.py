from pipelines.archives.nomenclature import BIGEARTHNET_19


def test_nineteen_different_names_in_alphabetical_order() -> None:
    assert len(BIGEARTHNET_19) == 19
    assert list(BIGEARTHNET_19) == sorted(set(BIGEARTHNET_19))
