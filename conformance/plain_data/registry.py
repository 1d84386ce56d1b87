"""Registries of the functions that YAML may name: checks and disk faults.

A function's keyword-only arguments are its parameters in YAML: annotations are their types, and a default makes one optional.
So the data and the code can't differ.
"""

from __future__ import annotations

import inspect
import typing
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar

from conformance.plain_data import serial
from conformance.plain_data.suggestions import hint

F = TypeVar("F", bound=Callable[..., Any])


@dataclass(frozen=True, kw_only=True)
class Entry(Generic[F]):
    """A registered function. ``parameters`` maps a parameter to its annotation; one without a default is ``required``."""

    name: str
    function: F
    parameters: Mapping[str, Any]
    required: frozenset[str]
    defaults: Mapping[str, Any]
    marks: Mapping[str, Any]

    @property
    def summary(self) -> str:
        """The first line of the function's docstring."""
        return (inspect.getdoc(self.function) or "").partition("\n")[0]


@dataclass(frozen=True)
class Registry(Generic[F]):
    """Functions by name. ``noun`` is the word for them in messages."""

    noun: str
    entries: dict[str, Entry[F]] = field(default_factory=dict)

    def register(self, **marks: Any) -> Callable[[F], F]:
        """Return a decorator that registers a function under its own name."""

        def decorate(function: F) -> F:
            hints = typing.get_type_hints(function)
            parameters = inspect.signature(function).parameters.values()
            own = [item for item in parameters if item.kind is inspect.Parameter.KEYWORD_ONLY]
            name = function.__name__
            if name in self.entries:
                raise ValueError(f"two {self.noun}s are called {name}")
            self.entries[name] = Entry(
                name=name,
                function=function,
                parameters={item.name: hints[item.name] for item in own},
                required=frozenset(item.name for item in own if item.default is inspect.Parameter.empty),
                defaults={item.name: item.default for item in own if item.default is not inspect.Parameter.empty},
                marks=marks,
            )
            return function

        return decorate

    def find(self, name: Any, where: str) -> Entry[F]:
        """Return the entry called ``name``.

        Raises:
            SerialError: there is no such entry; the nearest name is suggested.
        """
        if isinstance(name, str) and name in self.entries:
            return self.entries[name]
        raise serial.SerialError(f"{where}: no {self.noun} is called {name!r}; {hint(name, self.entries)}")

    def parameters(self, name: Any, raw: Mapping[str, Any], where: str) -> dict[str, Any]:
        """Return ``raw`` as typed arguments of the entry called ``name``; absent ones are left to their defaults.

        Raises:
            SerialError: unknown name, unknown or missing parameter, wrong type.
        """
        entry = self.find(name, where)
        unknown = [key for key in raw if key not in entry.parameters]
        if unknown:
            known = ", ".join(entry.parameters) or "none"
            raise serial.SerialError(f"{where}: {name} has no parameter {unknown[0]!r}; it has: {known}")
        missing = sorted(entry.required - set(raw))
        if missing:
            raise serial.SerialError(f"{where}: {name} needs {missing[0]!r}")
        return {
            key: serial.value(entry.parameters[key], item, f"{where}: {name}.{key}", defaults=True)
            for key, item in raw.items()
        }
