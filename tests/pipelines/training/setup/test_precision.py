from pathlib import Path

import pytest

from pipelines.training.setup.precision import bfloat16_isa, describe_precision, is_faster_in_bfloat16


@pytest.mark.parametrize(
    ("vendor", "flags", "isa", "faster"),
    [
        ("GenuineIntel", "fpu avx512_bf16 amx_bf16", "amx_bf16", True),
        ("GenuineIntel", "fpu avx512_bf16", "avx512_bf16", False),
        ("AuthenticAMD", "fpu avx512_bf16", "avx512_bf16", True),
        ("AuthenticAMD", "fpu avx2", None, False),
    ],
)
def test_the_processor_says_what_it_has(tmp_path: Path, vendor: str, flags: str, isa: str | None, faster: bool) -> None:
    text = f"processor : 0\nvendor_id : {vendor}\nmodel name : amx_bf16\nflags\t\t: {flags}\n\nprocessor : 1\n"
    (tmp_path / "cpuinfo").write_text(text)
    assert [bfloat16_isa(tmp_path / name) for name in ("cpuinfo", "missing")] == [isa, None]
    assert is_faster_in_bfloat16(tmp_path / "cpuinfo") == faster


@pytest.mark.parametrize(
    ("precision", "isa", "faster", "text"),
    [
        ("bfloat16", "amx_bf16", True, "; the processor has AMX for it"),
        ("bfloat16", None, False, "; the processor has no instructions for bfloat16, so this is slower than float32"),
        (
            "float32",
            "avx512_bf16",
            True,
            "; the processor has AVX-512 BF16, with which training.precision=bfloat16 was faster",
        ),
        ("float32", "avx512_bf16", False, ""),
        (
            "bfloat16",
            "avx512_bf16",
            False,
            "; the processor has AVX-512 BF16 for it, with which this was slower than float32 where it was measured",
        ),
    ],
)
def test_the_start_of_training_says_what_runs(precision: str, isa: str | None, faster: bool, text: str) -> None:
    found = [describe_precision(precision, gpu=gpu, isa=isa, faster=faster) for gpu in (False, True)]
    assert found == [f"training.precision={precision}{text}", f"training.precision={precision} on a GPU"]
