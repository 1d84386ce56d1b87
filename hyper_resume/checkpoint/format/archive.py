"""The ``torch.save`` archive of one tensor: written from a template, and read without a zip library.

Stock ``torch.distributed.checkpoint`` expects each entry to be what ``torch.save`` writes: a zip file with the tensor's
pickle, its bytes, and a version. Everything but the bytes follows from dtype and shape, so it is made once for each pair. The
archives are smaller than those of ``torch.save`` (about 500 bytes of overhead instead of 1,500) and have no checksum of the
data, as with ``torch.serialization.set_crc32_options(False)``, because the manifest's digest covers every byte.

Formats: APPNOTE.TXT of PKWARE, 4.3.7 (local header), 4.3.9 (data descriptor), 4.3.12 (central directory), 4.3.14 to 4.3.16
(ends) and 4.5.3 (sizes of 64 bits).
"""

from __future__ import annotations

import math
import struct
import sys
import zlib
from collections.abc import Sequence
from functools import lru_cache
from typing import NamedTuple

import torch

ALIGNMENT = 64
"""Alignment of a tensor's bytes within its archive, in bytes; the same as in torch's own archives."""

_FOLDER = b"archive/"
_DATA = b"data/0"
_LOCAL = struct.Struct("<4s5H3L2H")
_CENTRAL = struct.Struct("<4s6H3L5H2L")
_END = struct.Struct("<4s4H2LH")
_END_64 = struct.Struct("<4sQ2H2L4Q")
_LOCATOR_64 = struct.Struct("<4sLQL")
_WIDE = 0xFFFFFFFF
_WIDE_FIELD = 0x0001
_PADDING_FIELD = 0x4246  # torch's own
_VERSION = 45
# The dtypes that torch pickles by the name of a storage class.
_STORAGES = {
    torch.float32: b"FloatStorage",
    torch.float64: b"DoubleStorage",
    torch.float16: b"HalfStorage",
    torch.bfloat16: b"BFloat16Storage",
    torch.int64: b"LongStorage",
    torch.int32: b"IntStorage",
    torch.int16: b"ShortStorage",
    torch.int8: b"CharStorage",
    torch.uint8: b"ByteStorage",
    torch.bool: b"BoolStorage",
    torch.complex64: b"ComplexFloatStorage",
    torch.complex128: b"ComplexDoubleStorage",
}
_MAX_RECORDS = 32
# What may follow a record: a data descriptor, another record, or the central directory.
_BEHIND = (b"PK\x07\x08", b"PK\x03\x04", b"PK\x01\x02")


class Template(NamedTuple):
    """The archive of a tensor without its bytes: what comes before and after them, and their number."""

    prefix: bytes
    suffix: bytes
    data_bytes: int

    @property
    def size_bytes(self) -> int:
        """Size of the whole archive."""
        return len(self.prefix) + self.data_bytes + len(self.suffix)


@lru_cache(maxsize=65536)
def template(dtype: torch.dtype, shape: tuple[int, ...], *, is_wide: bool = False) -> Template | None:
    """Return the archive of a contiguous tensor without its bytes; None for a dtype that only ``torch.save`` can write.

    Args:
        dtype: the tensor's dtype.
        shape: the tensor's shape.
        is_wide: write sizes with 64 bits even if 32 are enough (larger tensors always use 64).
    """
    pickle = tensor_pickle(dtype, shape)
    if pickle is None or sys.byteorder != "little":
        return None
    data_bytes = math.prod(shape) * dtype.itemsize
    small = [(b"data.pkl", pickle), (b"byteorder", b"little"), (b"version", b"3\n")]
    prefix, central = b"", b""
    for name, content in small:
        central += _central(name, zlib.crc32(content), len(content), len(prefix), is_wide=False)
        prefix += _local(name, zlib.crc32(content), len(content)) + content
    is_wide = is_wide or data_bytes >= _WIDE
    central += _central(_DATA, 0, data_bytes, len(prefix), is_wide=is_wide)
    header = _local(_DATA, 0, data_bytes, is_wide=is_wide)
    padding = -(len(prefix) + len(header) + 4) % ALIGNMENT
    prefix += _local(_DATA, 0, data_bytes, is_wide=is_wide, padding=padding)
    end = _end(len(small) + 1, len(central), len(prefix) + data_bytes)
    return Template(prefix=prefix, suffix=central + end, data_bytes=data_bytes)


@lru_cache(maxsize=65536)
def tensor_pickle(dtype: torch.dtype, shape: tuple[int, ...]) -> bytes | None:
    """Return the pickle that ``torch.save`` writes for a contiguous CPU tensor, byte for byte; None for some dtypes."""
    storage = _STORAGES.get(dtype)
    if storage is None:
        return None
    # The strides of a contiguous tensor; torch counts an empty dimension as one.
    strides = [math.prod(max(1, size) for size in shape[axis + 1 :]) for axis in range(len(shape))]
    memo = _Memo()
    parts = [b"\x80\x02ctorch._utils\n_rebuild_tensor_v2\n", memo.put(), b"(("]
    parts += [_text(b"storage"), memo.put(), b"ctorch\n" + storage + b"\n", memo.put(), _text(b"0"), memo.put()]
    parts += [_text(b"cpu"), memo.put(), _integer(math.prod(shape)), b"t", memo.put(), b"QK\x00"]
    parts += [_integers(shape, memo), _integers(strides, memo)]
    parts += [
        b"\x89ccollections\nOrderedDict\n",
        memo.put(),
        b")R",
        memo.put(),
        b"t",
        memo.put(),
        b"R",
        memo.put(),
        b".",
    ]
    return b"".join(parts)


class _Memo:
    """Counts the memo entries of a pickle."""

    def __init__(self) -> None:
        self._count = 0

    def put(self) -> bytes:
        self._count += 1
        return b"q" + bytes([self._count - 1])


def _text(text: bytes) -> bytes:
    return b"X" + struct.pack("<L", len(text)) + text


def _integer(number: int) -> bytes:
    if number < 1 << 8:
        return b"K" + bytes([number])
    if number < 1 << 16:
        return b"M" + struct.pack("<H", number)
    if number < 1 << 31:
        return b"J" + struct.pack("<l", number)
    content = number.to_bytes(number.bit_length() // 8 + 1, "little")
    return b"\x8a" + bytes([len(content)]) + content


def _integers(numbers: Sequence[int], memo: _Memo) -> bytes:
    items = b"".join(_integer(number) for number in numbers)
    if not numbers:
        return b")"
    if len(numbers) <= 3:
        return items + bytes([0x84 + len(numbers)]) + memo.put()
    return b"(" + items + b"t" + memo.put()


def _wide_field(*sizes: int) -> bytes:
    return struct.pack(f"<2H{len(sizes)}Q", _WIDE_FIELD, 8 * len(sizes), *sizes)


def _local(name: bytes, checksum: int, size: int, *, is_wide: bool = False, padding: int | None = None) -> bytes:
    extra = _wide_field(size, size) if is_wide else b""
    if padding is not None:
        extra += struct.pack("<2H", _PADDING_FIELD, padding) + b"Z" * padding
    recorded = _WIDE if is_wide else size
    whole = _FOLDER + name
    return (
        _LOCAL.pack(b"PK\x03\x04", _VERSION, 0, 0, 0, 0, checksum, recorded, recorded, len(whole), len(extra))
        + whole
        + extra
    )


def _central(name: bytes, checksum: int, size: int, begin: int, *, is_wide: bool) -> bytes:
    extra = _wide_field(size, size) if is_wide else b""
    recorded = _WIDE if is_wide else size
    whole = _FOLDER + name
    head = (
        b"PK\x01\x02",
        _VERSION,
        _VERSION,
        0,
        0,
        0,
        0,
        checksum,
        recorded,
        recorded,
        len(whole),
        len(extra),
        0,
        0,
        0,
        0,
        begin,
    )
    return _CENTRAL.pack(*head) + whole + extra


def _end(records: int, size: int, begin: int) -> bytes:
    if begin < _WIDE:
        return _END.pack(b"PK\x05\x06", 0, 0, records, records, size, begin, 0)
    end = _END_64.pack(b"PK\x06\x06", _END_64.size - 12, _VERSION, _VERSION, 0, 0, records, records, size, begin)
    locator = _LOCATOR_64.pack(b"PK\x06\x07", 0, begin + size, 1)
    return end + locator + _END.pack(b"PK\x05\x06", 0, 0, records, records, size, _WIDE, 0)


def data_offset(content: memoryview, dtype: torch.dtype, shape: tuple[int, ...]) -> int | None:
    """Return the offset of a tensor's bytes in its archive.

    Only the zip structure is read. The pickle is compared byte for byte with that of a contiguous tensor of this dtype and
    shape, so it need not be interpreted.

    Args:
        content: the whole archive.
        dtype: the expected dtype.
        shape: the expected shape.

    Returns:
        None for an archive of any other form, which must be decoded with :func:`safe_load.load_plain`.
    """
    own = template(dtype, shape)
    if own is not None and len(content) == own.size_bytes:
        begin = len(own.prefix)
        # As bytes, because memoryviews are compared item by item, which is slow.
        if bytes(content[:begin]) == own.prefix and bytes(content[begin + own.data_bytes :]) == own.suffix:
            return begin
    return _data_offset_in_torch_archive(content, dtype, shape)


def _data_offset_in_torch_archive(content: memoryview, dtype: torch.dtype, shape: tuple[int, ...]) -> int | None:
    """Return the offset in an archive of ``torch.save``; None for archives with 64 bit sizes, which torch itself reads."""
    pickle = tensor_pickle(dtype, shape)
    if pickle is None or len(content) < _END.size or len(content) >= _WIDE:
        return None
    magic, _, _, _, count, size, begin, comment = _END.unpack_from(content, len(content) - _END.size)
    if magic != b"PK\x05\x06" or comment or count > _MAX_RECORDS or begin + size > len(content):
        return None
    found = _records(content[begin : begin + size], count)
    if found is None:
        return None
    pickled, order, data = (found.get(_FOLDER + name) for name in (b"data.pkl", b"byteorder", _DATA))
    if pickled is None or data is None or data[2] != math.prod(shape) * dtype.itemsize:
        return None
    if order is not None and _content(content, *order) != sys.byteorder.encode():
        return None
    return _begin(content, *data) if _content(content, *pickled) == pickle else None


def _records(directory: memoryview, count: int) -> dict[bytes, tuple[bytes, int, int]] | None:
    """Return record name -> (name, offset of its local header, size in bytes); None for records that torch does not write."""
    found: dict[bytes, tuple[bytes, int, int]] = {}
    place = 0
    for _ in range(count):
        if place + _CENTRAL.size > len(directory):
            return None
        head = _CENTRAL.unpack_from(directory, place)
        name_size, extra_size, comment_size = head[10:13]
        name = bytes(directory[place + _CENTRAL.size : place + _CENTRAL.size + name_size])
        is_plain = head[0] == b"PK\x01\x02" and head[4] == 0 and head[8] == head[9] and not head[3] & 1
        if not is_plain or name in found:
            return None
        found[name] = (name, head[16], head[9])
        place += _CENTRAL.size + name_size + extra_size + comment_size
    return found


def _begin(content: memoryview, name: bytes, header: int, size: int) -> int | None:
    """Return the offset of a record's bytes; None if its local header is not valid or bytes are missing."""
    if header + _LOCAL.size > len(content):
        return None
    head = _LOCAL.unpack_from(content, header)
    begin = header + _LOCAL.size + int(head[9]) + int(head[10])
    named = content[header + _LOCAL.size : header + _LOCAL.size + int(head[9])]
    is_header = head[0] == b"PK\x03\x04" and head[3] == 0 and named == name
    # The signature after the record shows that the lengths in the header are right; nothing else checks them.
    return begin if is_header and content[begin + size : begin + size + 4] in _BEHIND else None


def _content(content: memoryview, name: bytes, header: int, size: int) -> bytes | None:
    begin = _begin(content, name, header, size)
    return None if begin is None else bytes(content[begin : begin + size])
