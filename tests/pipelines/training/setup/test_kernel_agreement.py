"""All ranks compress with the same code."""

from types import SimpleNamespace

import pytest

from models.compression import kernels
from pipelines.training.setup.rank_setup import agree_on_kernels


@pytest.mark.skipif(not kernels.LIBRARY.exists(), reason="the project was installed without a compiler")
@pytest.mark.parametrize(("codec", "others", "kept"), [("topk", 0, False), ("topk", 1, True), ("none", 0, True)])
def test_ranks_do_without_kernels_where_one_must(codec, others, kept, monkeypatch, caplog):
    monkeypatch.setattr(kernels, "is_disabled", False)
    ranks = SimpleNamespace(size=2, sum=lambda values: values + others)  # another one, which has no kernels, or has
    agree_on_kernels(codec, ranks)
    said = [] if kept else ["1 of 2 ranks have C++ kernels for compression: none uses them"]
    assert (kernels.load() is not None, [record.getMessage() for record in caplog.records]) == (kept, said)
