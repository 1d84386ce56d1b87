"""What was taken out of a damaged step directory: a model key, or the training state, in the words of specification 9.3.

A save writes the names of its entries twice (``index.json`` and ``.metadata``), and a digest of them into the manifest. So an
entry that somebody has deleted from one of the files can be named, although the files are not as they were written.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from hyper_resume.checkpoint.disk import operations
from hyper_resume.checkpoint.format import extra_state, index
from hyper_resume.checkpoint.format.bucket_digests import name_digests, part_digests
from hyper_resume.checkpoint.format.manifest import METADATA_NAME, MISSING, Manifest, verify_files
from hyper_resume.checkpoint.parsing import safe_load
from hyper_resume.errors import CheckpointMismatchError, CheckpointNotFoundError, describe

_MODEL = "model"
# The files that name the entries.
_DESCRIPTIONS = (index.INDEX_NAME, METADATA_NAME)
_TRAINING_STATE = re.compile(rf"{extra_state.PAYLOAD_KEY}\.rank_[0-9]+\..+")
_SHOWN = 5
_DO = "restore the files from a copy, or resume from another checkpoint"


@dataclass(frozen=True, kw_only=True)
class Lost:
    """``model`` names the lost model keys, ``training_state`` what is lost of the training state; each may be empty."""

    model: Sequence[str] = ()
    training_state: Sequence[str] = ()

    def __str__(self) -> str:
        """In the words of the specification; "" if neither is lost."""
        found = []
        if self.model:
            found.append(f"missing model key: {_first(self.model)}")
        if self.training_state:
            found.append(f"no training state (extra_state): {_first(self.training_state)}")
        return "; ".join(found)


def find_lost(directory: Path, manifest: Manifest, complaints: Sequence[str]) -> Lost:
    """Return what was taken out of a step directory; nothing if other damage is all that is known.

    Args:
        directory: the step directory.
        manifest: its manifest.
        complaints: what :func:`~hyper_resume.checkpoint.format.manifest.verify_files` says of its files.
    """
    files = [complaint for complaint in complaints if complaint.startswith(f"{extra_state.DIRECTORY_NAME}/")]
    if files and all(complaint.endswith(MISSING) for complaint in files) and len(files) == len(complaints):
        return Lost(training_state=files)
    by_file = sorted((names for name in _DESCRIPTIONS if (names := _names(directory / name)) is not None), key=len)
    # After a deletion, one file names some of the other's entries. A flipped byte gives a name that the other does not have.
    if not complaints or not by_file or not by_file[0] <= by_file[-1]:
        return Lost()
    lost = sorted(by_file[-1] - by_file[0])
    model = [name for name in lost if name.startswith(f"{_MODEL}.")]
    if not lost:
        kept = {name: None for name in by_file[0] if name.startswith(f"{_MODEL}.")}
        saved = {names[_MODEL] for names in manifest.names.values() if _MODEL in names}
        # Where the ranks saved different names, all names together are those of none; where tensors were sharded, the digests
        # cover their parts, too.
        now = {digests.get(_MODEL) for digests in (part_digests(kept), name_digests(kept))}
        if len(saved) == 1 and not manifest.mesh and saved.isdisjoint(now):
            model = [f"unknown, because no file names it ({len(kept)} keys are left)"]
    return Lost(model=model, training_state=[name for name in lost if _TRAINING_STATE.fullmatch(name)])


def refuse_lost(directory: Path, manifest: Manifest | None, complaints: Sequence[str] = ()) -> None:
    """Raise if a model key or the training state was taken out of a step directory.

    Args:
        directory: the step directory.
        manifest: its manifest; None raises nothing.
        complaints: what is wrong with its files; by default they are compared here, without reading the shards.

    Raises:
        CheckpointMismatchError: ``missing model key``.
        CheckpointNotFoundError: ``no training state``.
    """
    if manifest is None:
        return
    complaints = complaints or (
        verify_files(directory, manifest, sorted(manifest.files), digests=False)
        or verify_files(directory, manifest, sorted({*_DESCRIPTIONS} & {*manifest.files}), digests=True)
    )
    lost = find_lost(directory, manifest, complaints)
    if not str(lost):
        return
    kind = CheckpointMismatchError if lost.model else CheckpointNotFoundError
    raise kind(
        describe(
            f"{lost}; the checkpoint is not as it was written",
            where=str(directory),
            expected="every entry that the save wrote, in files that are as it wrote them",
            found="; ".join(complaints[:3]) + (f"; and {len(complaints) - 3} more" if len(complaints) > 3 else ""),
            do=_DO if lost.model else f"{_DO}; checkpoint.restore_train_state=false needs no files in extra_state",
        )
    )


def _names(path: Path) -> set[str] | None:
    """Return the names of the entries in an index or a ``.metadata``; None if it can't be read."""
    decode = index.decode if path.name == index.INDEX_NAME else safe_load.load_metadata
    try:
        return set(decode(operations.read_bytes(path, safe_load.MAX_METADATA_BYTES), str(path)).state_dict_metadata)
    except (OSError, CheckpointMismatchError):
        return None


def _first(names: Sequence[str]) -> str:
    more = len(names) - _SHOWN
    return ", ".join(names[:_SHOWN]) + (f" and {more} more" if more > 0 else "")
