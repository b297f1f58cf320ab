"""Files and folders on local disks, or behind a URL that fsspec knows (an object store, HDFS)."""

import errno
import fnmatch
import glob
import hashlib
import os
import shutil
import tempfile
import threading
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import datetime
from functools import cached_property
from pathlib import Path, PurePath
from typing import Any

import fsspec
from fsspec.core import url_to_fs
from fsspec.spec import AbstractFileSystem

from pipelines.storage.locations import absolute_location, is_url
from pipelines.storage.whole_files import CHUNK_BYTES, copy_whole, new_file, remove_if_empty

# An object appears when its upload ends. Elsewhere a file is written under another name and renamed.
_OBJECT_STORES = {"s3", "s3a", "gs", "gcs", "abfs", "abfss", "az"}
SECONDS_FOR_AN_ANSWER = 20.0
"""Seconds without an answer after which a storage counts as unreachable, when its existence is checked."""
_ABSENT = (FileNotFoundError, NotADirectoryError, IsADirectoryError)
_HADOOP = (
    "reading hdfs:// needs Hadoop's libhdfs: set JAVA_HOME, HADOOP_HOME and CLASSPATH "
    "(to what `hadoop classpath --glob` prints)"
)


class StorageError(RuntimeError):
    """A storage cannot be used: its bucket, answer, credentials or library is missing."""


@dataclass(frozen=True)
class Location:
    """A file or folder by its path or URL: a small object that is pickled and sent to the executors.

    Methods take the name or relative path of a file or folder in it. Without a name they are about the location itself.
    Credentials come from where the storage's own library looks for them (environment, instance role), never from
    the URL, which is logged.
    """

    url: str
    """Absolute path, or `scheme://...` without a slash at its end."""

    @classmethod
    def at(cls, location: "str | Path | Location", before: str = "") -> "Location":
        """Return the location of a path, made absolute, or a URL; `absolute_location` lists the accepted spellings.

        Args:
            location: Path or URL that the user typed.
            before: Text before the message of an error, such as "dataset.path: ".

        Raises:
            ValueError: The location cannot be used; the message says what is expected.
        """
        return location if isinstance(location, Location) else cls(absolute_location(location, before))

    def check(self) -> None:
        """Check early, and within seconds, that a remote folder can be used; it need not exist yet.

        Raises:
            StorageError: The bucket does not exist, the storage does not answer, or credentials are missing or refused.
        """
        if self.is_local:
            return
        found: list[Exception | None] = []
        # The libraries retry for minutes, which is right for a running job but too long for its start.
        asking = threading.Thread(target=lambda: found.append(self._ask()), daemon=True)
        asking.start()
        asking.join(SECONDS_FOR_AN_ANSWER)
        if not found:
            raise StorageError(
                f"{self}: no answer within {SECONDS_FOR_AN_ANSWER:.0f} s; check the network and the endpoint "
                "(of S3: AWS_ENDPOINT_URL)"
            )
        if found[0] is not None:
            raise found[0]

    def _ask(self) -> Exception | None:
        try:
            self.names()
            bucket = "/".join(self.url.split("/")[:3])
            with suppress(PermissionError):  # a user of the folder may lack permission to see the bucket
                if self._is_object_store() and not self._filesystem.exists(bucket):
                    return StorageError(f"{self}: there is no {bucket}; make it, or correct the URL")
        except Exception as error:
            return error if isinstance(error, StorageError) else self._unusable(error)
        return None

    def _unusable(self, error: Exception) -> StorageError:
        text = " ".join(str(error).split())[:300]
        hint = _HADOOP if self.url.startswith("hdfs://") else "check endpoint, credentials and permissions"
        return StorageError(f"{self}: {type(error).__name__}: {text}; {hint}")

    @contextmanager
    def _remote_errors(self) -> Iterator[None]:
        """Convert the libraries' errors to StorageError; errors about a missing file or folder are not converted."""
        try:
            yield
        except (*_ABSENT, StorageError):
            raise
        except Exception as error:
            if self.is_local:
                raise
            raise self._unusable(error) from error

    @property
    def is_local(self) -> bool:
        """Whether files are opened and renamed as local files."""
        return not is_url(self.url)

    @property
    def path(self) -> Path:
        """Path of a local file or folder."""
        assert self.is_local, self.url
        return Path(self.url)

    def __str__(self) -> str:
        """Return the path or URL."""
        return self.url

    def __fspath__(self) -> str:
        """Return the path of a local file or folder, so that it can be opened and copied like a `Path`."""
        return str(self.path)

    def __truediv__(self, name: str) -> "Location":
        """Return a file or folder in this folder."""
        return Location(f"{self.url}/{name}")

    def sibling(self, name: str) -> "Location":
        """Return a file or folder beside this one."""
        return Location(f"{self.url.rpartition('/')[0]}/{name}")

    @property
    def parent(self) -> "Location":
        """Folder that contains this file or folder."""
        return Location(str(self.path.parent) if self.is_local else self.url.rpartition("/")[0])

    @property
    def name(self) -> str:
        """Last part of the path or URL."""
        return self.url.rpartition("/")[2]

    @property
    def stem(self) -> str:
        """Name without its last suffix."""
        return PurePath(self.name).stem

    def __getstate__(self) -> dict[str, Any]:
        """Pickle only the URL: an open filesystem has threads and sockets."""
        return {"url": self.url}

    @cached_property
    def _filesystem(self) -> Any:
        if self.is_local:
            return fsspec.filesystem("file")
        try:
            return url_to_fs(self.url)[0]  # it knows the URL's host and port, or Azure's account
        except Exception as error:  # a native library that cannot be loaded, a name node that does not answer
            raise self._unusable(error) from error

    def _full(self, name: str) -> str:
        return f"{self.url}/{name}" if name else self.url

    def _listed(self, name: str) -> str:
        """Return the path that the filesystem lists for a file or folder: without scheme, and on HDFS without host."""
        root = self.url if self.is_local else url_to_fs(self.url)[1]
        return f"{root}/{name}".rstrip("/")

    def read(self, name: str = "") -> bytes:
        """Read one whole file.

        Raises:
            FileNotFoundError: The file does not exist.
        """
        with self._remote_errors():
            return bytes(self._filesystem.cat_file(self._full(name)))

    def read_start(self, name: str, limit: int) -> bytes:
        """Read at most the first `limit` bytes of one file, with one request.

        Raises:
            FileNotFoundError: The file does not exist.
        """
        with self._remote_errors():
            try:
                return bytes(self._filesystem.cat_file(self._full(name), start=0, end=limit))
            except OSError:
                if self.size(name) != 0:  # an empty object has no valid range
                    raise
                return b""

    def open(self, name: str = "") -> Any:
        """Open one file for reading at any position; the result is a context manager."""
        if self.is_local:
            return Path(self._full(name)).open("rb")
        with self._remote_errors():
            return self._filesystem.open(self._full(name), "rb")

    def size(self, name: str = "") -> int | None:
        """Return the size of one file in bytes; None if it does not exist."""
        info = self._if_there(lambda: self._filesystem.info(self._full(name)))
        return int(info["size"]) if info is not None and info["type"] == "file" else None

    def is_file(self, name: str = "") -> bool:
        """Return whether a file exists; local links are followed."""
        return self.size(name) is not None

    def is_folder(self, name: str = "") -> bool:
        """Return whether a folder exists; behind a URL a folder exists if it has content."""
        return Path(self._full(name)).is_dir() if self.is_local else bool(self.entries(name))

    def glob(self, pattern: str) -> "list[Location]":
        """Return the files and folders in this folder whose names match a pattern, in no order."""
        if self.is_local:
            return [self / path.name for path in self.path.glob(pattern)]
        return [self / name for name in self.names() if fnmatch.fnmatchcase(name, pattern)]

    def modified(self, name: str) -> datetime | None:
        """Return when one file was written, by the storage's clock; None if it does not exist."""
        return self._if_there(lambda: self._filesystem.modified(self._full(name)))

    def exists(self, name: str = "") -> bool:
        """Return whether a file or folder exists; on an object store a folder exists if it has content."""
        return bool(self._if_there(lambda: self._filesystem.exists(self._full(name))))

    def names(self, name: str = "") -> list[str]:
        """List the names in a folder, sorted; a missing folder is empty."""
        return sorted(name for name, _, _ in self.entries(name))

    def entries(self, name: str = "") -> list[tuple[str, bool, int]]:
        """List a folder: name, whether it is a folder, and size in bytes of each entry; a missing folder is empty."""
        found = self._if_there(lambda: self._filesystem.ls(self._full(name), detail=True)) or []
        # The listing of a file contains the file itself, and an object store may hold an empty object for the folder.
        own = self._listed(name)
        return [
            (info["name"].rstrip("/")[len(own) + 1 :], info["type"] == "directory", int(info["size"] or 0))
            for info in found
            if info["name"].rstrip("/") != own and info["name"].startswith(f"{own}/")
        ]

    def files(self) -> dict[str, int]:
        """List every file in this folder and its subfolders: path relative to the folder -> size in bytes.

        Symbolic links are listed, not followed.
        """
        if not self.is_local:
            found = self._if_there(lambda: self._filesystem.find(self.url, detail=True)) or {}
            start = len(self._listed("")) + 1
            return {path[start:]: int(info["size"] or 0) for path, info in found.items() if path[start:].strip("/")}
        sizes: dict[str, int] = {}
        for parent, folders, names in os.walk(self.path):
            links = [folder for folder in folders if Path(parent, folder).is_symlink()]
            for name in (*names, *links):
                path = Path(parent, name)
                with suppress(FileNotFoundError):  # removed just now
                    sizes[str(path.relative_to(self.path))] = path.lstat().st_size
        return sizes

    def _if_there(self, ask: Callable[[], Any]) -> Any | None:
        """Return the answer of the file system; None if the file or folder does not exist."""
        self._forget()
        try:
            with self._remote_errors():
                return ask()
        except _ABSENT:
            return None

    def make(self, name: str = "") -> None:
        """Make a folder and its parents, if the storage has folders."""
        if not self._is_object_store():
            self._filesystem.makedirs(self._full(name), exist_ok=True)

    def write(self, name: str, data: bytes, *, flush: bool = True) -> None:
        """Write one file atomically; `flush` as in `new_file`."""
        with self.new_file(name, flush=flush) as path:
            path.write_bytes(data)

    @contextmanager
    def new_file(self, name: str = "", *, flush: bool = True) -> Iterator[Path]:
        """Yield a local path to write to; if the block succeeds, its content becomes the file atomically.

        Args:
            name: Name of the file.
            flush: Whether to wait until a local file is on the disk, so that it survives a power cut.
        """
        if self.is_local:
            with new_file(Path(self._full(name)), flush=flush) as path:
                yield path
            return
        with tempfile.TemporaryDirectory(prefix="groundswell-") as folder:
            yield Path(folder, "file")
            self._upload(Path(folder, "file"), self._full(name))

    def put(self, file: Path, name: str = "") -> None:
        """Copy one local file to here atomically, and check the stored content.

        Object stores report the MD5 sum of most objects. Where they do not, the file is read back.

        Raises:
            OSError: The stored content differs; it is removed.
            StorageError: The storage cannot be used.
        """
        if self.is_local:
            with self.new_file(name, flush=False) as path, file.open("rb") as source:
                copy_whole(source, path)
            return
        self._upload(file, self._full(name))
        if not self._has_arrived(file, name):
            self.remove(name)
            raise OSError(errno.EIO, "what was read back differs from what was written", self._full(name))

    def _has_arrived(self, file: Path, name: str) -> bool:
        info = self._if_there(lambda: self._filesystem.info(self._full(name)))
        if info is None or info["size"] != file.stat().st_size:
            return False
        with file.open("rb") as local:
            md5 = hashlib.file_digest(local, lambda: hashlib.md5(usedforsecurity=False)).hexdigest()
            if str(info.get("ETag", "")).strip('"') == md5:
                return True
            local.seek(0)
            with self.open(name) as stored:
                return all(stored.read(len(chunk)) == chunk for chunk in iter(lambda: local.read(CHUNK_BYTES), b""))

    def remove(self, name: str = "") -> None:
        """Remove a file, or a folder with its content; a missing one is no error."""
        if self.is_local:
            path = Path(self._full(name))
            if path.is_dir() and not path.is_symlink():
                shutil.rmtree(path)
            else:
                path.unlink(missing_ok=True)
            return
        with suppress(FileNotFoundError), self._remote_errors():
            self._forget()
            full = self._full(name)
            if not glob.has_magic(full):
                self._filesystem.rm(full, recursive=True)
                return
            # The name could match other files as a pattern.
            for found in sorted(self._filesystem.find(full, withdirs=not self._is_object_store()), reverse=True):
                self._filesystem.rmdir(found) if self._filesystem.isdir(found) else self._filesystem.rm_file(found)
            if not self._is_object_store() and self._filesystem.isdir(full):
                self._filesystem.rmdir(full)

    def _upload(self, source: Path, target: str) -> None:
        with self._remote_errors():
            if self._is_object_store():
                self._filesystem.put_file(str(source), target)
                return
            temporary = f"{target.rpartition('/')[0]}/.{target.rpartition('/')[2]}.{uuid.uuid4().hex}"
            self._filesystem.put_file(str(source), temporary)
            if type(self._filesystem).mv is AbstractFileSystem.mv:  # which copies, and takes names as patterns
                self._filesystem.cp_file(temporary, target)
                self._filesystem.rm_file(temporary)
            else:
                self._filesystem.mv(temporary, target)

    def _is_object_store(self) -> bool:
        return self.url.partition("://")[0] in _OBJECT_STORES

    def _forget(self) -> None:
        """Clear the listings that fsspec caches, because other processes write here too."""
        if not self.is_local:
            self._filesystem.invalidate_cache()


@contextmanager
def leaving_nothing(folder: Location) -> Iterator[None]:
    """Remove at the end of the block a local folder and its parents that the block has made, unless they hold files."""
    made = [each for each in (folder.path, *folder.path.parents) if not each.exists()] if folder.is_local else []
    try:
        yield
    finally:
        for each in made:
            remove_if_empty(each)
