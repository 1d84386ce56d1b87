"""One file a trainer. ``NAMES`` maps the name on the command line to the adapter's module and class."""

from __future__ import annotations

import importlib

from conformance.adapter import Adapter

NAMES = {"hyper_resume": "conformance.adapters.hyper_resume:HyperResumeAdapter"}


def build_adapter(name: str) -> Adapter:
    """Return the adapter called ``name``.

    Raises:
        KeyError: there is none.
    """
    module, _, attribute = NAMES[name].partition(":")
    adapter: Adapter = getattr(importlib.import_module(module), attribute)()
    return adapter
