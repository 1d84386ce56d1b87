"""One rank of a leg that runs this library's program, ``hyper-resume train``, on a configuration file.

What runs is :func:`hyper_resume.cli.main`, with its own exit codes; the steps are recorded by its own trajectory callback.
"""

from __future__ import annotations

import dataclasses
import functools
import importlib
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from conformance.adapters.hyper_resume.event_reporter import EventReporter
from conformance.adapters.hyper_resume.instrumentation import AfterSaves, BeforeSaves, instrument_saves
from conformance.adapters.hyper_resume.lifecycle import is_under_torchrun, join_group, run_job
from conformance.plain_data.serial import to_plain
from conformance.running.adapter import Job
from conformance.running.probe import Probe
from hyper_resume import cli
from hyper_resume.config import RunConfig
from hyper_resume.config.load import resolve_config
from hyper_resume.errors import HyperResumeError
from hyper_resume.state.optimizer import flatten_optimizers
from hyper_resume.trainer import text_trainer
from hyper_resume.trainer.base import BaseTrainer
from hyper_resume.trainer.callbacks import CheckpointerCallback

_CHECKOUT = Path(__file__).resolve().parents[3]
# What the library and torch import at a first use.
_LATE_IMPORTS = (
    "torch.distributed.fsdp",
    "torch.distributed.tensor.parallel",
    "transformers.models.qwen3_moe.modeling_qwen3_moe",
    "transformers.models.qwen3.modeling_qwen3",
    "transformers.models.llama.modeling_llama",
)


def prepare() -> None:
    """Load now what is loaded at a first use, so that every fork has it. Computes nothing."""
    RunConfig()  # makes the validator of all blocks, a tenth of a second
    for name in _LATE_IMPORTS:
        importlib.import_module(name)
    optimizer = torch.optim.AdamW([torch.nn.Parameter(torch.zeros(1))])
    torch.optim.lr_scheduler.ConstantLR(optimizer)


def main(arguments: Sequence[str]) -> int:
    """Carry out the job; returns the exit code."""
    return run_job(train)


def train(probe: Probe, job: Job) -> int:
    """Train; returns the program's exit code."""
    if not is_under_torchrun():
        join_group(job)  # the program keeps an existing group
        if job.world_size == 1:
            os.environ.pop("RANK", None)  # so the program sees a single process
    leg = ProgramLeg(probe, job)
    path = str(_CHECKOUT / str(job.given.config))
    leg.report_configuration(path)
    _report_errors(probe)
    code = cli.main(["train", path, *leg.words()])
    if code == 0:
        leg.report_end()
    return code


def _report_errors(probe: Probe) -> None:
    """Report the errors that the program turns into an exit code; others reach the caller."""
    original = cli.train

    def train_and_report(config_path: str, overrides: Sequence[str]) -> None:
        try:
            original(config_path, overrides)
        except HyperResumeError as error:
            probe.error(error)
            raise

    cli.train = train_and_report


class ProgramLeg(EventReporter):
    """Instruments the trainer that the program builds."""

    def __init__(self, probe: Probe, job: Job) -> None:
        """Take the device from the job, and replace the program's trainer class."""
        index = int(os.environ.get("LOCAL_RANK", "0"))
        kind = job.given.device
        super().__init__(probe, job, torch.device("cpu") if kind == "cpu" else torch.device(kind, index))
        text_trainer.BaseTrainer = self._build  # type: ignore[assignment, attr-defined]

    def words(self) -> list[str]:
        """The command-line arguments after the configuration file."""
        job, given = self.job, self.given
        chosen = {name: value for name, value in to_plain(given.checkpoint).items() if value is not None}
        chosen["checkpoint_dir"] = job.checkpoint_dir
        if job.restore_from is not None:
            chosen["restore_from"] = job.restore_from
        words = [f"--checkpoint.{name}={_plain(value)}" for name, value in chosen.items()]
        if job.until_step is not None:
            words.append(f"--training.max_steps={job.until_step}")
        words += [f"--accelerator.device={given.device}", "--trajectory.dir=.", "--trajectory.digests=true"]
        return [*words, *given.overrides]

    def report_configuration(self, path: str) -> None:
        """Report every value after the overrides, and its source."""
        resolved = resolve_config(path, self.words())
        values = dataclasses.asdict(resolved.config)
        reported = {}
        for name, source in resolved.sources.items():
            value = functools.reduce(lambda block, key: block[key], name.split("."), values)
            reported[name] = {"value": value, "source": source.replace(f"{_CHECKOUT}/", "")}
        self.probe.event("configuration", values=reported)

    def _build(self, *args: Any, **kwargs: Any) -> BaseTrainer:
        trainer = BaseTrainer(*args, callbacks=[lambda made: BeforeSaves(made, self)], **kwargs)
        self.trainer, self.optimizers = trainer, flatten_optimizers(trainer.optimizer)
        instrument_saves(
            self, next((item for item in trainer.callbacks if isinstance(item, CheckpointerCallback)), None)
        )
        trainer.callbacks.append(AfterSaves(trainer, self))
        self.report_built((BeforeSaves, AfterSaves))
        return trainer


def _plain(value: Any) -> str:
    if isinstance(value, list):
        return f"[{','.join(map(str, value))}]"
    return str(value).lower() if isinstance(value, bool) else str(value)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
