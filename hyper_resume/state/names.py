"""Parameter names that do not depend on wrappers around the model."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch.nn.parallel import DataParallel, DistributedDataParallel

# Name parts that torch.compile and activation checkpointing add. A run with and a run without them must use the same names.
_WRAPPER_PARTS = frozenset({"_orig_mod", "_checkpoint_wrapped_module"})
# These add `module`, which is a name that a model may use itself: it is removed only below such a wrapper.
_DATA_PARALLEL = (DataParallel, DistributedDataParallel)
OUTSIDE = "outside/"
"""Begins the name of a parameter that the model does not have."""
_MOST_ITEMS = 4_096
_SHOWN = 5


def canonical_name(name: str) -> str:
    """Return ``name`` without the parts that any wrapper but data parallelism adds, at any depth."""
    return ".".join(part for part in name.split(".") if part not in _WRAPPER_PARTS)


def naming(model: nn.Module) -> Callable[[str], str]:
    """Return the function from a name in ``model`` (of a parameter or an entry of its state) to the canonical name.

    It also removes the part ``module`` of each ``DistributedDataParallel`` and ``DataParallel`` that ``model`` contains.
    """
    wrapped = {
        canonical_name(f"{name}.module" if name else "module")
        for name, module in model.named_modules(remove_duplicate=False)
        if isinstance(module, _DATA_PARALLEL)
    }
    if not wrapped:
        return canonical_name

    def without_wrappers(name: str) -> str:
        kept: list[str] = []
        parts = canonical_name(name).split(".")
        for place, part in enumerate(parts):
            if ".".join(parts[: place + 1]) not in wrapped:
                kept.append(part)
        return ".".join(kept)

    return without_wrappers


def without_data_parallel(model: nn.Module) -> nn.Module:
    """Return what ``model`` wraps if it is a ``DistributedDataParallel`` or ``DataParallel``, else ``model``."""
    return model.module if isinstance(model, _DATA_PARALLEL) else model


def parameter_names(model: nn.Module) -> dict[int, str]:
    """Return id(parameter) -> canonical name; a tied parameter has its first name."""
    canonical = naming(model)
    return {id(parameter): canonical(name) for name, parameter in model.named_parameters()}


def outside_names(owners: Mapping[str, Any], known: Mapping[int, str]) -> dict[int, str]:
    """Return id(parameter) -> name of the parameters that the attributes of ``owners`` hold and that are not ``known``.

    A name is the path to the parameter, through attributes, dictionaries, lists and modules, so it does not depend on the
    order in which an optimizer has the parameters.

    Args:
        owners: name -> object, whose attributes are read.
        known: id(parameter) -> name of the parameters that have a name.
    """
    found: dict[int, str] = {}
    for path, parameter in _parameters_in(owners, ""):
        if id(parameter) not in known:
            found.setdefault(id(parameter), f"{OUTSIDE}{path}")
    return found


def _parameters_in(values: Mapping[str, Any], path: str, depth: int = 4) -> Iterator[tuple[str, torch.Tensor]]:
    for name, value in values.items():
        here = f"{path}{name}"
        if isinstance(value, nn.Module):
            canonical = naming(value)
            yield from ((f"{here}.{canonical(inner)}", item) for inner, item in value.named_parameters())
        elif isinstance(value, torch.Tensor):
            if value.requires_grad and value.is_leaf:
                yield here, value
        elif depth and (inside := _items(value)):
            yield from _parameters_in(inside, f"{here}.", depth - 1)


def _items(value: Any) -> dict[str, Any]:
    """Return what a plain container holds, by key; of one with very many items, nothing: it is data."""
    if not isinstance(value, (dict, list, tuple)) or len(value) > _MOST_ITEMS:
        return {}
    if isinstance(value, dict):
        return {str(key): item for key, item in value.items() if isinstance(key, (str, int))}
    return {str(place): item for place, item in enumerate(value)}


def first_names(names: Sequence[str]) -> str:
    """Return the first few of ``names`` and the number of the others, for a message."""
    more = len(names) - _SHOWN
    return ", ".join(names[:_SHOWN]) + (f" and {more} more" if more > 0 else "")
