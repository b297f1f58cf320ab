"""Paths of the configuration as the workers can use them."""

from conf.schema import RunConfig
from pipelines.locations import absolute_location, absolute_path


def with_absolute_paths(config: RunConfig) -> RunConfig:
    """The configuration with absolute paths: workers have another working directory than the driver.

    Raises:
        ValueError: A path is misspelt (`locations.absolute_location`); names the setting.
    """
    try:
        path = absolute_location(config.dataset.path)
    except ValueError as error:
        raise ValueError(f"dataset.path: {error}") from None
    dataset = config.dataset.model_copy(update={"path": path})
    output = absolute_path("training.output", config.training.output)
    training = config.training.model_copy(update={"output": output})
    cache = config.reader.cache_folder and absolute_path("reader.cache_folder", config.reader.cache_folder)
    reader = config.reader.model_copy(update={"cache_folder": cache})
    warm_start = config.warm_start
    if warm_start.source is not None and not warm_start.is_logged:
        source = absolute_path("warm_start.source", warm_start.source)
        warm_start = warm_start.model_copy(update={"source": source})
    updated = {"dataset": dataset, "training": training, "reader": reader, "warm_start": warm_start}
    return config.model_copy(update=updated)
