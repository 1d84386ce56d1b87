"""What every rank does around its training: reports its start and errors, joins the process group, installs a sabotage."""

from __future__ import annotations

import contextlib
import gc
import os
import platform
import subprocess
import sys
from collections.abc import Callable, Iterator
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist

from conformance.adapters.hyper_resume.components import TroubleError
from conformance.adapters.hyper_resume.step_directory import describe_step_directory, edit_step_directory
from conformance.records.evidence import JOB_NAME
from conformance.running.adapter import Job, read_job
from conformance.running.legs import TROUBLE_EXIT
from conformance.running.probe import Probe
from conformance.sabotages.saboteur import SabotageError, install_sabotage
from hyper_resume.device import destroy_process_group

_GROUP_SECONDS = 20.0
_FAILED = 1


def run_job(train: Callable[[Probe, Job], int]) -> int:
    """Do what the job in the working directory says; returns the exit code.

    Args:
        train: trains a leg, reports its events, and returns the exit code.
    """
    probe, code = Probe.from_environment(), 0
    try:
        job = read_job(Path(JOB_NAME))
        probe.event("start", versions=versions())
        if job.task == "train":
            torch.set_num_threads(1)
            probe.capture_logs("hyper_resume")
            if job.sabotage is not None:
                install_sabotage(job.sabotage, lambda: probe.event("sabotage_fired", id=job.sabotage))
            with _second_writer(job) if job.given.second_writer else contextlib.nullcontext():
                code = train(probe, job)
            # Instrumentation held the trainer's groups until now, see hyper_resume.device.destroy_process_group.
            gc.collect()
        else:
            step_directory = Path(job.checkpoint_dir) / f"global_step_{(job.edit or {}).get('step', job.step)}"
            value = (
                edit_step_directory(step_directory, job.edit) if job.edit else describe_step_directory(step_directory)
            )
            probe.event("value", name=job.task, value=value)
    except (TroubleError, SabotageError) as error:
        probe.event("trouble", message=str(error))
        return TROUBLE_EXIT
    except BaseException as error:  # noqa: BLE001  every error that ends a leg is reported
        probe.error(error)
        return _FAILED
    return code


# A second run, without code of the library; it holds both kinds of lock that Linux has. It ends when its standard input
# closes, so at the latest with this process.
_HOLD_LOCK = """
import fcntl, sys
with open(sys.argv[1], "a+b") as file:
    fcntl.flock(file, fcntl.LOCK_EX)
    fcntl.lockf(file, fcntl.LOCK_EX)
    print("held", flush=True)
    sys.stdin.read()
"""


@contextlib.contextmanager
def _second_writer(job: Job) -> Iterator[None]:
    path = Path(job.checkpoint_dir) / ".writer.lock"
    command = [sys.executable, "-c", _HOLD_LOCK, str(path)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as holder:
        assert holder.stdin is not None
        assert holder.stdout is not None
        try:
            if holder.stdout.readline() != b"held\n":
                raise TroubleError(f"{path} can't be locked")
            yield
        finally:
            holder.stdin.close()


def versions() -> dict[str, str]:
    """The versions of Python and torch."""
    return {"python": platform.python_version(), "torch": torch.__version__}


def is_under_torchrun() -> bool:
    """True when torchrun started this process, so the environment names the rendezvous."""
    return "TORCHELASTIC_RUN_ID" in os.environ


def join_group(job: Job) -> dist.ProcessGroup | None:
    """Join the process group: as torchrun says, or by a file in the leg's folder. None for a single process."""
    if job.world_size == 1:
        return None
    backend = {"cpu": "gloo", "cuda": "cpu:gloo,cuda:nccl", "npu": "cpu:gloo,npu:hccl"}[job.given.device]
    timeout = timedelta(seconds=_GROUP_SECONDS)
    if is_under_torchrun():
        dist.init_process_group(backend, timeout=timeout)
        return dist.group.WORLD
    dist.init_process_group(
        backend,
        # Not an init_method: in a URL the # of a repeat's folder would cut the path short.
        store=dist.FileStore(str(Path("rendezvous").absolute()), job.world_size),  # type: ignore[attr-defined]
        rank=int(os.environ["RANK"]),
        world_size=job.world_size,
        timeout=timeout,
    )
    return dist.group.WORLD


def leave_group() -> None:
    """Destroy the group, except during an error: another rank may be waiting in it."""
    if dist.is_initialized() and sys.exc_info()[0] is None:
        destroy_process_group()
