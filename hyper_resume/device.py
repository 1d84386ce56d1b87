"""CPU, CUDA or Ascend NPU: which one a job runs on, its process group, and its random stream.

Everything else in the library asks here, so that no other file knows of ``torch_npu``. An accelerator is reached
through ``torch.get_device_module``, the table in which every backend, Ascend's included, registers the same functions.
"""

from __future__ import annotations

import gc
import importlib
import importlib.util
import os
from dataclasses import dataclass
from datetime import timedelta
from typing import Literal

import torch
import torch.distributed as dist
from torch.distributed import PrefixStore  # type: ignore[attr-defined]
from torch.distributed.rendezvous import rendezvous

from hyper_resume.errors import ConfigError, UnsupportedError, describe

DeviceName = Literal["auto", "cpu", "cuda", "npu"]

# Gloo stays beside the accelerator's own backend: checkpoints and agreements travel as CPU tensors.
_BACKENDS = {"cpu": "gloo", "cuda": "cpu:gloo,cuda:nccl", "npu": "cpu:gloo,npu:hccl"}


@dataclass(frozen=True, kw_only=True)
class DeviceContext:
    """Where this process computes.

    ``type`` is cpu, cuda or npu; ``device`` is this process's own (its index is LOCAL_RANK); ``backend`` is what
    ``torch.distributed.init_process_group`` gets.
    """

    type: str
    device: torch.device
    backend: str


def resolve_device(name: DeviceName) -> DeviceContext:
    """Choose the device of this process; ``auto`` takes an NPU before CUDA before the CPU.

    Nothing in the process changes, except that ``torch_npu`` is imported when it is asked for, or when it is installed
    and ``auto`` is asked.

    Raises:
        ConfigError: an unknown name, or a LOCAL_RANK for which this machine has no device.
        UnsupportedError: the asked accelerator is not there; the message says what was looked for.
    """
    if name not in ("auto", *_BACKENDS):
        raise ConfigError(
            describe(
                "unknown device",
                where="accelerator.device",
                expected=", ".join(("auto", *_BACKENDS)),
                found=repr(name),
            )
        )
    if name == "auto":
        return _context(next(kind for kind in ("npu", "cuda", "cpu") if _missing(kind, asked=False) is None))
    reason = _missing(name, asked=True)
    if reason is not None:
        raise UnsupportedError(
            describe(
                f"no {name} device can be used",
                where="accelerator.device",
                found=reason,
                do="set accelerator.device=cpu, or auto to take what is there",
            )
        )
    return _context(name)


def _missing(kind: str, *, asked: bool) -> str | None:
    """Why ``kind`` can't be used here; None when it can."""
    if kind == "cpu":
        return None
    if kind == "cuda":
        if torch.cuda.is_available():
            return None
        build = f"torch {torch.__version__} is built for CUDA {torch.version.cuda}"
        return f"torch.cuda.is_available() is False ({build})"
    if not asked and importlib.util.find_spec("torch_npu") is None:
        return "torch_npu is not installed"
    try:
        importlib.import_module("torch_npu")
    except (ImportError, OSError) as error:
        # An installed torch_npu without CANN fails to load a shared library, as ImportError or OSError.
        return f"torch_npu can't be imported; it needs CANN, Ascend's toolkit, on this machine ({error})"
    if torch.get_device_module("npu").is_available():
        return None
    return "torch_npu is installed and torch.npu.is_available() is False (no driver, no device, or no CANN environment)"


def _context(kind: str) -> DeviceContext:
    if kind == "cpu":
        return DeviceContext(type=kind, device=torch.device("cpu"), backend=_BACKENDS[kind])
    local_rank = _integer_of_environment("LOCAL_RANK", default=0)
    count = torch.get_device_module(kind).device_count()
    if not 0 <= local_rank < count:
        raise ConfigError(
            describe(
                "this process has no device of its own",
                where=f"LOCAL_RANK={local_rank}",
                expected=f"at most {count} processes on this machine, one for each {kind} device",
                do="start fewer processes on this machine",
            )
        )
    return DeviceContext(type=kind, device=torch.device(kind, local_rank), backend=_BACKENDS[kind])


def init_process_group(context: DeviceContext, timeout_seconds: float) -> None:
    """Make ``context.device`` current and create the default process group that the environment describes.

    A process that was started alone (no RANK, WORLD_SIZE absent or 1) gets no group. A group that exists is kept.

    Args:
        context: from :func:`resolve_device`.
        timeout_seconds: how long a collective waits for the other ranks.

    Raises:
        ConfigError: RANK is set, or WORLD_SIZE is greater than 1, and a variable of the rendezvous is missing.
    """
    if context.type != "cpu":
        torch.get_device_module(context.type).set_device(context.device)
    world_size = _integer_of_environment("WORLD_SIZE", default=1)
    if dist.is_initialized() or (world_size == 1 and "RANK" not in os.environ):
        return
    absent = [name for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT") if name not in os.environ]
    if absent:
        raise ConfigError(
            describe(
                "the processes of this job can't find each other",
                where=f"environment, WORLD_SIZE={world_size}",
                expected="RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT",
                found=f"no {', '.join(absent)}",
                do="start the job with torchrun (python -m torch.distributed.run)",
            )
        )
    timeout = timedelta(seconds=timeout_seconds)
    store, rank, world_size = next(rendezvous("env://", timeout=timeout))
    # torchrun keeps one store for all the lives of its ranks: under names of their own, the ranks that it starts again don't
    # find the addresses of the dead ones.
    life = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    dist.init_process_group(
        context.backend,
        store=PrefixStore(f"life_{life}", store),
        rank=rank,
        world_size=world_size,
        timeout=timeout,
    )


def destroy_process_group() -> None:
    """Close the default process group and all its subgroups; nothing happens without one.

    What still holds one of them in a cycle (a trainer that is not used any more) is collected at once: a gloo group that dies
    only with the interpreter takes the process along now and then ("terminate called without an active exception"), and a
    training that has ended well would count as failed.
    """
    if dist.is_initialized():
        dist.destroy_process_group()
        gc.collect()


def get_device_rng_state(device_type: str) -> torch.Tensor | None:
    """The random stream of this process's accelerator: a CPU uint8 tensor; None on cpu, which has no second stream."""
    if device_type == "cpu":
        return None
    state: torch.Tensor = torch.get_device_module(device_type).get_rng_state()
    return state


def set_device_rng_state(device_type: str, state: torch.Tensor | None) -> None:
    """Put back what :func:`get_device_rng_state` returned on the same kind of device.

    Raises:
        UnsupportedError: a state of an accelerator on cpu, or none on an accelerator: the stream can't be continued.
    """
    if (state is None) != (device_type == "cpu"):
        raise UnsupportedError(
            describe(
                "the device random stream can't be continued on another kind of device",
                expected="no device stream" if device_type == "cpu" else f"a stream of {device_type}",
                found="none, as a cpu job saves" if state is None else f"a device stream of {state.numel()} bytes",
                do="resume on the kind of device that wrote the checkpoint",
            )
        )
    if state is not None:
        torch.get_device_module(device_type).set_rng_state(state)


def seed_device(device_type: str, seed: int) -> None:
    """Seed the random stream of this process's accelerator; nothing happens on cpu (use ``torch.manual_seed``)."""
    if device_type != "cpu":
        torch.get_device_module(device_type).manual_seed(seed)


def synchronize(device_type: str) -> None:
    """Wait until the accelerator has finished all work given to it; returns at once on cpu."""
    if device_type != "cpu":
        torch.get_device_module(device_type).synchronize()


def _integer_of_environment(name: str, *, default: int) -> int:
    text = os.environ.get(name, str(default))
    try:
        return int(text)
    except ValueError:
        raise ConfigError(
            describe("not a number", where=f"environment variable {name}", expected="an integer", found=repr(text))
        ) from None
