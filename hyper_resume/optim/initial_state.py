"""Creates an optimizer's state before its first step, without any other change.

Optimizers create their state at the first step. A storage backend that can only fill existing tensors needs it before. The
usual way, a real ``step()`` with a learning rate and gradients of zero, has side effects: it increments step counters, decays
weights in some optimizers, calls hooks and counts in wrappers (a gradient scaler), and its state may differ from a true
initial state.

Here the step runs on a copy of each parameter in a copy of the optimizer, and the first value that the optimizer assigns to
each state entry is used. Then a test checks that this is the true initial state: a step from it must give the same bits as a
step without state. If it does not (SGD with dampening does not dampen its first gradient), the parameter gets no state, and
the optimizer creates it at its first step as usual.
"""

from __future__ import annotations

import copy
import inspect
import logging
from collections import OrderedDict, defaultdict
from collections.abc import Mapping
from typing import Any

import torch
from torch.distributed.tensor import DTensor

logger = logging.getLogger(__name__)

# Attributes that are not copied with an optimizer: its state, and the hooks that a step calls.
_NOT_COPIED = frozenset(
    {"state", "param_groups", "step", "_optimizer_step_pre_hooks", "_optimizer_step_post_hooks", "_hook_for_profile"}
)


def initialize_optimizer_state(optimizer: Any) -> bool:
    """Create the initial optimizer state of every trainable parameter.

    Existing state is kept. Parameters, gradients, group options, hooks, scheduler counters and random streams are unchanged,
    and the next step gives the same bits as without this call.

    Args:
        optimizer: a ``torch.optim.Optimizer``; a list, or an object with ``chained_optimizers``, whose members are
            initialized; a wrapper with ``optimizer``, which is initialized; or None. For any other wrapper, a warning says
            which attribute is missing, and nothing is changed.

    Returns:
        whether every optimizer has state for its parameters now. False also for optimizers that never have any (SGD without
        momentum), without trainable parameters, and for None.
    """
    if optimizer is None:
        return False
    chained = optimizer if isinstance(optimizer, (list, tuple)) else getattr(optimizer, "chained_optimizers", None)
    # Checked before the class: a wrapper may derive from torch's Optimizer, and its step would step the wrapped one.
    inner = getattr(optimizer, "optimizer", None)
    if chained:
        found = [initialize_optimizer_state(member) for member in chained if member is not None]
        return all(found)
    if inner is not None:
        return initialize_optimizer_state(inner)
    if isinstance(optimizer, torch.optim.Optimizer):
        _initialize(optimizer)
        return any(optimizer.state.values())
    if chained is None:
        logger.warning(
            "optimizer wrapper %s.%s is unknown: it is neither a torch Optimizer nor has chained_optimizers or optimizer, so "
            "its state can't be created before the load; give it a chained_optimizers list",
            type(optimizer).__module__,
            type(optimizer).__qualname__,
        )
    return False


def sample_initial_state(optimizer: torch.optim.Optimizer) -> dict[torch.Tensor, dict[str, Any]]:
    """Return parameter -> what its first step would make its state; changes nothing.

    Of the parameters without state, that is the smallest one of each group and number of dimensions. None for an optimizer
    whose step can't be tried, or that holds more than options, which would be copied.
    """
    own = {key: value for key, value in vars(optimizer).items() if key not in _NOT_COPIED}
    if not all(map(_is_plain, own.values())):
        return {}
    found: dict[torch.Tensor, dict[str, Any]] = {}
    for group in optimizer.param_groups:
        smallest: dict[int, torch.Tensor] = {}
        for parameter in sorted(group["params"], key=lambda one: -one.numel()):
            if parameter.requires_grad and parameter.numel() and not optimizer.state.get(parameter):
                smallest[parameter.ndim] = parameter
        for parameter in smallest.values():
            state = _Recorder()
            try:
                _step_copy(optimizer, group, parameter, torch.zeros_like(parameter.detach()), state)
                found[parameter] = state.first
            except Exception as error:  # noqa: BLE001  a third-party optimizer may raise anything
                logger.debug("the first step of %s can't be tried: %s", type(optimizer).__qualname__, error)
    return found


def _is_plain(value: Any) -> bool:
    if isinstance(value, Mapping):
        return all(map(_is_plain, value.values()))
    if isinstance(value, (list, tuple)):
        return all(map(_is_plain, value))
    return isinstance(value, (bool, int, float, str, type(None)))


def _initialize(optimizer: torch.optim.Optimizer) -> None:
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            if not parameter.requires_grad or optimizer.state.get(parameter):
                continue
            try:
                state = _initial_state(optimizer, group, parameter)
            except Exception as error:  # noqa: BLE001  a third-party optimizer may raise anything
                logger.warning(
                    "the state of %s can't be created before its first step (%s: %s); it stays absent until then",
                    type(optimizer).__qualname__,
                    type(error).__name__,
                    error,
                )
                return
            if state:
                optimizer.state[parameter] = state


def _initial_state(optimizer: torch.optim.Optimizer, group: dict[str, Any], parameter: torch.Tensor) -> dict[str, Any]:
    """Return the initial state of ``parameter``; {} if a step from it differs from a first step without state."""
    zero, some = torch.zeros_like(parameter.detach()), parameter.detach() * 0.25 + 0.5
    state = _Recorder()
    # Without weight decay, which would act like a gradient.
    _step_copy(optimizer, {**group, "weight_decay": 0}, parameter, zero, state)
    initial = dict(state.first)
    if not initial:
        return {}
    from_nothing: dict[str, Any] = {}
    from_initial = copy.deepcopy(initial)
    expected = _step_copy(optimizer, group, parameter, some, from_nothing)
    found = _step_copy(optimizer, group, parameter, some, from_initial)
    return initial if _same_bits([expected, from_nothing], [found, from_initial]) else {}


def _step_copy(
    optimizer: torch.optim.Optimizer,
    group: dict[str, Any],
    parameter: torch.Tensor,
    gradient: torch.Tensor,
    state: dict[str, Any],
) -> torch.Tensor:
    """Step a copy of ``optimizer`` on a copy of ``parameter``, and fill ``state``. Returns the copy after the step."""
    copied = parameter.detach().clone().requires_grad_()
    copied.grad = gradient.clone()
    shadow: Any = object.__new__(type(optimizer))
    # In copied attributes, this parameter is replaced by its copy, and every other parameter by an empty tensor.
    memo: dict[int, Any] = {
        id(other): torch.empty(0)
        for each in optimizer.param_groups
        for other in each["params"]
        if other is not parameter
    }
    memo[id(parameter)] = copied
    own = {key: value for key, value in vars(optimizer).items() if key not in _NOT_COPIED}
    vars(shadow).update(copy.deepcopy(own, memo))
    vars(shadow).update(_optimizer_step_pre_hooks=OrderedDict(), _optimizer_step_post_hooks=OrderedDict())
    shadow.state = defaultdict(dict, {copied: state})
    options = {key: value for key, value in group.items() if key != "params"}
    shadow.param_groups = [{**copy.deepcopy(options), "params": [copied]}]
    # The step without its decorators, which call step hooks and count the call for lr schedulers.
    raw_step = inspect.unwrap(type(optimizer).step)
    devices = [parameter.device] if parameter.device.type != "cpu" else []
    with torch.no_grad(), torch.random.fork_rng(devices=devices, device_type=parameter.device.type):
        raw_step(shadow)
    return copied.detach()


class _Recorder(dict[str, Any]):
    """The state dict of a parameter that records the first value of each entry, before any update."""

    def __init__(self) -> None:
        super().__init__()
        self.first: dict[str, Any] = {}

    def __setitem__(self, key: str, value: Any) -> None:
        self.first.setdefault(key, copy.deepcopy(value))
        super().__setitem__(key, value)

    def setdefault(self, key: str, default: Any = None) -> Any:
        if key not in self:
            self[key] = default
        return self[key]

    def update(self, *args: Any, **kwargs: Any) -> None:
        for key, value in dict(*args, **kwargs).items():
            self[key] = value


def _same_bits(left: Any, right: Any) -> bool:
    if isinstance(left, DTensor) and isinstance(right, DTensor):
        left, right = left.to_local(), right.to_local()
    if isinstance(left, torch.Tensor) and isinstance(right, torch.Tensor):
        same_kind = (left.dtype, left.shape) == (right.dtype, right.shape)
        return same_kind and torch.equal(_bits(left), _bits(right))
    if isinstance(left, Mapping) and isinstance(right, Mapping):
        return left.keys() == right.keys() and all(_same_bits(left[key], right[key]) for key in left)
    if isinstance(left, (list, tuple)) and isinstance(right, (list, tuple)):
        return len(left) == len(right) and all(map(_same_bits, left, right))
    return bool(left == right)


def _bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.contiguous().reshape(-1).view(torch.uint8)
