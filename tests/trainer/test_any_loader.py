"""A loop of one's own over a torch loader: it goes on bit for bit through the callback, wherever it was broken off."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch.utils.data import DataLoader, Dataset

from hyper_resume.config import CheckpointingConfig
from hyper_resume.data import ResumableLoader
from hyper_resume.trainer.callbacks import CheckpointerCallback, TrainerState

EPOCHS, BATCHES = 3, 5


class Noisy(Dataset[torch.Tensor]):
    """Rows that tell their index, with noise from the stream of whoever reads them."""

    def __len__(self) -> int:
        return 2 * BATCHES

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.full((4,), float(index)) + torch.rand(4)


def losses(root: Path, *, seed: int, workers: int, until: int = EPOCHS * BATCHES) -> dict[int, float]:
    """Train from LATEST, if there is one, to step ``until``; step -> loss of the steps that were trained."""
    torch.manual_seed(seed)
    model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Dropout(0.1), torch.nn.Linear(4, 1))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    loader = ResumableLoader(DataLoader(Noisy(), batch_size=2, shuffle=True, num_workers=workers))
    checkpoint = CheckpointingConfig(
        checkpoint_dir=str(root), save_steps=2, save_epochs=1, restore_from="LATEST", on_mismatch="error"
    )
    trainer = SimpleNamespace(
        config=SimpleNamespace(checkpoint=checkpoint),
        model=model,
        optimizer=optimizer,
        lr_scheduler=None,
        train_dataloader=loader,
        state=TrainerState(),
        train_steps=EPOCHS * BATCHES,
        start_epoch=0,
        start_step=0,
    )
    checkpointer = CheckpointerCallback(trainer)
    checkpointer.on_train_begin()
    found: dict[int, float] = {}
    for epoch in range(trainer.start_epoch, EPOCHS):
        trainer.state.epoch = epoch
        for batch in loader.batches(epoch):
            loss = model(batch).square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            trainer.state.global_step += 1
            found[trainer.state.global_step] = float(loss.detach())
            checkpointer.on_step_end()
            if trainer.state.global_step == until:
                return found
        checkpointer.on_epoch_end()
    checkpointer.on_train_end()
    return found


@pytest.mark.parametrize(
    ("until", "workers"), [(3, 0), (5, 0), (6, 0), (9, 0), (10, 0), (13, 0), (7, 2)], ids=lambda value: str(value)
)
def test_a_run_that_was_broken_off_ends_as_the_uninterrupted_one(tmp_path: Path, until: int, workers: int) -> None:
    reference = losses(tmp_path / "reference", seed=0, workers=workers)
    losses(tmp_path / "run", seed=0, workers=workers, until=until)
    resumed = losses(tmp_path / "run", seed=1, workers=workers)
    # Broken off before the end of its epoch's hook, a run goes on at the last even step or at the end of an epoch.
    first = max(step for step in range(until + 1) if step % 2 == 0 or (step % BATCHES == 0 and step < until)) + 1
    assert sorted(resumed) == list(range(first, EPOCHS * BATCHES + 1))
    assert resumed == {step: reference[step] for step in resumed}


class WithoutLength:
    """Batches that can be read once an epoch."""

    def __iter__(self) -> Iterator[torch.Tensor]:
        return iter(torch.full((2, 4), float(index)) for index in range(BATCHES))


def test_a_loader_without_a_length_is_exact_in_its_second_epoch(tmp_path: Path) -> None:
    # Two epochs of five batches, saved in the second: global_step alone would be in the middle of one endless epoch.
    def trained(seed: int, restore_from: str | None, until: int) -> list[float]:
        torch.manual_seed(seed)
        loader = ResumableLoader(WithoutLength())
        model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Dropout(0.1), torch.nn.Linear(4, 1))
        checkpoint = CheckpointingConfig(
            checkpoint_dir=str(tmp_path / "run"), save_steps=7, restore_from=restore_from, on_mismatch="error"
        )
        trainer = SimpleNamespace(
            config=SimpleNamespace(checkpoint=checkpoint),
            model=model,
            optimizer=torch.optim.AdamW(model.parameters(), lr=1e-2),
            lr_scheduler=None,
            train_dataloader=loader,
            state=TrainerState(),
            train_steps=until,
            start_epoch=0,
            start_step=0,
        )
        checkpointer = CheckpointerCallback(trainer)
        checkpointer.on_train_begin()
        losses = []
        for epoch in range(trainer.start_epoch, 2):
            trainer.state.epoch = epoch
            for batch in loader.batches(epoch):
                loss = model(batch).square().mean()
                loss.backward()
                trainer.optimizer.step()
                trainer.optimizer.zero_grad()
                trainer.state.global_step += 1
                losses.append(float(loss.detach()))
                checkpointer.on_step_end()
                if trainer.state.global_step == until:
                    return losses
        return losses

    whole = trained(0, None, 10)
    assert trained(1, str(tmp_path / "run" / "global_step_7"), 10) == whole[7:]


def test_two_resumes_in_one_epoch_end_as_the_uninterrupted_one(tmp_path: Path) -> None:
    reference = losses(tmp_path / "reference", seed=0, workers=0)
    losses(tmp_path / "run", seed=0, workers=0, until=6)
    losses(tmp_path / "run", seed=1, workers=0, until=8)
    resumed = losses(tmp_path / "run", seed=2, workers=0)
    assert resumed == {step: reference[step] for step in range(9, EPOCHS * BATCHES + 1)}
