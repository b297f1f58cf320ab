"""Folders on this machine's disks, or behind a URL that fsspec knows: an object store, HDFS."""

import os
import shutil
import tempfile
import uuid
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import fsspec

# A whole object appears when its upload ends; elsewhere a file is written under another name and renamed.
_OBJECT_STORES = {"s3", "s3a", "gs", "gcs", "abfs", "abfss", "az"}


@dataclass(frozen=True)
class Folder:
    """A folder by its path or URL; small and picklable, because it travels to the executors.

    Credentials come from where the storage's own library looks for them (environment, instance role), never from
    the URL, which is logged.
    """

    url: str
    """Absolute path, or `scheme://...` without a slash at its end."""

    @classmethod
    def at(cls, location: "str | Path | Folder") -> "Folder":
        """The folder of a path, made absolute, or of a URL.

        Raises:
            ValueError: The URL's scheme is unknown, its library is not installed, or it holds a password.
        """
        if isinstance(location, Folder):
            return location
        scheme, separator, rest = str(location).partition("://")
        if not separator:
            return cls(str(Path(location).absolute()))
        if scheme == "file":
            return cls(str(Path(rest).absolute()))
        if "@" in urlsplit(str(location)).netloc and urlsplit(str(location)).password is not None:
            raise ValueError(f"a {scheme}:// URL holds a password: give credentials in the environment")
        try:
            fsspec.get_filesystem_class(scheme)
        except (ValueError, ImportError) as error:
            raise ValueError(f"{location}: {error}") from None
        return cls(str(location).rstrip("/"))

    @property
    def is_local(self) -> bool:
        """Whether files can be opened, mapped and renamed as this machine's own."""
        return "://" not in self.url

    @property
    def path(self) -> Path:
        """Of a local folder."""
        assert self.is_local, self.url
        return Path(self.url)

    def __str__(self) -> str:
        """The path or URL."""
        return self.url

    def __truediv__(self, name: str) -> "Folder":
        """A folder in this one."""
        return Folder(f"{self.url}/{name}")

    def sibling(self, name: str) -> "Folder":
        """A folder beside this one."""
        return Folder(f"{self.url.rpartition('/')[0]}/{name}")

    @property
    def name(self) -> str:
        """The last part of the path or URL."""
        return self.url.rpartition("/")[2]

    def __getstate__(self) -> dict[str, Any]:
        """The URL alone: an open filesystem has threads and sockets."""
        return {"url": self.url}

    @cached_property
    def _filesystem(self) -> Any:
        return fsspec.filesystem("file" if self.is_local else self.url.partition("://")[0])

    def _full(self, name: str) -> str:
        return f"{self.url}/{name}" if name else self.url

    def read(self, name: str) -> bytes:
        """The whole of one file.

        Raises:
            FileNotFoundError: It is not there.
        """
        data: bytes = self._filesystem.cat_file(self._full(name))
        return data

    def open(self, name: str) -> Any:
        """One file, opened for reading at any place; a context manager."""
        return self._filesystem.open(self._full(name), "rb")

    def size(self, name: str) -> int | None:
        """Bytes of one file; None where there is no such file."""
        try:
            self._forget(name)
            info = self._filesystem.info(self._full(name))
        except FileNotFoundError:
            return None
        return int(info["size"]) if info["type"] == "file" else None

    def exists(self, name: str = "") -> bool:
        """Whether there is a file or folder; an object store knows folders by what is in them."""
        self._forget(name)
        return bool(self._filesystem.exists(self._full(name)))

    def names(self, name: str = "") -> list[str]:
        """What is in a folder, sorted; nothing where there is none."""
        self._forget(name)
        try:
            found = self._filesystem.ls(self._full(name), detail=False)
        except (FileNotFoundError, NotADirectoryError):
            return []
        own = self._filesystem._strip_protocol(self._full(name))
        return sorted(path.rstrip("/").rpartition("/")[2] for path in found if path.rstrip("/") != own)

    def make(self, name: str = "") -> None:
        """Make a folder and those above it, where the storage has folders."""
        if not self._is_object_store():
            self._filesystem.makedirs(self._full(name), exist_ok=True)

    def write(self, name: str, data: bytes) -> None:
        """Write one file, whole or not at all."""
        with self.new_file(name) as path:
            path.write_bytes(data)

    @contextmanager
    def new_file(self, name: str) -> Iterator[Path]:
        """Yield a local path to write to; what is there at the end becomes the file, at once, unless it fails."""
        if self.is_local:
            target = Path(self._full(name))
            temporary = target.with_name(f".{target.name}.{uuid.uuid4().hex}")
            try:
                yield temporary
                _flush(temporary)
                temporary.replace(target)
            finally:
                temporary.unlink(missing_ok=True)
            return
        with tempfile.TemporaryDirectory(prefix="groundswell-") as folder:
            yield Path(folder, "file")
            self._upload(Path(folder, "file"), self._full(name))

    def remove(self, name: str = "") -> None:
        """Remove a file, or a folder with all that is in it; nothing where there is none."""
        if self.is_local:
            path = Path(self._full(name))
            if path.is_dir() and not path.is_symlink():
                shutil.rmtree(path)
            else:
                path.unlink(missing_ok=True)
            return
        with suppress(FileNotFoundError):
            self._forget(name)
            self._filesystem.rm(self._full(name), recursive=True)

    def _upload(self, source: Path, target: str) -> None:
        if self._is_object_store():
            self._filesystem.put_file(str(source), target)
            return
        temporary = f"{target.rpartition('/')[0]}/.{target.rpartition('/')[2]}.{uuid.uuid4().hex}"
        self._filesystem.put_file(str(source), temporary)
        self._filesystem.mv(temporary, target)

    def _is_object_store(self) -> bool:
        return self.url.partition("://")[0] in _OBJECT_STORES

    def _forget(self, name: str) -> None:
        """Other processes write here too: a listing that fsspec remembers may be an old one."""
        if not self.is_local:
            self._filesystem.invalidate_cache()


def _flush(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
