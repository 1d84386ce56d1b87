"""Reads YAML into a tree that records where every value was written.

Scalars follow YAML 1.1 as PyYAML reads it, except for numbers: those follow YAML 1.2, because a learning rate written
``3e-4`` is a number except in YAML 1.1, and ``010`` or ``12:30`` silently become 8 and 750 there. Here a leading
zero or a colon leaves text. Dates stay text, keys are text as written, and a tag that would build anything but plain
data is refused.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import yaml

from hyper_resume.errors import describe

MAX_DEPTH = 64
"""Deepest nesting that is read: far above any configuration, below the limits of the validator and of Python's stack."""

MAX_NODES = 100_000
"""Most values that a file may expand to. A few lines of aliases of aliases expand to billions."""

_TAG = "tag:yaml.org,2002:"
_SCALAR_TAGS = frozenset(_TAG + name for name in ("null", "bool", "int", "float", "str"))
_KEPT_RESOLVERS = frozenset(_TAG + name for name in ("null", "bool", "merge"))


@dataclass(frozen=True, kw_only=True)
class Problem:
    """One thing that is wrong with a configuration, and where it was written."""

    origin: str
    message: str

    def __str__(self) -> str:
        """The line that the user reads."""
        return f"{self.origin}: {self.message}"


@dataclass(frozen=True, kw_only=True)
class NotYaml:
    """A Python object that no YAML file can write, where a configuration was built in Python."""

    value: Any


@dataclass(frozen=True, kw_only=True)
class Located:
    """A value and where it was written.

    Attributes:
        value: None, bool, int, float, str, a list of ``Located``, a dict from key to ``Located``, or :class:`NotYaml`.
        origin: ``file:line`` of the key (of the item, in a list), or ``override --dotted.path=value``.
        text: an unquoted scalar as it was written, before it was read as a number; None for everything else.
    """

    value: Any
    origin: str
    text: str | None = None

    def plain(self) -> Any:
        """The value without origins."""
        if isinstance(self.value, dict):
            return {key: child.plain() for key, child in self.value.items()}
        if isinstance(self.value, list):
            return [child.plain() for child in self.value]
        # A list in a list: no annotation of the schema allows it but Any, which allows everything.
        return [[]] if isinstance(self.value, NotYaml) else self.value

    def show(self) -> str:
        """The value as YAML would write it, with its kind, short enough for one line of an error."""
        if self.value is None:
            return "null"
        if isinstance(self.value, NotYaml):
            shown = repr(self.value.value)
            return f"{shown if len(shown) <= 60 else shown[:57] + '...'} ({type(self.value.value).__name__})"
        is_scalar = isinstance(self.value, int | float)  # bool is an int here
        shown = self.text if is_scalar and self.text is not None else json.dumps(self.plain(), ensure_ascii=False)
        if len(shown) > 60:
            shown = shown[:57] + "..."
        if isinstance(self.value, bool):
            word = "true" if self.value else "false"
            return word if shown.lower() == word else f"{shown} (YAML for {word})"
        kinds = {int: "a number", float: "a number", str: "text", list: "a list", dict: "a mapping"}
        return f"{shown} ({kinds[type(self.value)]})"


class ConfigLoader(yaml.SafeLoader):
    """PyYAML's safe loader with the numbers of YAML 1.2 and without dates."""


# The table is looked up by a scalar's first character. It is a new dict, so PyYAML's own loaders keep theirs.
ConfigLoader.yaml_implicit_resolvers = {
    first: kept
    for first, resolvers in yaml.SafeLoader.yaml_implicit_resolvers.items()
    if (kept := [(tag, pattern) for tag, pattern in resolvers if tag in _KEPT_RESOLVERS])
}
ConfigLoader.add_implicit_resolver(
    _TAG + "int", re.compile(r"^[-+]?(?:0|[1-9][0-9]*(?:_[0-9]+)*)$"), list("-+0123456789")
)
ConfigLoader.add_implicit_resolver(
    _TAG + "float",
    re.compile(
        r"""^(?:[-+]?(?:0|[1-9][0-9]*)?\.[0-9]+(?:[eE][-+]?[0-9]+)?
            |[-+]?(?:0|[1-9][0-9]*)\.?(?:[eE][-+]?[0-9]+)
            |[-+]?(?:0|[1-9][0-9]*)\.
            |[-+]?\.(?:inf|Inf|INF)
            |\.(?:nan|NaN|NAN))$""",
        re.VERBOSE,
    ),
    list("-+.0123456789"),
)


def read_file(path: str | Path) -> tuple[Located, list[Problem]]:
    """Read a YAML file whose top level is a mapping.

    Never raises for a bad file: what can't be used is left out and reported, so that one run of the program shows
    every mistake. An empty file is an empty mapping.

    Returns:
        The tree, and the problems found in it.
    """
    nothing = Located(value={}, origin=str(path))
    try:
        data = Path(path).read_bytes()
    except (OSError, ValueError) as error:
        return nothing, [_unreadable(path, error)]
    try:
        text = data.decode("utf-8")
    except UnicodeDecodeError as error:
        line = data.count(b"\n", 0, error.start) + 1
        found = f"byte 0x{data[error.start]:02x}"
        message = describe("the file is not UTF-8", found=found, do="save the file as UTF-8")
        return nothing, [Problem(origin=f"{path}:{line}", message=message)]
    root, problems = _read_text(text, lambda line: f"{path}:{line}")
    if root.value is None:
        return nothing, problems
    if not isinstance(root.value, dict):
        found = "a list" if isinstance(root.value, list) else "a single value"
        message = describe("the file holds no fields", expected="a mapping, field: value", found=found)
        return nothing, [*problems, Problem(origin=root.origin, message=message)]
    return root, problems


def parse_value(text: str, origin: str) -> tuple[Located, list[Problem]]:
    """Read one YAML value, for example ``3e-4``, ``null``, ``[a, b]`` or ``{k: v}``; ``origin`` is kept as it is."""
    return _read_text(text, lambda _line: origin)


def _unreadable(path: str | Path, error: OSError | ValueError) -> Problem:
    """The problem of a file that could not be opened."""
    if isinstance(error, FileNotFoundError):
        message = describe("the file does not exist", do="check the path; it is relative to the working directory")
    elif isinstance(error, IsADirectoryError):
        message = describe("this is a directory", expected="a YAML file")
    else:
        message = describe("the file can't be read", found=getattr(error, "strerror", None) or str(error))
    return Problem(origin=str(path), message=message)


def _read_text(text: str, origin_of: Callable[[int], str]) -> tuple[Located, list[Problem]]:
    """Read YAML text; ``origin_of`` turns a line, counted from 1, into an origin."""
    nothing = Located(value=None, origin=origin_of(1))
    try:
        loader = ConfigLoader(text)
        node = loader.get_single_node()
        if node is None:
            return nothing, []
        builder = _TreeBuilder(loader, origin_of)
        builder.find_duplicate_keys(node)
        return builder.build(node), builder.problems
    except yaml.reader.ReaderError as error:
        line = text.count("\n", 0, error.position) + 1
        message = describe("not YAML", found=f"character U+{ord(text[error.position]):04X}")
        return nothing, [Problem(origin=origin_of(line), message=message)]
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        line = 1 if mark is None else mark.line + 1
        parts = [part for part in (error.context, error.problem) if part]
        return nothing, [Problem(origin=origin_of(line), message=describe("not YAML", found=": ".join(parts)))]
    except RecursionError:
        return nothing, [Problem(origin=origin_of(1), message=_too_deep())]


def _too_deep() -> str:
    """The message for a tree that is nested too deeply."""
    return describe("nested too deeply", expected=f"at most {MAX_DEPTH} levels")


class _TreeBuilder:
    """Turns PyYAML's node graph into ``Located`` values, collecting problems on the way."""

    def __init__(self, loader: ConfigLoader, origin_of: Callable[[int], str]) -> None:
        self.problems: list[Problem] = []
        self._loader = loader
        self._origin_of = origin_of
        self._built: dict[int, Located] = {}
        self._open: set[int] = set()
        # The number of values that each node expands to, by identity: the nodes live as long as this object.
        self._sizes: dict[int, int] = {}

    def find_duplicate_keys(self, root: yaml.Node) -> None:
        """Report keys written twice in one mapping.

        This runs before ``build``, because merging ``<<`` puts keys into a mapping that may rightly be there twice.
        """
        for mapping in _mappings(root):
            seen: dict[str, str] = {}
            for key, _ in mapping.value:
                if not isinstance(key, yaml.ScalarNode):
                    continue
                origin = self._origin(key)
                if key.value in seen:
                    message = describe(f"duplicate key {key.value!r}", found=f"the same key at {seen[key.value]}")
                    self.problems.append(Problem(origin=origin, message=message))
                seen.setdefault(key.value, origin)

    def build(self, node: yaml.Node, depth: int = 1) -> Located:
        """Build one node; a node that several aliases name is built once."""
        if self._size(node) > MAX_NODES:
            return self._refuse(
                node, describe("aliases expand to too many values", expected=f"at most {MAX_NODES} values")
            )
        if id(node) in self._built:
            return self._built[id(node)]
        if id(node) in self._open:
            return self._refuse(node, describe("an alias inside its own anchor", do="write the value out"))
        if depth > MAX_DEPTH:
            return self._refuse(node, _too_deep())
        self._open.add(id(node))
        if isinstance(node, yaml.MappingNode) and node.tag == _TAG + "map":
            built = self._build_mapping(node, depth)
        elif isinstance(node, yaml.SequenceNode) and node.tag == _TAG + "seq":
            items = [self.build(item, depth + 1) for item in node.value]
            built = Located(value=items, origin=self._origin(node))
        elif isinstance(node, yaml.ScalarNode) and node.tag in _SCALAR_TAGS:
            built = self._build_scalar(node)
        else:
            built = self._refuse(node, describe(f"tag {_short(node.tag)} is not read", do="write plain data"))
        self._open.discard(id(node))
        self._built[id(node)] = built
        return built

    def _size(self, node: yaml.Node) -> int:
        """The number of values that a node expands to, at most ``MAX_NODES`` + 1; a merge counts as often as it is written."""
        if id(node) not in self._sizes:
            self._sizes[id(node)] = 1  # for a node inside of itself, which ``build`` refuses
            size = 1
            if isinstance(node, yaml.CollectionNode):
                for part in node.value:
                    size += sum(map(self._size, part)) if isinstance(part, tuple) else self._size(part)
            self._sizes[id(node)] = min(size, MAX_NODES + 1)
        return self._sizes[id(node)]

    def _build_mapping(self, node: yaml.MappingNode, depth: int) -> Located:
        self._loader.flatten_mapping(node)
        children: dict[str, Located] = {}
        for key, value in node.value:
            if not isinstance(key, yaml.ScalarNode) or key.tag not in _SCALAR_TAGS:
                self._refuse(key, describe("a key that is not text", expected="field: value"))
                continue
            child = self.build(value, depth + 1)
            # Errors point at the key: the value of a block starts a line later.
            children[key.value] = replace(child, origin=self._origin(key))
        return Located(value=children, origin=self._origin(node))

    def _build_scalar(self, node: yaml.ScalarNode) -> Located:
        text = str(node.value)
        origin = self._origin(node)
        try:
            text.encode("utf-8")
            value = _number(node.tag, text)
            if value is None:
                value = self._loader.construct_object(node)
        except UnicodeEncodeError:
            return self._refuse(node, describe("half of a surrogate pair", expected="whole Unicode characters"))
        except (ValueError, KeyError):
            return self._refuse(node, describe(f"{text[:40]!r} does not fit its tag {_short(node.tag)}"))
        return Located(value=value, origin=origin, text=text if node.style is None else None)

    def _origin(self, node: yaml.Node) -> str:
        return self._origin_of(node.start_mark.line + 1)

    def _refuse(self, node: yaml.Node, message: str) -> Located:
        origin = self._origin(node)
        self.problems.append(Problem(origin=origin, message=message))
        return Located(value=None, origin=origin)


def _number(tag: str, text: str) -> int | float | None:
    """Read a number; None for a tag that is no number's.

    PyYAML's own functions would read octals and base 60.
    """
    if tag == _TAG + "int":
        return int(text)
    if tag == _TAG + "float":
        # `.inf` and `.nan` have a dot that Python's words have not.
        return float(re.sub(r"^([-+]?)\.(?=[iInN])", r"\1", text))
    return None


def _mappings(root: yaml.Node) -> Iterator[yaml.MappingNode]:
    """Every mapping of a node graph, once, in the order of the file."""
    seen: set[int] = set()
    pending = [root]
    while pending:
        node = pending.pop()
        if id(node) in seen:
            continue
        seen.add(id(node))
        if isinstance(node, yaml.MappingNode):
            yield node
            pending.extend(part for pair in reversed(node.value) for part in reversed(pair))
        elif isinstance(node, yaml.SequenceNode):
            pending.extend(reversed(node.value))


def _short(tag: str) -> str:
    """A tag as the user wrote it: ``!!python/name`` for ``tag:yaml.org,2002:python/name``."""
    return "!!" + tag.removeprefix(_TAG) if tag.startswith(_TAG) else tag
