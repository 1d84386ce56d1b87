"""``manifest.json``: size and digest of every file and bucket of a step directory, and the check of files against it.

It is written last, so if the manifest is whole, all other files were on the device before it. It is JSON with a fixed set of
keys, read with limits; nothing in it is executed. Its own digest shows damage, but it does not protect against forgery.
"""

from __future__ import annotations

import errno
import json
import os
import re
import stat
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from hyper_resume import digest
from hyper_resume.checkpoint.disk import observing, operations, reading
from hyper_resume.checkpoint.format import segments
from hyper_resume.checkpoint.format.mesh import MAX_RANKS, Mesh, mesh_from_plain
from hyper_resume.checkpoint.parsing.strict_json import JsonFormatError, JsonObject, parse_json
from hyper_resume.checkpoint.tensors.threads import map_in_threads
from hyper_resume.errors import CheckpointMismatchError, CheckpointUnreadableError, describe

MANIFEST_NAME = "manifest.json"
METADATA_NAME = ".metadata"
FORMAT = "hyper_resume.manifest"
FORMAT_VERSION = 3
# Version 1 had other digest formats, which are still compared.
_VERSIONS_READ = (1, 2, 3)
MISSING = "it is missing"
MAX_ANCESTORS = 512
# 10,000 ranks with seven buckets and two files each make about 10 MB.
_MAX_BYTES = 256 << 20
_FIRST_WITH_UNCOVERED = 3
_MOST_UNCOVERED = 1_000
_WINDOW_BYTES = 16 << 20
_MAX_SHOWN = 500
# Of a part of a path, in bytes; all characters that are allowed are ASCII.
_MAX_NAME = 255
_MAX_RANKS_IN_LINES = 64
# At most one directory level, no path out of the step directory, and no hidden file below a directory.
_FILE_NAME = re.compile(r"(?:[A-Za-z0-9_][A-Za-z0-9_.-]*/)?[A-Za-z0-9_][A-Za-z0-9_.-]*|\.[A-Za-z0-9_.-]+")
# The id begins with the name of the step directory, which may be any name, and is itself the name of the staging directory.
_ATTEMPT = re.compile(r"(?!\.{1,2}$)[^/\x00-\x1f\x7f\ud800-\udfff]{1,255}")
_RANK = re.compile(r"0|[1-9][0-9]{0,8}")
_DO = "restore the file from a copy, or resume from another checkpoint"


@dataclass(frozen=True, kw_only=True)
class FileEntry:
    """One file: its size in bytes, its digest as text, and the number of the rank that wrote it."""

    size_bytes: int
    digest: str
    rank: int


@dataclass(frozen=True, kw_only=True)
class Manifest:
    """The content of a manifest.

    Attributes:
        step: finished optimizer steps.
        attempt: the save id; each save has its own, even of the same step.
        ordinal: grows by one with each save to this ``checkpoint_dir``. It orders the saves where steps can't, because a run
            that went back saves the same steps again.
        ancestors: (step, save id) of the saves that this one continues, newest last.
        world_size: number of ranks.
        mesh: the mesh of the run, or of its sharded parameters if only these are known; None for plain data parallelism.
        created_at: UTC, ISO 8601.
        versions: the versions of the library and of torch.
        metrics: the metrics by which retention ranks saves.
        files: path below the step directory (``/`` between parts) -> entry; all files but the manifest itself.
        buckets: rank as text -> bucket -> digest of that rank's part of the live state, at the call of ``save``.
        names: rank as text -> bucket -> digest of the names of that rank's entries and of which parts of them it has, for the
            buckets of the payload. Bucket digests can be compared only if a load requests the same parts of the same entries.
        uncovered: rank as text -> paths of what moved on that rank between two saves and is in no bucket; ranks without any
            are left out.
        run: what the run on rank 0 is made of, as nested plain values; empty if the save was not given it.
    """

    step: int
    attempt: str
    ordinal: int
    ancestors: tuple[tuple[int, str], ...]
    world_size: int
    mesh: Mesh | None
    created_at: str
    versions: Mapping[str, str]
    metrics: Mapping[str, float] = field(default_factory=dict)
    files: Mapping[str, FileEntry]
    buckets: Mapping[str, Mapping[str, str]]
    names: Mapping[str, Mapping[str, str]]
    uncovered: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    run: Mapping[str, Any] = field(default_factory=dict)


def encode(manifest: Manifest) -> bytes:
    """Return the file's bytes. Equal manifests give equal bytes. They are read back here: a save that can't be read is none.

    Raises:
        ValueError: :func:`decode` would refuse the file (a number that is not finite, a text that is too long); says why.
    """
    content = {
        "format": FORMAT,
        "format_version": FORMAT_VERSION,
        # Not asdict, which would copy everything.
        **vars(manifest),
        "mesh": None if manifest.mesh is None else manifest.mesh.to_plain(),
        "files": {name: vars(entry) for name, entry in manifest.files.items()},
    }
    whole = {**content, "digest": _own_digest(content)}
    # One value per line for human readers. With a thousand ranks nobody reads it, and the indentation takes most of the time.
    indent = 1 if manifest.world_size <= _MAX_RANKS_IN_LINES else None
    encoded = json.dumps(whole, indent=indent, sort_keys=True, allow_nan=False).encode() + b"\n"
    _decode(_parse(encoded))
    return encoded


def can_hold(run: Any) -> bool:
    """Whether a manifest with this description of a run could be read again."""
    try:
        canonical = json.dumps(run, sort_keys=True)
        read = JsonObject({"run": json.loads(canonical)}).plain("run")
        # They differ where a key is no text, which JSON makes one.
        return json.dumps(read, sort_keys=True) == canonical
    except (ValueError, TypeError, RecursionError):
        return False


def _parse(content: bytes) -> Any:
    if len(content) > _MAX_BYTES:
        raise JsonFormatError(f"{len(content)} bytes; at most {_MAX_BYTES} are read")
    return parse_json(content)


def _own_digest(content: Mapping[str, Any]) -> str:
    canonical = json.dumps(content, sort_keys=True, separators=(",", ":"))
    return digest.bytes_digest_text([canonical.encode()])


def decode(content: bytes, where: str) -> Manifest:
    """Read the file's bytes.

    Args:
        content: the whole file.
        where: the path, for messages.

    Raises:
        CheckpointMismatchError: damaged, not a manifest, or of a newer version.
    """
    try:
        return _decode(_parse(content))
    except (JsonFormatError, RecursionError) as error:
        is_other = isinstance(error, _OtherVersion)
        raise CheckpointMismatchError(
            describe(
                "the checkpoint's manifest can't be trusted",
                where=where,
                expected=f"{FORMAT} of version {' or '.join(map(str, _VERSIONS_READ))}, as it was written",
                found=str(error)[:_MAX_SHOWN],
                do="resume with the version of hyper_resume that wrote it" if is_other else _DO,
            )
        ) from error


class _OtherVersion(JsonFormatError):
    """The file may be valid, but this version of the library does not know its format version."""


def _decode(found: Any) -> Manifest:
    form = JsonObject(found)
    if form.text("format") != FORMAT:
        raise JsonFormatError(f"a file of format {found['format'][:80]!r}")
    if form.integer("format_version") not in _VERSIONS_READ:
        raise _OtherVersion(f"{FORMAT} of version {found['format_version']}")
    if "mesh" not in found:
        raise JsonFormatError("mesh: missing")
    own = form.text("digest")
    content = {key: value for key, value in found.items() if key != "digest"}
    if own != _own_digest(content):
        raise JsonFormatError("its content does not have the digest that it states")
    manifest = Manifest(
        step=form.integer("step", least=0),
        attempt=form.text("attempt", pattern=_ATTEMPT),
        ordinal=form.integer("ordinal", least=0),
        ancestors=tuple(_ancestor(item) for item in form.items("ancestors", most=MAX_ANCESTORS)),
        world_size=form.integer("world_size", least=1, most=MAX_RANKS),
        mesh=mesh_from_plain(found["mesh"]),
        created_at=form.text("created_at"),
        versions={name: form.child("versions").text(name) for name in form.keys_of("versions")},
        metrics={name: form.child("metrics").number(name) for name in form.keys_of("metrics")},
        files={name: _file_entry(name, form.child("files").child(name)) for name in form.keys_of("files")},
        buckets={rank: _bucket_digests(rank, form.child("buckets").child(rank)) for rank in form.keys_of("buckets")},
        names={rank: _bucket_digests(rank, form.child("names").child(rank)) for rank in form.keys_of("names")},
        uncovered=_uncovered(form) if form.integer("format_version") >= _FIRST_WITH_UNCOVERED else {},
        run=form.plain("run") if "run" in found and form.integer("format_version") >= _FIRST_WITH_UNCOVERED else {},
    )
    form.refuse_unknown_keys("format", "format_version", "digest", *Manifest.__dataclass_fields__)
    if METADATA_NAME not in manifest.files:
        raise JsonFormatError(f"files: {METADATA_NAME} is not among them")
    return manifest


def _ancestor(item: Any) -> tuple[int, str]:
    pair = JsonObject({"step": item[0], "attempt": item[1]} if isinstance(item, list) and len(item) == 2 else item)
    return pair.integer("step", least=0), pair.text("attempt", pattern=_ATTEMPT)


def _file_entry(name: str, form: JsonObject) -> FileEntry:
    parts = name.split("/")
    is_possible = _FILE_NAME.fullmatch(name) and max(map(len, parts)) <= _MAX_NAME
    if not is_possible or parts[-1] in (".", "..", MANIFEST_NAME):
        raise JsonFormatError(f"a file name that no save writes: {name[:80]!r}")
    form.refuse_unknown_keys("size_bytes", "digest", "rank")
    return FileEntry(
        size_bytes=form.integer("size_bytes", least=0),
        digest=_digest(form, "digest"),
        rank=form.integer("rank", least=0),
    )


def _bucket_digests(rank: str, form: JsonObject) -> dict[str, str]:
    if not _RANK.fullmatch(rank):
        raise JsonFormatError(f"a rank that is not a number: {rank[:80]!r}")
    return {bucket: _digest(form, bucket) for bucket in form.value}


def _uncovered(form: JsonObject) -> dict[str, tuple[str, ...]]:
    found = form.child("uncovered")
    for rank in form.keys_of("uncovered"):
        if not _RANK.fullmatch(rank):
            raise JsonFormatError(f"a rank that is no number: {rank[:80]!r}")
    return {
        rank: tuple(JsonObject({"path": item}).text("path") for item in found.items(rank, most=_MOST_UNCOVERED))
        for rank in form.keys_of("uncovered")
    }


def _digest(form: JsonObject, key: str) -> str:
    text = form.text(key)
    if not digest.is_digest_text(text):
        raise JsonFormatError(f"{key}: expected a digest of {digest.ALGORITHM}, found {text[:80]!r}")
    return text


def read_manifest(directory: Path) -> Manifest | None:
    """Read a step directory's manifest; None if it has none.

    Raises:
        CheckpointMismatchError: it is no file of a save, or can't be trusted.
        CheckpointUnreadableError: it can't be read now.
    """
    path = directory / MANIFEST_NAME
    try:
        content = reading.again(lambda: operations.read_bytes(path, _MAX_BYTES), path)
    except (FileNotFoundError, NotADirectoryError):
        return None
    except CheckpointUnreadableError:
        raise
    except OSError as error:
        raise CheckpointMismatchError(
            describe(
                "the checkpoint's manifest can't be read",
                where=str(path),
                found=f"{type(error).__name__}: {error}",
                do=_DO,
            )
        ) from error
    return decode(content, str(path))


def verify_files(
    directory: Path,
    manifest: Manifest,
    names: Iterable[str],
    *,
    digests: bool,
    verified_files: dict[str, segments.VerifiedFile] | None = None,
) -> list[str]:
    """Compare files with the manifest.

    Args:
        directory: the step directory.
        manifest: its manifest.
        names: which of ``manifest.files`` to check.
        digests: read the files and compare digests too; otherwise compare sizes only.
        verified_files: filled with file name -> verified file, for the files without a complaint.

    Returns:
        one complaint for each file that differs, with the file's name; an empty list if none does.

    Raises:
        CheckpointUnreadableError: a file can't be read now, so nothing is known of it and of those after it.
    """
    return [
        f"{name}: {complaint}"
        for name in names
        if (complaint := _verify_one(directory, name, manifest.files[name], verified_files, digests=digests))
    ]


def _verify_one(
    directory: Path,
    name: str,
    entry: FileEntry,
    verified_files: dict[str, segments.VerifiedFile] | None,
    *,
    digests: bool,
) -> str:
    try:
        return reading.again(
            lambda: _compare(directory, name, entry, verified_files, digests=digests), directory / name
        )
    except CheckpointUnreadableError:
        raise
    except FileNotFoundError:
        return MISSING
    except OSError as error:
        return f"it can't be read ({errno.errorcode.get(error.errno or 0, 'OSError')}: {error.strerror})"


def _compare(
    directory: Path,
    name: str,
    entry: FileEntry,
    verified_files: dict[str, segments.VerifiedFile] | None,
    *,
    digests: bool,
) -> str:
    path = directory / name
    if path.parent != directory and path.parent.is_symlink():
        return "its directory is a link"
    status = os.lstat(path)
    if not stat.S_ISREG(status.st_mode):
        return "it is not a regular file"
    if status.st_size != entry.size_bytes:
        return f"expected {entry.size_bytes} bytes, found {status.st_size}"
    if not digests:
        return ""
    if digest.is_table_digest(entry.digest):
        with operations.current().open_read(path) as file:
            complaint, verified = segments.verify(file, entry.digest)
        if verified is not None and verified_files is not None:
            verified_files[name] = verified
        return complaint
    found = digest_file(path, like=entry.digest)
    return "" if found == entry.digest else f"expected digest {entry.digest}, found {found}"


def digest_file(path: Path, *, like: str) -> str:
    """Return a file's digest as text, in the format of ``like``. In the table format, only the file's table is digested.

    Raises:
        OSError: it can't be read.
    """
    with operations.current().open_read(path) as file:
        if digest.is_table_digest(like):
            table = segments.read_table(file)
            return "" if table is None else digest.table_digest_text(table)
        if not digest.is_blocks_digest(like):
            return digest.bytes_digest_text(_windows(file, 0, file.size_bytes))
        begins = range(0, file.size_bytes, digest.BLOCK_BYTES)
        spans = [(begin, min(begin + digest.BLOCK_BYTES, file.size_bytes)) for begin in begins]
        return digest.blocks_digest_text(
            map_in_threads(lambda span: digest.chunks_digest(_windows(file, *span)), spans)
        )


def _windows(file: operations.InputFile, begin: int, end: int) -> Iterator[memoryview]:
    for offset in range(begin, end, _WINDOW_BYTES):
        length = min(_WINDOW_BYTES, end - offset)
        file.preload(offset, length)
        yield file.view(offset, length)


def unlisted_files(directory: Path, manifest: Manifest) -> list[str]:
    """Return the files of the step directory that the manifest does not list; a load reads none of them."""
    found = {name for name, _ in observing.files_below(directory)}
    return sorted(found - set(manifest.files) - {MANIFEST_NAME})
