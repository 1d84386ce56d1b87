"""What a step does when nothing is saved, restored or recorded, counted instead of timed.

Counted is what 8 steps more of one and the same training add, divided by 8: whatever a training does once falls out.
"""

from __future__ import annotations

import copy
import functools
import gc
import math
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

import hyper_resume
from hyper_resume.config import CheckpointingConfig, DataConfig, RunConfig, TrainingConfig
from hyper_resume.data import DataLoader
from hyper_resume.parallel import clip_grad_norm
from hyper_resume.trainer.base import BaseTrainer
from hyper_resume.trainer.callbacks import Callback, ProgressCallback
from tests.trainer.test_stateful_objects import ForeignLoader
from tests.trainer.tiny_training import VOCABULARY, Ids, MakeCallback, Net, at_step, make_trainer, run_config, train

STEPS = 8
SAMPLES = 60  # 20 batches of 3: a single epoch for all that is counted
PACKAGE = Path(hyper_resume.__file__).parent
PARAMETERS = len(list(Net().parameters()))
# A step enters some 25 functions of trainer and data loader, and one more frame for each parameter whose kind it looks at.
MOST_CALLS = 30 + PARAMETERS
# Of these, the ones that belong to training and to reading; no other part of the library has anything to do in a step.
AT_WORK = {"trainer", "data"}
FILES = {"posix", "nt", "io", "_io", "mmap", "fcntl", "_socket", "select"}
STREAM_READS = {"get_state", "getstate", "get_rng_state", "set_state", "setstate", "set_rng_state"}

Loop = Callable[[int], Any]


# ---- the two loops


def plain_loss(model: nn.Module, ids: torch.Tensor) -> torch.Tensor:
    return (model(ids) - ids / VOCABULARY).square().mean()


OFF = CheckpointingConfig(save_ckpt=False, restore_from=None)


def _trainer(
    steps: int, *callbacks: MakeCallback, checkpoint: CheckpointingConfig = OFF, **training: Any
) -> BaseTrainer:
    torch.manual_seed(1)
    model = Net()
    return BaseTrainer(
        RunConfig(
            training=TrainingConfig(**{"progress_bar": False, "max_steps": steps, **training}),
            data=DataConfig(batch_size=3),
            checkpoint=checkpoint,
        ),
        model=model,
        optimizer=torch.optim.AdamW(model.parameters(), lr=0.01),
        lr_scheduler=None,
        train_dataloader=DataLoader(Ids(SAMPLES), batch_size=3, seed=1),
        loss_function=plain_loss,
        callbacks=callbacks,
    )


def off(steps: int) -> nn.Module:
    trainer = _trainer(steps)
    trainer.train()
    return trainer.model


def bare(steps: int) -> nn.Module:
    torch.manual_seed(1)
    model = Net()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    model.train()
    for step, batch in enumerate(DataLoader(Ids(SAMPLES), batch_size=3, seed=1), start=1):
        loss = plain_loss(model, batch)
        loss.backward()
        norm = nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        float(loss.detach())
        float(norm)
        if step == steps:
            break
    return model


# ---- the counting


class Operations(TorchDispatchMode):
    """Counts what reaches torch's kernels, by name."""

    def __init__(self) -> None:
        super().__init__()
        self.counts: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.counts[str(func)] += 1
        return func(*args, **(kwargs or {}))


class Watched(np.random.MT19937):
    """NumPy's global stream while it is watched: the interpreter's profile does not see into NumPy."""

    reads = 0

    @property
    def state(self) -> Any:
        type(self).reads += 1
        return super().state

    @state.setter
    def state(self, value: Any) -> None:
        type(self).reads += 1
        np.random.MT19937.state.__set__(self, value)  # type: ignore[attr-defined]


# NumPy names the kind of a stream by its class, and no other kind can be saved.
Watched.__name__ = np.random.MT19937.__name__


@contextmanager
def _watched_numpy_stream() -> Iterator[None]:
    before = np.random.get_bit_generator()
    np.random.set_bit_generator(Watched(1))
    try:
        yield
    finally:
        np.random.set_bit_generator(before)


def _operations(loop: Loop, steps: int) -> Counter[str]:
    with Operations() as operations:
        loop(steps)
    return operations.counts


@functools.cache
def _part(file: str) -> str | None:
    """The part of the library that a source file belongs to."""
    path = Path(file)
    return path.relative_to(PACKAGE).parts[0].removesuffix(".py") if path.is_relative_to(PACKAGE) else None


def _calls(loop: Loop, steps: int) -> Counter[tuple[str, ...]]:
    """Every Python function and every builtin that is entered: by part of the library, by file, or by kind."""
    counts: Counter[tuple[str, ...]] = Counter()

    def note(frame: FrameType, event: str, value: Any) -> None:
        if event == "call":
            counts["python",] += 1
            part = _part(frame.f_code.co_filename)
            if part is not None:
                counts["library", part] += 1
                counts["function", f"{part}: {frame.f_code.co_qualname}"] += 1
        elif event == "c_call":
            home = {getattr(value, "__module__", None), type(getattr(value, "__self__", None)).__module__}
            if home & FILES:
                counts["file", value.__name__] += 1
            if value.__name__ in STREAM_READS:
                counts["stream", value.__name__] += 1

    Watched.reads = 0
    # A collection in the middle would enter finalizers, in one of the two runs.
    gc.collect()
    gc.disable()
    before = sys.getprofile()
    with _watched_numpy_stream():
        sys.setprofile(note)
        try:
            loop(steps)
        finally:
            sys.setprofile(before)
            gc.enable()
    counts["stream", "numpy"] = Watched.reads
    return counts


@functools.cache
def a_step(count: Callable[[Loop, int], Counter[Any]], loop: Loop) -> dict[Any, float]:
    """What a step adds to each count. Counted once for all tests: two equal counts in a row show that it repeats."""
    few, again = Counter[Any](), count(loop, STEPS)
    for _ in range(5):
        few, again = again, count(loop, STEPS)
        if few == again:
            break
    # The first trainings of a process import and cache.
    assert few == again, "two trainings of one length do not count alike"
    many = count(loop, 2 * STEPS)
    return {key: (many[key] - few[key]) / STEPS for key in {*few, *many} if many[key] != few[key]}


def _of(found: dict[Any, float], kind: str) -> dict[str, float]:
    return {key[1]: value for key, value in found.items() if key[0] == kind and len(key) > 1}


# ---- a step when off


def test_the_two_loops_end_in_the_same_bits() -> None:
    ends = [nn.utils.parameters_to_vector(loop(STEPS).parameters()) for loop in (off, bare)]
    start = nn.utils.parameters_to_vector(_trainer(STEPS).model.parameters())
    assert torch.equal(*ends)
    assert not torch.equal(ends[0], start)


def test_a_step_runs_the_torch_operations_of_the_bare_loop_and_no_other() -> None:
    found = a_step(_operations, off)
    assert found == a_step(_operations, bare)
    assert sum(found.values()) > 20


def test_a_step_touches_no_file_and_reads_no_random_stream() -> None:
    found = a_step(_calls, off)
    assert (_of(found, "file"), _of(found, "stream")) == ({}, {})


def test_a_step_enters_few_functions_of_the_library_and_of_training_and_reading_only() -> None:
    found = a_step(_calls, off)
    assert set(_of(found, "library")) == AT_WORK
    assert sum(_of(found, "library").values()) <= MOST_CALLS, _of(found, "function")


def test_a_step_enters_hardly_more_functions_than_the_bare_loop_wherever_they_are() -> None:
    added = a_step(_calls, off)["python",] - a_step(_calls, bare)["python",]
    assert added <= 20 + PARAMETERS


def test_a_run_that_was_restored_and_saves_nothing_makes_one_call_a_step_more(tmp_path: Path) -> None:
    _trainer(1, checkpoint=CheckpointingConfig(checkpoint_dir=str(tmp_path))).train()
    restoring = CheckpointingConfig(save_ckpt=False, restore_from=str(tmp_path / "global_step_1"))

    def restored(steps: int) -> None:
        trainer = _trainer(steps + 1, checkpoint=restoring)
        trainer.train()
        assert trainer.state.global_step == steps + 1

    plain, found = a_step(_calls, off), a_step(_calls, restored)
    assert (_of(found, "file"), _of(found, "stream")) == ({}, {})
    assert found["python",] - plain["python",] == 1
    assert a_step(_operations, restored) == a_step(_operations, off)


# ---- the counting would notice


def _with(work: Callable[[BaseTrainer], Any]) -> Loop:
    """The training with ``work`` after each step."""

    class Worker(Callback):
        def on_step_end(self, state: Any = None, **kwargs: Any) -> None:
            work(self.trainer)

    return lambda steps: _trainer(steps, Worker).train()


@pytest.mark.parametrize(
    ("work", "kind"),
    [
        (lambda trainer: Path("nowhere").exists(), "file"),
        (lambda trainer: torch.get_rng_state(), "stream"),
        (lambda trainer: np.random.get_state(), "stream"),
    ],
    ids=["a file is looked for", "torch's stream is read", "numpy's stream is read"],
)
def test_one_such_call_a_step_is_seen(work: Callable[[BaseTrainer], Any], kind: str) -> None:
    assert sum(_of(a_step(_calls, _with(work)), kind).values()) >= 1


def test_a_copy_of_the_weights_in_each_step_is_seen() -> None:
    found = a_step(_operations, _with(lambda trainer: copy.deepcopy(trainer.model.state_dict())))
    assert found != a_step(_operations, bare)


def test_a_position_that_is_noted_with_each_batch_is_seen() -> None:
    found = a_step(_calls, _with(lambda trainer: trainer.train_dataloader.state_dict()))
    assert found["python",] - a_step(_calls, bare)["python",] > 20 + PARAMETERS


# ---- what is left out is there when somebody asks


def test_a_callback_sees_the_same_positions_and_samples_whether_anything_is_saved(tmp_path: Path) -> None:
    for foreign in (False, True):
        seen: dict[bool, list[Any]] = {}
        for saving in (False, True):
            found = seen[saving] = []

            def ask(trainer: Any, found: list[Any] = found) -> None:
                iterator = trainer.data_iterator
                assert iterator.has_state
                position = iterator.state_dict()
                # A training that saves gives a foreign loader an exact position, with the loader's own in it.
                found.append((position.get("inner", position), list(iterator.sample_ids), trainer.state.sample_ids))

            loader = ForeignLoader(8) if foreign else None
            config = run_config(tmp_path / f"{foreign} {saving}", training={"num_train_epochs": 2}, save_ckpt=saving)
            train(config, loader=loader, callbacks=[at_step(step, ask) for step in range(1, 20)])
        assert seen[False] == seen[True]
        assert len({str(position) for position, *_ in seen[False]}) >= 3


def test_a_loader_without_a_state_has_none_to_report(tmp_path: Path) -> None:
    asked: list[bool] = []
    batches = [torch.tensor([1, 2]), torch.tensor([3])]
    ask = at_step(1, lambda trainer: asked.append(trainer.data_iterator.has_state))
    train(run_config(tmp_path, save_ckpt=False), loader=batches, callbacks=[ask])
    assert asked == [False]


@pytest.mark.parametrize("listens", [False, True])
def test_a_norm_that_clips_nothing_is_measured_for_those_who_look_at_it(listens: bool) -> None:
    trainer = _trainer(2, *([Callback] if listens else [ProgressCallback]), max_grad_norm=None)
    trainer.train()
    assert math.isnan(trainer.state.grad_norm) is not listens


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("max_norm", [0.1, 1e3])
def test_clipping_in_one_process_gives_the_bits_of_the_common_norm(dtype: torch.dtype, max_norm: float) -> None:
    generator = torch.Generator().manual_seed(3)
    for _ in range(50):
        grads = [torch.randn((7, size), generator=generator).to(dtype) for size in (1, 5, 64)]
        results = []
        for clip in (clip_grad_norm, nn.utils.clip_grad_norm_):
            parameters = [nn.Parameter(torch.zeros_like(grad)) for grad in grads]
            for parameter, grad in zip(parameters, grads, strict=True):
                parameter.grad = grad.clone()
            norm = clip(parameters, max_norm)
            results.append([norm, *(parameter.grad for parameter in parameters)])
        assert all(torch.equal(ours, torchs) for ours, torchs in zip(*results, strict=True))


def test_an_autocast_around_the_training_stays_switched_off_within(tmp_path: Path) -> None:
    seen: list[bool] = []

    def loss(model: nn.Module, ids: torch.Tensor) -> torch.Tensor:
        seen.append(torch.is_autocast_enabled("cpu"))
        return plain_loss(model, ids)

    trainer = make_trainer(run_config(tmp_path, training={"max_steps": 2}, save_ckpt=False), loss_function=loss)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        trainer.train()
    assert seen == [False, False]
