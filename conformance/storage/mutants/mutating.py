"""Applies one change to the library's source while a process imports it; no file is changed.

A change names a function and a fragment of it. A fragment that does not occur exactly once is an error, so the table can't
become outdated unnoticed.
"""

from __future__ import annotations

import ast
import importlib
import importlib.abc
import importlib.machinery
import importlib.util
import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import CodeType, ModuleType
from typing import Any

PACKAGE = "hyper_resume.checkpoint"
# Modules that keep no reference to the package, and stay imported.
_KEPT = frozenset(
    f"conformance.storage.{name}"
    for name in ("mutants", "mutants.mutating", "mutants.mutation_run", "mutants.table", "records")
)


class MutationError(RuntimeError):
    """The change does not match the code."""


@dataclass(frozen=True, kw_only=True)
class Change:
    """``fragment`` in ``function`` (``name`` or ``Class.name``) of ``module`` (below the package) becomes ``replacement``."""

    module: str
    function: str
    fragment: str
    replacement: str

    @property
    def module_name(self) -> str:
        """The full name of the module."""
        return f"{PACKAGE}.{self.module}"


def changed_source(source: str, change: Change) -> str:
    """Return the module's source with the change.

    Raises:
        MutationError: there is no such function, the fragment does not occur exactly once, or the result is no Python.
    """
    lines = source.splitlines(keepends=True)
    node = _find(ast.parse(source).body, change.function.split("."))
    if node is None:
        raise MutationError(f"{change.module}: there is no function {change.function}")
    first, last = node.lineno - 1, node.end_lineno
    assert last is not None  # of a node that was parsed
    body = "".join(lines[first:last])
    count = body.count(change.fragment)
    if count != 1:
        raise MutationError(
            f"{change.module}.{change.function}: the fragment {change.fragment!r} occurs {count} times, expected once"
        )
    result = "".join(lines[:first]) + body.replace(change.fragment, change.replacement) + "".join(lines[last:])
    try:
        ast.parse(result)
    except SyntaxError as error:
        raise MutationError(f"{change.module}.{change.function}: {error}") from error
    return result


def _find(body: Iterable[ast.stmt], path: Sequence[str]) -> Any:
    for node in body:
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)) and node.name == path[0]:
            return node if len(path) == 1 else _find(node.body, path[1:])
    return None


def source_of(change: Change) -> tuple[str, Path]:
    """The module's source and its path, without importing it.

    Raises:
        MutationError: there is no such module.
    """
    package = importlib.util.find_spec(PACKAGE.partition(".")[0])
    assert package is not None
    assert package.submodule_search_locations
    path = Path(package.submodule_search_locations[0]) / "checkpoint" / f"{change.module.replace('.', '/')}.py"
    if not path.is_file():
        raise MutationError(f"there is no module {change.module_name}")
    return path.read_text(encoding="utf-8"), path


def check(change: Change) -> None:
    """Verify that the change matches the code.

    Raises:
        MutationError: it does not.
    """
    changed_source(source_of(change)[0], change)


def install(change: Change | None) -> None:
    """Import the package again with the change (None: unchanged). For a process that ends afterwards.

    Raises:
        MutationError: the change does not match, or the module was not imported.
    """
    for name in list(sys.modules):
        if name == PACKAGE or name.startswith(f"{PACKAGE}.") or _may_hold_it(name):
            del sys.modules[name]
    if change is not None:
        source, path = source_of(change)
        sys.meta_path.insert(0, _Finder(change.module_name, changed_source(source, change), path))
    importlib.import_module(PACKAGE)
    if change is not None and not isinstance(sys.modules[change.module_name].__loader__, _Loader):
        raise MutationError(f"{change.module_name} was imported without its change")


def _may_hold_it(name: str) -> bool:
    return name.startswith("conformance.storage.") and name not in _KEPT


class _Finder(importlib.abc.MetaPathFinder):
    def __init__(self, name: str, source: str, path: Path) -> None:
        self._name = name
        self._loader = _Loader(name, source, path)

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if fullname != self._name:
            return None
        return importlib.machinery.ModuleSpec(fullname, self._loader, origin=str(self._loader.path))


class _Loader(importlib.machinery.SourceFileLoader):
    def __init__(self, name: str, source: str, path: Path) -> None:
        super().__init__(name, str(path))
        self._source = source

    def get_code(self, fullname: str) -> CodeType:
        return compile(self._source, self.path, "exec")
