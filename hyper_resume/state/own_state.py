"""What an optimizer, or a wrapper around one, keeps for itself: tensors and counters in its attributes.

A lookahead has slow weights and counts its steps; no ``state`` of a plain optimizer has them, and their own ``state_dict``
often lacks them too. So the attributes themselves are read and written. A tensor is filled in place; a number is written
where it has moved since this process first saw it, so what a constructor set (an option, a rank) stays what this run set.
"""

from __future__ import annotations

import enum
import random
import types
from collections import deque
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any
from weakref import WeakKeyDictionary

import numpy as np
import torch
from torch import nn
from torch.distributed.tensor import DTensor

from hyper_resume.errors import CheckpointMismatchError, UnsupportedError, describe
from hyper_resume.state.coverage import attributes_of, is_skipped
from hyper_resume.state.held_optimizers import COLLECTED, OptimizerList

_PLAIN = (bool, int, float, str, type(None))
_KEPT: list[Any] = ["kept"]
_ABSENT: Any = object()
_HOOKS = ("_optimizer_", "_hook", "_zero_grad_profile_name", "_opt_called", "_warned_capturable")
_CLOSED = (enum.Enum, type, types.ModuleType, types.FunctionType, types.MethodType, types.BuiltinFunctionType,
           torch.dtype, torch.device, torch.Size, torch.layout)  # fmt: skip
_UNSETTABLE = (set, frozenset, Mapping, np.random.Generator, np.random.RandomState, np.random.BitGenerator)
# Holder -> path -> the plain values that it had when this process first saw it.
_first_seen: WeakKeyDictionary[Any, dict[str, Any]] = WeakKeyDictionary()


def own_states(optimizers: Sequence[Any], names: Mapping[int, str], saved: Collection[str] = ()) -> dict[str, OwnState]:
    """Return name -> state, of each optimizer and wrapper in ``optimizers`` that keeps something for itself.

    One with options only, which have not moved, keeps nothing, unless the checkpoint has state of it.

    Args:
        optimizers: the result of ``find_optimizers``.
        names: id(parameter) -> name.
        saved: the names of which the checkpoint has state.

    Raises:
        UnsupportedError: an attribute holds state that can't be saved, or can't be restored.
    """
    holders = optimizers.holders if isinstance(optimizers, OptimizerList) else {}
    others = (*optimizers, *holders.values())
    found = {name: OwnState(holder, optimizers, others, names) for name, holder in holders.items() if _is_read(holder)}
    states = {name: state.state_dict() for name, state in found.items()}
    return {name: found[name] for name, state in states.items() if name in saved or any(map(_is_state, state.values()))}


class OwnState:
    """The own state of one holder, as an object with ``state_dict`` and ``load_state_dict``.

    Attributes:
        holder: the optimizer or wrapper.
        restores_sharding: a sharded tensor comes back sharded, also where this run has not made it yet.
    """

    restores_sharding = True

    def __init__(self, holder: Any, optimizers: Sequence[Any], others: Sequence[Any], names: Mapping[int, str]) -> None:
        """Read nothing yet, but remember the plain values of a holder that this process has not seen."""
        self.holder = holder
        self._names = names
        self._parameters = {
            names[id(item)]: item
            for optimizer in optimizers
            for group in optimizer.param_groups
            for item in group["params"]
            if id(item) in names
        }
        self._elsewhere = {id(item) for item in others if item is not holder}
        for optimizer in optimizers:
            shared = [getattr(optimizer, name, None) for name in COLLECTED]
            self._elsewhere.update(map(id, (*shared, *optimizer.param_groups)))
        self._moments = {
            id(tensor): (place, names.get(id(parameter)), key)
            for place, optimizer in enumerate(optimizers)
            for parameter, entries in optimizer.state.items()
            if isinstance(entries, dict)
            for key, tensor in entries.items()
            if isinstance(tensor, torch.Tensor)
        }
        self._optimizers = optimizers
        self._collected = COLLECTED if any(holder is item for item in optimizers) else frozenset[str]()
        self._storages = {_storage(item) for item in self._parameters.values()}
        self._before = self._remembered()

    def state_dict(self) -> dict[str, Any]:
        """Return attribute -> what it holds, as lists that begin with their kind; tensors are the live ones."""
        seen = {id(self.holder)}
        own = {name: self._encode(value, name, seen) for name, value in self._attributes(self.holder)}
        return {name: code for name, code in own.items() if not _is_kept(code)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Write the attributes.

        Raises:
            CheckpointMismatchError: the state belongs to a parameter that no optimizer has.
        """
        for name, code in state.items():
            self._set(self.holder, name, code, name)

    # ---- reading ----------------------------------------------------------------------------------------------------

    def _attributes(self, value: Any) -> Iterator[tuple[str, Any]]:
        for name, item in attributes_of(value):
            if not (value is self.holder and (name in self._collected or name.startswith(_HOOKS))):
                yield name, item

    def _remembered(self) -> dict[str, Any]:
        try:
            known = _first_seen.get(self.holder)
        except TypeError:
            return {}  # it can't be a key; all its values count as moved
        if known is None:
            self._before, known = {}, {}
            for name, code in self.state_dict().items():
                known.update(_plain_values(name, code))
            _first_seen[self.holder] = known
        return known

    def _encode(self, value: Any, path: str, seen: set[int]) -> list[Any]:
        if isinstance(value, _PLAIN) and not isinstance(value, enum.Enum):
            plain = value.item() if isinstance(value, np.generic) else value
            moved = path not in self._before or self._before[path] != plain
            return ["moved" if moved else "plain", plain]
        if id(value) in self._names:
            return ["parameter", self._names[id(value)]]
        if isinstance(value, torch.Tensor):
            return self._encode_tensor(value)
        if id(value) in seen or id(value) in self._elsewhere or isinstance(value, _CLOSED):
            return _KEPT
        seen.add(id(value))
        if isinstance(value, torch.Generator):
            return ["generator", value.get_state()]
        if isinstance(value, random.Random):
            return ["random", value.getstate()]
        if isinstance(value, np.ndarray) and value.dtype != object:
            return ["array", torch.from_numpy(value.copy())]
        if isinstance(value, dict):
            return self._encode_dict(value, path, seen)
        if isinstance(value, (list, deque, tuple)):
            items = [self._encode(item, f"{path}.{place}", seen) for place, item in enumerate(value)]
            return _container("tuple" if isinstance(value, tuple) else "list", items, items)
        if isinstance(value, _UNSETTABLE):
            raise self._refusal(path, f"a {type(value).__name__}")
        return self._encode_object(value, path, seen)

    def _encode_dict(self, value: dict[Any, Any], path: str, seen: set[int]) -> list[Any]:
        items = []
        for key, item in value.items():
            named = self._key(key)
            code = self._encode(item, f"{path}.{'?' if named is None else named[1]}", seen)
            if named is not None:
                items.append([named, code])
            elif not _is_kept(code):
                raise self._refusal(path, f"a dictionary with keys of type {type(key).__name__}")
        return _container("dict", items, [code for _, code in items])

    def _encode_tensor(self, tensor: torch.Tensor) -> list[Any]:
        if id(tensor) in self._moments:
            return ["moment", *self._moments[id(tensor)]]
        if tensor.grad_fn is not None or tensor.device.type == "meta" or _storage(tensor) in self._storages:
            return _KEPT
        like = None
        if isinstance(tensor, DTensor):
            layout = (tensor.shape, tensor.device_mesh, tensor.placements)
            like = next(
                (
                    name
                    for name, one in self._parameters.items()
                    if isinstance(one, DTensor) and (one.shape, one.device_mesh, one.placements) == layout
                ),
                "",
            )
        return ["tensor", tensor.detach(), tensor.device.type, like]

    def _key(self, key: Any) -> list[Any] | None:
        if id(key) in self._names:
            return ["parameter", self._names[id(key)]]
        return ["plain", key] if isinstance(key, _PLAIN) and not isinstance(key, enum.Enum) else None

    def _encode_object(self, value: Any, path: str, seen: set[int]) -> list[Any]:
        if isinstance(value, nn.Module):
            tensors = [*value.parameters(), *value.buffers()]
            if all(id(item) in self._names or _storage(item) in self._storages for item in tensors):
                return _KEPT
        elif not callable(getattr(value, "load_state_dict", None)):
            own = list(self._attributes(value))
            # An object that holds a model is a trainer or the like, and no part of an optimizer.
            if not _is_opened(value) or any(isinstance(item, nn.Module) for _, item in own):
                return _KEPT
            items: list[Any] = [[name, self._encode(item, f"{path}.{name}", seen)] for name, item in own]
            return _container("object", items, [item for _, item in items])
        return ["state", value.state_dict()]

    def _refusal(self, path: str, found: str) -> UnsupportedError:
        kind = type(self.holder)
        return UnsupportedError(
            describe(
                "an optimizer keeps state that can't be saved and restored",
                where=f"{kind.__module__}.{kind.__qualname__}.{path}",
                expected="numbers, tensors and torch generators, in attributes, lists, tuples or dictionaries (keys: plain "
                "values or parameters)",
                found=found,
                do="keep it in one of these, or in the optimizer's state and param_groups, or set "
                "checkpoint.save_optimizer and checkpoint.restore_optimizer to false",
            )
        )

    # ---- writing ----------------------------------------------------------------------------------------------------

    def _set(self, owner: Any, name: str, code: Any, path: str) -> None:
        live = dict(attributes_of(owner)).get(name, _ABSENT)
        value = self._decode(live, code, path)
        if value is not live and value is not _ABSENT:
            setattr(owner, name, value)

    def _decode(self, live: Any, code: Any, path: str) -> Any:
        """Return the value for ``code``: ``live`` where it could be filled in place, or is to be kept."""
        kind, content = code[0], _content(code)
        if kind == "kept" or (kind == "plain" and live is not _ABSENT):
            return live  # "plain" has not moved since it was made
        if kind == "parameter":
            return self._parameter(content, path)
        if kind == "moment":
            place, name, key = code[1:]
            moment: torch.Tensor = self._optimizers[place].state[self._parameter(name, path)][key]
            return moment
        if kind == "tensor":
            return self._decode_tensor(live, code, path)
        if kind == "dict":
            return self._decode_dict(live, content, path)
        if kind in ("list", "tuple"):
            return self._decode_sequence(live, content, path, kind)
        if kind in ("moved", "plain"):
            return content
        if live is None or live is _ABSENT:
            raise self._mismatch(path, f"an object whose state can be restored ({kind})", "none yet")
        if kind == "object":
            for name, item in content:
                self._set(live, name, item, f"{path}.{name}")
        else:
            _fill(kind, live, content)
        return live

    def _decode_tensor(self, live: Any, code: Any, path: str) -> Any:
        value, device, like = code[1:]
        if isinstance(live, torch.Tensor) and (live.shape, live.dtype) == (value.shape, value.dtype):
            with torch.no_grad():
                live.copy_(value)
            return live
        if like == "":
            raise self._mismatch(path, "a sharded tensor of this run, or one in the layout of a parameter", "none yet")
        owner = self._parameter(like, path) if like is not None else next(iter(self._parameters.values()), None)
        if like is not None and isinstance(owner, DTensor) and not isinstance(value, DTensor):
            local = value.to(owner.device)
            return DTensor.from_local(
                local, owner.device_mesh, owner.placements, shape=owner.shape, stride=owner.stride()
            )
        return value.to("cpu" if device == "cpu" or owner is None else owner.device, copy=True)

    def _decode_dict(self, live: Any, content: Any, path: str) -> Any:
        result = live if isinstance(live, dict) else {}
        before = dict(result)
        found = {}
        for key, item in content:
            name = self._parameter(key[1], path) if key[0] == "parameter" else key[1]
            found[name] = self._decode(before.get(name, _ABSENT), item, f"{path}.{key[1]}")
        kept = {key: item for key, item in before.items() if self._key(key) is None}
        result.clear()
        result.update({**kept, **{key: item for key, item in found.items() if item is not _ABSENT}})
        return result

    def _decode_sequence(self, live: Any, content: Any, path: str, kind: str) -> Any:
        before = list(live) if isinstance(live, (list, deque, tuple)) else []
        items = [
            self._decode(before[place] if place < len(before) else _ABSENT, item, f"{path}.{place}")
            for place, item in enumerate(content)
        ]
        items = [item for item in items if item is not _ABSENT]
        if len(items) == len(before) and all(new is old for new, old in zip(items, before, strict=True)):
            return live if before or live is not _ABSENT else ([] if kind == "list" else ())
        if isinstance(live, (list, deque)):
            live.clear()
            live.extend(items)
            return live
        if kind == "list":
            return items
        return type(live)._make(items) if hasattr(live, "_make") else tuple(items)

    def _parameter(self, name: str, path: str) -> torch.Tensor:
        if name not in self._parameters:
            raise self._mismatch(path, "a parameter of this run's optimizers", name)
        found: torch.Tensor = self._parameters[name]
        return found

    def _mismatch(self, path: str, expected: str, found: str) -> CheckpointMismatchError:
        return CheckpointMismatchError(
            describe(
                "the saved state of an optimizer's attribute does not fit",
                where=f"{type(self.holder).__qualname__}.{path}",
                expected=expected,
                found=found,
                do="resume with the optimizer that was saved, or set checkpoint.restore_optimizer=false",
            )
        )


def _is_read(holder: Any) -> bool:
    """False for torch's own optimizers and our chain: all that they keep is in state and groups."""
    module = type(holder).__module__ or ""
    return not (isinstance(holder, (list, tuple)) or module.startswith(("torch.optim.", "hyper_resume.")))


def _is_opened(value: Any) -> bool:
    module = type(value).__module__ or ""
    return not is_skipped(type(value)) and not module.startswith(("hyper_resume.", "accelerate.", "builtins"))


def _is_kept(code: list[Any]) -> bool:
    return code[0] in ("kept", "parameter")


def _is_state(code: Any) -> bool:
    """True for a code with anything in it but options that have not moved."""
    kind, content = code[0], _content(code)
    if kind in ("list", "tuple"):
        return any(map(_is_state, content))
    if kind in ("dict", "object"):
        return any(_is_state(item) for _, item in content)
    return kind not in ("kept", "parameter", "plain")


def _content(code: Any) -> Any:
    return code[1] if len(code) > 1 else None


def _container(kind: str, items: list[Any], codes: list[list[Any]]) -> list[Any]:
    return _KEPT if codes and all(map(_is_kept, codes)) else [kind, items]


def _plain_values(path: str, code: Any) -> Iterator[tuple[str, Any]]:
    kind, content = code[0], _content(code)
    if kind in ("plain", "moved"):
        yield path, content
    elif kind in ("list", "tuple"):
        for place, item in enumerate(content):
            yield from _plain_values(f"{path}.{place}", item)
    elif kind == "dict":
        for key, item in content:
            yield from _plain_values(f"{path}.{key[1]}", item)
    elif kind == "object":
        for name, item in content:
            yield from _plain_values(f"{path}.{name}", item)


def _fill(kind: str, live: Any, content: Any) -> None:
    """Write into an object that this run has made."""
    if kind == "generator":
        live.set_state(content)
    elif kind == "random":
        live.setstate((content[0], tuple(content[1]), content[2]))
    elif kind == "array":
        live[...] = content.numpy()
    else:
        live.load_state_dict(content)


def _storage(tensor: torch.Tensor) -> tuple[torch.device, int]:
    local = tensor.to_local() if isinstance(tensor, DTensor) else tensor
    return local.device, local.untyped_storage().data_ptr()
