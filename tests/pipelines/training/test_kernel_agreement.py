"""All ranks compress with the same code."""

from types import SimpleNamespace

import pytest

from models.compression import kernels
from pipelines.training.parts import agree_on_kernels


class Ranks:
    """This rank and another, which has no kernels, or has."""

    size = 2

    def __init__(self, others):
        self.others = others

    def sum(self, values):
        return values + self.others


@pytest.mark.parametrize(("codec", "others", "kept"), [("topk", 0, False), ("topk", 1, True), ("none", 0, True)])
def test_ranks_do_without_kernels_where_one_must(codec, others, kept, monkeypatch, caplog):
    monkeypatch.setattr(kernels, "_disabled", False)
    monkeypatch.setattr(kernels, "_load", object)
    config = SimpleNamespace(exchange=SimpleNamespace(codec=SimpleNamespace(name=codec)))
    agree_on_kernels(config, Ranks(others))
    assert (kernels.load() is not None) == kept
    said = [] if kept else ["1 of 2 ranks have C++ kernels for compression: none uses them"]
    assert [record.getMessage() for record in caplog.records] == said
