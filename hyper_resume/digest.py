"""Digests of state and of files: to hold two runs against each other, and a file against what was written.

A digest shows damage, not a forgery: who can write the file can write its digest.
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
"""A larger file's digest is that of the digests of its blocks of this many bytes, so that several threads can find it."""

_BLOCKS_PREFIX = f"{ALGORITHM}/{BLOCK_BYTES}:"
# Types whose tensors are arrays as they are; that saves two views a tensor.
_NUMPY_DTYPES = frozenset((torch.float32, torch.float64, torch.int64, torch.int32, torch.uint8, torch.bool))
# The text form: the algorithm stands in front, so that another one can be told from it later.
_TABLE_PREFIX = f"{ALGORITHM}/table:"
_TEXT = re.compile(rf"{ALGORITHM}(?:/{BLOCK_BYTES}|/table|/entries|/data)?:[0-9a-f]{{32}}")


class FileHasher:
    """Finds a file's digest piece by piece, in order."""

    def __init__(self) -> None:
        """Of no bytes yet."""
        self._blocks: list[bytes] = []
        self._hasher = xxhash.xxh3_128()
        self._room = BLOCK_BYTES

    def update(self, content: Any) -> None:
        """Take the next bytes, a flat buffer of them."""
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
        """Return :func:`data_digest` of all that was taken."""
        return combine_block_digests([*self._blocks, self._hasher.digest()])

    def text(self) -> str:
        """Return the digest of all that was taken, as text."""
        return blocks_digest_text([*self._blocks, self._hasher.digest()])


def blocks_digest_text(digests: Sequence[bytes]) -> str:
    """Return the digest of a file from those of its blocks, as text; of one block it is that block's."""
    return f"{ALGORITHM if len(digests) == 1 else _BLOCKS_PREFIX[:-1]}:{combine_block_digests(digests).hex()}"


def combine_block_digests(digests: Sequence[bytes]) -> bytes:
    """Return the digest of bytes from those of their blocks; of one block it is that block's."""
    return digests[0] if len(digests) == 1 else xxhash.xxh3_128_digest(b"".join(digests))


def table_digest_text(table: Any) -> str:
    """Return the digest, as text, of a file that ends with the table of its own digests."""
    return f"{_TABLE_PREFIX}{xxhash.xxh3_128_hexdigest(table)}"


def is_table_digest(text: str) -> bool:
    """True for the digest of a file that ends with the table of its own digests."""
    return text.startswith(_TABLE_PREFIX)


def is_blocks_digest(text: str) -> bool:
    """True for the digest of a file of more than one block."""
    return text.startswith(_BLOCKS_PREFIX)


def is_digest_text(text: str) -> bool:
    """True for the text form of a digest."""
    return _TEXT.fullmatch(text) is not None


def data_digest(content: Any) -> bytes:
    """Return the digest of a buffer's bytes, by blocks as that of a file."""
    view = memoryview(content)
    if view.nbytes <= BLOCK_BYTES:
        return xxhash.xxh3_128_digest(view)
    view = view.cast("B")
    blocks = [view[begin : begin + BLOCK_BYTES] for begin in range(0, view.nbytes, BLOCK_BYTES)]
    return combine_block_digests([xxhash.xxh3_128_digest(block) for block in blocks])


def chunks_digest(chunks: Iterable[Any]) -> bytes:
    """Return the digest of all chunks together."""
    hasher = xxhash.xxh3_128()
    for chunk in chunks:
        hasher.update(chunk)
    return hasher.digest()


def bytes_digest_text(chunks: Iterable[Any]) -> str:
    """Return the digest of all chunks together, as text ``xxh3_128:<32 hex digits>``."""
    return f"{ALGORITHM}:{chunks_digest(chunks).hex()}"


def digest_state(state: Any) -> str:
    """Return the xxh3-128 of a nested state: names, types, shapes and bytes of this rank's part, in order.

    Two states have the same digest when every tensor is equal bit for bit (so 0.0 and -0.0 differ) and every plain value
    has the same repr. Dict order does not count.
    """
    return _state_digest(state).hex()


def _state_digest(state: Any) -> bytes:
    hasher = xxhash.xxh3_128()
    _feed(hasher, state)
    return hasher.digest()


def state_digest_text(state: Any) -> str:
    """Return :func:`digest_state` in the text form of digests."""
    return f"{ALGORITHM}:{digest_state(state)}"


def entry_digest(value: Any, data: bytes | None = None) -> bytes:
    """Return the digest of one entry of a state: of a tensor that of type, shape and its bytes' digest.

    Args:
        value: a tensor, of a sharded one this rank's part; or any nested state.
        data: :func:`data_digest` of the tensor's bytes, where it is known.
    """
    if isinstance(value, DTensor):
        value = value.to_local()
    if not isinstance(value, torch.Tensor):
        return _state_digest(value)
    data = data or data_digest(tensor_bytes(value))
    return xxhash.xxh3_128_digest(_kind(value.dtype, value.shape) + data)


@lru_cache(maxsize=65536)
def _kind(dtype: torch.dtype, shape: torch.Size) -> bytes:
    return f"tensor {dtype} {tuple(shape)} ".encode()


def entries_digest_text(digests: Mapping[str, bytes]) -> str:
    """Return the digest of a state of named entries from :func:`entry_digest` of each, as text. Order does not count."""
    return f"{ALGORITHM}/data:{_named_digests_hex(digests)}"


def _named_digests_hex(digests: Mapping[str, bytes]) -> str:
    hasher = xxhash.xxh3_128()
    for name in sorted(digests):
        hasher.update(f"key {name!r}".encode("utf-8", "surrogatepass"))
        hasher.update(digests[name])
    return hasher.hexdigest()


def older_format_digest_text(entries: Mapping[str, Any], like: str) -> str | None:
    """Return the digest of a state of named entries, as text, as the version took it that wrote ``like``.

    None when that is how it is taken now.
    """
    if like.startswith(f"{ALGORITHM}:"):
        return state_digest_text(entries)
    if like.startswith(f"{ALGORITHM}/entries:"):
        return f"{ALGORITHM}/entries:{_named_digests_hex({name: _state_digest(entries[name]) for name in entries})}"
    return None


def tensor_bytes(tensor: torch.Tensor) -> Any:
    """Return a tensor's bytes in the order of its elements, as a buffer; of one that is contiguous on the CPU without a copy.

    Args:
        tensor: not a sharded one.
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
        # The count keeps an entry of an inner mapping apart from one that follows it in the outer.
        hasher.update(f"mapping {len(value)}".encode())
        for key in sorted(value, key=repr):
            hasher.update(f"key {key!r}".encode())
            _feed(hasher, value[key])
    elif isinstance(value, (list, tuple)):
        hasher.update(f"sequence {len(value)}".encode())
        if all(type(item) is str for item in value):
            # The names of a state are many.
            hasher.update("".join([f"str {item!r}" for item in value]).encode())
            return
        for item in value:
            _feed(hasher, item)
    else:
        hasher.update(f"{type(value).__name__} {value!r}".encode())
