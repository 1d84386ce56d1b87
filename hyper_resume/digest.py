"""Digests of state and of files: to hold two runs against each other, and a file against what was written.

A digest shows damage, not a forgery: who can write the file can write its digest.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import Any

import torch
import xxhash
from torch.distributed.tensor import DTensor

ALGORITHM = "xxh3_128"
# The text form: the algorithm stands in front, so that another one can be told from it later.
# Types whose tensors are arrays as they are; that saves two views a tensor.
_OF_NUMPY = frozenset((torch.float32, torch.float64, torch.int64, torch.int32, torch.uint8, torch.bool))
_TEXT = re.compile(rf"{ALGORITHM}:[0-9a-f]{{32}}")


def file_hasher() -> Any:
    """Return a new hasher (``update(buffer)``); :func:`as_text` gives what is written down."""
    return xxhash.xxh3_128()


def as_text(hasher: Any) -> str:
    """Return a hasher's digest as text, ``xxh3_128:<32 hex digits>``."""
    return f"{ALGORITHM}:{hasher.hexdigest()}"


def is_digest(text: str) -> bool:
    """True for the text form of a digest."""
    return _TEXT.fullmatch(text) is not None


def digest_bytes(chunks: Iterable[Any]) -> str:
    """Return the digest of all chunks together, as text."""
    hasher = file_hasher()
    for chunk in chunks:
        hasher.update(chunk)
    return as_text(hasher)


def digest_state(state: Any) -> str:
    """Return the xxh3-128 of a nested state: names, types, shapes and bytes of this rank's part, in order.

    Two states have the same digest when every tensor is equal bit for bit (so 0.0 and -0.0 differ) and every plain value
    has the same repr. Dict order does not count.
    """
    hasher = xxhash.xxh3_128()
    _feed(hasher, state)
    return hasher.hexdigest()


def state_text(state: Any) -> str:
    """Return :func:`digest_state` in the text form of digests."""
    return f"{ALGORITHM}:{digest_state(state)}"


def bytes_of(tensor: torch.Tensor) -> Any:
    """Return a tensor's bytes in the order of its elements, as a buffer; of one that is contiguous on the CPU without a copy.

    Args:
        tensor: not a sharded one.
    """
    tensor = tensor.detach()
    is_plain = type(tensor) is torch.Tensor and tensor.is_cpu and tensor.is_contiguous() and not tensor.is_neg()
    if is_plain and tensor.dtype in _OF_NUMPY:
        return tensor.numpy()
    return tensor.cpu().contiguous().reshape(-1).view(torch.uint8).numpy()


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
