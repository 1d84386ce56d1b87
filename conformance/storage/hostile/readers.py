"""The readers that get hostile files, each with an independent check of what it accepted."""

from __future__ import annotations

import io
import json
import math
import os
import pickle
import pickletools
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import yaml

from conformance.storage.hostile import opening
from conformance.storage.hostile.directory import INDEX, MAY_OPEN, SHARD, put
from hyper_resume.checkpoint.format import manifest
from hyper_resume.checkpoint.parsing import safe_load
from hyper_resume.config import as_plain, load_config
from hyper_resume.errors import HyperResumeError

# Every name that metadata may contain, listed independently of the library, so that an error in one list is found.
_METADATA_MODULES = frozenset(
    (
        "torch",
        "torch.serialization",
        "torch.distributed.checkpoint.metadata",
        "torch.distributed.checkpoint.filesystem",
        "pathlib",
    )
)
FILE_NAME = "configuration.yaml"
# Stock readers raise any error; all of them count as a refusal, except those of the limits.
_STOCK_REFUSALS = (
    ValueError,
    TypeError,
    LookupError,
    AttributeError,
    ArithmeticError,
    ImportError,
    EOFError,
    pickle.PickleError,
    RuntimeError,
    AssertionError,
)


@dataclass(frozen=True, kw_only=True)
class Reader:
    """One reader.

    Attributes:
        read: from bytes to a value, or an error of the library.
        doubt: from the bytes and the value to what is wrong with it; "" if nothing is.
        refusals: error classes that are a refusal; any other is a violation.
        put: writes the bytes to where ``read`` expects them, below the working directory.
        may_open: paths, as ``read`` names them, that it may open for reading or list.
    """

    read: Callable[[bytes], Any]
    doubt: Callable[[bytes, Any], str] = lambda content, value: ""
    refusals: tuple[type[BaseException], ...] = (HyperResumeError,)
    put: Callable[[Path, bytes], None] | None = None
    may_open: frozenset[str] = frozenset()


def library_readers() -> dict[str, Reader]:
    """The library's readers."""
    return {
        "metadata": Reader(
            read=lambda content: safe_load.load_metadata(content, "hostile/.metadata"), doubt=doubt_metadata
        ),
        "archive": Reader(read=lambda content: safe_load.load_plain(content, "hostile/archive"), doubt=doubt_archive),
        "manifest": Reader(
            read=lambda content: manifest.decode(content, "hostile/manifest.json"),
            doubt=lambda content, value: _differ(json.loads(content), json.loads(manifest.encode(value))),
        ),
        "configuration": Reader(
            read=lambda content: load_config(FILE_NAME),
            doubt=lambda content, value: doubt_configuration(content, as_plain(value)),
            put=put_file,
            may_open=frozenset((FILE_NAME,)),
        ),
        "index": _of_directory(INDEX),
        "shard": _of_directory(SHARD),
    }


def _of_directory(name: str) -> Reader:
    return Reader(
        read=opening.open_directory,
        doubt=opening.doubt(name),
        put=lambda folder, content: put(folder, name, content),
        may_open=MAY_OPEN,
    )


def stock_readers() -> dict[str, Reader]:
    """The readers of stock DCP: for comparison, and to show that the check can fail."""
    return {
        "metadata": Reader(read=pickle.loads, doubt=doubt_metadata, refusals=_STOCK_REFUSALS),
        "archive": Reader(
            read=lambda content: torch.load(io.BytesIO(content), weights_only=False),
            doubt=doubt_archive,
            refusals=_STOCK_REFUSALS,
        ),
    }


def _differ(one: Any, other: Any) -> str:
    return "" if one == other else "the value differs from the content"


def tree(value: Any) -> Any:
    """A value with everything that can be reached in it, also unexpected attributes."""
    if isinstance(value, torch.Tensor):
        return ("tensor", str(value.dtype), tuple(value.shape), value.reshape(-1)[:100].tolist())
    if type(value) in (list, tuple, set, frozenset, torch.Size):
        items = sorted(value, key=repr) if isinstance(value, (set, frozenset)) else value
        return (type(value).__name__, *map(tree, items))
    if isinstance(value, dict):
        return ("dict", *((tree(key), tree(item)) for key, item in value.items()))
    if hasattr(value, "__dict__") and not isinstance(value, type):
        return (type(value).__qualname__, *((name, tree(part)) for name, part in sorted(vars(value).items())))
    return repr(value)


def doubt_metadata(content: bytes, value: Any) -> str:
    """Only known names, the same value as stock ``pickle``, no path that leads out, and chunks that cover their tensors."""
    texts: list[Any] = []
    for opcode, argument, _ in pickletools.genops(content):
        if opcode.name in ("GLOBAL", "INST"):
            texts += str(argument).split(" ", 1)
        elif "UNICODE" in opcode.name:
            texts.append(argument)
        elif opcode.name == "STACK_GLOBAL":
            texts.append(None)
    if not {part for part in texts if isinstance(part, str) and part.startswith(("torch.", "pathlib"))} <= {
        *_METADATA_MODULES,
        *(str(value) for value in vars(torch).values() if isinstance(value, (torch.dtype, torch.layout))),
    }:
        return "it names a module that no metadata needs"
    if type(value).__qualname__ != "Metadata":
        return f"it is a {type(value).__qualname__}"
    if tree(value) != tree(pickle.loads(content)):
        return "the value differs from the content"
    for place in value.storage_data.values():
        inside = os.path.normpath(os.path.join("/base", place.relative_path))  # noqa: PTH118  a second opinion, without pathlib
        if not inside.startswith("/base/") or "\0" in place.relative_path or place.offset < 0 or place.length < 0:
            return f"a path or place outside: {place.relative_path[:100]!r}"
    return next(filter(None, (_doubt_chunks(name, entry) for name, entry in value.state_dict_metadata.items())), "")


def _doubt_chunks(name: str, entry: Any) -> str:
    if not hasattr(entry, "chunks"):
        return ""
    if math.prod(entry.size) > 10_000:
        return f"{name[:100]}: more elements than any of the good files has"
    seen = torch.zeros(tuple(entry.size), dtype=torch.int64)
    for chunk in entry.chunks:
        where = tuple(slice(begin, begin + size) for begin, size in zip(chunk.offsets, chunk.sizes, strict=True))
        seen[where] += 1
    return "" if bool((seen == 1).all()) else f"{name[:100]}: chunks do not cover it once"


def doubt_archive(content: bytes, value: Any) -> str:
    """Only tensors and plain values, and the same value as torch's restricted reader."""
    foreign = _foreign(value, 0)
    if foreign:
        return f"it holds a {foreign}"
    return _differ(tree(value), tree(torch.load(io.BytesIO(content), map_location="cpu", weights_only=True)))


def _foreign(value: Any, depth: int) -> str:
    if depth > 200:
        return "value nested without end"
    if isinstance(value, dict):
        return next(filter(None, (_foreign(part, depth + 1) for pair in value.items() for part in pair)), "")
    if isinstance(value, (list, tuple, set)):
        return next(filter(None, (_foreign(part, depth + 1) for part in value)), "")
    plain = (str, bytes, int, float, complex, torch.Tensor, torch.dtype, torch.device, torch.layout)
    return "" if value is None or isinstance(value, plain) else type(value).__qualname__


class _OtherLoader(yaml.SafeLoader):
    """PyYAML's safe loader, which lacks a constructor for a lone ``=``: a special value in YAML 1.1, plain text in 1.2."""


_OtherLoader.add_constructor("tag:yaml.org,2002:value", lambda loader, node: str(node.value))


def doubt_configuration(content: bytes, plain: Mapping[str, Any]) -> str:
    """The same fields as PyYAML's safe reader, and only plain data."""
    try:
        fields_found = yaml.load(content, _OtherLoader) or {}
    except yaml.YAMLError:
        return "it is no YAML"
    unknown = [
        key for block, fields in fields_found.items() for key in (fields or {}) if key not in plain.get(block, {})
    ]
    foreign = _foreign(dict(plain), 0)
    return f"it holds a {foreign}" if foreign else f"unknown fields {unknown[:3]}" if unknown else ""


def put_file(folder: Path, content: bytes) -> None:
    """Write the content to the file that ``read`` opens."""
    (folder / FILE_NAME).write_bytes(content)
