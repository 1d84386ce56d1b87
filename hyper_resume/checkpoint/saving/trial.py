"""Tries at the start of a run what a save needs, so that a run that could not save does not train for hours first."""

from __future__ import annotations

import contextlib
import errno
import uuid
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch.distributed as dist

from hyper_resume import collective
from hyper_resume.checkpoint.disk import lock, operations
from hyper_resume.checkpoint.format import extra_state, layout
from hyper_resume.checkpoint.saving.publication import add_save_identity, explained_for_root
from hyper_resume.checkpoint.tensors.flattening import flatten

_PREFIX = ".trial."
_DIGITS = 12


def try_state(state: dict[str, Any], group: dist.ProcessGroup | None) -> None:
    """Check that a save of ``state`` could be read back; copies containers, no tensors. Every rank calls it.

    Raises:
        StateNotPlainError: it holds an object that can't be read back safely; on every rank.
        ValueError: two entries have one name; on every rank.
    """
    collective.on_all_ranks(lambda: flatten(extra_state.to_plain_state(add_save_identity(state, 0))), group)


def check_names(root: Path, is_planned: Callable[[int], bool]) -> None:
    """Refuse what no save wrote where this run plans to save; on rank 0, before anything is made.

    Raises:
        CheckpointSaveError: names the first such step.
    """
    entries = explained_for_root(root, lambda: sorted(root.iterdir()) if root.is_dir() else [])
    steps = sorted((step, entry) for entry in entries if (step := layout.parse_step(entry.name)) is not None)
    for step, entry in steps:
        if is_planned(step):
            layout.refuse_taken_name(entry)


def try_root(root: Path, group: dist.ProcessGroup | None) -> None:
    """Do at the start what a save does below ``root``, on every rank; nothing is left but the root and its lock.

    1. rank 0: creates the root, takes its lock, and creates a directory in ``.staging``; 2. every rank: writes a file to it
    and syncs it; 3. rank 0: renames the directory into the root, syncs the root, and deletes the directory.

    Raises:
        CheckpointLockedError: another run saves there; on every rank.
        CheckpointSaveError: a rank can't write there, or a name that a save needs is taken; on every rank.
    """
    folder, had_staging = collective.on_rank_zero(lambda: explained_for_root(root, lambda: _make(root)), group)
    try:
        collective.on_all_ranks(lambda: explained_for_root(root, lambda: _write(folder)), group)
        collective.on_rank_zero(lambda: explained_for_root(root, lambda: _move(folder, root)), group)
    finally:
        if collective.rank() == 0:
            layout.remove(folder)
            layout.remove(root / folder.name)
            if not had_staging:
                with contextlib.suppress(OSError):
                    operations.current().remove_directory(folder.parent)


def _make(root: Path) -> tuple[Path, bool]:
    """Return the directory that was made below ``.staging``, and whether that was there before."""
    operations.make_directories(root)
    had_staging = (root / layout.STAGING_NAME).exists()
    lock.acquire(root)
    # Left by a run that was killed here; the lock is this run's. Another name with this beginning is somebody else's.
    for left in root.glob(f"{_PREFIX}{'[0-9a-f]' * _DIGITS}"):
        layout.remove(left)
    folder = root / layout.STAGING_NAME / f"{_PREFIX}{uuid.uuid4().hex[:_DIGITS]}"
    operations.make_directories(folder)
    return folder, had_staging


def _write(folder: Path) -> Path:
    path = folder / f"rank_{collective.rank()}"
    operations.write_file(path, b"written at the start of a run, and deleted\n")
    return path


def _move(folder: Path, root: Path) -> Path:
    operations.current().rename(folder, root / folder.name)
    operations.current().sync_directory(root)
    pointer = root / layout.POINTER_NAME
    if pointer.is_dir() and not pointer.is_symlink():
        raise IsADirectoryError(errno.EISDIR, "a directory has the name of the pointer", str(pointer))
    return root
