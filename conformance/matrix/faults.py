"""Faults: damage to a checkpoint directory between two legs. Standard library only.

Paths are relative to the case's checkpoint directory. They may contain ``*`` (then they must match at least one file) and may
lead into the case's ``disk`` folder (``../aside/x``), but not out of it. A fault that finds nothing to damage raises, and the
case is an error. Faults marked ``by_trainer`` need the trainer's own format; the adapter carries them out in a process of its
own.
"""

from __future__ import annotations

import functools
import os
import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from conformance.plain_data.registry import Registry

POINTER_NAME = "latest_checkpoint_iteration.txt"


class FaultError(RuntimeError):
    """The fault did not fire: what it has to damage is missing, or was not changed."""


@dataclass(frozen=True, kw_only=True)
class Disk:
    """The disk for faults. ``root`` is the case's ``disk`` folder, ``checkpoints`` the checkpoint directory below it."""

    root: Path
    checkpoints: Path

    def path(self, name: str) -> Path:
        """One path, whether or not it exists.

        Raises:
            FaultError: it leads out of ``root``.
        """
        path = Path(os.path.normpath(self.checkpoints / name))
        if not path.is_relative_to(Path(os.path.normpath(self.root))):
            raise FaultError(f"{name} leads out of the case's disk folder")
        return path

    def some(self, name: str) -> list[Path]:
        """The existing paths that ``name`` (``*`` allowed in its parts) matches, sorted; at least one.

        Raises:
            FaultError: there is none.
        """
        target = self.path(name)
        relative = target.relative_to(Path(os.path.normpath(self.root)))
        found = sorted(self.root.glob(str(relative))) if "*" in name else [target]
        if not found or not all(os.path.lexists(path) for path in found):
            raise FaultError(f"{name} does not exist")
        return found


FAULTS: Registry[Callable[..., list[str]]] = Registry("fault")


def inject(kind: str, parameters: Mapping[str, Any], disk: Disk) -> list[str]:
    """Inject the fault, and return what was done, one line per path.

    Raises:
        FaultError: it changed nothing.
    """
    try:
        done = FAULTS.entries[kind].function(disk, **parameters)
    except OSError as error:
        raise FaultError(f"{kind}: {error}") from error
    if not done:
        raise FaultError(f"{kind} did nothing")
    return done


@FAULTS.register()
def remove_file(disk: Disk, *, path: str) -> list[str]:
    """Delete the files (not directories) that ``path`` matches."""
    return [_act(disk, item, "removed", item.unlink) for item in disk.some(path)]


@FAULTS.register()
def remove_dir(disk: Disk, *, path: str) -> list[str]:
    """Delete directories with their content."""
    return [_act(disk, item, "removed", functools.partial(shutil.rmtree, item)) for item in disk.some(path)]


@FAULTS.register()
def truncate(disk: Disk, *, path: str, keep_bytes: int = 0) -> list[str]:
    """Cut files to their first ``keep_bytes`` bytes; a file that is not longer is an error."""
    done = []
    for item in disk.some(path):
        size = item.stat().st_size
        if size <= keep_bytes:
            raise FaultError(f"{item.name} has only {size} bytes")
        os.truncate(item, keep_bytes)
        done.append(f"cut {disk_name(disk, item)} from {size} to {keep_bytes} bytes")
    return done


@FAULTS.register()
def flip_byte(disk: Disk, *, path: str, offset: int) -> list[str]:
    """Invert all bits of one byte; a negative ``offset`` counts from the end."""
    done = []
    for item in disk.some(path):
        content = bytearray(item.read_bytes())
        content[offset] ^= 0xFF
        item.write_bytes(content)
        done.append(f"flipped byte {offset} of {disk_name(disk, item)}")
    return done


@FAULTS.register()
def write_file(disk: Disk, *, path: str, text: str) -> list[str]:
    """Write a text file (created or replaced); its folder is created."""
    target = disk.path(path)
    target.parent.mkdir(parents=True, exist_ok=True)
    target.write_text(text, encoding="utf-8")
    return [f"wrote {disk_name(disk, target)}"]


@FAULTS.register()
def make_dir(disk: Disk, *, path: str) -> list[str]:
    """Make an empty directory that does not exist yet."""
    target = disk.path(path)
    target.mkdir(parents=True)
    return [f"made {disk_name(disk, target)}"]


@FAULTS.register()
def write_pointer(disk: Disk, *, text: str) -> list[str]:
    """Replace the content of the pointer (the pointer need not exist)."""
    return write_file(disk, path=POINTER_NAME, text=text)


@FAULTS.register()
def remove_pointer(disk: Disk) -> list[str]:
    """Delete the pointer."""
    return remove_file(disk, path=POINTER_NAME)


@FAULTS.register()
def remove_metadata(disk: Disk, *, step: int) -> list[str]:
    """Delete a step directory's ``.metadata``, which makes it incomplete."""
    return remove_file(disk, path=f"global_step_{step}/.metadata")


@FAULTS.register()
def empty_metadata(disk: Disk, *, step: int) -> list[str]:
    """Truncate a step directory's ``.metadata`` to 0 bytes, as a power cut can leave it."""
    return truncate(disk, path=f"global_step_{step}/.metadata")


@FAULTS.register()
def copy_path(disk: Disk, *, path: str, to: str) -> list[str]:
    """Copy one file or directory to a path that does not exist."""
    (source,), target = disk.some(path), _free(disk, to)
    if source.is_dir():
        shutil.copytree(source, target, symlinks=True)
    else:
        shutil.copy2(source, target)
    return [f"copied {disk_name(disk, source)} to {disk_name(disk, target)}"]


@FAULTS.register()
def rename(disk: Disk, *, path: str, to: str) -> list[str]:
    """Move one file or directory to a path that does not exist. ``path: .`` moves the checkpoint directory itself."""
    (source,), target = disk.some(path), _free(disk, to)
    source.rename(target)
    return [f"renamed {disk_name(disk, source)} to {disk_name(disk, target)}"]


@FAULTS.register()
def replace_file_from(disk: Disk, *, path: str, source: str) -> list[str]:
    """Replace a file by a copy of another; equal contents are an error, because nothing would change."""
    (target,), (other,) = disk.some(path), disk.some(source)
    if target.read_bytes() == other.read_bytes():
        raise FaultError(f"{path} and {source} hold the same bytes")
    shutil.copy2(other, target)
    return [f"replaced {disk_name(disk, target)} by {disk_name(disk, other)}"]


@FAULTS.register()
def symlink(disk: Disk, *, path: str, to: str) -> list[str]:
    """Make ``path`` a symbolic link with the text ``to``."""
    link = _free(disk, path)
    link.symlink_to(to)
    return [f"linked {disk_name(disk, link)} to {to}"]


@FAULTS.register()
def chmod(disk: Disk, *, path: str, mode: str) -> list[str]:
    """Set permissions, as an octal text ("0555"). The user root is not bound by them."""
    return [_act(disk, item, f"{mode} on", functools.partial(item.chmod, int(mode, 8))) for item in disk.some(path)]


@FAULTS.register()
def set_times(disk: Disk, *, path: str, seconds: int) -> list[str]:
    """Set the modification time of files or directories, in seconds since 1970."""
    return [
        _act(disk, item, "dated", functools.partial(os.utime, item, (seconds, seconds))) for item in disk.some(path)
    ]


# ---- by the trainer's own process -----------------------------------------------------------------------------------


def _by_trainer(kind: str) -> list[str]:
    raise FaultError(f"{kind} must be carried out by the adapter")


@FAULTS.register(by_trainer=True)
def make_foreign(disk: Disk, *, step: int) -> list[str]:
    """Make the step directory one that stock DCP could have written: the same content, without manifest and save ids.

    The removals and edits below do this too, each after its own change.
    """
    return _by_trainer("make_foreign")


@FAULTS.register(by_trainer=True)
def flip_tensor_byte(disk: Disk, *, step: int, entry: str, rank: int = 0, part: str = "numbers") -> list[str]:
    """Flip a bit in what ``rank`` stored of ``entry``: in its first number, or in its archive's ``end``. The manifest stays."""
    return _by_trainer("flip_tensor_byte")


@FAULTS.register(by_trainer=True, edits=True)
def remove_model_key(disk: Disk, *, step: int, key: str) -> list[str]:
    """Write the step directory again without the model entry ``key`` (with or without its ``model.`` prefix)."""
    return _by_trainer("remove_model_key")


@FAULTS.register(by_trainer=True, edits=True)
def remove_optimizer_entry(disk: Disk, *, step: int, entry: str) -> list[str]:
    """Write the step directory again without the optimizer entries whose name ends in ``entry`` (``hidden.weight.exp_avg``)."""
    return _by_trainer("remove_optimizer_entry")


@FAULTS.register(by_trainer=True, edits=True)
def remove_extra_state(disk: Disk, *, step: int) -> list[str]:
    """Write the step directory again without embedded training state."""
    return _by_trainer("remove_extra_state")


@FAULTS.register(by_trainer=True, edits=True)
def edit_extra_state(
    disk: Disk,
    *,
    step: int,
    path: str,
    rank: int = 0,
    value: str | int | float | bool | None = None,
    delete: bool = False,
) -> list[str]:
    """Set (or delete) one value of a rank's training state, in either layout; ``path`` is dotted."""
    return _by_trainer("edit_extra_state")


def _act(disk: Disk, path: Path, verb: str, action: Callable[[], Any]) -> str:
    name = disk_name(disk, path)
    action()
    return f"{verb} {name}"


def disk_name(disk: Disk, path: Path) -> str:
    """``path`` as records show it: relative to the case's disk folder, so that no path of a machine is recorded."""
    return str(path.relative_to(Path(os.path.normpath(disk.root))))


def _free(disk: Disk, name: str) -> Path:
    target = disk.path(name)
    if os.path.lexists(target):
        raise FaultError(f"{name} exists already")
    target.parent.mkdir(parents=True, exist_ok=True)
    return target
