"""What a function of HorovodRunner can say to the driver."""

from pipelines.launch.rank.report import log_to_driver

__all__ = ["log_to_driver"]
