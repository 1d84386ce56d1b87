"""Test data and inspection of the disk for rank-side tests; independent of the code under test."""

from __future__ import annotations

import hashlib
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

RANKS = 4
POINTER = "latest_checkpoint_iteration.txt"
# Every file of a step directory that four ranks wrote.
FILES = {".metadata", "index.json", "manifest.json"} | {
    name for rank in range(RANKS) for name in (f"__{rank}_0.distcp", f"extra_state/extra_state_rank_{rank}.pt")
}


def own_state(step: int, numbers: int = 1000) -> dict[str, Any]:
    """A payload in which each rank has its own tensor and number, computed from rank and step."""
    rank = dist.get_rank()
    return {
        "model": {f"w{rank}": torch.full((numbers,), float(100 * step + rank))},
        "extra_state": {"value": 1000 * step + rank},
    }


def is_whole(directory: Path) -> bool:
    """True if every rank's files exist and none is empty."""
    return files_in(directory) == FILES and all((directory / name).stat().st_size > 0 for name in FILES)


def files_in(directory: Path) -> set[str]:
    """Relative names of all files."""
    return {str(path.relative_to(directory)) for path in directory.rglob("*") if path.is_file()}


def pointed_step(root: Path) -> int | None:
    """The step in the pointer; None if there is no pointer."""
    try:
        return int((root / POINTER).read_text())
    except FileNotFoundError:
        return None


def contents(root: Path) -> dict[str, str]:
    """Every path below ``root`` with the digest of what is in it."""
    return {
        str(path.relative_to(root)): "folder" if path.is_dir() else hashlib.sha256(path.read_bytes()).hexdigest()
        for path in sorted(root.rglob("*"))
    }


def same_on_all_ranks(value: Any) -> bool:
    """True when every rank has an equal value. A collective of torch's own."""
    values: list[Any] = [None] * RANKS
    dist.all_gather_object(values, value)
    return all(other == value for other in values)


@contextmanager
def before_each_change(root: Path, inspect: Callable[[str, str], None]) -> Iterator[None]:
    """Call ``inspect(event, path)`` on this rank just before it changes something below ``root``.

    ``event`` is "open" (for writing) or "os.rename"; of a rename ``path`` is the new name.
    """
    active = True

    def hook(event: str, args: tuple[Any, ...]) -> None:
        if not active or event not in ("open", "os.rename"):
            return
        if event == "open" and not args[2] & (os.O_WRONLY | os.O_RDWR):
            return
        path = str(args[1] if event == "os.rename" else args[0])
        if path.startswith(str(root)):
            inspect(event, path)

    # An audit hook can't be removed, so it is switched off.
    sys.addaudithook(hook)
    try:
        yield
    finally:
        active = False
