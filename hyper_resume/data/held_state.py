"""What a loader's samplers and dataset keep for themselves: random generators and counters, found by walking their attributes.

A sampler may have a generator of its own (``torch.Generator``, ``random.Random``, NumPy's), and may count its passes. Both
decide the order of an epoch, and neither is in a ``state_dict``. They are found by walking the attributes of a few roots;
nothing is called, and large containers, tensors, arrays and modules are not entered.
"""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from types import BuiltinFunctionType, FunctionType, MethodType, ModuleType
from typing import Any, Final

import numpy as np
import torch
from torch import nn
from torch.utils.data.dataloader import _BaseDataLoaderIter

from hyper_resume.data.streams import python_bytes, python_state
from hyper_resume.errors import CheckpointMismatchError, describe

_MOST_OBJECTS: Final = 256
_MOST_ITEMS: Final = 16
_GENERATORS: Final = (torch.Generator, random.Random, np.random.Generator, np.random.RandomState)
_LEAVES: Final = (
    *(str, bytes, bytearray, memoryview, complex, range, set, frozenset, torch.Tensor, np.ndarray, nn.Module),
    *(type, ModuleType, FunctionType, MethodType, BuiltinFunctionType, _BaseDataLoaderIter),
)
_PACKAGES_NOT_ENTERED: Final = frozenset(
    (
        "accelerate.state",
        "asyncio",
        "concurrent",
        "io",
        "_io",
        "logging",
        "multiprocessing",
        "pathlib",
        "queue",
        "threading",
        "_thread",
        "weakref",
    )
)
# accelerate's sampler draws this one when it is built, so it is state, although it never changes afterwards.
_DRAWN_WHEN_BUILT: Final = ".initial_seed"


@dataclass
class _Found:
    """Places by dotted path: where a value is kept, and for a generator the object itself."""

    generators: dict[str, Any] = field(default_factory=dict)
    places: dict[str, tuple[Mapping[str, Any], str]] = field(default_factory=dict)
    counters: dict[str, tuple[dict[str, Any], str]] = field(default_factory=dict)
    empty: dict[str, tuple[dict[str, Any], str]] = field(default_factory=dict)

    def is_current(self) -> bool:
        """Whether every generator is still where it was found, and none has come where there was none."""
        return all(place[key] is self.generators[path] for path, (place, key) in self.places.items()) and all(
            place.get(key) is None for place, key in self.empty.values()
        )


class HeldState:
    """The generators and counters that some objects hold, to be saved and put back.

    A counter is an attribute that is a whole number or a float and that changes after this object is made; those that stay as
    they are belong to the configuration and are left alone.

    Args:
        roots: name -> object to walk from; the name begins the dotted paths.
        initial: the counters as another process found them when it made its own; None means as they are now.
    """

    def __init__(self, roots: Mapping[str, Any], initial: Mapping[str, int | float] | None = None) -> None:
        """Note the counters as they are now."""
        self._roots = dict(roots)
        self._found = _walk(self._roots)
        self.initial = dict(initial) if initial is not None else _values(self._found)

    def collect(self) -> dict[str, dict[str, Any]]:
        """Return the generators' states and the counters that have moved, as plain values. Draws nothing."""
        found = self._current()
        moved = {
            path: value
            for path, value in _values(found).items()
            if path in self.initial and (value != self.initial[path] or path.endswith(_DRAWN_WHEN_BUILT))
        }
        return {
            "generators": {path: _encode(generator) for path, generator in found.generators.items()},
            "counters": moved,
        }

    def put(self, saved: Mapping[str, Mapping[str, Any]]) -> None:
        """Set every generator and counter to what :meth:`collect` returned; a counter that had not moved to its first value.

        Raises:
            CheckpointMismatchError: a generator is not there, or is of another kind.
        """
        found = self._current()
        for path, state in saved["generators"].items():
            generator = found.generators.get(path)
            if generator is None and path in found.empty:
                # One that is made when it is first used, and wasn't used yet in this process.
                place, key = found.empty[path]
                generator = place[key] = _new_generator(state)
            if generator is None or _kind(generator) != state["kind"]:
                raise CheckpointMismatchError(
                    describe(
                        "a generator of the saved data loader can't be put back",
                        where=path,
                        expected=state["kind"],
                        found="none" if generator is None else _kind(generator),
                        do="build the loader, its samplers and its dataset as in the run that was saved",
                    )
                )
            _decode(generator, state)
        for path, (place, key) in found.counters.items():
            value = saved["counters"].get(path, self.initial.get(path))
            # One that never moved in the run that was saved belongs to the configuration, except what was drawn.
            is_known = path in saved["counters"] or (value is not None and not path.endswith(_DRAWN_WHEN_BUILT))
            if is_known and type(value) is type(place[key]):
                place[key] = value

    def _current(self) -> _Found:
        if not self._found.is_current():
            self._found = _walk(self._roots)
        return self._found


def _values(found: _Found) -> dict[str, int | float]:
    return {path: place[key] for path, (place, key) in found.counters.items() if type(place.get(key)) in (int, float)}


def _walk(roots: Mapping[str, Any]) -> _Found:
    found, seen = _Found(), set()
    waiting: deque[tuple[str, Any]] = deque()

    def visit(path: str, value: Any, place: Mapping[str, Any] | None, key: str) -> None:
        if id(value) in seen:
            return
        if isinstance(value, _GENERATORS) and not isinstance(value, random.SystemRandom):
            seen.add(id(value))
            found.generators[path] = value
            if place is not None:
                found.places[path] = (place, key)
        elif _is_entered(value) and len(seen) < _MOST_OBJECTS:
            seen.add(id(value))
            waiting.append((path, value))

    for name, root in roots.items():
        visit(name, root, None, "")
    while waiting:
        path, value = waiting.popleft()
        for key, item in _items(value):
            visit(f"{path}.{key}", item, None, key)
        attributes = _attributes(value)
        for key, item in list(attributes.items()):
            if type(item) in (int, float):
                found.counters[f"{path}.{key}"] = (attributes, key)
            elif item is None:
                found.empty[f"{path}.{key}"] = (attributes, key)
            else:
                visit(f"{path}.{key}", item, attributes, key)
    return found


def _is_entered(value: Any) -> bool:
    if isinstance(value, (dict, list, tuple)):
        return len(value) <= _MOST_ITEMS
    if value is None or isinstance(value, (bool, int, float, *_LEAVES)):
        return False
    module = type(value).__module__
    return not {module, module.partition(".")[0]} & _PACKAGES_NOT_ENTERED and bool(_attributes(value))


def _items(value: Any) -> Iterator[tuple[str, Any]]:
    if isinstance(value, dict):
        yield from ((str(key), item) for key, item in value.items())
    elif isinstance(value, (list, tuple)):
        yield from ((str(number), item) for number, item in enumerate(value))


def _attributes(value: Any) -> dict[str, Any]:
    attributes: dict[str, Any] = getattr(value, "__dict__", {})
    return attributes if type(attributes) is dict else {}


def _kind(generator: Any) -> str:
    if isinstance(generator, torch.Generator):
        return f"torch.Generator on {generator.device.type}"
    if isinstance(generator, np.random.Generator):
        return f"numpy.random.Generator of {type(generator.bit_generator).__name__}"
    return "numpy.random.RandomState" if isinstance(generator, np.random.RandomState) else "random.Random"


def _encode(generator: Any) -> dict[str, Any]:
    if isinstance(generator, torch.Generator):
        state: Any = generator.get_state().numpy().tobytes()
    elif isinstance(generator, random.Random):
        state = python_bytes(generator.getstate())
    elif isinstance(generator, np.random.Generator):
        state = _plain(generator.bit_generator.state)
    else:
        state = _plain(generator.get_state(legacy=False))
    return {"kind": _kind(generator), "state": state}


def _decode(generator: Any, saved: Mapping[str, Any]) -> None:
    state = saved["state"]
    if isinstance(generator, torch.Generator):
        generator.set_state(torch.frombuffer(bytearray(state), dtype=torch.uint8))
    elif isinstance(generator, random.Random):
        generator.setstate(python_state(state))
    elif isinstance(generator, np.random.Generator):
        generator.bit_generator.state = _unplain(state)
    else:
        generator.set_state(_unplain(state))


def _new_generator(saved: Mapping[str, Any]) -> Any:
    kind: str = saved["kind"]
    if kind.startswith("torch.Generator"):
        return torch.Generator(device=kind.rpartition(" ")[2])
    if kind == "random.Random":
        return random.Random()
    if kind == "numpy.random.RandomState":
        return np.random.RandomState()
    return np.random.Generator(getattr(np.random, kind.rpartition(" ")[2])())


def _plain(state: Any) -> Any:
    """NumPy's state with each array as its type and bytes, each scalar as Python's."""
    if isinstance(state, Mapping):
        return {key: _plain(item) for key, item in state.items()}
    if isinstance(state, np.ndarray):
        return {"dtype": str(state.dtype), "bytes": state.tobytes()}
    return state.item() if isinstance(state, np.generic) else state


def _unplain(state: Any) -> Any:
    if not isinstance(state, Mapping):
        return state
    if set(state) == {"dtype", "bytes"}:
        return np.frombuffer(state["bytes"], dtype=state["dtype"]).copy()
    return {key: _unplain(item) for key, item in state.items()}
