"""Checks a pickle of tensors and plain values before ``torch.load(weights_only=True)`` may read it.

``weights_only`` prevents calls of arbitrary code, but not the exhaustion of memory and time: it accepts ``bytearray(10**12)``,
and a dict whose key is a tuple of tuples 60 levels deep. So the pickle is read here first, with placeholders for tensors.
"""

from __future__ import annotations

from collections.abc import Iterator
from types import NoneType
from typing import Any, Final

import torch

from hyper_resume.checkpoint.parsing.pickle_subset import PickleRefused, PickleSubset, shorten

_MAX_NESTING = 100
# A key is hashed as a whole each time. This library's keys are names and numbers.
_MAX_IN_KEY = 1000
# Shared parts count once per reference, so that walking through the value takes time in proportion to the file's size.
_NODES_PER_BYTE = 8

_DTYPES: Final = frozenset(f"torch.{name}" for name, value in vars(torch).items() if isinstance(value, torch.dtype))
_VALUES: Final = frozenset(
    _DTYPES
    | {f"{kind.__module__}.{kind.__name__}" for kind in torch._storage_classes}
    | {"torch.Tensor", "torch.nn.parameter.Parameter"}
)
_REBUILD: Final = frozenset(
    f"torch._utils._rebuild_{form}"
    for form in ("tensor_v2", "tensor_v3", "parameter", "parameter_with_state", "sparse_tensor")
)
_REBUILD_SUBCLASS: Final = "torch._tensor._rebuild_from_type_v2"
_CALLS: Final = frozenset(
    {
        "collections.OrderedDict",
        "collections.Counter",
        "__builtin__.set",
        "__builtin__.complex",
        "_codecs.encode",
        "torch.Size",
        "torch.device",
        "torch.serialization._get_layout",
        _REBUILD_SUBCLASS,
        *_REBUILD,
    }
)
_HASHABLE: Final = (str, bytes, int, float, complex, bool, NoneType)


class _Name:
    """Placeholder for an object that the pickle refers to by name."""

    def __init__(self, name: str) -> None:
        self.name = name


class _Opaque:
    """Placeholder for a tensor or a storage."""


class PlainPickle(PickleSubset):
    """Reads the pickle of a ``torch.save`` archive; the result has the value's structure, with placeholders for tensors."""

    def check(self) -> None:
        """Read the whole pickle and check the value.

        Raises:
            PickleRefused: it holds something that is not allowed, or its value is out of proportion to its size in bytes.
        """
        self._check_unfolded(self.read())

    def find(self, module: str, name: str) -> Any:
        """Return a placeholder for a listed name."""
        full = f"{module}.{name}"
        return _Name(full) if full in _VALUES or full in _CALLS else super().find(module, name)

    def call(self, function: Any, arguments: tuple[Any, ...]) -> Any:
        """Return the result of the call or a placeholder, if the arguments are such as ``torch.save`` writes."""
        name = function.name if isinstance(function, _Name) else ""
        kinds = tuple(map(type, arguments))
        if name in _REBUILD or (name == _REBUILD_SUBCLASS and getattr(arguments[0], "name", "") in _REBUILD):
            return _Opaque()
        if name == "collections.OrderedDict" and not arguments:
            return {}
        if name == "collections.Counter" and kinds == (dict,):
            return arguments[0]
        if name == "__builtin__.set" and kinds == (list,):
            for item in arguments[0]:
                self.check_key(item)
            return tuple(arguments[0])
        if name == "__builtin__.complex" and kinds == (float, float):
            return complex(*arguments)
        # Only this encoding: Python would search modules for an unknown one.
        if name == "_codecs.encode" and kinds == (str, str) and arguments[1] == "latin1":
            return arguments[0].encode("latin1", "replace")
        if name == "torch.Size" and kinds == (tuple,) and all(type(number) is int for number in arguments[0]):
            return arguments[0]
        if name in ("torch.device", "torch.serialization._get_layout") and kinds in ((str,), (str, int)):
            return (name, *arguments)
        raise self.refused(f"a call of {shorten(name or function)} that torch.save does not write")

    def build(self, instance: Any, state: Any) -> None:
        """Ignore the attributes that a ``state_dict()`` has in addition to its items."""
        if type(instance) is not dict or type(state) is not dict:
            super().build(instance, state)

    def persistent(self, key: Any) -> Any:
        """Return a placeholder for a storage; ``torch`` compares its size with the archive's record."""
        if type(key) is not tuple or tuple(map(type, key)) != (str, _Name, str, str, int) or key[0] != "storage":
            super().persistent(key)
        return _Opaque()

    def check_key(self, key: Any) -> None:
        """Allow plain values, and tuples of them up to a size that is hashed quickly."""
        pending, count = [key], 0
        while pending:
            part = pending.pop()
            count += 1
            if type(part) is tuple and count + len(part) <= _MAX_IN_KEY:
                pending.extend(part)
            elif not isinstance(part, (*_HASHABLE, _Opaque, _Name)) or count > _MAX_IN_KEY:
                raise self.refused(f"a key that is {shorten(part)}")

    def _check_unfolded(self, root: Any) -> None:
        left = _NODES_PER_BYTE * len(self._content)
        open_nodes: list[Iterator[Any]] = [iter((root,))]
        while open_nodes:
            part = next(open_nodes[-1], open_nodes)
            if part is open_nodes:
                open_nodes.pop()
                continue
            left -= 1
            if left < 0:
                raise PickleRefused("a value that refers to its parts more often than its bytes can hold")
            if len(open_nodes) > _MAX_NESTING:
                raise PickleRefused(f"a value that is nested more than {_MAX_NESTING} deep")
            if isinstance(part, _Name) and part.name not in _DTYPES:
                raise PickleRefused(f"{part.name}, which is not a value")
            if isinstance(part, dict):
                open_nodes.append(iter(part.values()))
            elif isinstance(part, (list, tuple)):
                open_nodes.append(iter(part))
