"""Optimizers that hold an optimizer or several, as people write them; none has a state of its own in a plain optimizer."""

from __future__ import annotations

from typing import Any

import torch


class Sam(torch.optim.Optimizer):
    """Sharpness-aware: adds a perturbation to the gradients; the moments are those of ``base_optimizer``."""

    def __init__(self, parameters: list[Any], make: Any) -> None:
        """Hold the optimizer that ``make`` builds from the groups."""
        super().__init__(parameters, {"rho": 0.05})
        self.base_optimizer: torch.optim.Optimizer = make(self.param_groups)
        self.param_groups = list(self.base_optimizer.param_groups)

    def step(self, closure: Any = None) -> Any:
        """Perturb the gradients, and step the held optimizer."""
        with torch.no_grad():
            for group in self.param_groups:
                for parameter in group["params"]:
                    if parameter.grad is not None:
                        parameter.grad.add_(parameter.sign(), alpha=group["rho"])
        return self.base_optimizer.step()


class Lookahead:
    """A wrapper with slow weights in lists and a count of steps, neither of which a plain optimizer has."""

    def __init__(self, inner: torch.optim.Optimizer, *, every: int = 3) -> None:
        """Hold ``inner``."""
        self.inner = inner
        self.every = every
        self.count = 0
        self.slow = [[parameter.detach().clone() for parameter in group["params"]] for group in inner.param_groups]

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        """The held one's."""
        return self.inner.param_groups

    def zero_grad(self) -> None:
        """Clear the held one's gradients."""
        self.inner.zero_grad()

    def step(self) -> None:
        """Step the held one; after each ``every`` steps go half of the way from the slow weights."""
        self.inner.step()
        self.count += 1
        if self.count % self.every:
            return
        with torch.no_grad():
            for group, slow in zip(self.param_groups, self.slow, strict=True):
                for parameter, mine in zip(group["params"], slow, strict=True):
                    mine.lerp_(parameter, 0.5)
                    parameter.copy_(mine)


class Container(torch.optim.Optimizer):
    """A subclass of Optimizer that keeps its optimizers in a dictionary."""

    def __init__(self, inner: dict[str, torch.optim.Optimizer]) -> None:
        """Hold ``inner``."""
        self.inner = inner
        parameters = [p for one in inner.values() for group in one.param_groups for p in group["params"]]
        super().__init__(parameters, {"lr": 0.0})
        self.param_groups = [group for one in inner.values() for group in one.param_groups]

    def step(self, closure: Any = None) -> Any:
        """Step each."""
        for one in self.inner.values():
            one.step()

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Clear the gradients of each."""
        for one in self.inner.values():
            one.zero_grad(set_to_none)
