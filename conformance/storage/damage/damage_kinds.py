"""The kinds of damage, and the content of a step directory with each. Pure functions on bytes.

A case id is enough to repeat the damage: ``corruption:per_rank:flip:.metadata:123.4`` is bit 4 of byte 123.
"""

from __future__ import annotations

import json
import random
import struct
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import xxhash

from conformance.storage.workload.small_checkpoint import Layout

TIER = "corruption"
SECTOR = 512
MANIFEST = "manifest.json"
METADATA = ".metadata"
# The content of a step directory: relative path -> bytes.
Content = dict[str, bytes]

# The kinds of single-file damage with a file of another save, and which save (see `judge.build`).
FOREIGN: Mapping[str, str] = {
    "stale file": "older",
    "file of another attempt": "attempt",
    "file of an equal attempt": "equal",
    "file of another world size": "alone",
}
# Damage that must be refused, even where the loaded values would be right.
_REFUSED_EDITS = frozenset(
    ("step", "attempt", "format-version", "unknown-key", "file-digest", "file-size", "file-outside", "absolute-name",
     "unknown-file")
)  # fmt: skip
# Other words by which an error may name files that do not belong together.
_ALSO_NAMED: Mapping[str, tuple[str, ...]] = {
    "step": ("its manifest step", "its manifest is of"),
    "attempt": ("parts of different saves",),
    "unknown-file": ("__7_0.distcp",),
}
# Damage that is detected without reading a file.
SHOWS_IN_SIZE = ("truncated", "appended", "missing")


@dataclass(frozen=True, kw_only=True)
class Damage:
    """One case: ``kind`` to ``file`` (path below the step directory), in one layout of the training state."""

    layout: Layout
    kind: str
    file: str
    detail: str = ""

    @property
    def id(self) -> str:
        """``replay`` takes it."""
        return ":".join((TIER, self.layout, self.kind.replace(" ", "-"), self.file, self.detail))

    @property
    def culprits(self) -> tuple[str, ...]:
        """The files of which an error must name at least one."""
        if self.kind == "swapped":
            return (self.file, self.detail)
        if self.kind.startswith("manifest "):
            return (MANIFEST, self.file, *_ALSO_NAMED.get(self.detail, ()))
        if self.file == MANIFEST and self.kind in FOREIGN:
            # Then all other files differ from the manifest, so any of them may be named.
            return (MANIFEST, METADATA, ".distcp", "extra_state_rank_")
        return (self.file,)

    @property
    def must_be_refused(self) -> bool:
        """True if it must be detected, whatever values are loaded."""
        return self.kind == "missing" or (self.kind.startswith("manifest ") and self.detail in _REFUSED_EDITS)


@dataclass(frozen=True, kw_only=True)
class Material:
    """The step directory to damage, and others to take files from, by name."""

    layout: Layout
    newest: Content
    others: Mapping[str, Content]


def reported_place(damage: Damage, material: Material) -> int | None:
    """The byte of a shard that must lie in the range that the error names; None where no range is required.

    A shard's table has a digest per segment. If the table itself is damaged, no range can be named.
    """
    if damage.kind != "flip" or not damage.file.endswith(".distcp"):
        return None
    content = material.newest[damage.file]
    (count,) = struct.unpack("<Q", content[-16:-8])
    offset = int(damage.detail.partition(".")[0])
    return offset if offset < len(content) - 24 * count - 16 else None


def parse_id(case_id: str) -> Damage:
    """The damage of an id.

    Raises:
        ValueError: it is no such id.
    """
    tier, layout, kind, file, detail = case_id.split(":", 4)
    if tier != TIER or layout not in ("per_rank", "embedded"):
        raise ValueError(f"no id of this tier: {case_id}")
    return Damage(layout=layout, kind=kind.replace("-", " "), file=file, detail=detail)  # type: ignore[arg-type]  # looked at


def damaged(damage: Damage, material: Material) -> Content:
    """The content of the step directory with that damage.

    Raises:
        KeyError: there is no such kind, file or edit.
    """
    content = dict(material.newest)
    _KINDS[damage.kind](content, damage, material)
    return content


# ---- the kinds ----------------------------------------------------------------------------------------------------------


def _flip(content: Content, damage: Damage, material: Material) -> None:
    offset, bit = map(int, damage.detail.split("."))
    changed = bytearray(content[damage.file])
    changed[offset] ^= 1 << bit
    content[damage.file] = bytes(changed)


def _truncate(content: Content, damage: Damage, material: Material) -> None:
    content[damage.file] = content[damage.file][: int(damage.detail)]


def _append(content: Content, damage: Damage, material: Material) -> None:
    content[damage.file] += b"\0" * int(damage.detail)


def _zero(content: Content, damage: Damage, material: Material) -> None:
    start = int(damage.detail) * SECTOR
    old = content[damage.file]
    content[damage.file] = old[:start] + b"\0" * len(old[start : start + SECTOR]) + old[start + SECTOR :]


def _swap(content: Content, damage: Damage, material: Material) -> None:
    one, other = damage.file, damage.detail
    content[one], content[other] = content[other], content[one]


def _duplicate(content: Content, damage: Damage, material: Material) -> None:
    content[damage.file] = content[damage.detail]


def _take(content: Content, damage: Damage, material: Material) -> None:
    content[damage.file] = material.others[FOREIGN[damage.kind]][damage.file]


def _lose(content: Content, damage: Damage, material: Material) -> None:
    del content[damage.file]


def _add(content: Content, damage: Damage, material: Material) -> None:
    content[damage.file] = content[damage.detail]


def _edit(content: Content, damage: Damage, material: Material) -> None:
    manifest = json.loads(content[MANIFEST])
    EDITS[damage.detail](manifest, content, damage.file)
    if damage.kind == "manifest resealed":
        manifest["digest"] = own_digest(manifest)
    content[MANIFEST] = (json.dumps(manifest, indent=1, sort_keys=True) + "\n").encode()


def own_digest(manifest: Mapping[str, Any]) -> str:
    """The manifest's digest of itself, computed without the library: of its JSON without that key, sorted, unspaced."""
    rest = {key: value for key, value in manifest.items() if key != "digest"}
    return "xxh3_128:" + xxhash.xxh3_128_hexdigest(json.dumps(rest, sort_keys=True, separators=(",", ":")).encode())


_KINDS: Mapping[str, Callable[[Content, Damage, Material], None]] = {
    "flip": _flip,
    "truncated": _truncate,
    "appended": _append,
    "zeroed sector": _zero,
    "swapped": _swap,
    "duplicated": _duplicate,
    **dict.fromkeys(FOREIGN, _take),
    "missing": _lose,
    "extra": _add,
    "manifest edited": _edit,
    "manifest resealed": _edit,
}


# ---- edits of the manifest: (manifest, content of the directory, file) --------------------------------------------------


def _other_digest(text: str) -> str:
    return text[:-1] + ("0" if text[-1] != "0" else "1")


def _break_byte(content: Content, file: str) -> None:
    half = len(content[file]) // 2
    content[file] = content[file][:half] + bytes([content[file][half] ^ 1]) + content[file][half + 1 :]


def _edit_step(manifest: dict[str, Any], content: Content, file: str) -> None:
    manifest["step"] += 1


def _edit_attempt(manifest: dict[str, Any], content: Content, file: str) -> None:
    manifest["attempt"] = _other_digest(manifest["attempt"])


def _edit_world(manifest: dict[str, Any], content: Content, file: str) -> None:
    manifest["world_size"] += 1


def _edit_format(manifest: dict[str, Any], content: Content, file: str) -> None:
    manifest["format_version"] += 1


def _edit_file_digest(manifest: dict[str, Any], content: Content, file: str) -> None:
    manifest["files"][file]["digest"] = _other_digest(manifest["files"][file]["digest"])


def _edit_file_size(manifest: dict[str, Any], content: Content, file: str) -> None:
    manifest["files"][file]["size_bytes"] += 1


def _edit_unlisted(manifest: dict[str, Any], content: Content, file: str) -> None:
    del manifest["files"][file]


def _edit_unlisted_and_broken(manifest: dict[str, Any], content: Content, file: str) -> None:
    del manifest["files"][file]
    _break_byte(content, file)


def _edit_rank_and_broken(manifest: dict[str, Any], content: Content, file: str) -> None:
    manifest["files"][file]["rank"] = 99
    _break_byte(content, file)


def _edit_outside(manifest: dict[str, Any], content: Content, file: str) -> None:
    manifest["files"][f"../global_step_10/{file}"] = manifest["files"][file]


def _edit_absolute(manifest: dict[str, Any], content: Content, file: str) -> None:
    manifest["files"]["/etc/hostname"] = manifest["files"].pop(file)


def _edit_unknown_file(manifest: dict[str, Any], content: Content, file: str) -> None:
    manifest["files"]["__7_0.distcp"] = manifest["files"][file]


def _edit_bucket(manifest: dict[str, Any], content: Content, file: str) -> None:
    for digests in manifest["buckets"].values():
        for bucket in digests:
            digests[bucket] = _other_digest(digests[bucket])


def _edit_unknown_key(manifest: dict[str, Any], content: Content, file: str) -> None:
    manifest["note"] = "edited"


EDITS: Mapping[str, Callable[[dict[str, Any], Content, str], None]] = {
    "step": _edit_step,
    "attempt": _edit_attempt,
    "world-size": _edit_world,
    "format-version": _edit_format,
    "unknown-key": _edit_unknown_key,
    "bucket-digests": _edit_bucket,
    "file-digest": _edit_file_digest,
    "file-size": _edit_file_size,
    "file-unlisted": _edit_unlisted,
    "file-unlisted-and-broken": _edit_unlisted_and_broken,
    "rank-of-no-one-file-broken": _edit_rank_and_broken,
    "file-outside": _edit_outside,
    "absolute-name": _edit_absolute,
    "unknown-file": _edit_unknown_file,
}


# ---- all cases ----------------------------------------------------------------------------------------------------------


def flips(material: Material, seed: int) -> Iterator[Damage]:
    """One bit of every byte of every file."""
    for file in sorted(material.newest):
        choose = random.Random(f"{seed}/{material.layout}/{file}")
        for offset in range(len(material.newest[file])):
            yield Damage(layout=material.layout, kind="flip", file=file, detail=f"{offset}.{choose.randrange(8)}")


def truncations(material: Material, seed: int, count: int) -> list[Damage]:
    """``count`` lengths over all files: both ends of each file, then random lengths."""
    choose = random.Random(f"{seed}/{material.layout}/truncated")
    sizes = {file: len(content) for file, content in sorted(material.newest.items())}
    places = [(file, length) for file, size in sizes.items() for length in sorted({0, 1, size - 1})]
    rest = [(file, length) for file, size in sizes.items() for length in range(2, size - 1)]
    places = (places + choose.sample(rest, min(len(rest), max(0, count - len(places)))))[:count]
    return [Damage(layout=material.layout, kind="truncated", file=file, detail=str(length)) for file, length in places]


def others(material: Material) -> list[Damage]:
    """All other damage, except damage that would change nothing (a sector that is zero already)."""
    found = [
        Damage(layout=material.layout, kind=kind, file=file, detail=detail)
        for kind, file, detail in _other_places(material)
    ]
    return [damage for damage in found if damaged(damage, material) != material.newest]


def _other_places(material: Material) -> Iterator[tuple[str, str, str]]:
    files = sorted(material.newest)
    for file in files:
        yield from (("appended", file, length) for length in ("1", "512"))
        yield from (("zeroed sector", file, str(n)) for n in range(-(-len(material.newest[file]) // SECTOR)))
        yield ("missing", file, "")
        yield from ((kind, file, "") for kind, name in FOREIGN.items() if file in material.others[name])
    for one, other in _pairs(files):
        yield ("swapped", one, other)
        yield from (("duplicated", one, other), ("duplicated", other, one))
        third = one.replace("_0.pt", "_2.pt").replace("__0_", "__2_")
        yield ("extra", third, one)
    yield from (("extra", name, METADATA) for name in ("notes.txt", ".metadata.tmp", "extra_state/notes.txt"))
    for kind in ("manifest edited", "manifest resealed"):
        for edit in EDITS:
            # A shard of rank 1, because rank 0, which verifies most, has no other reason to read it.
            yield (kind, "__1_0.distcp", edit)


def _pairs(files: list[str]) -> list[tuple[str, str]]:
    """Pairs of files of the same kind from two ranks."""
    pairs = (("__0_0.distcp", "__1_0.distcp"), *[tuple(f"extra_state/extra_state_rank_{r}.pt" for r in (0, 1))])
    return [(one, other) for one, other in pairs if one in files and other in files]
