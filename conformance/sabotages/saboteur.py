"""Installs single defects in this library from outside; the suite must catch each of them.

A sabotage is a function registered under its id in :data:`SABOTAGES`; ``sabotages.yaml`` says what it does, its harm, and which
cases must fail. It replaces functions of hyper_resume in the leg's process, before anything is built, and never in a reference
leg. Its target must exist (so a refactoring can't disable it unnoticed), and it must fire.

    @sabotage("rng-not-restored")
    def _(put: Saboteur) -> None:
        put.replace("hyper_resume.trainer.restore:apply_rng", lambda original, *args, **kwargs: None)

``replace(target, function)``: ``function(original, *args, **kwargs)`` is called instead of the target, given as
``module:name`` or ``module:Class.name``; the sabotage has fired once it is called. Patch the name where it is USED
(``trainer.payload:apply_rng``), not where it is defined. ``replace(..., fires=False)`` and ``put.fired()`` where only some
calls do harm. ``set(target, value)`` replaces a plain value.
"""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable
from typing import Any


class SabotageError(RuntimeError):
    """A sabotage can't be installed: there is no such sabotage, or its target does not exist."""


class Saboteur:
    """The tool that a sabotage replaces functions with."""

    def __init__(self, on_fired: Callable[[], None]) -> None:
        """``on_fired`` is called once, when the defect takes effect for the first time."""
        self._on_fired = on_fired
        self._has_fired = False

    def fired(self) -> None:
        """Report that the defect has taken effect."""
        if not self._has_fired:
            self._has_fired = True
            self._on_fired()

    def replace(self, target: str, function: Callable[..., Any], *, fires: bool = True) -> None:
        """Call ``function(original, *args, **kwargs)`` instead of ``target``.

        Raises:
            SabotageError: there is no such target, or it can't be called.
        """
        owner, name, original = _find(target)
        if not callable(original):
            raise SabotageError(f"{target} can't be called")

        @functools.wraps(original)
        def instead(*args: Any, **kwargs: Any) -> Any:
            if fires:
                self.fired()
            return function(original, *args, **kwargs)

        setattr(owner, name, instead)

    def set(self, target: str, value: Any) -> None:
        """Replace the plain value ``target``; it counts as fired at once.

        Raises:
            SabotageError: there is no such target.
        """
        owner, name, _ = _find(target)
        setattr(owner, name, value)
        self.fired()


Sabotage = Callable[[Saboteur], None]
SABOTAGES: dict[str, Sabotage] = {}


def sabotage(name: str) -> Callable[[Sabotage], Sabotage]:
    """Return a decorator that registers a sabotage under ``name``."""

    def decorate(function: Sabotage) -> Sabotage:
        if name in SABOTAGES:
            raise ValueError(f"two sabotages are called {name}")
        SABOTAGES[name] = function
        return function

    return decorate


def install_sabotage(name: str, on_fired: Callable[[], None]) -> None:
    """Install the sabotage called ``name`` into this process.

    Raises:
        SabotageError: there is none, or its target does not exist.
    """
    for module in _MODULES:
        importlib.import_module(module)
    if name not in SABOTAGES:
        raise SabotageError(f"no sabotage is called {name!r}")
    SABOTAGES[name](Saboteur(on_fired))


def _find(target: str) -> tuple[Any, str, Any]:
    module_name, _, path = target.partition(":")
    try:
        owner: Any = importlib.import_module(module_name)
    except ImportError as error:
        raise SabotageError(f"the target {target} does not exist: {error}") from error
    *parents, name = path.split(".")
    for parent in parents:
        owner = getattr(owner, parent, None)
    # vars() first, so that a static method is not mistaken for what it returns.
    original = getattr(owner, name, None)
    if original is None:
        raise SabotageError(f"the target {target} does not exist")
    return owner, name, original


# The modules with sabotages.
_MODULES = tuple(
    f"conformance.sabotages.{name}"
    for name in (
        "background_saves",
        "configuration",
        "coverage",
        "data_position",
        "foreign_loaders",
        "omitted_buckets",
        "parameter_identity",
        "preemption",
        "refusals",
        "restored_state",
        "retention_and_locks",
        "same_run",
        "schedules_and_streams",
        "several_ranks",
        "verification",
    )
)
