from pathlib import Path

import pytest

from pipelines.training.setup.precision import bfloat16_isa, describe_precision


@pytest.mark.parametrize(
    ("flags", "isa"),
    [("fpu avx512_bf16 amx_bf16", "amx_bf16"), ("fpu avx512_bf16", "avx512_bf16"), ("fpu avx2", None)],
)
def test_the_processor_says_what_it_has(tmp_path: Path, flags: str, isa: str | None) -> None:
    (tmp_path / "cpuinfo").write_text(f"processor : 0\nmodel name : amx_bf16\nflags\t\t: {flags}\n\nprocessor : 1\n")
    assert [bfloat16_isa(tmp_path / name) for name in ("cpuinfo", "missing")] == [isa, None]


@pytest.mark.parametrize(
    ("precision", "gpu", "isa", "text"),
    [
        ("bfloat16", False, "amx_bf16", "training.precision=bfloat16; the processor has AMX for it"),
        ("bfloat16", False, None, "no instructions for bfloat16, so this is slower than float32"),
        ("float32", False, "avx512_bf16", "has AVX-512 BF16, with which training.precision=bfloat16 is faster"),
        ("float16", True, None, "training.precision=float16 on a GPU"),
    ],
)
def test_the_start_of_training_says_what_runs(precision: str, gpu: bool, isa: str | None, text: str) -> None:
    assert text in describe_precision(precision, gpu=gpu, isa=isa)
