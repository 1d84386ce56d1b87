"""Reads the schema's annotations: what stands where, what it may hold, and which field a wrong name meant."""

from __future__ import annotations

import dataclasses
import difflib
import functools
import types
from collections.abc import Iterator, Sequence
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

from hyper_resume.config.schema import RunConfig

FieldPath = tuple[str, ...]
"""A field as its parts: ``("checkpoint", "save_steps")``."""


@functools.cache
def _hints(block: type) -> dict[str, Any]:
    """Field name to annotation of one dataclass."""
    hints = get_type_hints(block)
    return {field.name: hints[field.name] for field in dataclasses.fields(block)}


def is_block(hint: Any) -> bool:
    """Whether the annotation is a dataclass of the schema."""
    return isinstance(hint, type) and dataclasses.is_dataclass(hint)


def allows_null(hint: Any) -> bool:
    """Whether None is a value of the annotation."""
    return hint is Any or (get_origin(hint) in (Union, types.UnionType) and type(None) in get_args(hint))


def without_null(hint: Any) -> Any:
    """``str`` for ``str | None``; other annotations as they are."""
    if get_origin(hint) not in (Union, types.UnionType):
        return hint
    rest = [part for part in get_args(hint) if part is not type(None)]
    return rest[0] if len(rest) == 1 else hint


def child_hint(hint: Any, key: str | int) -> Any:
    """Annotation of what stands under ``key``; Any where the schema says nothing."""
    hint = without_null(hint)
    if is_block(hint):
        return _hints(hint).get(str(key), Any)
    arguments = get_args(hint)
    if get_origin(hint) is dict:
        return arguments[1]
    if get_origin(hint) is tuple and isinstance(key, int):
        if arguments[-1] is Ellipsis:
            return arguments[0]
        return arguments[key] if key < len(arguments) else Any
    return Any


def hint_at(path: Sequence[str | int]) -> Any:
    """Annotation of what stands at a path of the whole tree; Any where the schema says nothing."""
    return functools.reduce(child_hint, path, RunConfig)


def _all_fields(block: type = RunConfig, above: FieldPath = ()) -> Iterator[FieldPath]:
    """Every field of the tree, blocks before what they hold."""
    for name, hint in _hints(block).items():
        yield (*above, name)
        if is_block(without_null(hint)):
            yield from _all_fields(without_null(hint), (*above, name))


def expected_words(hint: Any) -> str:
    """An annotation in the user's words."""
    if allows_null(hint) and hint is not Any:
        return f"{expected_words(without_null(hint))} or null"
    words: dict[Any, str] = {str: "text", bool: "true or false", int: "a whole number", float: "a number"}
    arguments = get_args(hint)
    if get_origin(hint) is Literal:
        return "one of " + ", ".join(str(choice) for choice in arguments)
    if get_origin(hint) is dict:
        return "a mapping, {key: value}"
    if get_origin(hint) is tuple:
        if arguments[-1] is Ellipsis:
            return f"a list, each item {expected_words(arguments[0])}"
        return f"a list of {len(arguments)}: {', '.join(expected_words(part) for part in arguments)}"
    return "a block of fields" if is_block(hint) else words.get(hint, str(hint))


def suggest(path: FieldPath) -> str:
    """What to do about an unknown field whose block is known.

    Looked for in this order: the same name in another block, a near name in this block, a near name anywhere.
    """
    *block, name = path
    name = name.lower().replace("-", "_")
    here = {field: [".".join((*block, field))] for field in _hints(without_null(hint_at(block)))}
    anywhere: dict[str, list[str]] = {}
    for field in _all_fields():
        anywhere.setdefault(field[-1], []).append(".".join(field))
    for names, likeness in ((here, 1.0), (anywhere, 1.0), (here, 0.6), (anywhere, 0.7)):
        if near := difflib.get_close_matches(name, names, n=1, cutoff=likeness):
            return f"write {' or '.join(names[near[0]])}"
    return f"the fields of {'.'.join(block) or 'the top level'} are {', '.join(here)}"
