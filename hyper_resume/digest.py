"""Digests of state and of files: to hold two runs against each other, and a file against what was written.

A digest shows damage, not a forgery: who can write the file can write its digest.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
import xxhash
from torch.distributed.tensor import DTensor

ALGORITHM = "xxh3_128"
BLOCK_BYTES = 64 << 20
"""A larger file's digest is that of the digests of its blocks of this many bytes, so that several threads can find it."""

_OF_BLOCKS = f"{ALGORITHM}/{BLOCK_BYTES}:"
# Types whose tensors are arrays as they are; that saves two views a tensor.
_OF_NUMPY = frozenset((torch.float32, torch.float64, torch.int64, torch.int32, torch.uint8, torch.bool))
# The text form: the algorithm stands in front, so that another one can be told from it later.
_TEXT = re.compile(rf"{ALGORITHM}(?:/{BLOCK_BYTES}|/entries)?:[0-9a-f]{{32}}")


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

    def text(self) -> str:
        """Return the digest of all that was taken, as text."""
        return text_of_blocks([*self._blocks, self._hasher.digest()])


def text_of_blocks(digests: Sequence[bytes]) -> str:
    """Return the digest of a file from those of its blocks, as text; of one block it is that block's."""
    if len(digests) == 1:
        return f"{ALGORITHM}:{digests[0].hex()}"
    return f"{_OF_BLOCKS}{xxhash.xxh3_128(b''.join(digests)).hexdigest()}"


def is_of_blocks(text: str) -> bool:
    """True for the digest of a file of more than one block."""
    return text.startswith(_OF_BLOCKS)


def is_digest(text: str) -> bool:
    """True for the text form of a digest."""
    return _TEXT.fullmatch(text) is not None


def raw_digest(chunks: Iterable[Any]) -> bytes:
    """Return the digest of all chunks together."""
    hasher = xxhash.xxh3_128()
    for chunk in chunks:
        hasher.update(chunk)
    return hasher.digest()


def digest_bytes(chunks: Iterable[Any]) -> str:
    """Return the digest of all chunks together, as text ``xxh3_128:<32 hex digits>``."""
    return f"{ALGORITHM}:{raw_digest(chunks).hex()}"


def digest_state(state: Any) -> str:
    """Return the xxh3-128 of a nested state: names, types, shapes and bytes of this rank's part, in order.

    Two states have the same digest when every tensor is equal bit for bit (so 0.0 and -0.0 differ) and every plain value
    has the same repr. Dict order does not count.
    """
    return entry_digest(state).hex()


def state_text(state: Any) -> str:
    """Return :func:`digest_state` in the text form of digests."""
    return f"{ALGORITHM}:{digest_state(state)}"


def text_of_entries(digests: Mapping[str, bytes]) -> str:
    """Return the digest of a state of named entries from those of its entries, as text. Their order does not count."""
    hasher = xxhash.xxh3_128()
    for name in sorted(digests):
        hasher.update(f"key {name!r}".encode("utf-8", "surrogatepass"))
        hasher.update(digests[name])
    return f"{ALGORITHM}/entries:{hasher.hexdigest()}"


def is_of_a_whole(text: str) -> bool:
    """True for a digest that was taken in one go, as those of all states were before."""
    return text.startswith(f"{ALGORITHM}:")


def entry_digest(value: Any) -> bytes:
    """Return the digest of one entry, the bytes of what :func:`digest_state` returns."""
    hasher = xxhash.xxh3_128()
    _feed(hasher, value)
    return hasher.digest()


def bytes_of(tensor: torch.Tensor) -> Any:
    """Return a tensor's bytes in the order of its elements, as a buffer; of one that is contiguous on the CPU without a copy.

    Args:
        tensor: not a sharded one.
    """
    tensor = tensor.detach()
    is_plain = type(tensor) is torch.Tensor and tensor.is_cpu and tensor.is_contiguous() and not tensor.is_neg()
    if is_plain and tensor.dtype in _OF_NUMPY:
        return tensor.numpy()
    return tensor.cpu().resolve_conj().resolve_neg().contiguous().reshape(-1).view(torch.uint8).numpy()


def _feed(hasher: Any, value: Any) -> None:
    if isinstance(value, DTensor):
        value = value.to_local()
    if isinstance(value, torch.Tensor):
        hasher.update(f"tensor {value.dtype} {tuple(value.shape)}".encode())
        hasher.update(bytes_of(value))
    elif isinstance(value, Mapping):
        # The count keeps an entry of an inner mapping apart from one that follows it in the outer.
        hasher.update(f"mapping {len(value)}".encode())
        for key in sorted(value, key=repr):
            hasher.update(f"key {key!r}".encode())
            _feed(hasher, value[key])
    elif isinstance(value, (list, tuple)):
        hasher.update(f"sequence {len(value)}".encode())
        for item in value:
            _feed(hasher, item)
    else:
        hasher.update(f"{type(value).__name__} {value!r}".encode())
