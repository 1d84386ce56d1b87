"""From a YAML file and ``--dotted.path=value`` overrides to a checked :class:`RunConfig`.

The dataclasses of :mod:`hyper_resume.config.schema` are the only schema: types, nesting and defaults are read from
their annotations. Every mistake is collected and raised in one :class:`ConfigError`, one line each, with the place
where the value was written.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import re
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, get_origin

from pydantic import ConfigDict, TypeAdapter, ValidationError

from hyper_resume.config.annotations import (
    FieldPath,
    allows_null,
    child_hint,
    example_list,
    expected_words,
    hint_at,
    is_block,
    suggest,
    without_null,
)
from hyper_resume.config.checks import run_checks
from hyper_resume.config.schema import RESERVED_CHECKPOINT_FIELDS, CheckpointingConfig, RunConfig
from hyper_resume.config.yaml_source import MAX_DEPTH, Located, Problem, parse_value, read_file
from hyper_resume.errors import ConfigError, describe

_NULL_TEXTS = frozenset(("", "~", "null", "Null", "NULL"))
_is_loading: ContextVar[bool] = ContextVar("_is_loading", default=False)
_OVERRIDE_NAME = re.compile(r"--([^\s.-][^\s.]*(?:\.[^\s.]+)*)")


@dataclass(frozen=True, kw_only=True)
class ResolvedConfig:
    """A configuration, and the source of each of its values.

    Attributes:
        config: the checked configuration.
        sources: for each dotted field ``default``, ``file:line`` or ``override --dotted.path=value``. A free mapping
            such as ``model.overrides`` has one entry per key, or one for itself while it is empty.
    """

    config: RunConfig
    sources: dict[str, str]


def load_config(path: str | Path, overrides: Sequence[str] = ()) -> RunConfig:
    """Read a YAML file, apply the overrides and check the result.

    Args:
        path: the YAML file; an empty one gives the defaults.
        overrides: texts ``--dotted.path=value``; a later one wins over an earlier one, and all win over the file. The value
            is YAML, except that a field annotated ``str`` takes everything but null literally, quotes included. Setting a
            whole block (``--checkpoint={save_steps: 5}``) replaces it: fields left out have their defaults again.

    Raises:
        ConfigError: the file can't be read, or anything in it or in the overrides is wrong; every mistake at once.
    """
    return resolve_config(path, overrides).config


def resolve_config(path: str | Path, overrides: Sequence[str] = ()) -> ResolvedConfig:
    """As :func:`load_config`, with the source of each value.

    Raises:
        ConfigError: as :func:`load_config`.
    """
    root, problems = read_file(path)
    assignments, override_problems = _read_overrides(overrides)
    problems += override_problems
    for field_path, value in assignments:
        root, refused = _overlay(root, field_path, value)
        problems += refused
    root = _fit(root, RunConfig)
    with loading():
        config, wrong = check_tree(root)
    problems += wrong
    if problems or config is None:
        raise refusal("the configuration", map(str, problems))
    return ResolvedConfig(config=config, sources=dict(_sources(config, root)))


@contextmanager
def loading() -> Iterator[None]:
    """While this is open, new blocks are not checked one by one: the whole tree is."""
    token = _is_loading.set(True)
    try:
        yield
    finally:
        _is_loading.reset(token)


def is_loading() -> bool:
    """Whether a :func:`loading` is open."""
    return _is_loading.get()


def check_tree(root: Located) -> tuple[RunConfig | None, list[Problem]]:
    """Build the configuration and check its values; called within :func:`loading`.

    Returns:
        The configuration, None where a type is wrong, and every problem.
    """
    config, wrong = _validate(root)
    return config, [problem for _, problem in wrong] + run_checks(root, [path for path, _ in wrong])


def refusal(what: str, lines: Iterable[str]) -> ConfigError:
    """Make the error that lists each mistake once, in a line of its own."""
    listed = list(dict.fromkeys(lines))
    count = "1 error" if len(listed) == 1 else f"{len(listed)} errors"
    return ConfigError("\n  ".join([f"{what} is wrong, {count}:", *listed]))


def as_plain(config: RunConfig) -> dict[str, Any]:
    """The configuration as nested dicts of plain values (tuples stay tuples); changing them changes no ``config``."""
    return dataclasses.asdict(config)


def reserved_fields_set(config: RunConfig | CheckpointingConfig) -> tuple[str, ...]:
    """Names of the reserved checkpoint fields whose value differs from the default; they have no effect yet."""
    checkpoint = config.checkpoint if isinstance(config, RunConfig) else config
    default = CheckpointingConfig()
    return tuple(
        name
        for name in RESERVED_CHECKPOINT_FIELDS
        if getattr(checkpoint, name, getattr(default, name)) != getattr(default, name)
    )


def _read_overrides(overrides: Sequence[str]) -> tuple[list[tuple[FieldPath, Located]], list[Problem]]:
    """Parse the texts; one that is not ``--dotted.path=value`` becomes a problem that shows the right form."""
    assignments: list[tuple[FieldPath, Located]] = []
    problems: list[Problem] = []
    pending = list(overrides)
    while pending:
        raw = pending.pop(0)
        origin = "override " + raw.replace("\n", "\\n")
        name, equals, text = raw.partition("=")
        match = _OVERRIDE_NAME.fullmatch(name)
        path = tuple(match[1].split(".")) if match and equals else ()
        if 0 < len(path) <= MAX_DEPTH:
            value, wrong = _override_value(path, text, origin)
            problems += wrong
            assignments += [] if wrong else [(path, value)]
            continue
        if match and not equals and pending and not pending[0].startswith("--"):
            text = pending.pop(0)  # the value is a word of its own: one mistake, not two
        right = f"--{name.strip().lstrip('-') or 'dotted.path'}={text or 'VALUE'}"
        message = describe("not an override", expected="--dotted.path=value, in one word", do=f"write {right}")
        problems.append(Problem(origin=origin, message=message))
    return assignments, problems


def _override_value(path: FieldPath, text: str, origin: str) -> tuple[Located, list[Problem]]:
    """Read the value of one override by the type of its field."""
    if without_null(hint_at(path)) is not str or text in _NULL_TEXTS:
        return parse_value(text, origin)
    problems = []
    try:
        text.encode("utf-8")
    except UnicodeEncodeError:
        problems.append(Problem(origin=ascii(origin), message=describe("the value is not UTF-8")))
    return Located(value=text, origin=origin), problems


def _overlay(node: Located, path: FieldPath, value: Located, above: FieldPath = ()) -> tuple[Located, list[Problem]]:
    """A copy of the mapping ``node`` with ``value`` at ``path``; blocks on the way are made where they are missing."""
    children = dict(node.value)
    name, *rest = path
    if not rest:
        children[name] = value
        return replace(node, value=children), []
    child = children.get(name)
    if child is None or child.value is None:
        child = Located(value={}, origin=value.origin)
    if not isinstance(child.value, dict):
        found = f"{child.show()} at {child.origin}"
        message = describe(f"{'.'.join((*above, name))} is not a block, so nothing in it can be set", found=found)
        return node, [Problem(origin=value.origin, message=message)]
    children[name], problems = _overlay(child, tuple(rest), value, (*above, name))
    return replace(node, value=children), problems


@functools.cache
def _adapter() -> TypeAdapter[tuple[RunConfig]]:
    # A plain dataclass takes its pydantic configuration from its container, at every depth. The tuple is that container:
    # pydantic accepts no configuration together with a bare dataclass, and the schema does not depend on pydantic.
    return TypeAdapter(tuple[RunConfig], config=ConfigDict(extra="forbid", strict=True))


def _fit(node: Located, hint: Any) -> Located:
    """Convert what YAML reads without knowing the schema.

    A block whose lines are all commented out reads as null and means an empty block. A number in a field of text (a
    directory named 10, or 1e5) is that text as written.
    """
    inner = without_null(hint)
    value = node.value
    if value is None and not allows_null(hint) and (is_block(inner) or get_origin(inner) is dict):
        value = {}
    if isinstance(value, dict):
        value = {key: _fit(child, child_hint(hint, key)) for key, child in value.items()}
    elif isinstance(value, list):
        value = [_fit(child, child_hint(hint, index)) for index, child in enumerate(value)]
    elif inner is str and isinstance(value, int | float) and not isinstance(value, bool) and node.text is not None:
        value = node.text
    return replace(node, value=value)


def _validate(root: Located) -> tuple[RunConfig | None, list[tuple[FieldPath, Problem]]]:
    """Build the configuration, or return a problem with its path for each unknown field and each wrong type."""
    # Through JSON, because there pydantic's strict mode makes dataclasses from mappings and tuples from lists, and still
    # refuses "10" for an int and true for a number.
    text = json.dumps([root.plain()])
    try:
        return _adapter().validate_json(text)[0], []
    except ValidationError as error:
        return None, [_explain(root, item["type"], item["loc"][1:]) for item in error.errors(include_url=False)]


def _explain(root: Located, kind: str, loc: tuple[str | int, ...]) -> tuple[FieldPath, Problem]:
    """Translate one of pydantic's errors into a problem."""
    node, reached = root, 0
    while reached < len(loc):
        part = loc[reached]
        if isinstance(node.value, dict) and part in node.value:
            node = node.value[str(part)]
        elif isinstance(node.value, list) and isinstance(part, int) and part < len(node.value):
            node = node.value[part]
        else:
            break  # an item that is missing, or one of pydantic's own words
        reached += 1
    path = tuple(str(part) for part in loc[:reached])
    field = ".".join(path)
    if kind == "unexpected_keyword_argument":
        keys = tuple(node.value) if isinstance(node.value, dict) else ()
        message = describe(f"{field}: unknown field", do=suggest(path, keys))
    else:
        expected = expected_words(hint_at(loc[:reached]))
        if example := example_list(loc[:reached]):
            expected += f", for example {example}"
        what = "wrong value" if kind == "literal_error" else "wrong type"
        message = describe(f"{field}: {what}", expected=expected, found=node.show())
    return path, Problem(origin=node.origin, message=message)


def _sources(value: Any, node: Located | None, path: FieldPath = ()) -> Iterator[tuple[str, str]]:
    """Dotted field and origin of every leaf of a configuration that was built from ``node``."""
    if dataclasses.is_dataclass(value):
        children = {field.name: getattr(value, field.name) for field in dataclasses.fields(value)}
    elif isinstance(value, dict):
        children = value
    else:
        children = {}
    if not children:
        yield ".".join(path), "default" if node is None else node.origin
    for name, child in children.items():
        yield from _sources(child, None if node is None else node.value.get(name), (*path, name))
