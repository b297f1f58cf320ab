"""Converts the usual spellings of a path or URL to one, and removes passwords from texts."""

import os
import re
import traceback
from pathlib import Path, PurePosixPath
from urllib.parse import unquote, urlsplit

import fsspec

_SCHEME = re.compile(r"([A-Za-z][A-Za-z0-9+.-]*):(/+)(.*)", re.DOTALL)
_KNOWN_WITHOUT_SLASH = re.compile(r"(file|dbfs|s3|s3a|gs|gcs|abfs|abfss|az|hdfs):(?!/)", re.IGNORECASE)
_WINDOWS_DRIVE = re.compile(r"[A-Za-z]:[\\/]")
_VARIABLE = re.compile(r"\$(?:(\w+)|\{(\w+)\})", re.ASCII)
# A password follows a colon before the first slash, and may itself contain slashes and @. A name alone before the
# first @ is a token; in Azure's URLs it is the container.
_CREDENTIALS = re.compile(r"//(?:[^\s/:@]*:\S*|(?<!abfs://)(?<!abfss://)[^\s/]*)@")
_SECRET_IN_QUERY = re.compile(
    r"([?&;][^=&;\s]*(?:token|passw|pwd|secret|key|signature|sig|credential|auth)[^=&;\s]*=)[^&;\s'\"]+", re.IGNORECASE
)
_PACKAGES = {
    "abfs": "adlfs",
    "abfss": "adlfs",
    "az": "adlfs",
    "gs": "gcsfs",
    "gcs": "gcsfs",
    "oss": "ossfs",
    "s3": "s3fs",
    "s3a": "s3fs",
    "sftp": "paramiko",
    "ssh": "paramiko",
}
"""Distribution that fsspec needs for a scheme and that is not one of our own dependencies."""
DBFS = Path("/dbfs")
VOLUMES = Path("/Volumes")
"""Folders where Databricks mounts its two file systems."""


def absolute_location(location: str | Path, before: str = "") -> str:
    """Return a folder's absolute path, or its URL with a usable scheme, from any usual spelling.

    `~`, `$NAME` and `${NAME}` are expanded; an absolute `Path` is not changed. `file:/x` and `file:///x` are the
    path `/x`. `dbfs:/x` is `/dbfs/x`, and `dbfs:/Volumes/x` is `/Volumes/x`, where Databricks mounts them. A scheme
    is put into lower case. A path must not look like a URL by mistake: `s3:/bucket/x` is an error and not a folder
    `s3:`; write `./s3:/x` for such a folder.

    Args:
        location: Path or URL that the user typed.
        before: Text before the message of an error, such as "dataset.path: ".

    Raises:
        ValueError: A variable or home folder is unknown. The scheme is unknown or misspelt, or its package is not
            installed. No bucket or host is named, or the URL holds a password.
    """
    try:
        return _absolute(location)
    except ValueError as error:
        raise ValueError(f"{before}{error}") from None


def _absolute(location: str | Path) -> str:
    if isinstance(location, Path) and location.is_absolute():
        return str(location)
    text = _expanded(str(location))
    if _WINDOWS_DRIVE.match(text):
        raise ValueError(f"{text}: a Windows path, expected a path of this machine such as /data/x, or a URL")
    if match := _KNOWN_WITHOUT_SLASH.match(text):
        scheme = match[1].lower()
        expected = "file:///folder" if scheme == "file" else f"{scheme}://bucket/folder"
        raise ValueError(f"{redacted(text)}: there is no slash behind the scheme, expected {expected}")
    match = _SCHEME.fullmatch(text)
    if match is None:
        return str(Path(text).absolute())
    scheme, slashes, rest = match[1].lower(), match[2], match[3]
    if scheme == "file":
        return _file_path(text, slashes, rest)
    if scheme == "dbfs":
        return _databricks_path(text, rest)
    return _checked_url(text, scheme, slashes, rest)


def absolute_path(setting: str, location: str | Path) -> str:
    """Return a local absolute path, for a setting that cannot be a URL; spelt as in `absolute_location`.

    Args:
        setting: Name of the setting, for the message.
        location: Value of the setting.

    Raises:
        ValueError: `absolute_location` refuses it, or it is a URL.
    """
    found = absolute_location(location, f"{setting}: ")
    if is_url(found):
        raise ValueError(
            f"{setting}={found}: expected a path; only archive.root, dataset.path, training.output and probe.output "
            "may be URLs"
        )
    return found


def local_path(location: str | Path, argument: str = "") -> Path:
    """Return the path of a local file or folder, spelt as in `absolute_location`.

    A plain path is not changed, so that messages show what was typed; all other spellings become absolute.

    Args:
        location: Path that the user typed.
        argument: Name of the argument, for the message; empty if the caller adds it.

    Raises:
        ValueError: `absolute_location` refuses it, or it is a URL.
    """
    name = f"{argument} " if argument else ""
    found = absolute_location(location, name)
    if is_url(found):
        raise ValueError(f"{name}{redacted(found)}: expected a path of this machine, and not a URL")
    written = Path(location)
    return written if ":" not in str(written) and str(written.absolute()) == found else Path(found)


def is_inside(name: str) -> bool:
    """Return whether a name, which a file or a listing contains, is a relative path that stays inside its folder."""
    path = PurePosixPath(name)
    return bool(path.parts) and not path.is_absolute() and ".." not in path.parts and not re.search("://|\0", name)


def inside(name: str, folder: object) -> str:
    """Return a name that a file or a server gives, which must be a path inside a folder (`is_inside`).

    Raises:
        ValueError: It is absolute, a URL, or leads out of the folder.
    """
    if not is_inside(name):
        raise ValueError(f"{name!r} must be a path inside {folder}")
    return name


def is_url(location: str) -> bool:
    """Return whether an absolute location is a URL and not a path."""
    return "://" in location


def redacted(text: str) -> str:
    """Replace user name, password and token of every URL in a text, also those in its query, by `***`."""
    return _SECRET_IN_QUERY.sub(r"\1***", _CREDENTIALS.sub("//***@", text))


def redacted_traceback() -> str:
    """Return the traceback of the current exception for a log, `redacted`."""
    return redacted(traceback.format_exc().rstrip())


def _expanded(text: str) -> str:
    def value(match: re.Match[str]) -> str:
        name = match[1] or match[2]
        if name not in os.environ:
            raise ValueError(f"{redacted(text)}: the environment variable {name} is not set")
        return os.environ[name]

    replaced = _VARIABLE.sub(value, text)
    if not replaced.strip():
        raise ValueError(f"{text!r} names no folder, expected a path or a URL")
    found = os.path.expanduser(replaced)  # noqa: PTH111 (a Path would drop the slashes of what follows)
    if found.startswith("~"):
        raise ValueError(f"{text}: there is no home folder of {replaced.split('/')[0]!r}")
    return found


def _file_path(text: str, slashes: str, rest: str) -> str:
    if len(slashes) == 2:  # file://host/path
        host, _, rest = rest.partition("/")
        if host not in ("", "localhost"):
            raise ValueError(f"{text}: {host!r} is taken for a host name, expected file:///{host}/{rest}".rstrip("/"))
    return str(Path("/", unquote(rest).lstrip("/")))


def _databricks_path(text: str, rest: str) -> str:
    """Return the mount of a DBFS path: only Spark knows `dbfs:`, all other programs read the mount."""
    mount = VOLUMES if rest.startswith("Volumes/") else DBFS
    if not mount.is_dir():
        raise ValueError(
            f"{text}: this machine has no {mount}, where Databricks mounts it; use a path that every host mounts, "
            "or the storage's own URL (s3://, abfss://, gs://)"
        )
    return str(mount / rest.removeprefix("Volumes/"))


def _checked_url(text: str, scheme: str, slashes: str, rest: str) -> str:
    parts = urlsplit(text)
    try:
        holds_password = parts.password is not None
        _ = parts.port
    except ValueError:  # a password with a slash ends the host early, and the rest is not a port
        holds_password = True
    if holds_password:
        raise ValueError(f"{redacted(text)}: a URL may not hold a password: give credentials in the environment")
    if len(slashes) == 1:
        raise ValueError(f"{text}: one slash behind the scheme, expected {scheme}://{rest}; a folder is ./{text}")
    if "::" in text:  # fsspec would take it for several filesystems
        raise ValueError(f"{text}: a URL with '::' is a chain of URLs: name one folder without it")
    _check_package(text, scheme)
    if (len(slashes) > 2 and scheme != "hdfs") or not rest.strip("/"):  # hdfs:///x is on the cluster's own name node
        raise ValueError(f"{text}: names no bucket or host, expected {scheme}://{rest.strip('/') or 'bucket/folder'}")
    return f"{scheme}:{slashes}{rest}".rstrip("/")


def _check_package(text: str, scheme: str) -> None:
    try:
        fsspec.get_filesystem_class(scheme)
    except (ValueError, ImportError) as error:
        if scheme in _PACKAGES:
            package = _PACKAGES[scheme]
            raise ValueError(
                f"{text}: reading {scheme}:// needs the package {package}: pip install {package} (on all hosts)"
            ) from None
        if isinstance(error, ImportError):
            raise ValueError(f"{text}: {scheme}:// cannot be used: {error}") from None
        raise ValueError(
            f"{text}: the scheme {scheme} is unknown, expected a path or a URL such as s3://bucket/folder"
        ) from None
