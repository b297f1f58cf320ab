"""The lock of a run, so that only one driver trains it at a time, on this machine or behind a URL."""

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager

from pipelines.storage.folder import Location, StorageError
from pipelines.storage.lease import check_held, lease
from pipelines.storage.whole_files import takes_whole_files_only
from pipelines.tracking.journal.local_run import RunLockedError, locked
from pipelines.training.driver.output import CHECKPOINTS


@contextmanager
def locked_run(location: Location) -> Iterator[Callable[[], None]]:
    """Lock a run; yield a function that raises RuntimeError if another driver has taken it over.

    In a folder on this machine the lock is a locked file. Behind a URL, or if files cannot be locked, it is a lease
    beside the checkpoints. A lease expires if it is not refreshed for a minute.

    Args:
        location: Folder or URL of the run.

    Raises:
        RunLockedError: Another driver trains the run.
        StorageError: The storage behind a URL cannot be used.
    """
    if location.is_local and not takes_whole_files_only(location.path):
        with locked(location.path):
            yield lambda: None
        return
    location.make(CHECKPOINTS)
    with ExitStack() as stack:
        try:
            # The lease is not beside the records, because the driver copies these to its own disk and back.
            stack.enter_context(lease(location, CHECKPOINTS))
        except StorageError:
            raise
        except RuntimeError as error:
            raise RunLockedError(str(error)) from None
        yield lambda: check_held(location, CHECKPOINTS)
