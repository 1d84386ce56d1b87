"""The README's loop on each of several ranks: with any loader, the model wrapped, ended behind a step without a word.

Only the set-up is replaced (data, loader, wrapper, seed); the loop itself is the README's text, with records of what it does.
"""

from __future__ import annotations

import multiprocessing
import os
import random
import re
import signal
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
import torchdata.nodes
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset, DistributedSampler, IterableDataset, get_worker_info
from torchdata.stateful_dataloader import StatefulDataLoader

from hyper_resume.data import DataLoader as OwnLoader
from hyper_resume.state.certificate import read_certificate
from tests.docs.markdown import ROOT, blocks
from tests.ranks import RankFailure, run_ranks

DIED, STEPS_PER_EPOCH, EPOCHS, BATCH_SIZE = 9, 4, 3, 4
STEPS = STEPS_PER_EPOCH * EPOCHS
WRAPPERS: Mapping[int, str] = {1: "alone", 2: "DDP", 4: "FSDP2"}


def row(index: int) -> torch.Tensor:
    """A row that tells its index, and noise from all three streams of whoever reads it."""
    return torch.cat([torch.tensor([float(index)]), torch.rand(6), torch.tensor([random.random() + np.random.rand()])])


class Noisy(Dataset[torch.Tensor]):
    def __init__(self, length: int) -> None:
        self.length = length

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> torch.Tensor:
        return row(index)


class Stream(IterableDataset[torch.Tensor]):
    """The share of one rank, split over its workers."""

    def __init__(self, length: int, rank: int, ranks: int) -> None:
        self.length, self.rank, self.ranks = length, rank, ranks

    def __iter__(self) -> Iterator[torch.Tensor]:
        info = get_worker_info()
        worker, workers = (0, 1) if info is None else (info.id, info.num_workers)
        carried = torch.zeros(8)
        for index in range(self.rank, self.length, self.ranks)[worker::workers]:
            # What is drawn for one row is in the later ones, as with a buffer of rows that is shuffled.
            carried[1:] += torch.rand(7)
            yield row(index) + carried


def draw_in_worker(worker: int) -> None:
    """A worker_init_fn that seeds and draws."""
    random.seed(worker)
    torch.rand(3)


# ---- loaders of one rank


@dataclass(frozen=True)
class Share:
    """This rank's share of the data."""

    data: Noisy
    rank: int
    ranks: int


def _torch(share: Share, kind: Any = DataLoader, workers: int = 0, **options: Any) -> Any:
    order: dict[str, Any] = {"shuffle": True}
    if share.ranks > 1:
        order = {"sampler": DistributedSampler(share.data, seed=3)}
    return kind(share.data, batch_size=BATCH_SIZE, num_workers=workers, **order, **options)


def _own(share: Share, workers: int = 0) -> Any:
    return OwnLoader(
        share.data,
        batch_size=BATCH_SIZE,
        seed=3,
        dp_rank=share.rank,
        dp_world_size=share.ranks,
        num_workers=workers,
    )


def _iterable(share: Share, workers: int = 0, **options: Any) -> Any:
    stream = Stream(len(share.data), share.rank, share.ranks)
    return DataLoader(stream, batch_size=BATCH_SIZE, num_workers=workers, **options)


def _nodes(share: Share) -> Any:
    sampler = DistributedSampler(share.data, num_replicas=share.ranks, rank=share.rank, seed=3)
    rows = torchdata.nodes.Mapper(torchdata.nodes.SamplerWrapper(sampler), share.data.__getitem__)
    batches = torchdata.nodes.Batcher(rows, batch_size=BATCH_SIZE)
    return torchdata.nodes.Loader(torchdata.nodes.Mapper(batches, torch.stack))


def _accelerate(share: Share, workers: int = 0, **options: Any) -> Any:
    import accelerate  # here, because only some loops need it

    configuration = accelerate.utils.DataLoaderConfiguration(**options)
    accelerator = accelerate.Accelerator(cpu=True, dataloader_config=configuration)
    return accelerator.prepare(DataLoader(share.data, batch_size=BATCH_SIZE, shuffle=True, num_workers=workers))


@dataclass(frozen=True)
class Loader:
    """How it is made; ``doubt`` is what the certificate must say of it where a resume can't be exact."""

    make: Callable[[Share], Any]
    doubt: str = ""


SHARED_STREAM = "is drawn from by the data loader and by training in turn"
LOADERS: Mapping[str, Loader] = {
    "torch": Loader(_torch),
    "torch, 2 workers": Loader(lambda share: _torch(share, workers=2)),
    "StatefulDataLoader": Loader(lambda share: _torch(share, StatefulDataLoader)),
    "StatefulDataLoader, 2 workers": Loader(lambda share: _torch(share, StatefulDataLoader, 2)),
    "own": Loader(_own),
    "own, 2 workers": Loader(lambda share: _own(share, 2)),
    "torch, persistent workers": Loader(lambda share: _torch(share, workers=2, persistent_workers=True)),
    "torch, worker_init_fn": Loader(lambda share: _torch(share, workers=2, worker_init_fn=draw_in_worker)),
    "torch, both": Loader(
        lambda share: _torch(share, workers=2, persistent_workers=True, worker_init_fn=draw_in_worker)
    ),
    "iterable data": Loader(_iterable, doubt=SHARED_STREAM),
    "iterable data, 2 workers": Loader(lambda share: _iterable(share, 2)),
    "iterable data, persistent workers": Loader(
        lambda share: _iterable(share, 2, persistent_workers=True), doubt="persistent workers that read iterable data"
    ),
    "nodes": Loader(_nodes),
    "accelerate": Loader(_accelerate),
    "accelerate, 2 workers": Loader(lambda share: _accelerate(share, 2)),
    "accelerate, seedable": Loader(lambda share: _accelerate(share, use_seedable_sampler=True)),
    "accelerate, dispatched": Loader(lambda share: _accelerate(share, dispatch_batches=True), doubt=SHARED_STREAM),
}


# ---- the program


def program() -> str:
    """The README's block with its set-up replaced and records added; each change applies exactly once."""
    (text,) = [block.text for block in blocks(ROOT / "README.md", "python")]
    changes = (
        (r"^(model = .*)$", r"seed_everything()\n\1\nmodel = wrap(model)"),
        (r"^dataset = .*$", "dataset = make_dataset()"),
        (r"ResumableLoader\(torch\.utils\.data\.DataLoader\(.*\)\)$", "ResumableLoader(make_loader(dataset))"),
        (r"save_steps=10,", "save_steps=1, checkpoint_dir=FOLDER,"),
        (r"^        model\(batch\)(.*)\.backward\(\)$", r"        loss = model(batch)\1\n        loss.backward()"),
        (r"^(        checkpointer.on_step_end\(\).*)$", r"\1\n        record(trainer, loss, batch)"),
    )
    for pattern, replacement in changes:
        text, count = re.subn(pattern, replacement, text, flags=re.M)
        assert count == 1, pattern
    return text


def start(folder: Path, name: str, ranks: int, *, seed: int, stop: int = 0) -> list[list[str]]:
    """Run the program on each rank, from LATEST in ``folder``; all end by ``os._exit`` behind step ``stop``, if it is given.

    Returns:
        the records of each rank, one text a step.
    """
    folder.mkdir(exist_ok=True)
    ended = run_ranks(_rank, ranks, folder, name, seed, stop, timeout_seconds=100, expect_errors=stop > 0)
    texts = [str(one) if isinstance(one, RankFailure) else "finished" for one in ended]
    expected = [f"rank {rank} died without a word, exit code {DIED}" if stop else "finished" for rank in range(ranks)]
    assert texts == expected
    return [_records(folder, seed, rank).read_text().splitlines() for rank in range(ranks)]


def train_dataloader_reasons(folder: Path) -> list[list[str]]:
    """For each certificate of a restore, what it says of the data loader on each rank, "" being exact; all else is exact."""
    found = []
    for path in sorted((folder / "checkpoints" / "certificates").iterdir()):
        parts = [part for part in read_certificate(path).parts if part.bucket != "stateful"]
        others = [part for part in parts if part.bucket != "train_dataloader" and part.verdict != "exact"]
        assert not others
        found.append([part.reason for part in parts if part.bucket == "train_dataloader"])
    return found


def _records(folder: Path, seed: int, rank: int) -> Path:
    return folder / f"records-{seed}-{rank}.txt"


def _rank(folder: Path, name: str, seed: int, stop: int) -> None:
    rank, ranks = dist.get_rank(), dist.get_world_size()
    if ranks == 1:
        # As a program that nobody launches in a group.
        dist.destroy_process_group()
        for variable in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE"):
            os.environ.pop(variable)
    multiprocessing.set_start_method("fork", force=True)
    records = _records(folder, seed, rank).open("w", buffering=1)

    def record(trainer: Any, loss: torch.Tensor, batch: torch.Tensor) -> None:
        weights = [_local(value).double().sum().item().hex() for value in trainer.model.parameters()]
        ids = [int(value) for value in batch[:, 0]]
        noise = batch[:, 1:].double().sum().item().hex()
        records.write(f"{trainer.state.global_step} {loss.item().hex()} {ids} {noise} {weights}\n")
        if trainer.state.global_step == stop:
            _die(folder, seed, rank, ranks)

    names: dict[str, Any] = {
        "FOLDER": str(folder / "checkpoints"),
        "seed_everything": lambda: _seed(seed, rank),
        "wrap": _wrapped,
        "make_dataset": lambda: Noisy(STEPS_PER_EPOCH * BATCH_SIZE * ranks),
        "make_loader": lambda data: LOADERS[name].make(Share(data, rank, ranks)),
        "record": record,
    }
    exec(compile(program(), "README.md", "exec"), names)


def _seed(seed: int, rank: int) -> None:
    torch.manual_seed(seed + 100 * rank)
    random.seed(seed + 100 * rank)
    np.random.seed(seed + 100 * rank)


def _wrapped(model: torch.nn.Module) -> Any:
    if not dist.is_initialized():
        return model
    for parameter in model.parameters():
        # DDP broadcasts the weights, FSDP2 does not; the dropout of each rank is its own.
        dist.broadcast(parameter.detach(), 0)
    return DistributedDataParallel(model) if WRAPPERS[dist.get_world_size()] == "DDP" else fully_shard(model)


def _local(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().to_local() if isinstance(tensor, DTensor) else tensor.detach()


def _die(folder: Path, seed: int, rank: int, ranks: int) -> None:
    """End like a node that loses its power: all ranks at once, and their workers. Nothing is flushed, closed or told."""
    marks: Sequence[Path] = [folder / f"dying-{seed}-{one}" for one in range(ranks)]
    marks[rank].touch()
    limit = time.monotonic() + 30
    while not all(mark.exists() for mark in marks) and time.monotonic() < limit:
        time.sleep(0.002)  # no collective: a peer that is gone would fail it on the others
    # torch raises in this process when a worker dies.
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    for worker in multiprocessing.active_children():
        worker.kill()
    os._exit(DIED)
