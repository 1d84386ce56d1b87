"""Small save protocols of two ranks, one right and others broken on purpose, for tests of the storage proofs."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

from conformance.processes import forked_ranks
from conformance.storage.crash_states import enumeration
from conformance.storage.tracing.history import TraceError
from conformance.storage.tracing.recorder import Recorder
from conformance.storage.workload.recording import RecordingError, record
from conformance.storage.workload.scenarios import BEGIN, DURABLE, NONE, Loads, Mark, Program, Scenario, Verdict

CONTENT = b"the whole part of one rank"
NAME = "global_step_2"


def protocol(
    *, fsync: bool = True, directory_sync: bool = True, root_sync: bool = True, early: bool = False
) -> Program:
    """Each rank writes its part into a staging directory, which rank 0 renames. ``early``: it does so before the writing."""

    def program(root: Path, mark: Mark) -> None:
        import torch.distributed as dist

        first = dist.get_rank() == 0
        mark(BEGIN + "2/0")
        staging = root / "staging"
        if first:
            staging.mkdir()
            if early:
                staging.rename(root / NAME)
        dist.barrier()
        with ((root / NAME if early else staging) / f"part_{dist.get_rank()}").open("wb") as file:
            file.write(CONTENT)
            file.flush()
            if fsync:
                os.fsync(file.fileno())
        dist.barrier()
        if first:
            if directory_sync:
                _sync(root / NAME if early else staging)
            if not early:
                staging.rename(root / NAME)
            if root_sync:
                _sync(root)
            mark(DURABLE + "2/0")
        dist.barrier()

    return program


def _sync(directory: Path) -> None:
    descriptor = os.open(directory, os.O_RDONLY | os.O_DIRECTORY)
    os.fsync(descriptor)
    os.close(descriptor)


def unseen(root: Path, mark: Mark) -> None:
    """Writes from C, to a path of its own."""
    import torch
    import torch.distributed as dist

    torch.save({}, root / f"by_torch_{dist.get_rank()}")


class Toy:
    """Loads what is called ``global_step_2``: both parts, whole, or it is an error."""

    name = "toy"
    wants_interface = True

    def __init__(self, program: Program) -> None:
        self._scenario = Scenario(name="toy", title="", before=(), program=program, current=NONE, tags=("2/0",))

    def scenarios(self) -> tuple[Scenario, ...]:
        return (self._scenario,)

    def installed(self, recorder: Recorder) -> contextlib.AbstractContextManager[None]:
        return contextlib.nullcontext()

    def load(self, path: Path, tags: tuple[str, ...]) -> str:
        parts = [path / f"part_{rank}" for rank in range(2)]
        return tags[0] if all(part.is_file() and part.read_bytes() == CONTENT for part in parts) else "error: torn"

    def judge(self, root: Path, loads: Loads) -> Verdict:
        claims = {NAME: loads.of(root / NAME)} if (root / NAME).is_dir() else {}
        return Verdict(latest=claims.get(NAME, NONE), claims=claims)

    def after(self, root: Path) -> str:
        return ""


PROGRAMS: dict[str, Callable[[], Program]] = {
    "right": protocol,
    "no fsync of the files": lambda: protocol(fsync=False),
    "no fsync of the staging directory": lambda: protocol(directory_sync=False),
    "no fsync of the root": lambda: protocol(root_sync=False),
    "renamed before it is written": lambda: protocol(early=True),
    "written from C": lambda: unseen,
}


def violations(name: str) -> Any:
    """Model to oracle to the number of states that break it, without zeros; operations outside the interface; or the error."""
    toy = Toy(PROGRAMS[name]())
    try:
        recording = record(toy, toy.scenarios()[0])
    except (RecordingError, TraceError) as error:
        return str(error)
    ended = forked_ranks.run_alone(enumeration.judge, toy, recording, enumeration.Options(aftermath_every=0))
    assert ended.how == "returned", ended.trace
    found = {
        record.model: {oracle: n for oracle, n in record.violations.items() if n and oracle != "interface"}
        for record in ended.value
    }
    return found, len(recording.around)


def stock(name: str) -> Any:
    """The violations of stock DCP in one scenario, a model after the other, and the number of states."""
    found = enumeration.examine(enumeration.Job(subject="stock", scenario=name))
    assert not found.error, found.error
    return {record.model: (dict(record.violations), record.distinct) for record in found.records}
