"""Checks a pickle of tensors and plain values before ``torch.load(weights_only=True)`` may read it.

``weights_only`` prevents calls of arbitrary code, but not the exhaustion of memory and time: it accepts ``bytearray(10**12)``,
and a dict whose key is a tuple of tuples 60 levels deep. So the pickle is read here first, with placeholders for tensors.
"""

from __future__ import annotations

import math
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
# No sparse tensor: a save refuses it, and nothing that reads a training state can take one.
_REBUILD: Final = frozenset(
    f"torch._utils._rebuild_{form}" for form in ("tensor_v2", "tensor_v3", "parameter", "parameter_with_state")
)
_REBUILD_WITH_DTYPE: Final = "torch._utils._rebuild_tensor_v3"
_REBUILD_DENSE: Final = ("torch._utils._rebuild_tensor_v2", _REBUILD_WITH_DTYPE)
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
# A value may unfold to this many bytes of tensors per byte of its archive, and to 64 MiB in any case. Tensors share storages,
# and an expanded one repeats its elements; without a limit, a file of 7 kB could ask for 8 GB.
_TENSOR_BYTES_PER_BYTE = 64
_TENSOR_BYTES_AT_LEAST = 64 << 20
_ITEM_BYTES: Final = {
    **{f"torch.{name}": dtype.itemsize for name, dtype in torch.storage._storage_type_to_dtype_map().items()},
    **{f"torch.{name}": value.itemsize for name, value in vars(torch).items() if isinstance(value, torch.dtype)},
}
_HASHABLE: Final = (str, bytes, int, float, complex, bool, NoneType)


class _Name:
    """Placeholder for an object that the pickle refers to by name."""

    def __init__(self, name: str) -> None:
        self.name = name


class _Opaque:
    """Placeholder for a tensor, a storage, or what one is made of; ``size_bytes`` is what the elements of a tensor take.

    ``item_bytes`` is the size of an element of a storage.
    """

    def __init__(self, size_bytes: int = 0, item_bytes: int = 1) -> None:
        self.size_bytes = size_bytes
        self.item_bytes = item_bytes


class PlainPickle(PickleSubset):
    """Reads the pickle of a ``torch.save`` archive; the result has the value's structure, with placeholders for tensors."""

    def check(self, archive_bytes: int) -> None:
        """Read the whole pickle and check the value.

        Args:
            archive_bytes: the size of the archive, tensors included.

        Raises:
            PickleRefused: it holds something that is not allowed, or its value is out of proportion to its size in bytes.
        """
        self._check_unfolded(self.read(), archive_bytes)

    def find(self, module: str, name: str) -> Any:
        """Return a placeholder for a listed name."""
        full = f"{module}.{name}"
        return _Name(full) if full in _VALUES or full in _CALLS else super().find(module, name)

    def call(self, function: Any, arguments: tuple[Any, ...]) -> Any:
        """Return the result of the call or a placeholder, if the arguments are such as ``torch.save`` writes."""
        name = function.name if isinstance(function, _Name) else ""
        kinds = tuple(map(type, arguments))
        if name in _REBUILD:
            return _Opaque(self._rebuilt_bytes(name, arguments))
        if name == _REBUILD_SUBCLASS and kinds[:3] == (_Name, _Name, tuple) and arguments[0].name in _REBUILD:
            return _Opaque(self._rebuilt_bytes(arguments[0].name, arguments[2]))
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

    def _rebuilt_bytes(self, name: str, arguments: tuple[Any, ...]) -> int:
        """Return how many bytes the elements of a rebuilt tensor take."""
        if name not in _REBUILD_DENSE:
            # A parameter's data.
            parts = [part for item in arguments for part in (item if type(item) is tuple else (item,))]
            return sum(part.size_bytes for part in parts if type(part) is _Opaque)
        storage, _, size, *_ = arguments if len(arguments) > 3 else (None,) * 3
        if type(storage) is not _Opaque or type(size) is not tuple or not all(type(n) is int and n >= 0 for n in size):
            raise self.refused("a tensor that torch.save does not write")
        dtype = arguments[6] if name == _REBUILD_WITH_DTYPE and len(arguments) > 6 else None
        item_bytes = _ITEM_BYTES.get(dtype.name, 1) if type(dtype) is _Name else storage.item_bytes
        return math.prod(size) * item_bytes

    def build(self, instance: Any, state: Any) -> None:
        """Ignore the attributes that a ``state_dict()`` has in addition to its items."""
        if type(instance) is not dict or type(state) is not dict:
            super().build(instance, state)

    def persistent(self, key: Any) -> Any:
        """Return a placeholder for a storage; ``torch`` compares its size with the archive's record."""
        if type(key) is not tuple or tuple(map(type, key)) != (str, _Name, str, str, int) or key[0] != "storage":
            super().persistent(key)
        return _Opaque(item_bytes=_ITEM_BYTES.get(key[1].name.replace("torch.cuda.", "torch."), 1))

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

    def _check_unfolded(self, root: Any, archive_bytes: int) -> None:
        left = _NODES_PER_BYTE * len(self._content)
        bytes_left = max(_TENSOR_BYTES_AT_LEAST, _TENSOR_BYTES_PER_BYTE * archive_bytes)
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
            if isinstance(part, _Opaque):
                bytes_left -= part.size_bytes
                if bytes_left < 0:
                    raise PickleRefused(
                        f"tensors that unfold to far more than the {archive_bytes} bytes of the archive"
                    )
            elif isinstance(part, dict):
                open_nodes.append(iter(part.values()))
            elif isinstance(part, (list, tuple)):
                open_nodes.append(iter(part))
