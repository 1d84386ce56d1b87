"""Paths of the local file system. An address with a scheme (``s3://bucket/run``) is refused: it would name a local folder."""

from __future__ import annotations

import os
import re
from pathlib import Path

from hyper_resume.errors import ConfigError, describe

# Of two letters at least, as a drive has one. One slash is enough: pathlib writes "s3://bucket" as "s3:/bucket".
_SCHEME = re.compile(r"([A-Za-z][A-Za-z0-9+.:-]+):/")
EXPECTED = "a path of a mounted file system, without a scheme"
DO = "mount the storage and give the path, or copy the files; for a local folder of that very name write ./ before it"


def scheme_of(path: str | os.PathLike[str]) -> str:
    """Return the scheme of an address (``s3``); "" for a path of the file system."""
    match = _SCHEME.match(os.fspath(path))
    return match.group(1) if match else ""


def local_path(path: str | os.PathLike[str]) -> Path:
    """Return ``path`` as a path of the file system.

    Raises:
        ConfigError: it is an address with a scheme, which no storage backend serves.
    """
    scheme = scheme_of(path)
    if scheme:
        raise ConfigError(
            describe(f"no storage backend serves {scheme}: addresses", expected=EXPECTED, found=os.fspath(path), do=DO)
        )
    return Path(path)


def working_directory() -> Path:
    """Return the working directory of this process; ``.`` where it was deleted."""
    try:
        return Path.cwd()
    except FileNotFoundError:
        return Path()
