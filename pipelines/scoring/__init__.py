"""A logged model applied to samples. This package exports the DataFrame functions of `frames`."""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from pipelines.scoring.predict.frames import flat_columns, predict_udf, score_frame

__all__ = ["flat_columns", "predict_udf", "score_frame"]


def __getattr__(name: str) -> Any:
    """Import a name of `__all__` when it is used, because the other modules here need fewer packages.

    Raises:
        AttributeError: The name does not exist.
    """
    if name not in __all__:
        raise AttributeError(f"module 'pipelines.scoring' has no attribute {name!r}")
    from pipelines.scoring.predict import frames

    return getattr(frames, name)
