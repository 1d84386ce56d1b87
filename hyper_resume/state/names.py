"""Parameter names that do not depend on wrappers around the model."""

from __future__ import annotations

from collections.abc import Sequence

from torch import nn

# Name parts that torch.compile and activation checkpointing add. A run with and a run without them must use the same names.
_WRAPPER_PARTS = frozenset({"_orig_mod", "_checkpoint_wrapped_module"})
_SHOWN = 5


def canonical_name(name: str) -> str:
    """Return ``name`` without the parts that wrappers add, at any depth."""
    return ".".join(part for part in name.split(".") if part not in _WRAPPER_PARTS)


def parameter_names(model: nn.Module) -> dict[int, str]:
    """Return id(parameter) -> canonical name; a tied parameter has its first name."""
    return {id(parameter): canonical_name(name) for name, parameter in model.named_parameters()}


def first_names(names: Sequence[str]) -> str:
    """Return the first few of ``names`` and the number of the others, for a message."""
    more = len(names) - _SHOWN
    return ", ".join(names[:_SHOWN]) + (f" and {more} more" if more > 0 else "")
