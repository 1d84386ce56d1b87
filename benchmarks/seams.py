"""The places where a benchmark has to know how the library works, and nothing but these.

Everything else goes through the public interface. Who changes the library's planning or its digests changes these functions.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

from torch.distributed.checkpoint.planner import SavePlan
from torch.distributed.checkpoint.storage import WriteResult

from benchmarks import coordinator
from benchmarks.states import State, memory_of
from hyper_resume import digest


def forget_plans() -> None:
    """Forget what earlier saves of this process have planned. The library keeps no plan, so there is nothing to forget."""


def plan_second_save(
    plans: Sequence[SavePlan], results: Sequence[list[WriteResult]], folder: Path
) -> Callable[[], object]:
    """Return what rank 0 does to plan the second save of an unchanged layout, and to close it.

    The library plans every save through stock's planner, so it is stock's work again.

    Args:
        plans: of all ranks, as they made them for the first save.
        results: of all ranks, as they wrote them.
        folder: where metadata may be written.
    """
    return lambda: coordinator.plan_and_close(plans, results, folder)


def digests_of_save(state: State) -> list[str]:
    """What a save hashes: every tensor for its bucket, and again as a part of its file."""
    return [digest.state_text(state), digest.digest_bytes(memory_of(state))]


def digests_of_load(state: State) -> list[str]:
    """What a load hashes: the bytes of the file, and every tensor that was read for its bucket."""
    return [digest.digest_bytes(memory_of(state)), digest.state_text(state)]
