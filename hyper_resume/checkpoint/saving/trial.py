"""Tries at the start of a run what a save needs, so that a run that could not save does not train for hours first."""

from __future__ import annotations

import uuid
from pathlib import Path
from typing import Any

import torch.distributed as dist

from hyper_resume import collective
from hyper_resume.checkpoint.disk import lock, operations
from hyper_resume.checkpoint.format import extra_state, layout
from hyper_resume.checkpoint.saving.publication import add_save_identity
from hyper_resume.checkpoint.tensors.flattening import flatten
from hyper_resume.errors import CheckpointSaveError, HyperResumeError, describe

_PREFIX = ".trial."
_DIGITS = 12


def try_state(state: dict[str, Any], group: dist.ProcessGroup | None) -> None:
    """Check that a save of ``state`` could be read back; copies containers, no tensors. Every rank calls it.

    Raises:
        StateNotPlainError: it holds an object that can't be read back safely; on every rank.
        ValueError: two entries have one name; on every rank.
    """
    collective.on_all_ranks(lambda: flatten(extra_state.to_plain_state(add_save_identity(state, 0))), group)


def try_root(root: Path, group: dist.ProcessGroup | None) -> None:
    """Create and lock the root, and let every rank write a file below it, which is deleted again.

    1. rank 0: creates the root, takes its lock, and creates a directory there; 2. every rank: writes a file to it and syncs it;
    3. rank 0: deletes the directory.

    Raises:
        CheckpointLockedError: another run saves there; on every rank.
        CheckpointSaveError: a rank can't write there; on every rank.
    """
    folder = collective.on_rank_zero(lambda: _explained(root, lambda: _make(root)), group)
    try:
        collective.on_all_ranks(lambda: _explained(root, lambda: _write(folder)), group)
    finally:
        if collective.rank() == 0:
            layout.remove(folder)


def _make(root: Path) -> Path:
    operations.make_directories(root)
    lock.acquire(root)
    # Left by a run that was killed here; the lock is this run's. Another name with this beginning is somebody else's.
    for left in root.glob(f"{_PREFIX}{'[0-9a-f]' * _DIGITS}"):
        layout.remove(left)
    folder = root / f"{_PREFIX}{uuid.uuid4().hex[:_DIGITS]}"
    operations.make_directories(folder)
    return folder


def _write(folder: Path) -> Path:
    path = folder / f"rank_{collective.rank()}"
    operations.write_file(path, b"written at the start of a run, and deleted\n")
    return path


def _explained(root: Path, action: Any) -> Path:
    try:
        path: Path = action()
    except HyperResumeError:
        raise
    except OSError as error:
        raise CheckpointSaveError(
            describe(
                "this run could not save: checkpoint_dir can't be written",
                where=f"{root}, rank {collective.rank()}",
                expected="a directory, on storage that all ranks share, where each rank can create files",
                found=f"{type(error).__name__}: {error}",
                do="fix the cause (disk space, permissions, a mount), set another checkpoint.checkpoint_dir, or set "
                "checkpoint.save_ckpt=false",
            )
        ) from error
    return path
