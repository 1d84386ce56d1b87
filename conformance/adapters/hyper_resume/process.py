"""The process of one rank, with a trainer built from ``given``. A warm server calls ``main``; ``python -m`` runs it too."""

from __future__ import annotations

import sys
from collections.abc import Sequence

import torch
from torch import nn

from conformance.adapters.hyper_resume.custom_loop import drive_custom_loop
from conformance.adapters.hyper_resume.leg import Leg
from conformance.adapters.hyper_resume.lifecycle import join_group, leave_group, run_job
from conformance.running.adapter import Job
from conformance.running.probe import Probe
from hyper_resume.cli import EXIT_PREEMPTED
from hyper_resume.config import RunConfig
from hyper_resume.errors import PreemptedError


def prepare() -> None:
    """Load now what is loaded at a first use, so that every fork has it. Computes nothing."""
    RunConfig()  # makes the validator of all blocks, a tenth of a second
    optimizer = torch.optim.AdamW([nn.Parameter(torch.zeros(1))])
    torch.optim.lr_scheduler.ConstantLR(optimizer)


def main(arguments: Sequence[str]) -> int:
    """Carry out the job; returns the exit code."""
    return run_job(train)


def train(probe: Probe, job: Job) -> int:
    """Build and train; returns the exit code (for a preempted training the same as the library's program)."""
    group = join_group(job)
    try:
        Leg(probe, job, group).run(drive_custom_loop)
    except PreemptedError as error:
        probe.error(error)
        return EXIT_PREEMPTED
    finally:
        leave_group()
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
