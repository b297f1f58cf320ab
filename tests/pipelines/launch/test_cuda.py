"""What a driver serves, from texts as NVIDIA's programs print them; no GPU is touched."""

import pytest

from pipelines.launch.cuda import served_by

HEADER = "| NVIDIA-SMI 550.54.14      Driver Version: {driver}      CUDA Version: {cuda}     |"
MODULE = "NVRM version: NVIDIA UNIX x86_64 Kernel Module  {driver}  Thu Feb 22 01:44:30 UTC 2024\nGCC version: 12.2.0\n"
OPEN_MODULE = "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  {driver}  Release Build  (dvs-builder@U22)\n"


@pytest.mark.parametrize(
    ("driver", "served"),
    [("418.226.00", 10), ("450.80.02", 11), ("470.57.02", 11), ("550.54.14", 12), ("580.65.06", 13)],
)
def test_without_nvidia_smi_the_driver_s_version_says_it(driver: str, served: int) -> None:
    assert served_by("", MODULE.format(driver=driver)) == served
    assert served_by("", OPEN_MODULE.format(driver=driver)) == served


def test_a_compatibility_package_counts_as_nvidia_smi_has_it() -> None:
    header = HEADER.format(driver="470.57.02", cuda="12.4")
    assert served_by(header, MODULE.format(driver="470.57.02")) == 12


def test_a_host_without_a_driver_says_nothing() -> None:
    assert served_by("", "") is None
    assert served_by(HEADER.format(driver="N/A", cuda="N/A"), "") is None
