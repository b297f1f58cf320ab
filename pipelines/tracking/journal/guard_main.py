"""The main function of the process of `pipelines.tracking.journal.guard`."""

import json
import signal
import sys


def main() -> None:
    """Wait for the driver; if it ends without a message, end its run."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    uri, run_id = json.loads(sys.stdin.readline())
    if sys.stdin.readline():  # the driver has ended its run, or is about to
        return
    from pipelines.tracking.journal.sync import DRIVER_DIED
    from pipelines.tracking.store.runs import end_failed_run, set_tags
    from pipelines.tracking.store.store import TrackedRun

    run = TrackedRun(uri, run_id)
    if end_failed_run(run, "FAILED"):
        set_tags(run, DRIVER_DIED)


if __name__ == "__main__":
    main()
