"""What a learning rate schedule is made of, and which learning rates it gives at a later step.

Both are read from schedulers that have just been built. The later step is computed on copies, so nothing of the run changes.
"""

from __future__ import annotations

import copy
import functools
import types
import warnings
from collections.abc import Mapping, Sequence
from types import SimpleNamespace
from typing import Any

from hyper_resume import digest
from hyper_resume.state.plain_values import is_plain, plain, qualified_name

_INNER = "_schedulers"
_FUNCTIONS = "lr_lambdas"
# What moves at each step, what is derived from the learning rates of the groups, and torch's own flags.
_NO_OPTION = frozenset(
    {
        *("optimizer", "last_epoch", "verbose", "base_lrs", "_last_lr", "_step_count"),
        *("_get_lr_called_within_step", "_is_initial", _INNER, _FUNCTIONS),
    }
)


def schedule_options(scheduler: Any) -> dict[str, Any]:
    """Return the class, the arguments and the functions of a scheduler as plain values, with those of inner schedulers."""
    found: dict[str, Any] = {"class": qualified_name(type(scheduler))}
    attributes = getattr(scheduler, "__dict__", {})
    for name, value in attributes.items():
        if name not in _NO_OPTION and (is_plain(value) or isinstance(value, (list, tuple, Mapping))):
            # A mapping (milestones) becomes a list of pairs: it is one argument.
            found[name.lstrip("_")] = plain([*value.items()] if isinstance(value, Mapping) else value)
    functions = [_function_options(function) for function in attributes.get(_FUNCTIONS) or ()]
    if functions and all(one == functions[0] for one in functions):
        found.update(functions[0])
    elif functions:
        found["functions"] = {str(index): one for index, one in enumerate(functions)}
    inner = attributes.get(_INNER) or ()
    if inner:
        found["schedulers"] = {str(index): schedule_options(part) for index, part in enumerate(inner)}
    return found


def _function_options(function: Any) -> dict[str, Any]:
    """Return a function's name, the digest of its code, and the values that are bound to it."""
    if isinstance(function, functools.partial):
        bound = {**{str(index): value for index, value in enumerate(function.args)}, **function.keywords}
        return {**_function_options(function.func), **_values(bound)}
    code = getattr(function, "__code__", None)
    if code is None:
        return {"function": qualified_name(type(function)), **_values(getattr(function, "__dict__", {}))}
    cells = {
        name: cell.cell_contents
        for name, cell in zip(code.co_freevars, getattr(function, "__closure__", None) or (), strict=False)
        if cell != types.CellType()
    }
    constants = [value for value in code.co_consts if is_plain(value)]
    content = digest.state_digest_text([code.co_code.hex(), constants, list(code.co_names)])
    return {"function": qualified_name(function), "code": content, **_values(cells)}


def _values(bound: Mapping[str, Any]) -> dict[str, Any]:
    """Return the plain values of a mapping; of a function, its name."""
    return {
        name: qualified_name(value) if callable(value) else plain(value)
        for name, value in bound.items()
        if callable(value) or is_plain(value) or isinstance(value, (list, tuple))
    }


class Replay:
    """Copies of new schedulers and of the groups that they set, after as many steps as saved ones have made."""

    def __init__(self, schedulers: Sequence[Any], groups: Mapping[int, SimpleNamespace]) -> None:
        """Use :func:`replay`."""
        self.schedulers = schedulers
        self._groups = groups

    def groups_of(self, optimizer: Any) -> list[dict[str, Any]] | None:
        """Return the optimizer's groups at that step; None for an optimizer that no scheduler sets."""
        stand_in = self._groups.get(id(optimizer))
        return None if stand_in is None else stand_in.param_groups


def replay(schedulers: Sequence[Any], saved: Sequence[Any]) -> Replay | None:
    """Step copies of ``schedulers``, which have not been stepped, to where the ``saved`` states are.

    The learning rates are those of a run that had this schedule from its start, bit for bit.

    Returns:
        None if that can't be computed: a schedule that follows a metric, or one that ends before that step.
    """
    stand_ins: dict[int, SimpleNamespace] = {}
    memo: dict[int, Any] = {}
    for scheduler in _all(schedulers):
        optimizer = getattr(scheduler, "optimizer", None)
        if optimizer is not None and id(optimizer) not in stand_ins:
            stand_ins[id(optimizer)] = memo[id(optimizer)] = _stand_in(optimizer)
        # A method among them would take its object along.
        memo.update({id(function): function for function in getattr(scheduler, _FUNCTIONS, None) or ()})
    try:
        counts = [_steps(state) - _steps(vars(one)) for one, state in zip(schedulers, saved, strict=True)]
        copies = copy.deepcopy(list(schedulers), memo)
        with warnings.catch_warnings():
            # torch can't see that an optimizer has stepped in between.
            warnings.simplefilter("ignore")
            for done in range(max(counts, default=0)):
                for one, count in zip(copies, counts, strict=True):
                    if done < count:
                        one.step()
    except Exception:  # noqa: BLE001  any scheduler of a user: it has no such step
        return None
    return Replay(copies, stand_ins) if min(counts, default=0) >= 0 else None


def _steps(fields: Mapping[str, Any]) -> int:
    """Return how often a scheduler was stepped; a chained one has no count of its own."""
    if "last_epoch" in fields:
        return int(fields["last_epoch"])
    first = fields[_INNER][0]
    return _steps(first if isinstance(first, Mapping) else vars(first))


def _all(schedulers: Sequence[Any]) -> list[Any]:
    return [one for part in schedulers for one in [part, *_all(getattr(part, _INNER, None) or ())]]


def _stand_in(optimizer: Any) -> SimpleNamespace:
    groups = [
        {key: value if key == "params" else copy.deepcopy(value) for key, value in group.items()}
        for group in optimizer.param_groups
    ]
    return SimpleNamespace(param_groups=groups, step=lambda: None)
