"""Keras's metrics on the driver while workers train."""

from pipelines.launch.log_callback import LogCallback

__all__ = ["LogCallback"]
