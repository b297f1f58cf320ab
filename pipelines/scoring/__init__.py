"""A logged model applied to samples. The functions of DataFrames, which are in `frames`, are names of this package."""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from pipelines.scoring.predict.frames import flat_columns, predict_udf, score_frame

__all__ = ["flat_columns", "predict_udf", "score_frame"]


def __getattr__(name: str) -> Any:
    """Import one of the names of `__all__` when it is used: the other modules here need less.

    Raises:
        AttributeError: There is no such name.
    """
    if name not in __all__:
        raise AttributeError(f"module 'pipelines.scoring' has no attribute {name!r}")
    from pipelines.scoring.predict import frames

    return getattr(frames, name)
