"""State that the trainer reaches and no object saves, planted for ``given.hidden``; the loss depends on it."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from torch import nn

from hyper_resume.trainer.callbacks import Callback

_DECAY = 0.9


class HiddenState:
    """What is planted, where the trainer keeps it (``holder``), and how the loss of a step depends on it.

    ``holder`` becomes the trainer's attribute ``hidden``, or one of its callbacks. Nothing else keeps any of it, so that it has
    one path.
    """

    def __init__(self, kind: str, model: nn.Module, seed: int) -> None:
        """Begin with the model's weights, or a seed of its own."""
        self.kind = kind
        self._model = model
        self.holder = _made(kind, [parameter.detach().clone() for parameter in model.parameters()], seed)

    def factor(self) -> float:
        """What the loss of a micro-batch is multiplied by; some kinds have no effect."""
        if self.kind in ("watched", "drawing", "unsaveable"):
            return 1.0
        if self.kind == "generator":
            return 1.0 + 0.1 * float(torch.rand((), generator=self.holder.noise))
        if self.kind in ("python-generator", "numpy-generator"):
            return 1.0 + 0.1 * float(self.holder.noise.random())
        if self.kind == "array":
            return 1.0 + 0.1 * float(np.tanh(self.holder.mean[0]))
        if self.kind == "counter":
            return 1.0 + 1.0 / (1.0 + float(self.holder.updates))
        return 1.0 + 0.1 * float(torch.tanh(self._average()[0].sum()))

    def update(self) -> None:
        """Take in the weights of a finished step."""
        with torch.no_grad():
            for average, parameter in zip(self._average(), self._model.parameters(), strict=False):
                average.lerp_(parameter, 1.0 - _DECAY)
            if self.kind == "array":
                self.holder.mean += float(next(self._model.parameters()).sum())
        if self.kind == "counter":
            self.holder.updates += 1

    def _average(self) -> list[torch.Tensor]:
        """The average's tensors, in the order of the parameters; of a function's closure the first one only."""
        holder = self.holder
        if self.kind in ("callback", "counter"):
            found: list[torch.Tensor] = holder.average
        elif self.kind == "namespace":
            found = holder.shadow.weights
        elif self.kind == "closure":
            found = [holder()]
        elif self.kind == "dict":
            found = list(holder.values())
        else:
            found = holder if isinstance(holder, list) else []
        return found


def _made(kind: str, average: list[torch.Tensor], seed: int) -> Any:
    makers: Mapping[str, Callable[[], Any]] = {
        "list": lambda: average,
        "watched": lambda: average,
        "callback": lambda: AverageCallback(average),
        "dict": lambda: dict(enumerate(average)),
        "namespace": lambda: SimpleNamespace(shadow=SimpleNamespace(weights=average)),
        "closure": lambda: _closing_over(average[0]),
        "array": lambda: SimpleNamespace(mean=np.zeros(1)),
        "generator": lambda: SimpleNamespace(noise=torch.Generator().manual_seed(seed)),
        "python-generator": lambda: SimpleNamespace(noise=random.Random(seed)),
        "numpy-generator": lambda: SimpleNamespace(noise=np.random.default_rng(seed)),
        "counter": lambda: ForgetfulAverage(average),
        "drawing": DrawingState,
        "unsaveable": UnsaveableState,
    }
    return makers[kind]()


def _closing_over(average: torch.Tensor) -> Callable[[], torch.Tensor]:
    return lambda: average


class ForgetfulAverage:
    """An average that saves its tensors, and not how often they were updated."""

    def __init__(self, average: list[torch.Tensor]) -> None:
        """Take the tensors."""
        self.average = average
        self.updates = 0

    def state_dict(self) -> dict[str, torch.Tensor]:
        """The tensors alone."""
        return {str(place): tensor for place, tensor in enumerate(self.average)}

    def load_state_dict(self, state: Mapping[str, torch.Tensor]) -> None:
        """Take them back."""
        for place, tensor in enumerate(self.average):
            tensor.copy_(state[str(place)])


class DrawingState:
    """Nothing but a ``state_dict`` that draws from torch's, Python's and NumPy's streams."""

    def state_dict(self) -> dict[str, int]:
        """Draw; the state itself is always the same."""
        torch.rand(())
        random.random()
        np.random.rand()
        return {"nothing": 0}

    def load_state_dict(self, state: Mapping[str, int]) -> None:
        """There is nothing to take back."""


class UnsaveableState:
    """A state that holds a function, which can't be read back safely."""

    def state_dict(self) -> dict[str, Any]:
        """A function."""
        return {"made": _made}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """There is nothing to take back."""


class AverageCallback(Callback):
    """A callback that keeps an average, and has no state of its own to save."""

    def __init__(self, average: list[torch.Tensor]) -> None:
        """Keep ``average``, for a trainer that is not built yet."""
        super().__init__(None)
        self.average = average

    def of(self, trainer: Any) -> AverageCallback:
        """The same, as a callback of ``trainer``."""
        self.trainer = trainer
        return self
