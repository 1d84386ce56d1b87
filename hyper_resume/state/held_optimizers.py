"""Finds the optimizers in an object by what it holds, and names each by its path.

An optimizer may hold others (sharpness-aware, lookahead), be a container of them, or be wrapped by an object that is no
optimizer. What is found is independent of their classes: every attribute, list and dictionary is followed.

Names: an optimizer that was given directly, in a list, a chain or a wrapper with ``optimizer``, has a number, in order. One
that is held has the number of what holds it and the path there: ``0/base_optimizer``, ``0/optimizers/1``. Where every rank
has an optimizer of its own parameters, the name ends with the rank: ``0/optim@rank_3``.
"""

from __future__ import annotations

import sys
import types
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import nn

from hyper_resume import collective
from hyper_resume.errors import UnsupportedError, describe
from hyper_resume.state.coverage import attributes_of, is_skipped

_GROUPS = "param_groups"
_PER_RANK = "@rank_"
# What an optimizer keeps in these is collected with it.
COLLECTED = frozenset({"state", _GROUPS, "defaults"})
_MOST_OBJECTS = 20_000
_CLOSED = (str, bytes, int, float, complex, type, types.ModuleType, types.FunctionType, types.MethodType,
           types.BuiltinFunctionType, torch.Tensor, nn.Module, torch.Generator,
           torch.optim.lr_scheduler.LRScheduler)  # fmt: skip


class OptimizerList(list[Any]):
    """Optimizers, with the name of each.

    Attributes:
        names: of each optimizer, in the order of the list.
        holders: name -> what was given, or holds an optimizer, and may keep state that no optimizer has.
    """

    def __init__(self, optimizers: Iterable[Any] = ()) -> None:
        """Number ``optimizers``."""
        super().__init__(optimizers)
        self.names: list[str] = [str(index) for index in range(len(self))]
        self.holders: dict[str, Any] = {}


def find_optimizers(given: Any) -> OptimizerList:
    """Return every optimizer that ``given`` is or holds, each once.

    Raises:
        UnsupportedError: an object in which no optimizer is found.
    """
    return _Search().run(given)


def names_of(optimizers: Sequence[Any]) -> list[str]:
    """Return the name of each optimizer: of an ordinary list, its number."""
    return (
        optimizers.names if isinstance(optimizers, OptimizerList) else [str(place) for place in range(len(optimizers))]
    )


def innermost(optimizers: Sequence[Any], optimizer: Any) -> Any:
    """Return the optimizer whose state and groups ``optimizer`` only hands out, or itself."""
    held = optimizers.holders.values() if isinstance(optimizers, OptimizerList) else ()
    inside = [one for one in held if one is not optimizer and _counts_as_optimizer(one) and _is_alias(optimizer, one)]
    return inside[-1] if inside else optimizer


def per_rank(name: str) -> str:
    """Return the name of an optimizer that only this rank has."""
    return f"{name}{_PER_RANK}{collective.rank()}"


def is_per_rank(name: str) -> bool:
    """True for the name of an optimizer that only one rank has."""
    return _PER_RANK in name


class _Search:
    def __init__(self) -> None:
        self._found = OptimizerList()
        self._seen: set[int] = set()

    def run(self, given: Any) -> OptimizerList:
        units = list(self._units(given))
        # All that has a number first: it keeps that name, whatever holds it as well.
        for number, (wrappers, unit) in enumerate(units):
            self._seen.update(map(id, (*wrappers, unit)))
            if _counts_as_optimizer(unit):
                self._add(str(number), unit)
        for number, (wrappers, unit) in enumerate(units):
            before = len(self._found)
            self._hold(str(number), unit)
            for depth, wrapper in enumerate(wrappers):
                self._hold(f"{number}/wrapper/{depth}", wrapper)
            if not _counts_as_optimizer(unit) and len(self._found) == before:
                raise _unknown(unit)
        return self._found

    def _units(self, value: Any, wrappers: tuple[Any, ...] = ()) -> Iterator[tuple[tuple[Any, ...], Any]]:
        """Yield what gets a number, with the wrappers around it; a wrapper of several is around the first of them."""
        if value is None:
            return
        if isinstance(value, (list, tuple)):
            for place, item in enumerate(value):
                yield from self._units(item, wrappers if place == 0 else ())
        elif chained := getattr(value, "chained_optimizers", None):
            yield from self._units(list(chained), (*wrappers, value))
        elif isinstance(value, torch.optim.Optimizer) or getattr(value, "optimizer", None) is None:
            yield wrappers, value
        else:
            yield from self._units(value.optimizer, (*wrappers, value))

    def _add(self, name: str, optimizer: Any) -> None:
        if not any(_is_alias(optimizer, other) for other in self._found):
            self._found.append(optimizer)
            self._found.names.append(name)

    def _hold(self, name: str, holder: Any) -> None:
        """Find the optimizers inside ``holder``, breadth first, so that each gets its shortest path."""
        self._found.holders[name] = holder
        queue = deque(self._inside(name, holder))
        while queue and len(self._seen) < _MOST_OBJECTS:
            path, value = queue.popleft()
            if id(value) in self._seen:
                continue
            self._seen.add(id(value))
            if isinstance(value, torch.optim.Optimizer):
                path = per_rank(path) if _has_own_share(holder) else path
                self._add(path, value)
                self._found.holders[path] = value
            queue.extend(self._inside(path, value))

    def _inside(self, path: str, value: Any) -> Iterator[tuple[str, Any]]:
        if isinstance(value, dict):
            items: Iterable[tuple[Any, Any]] = value.items()
        elif isinstance(value, (list, tuple)):
            items = enumerate(value)
        elif is_skipped(type(value)):
            return
        else:
            collected = COLLECTED if _counts_as_optimizer(value) else frozenset[str]()
            items = ((name, item) for name, item in attributes_of(value) if name not in collected)
        for key, item in items:
            if item is not None and not isinstance(item, _CLOSED) and isinstance(key, (str, int)):
                yield f"{path}/{str(key).replace('.', '_')}", item


def _counts_as_optimizer(value: Any) -> bool:
    """True for a torch optimizer, and for an object with the attributes of one."""
    return isinstance(value, torch.optim.Optimizer) or (hasattr(value, "state") and hasattr(value, _GROUPS))


def _is_alias(optimizer: Any, other: Any) -> bool:
    """True where one hands out state and groups of the other (accelerate's wrapper): it is saved as that one."""
    if optimizer.state is not other.state or len(optimizer.param_groups) != len(other.param_groups):
        return False
    return all(mine is its for mine, its in zip(optimizer.param_groups, other.param_groups, strict=True))


def _has_own_share(holder: Any) -> bool:
    """True for ``ZeroRedundancyOptimizer``, whose inner optimizer has those parameters that this rank steps."""
    module = sys.modules.get("torch.distributed.optim.zero_redundancy_optimizer")
    return module is not None and isinstance(holder, module.ZeroRedundancyOptimizer)


def _unknown(value: Any) -> UnsupportedError:
    return UnsupportedError(
        describe(
            f"unknown optimizer wrapper {type(value).__module__}.{type(value).__qualname__}",
            expected="a torch Optimizer, or an object with chained_optimizers, optimizer, or state and param_groups",
            found="none of these attributes",
            do="give the wrapper a chained_optimizers list, or set checkpoint.save_optimizer and "
            "checkpoint.restore_optimizer to false",
        )
    )
