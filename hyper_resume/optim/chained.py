"""Several optimizers that are used as one."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch


class ChainedOptimizer:
    """Steps its optimizers in order. It has no state; ``chained_optimizers`` have all of it.

    It is not a ``torch.optim.Optimizer``. Each of the chained optimizers needs its own lr scheduler.
    """

    def __init__(self, chained_optimizers: Sequence[torch.optim.Optimizer]) -> None:
        """Chain ``chained_optimizers``.

        Raises:
            ValueError: the list is empty, or two of them hold the same parameter.
        """
        self.chained_optimizers = list(chained_optimizers)
        if not self.chained_optimizers:
            raise ValueError("a ChainedOptimizer needs at least one optimizer")
        seen: set[int] = set()
        for group in self.param_groups:
            for parameter in group["params"]:
                if id(parameter) in seen:
                    raise ValueError("a parameter belongs to two chained optimizers and would be stepped twice")
                seen.add(id(parameter))

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        """All groups of all optimizers, in order."""
        return [group for optimizer in self.chained_optimizers for group in optimizer.param_groups]

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Clear the gradients of every optimizer's parameters."""
        for optimizer in self.chained_optimizers:
            optimizer.zero_grad(set_to_none=set_to_none)

    def step(self, closure: Callable[[], float] | None = None) -> None:
        """Step every optimizer once.

        Raises:
            ValueError: a closure was given; each optimizer would evaluate it again.
        """
        if closure is not None:
            raise ValueError("a ChainedOptimizer takes no closure")
        for optimizer in self.chained_optimizers:
            optimizer.step()

    def state_dict(self) -> list[dict[str, Any]]:
        """Return the state dict of each optimizer, in order."""
        return [optimizer.state_dict() for optimizer in self.chained_optimizers]

    def load_state_dict(self, state: Sequence[dict[str, Any]]) -> None:
        """Load one state dict per optimizer, in order.

        Raises:
            ValueError: the counts differ.
        """
        for optimizer, part in zip(self.chained_optimizers, state, strict=True):
            optimizer.load_state_dict(part)
