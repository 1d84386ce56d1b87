"""A strict reader for JSON that may be damaged or hostile: fixed keys and types, and limits on everything that can grow."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Sequence
from typing import Any

# No number in this library's files is larger; Python would accept integers of any length.
MAX_INTEGER = 1 << 62
MAX_TEXT = 4096
"""The longest text and the longest key, in characters; no name that this library or torch writes is as long."""
_MAX_DEPTH = 16
_MAX_VALUES = 100_000


class JsonFormatError(ValueError):
    """The JSON does not have the expected keys, types or values; the message says where."""


def parse_json(content: bytes) -> Any:
    """Parse strict JSON: UTF-8, no key twice, no NaN.

    Raises:
        JsonFormatError: it is not such JSON, or is nested too deep.
    """
    try:
        return json.loads(content.decode("utf-8"), object_pairs_hook=_unique, parse_constant=_refuse_constant)
    except JsonFormatError:
        raise
    except (ValueError, RecursionError) as error:
        raise JsonFormatError(f"not JSON ({type(error).__name__}: {str(error)[:200]})") from error


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        raise JsonFormatError("a key occurs twice in one object")
    longest = max(map(len, found), default=0)
    if longest > MAX_TEXT:
        raise JsonFormatError(f"a key of {longest} characters; at most {MAX_TEXT} are read")
    return found


def _refuse_constant(name: str) -> Any:
    raise JsonFormatError(f"{name} is not a JSON number")


class JsonObject:
    """An object that must have certain keys, each of one type."""

    def __init__(self, value: Any, where: str = "") -> None:
        """Wrap a parsed value; ``where`` is the path to it, for messages."""
        if not isinstance(value, dict):
            raise JsonFormatError(f"{where or 'the whole'}: expected an object, found {type(value).__name__}")
        self.value: dict[str, Any] = value
        self._where = where

    def refuse_unknown_keys(self, *known: str) -> None:
        """Refuse keys that are not among ``known``."""
        others = sorted(set(self.value) - set(known))
        if others:
            # Escaped to ASCII, because the key may contain any characters.
            raise JsonFormatError(f"{self._path(ascii(others[0][:80])[1:-1])}: unknown key")

    def text(self, key: str, *, pattern: re.Pattern[str] | None = None) -> str:
        """Return a text of at most :data:`MAX_TEXT` characters that matches ``pattern``."""
        found = self._get(key, str)
        if len(found) > MAX_TEXT or (pattern is not None and not pattern.fullmatch(found)):
            raise JsonFormatError(f"{self._path(key)}: not a valid text: {found[:80]!r}")
        return str(found)

    def integer(self, key: str, *, least: int | None = None, most: int = MAX_INTEGER) -> int:
        """Return an integer of at most ``most`` (2**62 by default) and at least ``least``."""
        found: int = self._get(key, int)
        if abs(found) > most or (least is not None and found < least):
            raise JsonFormatError(f"{self._path(key)}: out of range")
        return found

    def number(self, key: str) -> float:
        """Return a finite number."""
        value = self.value.get(key)
        found = float(self.integer(key)) if isinstance(value, int) else self._get(key, float)
        if not math.isfinite(found):
            raise JsonFormatError(f"{self._path(key)}: not finite")
        return float(found)

    def items(self, key: str, *, most: int) -> Sequence[Any]:
        """Return a list of at most ``most`` items."""
        found = self._get(key, list)
        if len(found) > most:
            raise JsonFormatError(f"{self._path(key)}: expected at most {most} items, found {len(found)}")
        return list(found)

    def child(self, key: str) -> JsonObject:
        """Return the nested object under ``key``."""
        return JsonObject(self._get(key, dict), self._path(key))

    def plain(self, key: str) -> dict[str, Any]:
        """Return the nested object under ``key``, of any keys and plain values, with limits on depth, number and size."""
        found = self.child(key)
        pending: list[tuple[Any, int]] = [(found.value, 0)]
        count = 0
        while pending:
            value, depth = pending.pop()
            count += 1
            if count > _MAX_VALUES or depth > _MAX_DEPTH:
                raise JsonFormatError(f"{self._path(key)}: more than {_MAX_VALUES} values, or nested too deep")
            if isinstance(value, dict):
                pending += [(part, depth + 1) for pair in value.items() for part in pair]
            elif isinstance(value, list):
                pending += [(part, depth + 1) for part in value]
            elif not _is_limited(value):
                raise JsonFormatError(f"{self._path(key)}: a value that is too large")
        return found.value

    def keys_of(self, key: str) -> Sequence[str]:
        """Return the keys of the nested object under ``key``."""
        return list(self.child(key).value)

    def _get(self, key: str, kind: type) -> Any:
        if key not in self.value:
            raise JsonFormatError(f"{self._path(key)}: missing")
        found = self.value[key]
        # Not isinstance, because a bool is an int in Python.
        if type(found) is not kind:
            raise JsonFormatError(f"{self._path(key)}: expected {kind.__name__}, found {type(found).__name__}")
        return found

    def _path(self, key: str) -> str:
        return f"{self._where}.{key}" if self._where else key


def _is_limited(value: Any) -> bool:
    if isinstance(value, str):
        return len(value) <= MAX_TEXT
    return not isinstance(value, (int, float)) or (
        math.isfinite(value) if type(value) is float else abs(value) <= MAX_INTEGER
    )
