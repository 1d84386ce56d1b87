"""How a command line names cases: the same words for the matrix and for the system tests."""

from __future__ import annotations

import argparse
from collections.abc import Iterable

from conformance.matrix.case import Case, select

_WHAT = "an id, a base id (all its sub-cases) or a quoted glob"


def add_selection(parser: argparse.ArgumentParser, *, default: str) -> None:
    """Add ``[ID ...]`` and ``--case ID``; :func:`selected` reads both. ``default``: what is chosen without any."""
    parser.add_argument("ids", nargs="*", metavar="ID", help=f"{_WHAT}; default: {default}")
    parser.add_argument(
        "--case", action="append", default=[], metavar="ID", help="the same as ID; repeatable, adds to the others"
    )


def wanted(arguments: argparse.Namespace) -> list[str]:
    """The ids that the command line names, in its order; empty where it names none."""
    return [*arguments.ids, *arguments.case]


def selected(cases: Iterable[Case], arguments: argparse.Namespace) -> tuple[Case, ...]:
    """Return the cases that the command line names, or all of ``cases`` where it names none.

    Raises:
        CaseError: an id matches nothing; the nearest known id is suggested.
    """
    return select(cases, wanted(arguments))
