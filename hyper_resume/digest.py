"""Digests (xxh3-128) of states, tensors and files, to find differences and damage.

A digest shows damage, but it does not protect against forgery: whoever can write the file can write its digest.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from functools import lru_cache
from typing import Any

import torch
import xxhash
from torch.distributed.tensor import DTensor

ALGORITHM = "xxh3_128"
BLOCK_BYTES = 64 << 20
"""Larger data is divided into blocks of this many bytes, and its digest is the digest of the blocks' digests. So several
threads can compute it."""

_BLOCKS_PREFIX = f"{ALGORITHM}/{BLOCK_BYTES}:"
# The dtypes that NumPy has too; their tensors convert to an array without further views.
_NUMPY_DTYPES = frozenset((torch.float32, torch.float64, torch.int64, torch.int32, torch.uint8, torch.bool))
# The text form of a digest begins with its algorithm and format, so that another one can be recognised later.
_TABLE_PREFIX = f"{ALGORITHM}/table:"
_TEXT = re.compile(rf"{ALGORITHM}(?:/{BLOCK_BYTES}|/table|/entries|/data)?:[0-9a-f]{{32}}")


class FileHasher:
    """Computes the digest of a file from consecutive pieces."""

    def __init__(self) -> None:
        """Start with no bytes."""
        self._blocks: list[bytes] = []
        self._hasher = xxhash.xxh3_128()
        self._room = BLOCK_BYTES

    def update(self, content: Any) -> None:
        """Add the next bytes, a flat buffer."""
        view = memoryview(content)
        while len(view):
            if not self._room:
                self._blocks.append(self._hasher.digest())
                self._hasher, self._room = xxhash.xxh3_128(), BLOCK_BYTES
            part = view[: self._room]
            self._hasher.update(part)
            self._room -= len(part)
            view = view[len(part) :]

    def digest(self) -> bytes:
        """Return :func:`data_digest` of all bytes so far."""
        return combine_block_digests([*self._blocks, self._hasher.digest()])

    def text(self) -> str:
        """Return the digest of all bytes so far, as text."""
        return blocks_digest_text([*self._blocks, self._hasher.digest()])


def blocks_digest_text(digests: Sequence[bytes]) -> str:
    """Return the digest of a file from its blocks' digests, as text; with one block it is that block's digest."""
    return f"{ALGORITHM if len(digests) == 1 else _BLOCKS_PREFIX[:-1]}:{combine_block_digests(digests).hex()}"


def combine_block_digests(digests: Sequence[bytes]) -> bytes:
    """Return the digest of data from its blocks' digests; with one block it is that block's digest."""
    return digests[0] if len(digests) == 1 else xxhash.xxh3_128_digest(b"".join(digests))


def table_digest_text(table: Any) -> str:
    """Return the digest, as text, of a file that ends with a table of segment digests; it is that of the table."""
    return f"{_TABLE_PREFIX}{xxhash.xxh3_128_hexdigest(table)}"


def is_table_digest(text: str) -> bool:
    """True for the digest of a file that ends with a table of segment digests."""
    return text.startswith(_TABLE_PREFIX)


def is_blocks_digest(text: str) -> bool:
    """True for the digest of a file with more than one block."""
    return text.startswith(_BLOCKS_PREFIX)


def is_digest_text(text: str) -> bool:
    """True if ``text`` is the text form of a digest."""
    return _TEXT.fullmatch(text) is not None


def data_digest(content: Any) -> bytes:
    """Return the digest of a buffer's bytes, in blocks of :data:`BLOCK_BYTES`."""
    view = memoryview(content)
    if view.nbytes <= BLOCK_BYTES:
        return xxhash.xxh3_128_digest(view)
    view = view.cast("B")
    blocks = [view[begin : begin + BLOCK_BYTES] for begin in range(0, view.nbytes, BLOCK_BYTES)]
    return combine_block_digests([xxhash.xxh3_128_digest(block) for block in blocks])


def chunks_digest(chunks: Iterable[Any]) -> bytes:
    """Return the digest of the joined chunks, not divided into blocks."""
    hasher = xxhash.xxh3_128()
    for chunk in chunks:
        hasher.update(chunk)
    return hasher.digest()


def bytes_digest_text(chunks: Iterable[Any]) -> str:
    """Return the digest of the joined chunks, as text ``xxh3_128:<32 hex digits>``."""
    return f"{ALGORITHM}:{chunks_digest(chunks).hex()}"


def content_digest_text(content: Any, *, like: str) -> str:
    """Return the digest of a buffer's bytes as text, in the format of ``like``: of all bytes, or of blocks."""
    if not is_blocks_digest(like):
        return bytes_digest_text([content])
    hasher = FileHasher()
    hasher.update(content)
    return hasher.text()


def digest_state(state: Any) -> str:
    """Return the digest, in hex, of a nested state: names, dtypes, shapes and bytes of this rank's part.

    Two states have the same digest if all tensors are equal bit for bit (so 0.0 and -0.0 differ) and all other values have the
    same type and repr. The order of dicts does not matter.
    """
    return _state_digest(state).hex()


def _state_digest(state: Any) -> bytes:
    hasher = xxhash.xxh3_128()
    _feed(hasher, state)
    return hasher.digest()


def state_digest_text(state: Any) -> str:
    """Return :func:`digest_state` in the text form."""
    return f"{ALGORITHM}:{digest_state(state)}"


def entry_digest(value: Any, data: bytes | None = None) -> bytes:
    """Return the digest of one entry of a state; for a tensor, that of its dtype, its shape and the digest of its bytes.

    Args:
        value: a tensor (of a sharded one, this rank's part is used), or any nested state.
        data: :func:`data_digest` of the tensor's bytes, if it is known.
    """
    if isinstance(value, DTensor):
        value = value.to_local()
    if not isinstance(value, torch.Tensor):
        return _state_digest(value)
    data = data or data_digest(tensor_bytes(value))
    return xxhash.xxh3_128_digest(_tensor_header(value.dtype, value.shape) + data)


@lru_cache(maxsize=65536)
def _tensor_header(dtype: torch.dtype, shape: torch.Size) -> bytes:
    return f"tensor {dtype} {tuple(shape)} ".encode()


def entries_digest_text(digests: Mapping[str, bytes]) -> str:
    """Return the digest, as text, of named entries from their :func:`entry_digest`. Their order does not matter."""
    return f"{ALGORITHM}/data:{_named_digests_hex(digests)}"


def _named_digests_hex(digests: Mapping[str, bytes]) -> str:
    hasher = xxhash.xxh3_128()
    for name in sorted(digests):
        hasher.update(f"key {name!r}".encode("utf-8", "surrogatepass"))
        hasher.update(digests[name])
    return hasher.hexdigest()


def older_format_digest_text(entries: Mapping[str, Any], like: str) -> str | None:
    """Return the digest of named entries, as text, in the older format of ``like``; None if ``like`` has the current format."""
    if like.startswith(f"{ALGORITHM}:"):
        return state_digest_text(entries)
    if like.startswith(f"{ALGORITHM}/entries:"):
        return f"{ALGORITHM}/entries:{_named_digests_hex({name: _state_digest(entries[name]) for name in entries})}"
    return None


def tensor_bytes(tensor: torch.Tensor) -> Any:
    """Return a tensor's bytes in the order of its elements, as a buffer; without a copy if it is contiguous and on the CPU.

    Args:
        tensor: a plain tensor, not a sharded one.
    """
    if tensor.requires_grad or type(tensor) is not torch.Tensor:
        tensor = tensor.detach()
    is_plain = type(tensor) is torch.Tensor and tensor.is_cpu and tensor.is_contiguous() and not tensor.is_neg()
    if is_plain and tensor.dtype in _NUMPY_DTYPES:
        return tensor.numpy()
    return tensor.cpu().resolve_conj().resolve_neg().contiguous().reshape(-1).view(torch.uint8).numpy()


def _feed(hasher: Any, value: Any) -> None:
    if isinstance(value, DTensor):
        value = value.to_local()
    if isinstance(value, torch.Tensor):
        hasher.update(f"tensor {value.dtype} {tuple(value.shape)}".encode())
        hasher.update(tensor_bytes(value))
    elif isinstance(value, Mapping):
        # The count distinguishes an entry of an inner mapping from one that follows it in the outer mapping.
        hasher.update(f"mapping {len(value)}".encode())
        for key in sorted(value, key=repr):
            hasher.update(f"key {key!r}".encode())
            _feed(hasher, value[key])
    elif isinstance(value, (list, tuple)):
        hasher.update(f"sequence {len(value)}".encode())
        if all(type(item) is str for item in value):
            # A short cut for long lists of names.
            hasher.update("".join([f"str {item!r}" for item in value]).encode())
            return
        for item in value:
            _feed(hasher, item)
    else:
        hasher.update(f"{type(value).__name__} {value!r}".encode())
