"""What a loop draws between the restore and its first batch is undone, or told by the certificate and refused."""

from __future__ import annotations

import logging
import random
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
import torchdata.nodes
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset

from hyper_resume.config import CheckpointingConfig
from hyper_resume.data import DataLoader as OwnLoader
from hyper_resume.data import ResumableLoader
from hyper_resume.errors import CheckpointMismatchError
from hyper_resume.state.certificate import read_certificate
from hyper_resume.trainer.callbacks import Callback, CheckpointerCallback, TrainerState
from hyper_resume.trainer.restored_streams import OpenCertificate, RestoredStreams
from hyper_resume.trainer.run.schedule_order import ScheduleOrder
from tests.ranks import run_ranks
from tests.trainer.tiny_training import make_trainer, records_of, run_config

ROWS, BATCH_SIZE, BATCHES, EPOCHS = 10, 2, 5, 2


class Rows(Dataset[torch.Tensor]):
    """Rows that tell their index, with noise from all three streams of whoever reads them, or without."""

    def __init__(self, *, noisy: bool = True) -> None:
        self.noise = 1.0 if noisy else 0.0

    def __len__(self) -> int:
        return ROWS

    def __getitem__(self, index: int) -> torch.Tensor:
        noise = torch.rand(4) + random.random() + float(np.random.rand()) if self.noise else 0.0
        return torch.full((4,), float(index)) + noise


def own(**options: Any) -> Any:
    return OwnLoader(Rows(), batch_size=BATCH_SIZE, seed=3, **options)


def wrapped_torch(**options: Any) -> Any:
    return ResumableLoader(DataLoader(Rows(), batch_size=BATCH_SIZE, shuffle=True, **options))


def bare_nodes(*, noisy: bool = True) -> Any:
    indices = torchdata.nodes.Mapper(torchdata.nodes.IterableWrapper(range(ROWS)), Rows(noisy=noisy).__getitem__)
    batches = torchdata.nodes.Batcher(indices, batch_size=BATCH_SIZE)
    return torchdata.nodes.Loader(torchdata.nodes.Mapper(batches, torch.stack))


LOADERS: dict[str, Callable[[], Any]] = {
    "own": own,
    "own, wrapped": lambda: ResumableLoader(own()),
    "own, 2 workers": lambda: own(num_workers=2),
    "torch, wrapped": wrapped_torch,
    "torch, 2 workers, wrapped": lambda: wrapped_torch(num_workers=2),
    "nodes, wrapped": lambda: ResumableLoader(bare_nodes()),
}


def draw_all() -> None:
    torch.rand(3), random.random(), np.random.rand()


def draw_nothing() -> None:
    return None


def draw_torch() -> None:
    torch.rand(3)


def make_loop(root: Path, loader: Any, **checkpoint: Any) -> Any:
    model: Any = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Dropout(0.1), torch.nn.Linear(4, 1))
    if dist.is_initialized():
        model = DistributedDataParallel(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    options = {"checkpoint_dir": str(root), "save_steps": 1, "save_epochs": 0, **checkpoint}
    return SimpleNamespace(
        config=SimpleNamespace(checkpoint=CheckpointingConfig(**options)),
        model=model,
        optimizer=optimizer,
        lr_scheduler=None,
        train_dataloader=loader,
        state=TrainerState(),
        train_steps=EPOCHS * BATCHES,
        start_epoch=0,
        start_step=0,
    )


def run(
    root: Path,
    loader: Any,
    *,
    seed: int,
    until: int = 0,
    before: Callable[[], None] = draw_nothing,
    after: Callable[[int], None] = lambda step: None,
    accumulation: int = 1,
    epochs: int = EPOCHS,
    **checkpoint: Any,
) -> list[str]:
    """A loop of one's own: ``before`` is called right before its first epoch, ``after`` behind each step; the losses."""
    torch.manual_seed(seed), random.seed(seed), np.random.seed(seed)
    trainer = make_loop(root, loader, **checkpoint)
    trainer.config.training = SimpleNamespace(gradient_accumulation_steps=accumulation)
    checkpointer = CheckpointerCallback(trainer)
    checkpointer.on_train_begin()
    before()
    losses: list[str] = []
    for epoch in range(trainer.start_epoch, epochs):
        trainer.state.epoch = epoch
        for batch in batches_of(loader, epoch):
            number = getattr(loader, "batches_consumed", BATCHES)
            mixed = batch + 0.1 * torch.rand_like(batch)  # a loop that draws with each batch, as mix-up does
            loss = trainer.model(mixed).square().mean() / accumulation
            loss.backward()
            if number % accumulation == 0 or number == BATCHES:
                trainer.optimizer.step(), trainer.optimizer.zero_grad()
                trainer.state.global_step += 1
                losses.append(loss.item().hex())
                checkpointer.on_step_end()
                after(trainer.state.global_step)
                if trainer.state.global_step == until:
                    return losses
    return losses


def batches_of(loader: Any, epoch: int) -> Iterator[torch.Tensor]:
    return loader.batches(epoch) if isinstance(loader, ResumableLoader) else iter(loader)


def verdict(root: Path) -> tuple[str, str]:
    """Of the random streams, in the certificate on disk."""
    (path,) = (root / "certificates").iterdir()
    (part,) = [part for part in read_certificate(path).parts if part.bucket == "rng_state"]
    return part.verdict, part.reason


@pytest.mark.parametrize("name", LOADERS)
def test_draws_before_the_first_batch_are_undone_within_an_epoch_and_others_raise_no_alarm(
    tmp_path: Path, name: str, caplog: pytest.LogCaptureFixture
) -> None:
    reference = run(tmp_path / "reference", LOADERS[name](), seed=1)
    assert len(set(reference)) == EPOCHS * BATCHES
    for step, before in ((2, draw_all), (7, draw_all), (2, draw_nothing), (BATCHES, draw_nothing)):
        root = tmp_path / f"from-{step}-{before.__name__}"
        source = str(tmp_path / "reference" / f"global_step_{step}")
        options: dict[str, Any] = {"restore_from": source, "on_mismatch": "error", "save_steps": 100}
        with caplog.at_level(logging.WARNING):
            resumed = run(root, LOADERS[name](), seed=2, until=step + 3, before=before, **options)
        assert resumed == reference[step : step + 3], f"resumed from step {step}"
        assert verdict(root) == ("exact", "")
        assert ("(numpy, python, torch_cpu): they were put back" in caplog.text) is (before is draw_all)
        assert ("random streams" in caplog.text) is (before is draw_all)
        caplog.clear()


def test_gradient_accumulation_raises_no_alarm(tmp_path: Path) -> None:
    reference = run(tmp_path / "run", wrapped_torch(), seed=1, accumulation=2)
    assert len(reference) == 6
    source = str(tmp_path / "run" / "global_step_2")
    options: dict[str, Any] = {"accumulation": 2, "restore_from": source, "on_mismatch": "error"}
    assert run(tmp_path / "run", wrapped_torch(), seed=2, **options) == reference[2:]
    assert verdict(tmp_path / "run") == ("exact", "")


@pytest.mark.parametrize("name", ["own", "torch, wrapped"])
def test_draws_before_an_epochs_first_batch_are_told_because_the_saved_run_may_have_drawn_too(
    tmp_path: Path, name: str
) -> None:
    reference = run(tmp_path / "reference", LOADERS[name](), seed=1)
    source = str(tmp_path / "reference" / f"global_step_{BATCHES}")
    options: dict[str, Any] = {"seed": 2, "before": draw_torch, "restore_from": source}
    resumed = run(tmp_path / "told", LOADERS[name](), **options)
    # The claim is true of this loop.
    assert resumed != reference[BATCHES:]
    word, reason = verdict(tmp_path / "told")
    assert word == "degraded"
    assert "an epoch's first batch" in reason
    assert "(torch_cpu)" in reason
    before = sorted(path.name for path in (tmp_path / "told").iterdir())
    with pytest.raises(CheckpointMismatchError, match=r"rng_state: the random streams moved .*an epoch's first batch"):
        run(tmp_path / "told", LOADERS[name](), on_mismatch="error", **options)
    assert sorted(path.name for path in (tmp_path / "told").iterdir()) == before


def test_without_this_packages_loader_the_streams_are_compared_at_the_first_forward_pass(tmp_path: Path) -> None:
    options: dict[str, Any] = {"seed": 2, "until": 4, "restore_from": str(tmp_path / "run" / "global_step_2")}
    run(tmp_path / "run", bare_nodes(noisy=False), seed=1, until=4)
    # The loop draws with its batch, before the forward pass: nobody sees who did.
    run(tmp_path / "run", bare_nodes(noisy=False), **options)
    word, reason = verdict(tmp_path / "run")
    assert word == "degraded"
    assert "the first forward pass" in reason
    assert "make hyper_resume.ResumableLoader(Loader(...)) the train_dataloader" in reason
    with pytest.raises(CheckpointMismatchError, match="ResumableLoader"):
        run(tmp_path / "run", bare_nodes(noisy=False), on_mismatch="error", **options)
    reference = run(tmp_path / "wrapped", ResumableLoader(bare_nodes(noisy=False)), seed=1, until=4)
    options["restore_from"] = str(tmp_path / "wrapped" / "global_step_2")
    wrapped = ResumableLoader(bare_nodes(noisy=False))
    assert run(tmp_path / "wrapped", wrapped, on_mismatch="error", **options) == reference[2:]


def test_the_first_forward_pass_is_that_of_a_training_and_is_observed_once(tmp_path: Path) -> None:
    trainer = make_loop(tmp_path, [torch.zeros(1, 4)])
    streams = RestoredStreams(trainer)
    trainer.model.eval()
    trainer.model(torch.zeros(1, 4))
    torch.rand(1)
    trainer.model.train()
    trainer.model(torch.zeros(1, 4))
    torch.rand(1)
    assert "(torch_cpu)" in streams.reason()
    assert not trainer.model._forward_pre_hooks
    still = RestoredStreams(trainer)
    trainer.model(torch.zeros(1, 4))  # dropout draws behind the comparison
    assert still.reason() == ""


def test_where_no_step_follows_a_restore_nothing_of_it_stays_in_the_model(tmp_path: Path) -> None:
    callback = CheckpointerCallback(make_loop(tmp_path, [torch.zeros(1, 4)]))
    callback._certificate = OpenCertificate.__new__(OpenCertificate)
    callback._certificate._streams = RestoredStreams(callback.trainer)
    assert callback.trainer.model._forward_pre_hooks
    callback.on_exception()
    assert not callback.trainer.model._forward_pre_hooks


def test_a_second_training_of_one_callback_is_not_blamed_for_the_order_of_the_first(
    caplog: pytest.LogCaptureFixture,
) -> None:
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))])
    scheduler = torch.optim.lr_scheduler.ConstantLR(optimizer)
    order = ScheduleOrder(SimpleNamespace(optimizer=optimizer, lr_scheduler=scheduler))
    order.begin()
    order.after_step(1, is_saved=True)
    order.begin()
    scheduler.load_state_dict({**scheduler.state_dict(), "last_epoch": 5})
    optimizer.step()
    assert "stepped after on_step_end" not in caplog.text
    assert len(optimizer._optimizer_step_pre_hooks) == 1


def test_a_loop_that_reads_something_else_is_told(tmp_path: Path) -> None:
    streams = RestoredStreams(make_loop(tmp_path, wrapped_torch()))
    torch.rand(1)
    assert "no batch of train_dataloader was read" in streams.reason()
    assert RestoredStreams(make_loop(tmp_path, wrapped_torch())).reason() == ""


# ---- draws behind a save


@pytest.mark.parametrize("name", ["own", "torch, wrapped", "torch, 2 workers, wrapped"])
@pytest.mark.parametrize("at_edge", [False, True], ids=["within an epoch", "at its edge"])
def test_draws_between_a_save_and_the_next_batch_are_named_by_the_next_save_at_such_a_place(
    tmp_path: Path, name: str, at_edge: bool, caplog: pytest.LogCaptureFixture
) -> None:
    def after(step: int) -> None:
        """An evaluation behind each step, or only behind each epoch."""
        if not at_edge or step % BATCHES == 0:
            torch.rand(1)

    with caplog.at_level(logging.WARNING):
        reference = run(tmp_path / "run", LOADERS[name](), seed=1, epochs=3, after=after)
    first = BATCHES if at_edge else 1
    assert caplog.text.count("random numbers were drawn between") == (1 if at_edge else 2)
    assert f"the save of global_step {first} and the next batch (torch_cpu)" in caplog.text
    options: dict[str, Any] = {"seed": 2, "epochs": 3, "after": after}
    for step in (2 * first, 2 * first + 1):
        root = tmp_path / f"from-{step}"
        options["restore_from"] = str(tmp_path / "run" / f"global_step_{step}")
        resumed = run(root, LOADERS[name](), **options)
        if at_edge and step % BATCHES:
            # A save within an epoch is not affected.
            assert resumed == reference[step:]
            assert verdict(root) == ("exact", "")
            continue
        assert resumed != reference[step:]
        reason = "moves and is not saved: trainer.rng_state.torch_cpu (drawn from after the save)"
        assert verdict(root) == ("degraded", reason)


def test_an_evaluation_of_the_trainer_at_an_epochs_end_is_not_named(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    config = run_config(tmp_path, save_epochs=0, save_steps=1, training={"num_train_epochs": 3})
    with caplog.at_level(logging.WARNING):
        make_trainer(config, callbacks=[DrawsAtEpochEnd]).train()
    assert "random numbers were drawn" not in caplog.text


# ---- the trainer


class DrawsLast(Callback):
    """Added behind the checkpointer: draws after its restore."""

    def on_train_begin(self, state: Any = None, **kwargs: Any) -> None:
        draw_all()


@pytest.mark.parametrize("prefetch", [False, True])
def test_the_trainer_undoes_what_a_later_callback_draws(tmp_path: Path, prefetch: bool) -> None:
    def train(seed: int, *, draws: bool, **checkpoint: Any) -> Any:
        config = run_config(tmp_path, data={"use_background_prefetcher": prefetch}, save_epochs=0, **checkpoint)
        trainer = make_trainer(config)
        torch.manual_seed(seed)
        if draws:
            trainer.callbacks.append(DrawsLast(trainer))
        trainer.train()
        return records_of(trainer)

    reference = train(1, draws=False, save_steps=1)
    source = str(tmp_path / "global_step_2")
    resumed = train(2, draws=True, restore_from=source, on_mismatch="error", save_steps=1)
    assert resumed == reference[2:]
    assert verdict(tmp_path) == ("exact", "")


class DrawsAtEpochEnd(Callback):
    """An evaluation that draws, before the checkpointer's own hook."""

    def on_epoch_end(self, state: Any = None, **kwargs: Any) -> None:
        draw_all()


def test_an_epochs_end_that_is_made_up_for_raises_no_alarm(tmp_path: Path) -> None:
    def train(**checkpoint: Any) -> Any:
        config = run_config(tmp_path, save_epochs=0, training={"num_train_epochs": 2}, **checkpoint)
        trainer = make_trainer(config, callbacks=[DrawsAtEpochEnd])
        trainer.train()
        return trainer, records_of(trainer)

    trainer, reference = train(save_steps=1)
    edge = len(trainer.train_dataloader)
    assert len(reference) == 2 * edge
    _, resumed = train(restore_from=str(tmp_path / f"global_step_{edge}"), on_mismatch="error", save_steps=1)
    assert resumed == reference[edge:]
    assert verdict(tmp_path) == ("exact", "")


# ---- several ranks


def _one_rank_draws(folder: Path) -> str:
    """On each rank; what the second start raised."""
    loader: Callable[[], Any] = lambda: ResumableLoader(own(dp_rank=dist.get_rank(), dp_world_size=2))  # noqa: E731
    loop: dict[str, Any] = {"seed": 1, "until": 3, "save_steps": 1}
    run(folder, loader(), **loop)
    before = draw_torch if dist.get_rank() == 1 else draw_nothing
    options = {**loop, "until": 5, "before": before, "restore_from": "LATEST", "on_mismatch": "error"}
    try:
        run(folder, loader(), **options)
    except CheckpointMismatchError as error:
        return str(error)
    return "trained"


def test_every_rank_refuses_what_one_rank_finds(tmp_path: Path) -> None:
    first, second = run_ranks(_one_rank_draws, 2, tmp_path)
    assert first == second
    assert "rng_state: the random streams moved" in first
    (path,) = (tmp_path / "certificates").iterdir()
    parts = [part for part in read_certificate(path).parts if part.bucket == "rng_state"]
    assert [part.verdict for part in parts] == ["exact", "degraded"]
    assert sorted(path.name for path in tmp_path.iterdir() if path.name.startswith("global_step")) == [
        f"global_step_{step}" for step in (1, 2, 3)
    ]
