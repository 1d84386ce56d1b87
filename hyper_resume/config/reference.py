"""The configuration reference, generated from the schema: every field with its type, its default and one line of meaning.

``hyper-resume train --help-config`` prints it as text; the documentation builds its page from :func:`reference_markdown`.
"""

from __future__ import annotations

import ast
import dataclasses
import inspect
import textwrap
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from hyper_resume.config.annotations import FieldPath, all_fields, expected_words, hint_at, is_block, without_null
from hyper_resume.config.checks import CHECKS

_WIDTH = 100


@dataclass(frozen=True, kw_only=True)
class FieldReference:
    """One field: its dotted path, its type and range in words, its default as YAML writes it, and its meaning."""

    path: str
    type: str
    default: str
    meaning: str


@dataclass(frozen=True, kw_only=True)
class BlockReference:
    """One block: its dotted path, what it is for, and the fields that are no blocks themselves."""

    path: str
    meaning: str
    fields: tuple[FieldReference, ...]


def config_reference() -> list[BlockReference]:
    """Return every block of the configuration in the order of the schema."""
    blocks = [path for path in all_fields() if is_block(without_null(hint_at(path)))]
    return [_block(path) for path in blocks]


def reference_text() -> str:
    """Return the reference for a terminal."""
    lines = ["Any field is set in the YAML file, or overridden on the command line as --dotted.path=value."]
    for block in config_reference():
        lines += ["", f"{block.path}:", *_wrapped(block.meaning.replace("``", ""), "  ")]
        for field in block.fields:
            lines += [f"  {block.path}.{field.path.rpartition('.')[2]}"]
            lines += _wrapped(f"{field.type}; default: {field.default}", "      ")
            lines += _wrapped(field.meaning, "      ")
    return "\n".join(lines)


def reference_markdown(heading: str = "##") -> str:
    """Return the reference as Markdown: a heading and a table per block."""
    lines: list[str] = []
    for block in config_reference():
        lines += [f"{heading} `{block.path}`", "", block.meaning.replace("``", "`"), ""]
        lines += ["| field | type | default | meaning |", "|---|---|---|---|"]
        lines += [f"| `{field.path}` | {field.type} | `{field.default}` | {field.meaning} |" for field in block.fields]
        lines.append("")
    return "\n".join(lines)


def _block(path: FieldPath) -> BlockReference:
    block = without_null(hint_at(path))
    meanings = _meanings(block)
    return BlockReference(
        path=".".join(path),
        meaning=inspect.cleandoc(block.__doc__ or ""),
        fields=tuple(
            FieldReference(
                path=".".join((*path, field.name)),
                type=_type(".".join((*path, field.name))),
                default=_yaml(_default(field)),
                meaning=meanings[field.name],
            )
            for field in dataclasses.fields(block)
            if not is_block(without_null(hint_at((*path, field.name))))
        ),
    )


def _meanings(block: type) -> Mapping[str, str]:
    """Field name to the line under it in the source; Python keeps no such line itself."""
    (tree,) = ast.parse(textwrap.dedent(inspect.getsource(block))).body
    assert isinstance(tree, ast.ClassDef)  # the source of a class
    found: dict[str, str] = {}
    for statement, after in zip(tree.body, tree.body[1:], strict=False):
        is_text = isinstance(after, ast.Expr) and isinstance(after.value, ast.Constant)
        if isinstance(statement, ast.AnnAssign) and isinstance(statement.target, ast.Name) and is_text:
            found[statement.target.id] = str(after.value.value)  # type: ignore[attr-defined]
    return found


def _type(field: str) -> str:
    """The type in words, with what the rules about single fields add to it."""
    words = expected_words(hint_at(field.split(".")))
    return "; ".join([words, *(check.expected for check in CHECKS if check.fields == (field,))])


def _default(field: dataclasses.Field[Any]) -> Any:
    return field.default if field.default_factory is dataclasses.MISSING else field.default_factory()


def _yaml(value: Any) -> str:
    if value is None or isinstance(value, bool):
        return {None: "null", True: "true", False: "false"}[value]
    if isinstance(value, tuple):
        return f"[{', '.join(map(_yaml, value))}]"
    return str(value)


def _wrapped(text: str, indent: str) -> list[str]:
    lines: list[str] = []
    for paragraph in text.split("\n\n"):
        lines += textwrap.wrap(paragraph, _WIDTH, initial_indent=indent, subsequent_indent=indent)
    return lines
