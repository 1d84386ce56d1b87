"""Stock ``torch.distributed.checkpoint`` for comparison: it saves the same tensors, and its own loader judges them.

A directory counts as complete if ``.metadata`` exists; a save counts as durable when ``save`` returns (``async_save``: when the
future has its result). Its results are measured in every run; nothing is expected of it.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from conformance.storage.tracing.recorder import Recorder
from conformance.storage.workload import small_checkpoint as small
from conformance.storage.workload.scenarios import (
    BEGIN,
    DURABLE,
    NONE,
    Loads,
    Mark,
    Program,
    Scenario,
    Verdict,
    tag,
    which,
)

# Scenarios of the library whose counterpart is measured here under the same name.
FIRST, NEXT, RESAVE, ASYNC = "first_save", "next_save", "resave", "async"


def payload(step: int, variant: int = 0) -> dict[str, Any]:
    """This rank's tensors and learning rate; stock DCP keeps no rank's own state apart."""
    state = small.payload(step, variant)
    state.pop("extra_state")
    return state


def saving(*saves: tuple[int, int], save_async: bool = False) -> Program:
    """A run that makes ``saves`` into ``global_step_N`` directories."""

    def program(root: Path, mark: Mark) -> None:
        from torch.distributed.checkpoint.state_dict_saver import async_save, save

        for step, variant in saves:
            state, path = payload(step, variant), root / f"global_step_{step}"
            mark(BEGIN + tag(step, variant))
            if save_async:
                response: Any = async_save(state, checkpoint_id=path)
                response.result()
            else:
                save(state, checkpoint_id=path)
            mark(DURABLE + tag(step, variant))

    return program


class Stock:
    """Stock DCP. Its saves write only; nothing of it goes through an interface of ours."""

    name = "stock DCP"
    wants_interface = False

    def scenarios(self) -> tuple[Scenario, ...]:
        """See :class:`conformance.storage.workload.scenarios.Subject`."""
        first = saving((1, 0))
        return (
            Scenario(name=FIRST, title="a new directory", before=(), program=first, current=NONE, tags=("1/0",)),
            Scenario(
                name=NEXT, title="a new directory after an earlier one", before=(first,), program=saving((2, 0)),
                current="1/0", tags=("1/0", "2/0"),
            ),
            Scenario(
                name=RESAVE, title="into the directory of an earlier one", before=(first,), program=saving((1, 1)),
                current="1/0", tags=("1/0", "1/1"),
            ),
            Scenario(
                name=ASYNC, title="a new directory, in the background", before=(first,),
                program=saving((2, 0), save_async=True), current="1/0", tags=("1/0", "2/0"),
            ),
        )  # fmt: skip

    def installed(self, recorder: Recorder) -> contextlib.AbstractContextManager[None]:
        """See :class:`conformance.storage.workload.scenarios.Subject`."""
        return _nothing()

    def load(self, path: Path, tags: tuple[str, ...]) -> str:
        """See :class:`conformance.storage.workload.scenarios.Subject`."""
        return load(path, tags)

    def judge(self, root: Path, loads: Loads) -> Verdict:
        """The highest step with a ``.metadata`` is what a trainer on stock DCP resumes from."""
        found = sorted(root.glob("global_step_*/.metadata"), key=lambda path: int(path.parent.name.rpartition("_")[2]))
        claims = {path.parent.name: loads.of(path.parent) for path in found}
        latest = claims[found[-1].parent.name] if found else NONE
        return Verdict(latest=latest, claims=claims)

    def after(self, root: Path) -> str:
        """Not measured for stock DCP."""
        return ""


@contextlib.contextmanager
def _nothing() -> Iterator[None]:
    yield


def load(path: Path, tags: tuple[str, ...]) -> str:
    """Load a directory with stock ``dcp.load``; a tag, ``error: ...`` or ``other: ...``."""
    from torch.distributed.checkpoint.api import CheckpointException
    from torch.distributed.checkpoint.state_dict_loader import load as dcp_load

    state = small.destination()
    try:
        dcp_load(state, checkpoint_id=path, no_dist=True)
    except (Exception, CheckpointException) as error:  # noqa: BLE001  whatever it is, it is the verdict
        return f"error: {type(error).__name__}"
    return which(state, {}, tags)
