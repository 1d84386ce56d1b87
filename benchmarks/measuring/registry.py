"""The benchmarks by name. A module is imported only when its benchmark is needed, because most of them import torch."""

from __future__ import annotations

import contextlib
import importlib
from collections.abc import Mapping

from benchmarks.protocol import Benchmark

# In the order of a whole run.
MODULES: Mapping[str, str] = {
    "save": "benchmarks.subjects.save",
    "load": "benchmarks.subjects.load",
    "small": "benchmarks.subjects.small",
    "async": "benchmarks.subjects.asynchronous",
    "digests": "benchmarks.subjects.digests",
    "callback": "benchmarks.subjects.callback",
    "ranks": "benchmarks.subjects.ranked",
    "planning": "benchmarks.subjects.planning",
    "nothing-when-off": "benchmarks.subjects.nothing_when_off",
    "trajectory": "benchmarks.subjects.trajectory",
    "data-resume": "benchmarks.subjects.data_resume",
}


def all_benchmarks() -> list[Benchmark]:
    """Return all of :data:`MODULES`, in order."""
    return [find(name) for name in MODULES]


def find(name: str) -> Benchmark:
    """Return the benchmark called ``name``; a name with a dot is that of a module with a ``BENCHMARK``.

    Raises:
        ValueError: there is none; the message lists the known names.
    """
    module = MODULES.get(name, name if "." in name else "")
    found = None
    if module:
        with contextlib.suppress(ModuleNotFoundError):
            found = getattr(importlib.import_module(module), "BENCHMARK", None)
    if not isinstance(found, Benchmark):
        raise ValueError(f"no benchmark is called {name!r}; known: {', '.join(MODULES)}")
    return found
