"""What else a trainer may hold or be given: stateful objects, loaders of other libraries, no scheduler."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from torch import nn

from hyper_resume.trainer.base import BaseTrainer
from hyper_resume.trainer.callbacks import Callback
from tests.trainer.tiny_training import (
    Ids,
    Record,
    StoppedOnPurpose,
    make_trainer,
    records_of,
    run_config,
    saved_steps,
    train,
)

EPOCHS = 3
SAMPLES = 8  # 3 batches an epoch: of 3, 3 and 2


class StopAtEpochEnd(Callback):
    def on_epoch_end(self, state: Any = None, **kwargs: Any) -> None:
        raise StoppedOnPurpose


class Scaler:
    """Like a gradient scaler: doubles every third step, and its factor goes into the loss."""

    def __init__(self) -> None:
        self.scale, self.growth = 1.0, 0

    def update(self) -> None:
        self.growth += 1
        if self.growth == 3:
            self.scale, self.growth = self.scale * 2, 0

    def state_dict(self) -> dict[str, Any]:
        return {"scale": self.scale, "growth": self.growth}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.scale, self.growth = state["scale"], state["growth"]


class Average(nn.Module):
    """A moving average of the weights with a plain count of updates, which its warm-up depends on."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.shadow = copy.deepcopy(model).requires_grad_(False)
        self.updates = 0

    def update(self, model: nn.Module) -> None:
        self.updates += 1
        decay = min(0.9, self.updates / (10 + self.updates))
        for mine, theirs in zip(self.shadow.parameters(), model.parameters(), strict=True):
            mine.lerp_(theirs.detach(), 1 - decay)

    def get_extra_state(self) -> torch.Tensor:
        return torch.tensor(self.updates)

    def set_extra_state(self, state: torch.Tensor) -> None:
        self.updates = int(state)


class Counter(Callback):
    """Counts steps and epochs, draws from the global stream, and stops nothing."""

    def __init__(self, trainer: Any) -> None:
        super().__init__(trainer)
        self.counts = {"steps": 0, "epochs": 0, "drawn": 0.0}
        self.epoch_ends: list[tuple[int, int]] = []

    def on_step_end(self, state: Any = None, **kwargs: Any) -> None:
        self.counts["steps"] += 1
        self.counts["drawn"] += float(torch.rand(()))
        self.trainer.scaler.update()
        self.trainer.average.update(self.trainer.model)

    def on_epoch_end(self, state: Any = None, **kwargs: Any) -> None:
        self.counts["epochs"] += 1
        self.counts["drawn"] += float(torch.rand(()))
        self.epoch_ends.append((self.trainer.state.epoch, self.trainer.state.global_step))

    def state_dict(self) -> dict[str, Any]:
        return dict(self.counts)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.counts = dict(state)


class Full:
    """A trainer that holds a scaler, an average, a generator and a stateful callback."""

    def __init__(self, config: Any) -> None:
        made = make_trainer(config, dataset=Ids(SAMPLES), callbacks=[Counter], loss_function=self._loss)
        # Any, because these attributes are the user's own.
        self.trainer = cast(Any, made)
        self.trainer.scaler = Scaler()
        self.trainer.average = Average(made.model)
        self.trainer.generator = torch.Generator().manual_seed(5)
        self.noise: list[float] = []

    def _loss(self, model: nn.Module, ids: torch.Tensor) -> torch.Tensor:
        noise = float(torch.rand((), generator=self.trainer.generator))
        self.noise.append(noise)
        loss: torch.Tensor = ((model(ids) - noise) ** 2).mean() * self.trainer.scaler.scale
        return loss

    @property
    def counter(self) -> Counter:
        callbacks: list[Callback] = self.trainer.callbacks
        return next(callback for callback in callbacks if isinstance(callback, Counter))

    def outcome(self) -> tuple[Any, ...]:
        average = {name: value.tolist() for name, value in self.trainer.average.state_dict().items()}
        return self.counter.counts, self.trainer.scaler.state_dict(), average


@pytest.mark.parametrize("per_rank", [True, False], ids=["per-rank-files", "embedded"])
def test_scaler_average_generator_and_stateful_callbacks_continue_from_every_step(
    tmp_path: Path, per_rank: bool
) -> None:
    options: dict[str, Any] = {"training": {"num_train_epochs": EPOCHS}, "save_extra_state_per_rank": per_rank}
    straight = Full(run_config(tmp_path, save_steps=1, **options))
    straight.trainer.train()
    records = records_of(straight.trainer)
    assert straight.counter.counts["steps"] == 9
    assert straight.trainer.scaler.scale == 2**3
    assert len(set(straight.noise)) == 9

    for step in range(1, 10):
        resumed = Full(
            run_config(tmp_path, save_ckpt=False, restore_from=str(tmp_path / f"global_step_{step}"), **options)
        )
        resumed.trainer.train()
        assert records_of(resumed.trainer) == records[step:]
        assert resumed.noise == straight.noise[step:]
        assert resumed.outcome() == straight.outcome(), f"resumed from step {step}"


def test_an_epochs_end_that_the_checkpoint_came_before_is_reported_to_the_callbacks_after_the_resume(
    tmp_path: Path,
) -> None:
    # save_steps hits the last step of epoch 0, then on_epoch_end finds nothing to save: whoever counts epochs (patience,
    # best value) has not counted this one in what is on disk.
    config = run_config(tmp_path, training={"num_train_epochs": 2}, save_steps=3, restore_from="LATEST")
    first = Full(config)
    first.trainer.callbacks.insert(0, StopAtEpochEnd(first.trainer))
    with pytest.raises(StoppedOnPurpose):
        first.trainer.train()
    assert saved_steps(tmp_path) == [3]
    assert first.counter.epoch_ends == []

    second = Full(config)
    second.trainer.train()
    assert second.counter.epoch_ends == [(0, 3), (1, 6)]
    assert second.counter.counts["epochs"] == 2

    third = Full(config)
    third.trainer.train()
    assert records_of(third.trainer) == []
    assert third.counter.counts["epochs"] == 2


# ---- loaders of other kinds under the real trainer


class ForeignLoader:
    """A stateful loader as other libraries write them: no epoch, draws when its iterator is made, reads ahead of no one.

    Its state after an epoch's last batch is "exhausted": the next pass has no batch, and the one after it is whole.
    """

    def __init__(self, batches: int = 3) -> None:
        self.batches, self.taken = batches, 0

    def __len__(self) -> int:
        return self.batches

    def __iter__(self) -> Any:
        torch.rand(())
        return self._batches()

    def _batches(self) -> Any:
        while self.taken < self.batches:
            self.taken += 1
            yield torch.arange(3) + self.taken
        self.taken = 0

    def state_dict(self) -> dict[str, Any]:
        return {"taken": self.taken}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.taken = state["taken"]


class EpochEnds(Callback):
    def __init__(self, trainer: Any) -> None:
        super().__init__(trainer)
        self.seen: list[tuple[int, int]] = []

    def on_epoch_end(self, state: Any = None, **kwargs: Any) -> None:
        self.seen.append((self.trainer.state.epoch, self.trainer.state.global_step))


def _epoch_ends(trainer: BaseTrainer) -> list[tuple[int, int]]:
    return next(callback.seen for callback in trainer.callbacks if isinstance(callback, EpochEnds))


@pytest.mark.parametrize("prefetch", [False, True], ids=["direct", "prefetcher"])
def test_a_foreign_stateful_loader_resumes_exactly_at_every_step_and_loses_no_epoch(
    tmp_path: Path, prefetch: bool
) -> None:
    options: dict[str, Any] = {
        "training": {"num_train_epochs": EPOCHS},
        "data": {"use_background_prefetcher": prefetch},
    }
    straight = train(run_config(tmp_path, save_steps=1, **options), loader=ForeignLoader())
    assert len(straight) == 9
    for step in range(1, 10):
        config = run_config(tmp_path, save_ckpt=False, restore_from=str(tmp_path / f"global_step_{step}"), **options)
        trainer = make_trainer(config, loader=ForeignLoader(), callbacks=[EpochEnds])
        trainer.train()
        assert records_of(trainer) == straight[step:], f"resumed from step {step}"
        assert _epoch_ends(trainer) == [(epoch, 3 * epoch + 3) for epoch in range(EPOCHS) if 3 * epoch + 3 >= step]


def test_a_loader_without_a_length_ends_its_epochs_where_its_data_ends(tmp_path: Path) -> None:
    class NoLength:
        def __iter__(self) -> Any:
            return iter(torch.arange(12).view(4, 3))

    config = run_config(tmp_path, training={"num_train_epochs": 3, "max_steps": 10})
    trainer = make_trainer(config, loader=NoLength(), callbacks=[EpochEnds])
    trainer.train()
    assert _epoch_ends(trainer) == [(0, 4), (1, 8)]
    assert saved_steps(tmp_path) == [4, 8, 10]


def test_a_trainer_without_a_scheduler_resumes_exactly(tmp_path: Path) -> None:
    def run(**checkpoint: Any) -> list[Record]:
        trainer = make_trainer(run_config(tmp_path, **checkpoint), dataset=Ids(SAMPLES))
        trainer.lr_scheduler = None
        trainer.train()
        return records_of(trainer)

    straight = run(save_steps=2)
    assert run(save_ckpt=False, restore_from=str(tmp_path / "global_step_2")) == straight[2:]
