"""Create an optimizer's state before its first step, with nothing else changed.

Optimizers create their state lazily. A storage backend that can only fill tensors that exist needs them beforehand. The
usual way, a real ``step()`` with lr and gradients of zero, moves step counters, decays weights in some optimizers, and
fires hooks and wrappers (a gradient scaler counts it). Here the step runs on stand-ins instead: each parameter's update is
computed by a detached copy of the optimizer object on a zero tensor of the same layout, and only the state that this
created is kept, with counters and buffers set back to what they are before a first step.
"""

from __future__ import annotations

import copy
import inspect
import logging
from collections import defaultdict
from typing import Any

import torch

logger = logging.getLogger(__name__)


def initialize_optimizer_state(optimizer: Any) -> None:
    """Give every trainable parameter the zero state that its optimizer would create at a first step.

    Parameters that already have state keep it. Parameters, gradients, group options, hooks, scheduler counters and random
    streams are untouched.

    Args:
        optimizer: a ``torch.optim.Optimizer``, an object with ``chained_optimizers`` (each is primed), or any other
            wrapper: that one is left alone with a warning that says what it would need.
    """
    for member in getattr(optimizer, "chained_optimizers", None) or [optimizer]:
        if isinstance(member, torch.optim.Optimizer):
            _prime(member)
        elif member is not optimizer or getattr(member, "optimizer", None) is not None:
            initialize_optimizer_state(getattr(member, "optimizer", member))
        else:
            logger.warning(
                "optimizer wrapper %s.%s is unknown: it is neither a torch Optimizer nor has chained_optimizers, so its "
                "state can't be created before the load; give it a chained_optimizers list",
                type(member).__module__,
                type(member).__qualname__,
            )


def _prime(optimizer: torch.optim.Optimizer) -> None:
    # The undecorated step: the decorators run step hooks and count the call for lr schedulers.
    raw_step = inspect.unwrap(type(optimizer).step)
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            if parameter.requires_grad and not optimizer.state.get(parameter):
                state = _state_of_a_first_step(optimizer, raw_step, group, parameter)
                if state:
                    optimizer.state[parameter] = state


def _state_of_a_first_step(
    optimizer: torch.optim.Optimizer, raw_step: Any, group: dict[str, Any], parameter: torch.Tensor
) -> dict[str, Any]:
    stand_in = torch.zeros_like(parameter.detach()).requires_grad_()
    stand_in.grad = torch.zeros_like(stand_in)
    shadow = copy.copy(optimizer)
    shadow.state = defaultdict(dict)
    # lr and weight_decay of zero keep the stand-in finite whatever the optimizer does with it.
    shadow.param_groups = [{**group, "params": [stand_in], "lr": _zero_like(group["lr"]), "weight_decay": 0}]
    with torch.no_grad():
        raw_step(shadow)
    return {key: _before_first_step(value) for key, value in shadow.state[stand_in].items()}


def _zero_like(lr: Any) -> Any:
    return torch.zeros_like(lr) if isinstance(lr, torch.Tensor) else 0.0


def _before_first_step(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return torch.zeros_like(value)
    return 0 if isinstance(value, int) and not isinstance(value, bool) else value
