"""``hyper-resume verify``: check that the files of a step directory, or of all below a root, are as they were written.

A directory with a manifest is compared with its digests. A stock DCP directory has no digests. There the checksum inside
every entry's archive is checked, which DCP's own reader ignores.
"""

from __future__ import annotations

import io
import zipfile
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from torch.distributed.checkpoint.metadata import Metadata

from hyper_resume.checkpoint.disk import operations
from hyper_resume.checkpoint.disk.lock import LOCK_NAME
from hyper_resume.checkpoint.format import layout
from hyper_resume.checkpoint.format.foreign import recognise
from hyper_resume.checkpoint.format.manifest import (
    MANIFEST_NAME,
    METADATA_NAME,
    Manifest,
    read_manifest,
    unlisted_files,
    verify_files,
)
from hyper_resume.checkpoint.history import lineage
from hyper_resume.checkpoint.loading.file_verification import check_metadata, step_name_mismatch
from hyper_resume.errors import CheckpointMismatchError, CheckpointNotFoundError, describe
from hyper_resume.local_path import local_path


@dataclass(frozen=True, kw_only=True)
class Verification:
    """The result for one step directory. It is good when there are no complaints; notes are not complaints."""

    path: str
    step: int | None
    attempt: str | None
    files: int
    size_bytes: int
    checked: str
    complaints: tuple[str, ...]
    notes: tuple[str, ...]

    @property
    def is_good(self) -> bool:
        """True when every check that ``checked`` names has passed."""
        return not self.complaints


@dataclass(frozen=True, kw_only=True)
class RootVerification:
    """The results for all step directories of a root, lowest step first, and the one that LATEST means."""

    path: str
    steps: tuple[Verification, ...]
    latest: str | None
    notes: tuple[str, ...]

    @property
    def is_good(self) -> bool:
        """True when every step directory is good and LATEST means one of them (or there are none)."""
        return all(step.is_good for step in self.steps) and (self.latest is not None or not self.steps)

    def as_plain(self) -> dict[str, Any]:
        """Return nested dicts and lists that can be written as JSON."""
        return asdict(self)


def verify_path(path: str | Path, *, digests: bool = True) -> RootVerification:
    """Verify one step directory, or all step directories of a root.

    Args:
        path: a step directory or a root; a directory with a ``.metadata`` or a manifest is a step directory.
        digests: read all bytes; otherwise check names and sizes only.

    Raises:
        ConfigError: a path is an address with a scheme.
        CheckpointNotFoundError: ``path`` is not a directory, or holds no step directories.
    """
    directory = local_path(path)
    if _is_step_directory(directory):
        only = verify_step_directory(directory, digests=digests)
        return RootVerification(path=str(path), steps=(only,), latest=str(path) if only.is_good else None, notes=())
    steps = layout.step_directories(directory)
    if not steps:
        other = recognise(directory)
        nothing = "no such directory" if not directory.is_dir() else "neither .metadata nor global_step_N in it"
        raise CheckpointNotFoundError(
            describe(
                "nothing to verify",
                where=str(directory),
                expected="a step directory, or a checkpoint_dir with some",
                found=nothing if other is None else other.what,
                do="correct the path" if other is None else other.do,
            )
        )
    found = tuple(verify_step_directory(step, digests=digests) for _, step in steps)
    good = {step.path for step in found if step.is_good}
    latest = next((str(one) for one in lineage.resume_order(directory).directories if str(one) in good), None)
    return RootVerification(path=str(path), steps=found, latest=latest, notes=tuple(_root_notes(directory)))


def _is_step_directory(directory: Path) -> bool:
    return (
        (directory / METADATA_NAME).exists()
        or (directory / MANIFEST_NAME).exists()
        or layout.parse_step(directory.name) is not None
    )


def _root_notes(root: Path) -> Iterator[str]:
    pointed, complaint = layout.read_pointer(root)
    if complaint:
        yield complaint
    elif pointed is None:
        yield f"no {layout.POINTER_NAME}: LATEST searches all step directories"
    for name in (layout.STAGING_NAME, layout.TRASH_NAME):
        folder = root / name
        count = len(list(folder.iterdir())) if folder.is_dir() else 0
        if count:
            yield f"{name} holds {count} leftover(s) or saves in progress; the next run that saves here deletes leftovers"
    known = {layout.STAGING_NAME, layout.TRASH_NAME, layout.POINTER_NAME, LOCK_NAME, "certificates"}
    others = sorted(
        entry.name for entry in root.iterdir() if entry.name not in known and layout.parse_step(entry.name) is None
    )
    if others:
        yield f"not written by this library: {', '.join(others[:5])}{' ...' if len(others) > 5 else ''}"


def verify_step_directory(directory: Path, *, digests: bool = True) -> Verification:
    """Verify one step directory. Damage is reported in the result and raises nothing."""
    files = [file for file in directory.rglob("*") if file.is_file() and not file.is_symlink()]
    manifest: Manifest | None = None
    complaints: list[str] = []
    notes: list[str] = []
    checked = "nothing"
    try:
        manifest = read_manifest(directory)
        if manifest is None:
            checked = "sizes and the archives' checksums" if digests else "sizes"
            complaints += _verify_without_manifest(directory, digests=digests)
            notes.append("no manifest: another tool wrote it, and its files have no digests")
        else:
            checked = "sizes and digests" if digests else "sizes"
            complaints += verify_files(directory, manifest, sorted(manifest.files), digests=digests)
            complaints += step_name_mismatch(directory, manifest)
            notes += [
                f"{name}: not in the manifest; a load does not read it" for name in unlisted_files(directory, manifest)
            ]
            if not complaints:
                check_metadata(directory, manifest)
    except CheckpointMismatchError as error:
        complaints.append(str(error))
    return Verification(
        path=str(directory),
        step=manifest.step if manifest else layout.parse_step(directory.name),
        attempt=manifest.attempt if manifest else None,
        files=len(files),
        size_bytes=sum(file.stat().st_size for file in files),
        checked=checked,
        complaints=tuple(complaints),
        notes=tuple(notes),
    )


def _verify_without_manifest(directory: Path, *, digests: bool) -> list[str]:
    incomplete = layout.why_incomplete(directory)
    if incomplete:
        return [incomplete]
    metadata = check_metadata(directory, None)
    return list(_damaged_entries(directory, metadata)) if digests else []


def _damaged_entries(directory: Path, metadata: Metadata) -> Iterator[str]:
    for index, place in sorted((metadata.storage_data or {}).items(), key=lambda item: _position(item[1])):
        with operations.current().open_read(directory / place.relative_path) as file:
            file.seek(place.offset)
            content = file.read(place.length)
        damaged = ""
        try:
            with zipfile.ZipFile(io.BytesIO(content)) as archive:
                for member in archive.infolist():
                    # 0 means that the writer left the checksum out, as this library does and torch can.
                    if member.CRC or not member.file_size:
                        archive.read(member)
        except (zipfile.BadZipFile, EOFError, ValueError, NotImplementedError) as error:
            damaged = str(error)
        if damaged:
            yield f"{place.relative_path}: entry {index.fqn} at byte {place.offset} does not have its checksum ({damaged})"


def _position(place: Any) -> tuple[str, int]:
    return place.relative_path, place.offset
