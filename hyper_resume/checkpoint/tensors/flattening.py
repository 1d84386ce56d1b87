"""Flattens a nested state into named entries, with the names and order of ``torch.distributed.checkpoint``, but faster."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch.distributed.checkpoint._traverse import traverse_state_dict

Keys = tuple[str | int, ...]


def flatten(state: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Keys]]:
    """Return entry name -> value, and entry name -> keys that lead to it in ``state``.

    Mappings, and lists that contain tensors, are flattened; every other value is an entry.

    Raises:
        ValueError: two values have the same name.
    """
    flat: dict[str, Any] = {}
    places: dict[str, Keys] = {}

    def add(path: Keys, name: str, value: Any) -> None:
        if name in flat:
            raise ValueError(f"two entries of the state are named {name}")
        flat[name] = value
        places[name] = path

    def walk(mapping: Mapping[Any, Any], path: Keys, prefix: str) -> None:
        for key, value in mapping.items():
            here = str(key)
            # Tensors first: most values are tensors, and the check for a mapping is slow.
            if isinstance(value, torch.Tensor):
                add((*path, here), prefix + here, value)
            elif isinstance(value, Mapping):
                walk(value, (*path, here), f"{prefix}{here}.")
            elif isinstance(value, list):
                # torch decides by the content of a list whether to flatten it.
                traverse_state_dict(
                    {here: value},
                    lambda inner, item: add((*path, *inner), prefix + ".".join(map(str, inner)), item),
                )
            else:
                add((*path, here), prefix + here, value)

    walk(state, (), "")
    return flat, places
