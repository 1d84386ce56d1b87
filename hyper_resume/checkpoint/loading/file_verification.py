"""Verifies the files of a step directory against its manifest, on all ranks, before anything is loaded from it."""

from __future__ import annotations

import logging
import re
from collections.abc import Collection
from functools import partial
from pathlib import Path
from typing import Literal

import torch.distributed as dist
from torch.distributed.checkpoint.metadata import Metadata

from hyper_resume import collective
from hyper_resume.checkpoint.disk import observing, operations, reading
from hyper_resume.checkpoint.format import extra_state, layout
from hyper_resume.checkpoint.format.lost_entries import refuse_lost
from hyper_resume.checkpoint.format.manifest import (
    MANIFEST_NAME,
    MISSING,
    Manifest,
    digest_file,
    read_manifest,
    unlisted_files,
    verify_files,
)
from hyper_resume.checkpoint.format.metadata import read_metadata
from hyper_resume.checkpoint.format.segments import VerifiedFile
from hyper_resume.checkpoint.parsing import safe_load
from hyper_resume.errors import CheckpointMismatchError, CheckpointNotFoundError, describe

logger = logging.getLogger(__name__)

Part = Literal["weights", "training state"]
_NAMES_SHOWN = 5
# Every file contains the id of its save as plain text near its beginning.
_SAVE_ID = re.compile(rb"global_step_[0-9]{1,18}\.[0-9a-f]{12}")
_HEAD_BYTES = 1 << 20


def verify(
    directory: Path,
    method: Literal["digest", "size"],
    group: dist.ProcessGroup | None,
    *,
    parts: Collection[Part] = ("weights", "training state"),
    verified_files: dict[str, VerifiedFile] | None = None,
) -> Manifest | None:
    """Verify a step directory against its manifest. Every rank reads the files of its own number; all ranks share the result.

    Args:
        directory: the step directory.
        method: compare sizes only, or digests too.
        group: the process group of all ranks.
        parts: which files to verify: those of the training state, all others, or both.
        verified_files: filled with file name -> verified file, for this rank's files.

    Returns:
        the manifest; None for a directory without one, which can't be verified.

    Raises:
        CheckpointNotFoundError: files are missing, or the training state was taken out; names them, on every rank.
        CheckpointMismatchError: files are not as they were written, or a model key was taken out; names them, on every rank.
        CheckpointUnreadableError: a file can't be read now, so nothing is known of it; on every rank.
    """
    manifest = collective.on_rank_zero(lambda: _read_manifest(directory), group)
    if manifest is None:
        return None
    rank, world_size = collective.rank(), collective.world_size()
    own = [
        name
        for name, entry in sorted(manifest.files.items())
        if entry.rank % world_size == rank and _part_of(name) in parts
    ]
    check = partial(_verify_one, directory, manifest, verified_files, digests=method == "digest")
    found = collective.on_all_ranks(lambda: [complaint for name in own if (complaint := check(name))], group)
    complaints = [complaint for of_rank in collective.all_gather(found, group) for complaint in of_rank]
    complaints = [*step_name_mismatch(directory, manifest), *complaints]
    if complaints:
        if not collective.on_rank_zero(directory.is_dir, group):
            raise observing.vanished_error(directory)
        collective.on_rank_zero(lambda: refuse_lost(directory, manifest, complaints), group)
        only_missing = all(complaint.endswith(MISSING) for complaint in complaints)
        raise (CheckpointNotFoundError if only_missing else CheckpointMismatchError)(
            describe(
                "files of the checkpoint are missing" if only_missing else "the checkpoint is not as it was written",
                where=str(directory),
                expected=f"every file as the manifest of save {manifest.attempt} describes it",
                found="; ".join(complaints[:3]) + (f"; and {len(complaints) - 3} more" if len(complaints) > 3 else ""),
                do="restore the files from a copy, or resume from another checkpoint (LATEST means the newest that verifies); "
                "checkpoint.restore_train_state=false needs no extra_state",
            )
        )
    return manifest


def step_name_mismatch(directory: Path, manifest: Manifest) -> list[str]:
    """Return a complaint if the directory has the name of another step. A name that is not ``global_step_N`` is allowed."""
    step = layout.parse_step(directory.name)
    if step in (None, manifest.step):
        return []
    return [f"the directory's name says step {step}, its manifest step {manifest.step}"]


def check_metadata(directory: Path, manifest: Manifest | None) -> Metadata:
    """Read the metadata of a step directory and compare it with the files.

    The metadata may name only files of the manifest, because others would be read without a digest. Without a manifest, it
    must not come from a save that wrote one.

    Raises:
        CheckpointNotFoundError: the directory has neither a manifest nor metadata.
        CheckpointMismatchError: the metadata can't be decoded or names missing files; or the manifest was lost.
        CheckpointUnreadableError: the metadata, or a file that it names, can't be read now.
    """
    metadata = read_metadata(directory, manifest)
    if manifest is None:
        _refuse_lost_manifest(directory, metadata)
    named = {place.relative_path for place in (metadata.storage_data or {}).values()}
    others = set() if manifest is None else named - set(manifest.files)
    if others:
        raise CheckpointMismatchError(
            describe(
                "the checkpoint's metadata names files that its manifest does not know",
                where=str(directory),
                expected="files of the manifest only",
                found=", ".join(sorted(others)[:3]),
                do="resume from another checkpoint",
            )
        )
    reading.again(lambda: safe_load.check_file_sizes(directory, metadata), directory)
    return metadata


def _part_of(name: str) -> Part:
    return "training state" if name.startswith(f"{extra_state.DIRECTORY_NAME}/") else "weights"


def _read_manifest(directory: Path) -> Manifest | None:
    """Read the manifest, and warn of files that it does not list: somebody may expect that a load reads them."""
    manifest = read_manifest(directory)
    others = [] if manifest is None else unlisted_files(directory, manifest)
    if others:
        more = f" and {len(others) - _NAMES_SHOWN} more" if len(others) > _NAMES_SHOWN else ""
        logger.warning(
            "%s holds files that its manifest does not list; they are not read: %s%s",
            directory,
            ", ".join(others[:_NAMES_SHOWN]),
            more,
        )
    return manifest


def _refuse_lost_manifest(directory: Path, metadata: Metadata) -> None:
    """Refuse a directory without a manifest whose ``.metadata`` comes from a save that wrote one: it can't be verified."""
    about = metadata.storage_meta
    if about is not None and about.save_id and about.save_id == Path(str(about.checkpoint_id)).name:
        raise CheckpointMismatchError(
            describe(
                "the checkpoint has lost its manifest",
                where=str(directory),
                expected=f"{MANIFEST_NAME}, which save {about.save_id} wrote with it",
                found="no such file",
                do="restore the file from a copy, or resume from another checkpoint",
            )
        )


def _verify_one(
    directory: Path, manifest: Manifest, verified_files: dict[str, VerifiedFile] | None, name: str, *, digests: bool
) -> str:
    complaints = verify_files(directory, manifest, [name], digests=digests, verified_files=verified_files)
    return complaints[0] + _origin(directory / name, manifest) if complaints else ""


def _origin(path: Path, manifest: Manifest) -> str:
    """Return a hint about where a wrong file comes from: a file of another save has the right name and often the right size."""
    try:
        head = operations.read_head(path, _HEAD_BYTES)
        others = sorted({found.decode() for found in _SAVE_ID.findall(head)} - {manifest.attempt})
        if others:
            return f" (it is a part of another save: {', '.join(others[:3])})"
        size = path.stat().st_size
        twins = [name for name, entry in manifest.files.items() if entry.size_bytes == size and path.name not in name]
        expected = {name: manifest.files[name].digest for name in twins}
        # One digest for each digest format, however many files there are.
        formats = {text.rpartition(":")[0]: text for text in expected.values()}
        found = {digest_file(path, like=text) for text in formats.values()}
        same = [name for name in twins if expected[name] in found]
    except OSError:
        return ""
    return f" (it has the content of {same[0]})" if same else ""
