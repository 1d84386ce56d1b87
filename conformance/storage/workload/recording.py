"""Runs a scenario in real ranks and records their operations, in each order that their collectives allow."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from conformance.processes import forked_ranks
from conformance.storage.tracing import hooks, orders, trees
from conformance.storage.tracing.history import History, Operation, Tree
from conformance.storage.tracing.recorder import RankTrace, Recorder
from conformance.storage.workload.scenarios import WORLD_SIZE, Scenario, Subject

# Not part of a checkpoint: a run holds it while it is alive, and nothing reads it. It is left out of the states (its bytes are
# never synced, which would multiply them) and of the operations outside the interface.
LOCK = ".writer.lock"
_LIMIT_SECONDS = 60.0


class RecordingError(RuntimeError):
    """A scenario did not run to its end, or was not traced completely: no verdict about crashes is possible."""


@dataclass(frozen=True, kw_only=True)
class Recording:
    """One recorded scenario: the disk before, the history in each order, and the operations outside the interface."""

    scenario: Scenario
    base: Tree
    histories: Mapping[str, History]
    around: tuple[str, ...] = ()


def record(subject: Subject, scenario: Scenario) -> Recording:
    """Run the scenario in real ranks and trace it. Call it in a process without threads.

    Raises:
        RecordingError: see there.
    """
    with trees.scratch_folder() as root:
        prepare(scenario, root)
        base = _without_lock(trees.read_tree(root))
        traces = trace(subject, scenario, root)
        after = _without_lock(trees.read_tree(root))
    histories = {
        name: History(base, [one for one in order if one.path != LOCK and not orders.is_collective(one)])
        for name, order in orders.orders(traces).items()
    }
    for name, history in histories.items():
        different = trees.difference(history.tree(), after)
        if different:
            raise RecordingError(f"{scenario.name}: replayed in the order {name}, {different}: a write was not traced")
    around = tuple(one for trace in traces for one in trace.around if not one.endswith(LOCK))
    return Recording(scenario=scenario, base=base, histories=histories, around=around)


def _without_lock(tree: Tree) -> dict[str, bytes | None]:
    return {path: content for path, content in tree.items() if path != LOCK}


def prepare(scenario: Scenario, root: Path) -> None:
    """Run the programs before the traced one."""
    for program in scenario.before:
        _run(functools.partial(program, root, _ignore), scenario)


def trace(
    subject: Subject, scenario: Scenario, root: Path, on_operation: Callable[[Operation], None] | None = None
) -> list[RankTrace]:
    """Run the traced program; one trace per rank. ``on_operation`` is called with each operation, in the rank that made it."""
    recorder = Recorder(root, on_operation)

    def traced() -> RankTrace:
        import torch.distributed as dist

        hooks.install(recorder, dist.get_rank(), wants_interface=subject.wants_interface)
        with subject.installed(recorder):
            scenario.program(root, recorder.mark)
        return recorder.trace()

    return _run(traced, scenario)


def _run(program: Callable[[], Any], scenario: Scenario) -> list[Any]:
    ended = forked_ranks.run_ranks(program, world_size=WORLD_SIZE, limit_seconds=_LIMIT_SECONDS)
    for one in ended:
        if one.how != "returned":
            raise RecordingError(f"{scenario.name}: {one.summary}\n{one.trace}")
    return [one.value for one in ended]


def _ignore(_: str) -> None:
    return
