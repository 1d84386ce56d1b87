"""A reader for the pickle in DCP's ``.metadata`` that allows only the names, calls and object states which it needs.

14 names occur, as measured on torch 2.11 and 2.13 with AdamW, bfloat16, FSDP2, tensor parallelism, scalars, lists and empty
shards.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from pathlib import PosixPath
from types import NoneType
from typing import Any, Final

import torch
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import (
    _MEM_FORMAT_ENCODING,
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
)

from hyper_resume.checkpoint.parsing.pickle_subset import PickleSubset, shorten

# The fields of each class and their exact types: a bool is not accepted as an int, nor a subclass of str as a str.
FIELDS: Final[Mapping[type, Mapping[str, tuple[type, ...]]]] = {
    Metadata: {
        "state_dict_metadata": (dict,),
        "planner_data": (dict, NoneType),
        "storage_data": (dict,),
        "storage_meta": (StorageMeta, NoneType),
        "version": (str, NoneType),
    },
    StorageMeta: {
        "checkpoint_id": (PosixPath, str, NoneType),
        "save_id": (str, NoneType),
        "load_id": (str, NoneType),
        "modules": (list,),
    },
    TensorStorageMetadata: {"properties": (TensorProperties,), "size": (torch.Size,), "chunks": (list,)},
    ChunkStorageMetadata: {"offsets": (torch.Size,), "sizes": (torch.Size,)},
    BytesStorageMetadata: {},
    MetadataIndex: {"fqn": (str,), "offset": (torch.Size, NoneType), "index": (int, NoneType)},
    _StorageInfo: {
        "relative_path": (str,),
        "offset": (int,),
        "length": (int,),
        "transform_descriptors": (list, tuple, NoneType),
    },
}
# TensorProperties is the only class whose state is a tuple, of these types.
_PROPERTIES: Final = (torch.dtype, torch.layout, bool, _MEM_FORMAT_ENCODING, bool)

_LAYOUTS: Final = {str(value): value for value in vars(torch).values() if isinstance(value, torch.layout)}
_DTYPES: Final = {name: value for name, value in vars(torch).items() if isinstance(value, torch.dtype)}


def _get_layout(name: str) -> torch.layout:
    """Stand in for torch's private function of this name."""
    return _LAYOUTS[name]


_NAMES: Final[Mapping[tuple[str, str], Any]] = {
    **{(kind.__module__, kind.__name__): kind for kind in (*FIELDS, TensorProperties, _MEM_FORMAT_ENCODING)},
    **{("torch", name): dtype for name, dtype in _DTYPES.items()},
    ("torch", "Size"): torch.Size,
    ("torch.serialization", "_get_layout"): _get_layout,
    ("pathlib", "PosixPath"): PosixPath,
    # Its name in Python 3.13.
    ("pathlib._local", "PosixPath"): PosixPath,
}
_IN_TUPLES: Final = frozenset((str, int, bool, NoneType, torch.dtype, torch.layout, _MEM_FORMAT_ENCODING))
# No file has more bytes, and torch.Size takes no more than 2**63 - 1.
MAX_INTEGER: Final = 1 << 62


class _Nested(tuple[Any, ...]):
    """A tuple that contains tuples, as the arguments of a call do. No tuple may contain it, so nesting ends at two levels."""


class MetadataPickle(PickleSubset):
    """Reads the pickle in a ``.metadata`` file."""

    def find(self, module: str, name: str) -> Any:
        """Return the object for a listed name; nothing is imported."""
        found = _NAMES.get((module, name))
        return super().find(module, name) if found is None else found

    def call(self, function: Any, arguments: tuple[Any, ...]) -> Any:
        """Call one of the four allowed functions, if the arguments have the expected types and values."""
        if function is torch.Size and len(arguments) == 1 and _are(arguments[0], int):
            if all(0 <= number <= MAX_INTEGER for number in arguments[0]):
                return torch.Size(arguments[0])
        elif function is PosixPath and _are(arguments, str):
            return PosixPath(*arguments)
        elif function is _get_layout and len(arguments) == 1 and _are(arguments, str) and arguments[0] in _LAYOUTS:
            return _get_layout(arguments[0])
        elif function is _MEM_FORMAT_ENCODING and len(arguments) == 1 and _are(arguments, int):
            known = {member.value: member for member in _MEM_FORMAT_ENCODING}
            if arguments[0] in known:
                return known[arguments[0]]
        raise self.refused(
            f"a call of {getattr(function, '__name__', shorten(function))} with other arguments than it takes"
        )

    def make(self, kind: Any, arguments: tuple[Any, ...]) -> Any:
        """Create an empty object of a listed class; :meth:`build` sets its fields."""
        if isinstance(kind, type) and (kind in FIELDS or kind is TensorProperties) and arguments == ():
            return object.__new__(kind)
        raise self.refused(f"a new object of {shorten(kind)}")

    def build(self, instance: Any, state: Any) -> None:
        """Set the fields of an object, once; each must be a field of its class and have one of its types."""
        kind = type(instance)
        if kind is TensorProperties and not vars(instance) and type(state) is tuple:
            if tuple(map(type, state)) == _PROPERTIES:
                # By its own method, because the order in the tuple is not that of the dataclass fields.
                instance.__setstate__(state)
                return
        elif kind in FIELDS and type(state) is dict and not vars(instance):
            allowed = FIELDS[kind]
            for name, value in state.items():
                if name not in allowed:
                    raise self.refused(f"the attribute {shorten(name)}, which {kind.__name__} does not have")
                if type(value) not in allowed[name]:
                    raise self.refused(f"{kind.__name__}.{name} that is {shorten(value)}")
            vars(instance).update(state)
            return
        raise self.refused(f"a state that a {kind.__name__} does not have")

    def check_key(self, key: Any) -> None:
        """Allow text, and a MetadataIndex whose fields are set."""
        if type(key) is not str and not (type(key) is MetadataIndex and "fqn" in vars(key)):
            raise self.refused(f"a key of a dict that is {shorten(key)}")

    def check_item(self, item: Any) -> None:
        """Allow chunks and text."""
        if type(item) is not ChunkStorageMetadata and type(item) is not str:
            raise self.refused(f"an item of a list that is {shorten(item)}")

    def make_tuple(self, items: list[Any]) -> tuple[Any, ...]:
        """Allow plain values and, one level below, a tuple of them."""
        is_nested = False
        for item in items:
            if type(item) is tuple:
                is_nested = True
            elif type(item) not in _IN_TUPLES:
                raise self.refused(f"an item of a tuple that is {shorten(item)}")
        return _Nested(items) if is_nested else tuple(items)


def has_required_fields(instance: Any) -> bool:
    """True if every field without a default is set; a pickle can create an object without setting its state."""
    return all(
        field.name in vars(instance) for field in dataclasses.fields(instance) if field.default is dataclasses.MISSING
    )


def _are(items: Any, kind: type) -> bool:
    return isinstance(items, tuple) and all(type(item) is kind for item in items)
