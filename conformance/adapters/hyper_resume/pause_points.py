"""Pause points inside the library: between the stages of a save, in a load, before any change on disk."""

from __future__ import annotations

import re
import threading
from collections import Counter
from pathlib import Path
from typing import Any

from conformance.adapters.hyper_resume.components import TroubleError
from conformance.running.adapter import Job
from conformance.running.file_operations import FileOperations
from conformance.running.probe import Probe
from hyper_resume.checkpoint import dcp
from hyper_resume.checkpoint.disk import operations
from hyper_resume.checkpoint.format import layout
from hyper_resume.checkpoint.saving import publication

_STEP = re.compile(r"global_step_(\d+)")
# Moment -> the function of the library that starts at it.
_BEGINNINGS = {
    "before_commit": (layout, "commit"),
    "before_pointer": (layout, "write_pointer"),
    "before_retention": (publication, "_clear_outdated"),
    "during_load": (dcp, "load_entries"),
}


class PausePoints:
    """Patches of the library that pause this leg at its job's fault."""

    def __init__(self, probe: Probe, job: Job) -> None:
        """Install the patches; none for a job without such a fault."""
        self._probe, self._job = probe, job
        self._lock = threading.Lock()
        self._save: int | None = None
        self._numbers: Counter[int] = Counter()
        self._is_reached = False
        self._moment = job.fault.moment if job.fault else None
        if self._moment in _BEGINNINGS:
            self._pause_at(self._moment, *_BEGINNINGS[self._moment])
        if self._moment == "file_operation" or job.given.tell_operations:
            operations_on_disk = FileOperations(Path(job.checkpoint_dir), self._operation)
            operations_on_disk.install()
            _count_exchanges(operations_on_disk)

    def _pause_at(self, moment: str, module: Any, name: str) -> None:
        original = getattr(module, name, None)
        if original is None:
            raise TroubleError(f"{module.__name__} has no {name}: a leg can't pause at {moment}")

        def pause_first(first: Any, second: Any, *args: Any, **kwargs: Any) -> Any:
            if name == "write_pointer":
                step = second
            else:
                # The first of the directories that retention must keep is the new checkpoint.
                step = layout.parse_step(Path(args[0][0] if moment == "before_retention" else second).name)
            any_load = moment == "during_load" and self._job.fault is not None and self._job.fault.after_step == 0
            self._probe.moment(moment, 0 if any_load else -1 if step is None else step)
            return original(first, second, *args, **kwargs)

        setattr(module, name, pause_first)

    def _operation(self, what: str, where: str) -> None:
        """Count a change for the save whose step directory its path names; one that names none belongs to the save named last.

        The calls to ``save`` would not do: a save in the background goes on while the next one is already requested.
        """
        named = _STEP.search(where)
        with self._lock:
            if named:
                self._save = int(named.group(1))
            if self._save is None:
                return
            save = self._save
            self._numbers[save] += 1
            number = self._numbers[save]
            is_here = not self._is_reached and self._is_fault_here(save, number, what, where)
            self._is_reached |= is_here
        if self._job.given.tell_operations or is_here:
            self._probe.event("operation", save=save, number=number, what=what, where=where)
        if is_here:
            self._probe.moment("file_operation", save)

    def _is_fault_here(self, save: int, number: int, what: str, where: str) -> bool:
        fault = self._job.fault
        if fault is None or (self._probe.rank, save) != (fault.rank, fault.after_step):
            return False
        return fault.is_operation(number, what, where)


def _count_exchanges(operations_on_disk: FileOperations) -> None:
    """Report the one change on disk that does not go through Python's functions (``renameat2``)."""
    original = operations.FileOperations.exchange

    def exchange(disk: operations.FileOperations, one: Path, other: Path) -> bool:
        operations_on_disk.report("exchange", operations_on_disk.below(other))
        return original(disk, one, other)

    operations.FileOperations.exchange = exchange  # type: ignore[method-assign, assignment]
