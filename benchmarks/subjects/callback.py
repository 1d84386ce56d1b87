"""What the callback adds to a save: the search for state that is not saved, the description of the run, the trial at the start.

The same training is saved three times: by the callback, by the callback with ``checkpoint.check_coverage: false``, and as the
bare payload by the storage backend. Each save follows a step of the optimizer, so everything has moved.
"""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from torch import nn

from benchmarks.contenders import ours
from benchmarks.protocol import GB, Benchmark, BenchmarkError, Contender, Context, Figure, Point, Scenario, size_points
from hyper_resume import CheckpointerCallback, CheckpointingConfig, TrainerState
from hyper_resume.data import DataLoader

STORAGE = "storage backend, model and moments only"
NO_SEARCH = "callback, check_coverage: false"
CALLBACK = "callback"
START = "start of a run by the callback"
_LAYERS = 16
# The model and AdamW's two moments, as float32.
_BYTES_PER_PARAMETER = 3 * 4


class _Training:
    """A training that is saved by the callback at each of its steps."""

    def __init__(self, root: Path, size_bytes: float, *, check_coverage: bool) -> None:
        width = int((size_bytes / _BYTES_PER_PARAMETER / _LAYERS) ** 0.5)
        torch.manual_seed(1)
        self.model = nn.Sequential(*(nn.Linear(width, width) for _ in range(_LAYERS)))
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-3)
        self.root = root
        for parameter in self.model.parameters():
            parameter.grad = torch.full_like(parameter, 1e-3)
        self._config = CheckpointingConfig(
            checkpoint_dir=str(root), save_steps=1, save_epochs=0, restore_from=None, check_coverage=check_coverage
        )
        self._state = TrainerState()
        self._callback: CheckpointerCallback | None = None

    def start(self) -> None:
        """Begin a run: a new callback, and its ``on_train_begin``."""
        trainer = SimpleNamespace(
            config=SimpleNamespace(checkpoint=self._config),
            model=self.model,
            optimizer=self.optimizer,
            lr_scheduler=torch.optim.lr_scheduler.ConstantLR(self.optimizer),
            train_dataloader=DataLoader(range(64), batch_size=4, seed=1),
            state=self._state,
            train_steps=1_000_000,
            start_epoch=0,
            start_step=0,
        )
        self._callback = CheckpointerCallback(trainer)
        self._callback.on_train_begin()

    def begin(self) -> None:
        """Begin a run and save once, so that the next save is one of many."""
        self.start()
        self.step()
        self.save()

    def step(self) -> None:
        """Delete the step directory of the last save, and move everything that the next one saves."""
        self.forget()
        self.optimizer.step()
        self._state.global_step += 1

    def save(self) -> None:
        """Save by the callback's hook."""
        assert self._callback is not None
        self._callback.on_step_end()

    def forget(self) -> None:
        """Delete the newest step directory, and write all dirty pages to the device."""
        shutil.rmtree(self.newest(), ignore_errors=True)
        os.sync()

    def newest(self) -> Path:
        """The step directory of the last save."""
        return self.root / f"global_step_{self._state.global_step}"

    def state(self) -> dict[str, Any]:
        """The tensors of the model and of AdamW."""
        return {"model": self.model.state_dict(), "optimizer": self.optimizer.state_dict()["state"]}


def build(point: Point, context: Context) -> Scenario:
    """Two trainings with a callback each, a third one for the start, and a backend that saves the tensors of the first."""
    size_bytes = point.value * GB
    searched = _Training(context.folder / "searched", size_bytes, check_coverage=True)
    plain = _Training(context.folder / "plain", size_bytes, check_coverage=False)
    library = ours.Ours(context.folder / "storage")

    def check(training: _Training) -> None:
        if not (training.newest() / "manifest.json").is_file():
            raise BenchmarkError(f"the callback did not save {training.newest().name}")

    def by_callback(name: str, training: _Training) -> Contender:
        return Contender(
            name=name,
            role="ours",
            prepare=training.begin,
            before=training.step,
            call=training.save,
            check=lambda _: check(training),
            stored=training.newest,
        )

    contenders = [
        Contender(
            name=STORAGE,
            role="limit",
            before=library.forget_step,
            call=lambda: library.save(searched.state()),
            stored=library.newest,
        ),
        by_callback(NO_SEARCH, plain),
        by_callback(CALLBACK, searched),
        _start(context.folder / "started", size_bytes),
    ]
    return Scenario(
        payload_bytes=sum(p.numel() for p in searched.model.parameters()) * _BYTES_PER_PARAMETER,
        contenders=contenders,
        figures=[
            Figure(
                text="save with the search for state that is not saved / without",
                above=(CALLBACK,),
                below=NO_SEARCH,
                relation="at most",
                bound=1.05,
            ),
            Figure(text="save by the callback / by the storage backend", above=(CALLBACK,), below=STORAGE),
            Figure(text="start of a run / save by the callback", above=(START,), below=CALLBACK),
        ],
    )


def _start(root: Path, size_bytes: float) -> Contender:
    training = _Training(root, size_bytes, check_coverage=True)
    return Contender(
        name=START,
        role="ours",
        before=lambda: shutil.rmtree(root, ignore_errors=True),
        call=training.start,
        note="the state is collected once and tried, the root is made and written to, and the run is described",
    )


BENCHMARK = Benchmark(name="callback", title="Save by the callback", points=size_points, build=build)
