"""Runs all readers of the library on a step directory with one hostile file, and verifies what they read."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import xxhash

from conformance.storage.hostile.directory import SHARD, STEP, good_files, good_state, raw
from conformance.storage.hostile.meaning import UnreadableError, doubt_description, index_meaning, table_meaning, value
from hyper_resume.checkpoint import DistributedCheckpointer
from hyper_resume.checkpoint.commands.inspect import inspect_step_directory
from hyper_resume.checkpoint.commands.verification import verify_step_directory
from hyper_resume.checkpoint.format.manifest import read_manifest, verify_files
from hyper_resume.checkpoint.format.segments import VerifiedFile
from hyper_resume.checkpoint.loading.file_verification import check_metadata
from hyper_resume.checkpoint.loading.reading import load_entries
from hyper_resume.errors import CheckpointMismatchError, HyperResumeError


class LiveStateTouched(AssertionError):
    """A load was refused after it had written to the live state."""


class Disagreement(AssertionError):
    """One reader accepts the directory, and another refuses it."""


@dataclass(frozen=True, kw_only=True)
class Opened:
    """What the readers returned.

    Attributes:
        metadata: the description.
        verified_files: of the files that were verified.
        values: name -> value, of all entries together; None where that was refused.
        data_digests: name -> digest of a tensor's bytes, if the verification returned it.
        live: name -> value after a load into the live state; None where that was refused.
    """

    metadata: Any
    verified_files: Mapping[str, VerifiedFile]
    values: Mapping[str, Any] | None
    data_digests: Mapping[str, bytes]
    live: Mapping[str, Any] | None


def open_directory(_: bytes) -> Opened:
    """Load, verify, describe and inspect the step directory of the working directory.

    Raises:
        HyperResumeError: all of them refuse its files or its description.
        LiveStateTouched: see there.
        Disagreement: see there.
    """
    directory = Path(STEP)
    live = _loaded()
    is_good = verify_step_directory(directory).is_good
    try:
        manifest = read_manifest(directory)
        assert manifest is not None
        verified_files: dict[str, VerifiedFile] = {}
        complaints = verify_files(
            directory, manifest, sorted(manifest.files), digests=True, verified_files=verified_files
        )
        if complaints:
            raise CheckpointMismatchError("; ".join(complaints))
        metadata = check_metadata(directory, manifest)
    except HyperResumeError:
        if live is not None or is_good:
            raise Disagreement(f"refused, but by {'load' if live is not None else 'verify'}") from None
        raise
    if not is_good:
        raise Disagreement("taken, but not by verify")
    DistributedCheckpointer().describe(STEP)
    inspect_step_directory(STEP)
    values, data_digests = None, {}
    try:
        found = load_entries(dict.fromkeys(metadata.state_dict_metadata), directory, metadata, verified_files)
    except HyperResumeError:
        pass
    else:
        values, data_digests = found.values, found.data_digests
    return Opened(metadata=metadata, verified_files=verified_files, values=values, data_digests=data_digests, live=live)


def _loaded() -> dict[str, Any] | None:
    live = {
        name: torch.full_like(value, 7) if isinstance(value, torch.Tensor) else None
        for name, value in good_state().items()
    }
    nested: dict[str, Any] = {"model": {}, "optimizer": {}}
    for name, one in live.items():
        bucket, _, rest = name.partition(".")
        nested[bucket][rest] = one
    refusal = None
    try:
        DistributedCheckpointer().load(STEP, nested)
    except HyperResumeError as error:
        refusal = error
    found = {f"{bucket}.{rest}": one for bucket, of_bucket in nested.items() for rest, one in of_bucket.items()}
    if refusal is None:
        return found
    is_same = all(bool((one == 7).all()) if isinstance(one, torch.Tensor) else one is None for one in found.values())
    if found.keys() != live.keys() or not is_same:
        raise LiveStateTouched(str(refusal))
    return None


def doubt(name: str) -> Callable[[bytes, Opened], str]:
    """Returns the verifier for a directory whose file ``name`` is hostile."""
    return lambda content, opened: _doubt({**good_files(), name: content}, opened)


def _doubt(files: Mapping[str, bytes], opened: Opened) -> str:
    try:
        meaning = index_meaning(files["index.json"], files)
        wrong = doubt_description(opened.metadata, meaning) or _doubt_proof(files, opened)
        if wrong:
            return wrong
        read = {**(opened.values or {})}
        # Live state that the checkpoint does not have is unchanged; missing entries of a model are refused.
        filled = {
            name: one for name, one in (opened.live or {}).items() if name in meaning or name.startswith("model.")
        }
        for name, found in [*read.items(), *filled.items()]:
            if name not in meaning or not _is_same(found, value(meaning[name], files)):
                return f"{name[:100]}: other values than its bytes are"
        for name, digest in opened.data_digests.items():
            if xxhash.xxh3_128_digest(raw(read[name])) != digest:
                return f"{name[:100]}: known by a digest that is not of its bytes"
    except UnreadableError as reason:
        return f"it says nothing, and was read: {reason}"
    return ""


def _doubt_proof(files: Mapping[str, bytes], opened: Opened) -> str:
    if not files[SHARD].endswith(b"hrsegm01"):
        return "known by a table that is none" if SHARD in opened.verified_files else ""
    expected = {begin: (length, digest) for begin, length, digest in table_meaning(files[SHARD]) if length}
    if SHARD not in opened.verified_files:
        return ""
    known = opened.verified_files[SHARD].segments
    found = {begin: (one.length, one.digest) for begin, one in known.items() if one.length}
    return "" if found == expected else "other segments than the table has"


def _is_same(found: Any, expected: Any) -> bool:
    if not isinstance(found, torch.Tensor) or not isinstance(expected, torch.Tensor):
        # By its text, because NaN is not equal to itself.
        return repr(found) == repr(expected) or (
            isinstance(found, torch.Tensor) and not found.numel() and expected == ""
        )
    return (found.dtype, found.shape) == (expected.dtype, expected.shape) and raw(found) == raw(expected)
