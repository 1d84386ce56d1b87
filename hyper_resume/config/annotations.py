"""Reads the schema's annotations: which fields there are, what each may hold, and which one a wrong name stands for."""

from __future__ import annotations

import dataclasses
import difflib
import functools
import types
from collections.abc import Iterator, Sequence
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

from hyper_resume.config.schema import RunConfig

FieldPath = tuple[str, ...]
"""The names on the way to a field: ``("checkpoint", "save_steps")``."""


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
    """Annotation of the value under ``key``; Any where the schema has no annotation."""
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
    """Annotation of the value at a path of the whole tree; Any where the schema has no annotation."""
    return functools.reduce(child_hint, path, RunConfig)


def all_fields(block: type = RunConfig, above: FieldPath = ()) -> Iterator[FieldPath]:
    """Every field of the tree, each block before its fields."""
    for name, hint in _hints(block).items():
        yield (*above, name)
        if is_block(without_null(hint)):
            yield from all_fields(without_null(hint), (*above, name))


@functools.cache
def block_path(block: type) -> FieldPath:
    """Where a dataclass of the schema stands in the tree: ``("checkpoint",)`` for CheckpointingConfig."""
    return next(path for path in all_fields() if without_null(hint_at(path)) is block)


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


def example_list(path: Sequence[str | int]) -> str:
    """How the list at a path is written: its default, or two words where that is empty; an empty text for no list."""
    if get_origin(without_null(hint_at(path))) is not tuple:
        return ""
    default: Any = functools.reduce(getattr, map(str, path), RunConfig())
    return f"[{', '.join(map(str, default or ('first', 'second')))}]"


def suggest(path: FieldPath, keys: Sequence[str] = ()) -> str:
    """What to do about an unknown field whose block is known: the full dotted path where it belongs.

    Args:
        path: the unknown field.
        keys: the fields that were written in it, where it is a mapping; a block that has none of that name is no help.
    """
    targets = _nearest(path)
    if any(set(keys) <= _names_in(target) for target in targets):
        return f"write {_either(targets)}"
    inside = [_either(found) for key in keys if (found := _nearest((*path, key)))]
    if keys and len(inside) == len(keys):
        return f"write {', '.join(inside)}"
    if targets and not keys:
        return f"write {_either(targets)}"
    block = path[:-1]
    fields = _hints(without_null(hint_at(block)))
    return f"the fields of {'.'.join(block) or 'the top level'} are {', '.join(fields)}"


def _nearest(path: FieldPath) -> list[FieldPath]:
    """The fields whose names are most like that of ``path``; several where they share one name; none without a likeness.

    The same name anywhere comes before a similar one, and among similar ones those of the same block are preferred.
    """
    *block, name = path
    name = name.lower().replace("-", "_")
    found: dict[tuple[bool, float], list[FieldPath]] = {}
    for field in all_fields():
        is_here = list(field[:-1]) == block
        # lora_rank is lora.rank.
        names = {field[-1], "_".join(field[-2:])}
        likeness = max(difflib.SequenceMatcher(None, other, name).ratio() for other in names)
        if likeness >= (0.6 if is_here else 0.7):
            found.setdefault((likeness == 1, likeness + 0.1 * is_here), []).append(field)
    return found[max(found)] if found else []


def _names_in(path: FieldPath) -> set[str]:
    """Names of the fields of a block; none for a field that is none."""
    hint = without_null(hint_at(path))
    return set(_hints(hint)) if is_block(hint) else set()


def _either(paths: Sequence[FieldPath]) -> str:
    return " or ".join(".".join(path) for path in paths)
