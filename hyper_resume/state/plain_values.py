"""Any value as plain values that JSON holds: for the description of a run, in which objects count by their names."""

from __future__ import annotations

import argparse
import dataclasses
import math
from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch

from hyper_resume import digest

_MAX_DEPTH = 8
_MAX_ITEMS = 1_000
_MAX_TEXT = 1_000
_MAX_INTEGER = 1 << 53


def is_plain(value: Any) -> bool:
    """Whether ``value`` is a number, text, truth value or None."""
    return value is None or type(value) in (bool, int, float, str)


def plain(value: Any, depth: int = 0) -> Any:
    """Return ``value`` as None, truth values, numbers, texts, and dicts and lists of them; other objects by their class.

    What JSON can't hold (a number that is not finite, a very large one) becomes text; a long text becomes its begin and digest.
    """
    value = _scalar(value)
    if is_plain(value):
        return value
    if depth >= _MAX_DEPTH:
        return qualified_name(type(value))
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        value = {field.name: getattr(value, field.name, None) for field in dataclasses.fields(value)}
    elif isinstance(value, (SimpleNamespace, argparse.Namespace)):
        value = vars(value)
    elif isinstance(value, (set, frozenset)):
        value = sorted(value, key=repr)
    if isinstance(value, Mapping):
        return {_short(str(key)): plain(item, depth + 1) for key, item in list(value.items())[:_MAX_ITEMS]}
    if isinstance(value, (list, tuple)):
        return [plain(item, depth + 1) for item in value[:_MAX_ITEMS]]
    return qualified_name(value if isinstance(value, type) or callable(value) else type(value))


def _scalar(value: Any) -> Any:
    """Return a number, text or truth value of any library as Python's; other objects as they are."""
    if isinstance(value, torch.Tensor):
        value = value.item() if value.numel() == 1 and not value.is_meta else f"tensor of {tuple(value.shape)}"
    elif isinstance(value, np.generic):
        value = value.item()
    if isinstance(value, float):
        return float(value) if math.isfinite(value) else repr(float(value))
    if isinstance(value, int) and not isinstance(value, bool):
        return int(value) if abs(value) <= _MAX_INTEGER else f"{value:#x}"[:_MAX_TEXT]
    if isinstance(value, str):
        return _short(str.__str__(value))
    return str(value) if isinstance(value, (torch.dtype, torch.device, Path)) else value


def qualified_name(thing: Any) -> str:
    """Return the name of a class or function with its module; of another object, that of its class."""
    named = thing if hasattr(thing, "__qualname__") else type(thing)
    return f"{getattr(named, '__module__', None) or ''}.{named.__qualname__}".lstrip(".")


def _short(text: str) -> str:
    text = text.encode("utf-8", "backslashreplace").decode("utf-8")
    return text if len(text) <= _MAX_TEXT else f"{text[:100]}... {digest.bytes_digest_text([text.encode()])}"
