"""Jobs of Spark beside the caller's own: what they inherit, how this project cancels them, and how they end."""

import re

from pyspark import SparkContext

_CANCELLED = re.compile(
    r"^(?:\[SPARK_JOB_CANCELLED\] )?Job \d+ cancelled ?(?!because SparkContext was shut down)(.*?)(?: SQLSTATE:.*)?$"
    r"|\[OPERATION_CANCELED\] ([^.\n]*)",  # Spark Connect
    re.MULTILINE,
)


class JobCancelledError(KeyboardInterrupt):
    """The interruption of a Spark job from outside: by the caller's job group or tag, or on Spark's page."""


def tag_jobs(context: SparkContext, tag: str, description: str) -> None:
    """Give the jobs of this thread a tag by which to cancel them; the caller's group, pool and tags stay.

    Args:
        context: The context. Its thread must be an `InheritableThread`, which has the caller's properties.
        tag: The tag for `cancelJobsWithTag`.
        description: Text for the jobs in Spark's web page, if the caller has set none.
    """
    context.addJobTag(tag)
    context.setInterruptOnCancel(True)
    if context.getLocalProperty("spark.job.description") is None:
        context.setJobDescription(description)


def reason_of(error: BaseException) -> str:
    """Return Spark's message about a failed job, without the stack of its driver.

    Raises:
        Py4JError, OSError: The JVM has just died.
    """
    java = getattr(error, "java_exception", None)
    return str(java.getMessage() if java is not None else error).split("\n\nDriver stacktrace")[0]


def cancellation_in(reason: str) -> str | None:
    """Return one line about who has cancelled a job, from Spark's reason; None: nobody has."""
    found = _CANCELLED.search(reason)
    return found and f"the Spark job was cancelled from outside ({found[1] or found[2] or 'without a reason'})"
