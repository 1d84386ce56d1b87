"""Optimizers that hold optimizers, or keep state of their own, as people write them."""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Iterable
from typing import Any

import torch
from torch import nn

Optimizer = torch.optim.Optimizer


def adamw(parameters: Any, lr: float = 0.01) -> torch.optim.AdamW:
    return torch.optim.AdamW(list(parameters), lr=lr, weight_decay=0.1)


class Sam(Optimizer):
    """Sharpness-aware: steps from perturbed weights; its base optimizer has the moments."""

    def __init__(self, parameters: Any, *, copied_groups: bool = False) -> None:
        super().__init__(list(parameters), {"rho": 0.05})
        self.base_optimizer = torch.optim.AdamW(self.param_groups, lr=0.01, weight_decay=0.1)
        self.param_groups = (
            list(self.base_optimizer.param_groups) if copied_groups else self.base_optimizer.param_groups
        )

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    self.state[parameter]["old"] = parameter.clone()
                    parameter.grad.add_(parameter.sign(), alpha=group["rho"])
        self.base_optimizer.step()


class Lookahead(Optimizer):
    """A subclass that hands out the groups of the optimizer that it holds; slow weights in its own ``state``."""

    def __init__(self, base: Optimizer, *, every: int = 3) -> None:
        self.base = base
        self.every = every
        self.count = 0
        self.param_groups = base.param_groups
        self.defaults = base.defaults
        self.state = defaultdict(dict)

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for parameter in (p for group in self.param_groups for p in group["params"]):
            self.state[parameter].setdefault("slow", parameter.detach().clone())
        self.base.step()
        self.count += 1
        if self.count % self.every == 0:
            for parameter, entries in self.state.items():
                entries["slow"].lerp_(parameter, 0.5)
                parameter.copy_(entries["slow"])

    def zero_grad(self, set_to_none: bool = True) -> None:
        self.base.zero_grad(set_to_none)


class PlainLookahead:
    """No optimizer: slow weights are kept by parameter, and are there only after the first step."""

    def __init__(self, optimizer: Optimizer, *, every: int = 3) -> None:
        self.optimizer = optimizer
        self.every = every
        self.count = 0
        self.slow: dict[nn.Parameter, torch.Tensor] = {}

    @property
    def param_groups(self) -> Any:
        return self.optimizer.param_groups

    @property
    def state(self) -> Any:
        return self.optimizer.state

    @torch.no_grad()
    def step(self) -> None:
        for parameter in (p for group in self.param_groups for p in group["params"]):
            self.slow.setdefault(parameter, parameter.detach().clone())
        self.optimizer.step()
        self.count += 1
        if self.count % self.every == 0:
            for parameter, slow in self.slow.items():
                slow.lerp_(parameter, 0.5)
                parameter.copy_(slow)

    def zero_grad(self) -> None:
        self.optimizer.zero_grad()


class ListLookahead(PlainLookahead):
    """The slow weights are a list of lists, made at once, as in most recipes."""

    def __init__(self, optimizer: Optimizer, *, every: int = 3) -> None:
        super().__init__(optimizer, every=every)
        self.lists = [[p.detach().clone() for p in group["params"]] for group in optimizer.param_groups]
        for group, slow in zip(optimizer.param_groups, self.lists, strict=True):
            self.slow.update(zip(group["params"], slow, strict=True))


class Container(Optimizer):
    """A subclass of Optimizer with a list or a dictionary of optimizers, as training libraries have."""

    def __init__(self, inner: Any) -> None:
        self.inner = inner
        super().__init__(
            [p for one in self._all() for group in one.param_groups for p in group["params"]], {"lr": 0.01}
        )

    def _all(self) -> Iterable[Optimizer]:
        return self.inner.values() if isinstance(self.inner, dict) else self.inner

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for one in self._all():
            one.step()

    def zero_grad(self, set_to_none: bool = True) -> None:
        for one in self._all():
            one.zero_grad(set_to_none)

    def state_dict(self) -> dict[str, Any]:
        raise AssertionError("it would step uninitialised optimizers")


class Counting(torch.optim.AdamW):
    """Keeps an extra tensor, a counter, its last norms and a random generator in its attributes."""

    def __init__(self, parameters: Any, *, alpha: float = 0.5) -> None:
        super().__init__(list(parameters), lr=0.01)
        self.alpha = alpha
        self.steps = 0
        self.norm_average: torch.Tensor | None = None
        self.last: deque[float] = deque(maxlen=3)
        self.noise = torch.Generator().manual_seed(5)

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        self.steps += 1
        gradients = [p.grad for group in self.param_groups for p in group["params"] if p.grad is not None]
        norm = torch.stack([g.norm() for g in gradients]).norm()
        self.norm_average = norm.clone() if self.norm_average is None else self.norm_average.lerp(norm, 0.5)
        self.last.append(float(norm))
        scale = 1 / (1 + self.steps) + sum(self.last) + float(self.norm_average)
        for gradient in gradients:
            gradient.add_(torch.randn(gradient.shape, generator=self.noise), alpha=0.01 * scale)
        super().step()
