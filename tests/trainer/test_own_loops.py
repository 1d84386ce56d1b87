"""The README's loop, in processes that end at once in the middle of it, and the same loop on two DDP and four FSDP2 ranks."""

from __future__ import annotations

import os
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset, DistributedSampler
from torchdata.stateful_dataloader import StatefulDataLoader

from hyper_resume import CheckpointingConfig, PreemptibleCheckpointer, ResumableLoader, TrainerState
from hyper_resume.data import DataLoader as OwnLoader
from tests.docs.markdown import ROOT, blocks
from tests.ranks import run_ranks
from tests.warm_commands import run_module

ENVIRONMENT = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
DIED, EPOCHS = 9, 2
PROLOGUE = """\
import os, sys
SEED, STOP, HOW = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3]
"""
STEP = """\
        print("step", trainer.state.global_step, loss.item().hex(), flush=True)
        if trainer.state.global_step == STOP and HOW == "exit":
            os._exit(9)
"""
EPILOGUE = """\
print("end", *(p.detach().double().sum().item().hex() for p in model.parameters()), flush=True)
"""


def _program() -> str:
    """The README's loop, which also prints each step's loss, and ends, or signals itself, at a step."""
    (text,) = [block.text for block in blocks(ROOT / "README.md", "python")]
    changes = (
        (r"^(model = )", r"torch.manual_seed(SEED)\n\1"),
        (r"^        model\(batch\)(.*)\.backward\(\)$", r"        loss = model(batch)\1\n        loss.backward()"),
        (r"^(        trainer.state.global_step \+= 1)$", r"\1\n        if HOW == 'signal': signal_at(trainer)"),
        (r"^(        checkpointer.on_step_end\(\).*)$", r"\1\n" + STEP.rstrip("\n")),
    )
    for pattern, replacement in changes:
        text, count = re.subn(pattern, replacement, text, flags=re.M)
        assert count == 1, pattern
    signal = "def signal_at(trainer):\n    if trainer.state.global_step == STOP: os.kill(os.getpid(), 15)\n"
    return PROLOGUE + signal + text + "\n" + EPILOGUE


def _run(folder: Path, seed: int, stop: int = 0, how: str = "exit") -> tuple[int, list[str], str]:
    """Exit code, what was printed, and standard error of one start of the program."""
    done = run_module("loop", str(seed), str(stop), how, cwd=folder, environment=ENVIRONMENT, timeout_seconds=100)
    return done.returncode, done.stdout.splitlines(), done.stderr


def _folder(parent: Path, name: str) -> Path:
    folder = parent / name
    folder.mkdir()
    (folder / "loop.py").write_text(_program())
    return folder


def test_the_readmes_loop_ends_as_if_it_had_never_been_stopped(tmp_path: Path) -> None:
    code, reference, err = _run(_folder(tmp_path, "reference"), seed=1)
    assert code == 0, err
    assert len(reference) == 61
    folder = _folder(tmp_path, "stopped")
    # In the middle of an epoch at a save and behind one, at an epoch's edge, twice in one epoch; by a signal, which saves.
    for seed, (stop, first, how) in enumerate(
        [(10, 1, "exit"), (17, 11, "exit"), (20, 11, "exit"), (33, 21, "signal"), (38, 34, "exit"), (0, 34, "exit")], 1
    ):
        code, printed, err = _run(folder, seed=seed, stop=stop, how=how)
        last = {"signal": stop - 1, "exit": stop or 61}[how]
        assert printed == reference[first - 1 : last], f"stopped at step {stop}"
        assert code == (0 if not stop else 1 if how == "signal" else DIED), err
        assert ("PreemptedError" in err) is (how == "signal")


# ---- several ranks


class Noisy(Dataset[torch.Tensor]):
    """Rows with their index and noise from the stream of whoever reads them."""

    def __len__(self) -> int:
        return 24

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.full((8,), float(index)) + torch.rand(8)


def _loader(kind: str, workers: int) -> Any:
    ranks = dist.get_world_size()
    if kind == "own":
        return OwnLoader(
            Noisy(), batch_size=2, dp_world_size=ranks, dp_rank=dist.get_rank(), seed=3, num_workers=workers
        )
    make = {"torch": DataLoader, "stateful": StatefulDataLoader}[kind]
    sampler = DistributedSampler(Noisy(), seed=3)
    # A rank of the tests starts processes by a server otherwise, which imports for seconds.
    context = "fork" if workers else None
    return make(Noisy(), batch_size=2, sampler=sampler, num_workers=workers, multiprocessing_context=context)


def _train(folder: Path, wrapper: str, kind: str, workers: int, seed: int, stop: int) -> list[Any]:
    """On each rank: the README's loop to step ``stop``, then gone without a word; the losses, batches and weights."""
    torch.manual_seed(seed + 100 * dist.get_rank())
    model: Any = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Dropout(0.1), torch.nn.Linear(8, 1))
    for parameter in model.parameters():
        # DDP broadcasts the weights, FSDP2 does not; the dropout of each rank is its own.
        dist.broadcast(parameter.detach(), 0)
    model = DistributedDataParallel(model) if wrapper == "ddp" else fully_shard(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    loader = ResumableLoader(_loader(kind, workers))
    checkpoint = CheckpointingConfig(
        checkpoint_dir=str(folder), save_steps=2, save_epochs=1, restore_from="LATEST", on_mismatch="error"
    )
    trainer = SimpleNamespace(
        config=SimpleNamespace(checkpoint=checkpoint),
        model=model,
        optimizer=optimizer,
        lr_scheduler=torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=60),
        train_dataloader=loader,
        state=TrainerState(),
        train_steps=60,
        start_epoch=0,
        start_step=0,
    )
    checkpointer = PreemptibleCheckpointer(trainer)
    checkpointer.on_train_begin()
    found: list[Any] = []
    for epoch in range(trainer.start_epoch, EPOCHS):
        trainer.state.epoch = epoch
        for batch in loader.batches(epoch):
            loss = model(batch).square().mean()
            loss.backward()
            optimizer.step(), trainer.lr_scheduler.step(), optimizer.zero_grad()
            trainer.state.global_step += 1
            checkpointer.on_step_end()
            weights = [_local(parameter).double().sum().item() for parameter in model.parameters()]
            found.append((trainer.state.global_step, loss.item().hex(), batch.sum().item(), loader.sample_ids, weights))
            if trainer.state.global_step == stop:
                return found
        checkpointer.on_epoch_end()
    checkpointer.on_train_end()
    return found


def _local(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().to_local() if isinstance(tensor, DTensor) else tensor.detach()


@pytest.mark.parametrize(
    ("wrapper", "ranks", "kind", "workers"),
    [
        ("ddp", 2, "torch", 0),
        ("ddp", 2, "torch", 2),
        ("ddp", 2, "stateful", 0),
        ("fsdp2", 4, "torch", 0),
        ("fsdp2", 4, "own", 0),
    ],
)
def test_on_several_ranks_it_ends_so_too(tmp_path: Path, wrapper: str, ranks: int, kind: str, workers: int) -> None:
    steps = 24 // (2 * ranks)

    def run(name: str, seed: int, stop: int = 0) -> list[list[Any]]:
        return run_ranks(_train, ranks, tmp_path / name, wrapper, kind, workers, seed, stop, timeout_seconds=100)

    reference = run("reference", 1)
    assert [len(of_rank) for of_rank in reference] == [EPOCHS * steps] * ranks
    # Stopped at a save within an epoch, right behind the last batch of one (its end was not saved), within the next; finished.
    first = 0
    for seed, stop in enumerate((2, steps, steps + 2, 0), 1):
        found = run("stopped", seed, stop)
        assert found == [of_rank[first : stop or None] for of_rank in reference], f"stopped at step {stop}"
        first = stop // 2 * 2
