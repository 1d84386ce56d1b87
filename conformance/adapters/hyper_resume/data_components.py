"""Builds data loaders, the loss and other stateful objects from ``given``."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import numpy as np
import torch
from torch import nn

from conformance.adapters.hyper_resume.components import VOCABULARY
from conformance.adapters.hyper_resume.foreign_loaders import FOREIGN, build_foreign_loader
from conformance.adapters.hyper_resume.hidden_state import HiddenState
from conformance.matrix.given import DataGiven, Given
from hyper_resume.data import DataLoader
from hyper_resume.trainer.callbacks import Callback, TrainerState


class Ids:
    """Sample i is ``first_id + i``; with ``noisy`` also a draw from each of the three streams, made while it is read.

    ``reads`` counts how many samples were read in this process.
    """

    def __init__(self, given: DataGiven, *, noisy: bool) -> None:
        """Make the dataset; nothing is read yet."""
        self._given = given
        self._noisy = noisy
        self.reads = 0
        if given.fingerprint is not None:
            self.fingerprint = given.fingerprint

    def __len__(self) -> int:
        """Samples per epoch."""
        return self._given.samples

    def __getitem__(self, index: int) -> Any:
        """Sample ``index``."""
        self.reads += 1
        number = self._given.first_id + index
        if not self._noisy:
            return number
        return number, draw_from_all_streams()


class ForeignLoader:
    """A loader that is not this library's: batches in ascending order, no state."""

    def __init__(self, dataset: Ids, batch_size: int) -> None:
        """Batches of ``dataset``."""
        self.dataset, self._batch_size = dataset, batch_size

    def __len__(self) -> int:
        """Batches per epoch."""
        return math.ceil(len(self.dataset) / self._batch_size)

    def __iter__(self) -> Iterator[Any]:
        """One epoch."""
        yield from (self._batch(number) for number in range(len(self)))

    def _batch(self, number: int) -> Any:
        first = number * self._batch_size
        ids = range(first, min(first + self._batch_size, len(self.dataset)))
        return torch.utils.data.default_collate([self.dataset[index] for index in ids])


class ForeignStatefulLoader(ForeignLoader):
    """The same, with its position in the epoch as its state."""

    _handed_out = 0

    def __iter__(self) -> Iterator[Any]:
        """The rest of the epoch."""
        while self._handed_out < len(self):
            self._handed_out += 1
            yield self._batch(self._handed_out - 1)
        self._handed_out = 0

    def state_dict(self) -> dict[str, int]:
        """The position."""
        return {"handed_out": self._handed_out}

    def load_state_dict(self, state: Mapping[str, int]) -> None:
        """Go to a position."""
        self._handed_out = state["handed_out"]


class ForeignDrawingLoader(ForeignStatefulLoader):
    """The same, which seeds something from torch's stream whenever its iterator is made, as torch's own loader does."""

    def __iter__(self) -> Iterator[Any]:
        """Draw, then the rest of the epoch."""
        torch.rand(())
        return super().__iter__()


class EndlessLoader:
    """Batches without an end, a length or a state."""

    def __init__(self, dataset: Ids, batch_size: int) -> None:
        """Batches of ``dataset``, over and over."""
        self._inner = ForeignLoader(dataset, batch_size)
        self.dataset = dataset

    def __iter__(self) -> Iterator[Any]:
        """For ever."""
        while True:
            yield from self._inner


def build_data(given: Given, *, rank: int, world_size: int) -> tuple[Any, Ids]:
    """Return the loader and its dataset."""
    data = given.data
    dataset = Ids(data, noisy="dataset" in given.noise)
    if data.loader in FOREIGN:
        return build_foreign_loader(given, dataset), dataset
    foreign = {
        "foreign": ForeignLoader,
        "foreign-stateful": ForeignStatefulLoader,
        "foreign-drawing": ForeignDrawingLoader,
        "unsized": EndlessLoader,
    }
    if data.loader != "own":
        return foreign[data.loader](dataset, data.batch_size), dataset
    loader = DataLoader(
        dataset,
        batch_size=data.batch_size,
        shuffle=data.shuffle,
        shuffle_method=data.shuffle_method,
        seed=given.seed,
        drop_last=data.drop_last,
        num_workers=data.workers,
        dp_rank=rank if world_size > 1 else data.dp_rank,
        dp_world_size=world_size if world_size > 1 else data.dp_world_size,
    )
    return loader, dataset


# ---- other stateful objects -------------------------------------------------------------------------------------


class Ema:
    """An average of the weights whose decay depends on how often it was updated."""

    def __init__(self, model: nn.Module) -> None:
        """Begin with the weights."""
        self.updates = 0
        self.average = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}

    def update(self, model: nn.Module) -> None:
        """Take in the weights of a finished step."""
        self.updates += 1
        decay = min(0.99, self.updates / (10.0 + self.updates))
        for name, parameter in model.named_parameters():
            self.average[name].lerp_(parameter.detach(), 1.0 - decay)

    def state_dict(self) -> dict[str, Any]:
        """Everything."""
        return {"updates": self.updates, "average": self.average}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take everything back."""
        self.updates = state["updates"]
        self.average = {name: tensor.clone() for name, tensor in state["average"].items()}


class Scaler:
    """A loss scale that doubles every 3 steps; powers of two, so the gradients keep their bits but for overflow."""

    def __init__(self) -> None:
        """Begin at 2."""
        self.scale, self.steps = 2.0, 0

    def update(self) -> None:
        """Count a finished step."""
        self.steps += 1
        if self.steps % 3 == 0:
            self.scale *= 2.0

    def state_dict(self) -> dict[str, Any]:
        """Everything."""
        return {"scale": self.scale, "steps": self.steps}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take everything back."""
        self.scale, self.steps = state["scale"], state["steps"]


class Forgetful:
    """A count of steps with a defect: it ignores the state that it is given."""

    def __init__(self) -> None:
        """Begin at 0."""
        self.steps = 0

    def state_dict(self) -> dict[str, int]:
        """The count."""
        return {"steps": self.steps}

    def load_state_dict(self, state: Mapping[str, int]) -> None:
        """The defect: ignore the state."""


def draw_from_all_streams() -> float:
    """One number from each of the three streams; their sum."""
    return float(torch.rand(())) + random.random() + float(np.random.rand())


class DrawsAtBegin(Callback):
    """A callback behind the checkpointer, which draws once training begins."""

    def on_train_begin(self, state: TrainerState | None = None, **kwargs: Any) -> None:
        """Draw."""
        draw_from_all_streams()


class StepCounter(Callback):
    """A stateful callback: it counts steps, and its state is saved with the trainer's."""

    def __init__(self, trainer: Any) -> None:
        """Begin at 0."""
        super().__init__(trainer)
        self.steps = 0

    def on_step_end(self, state: TrainerState | None = None, **kwargs: Any) -> None:
        """Count."""
        self.steps += 1

    def state_dict(self) -> dict[str, int]:
        """The count."""
        return {"steps": self.steps}

    def load_state_dict(self, state: dict[str, int]) -> None:
        """Take it back."""
        self.steps = state["steps"]


def seed_streams(seed: int) -> None:
    """Seed torch's, Python's and NumPy's global streams."""
    torch.manual_seed(seed)
    random.seed(seed)
    np.random.seed(seed % 2**32)


def loss_of(
    given: Given,
    seen: list[int],
    generator: torch.Generator | None = None,
    scaler: Scaler | None = None,
    hidden: HiddenState | None = None,
    outside: nn.ParameterDict | None = None,
) -> Callable[[nn.Module, Any], torch.Tensor]:
    """Return (model, batch) -> mean squared error of i / 64, scaled by what ``noise``, ``extras`` and ``hidden`` say.

    The ids of each batch are appended to ``seen``: the samples that were trained, independent of what a loader reports.
    """

    def loss_function(model: nn.Module, batch: Any) -> torch.Tensor:
        ids, noise = batch if isinstance(batch, (list, tuple)) else (batch, None)
        seen.extend(ids.tolist())
        scale: Any = 1.0
        if "loss" in given.noise:
            scale = 1.0 + 0.1 * random.random() + 0.1 * float(np.random.rand())
        if generator is not None:
            scale = scale + 0.1 * float(torch.rand((), generator=generator))
        if noise is not None:
            scale = scale + 0.1 * noise.float()
        if hidden is not None:
            scale = scale * hidden.factor()
        if outside is not None:
            scale = scale * (1.0 + outside["gain"] * torch.tanh(outside["bend"]))
        loss: torch.Tensor = (scale * (model(ids % VOCABULARY) - ids / VOCABULARY) ** 2).mean()
        return loss if scaler is None else loss * scaler.scale

    return loss_function
