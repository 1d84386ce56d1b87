"""This library as a user calls it: a checkpointer, a root directory, one step directory after the other."""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from typing import Any, Literal

import torch.distributed as dist

from benchmarks.contenders import library_internals
from benchmarks.contenders.states import State
from hyper_resume.checkpoint import CheckpointerBase, build_checkpointer

SAVE = "hyper_resume save"
SAVE_AGAIN = "hyper_resume save, layout unchanged"
LOAD = "hyper_resume load"
LOAD_SIZES = "hyper_resume load, verify=size"
ASYNC = "hyper_resume async save"


class Ours:
    """Saves to and loads from step directories below ``root``. Each save is a new step; only the newest is kept."""

    def __init__(self, root: Path, *, verify: Literal["digest", "size"] = "digest") -> None:
        """Make the checkpointer. Nothing is written yet."""
        self._root = root
        self._verify = verify
        self._step = 0
        self._checkpointer = self._make()

    def _make(self) -> CheckpointerBase:
        return build_checkpointer("dcp", verify=self._verify)

    def save(self, state: State) -> None:
        """Save, with fsync and digests, which can't be turned off."""
        self._save(state)

    def save_async(self, state: State) -> None:
        """Return once the state is copied."""
        self._save(state, save_async=True)

    def wait(self) -> None:
        """Wait until the save is durable."""
        self._checkpointer.maybe_wait_for_async_save()

    def forget_step(self) -> None:
        """Delete the newest step directory, and write all dirty pages to the device."""
        if not dist.is_initialized() or dist.get_rank() == 0:
            shutil.rmtree(self.newest(), ignore_errors=True)
            os.sync()

    def forget_everything(self) -> None:
        """Forget the newest step and the plans, so that the next save is like the first one of a process."""
        self.forget_step()
        self._checkpointer = self._make()
        library_internals.forget_plans()

    def load(self, target: State) -> State:
        """Load the newest step directory into ``target``."""
        self._checkpointer.load(str(self.newest()), {"model": target})
        return target

    def newest(self) -> Path:
        """The newest step directory."""
        return self._root / f"global_step_{self._step}"

    def other_files(self) -> list[int]:
        """Sizes of all files of the newest step directory but the largest: what a save writes in addition to the tensors."""
        files: list[int] = sorted(path.stat().st_size for path in self.newest().rglob("*") if path.is_file())
        return files[:-1]

    def _save(self, state: State, **how: Any) -> None:
        self._step += 1
        self._checkpointer.save(str(self.newest()), {"model": state}, global_step=self._step, **how)
