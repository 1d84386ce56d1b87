"""A load that does not get the memory it needs says so; it does not call a good checkpoint damaged, or take an older one."""

from __future__ import annotations

import errno
import resource
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from hyper_resume import collective
from hyper_resume.checkpoint import DistributedCheckpointer
from hyper_resume.errors import HyperResumeError, InsufficientMemoryError
from tests.ranks import run_ranks

NUMBERS = 40_000_000


def _load_with_little_memory(folder: str) -> str:
    """Rank 1 may take 50 MB more; the tensor has 160 MB."""
    checkpointer = DistributedCheckpointer(verify="size")
    checkpointer.save(f"{folder}/global_step_2", {"model": {"w": torch.ones(NUMBERS)}}, global_step=2)
    live = {"model": {"w": torch.zeros(NUMBERS)}}
    if dist.get_rank() == 1:
        size = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
        resource.setrlimit(resource.RLIMIT_AS, (size + (50 << 20), resource.RLIM_INFINITY))
    try:
        checkpointer.load(f"{folder}/global_step_2", live)
    except HyperResumeError as error:
        return f"{type(error).__name__}: {error}"
    return "loaded"


def test_every_rank_hears_that_one_lacks_memory(tmp_path: Path) -> None:
    for found in run_ranks(_load_with_little_memory, 2, str(tmp_path)):
        assert found.startswith("InsufficientMemoryError: there is not enough memory"), found
        assert "rank 1" in found
        assert "nothing is known to be wrong with the checkpoint" in found


@pytest.mark.parametrize(
    "error",
    [
        MemoryError(),
        OSError(errno.ENOMEM, "Cannot allocate memory"),
        torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB."),
    ],
    ids=["Python", "the system", "a device"],
)
def test_each_word_for_it_is_understood(error: Exception) -> None:
    def fail() -> None:
        raise error

    with pytest.raises(InsufficientMemoryError) as caught:
        collective.on_all_ranks(fail)
    assert caught.value.__cause__ is error
    with pytest.raises(InsufficientMemoryError):
        collective.on_rank_zero(fail)


def test_torch_says_it_in_words_that_are_understood() -> None:
    with pytest.raises(InsufficientMemoryError, match="can't allocate memory"):
        collective.on_all_ranks(lambda: torch.empty(1 << 60, dtype=torch.uint8))


@pytest.mark.parametrize("error", [OSError(errno.EIO, "Input/output error"), RuntimeError("shapes differ")])
def test_any_other_error_stays_what_it_is(error: Exception) -> None:
    def fail() -> None:
        raise error

    with pytest.raises(type(error)) as caught:
        collective.on_all_ranks(fail)
    assert caught.value is error
