"""``hyper-resume verify``: check that the files of a step directory, or of all below a root, are as they were written.

A directory with a manifest is compared with its digests. A stock DCP directory has no digests. There the checksum inside
every entry's archive is checked, which DCP's own reader ignores.
"""

from __future__ import annotations

import contextlib
import io
import zipfile
import zlib
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from torch.distributed.checkpoint.metadata import Metadata

from hyper_resume.checkpoint.disk import observing, operations
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
from hyper_resume.errors import (
    CheckpointMismatchError,
    CheckpointNotFoundError,
    CheckpointUnreadableError,
    describe,
    explained,
    may_pass,
)
from hyper_resume.local_path import local_path

_PIECE_BYTES = 1 << 20


@dataclass(frozen=True, kw_only=True)
class Verification:
    """The result for one step directory. It is good when there are no complaints; notes are not complaints.

    If ``is_readable`` is False, a file can't be read now: the last complaint names it, and what comes after it was not checked.
    """

    path: str
    step: int | None
    attempt: str | None
    files: int
    size_bytes: int
    checked: str
    complaints: tuple[str, ...]
    notes: tuple[str, ...]
    is_readable: bool = True

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
    """Verify one step directory, or all step directories of a root. A run may save there meanwhile.

    Args:
        path: a step directory or a root; a directory with a ``.metadata`` or a manifest is a step directory.
        digests: read all bytes; otherwise check names and sizes only.

    Raises:
        ConfigError: a path is an address with a scheme.
        CheckpointNotFoundError: ``path`` is not a directory, can't be read, or holds no step directories; or it is a step
            directory that was deleted while it was read.
    """
    directory = local_path(path)
    with explained("this can't be verified", directory):
        if not directory.is_dir():
            raise _nothing_to_verify(directory, "no such directory")
        if _is_step_directory(directory):
            only = verify_step_directory(directory, digests=digests)
            return RootVerification(path=str(path), steps=(only,), latest=str(path) if only.is_good else None, notes=())
        if not layout.step_directories(directory):
            raise _nothing_to_verify(directory, "neither .metadata nor global_step_N in it")
        return _RootObserver(directory, digests=digests).verify()


def _nothing_to_verify(directory: Path, found: str) -> CheckpointNotFoundError:
    other = recognise(directory)
    return CheckpointNotFoundError(
        describe(
            "nothing to verify",
            where=str(directory),
            expected="a step directory, or a checkpoint_dir with some",
            found=found if other is None else other.what,
            do="correct the path" if other is None else other.do,
        )
    )


class _RootObserver:
    """Verifies the step directories of a root in which a run may save, replace and delete at the same time."""

    def __init__(self, root: Path, *, digests: bool) -> None:
        self._root = root
        self._digests = digests
        # What was found of each directory, and which directory that was.
        self._found: dict[Path, tuple[observing.Identity | None, Verification]] = {}

    def verify(self) -> RootVerification:
        """Verify every step directory that is there, until LATEST is one of them, or until nothing changes any more."""
        seen: set[Path] = set()
        for _ in range(observing.MAX_LOOKS):
            before = layout.root_identity(self._root)
            steps = [path for _, path in layout.step_directories(self._root)]
            seen |= {*steps}
            for path in steps:
                self._verify(path)
            latest = self._latest()
            if latest is not None or layout.root_identity(self._root) == before:
                break
        deleted = sorted(path.name for path in seen if observing.identity(path) is None)
        notes = [f"deleted while it was read, and not judged: {name}" for name in deleted]
        left = sorted((path for path in self._found if path.name not in deleted), key=_step_of)
        return RootVerification(
            path=str(self._root),
            steps=tuple(self._found[path][1] for path in left),
            latest=None if latest is None else str(latest),
            notes=(*notes, *_root_notes(self._root)),
        )

    def _verify(self, path: Path) -> None:
        now = observing.identity(path)
        if path not in self._found or self._found[path][0] != now:
            self._found.pop(path, None)
            with contextlib.suppress(observing.DirectoryVanishedError):
                self._found[path] = (now, verify_step_directory(path, digests=self._digests))

    def _latest(self) -> Path | None:
        for path in lineage.resume_order(self._root).readable:
            identity, found = self._found.get(path, (None, None))
            if found is not None and found.is_good and identity == observing.identity(path):
                return path
        return None


def _step_of(path: Path) -> int:
    return layout.parse_step(path.name) or 0


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
        count = len(observing.entries_of(root / name))
        if count:
            yield f"{name} holds {count} leftover(s) or saves in progress; the next run that saves here deletes leftovers"
    known = {
        layout.STAGING_NAME,
        layout.TRASH_NAME,
        layout.POINTER_NAME,
        layout.WENT_BACK_NAME,
        LOCK_NAME,
        "certificates",
    }
    names = [entry.name for entry in observing.entries_of(root)]
    others = [name for name in names if name not in known and layout.parse_step(name) is None]
    if others:
        yield f"not written by this library: {', '.join(others[:5])}{' ...' if len(others) > 5 else ''}"


def verify_step_directory(directory: Path, *, digests: bool = True) -> Verification:
    """Verify one step directory. Damage is reported in the result and raises nothing.

    Raises:
        DirectoryVanishedError: it was deleted while it was read.
    """
    return observing.unchanged(directory, lambda: _verify_step_directory(directory, digests=digests))


def _verify_step_directory(directory: Path, *, digests: bool) -> Verification:
    manifest: Manifest | None = None
    complaints: list[str] = []
    notes: list[str] = []
    checked = "nothing"
    is_readable = True
    sizes: list[int] = []
    try:
        sizes = observing.file_sizes(directory)
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
    except (CheckpointMismatchError, CheckpointNotFoundError) as error:
        complaints.append(str(error))
    except CheckpointUnreadableError as error:
        complaints.append(str(error))
        is_readable = False
    except OSError as error:
        complaints.append(f"{error.filename or directory}: it can't be read ({error.strerror or error})")
        is_readable = not may_pass(error)
    return Verification(
        path=str(directory),
        step=manifest.step if manifest else layout.parse_step(directory.name),
        attempt=manifest.attempt if manifest else None,
        files=len(sizes),
        size_bytes=sum(sizes),
        checked=checked,
        complaints=tuple(complaints),
        is_readable=is_readable,
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
            damaged = _damage_of_archive(file, place.offset, place.length)
        if damaged:
            yield f"{place.relative_path}: entry {index.fqn} at byte {place.offset} does not have its checksum ({damaged})"


def _damage_of_archive(file: operations.InputFile, offset: int, length: int) -> str:
    """Return what is wrong with the checksums of one archive in a file; reads it piece by piece, however large it is."""
    try:
        with zipfile.ZipFile(_Range(file, offset, length)) as archive:
            for member in archive.infolist():
                # 0 means that the writer left the checksum out, as this library does and torch can.
                if not member.CRC and member.file_size:
                    continue
                with archive.open(member) as content:
                    while content.read(_PIECE_BYTES):
                        pass
    except (zipfile.BadZipFile, EOFError, ValueError, NotImplementedError, zlib.error) as error:
        return str(error) or type(error).__name__
    return ""


class _Range(io.RawIOBase):
    """A part of a file, as a file."""

    def __init__(self, file: operations.InputFile, offset: int, length: int) -> None:
        self._file = file
        self._begin, self._end = offset, offset + length
        self._at = offset

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._at - self._begin

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        base = {io.SEEK_SET: self._begin, io.SEEK_CUR: self._at, io.SEEK_END: self._end}[whence]
        if base + offset < self._begin:
            raise ValueError("a position before the archive")
        self._at = base + offset
        return self.tell()

    def readinto(self, buffer: Any) -> int:
        view = memoryview(buffer).cast("B")
        content = self._file.view(self._at, max(0, min(len(view), self._end - self._at)))
        view[: len(content)] = content
        self._at += len(content)
        return len(content)


def _position(place: Any) -> tuple[str, int]:
    return place.relative_path, place.offset
