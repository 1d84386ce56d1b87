"""Hints for a name that is not known: the nearest known one, or where to find them all."""

from __future__ import annotations

import difflib
from collections.abc import Iterable


def hint(name: object, known: Iterable[str], *, otherwise: str = "") -> str:
    """Return the end of an error message about an unknown name.

    Args:
        name: what was asked for.
        known: all names that exist.
        otherwise: the text where no known name is near; empty for a list of all of them.
    """
    names = sorted(known)
    near = difflib.get_close_matches(str(name), names, n=1)
    return f"did you mean {near[0]}?" if near else otherwise or f"known: {', '.join(names) or 'none'}"
