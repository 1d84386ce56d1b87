"""``hyper-resume doctor``: test whether this installation and a directory support saves; each check performs the operation."""

from __future__ import annotations

import os
import platform
import shutil
import uuid
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Literal

import torch
import xxhash

from hyper_resume.checkpoint.disk import lock, observing, operations
from hyper_resume.checkpoint.format import layout
from hyper_resume.errors import DO_READABLE, remedy
from hyper_resume.local_path import local_path

_LOW_SPACE_BYTES = 10 << 30


@dataclass(frozen=True, kw_only=True)
class Finding:
    """The result of one check: ``ok``, ``note`` (it works, with a limitation) or ``problem``; ``do`` says how to fix it."""

    kind: Literal["ok", "note", "problem"]
    what: str
    do: str = ""


def run_checks(checkpoint_dir: Path | None) -> list[Finding]:
    """Check the installation, and a directory that checkpoints are or will be saved to.

    The checks work in a temporary directory below it, which is deleted afterwards; nothing else is changed. If the directory
    does not exist, it is not created, and the nearest existing parent is checked in its place.
    """
    findings = list(_installation())
    if checkpoint_dir is not None:
        findings += _directory(local_path(checkpoint_dir))
    return findings


def _installation() -> Iterator[Finding]:
    yield Finding(
        kind="ok", what=f"Python {platform.python_version()}, torch {torch.__version__}, xxhash {xxhash.VERSION}"
    )
    if not torch.distributed.is_available():
        yield Finding(kind="problem", what="this torch has no torch.distributed", do="install a build with distributed")
    elif not torch.distributed.is_gloo_available():
        yield Finding(kind="problem", what="this torch has no gloo, which saves need", do="install a build with gloo")
    else:
        yield Finding(kind="ok", what="gloo is available for the collectives of a save")


def _directory(checkpoint_dir: Path) -> Iterator[Finding]:
    base = checkpoint_dir
    try:
        while not base.exists() and base != base.parent:
            base = base.parent
        is_directory = base.is_dir()
    except OSError as error:
        yield Finding(kind="problem", what=f"{base} can't be read: {error}", do=DO_READABLE)
        return
    if not is_directory:
        yield Finding(kind="problem", what=f"{base} is not a directory", do="correct the path")
        return
    if base != checkpoint_dir:
        yield Finding(kind="note", what=f"{checkpoint_dir} does not exist yet; {base} is checked in its place")
    trial = base / f".hyper-resume-doctor.{uuid.uuid4().hex[:12]}"
    try:
        operations.current().make_directory(trial)
    except OSError as error:
        do = remedy(error, "fix the cause, or use another directory")
        yield Finding(kind="problem", what=f"no directory can be created in {base}: {error}", do=do)
        return
    try:
        for check in (_durable_files, _atomic_names, _exchange, _file_locks):
            yield _tried(check, trial)
    finally:
        layout.remove(trial)
    yield _space(base)
    if base == checkpoint_dir:
        try:
            yield from _state(checkpoint_dir)
        except OSError as error:
            yield Finding(kind="problem", what=f"{checkpoint_dir} can't be read: {error}", do=DO_READABLE)


def _tried(check: Callable[[Path], Finding], trial: Path) -> Finding:
    try:
        return check(trial)
    except OSError as error:
        name = check.__name__.strip("_").replace("_", " ")
        do = remedy(error, "use another file system for checkpoint_dir")
        return Finding(kind="problem", what=f"{name}: {error}", do=do)


def _durable_files(trial: Path) -> Finding:
    operations.write_file(trial / "file", b"content")
    operations.current().sync_directory(trial)
    if operations.read_bytes(trial / "file", 64) != b"content":
        return Finding(
            kind="problem",
            what="a file that was written and synced does not read back the same",
            do="use another file system for checkpoint_dir",
        )
    return Finding(
        kind="ok", what="files and directories can be synced (whether the device keeps them can't be tested here)"
    )


def _atomic_names(trial: Path) -> Finding:
    disk = operations.current()
    disk.make_directory(trial / "staged")
    disk.rename(trial / "staged", trial / "committed")
    operations.write_file(trial / "new", b"2")
    operations.write_file(trial / "old", b"1")
    disk.rename(trial / "new", trial / "old")
    if operations.read_bytes(trial / "old", 64) != b"2":
        return Finding(
            kind="problem",
            what="a rename over a file did not replace it",
            do="use another file system for checkpoint_dir",
        )
    return Finding(kind="ok", what="a rename replaces a file and moves a directory")


def _exchange(trial: Path) -> Finding:
    disk = operations.current()
    for name in ("one", "other"):
        disk.make_directory(trial / name)
    if disk.exchange(trial / "one", trial / "other"):
        return Finding(kind="ok", what="two names can be exchanged: a step that is saved again is never without a copy")
    return Finding(
        kind="note",
        what="two names can't be exchanged: while a step is saved again, LATEST means the previous step for a moment",
    )


def _file_locks(trial: Path) -> Finding:
    if lock.supports_locks(trial):
        return Finding(kind="ok", what="file locks work: a second run that saves here is refused")
    return Finding(
        kind="note",
        what="no file locks: a second run that saves here is not refused",
        do="make sure that only one run saves here",
    )


def _space(base: Path) -> Finding:
    free = shutil.disk_usage(base).free
    text = f"{free / 2**30:.1f} GiB free for this user"
    if free < _LOW_SPACE_BYTES:
        return Finding(kind="note", what=text, do="free space: a save needs room for one more checkpoint than are kept")
    return Finding(kind="ok", what=text)


def _state(checkpoint_dir: Path) -> Iterator[Finding]:
    """Report the contents of the root by names and sizes; ``hyper-resume verify`` reads the files."""
    try:
        holder = lock.describe_holder(checkpoint_dir)
    except OSError as error:
        do = remedy(error, "fix the cause")
        yield Finding(kind="problem", what=f"{lock.LOCK_NAME} can't be read: {error}", do=do)
        holder = ""
    if holder:
        yield Finding(kind="note", what=f"a run saves here now: {holder}")
    for name in (layout.STAGING_NAME, layout.TRASH_NAME):
        left = observing.entries_of(checkpoint_dir / name)
        if left and not holder:
            yield Finding(kind="note", what=f"{name}: {len(left)} leftover(s), deleted by the next run that saves here")
    steps = layout.step_directories(checkpoint_dir)
    for _, directory in steps:
        try:
            reason = observing.unchanged(directory, partial(layout.why_incomplete, directory))
        except observing.DirectoryVanishedError:
            continue
        if reason:
            yield Finding(
                kind="problem",
                what=f"{directory.name} {reason}",
                do="delete or restore it",
            )
    pointed, complaint = layout.read_pointer(checkpoint_dir)
    if complaint:
        yield Finding(
            kind="problem", what=complaint, do="nothing: LATEST searches all steps, and the next save writes it"
        )
    elif pointed is None and steps:
        yield Finding(kind="note", what=f"no {layout.POINTER_NAME}; the next save writes it")
    elif pointed is not None:
        yield Finding(kind="ok", what=f"LATEST means step {pointed}; {len(steps)} step directories")
    if steps and not os.access(checkpoint_dir, os.W_OK):
        yield Finding(kind="note", what="this user can resume from this directory but can't save to it")
