"""How a case names one change on disk: by its number, or by its kind and a pattern for the path (``fsync *.distcp``)."""

from __future__ import annotations

import fnmatch

KINDS = (
    "create",
    "write",
    "fsync",
    "truncate",
    "rename",
    "remove",
    "make directory",
    "remove directory",
    "link",
    "exchange",
)


def name_problem(text: str) -> str:
    """Return why ``text`` is no valid name of a change (a kind and a pattern for the path); empty for a valid one."""
    kind = next((kind for kind in KINDS if text.startswith(f"{kind} ")), None)
    if kind is None or not text[len(kind) :].strip():
        return f"{text!r} is no name such as 'fsync *.distcp': one of {', '.join(KINDS)}, and a pattern of where"
    return ""


def selects_operation(wanted: int | str, number: int, change: str) -> bool:
    """True when ``wanted`` is the change's number, or a pattern that ``change`` (its kind and path) matches."""
    return fnmatch.fnmatchcase(change, wanted) if isinstance(wanted, str) else number == wanted
