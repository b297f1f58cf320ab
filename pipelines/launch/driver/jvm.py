"""The JVM of Spark's driver: whether it still runs."""

import socket
from collections.abc import Iterator
from contextlib import contextmanager

from py4j.protocol import Py4JError
from pyspark import SparkContext

from pipelines.launch.driver.failure import InfrastructureError

_ANSWER_SECONDS = 5.0


class SparkGoneError(InfrastructureError):
    """The JVM of Spark's driver has ended: its SparkSession cannot make another attempt."""

    def __init__(self) -> None:
        """Set the text, which is always the same."""
        super().__init__(
            "Spark's own process on the driver (its JVM) has ended: it was killed or ran out of memory "
            "(spark.driver.memory). Start the job again in a new session"
        )


def is_jvm_gone(context: SparkContext) -> bool:
    """Return whether the JVM's command port no longer accepts connections."""
    parameters = context._gateway.gateway_parameters  # type: ignore[union-attr]
    try:
        socket.create_connection((parameters.address, parameters.port), _ANSWER_SECONDS).close()
    except OSError as error:
        return isinstance(error, ConnectionRefusedError)
    return False


@contextmanager
def naming_a_dead_jvm(context: SparkContext | None) -> Iterator[None]:
    """Replace py4j's errors by one clear line if the JVM has ended.

    Raises:
        SparkGoneError: The JVM has ended.
    """
    try:
        yield
    except (Py4JError, ConnectionError, EOFError, AttributeError) as error:
        if context is not None and is_jvm_gone(context):
            raise SparkGoneError from error
        raise
