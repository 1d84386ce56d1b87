"""Frozen dataclasses to and from plain data, strictly, and the JSON Schema of records.

One reader for all data of the harness: cases, jobs, records. It accepts no string for a number and no unknown key, and its
errors name the place in the data.
"""

from __future__ import annotations

import dataclasses
import functools
import types
import typing
from collections.abc import Mapping
from typing import Any, Literal, TypeVar

T = TypeVar("T")


class SerialError(ValueError):
    """Plain data does not fit the type it is read as; the message names the place."""


def to_plain(value: Any) -> Any:
    """Return ``value`` (a dataclass, or containers of them) as dicts, lists and scalars."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {field.name: to_plain(getattr(value, field.name)) for field in dataclasses.fields(value)}
    if isinstance(value, Mapping):
        return {key: to_plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [to_plain(item) for item in value]
    return value


def build(kind: type[T], data: Any, where: str, *, defaults: bool = False) -> T:
    """Make the dataclass ``kind`` from a mapping.

    Args:
        kind: a dataclass.
        data: a mapping with its fields as keys.
        where: for messages, ``file:line`` or the like.
        defaults: a field that has a default may be absent; otherwise every field is required.

    Raises:
        SerialError: no mapping, an unknown or missing key, or a value of another type.
    """
    if not isinstance(data, Mapping):
        raise SerialError(f"{where}: expected a mapping, found {data!r}")
    hints = _hints(kind)  # type: ignore[arg-type]  # a class can be hashed
    fields = {field.name: field for field in dataclasses.fields(kind)}  # type: ignore[arg-type]  # T is a dataclass
    unknown = [key for key in data if key not in fields]
    if unknown:
        raise SerialError(f"{where}: unknown key {unknown[0]!r}; known: {', '.join(fields)}")
    missing = [name for name in fields if name not in data and not (defaults and _has_default(fields[name]))]
    if missing:
        raise SerialError(f"{where}: missing key {missing[0]!r}")
    values = {name: value(hints[name], item, f"{where}: {name}", defaults=defaults) for name, item in data.items()}
    return kind(**values)


def value(hint: Any, data: Any, where: str, *, defaults: bool = False) -> Any:
    """Return ``data`` as a value of the annotation ``hint``.

    Known annotations: int, float, str, bool, Any, ``X | None``, Literal, dataclasses, tuple, dict and Mapping.

    Raises:
        SerialError: it is of another type.
    """
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    if hint is Any:
        return data
    if origin in (types.UnionType, typing.Union):
        if data is None and type(None) in arguments:
            return None
        return _first_fit([item for item in arguments if item is not type(None)], data, where, defaults)
    if origin is Literal:
        if any(type(data) is type(item) and data == item for item in arguments):
            return data
        raise SerialError(f"{where}: expected one of {', '.join(map(str, arguments))}, found {data!r}")
    if origin is tuple and isinstance(data, (list, tuple)):
        return _tuple(arguments, data, where, defaults)
    if origin in (dict, Mapping) and isinstance(data, Mapping):
        if arguments == (str, Any) and all(isinstance(key, str) for key in data):
            return data  # as it is, because what comes from YAML knows its lines
        return {
            value(arguments[0], key, where): value(arguments[1], item, f"{where}.{key}", defaults=defaults)
            for key, item in data.items()
        }
    if dataclasses.is_dataclass(hint) and isinstance(hint, type):
        return build(hint, data, where, defaults=defaults)
    if hint is float and type(data) in (int, float):
        return float(data)
    if hint in (int, str, bool) and type(data) is hint:
        return data
    raise SerialError(f"{where}: expected {name_of(hint)}, found {data!r}")


def name_of(hint: Any) -> str:
    """An annotation in words for a reader of YAML."""
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    if origin in (types.UnionType, typing.Union):
        return " or ".join("nothing" if item is type(None) else name_of(item) for item in arguments)
    if origin is Literal:
        return "one of " + ", ".join(map(str, arguments))
    if origin is tuple:
        inner = [name_of(item) for item in arguments if item is not Ellipsis]
        return f"a list of {inner[0]}" if Ellipsis in arguments else f"a list [{', '.join(inner)}]"
    names = {int: "a whole number", float: "a number", str: "a text", bool: "true or false"}
    return names.get(hint, "a mapping") if isinstance(hint, type) else str(hint)


def _has_default(field: dataclasses.Field[Any]) -> bool:
    return field.default is not dataclasses.MISSING or field.default_factory is not dataclasses.MISSING


def _first_fit(hints: list[Any], data: Any, where: str, defaults: bool) -> Any:
    failures = []
    for hint in hints:
        try:
            return value(hint, data, where, defaults=defaults)
        except SerialError as error:
            failures.append(str(error))
    raise SerialError(failures[0] if len(failures) == 1 else f"{where}: fits none of its types: {'; '.join(failures)}")


def _tuple(arguments: tuple[Any, ...], data: Any, where: str, defaults: bool) -> tuple[Any, ...]:
    if len(arguments) == 2 and arguments[1] is Ellipsis:
        hints = [arguments[0]] * len(data)
    elif len(arguments) == len(data):
        hints = list(arguments)
    else:
        raise SerialError(f"{where}: expected {len(arguments)} items, found {len(data)}")
    pairs = enumerate(zip(hints, data, strict=True))
    return tuple(value(hint, item, f"{where}[{index}]", defaults=defaults) for index, (hint, item) in pairs)


# ---- JSON Schema ----------------------------------------------------------------------------------------------------


def json_schema(kind: type[Any], definitions: dict[str, Any]) -> dict[str, Any]:
    """Return a reference to the schema of the dataclass ``kind``, which is put into ``definitions`` (draft 2020-12)."""
    if kind.__name__ not in definitions:
        definitions[kind.__name__] = {}
        hints = typing.get_type_hints(kind)
        definitions[kind.__name__] = {
            "type": "object",
            "additionalProperties": False,
            "required": list(hints),
            "properties": {name: _schema_of(hint, definitions) for name, hint in hints.items()},
        }
    return {"$ref": f"#/$defs/{kind.__name__}"}


@functools.cache
def _hints(kind: Any) -> dict[str, Any]:
    # Thousands of records are of a dozen kinds.
    return typing.get_type_hints(kind)


def schema_of_lines(kinds: Mapping[str, type], *, title: str, description: str) -> dict[str, Any]:
    """The JSON Schema of one line of a records file: one of ``kinds``, named by its key ``record``."""
    definitions: dict[str, Any] = {}
    for name, kind in kinds.items():
        json_schema(kind, definitions)
        body = definitions[kind.__name__]
        body["properties"] = {"record": {"const": name}, **body["properties"]}
        body["required"] = ["record", *body["required"]]
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "title": title,
        "description": description,
        "anyOf": [{"$ref": f"#/$defs/{kind.__name__}"} for kind in kinds.values()],
        "$defs": definitions,
    }


def _schema_of(hint: Any, definitions: dict[str, Any]) -> dict[str, Any]:
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    if hint is Any:
        return {}
    if origin in (types.UnionType, typing.Union):
        return {"anyOf": [_schema_of(item, definitions) for item in arguments]}
    if origin is Literal:
        return {"enum": list(arguments)}
    if origin is tuple:
        return {"type": "array", "items": _schema_of(arguments[0], definitions)}
    if origin in (dict, Mapping):
        return {"type": "object", "additionalProperties": _schema_of(arguments[1], definitions)}
    if dataclasses.is_dataclass(hint) and isinstance(hint, type):
        return json_schema(hint, definitions)
    names = {int: "integer", float: "number", str: "string", bool: "boolean", type(None): "null"}
    return {"type": names[hint]}
