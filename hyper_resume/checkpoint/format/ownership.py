"""Whether this library wrote what is at a path. A save never replaces what anybody else wrote."""

from __future__ import annotations

import re
from pathlib import Path

from hyper_resume.checkpoint.disk import operations
from hyper_resume.checkpoint.format import extra_state, index
from hyper_resume.checkpoint.format.manifest import MANIFEST_NAME, METADATA_NAME

# The files of a save, of every version of the format.
_OF_A_SAVE = re.compile(
    rf"{re.escape(MANIFEST_NAME)}|{re.escape(index.INDEX_NAME)}|{re.escape(METADATA_NAME)}|__[0-9]+_[0-9]+\.distcp"
    rf"|{extra_state.DIRECTORY_NAME}/extra_state_rank_[0-9]+\.pt"
)
# What these files hold near their beginning, however damaged one of them is. ``.metadata`` names the staging directory.
_MARKS = {
    MANIFEST_NAME: re.compile(rb"hyper_resume\."),
    index.INDEX_NAME: re.compile(rb"hyper_resume\."),
    METADATA_NAME: re.compile(rb"/\.staging/[^/]+\.[0-9a-f]{12}"),
}
_HEAD_BYTES = 1 << 20


def why_not_ours(path: Path) -> str:
    """Return why ``path`` was not, or not wholly, written by a save of this library; "" for a save, or where nothing is.

    A damaged save is still one. A save with a file of somebody else in it is not: deleting it would delete that file.
    """
    if path.is_symlink():
        return "a link"
    if not path.exists():
        return ""
    if not path.is_dir():
        return "a file"
    others = sorted(entry.relative_to(path).as_posix() for entry in path.rglob("*") if not _is_of_a_save(entry, path))
    if others:
        return f"a directory with {others[0]!r}, which no save wrote"
    if not any(_has_mark(path / name, mark) for name, mark in _MARKS.items()):
        return f"a directory that another tool wrote (it has no {MANIFEST_NAME} of this library)"
    return ""


def _is_of_a_save(entry: Path, directory: Path) -> bool:
    if entry.is_symlink():
        return False
    name = entry.relative_to(directory).as_posix()
    return name == extra_state.DIRECTORY_NAME if entry.is_dir() else _OF_A_SAVE.fullmatch(name) is not None


def _has_mark(path: Path, mark: re.Pattern[bytes]) -> bool:
    try:
        return mark.search(operations.read_head(path, _HEAD_BYTES)) is not None
    except OSError:
        return False
