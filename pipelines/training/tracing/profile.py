"""A profile of some steps on one rank, recorded by TensorFlow's profiler."""

import shutil
import tempfile
from pathlib import Path

import tensorflow as tf

from pipelines.storage.whole_files import copy_folder


class Profile:
    """A profile for TensorBoard, with every operation and, on a GPU, every kernel."""

    def __init__(self, folder: Path) -> None:
        """Start recording.

        Args:
            folder: Folder that the profile is written to at the end.
        """
        self._folder = folder
        self._local = Path(tempfile.mkdtemp(prefix="groundswell-profile-"))
        tf.profiler.experimental.start(str(self._local))

    def stop(self) -> None:
        """Stop recording and write the profile."""
        tf.profiler.experimental.stop()
        copy_folder(self._local, self._folder)
        shutil.rmtree(self._local, ignore_errors=True)
