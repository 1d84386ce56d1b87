"""Generates hostile pickles and archives: payloads, paths, numbers, bombs, shuffled opcodes."""

from __future__ import annotations

import builtins
import importlib
import io
import os
import pickle
import pickletools
import struct
import subprocess
import zipfile
from collections.abc import Callable, Sequence
from pathlib import PurePosixPath
from random import Random
from typing import Any

import torch
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex

from conformance.storage.hostile.material import MARKER, Material, archive_with

PATHS = (
    "../other/__0_0.distcp",
    "/etc/passwd",
    "extra_state/../../__0_0.distcp",
    "a/b/c.distcp",
    "",
    ".",
    "..",
    "a//b",
    "./__0_0.distcp",
    "__0_0.distcp/",
    "__0_0.distcp\0.txt",
    "<script>alert(1)</script>/x",
    "x" * 300,
    "\ud800",
    "..\\other",
    "\n",
)
NUMBERS = (-1, -(2**31), 2**31, 2**62 + 1, 2**63, 2**64, 2**2000, True, 1.5, float("nan"), None, "1", (1,))

_CALLS: tuple[tuple[Callable[..., Any], tuple[Any, ...]], ...] = (
    (os.mkdir, (MARKER,)),
    (os.system, (f"mkdir {MARKER}",)),
    (subprocess.call, (["mkdir", MARKER],)),
    (builtins.eval, (f"__import__('os').mkdir({MARKER!r})",)),
    (builtins.exec, (f"open({MARKER!r}, 'w')",)),
    (builtins.open, (MARKER, "w")),
    (importlib.import_module, ("wsgiref.util",)),
    (builtins.getattr, (PurePosixPath("a"), "__class__")),
    (builtins.bytearray, (1 << 40,)),
)


class Payload:
    """Pickles as a call that only a hostile file contains."""

    def __init__(self, function: Callable[..., Any], arguments: tuple[Any, ...]) -> None:
        """Take the call."""
        self._call = function, arguments

    def __reduce__(self) -> Any:
        """The call."""
        return self._call


def make_payload(random: Random) -> Payload:
    """One of the calls."""
    return Payload(*random.choice(_CALLS))


# ---- metadata -------------------------------------------------------------------------------------------------------


def metadata_payload(random: Random, material: Material) -> bytes:
    """Code at the top, in an attribute, in planner_data, among the entries, as a key, behind the value."""
    metadata: Any = good_metadata_copy(material)
    payload = make_payload(random)
    where = random.randrange(8)
    if where == 0:
        return pickle.dumps(payload, protocol=random.choice((0, 2, 4, 5)))
    if where == 1:
        metadata.extra = payload
    elif where == 2:
        metadata.planner_data["model.whole"] = payload
    elif where == 3:
        metadata.state_dict_metadata["model.whole"] = payload
    elif where == 4:
        metadata.storage_meta.modules.append(payload)
    elif where == 5:
        next(iter(metadata.storage_data.values())).hidden = payload
    elif where == 6:
        metadata.version = payload
    else:
        metadata.state_dict_metadata["model.whole"].chunks[0].offsets = payload
    return pickle.dumps(metadata, protocol=random.choice((2, 4, 5)))


def good_metadata_copy(material: Material) -> Any:
    """The good metadata, to be changed."""
    return pickle.loads(material.metadata)


def metadata_path(random: Random, material: Material) -> bytes:
    """A place with a path that leads elsewhere."""
    metadata = good_metadata_copy(material)
    place = random.choice(list(metadata.storage_data.values()))
    place.relative_path = random.choice(PATHS)
    return pickle.dumps(metadata, protocol=4)


def metadata_numbers(random: Random, material: Material) -> bytes:
    """A place or chunk with impossible numbers."""
    metadata = good_metadata_copy(material)
    number: Any = random.choice(NUMBERS)
    place = random.choice(list(metadata.storage_data.values()))
    what = random.randrange(4)
    if what == 0:
        place.offset = number
    elif what == 1:
        place.length = number
    else:
        entry = random.choice([entry for entry in metadata.state_dict_metadata.values() if hasattr(entry, "chunks")])
        shape = [random.choice((0, 1, 2**40, 2**62)) for _ in range(random.choice((0, 1, 2, 2, 2, 65, 1000)))]
        if what == 2:
            entry.size = torch.Size(shape)
        else:
            chunk = random.choice(entry.chunks)
            setattr(chunk, random.choice(("offsets", "sizes")), torch.Size(shape))
    return pickle.dumps(metadata, protocol=4)


def metadata_structure(random: Random, material: Material) -> bytes:
    """Holes, overlaps, parts without a place, extra attributes, objects of other types."""
    metadata = good_metadata_copy(material)
    grid = metadata.state_dict_metadata["model.grid"]
    chunk = random.choice(grid.chunks)
    places = metadata.storage_data
    changes: list[Callable[[], Any]] = [
        lambda: grid.chunks.remove(chunk),
        lambda: grid.chunks.append(chunk),
        lambda: setattr(chunk, "sizes", torch.Size([chunk.sizes[0], chunk.sizes[1] - 1])),
        lambda: setattr(chunk, "offsets", torch.Size([chunk.offsets[0] + 1, chunk.offsets[1]])),
        lambda: grid.chunks.append(ChunkStorageMetadata(torch.Size([1, 1]), torch.Size([2, 2]))),
        lambda: places.pop(random.choice(list(places))),
        lambda: places.update({MetadataIndex("nothing"): _StorageInfo("__0_0.distcp", 10**6, 5)}),
        lambda: metadata.state_dict_metadata.update({"model.grid": random.choice(NUMBERS)}),
        lambda: setattr(random.choice(list(places.values())), "offset", 1),
        lambda: setattr(
            metadata, random.choice(list(vars(metadata))), random.choice((*NUMBERS, [], {}, metadata.version))
        ),
        lambda: setattr(metadata, "unheard_of", 1),
        lambda: setattr(grid, "properties", random.choice((None, torch.float32, grid.size))),
        lambda: setattr(metadata, "planner_data", {1: ("a",), "b": [1]}),
        lambda: setattr(
            random.choice(list(places.values())), "transform_descriptors", random.choice((["x"] * 99, [1], 5))
        ),
    ]
    for change in random.sample(changes, random.choice((1, 1, 2))):
        try:
            change()
        except (ValueError, KeyError, RuntimeError):
            continue
    return pickle.dumps(metadata, protocol=random.choice((2, 4, 4, 5)))


def metadata_bomb(random: Random, material: Material) -> bytes:
    """Few bytes that demand much memory or time."""
    return random.choice(PICKLE_BOMBS)()


def metadata_opcodes(random: Random, material: Material) -> bytes:
    """Opcodes left out, doubled, swapped, given other arguments, and unexpected ones inserted."""
    return _mutated_opcodes(random, material.metadata_opcodes)


def metadata_bytes(random: Random, material: Material) -> bytes:
    """Random damage."""
    return damaged(random, material.metadata)


# ---- archives -------------------------------------------------------------------------------------------------------


def archive_payload(random: Random, material: Material) -> bytes:
    """Code in a training state, or in an entry that is no tensor."""
    payload = make_payload(random)
    value: Any = random.choice(([payload], {"global_step": payload}, (payload,), payload, {"a": [1, {"b": payload}]}))
    out = io.BytesIO()
    if random.random() < 0.2:
        return pickle.dumps(value)
    torch.save(value, out, _use_new_zipfile_serialization=random.random() < 0.8)
    return out.getvalue()


def archive_bomb(random: Random, material: Material) -> bytes:
    """A small archive that demands much memory or time."""
    if random.random() < 0.3:
        return random.choice(ARCHIVE_BOMBS)(material)
    return archive_with(random.choice((*PICKLE_BOMBS, *PLAIN_BOMBS))(), material.archive)


def archive_opcodes(random: Random, material: Material) -> bytes:
    """A pickle with shuffled opcodes, in a valid archive."""
    return archive_with(_mutated_opcodes(random, material.archive_opcodes), material.archive)


def archive_bytes(random: Random, material: Material) -> bytes:
    """Random damage, half of the time in the archive's directory."""
    if random.random() < 0.5:
        return damaged(random, material.archive)
    begin = material.archive.index(b"PK\x01\x02")
    return material.archive[:begin] + damaged(random, material.archive[begin:])


# ---- how ------------------------------------------------------------------------------------------------------------


def damaged(random: Random, content: bytes) -> bytes:
    """Flip, cut, double, insert, overwrite: one to four times."""
    out = bytearray(content)
    for _ in range(random.randint(1, 4)):
        at, size = random.randrange(len(out) or 1), random.choice((1, 2, 4, 8, 100))
        what = random.randrange(6)
        if what == 0 and out:
            out[at % len(out)] ^= 1 << random.randrange(8)
        elif what == 1:
            del out[at:]
        elif what == 2:
            out[at:at] = out[at : at + size]
        elif what == 3:
            out[at:at] = random.randbytes(size)
        elif what == 4:
            out[at : at + size] = random.choice((b"\0", b"\xff")) * size
        else:
            del out[at : at + size]
    return bytes(out)


_STRANGE = tuple(opcode.code.encode("latin1") for opcode in pickletools.opcodes)


def _mutated_opcodes(random: Random, opcodes: Sequence[bytes]) -> bytes:
    out = list(opcodes)
    for _ in range(random.choice((1, 1, 1, 2, 3))):
        at = random.randrange(len(out))
        what = random.randrange(7)
        if what == 0:
            del out[at]
        elif what == 1:
            out.insert(at, random.choice(opcodes))
        elif what == 2:
            other = random.randrange(len(out))
            out[at], out[other] = out[other], out[at]
        elif what == 3:
            out[at] = out[at][:1] + random.randbytes(max(0, len(out[at]) - 1))
        elif what == 4:
            out.insert(at, random.choice(_STRANGE) + random.randbytes(random.choice((0, 1, 4, 8))))
        elif what == 5:
            out.insert(at, random.choice(_FRAGMENTS))
        else:
            out[at : at + random.choice((2, 10, 100))] = []
    return b"".join(out)


_FRAGMENTS = (
    b"cos\nmkdir\n" + b"X" + struct.pack("<I", len(MARKER)) + MARKER.encode() + b"\x85R",
    b"\x8c\x02os\x8c\x05mkdir\x93\x8c" + bytes([len(MARKER)]) + MARKER.encode() + b"\x85R",
    b"(S'" + MARKER.encode() + b"'\nios\nmkdir\n",
    b"cbuiltins\neval\n(X\x05\x00\x00\x001 + 1tR",
    b"c__builtin__\nset\n]\x85R",
    b"ctorch.storage\nUntypedStorage\n\x8a\x06\x00\x00\x00\x00\x00\x01\x85R",
    b"\x82\x01",
    b"Pstorage\n",
    b"\x97",
    b"\x8b\xff\xff\xff\x7f",
    b"\x8d\xff\xff\xff\xff\xff\xff\xff\x3f",
    b"\x8e\xff\xff\xff\xff\xff\xff\xff\x3f",
    b"\x96\xff\xff\xff\xff\xff\xff\xff\x3f",
    b"r\xff\xff\xff\x7f",
    b"}(\x8c\x01a\x8c\x01b\x8c\x01a\x8c\x01cu",
    b"]]]]aaa",
    b"N\x94",
    b"0",
    b"2",
    b"1",
)


def _tower(open_with: bytes, levels: int, close: bytes) -> bytes:
    """``levels`` containers, each holding the one before it twice."""
    parts = [b"\x80\x02]q\x00"]
    for level in range(levels):
        again = b"h" + bytes([level])
        parts.append(open_with + again + again + close + b"q" + bytes([level + 1]))
    return b"".join(parts)


def _doubling_lists() -> bytes:
    return _tower(b"](", 60, b"e") + b"."


def _doubling_tuples() -> bytes:
    return _tower(b"(", 60, b"t").replace(b"]q\x00", b")q\x00") + b"."


def _doubling_key() -> bytes:
    return b"\x80\x02}" + _doubling_tuples()[2:-1] + b"K\x01s."


def _doubling_in_set() -> bytes:
    return b"\x80\x02c__builtin__\nset\n](" + _doubling_tuples()[2:-1] + b"e\x85R."


def _declared(opcode: bytes, width: int) -> Callable[[], bytes]:
    return lambda: b"\x80\x04" + opcode + b"\xff" * (width - 1) + b"\x7f" + b"x" * 50


def _repeated(opcode: bytes, count: int = 40_000) -> Callable[[], bytes]:
    return lambda: b"\x80\x02" + opcode * count + b"."


def _size_of(number: int) -> Callable[[], bytes]:
    data = number.to_bytes(number.bit_length() // 8 + 1, "little", signed=True)
    return lambda: b"\x80\x02ctorch\nSize\nN\x8a" + bytes([len(data)]) + data + b"\x85\x85R."


PICKLE_BOMBS: tuple[Callable[[], bytes], ...] = (
    _doubling_lists,
    _doubling_tuples,
    _doubling_key,
    _doubling_in_set,
    *(_declared(opcode, 4) for opcode in (b"X", b"B", b"\x8b", b"T")),
    *(_declared(opcode, 8) for opcode in (b"\x8d", b"\x8e", b"\x96", b"\x95")),
    lambda: b"\x80\x02]r\xff\xff\xff\x7f.",
    *(_repeated(opcode) for opcode in (b"]", b"}", b"(", b")\x94", b"N", b"](", b")\x85", b"\x85", b"]q\x00", b"}}s")),
    _size_of(2**62),
    _size_of(2**200),
)
PLAIN_BOMBS: tuple[Callable[[], bytes], ...] = (
    lambda: b"\x80\x02c__builtin__\nbytearray\n\x8a\x06\x00\x00\x00\x00\x00\x01\x85R.",
    lambda: b"\x80\x02cbuiltins\nbytearray\n\x8a\x06\x00\x00\x00\x00\x00\x01\x85R.",
    lambda: b"\x80\x02ctorch.storage\nUntypedStorage\n\x8a\x06\x00\x00\x00\x00\x00\x01\x85R.",
    lambda: b"\x80\x02ctorch\nTensor\n\x8a\x06\x00\x00\x00\x00\x00\x01\x85R.",
    lambda: b"\x80\x02ctorch\nTensor\n\x8a\x06\x00\x00\x00\x00\x00\x01\x85\x81.",
    lambda: (
        b"\x80\x02ctorch._tensor\n_rebuild_from_type_v2\n(ctorch.storage\nUntypedStorage\nctorch\nTensor\n"
        b"\x8a\x06\x00\x00\x00\x00\x00\x01\x85}tR."
    ),
    lambda: b"\x80\x02c_codecs\nencode\nX\x01\x00\x00\x00aX\x06\x00\x00\x00bz2_co\x86R.",
    lambda: b"\x80\x02c_codecs\nencode\nX\x01\x00\x00\x00aX\x09\x00\x00\x00mac_croat\x86R.",
    lambda: b"\x80\x02]q\x00h\x00a.",
    lambda: b"\x80\x02" + b"](" * 150 + b"e" * 150 + b".",
)


def _squeezed(material: Material) -> bytes:
    """A valid archive except for its compression, whose content is a thousand times larger."""
    return archive_with(
        b"\x80\x02X\x00\x00\x40\x00" + b"a" * (4 << 20) + b".", material.archive, compression=zipfile.ZIP_DEFLATED
    )


def _doubled_names(material: Material) -> bytes:
    out = io.BytesIO(material.archive)
    with zipfile.ZipFile(out, "a") as archive:
        archive.writestr(zipfile.ZipInfo("archive/DATA.pkl"), b"\x80\x02N.")
    return out.getvalue()


def _many_members(material: Material) -> bytes:
    out = io.BytesIO()
    with zipfile.ZipFile(out, "w") as archive:
        for number in range(2000):
            archive.writestr(zipfile.ZipInfo(f"archive/data/{number}"), b"")
    return out.getvalue()


def _declared_larger(material: Material) -> bytes:
    """The directory states a member of 4 GiB less a byte."""
    at = material.archive.index(b"PK\x01\x02")
    return material.archive[: at + 20] + b"\xfe\xff\xff\xff" * 2 + material.archive[at + 28 :]


ARCHIVE_BOMBS: tuple[Callable[[Material], bytes], ...] = (
    _squeezed,
    _doubled_names,
    _many_members,
    _declared_larger,
    lambda material: material.archive * 2,
    lambda material: material.archive + b"comment",
    lambda material: b"x" + material.archive,
)
