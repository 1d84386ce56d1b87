"""One record per step and rank, by which two runs are compared."""

from __future__ import annotations

import json
from typing import Any

from hyper_resume import collective
from hyper_resume.digest import digest_state
from hyper_resume.local_path import working_directory
from hyper_resume.state.model import collect_model
from hyper_resume.state.optimizer import collect_optimizers, flatten_optimizers
from hyper_resume.state.rng import collect_rng
from hyper_resume.trainer.callbacks.base import Callback
from hyper_resume.trainer.payload import names_in
from hyper_resume.trainer.records import prepare_lines
from hyper_resume.trainer.state import TrainerState


class TrajectoryCallback(Callback):
    """Appends one JSON line per step to ``<dir>/trajectory_rank_{R}.jsonl``, floats unrounded.

    With ``digests`` each line also has digests of this rank's shard of the model, of the optimizer and of each random
    stream, taken after the step.
    """

    def __init__(self, trainer: Any, *, directory: str, digests: bool) -> None:
        """Open nothing yet: the first record creates directory and file, so a run that can't start leaves neither."""
        super().__init__(trainer)
        self._prepared = False
        self._path = working_directory() / directory / f"trajectory_rank_{collective.rank()}.jsonl"
        self._digests = digests

    def on_step_end(self, state: TrainerState | None = None, **kwargs: Any) -> None:
        """Append the finished step's record with one write."""
        current = self.current_state(state)
        record: dict[str, Any] = {
            "global_step": current.global_step,
            "epoch": current.epoch,
            "batch_index": current.batch_index,
            "loss": current.loss,
            "lr": current.lrs[0],
            "group_lrs": current.lrs,
            "grad_norm": current.grad_norm,
            "sample_ids": current.sample_ids,
            "seconds": current.seconds,
        }
        if self._digests:
            record["digests"] = self._digest()
        if not self._prepared:
            prepare_lines(self._path)
            self._prepared = True
        with self._path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(record) + "\n")

    def _digest(self) -> dict[str, Any]:
        trainer = self.trainer
        optimizers = collect_optimizers(flatten_optimizers(trainer.optimizer), names_in(trainer))
        streams = collect_rng(trainer.device.type)
        return {
            "model": digest_state(collect_model(trainer.model)),
            "optimizer": digest_state({index: _without_lr(part) for index, part in optimizers.items()}),
            "rng": {name: None if value is None else digest_state(value) for name, value in streams.items()},
        }


def _without_lr(part: dict[str, Any]) -> dict[str, Any]:
    """Leave each group's lr out: it belongs to the scheduler and has its own column."""
    groups = [{key: value for key, value in group.items() if key != "lr"} for group in part["param_groups"]]
    return {**part, "param_groups": groups}
