"""Create an optimizer's state before its first step, with nothing else changed.

Optimizers create their state lazily. A storage backend that can only fill tensors that exist needs them beforehand. The
usual way, a real ``step()`` with lr and gradients of zero, moves step counters, decays weights in some optimizers, fires
hooks and moves wrappers (a gradient scaler counts it), and leaves zeros where an optimizer starts from something else. Here
the step runs on a stand-in for each parameter, in a copy of the optimizer, and the state is taken as the optimizer first
sets it, before its update. Whether that state is the true beginning is then tried out: a second step from it must give the
same bits as one from nothing. Where it does not (SGD with dampening takes its first gradient undampened), the state stays
absent, and the optimizer makes it at its first step as ever.
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

# What a copy of an optimizer must not share with it: its state, and the hooks that a step fires.
_NOT_COPIED = frozenset(
    {"state", "param_groups", "step", "_optimizer_step_pre_hooks", "_optimizer_step_post_hooks", "_hook_for_profile"}
)


def initialize_optimizer_state(optimizer: Any) -> None:
    """Give every trainable parameter the state that its optimizer would begin with at a first step.

    Parameters that already have state keep it. Parameters, gradients, group options, hooks, scheduler counters and random
    streams are untouched, and the next step gives the same bits as it would have given without this call.

    Args:
        optimizer: a ``torch.optim.Optimizer``; an object with ``chained_optimizers`` or a list (each is primed); a wrapper
            with ``optimizer`` (that one is primed); None. Any other wrapper is left alone with a warning that says what it
            would need.
    """
    if optimizer is None:
        return
    chained = optimizer if isinstance(optimizer, (list, tuple)) else getattr(optimizer, "chained_optimizers", None)
    # Asked before the class: a wrapper may derive from torch's Optimizer, and its step would step the wrapped one.
    inner = getattr(optimizer, "optimizer", None)
    if chained:
        for member in chained:
            initialize_optimizer_state(member)
    elif inner is not None:
        initialize_optimizer_state(inner)
    elif isinstance(optimizer, torch.optim.Optimizer):
        _prime(optimizer)
    elif chained is None:
        logger.warning(
            "optimizer wrapper %s.%s is unknown: it is neither a torch Optimizer nor has chained_optimizers or optimizer, so "
            "its state can't be created before the load; give it a chained_optimizers list",
            type(optimizer).__module__,
            type(optimizer).__qualname__,
        )


def _prime(optimizer: torch.optim.Optimizer) -> None:
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            if not parameter.requires_grad or optimizer.state.get(parameter):
                continue
            try:
                state = _beginning(optimizer, group, parameter)
            except Exception as error:  # noqa: BLE001  any optimizer of anyone may stand here
                logger.warning(
                    "the state of %s can't be created before its first step (%s: %s); it stays absent until then",
                    type(optimizer).__qualname__,
                    type(error).__name__,
                    error,
                )
                return
            if state:
                optimizer.state[parameter] = state


def _beginning(optimizer: torch.optim.Optimizer, group: dict[str, Any], parameter: torch.Tensor) -> dict[str, Any]:
    """Return the state that ``parameter`` begins with, or {} where a step from it would not be a first step."""
    zero, some = torch.zeros_like(parameter.detach()), parameter.detach() * 0.25 + 0.5
    state = _Recorder()
    # Without the decay, because that would be a gradient too.
    _step_stand_in(optimizer, {**group, "weight_decay": 0}, parameter, zero, state)
    begun = dict(state.first)
    if not begun:
        return {}
    from_nothing: dict[str, Any] = {}
    from_begun = copy.deepcopy(begun)
    expected = _step_stand_in(optimizer, group, parameter, some, from_nothing)
    found = _step_stand_in(optimizer, group, parameter, some, from_begun)
    return begun if _same_bits([expected, from_nothing], [found, from_begun]) else {}


def _step_stand_in(
    optimizer: torch.optim.Optimizer,
    group: dict[str, Any],
    parameter: torch.Tensor,
    gradient: torch.Tensor,
    state: dict[str, Any],
) -> torch.Tensor:
    """Step a copy of ``optimizer`` on a copy of ``parameter``; ``state`` is filled. Returns the stepped copy."""
    stand_in = parameter.detach().clone().requires_grad_()
    stand_in.grad = gradient.clone()
    shadow: Any = object.__new__(type(optimizer))
    # An attribute that holds the parameters gets the stand-in for this one and nothing for the others.
    memo: dict[int, Any] = {
        id(other): torch.empty(0)
        for each in optimizer.param_groups
        for other in each["params"]
        if other is not parameter
    }
    memo[id(parameter)] = stand_in
    own = {key: value for key, value in vars(optimizer).items() if key not in _NOT_COPIED}
    vars(shadow).update(copy.deepcopy(own, memo))
    vars(shadow).update(_optimizer_step_pre_hooks=OrderedDict(), _optimizer_step_post_hooks=OrderedDict())
    shadow.state = defaultdict(dict, {stand_in: state})
    options = {key: value for key, value in group.items() if key != "params"}
    shadow.param_groups = [{**copy.deepcopy(options), "params": [stand_in]}]
    # The undecorated step: the decorators run step hooks and count the call for lr schedulers.
    raw_step = inspect.unwrap(type(optimizer).step)
    devices = [parameter.device] if parameter.device.type != "cpu" else []
    with torch.no_grad(), torch.random.fork_rng(devices=devices, device_type=parameter.device.type):
        raw_step(shadow)
    return stand_in.detach()


class _Recorder(dict[str, Any]):
    """A parameter's state that remembers what each entry was first set to, before any update."""

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
