"""Digests of state, to hold two runs against each other without keeping their tensors."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
import xxhash
from torch.distributed.tensor import DTensor


def digest_state(state: Any) -> str:
    """Return the xxh3-128 of a nested state: names, types, shapes and bytes of this rank's part, in order.

    Two states have the same digest when every tensor is equal bit for bit (so 0.0 and -0.0 differ) and every plain value
    has the same repr. Dict order does not count.
    """
    hasher = xxhash.xxh3_128()
    _feed(hasher, state)
    return hasher.hexdigest()


def _feed(hasher: Any, value: Any) -> None:
    if isinstance(value, DTensor):
        value = value.to_local()
    if isinstance(value, torch.Tensor):
        tensor = value.detach().cpu().contiguous()
        hasher.update(f"tensor {tensor.dtype} {tuple(tensor.shape)}".encode())
        hasher.update(tensor.reshape(-1).view(torch.uint8).numpy())
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
