"""What a driver serves, from texts as NVIDIA's programs print them; no GPU is touched."""

import pytest

from pipelines.launch.rank.cuda import served_by

HEADER = "| NVIDIA-SMI 550.54.14      Driver Version: {driver}      CUDA Version: {cuda}     |"
MODULE = "NVRM version: NVIDIA UNIX x86_64 Kernel Module  {driver}  Thu Feb 22 01:44:30 UTC 2024\nGCC version: 12.2.0\n"
OPEN_MODULE = "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  {driver}  Release Build  (dvs-builder@U22)\n"


DRIVERS = {"418.226.00": 10, "450.80.02": 11, "470.57.02": 11, "550.54.14": 12, "580.65.06": 13}
OLD = HEADER.format(driver="470.57.02", cuda="12.4"), MODULE.format(driver="470.57.02")


@pytest.mark.parametrize(
    ("nvidia_smi", "module", "served"),
    [
        *(
            ("", module.format(driver=driver), served)
            for module in (MODULE, OPEN_MODULE)
            for driver, served in DRIVERS.items()
        ),
        (*OLD, 12),  # with a compatibility package
        ("", "", None),
        (HEADER.format(driver="N/A", cuda="N/A"), "", None),
    ],
)
def test_the_cuda_that_a_driver_serves(nvidia_smi: str, module: str, served: int | None) -> None:
    assert served_by(nvidia_smi, module) == served
