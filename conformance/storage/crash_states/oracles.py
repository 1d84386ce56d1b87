"""The promises at a place in a trace, and which of them a loader's verdict breaks."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from conformance.storage.tracing.history import Operation
from conformance.storage.workload.scenarios import BACK, BEGIN, DURABLE, GOING_BACK, NONE, Verdict

ORACLES: Mapping[str, str] = {
    "O1": "what is loaded is a save that was requested and not given up",
    "O2": "after the durable event it is that save or a later one",
    "O3": "nothing that counts as complete fails to load",
    "O4": "what is loaded is one save, bit for bit",
    "O5": "a save that was committed whole is not passed over, although the pointer may be older",
    "O10": "the next save succeeds and leaves nothing behind",
    "interface": "every operation goes through the library's interface",
}


@dataclass(frozen=True, kw_only=True)
class Promise:
    """What LATEST may be: ``current``, or one of ``pending``; of these, ``saving`` are saves, the others are gone back to.

    ``past`` were current before.
    """

    current: str
    pending: frozenset[str] = frozenset()
    saving: frozenset[str] = frozenset()
    past: frozenset[str] = frozenset()


@dataclass
class Progress:
    """What the program under test has reported so far. ``current`` begins with what the disk holds."""

    current: str
    pending: set[str] = field(default_factory=set)
    saving: set[str] = field(default_factory=set)
    past: set[str] = field(default_factory=set)

    def observe(self, one: Operation) -> None:
        """Process a mark; other operations change no promise."""
        if one.kind != "mark":
            return
        for kind in (BEGIN, GOING_BACK):
            if one.path.startswith(kind) and one.path.removeprefix(kind) != self.current:
                self.pending.add(one.path.removeprefix(kind))
                if kind == BEGIN:
                    self.saving.add(one.path.removeprefix(kind))
        for kind in (DURABLE, BACK):
            reached = one.path.removeprefix(kind)
            # Every rank reports the same mark; the first one counts.
            if one.path.startswith(kind) and reached != self.current and reached not in self.past:
                self.past.add(self.current)
                self.pending.discard(reached)
                self.saving.discard(reached)
                self.current = reached

    def promise(self) -> Promise:
        """The promises that hold now."""
        return Promise(
            current=self.current,
            pending=frozenset(self.pending),
            saving=frozenset(self.saving),
            past=frozenset(self.past),
        )


def broken(verdict: Verdict, promise: Promise) -> set[str]:
    """The oracles that a verdict breaks."""
    found: set[str] = set()
    for name, what in verdict.claims.items():
        step = name.rpartition("_")[2]
        if what.startswith("error"):
            found.add("O3")
        elif not what.startswith(f"{step}/"):
            found.add("O4")
    latest = verdict.latest
    if latest.startswith(("error", "refused")):
        found.add("O3" if latest.startswith("error") or promise.current == NONE else "O2")
    elif latest.startswith("other"):
        found.add("O4")
    elif latest != promise.current and latest not in promise.pending:
        found.add("O2" if latest == NONE or latest in promise.past or promise.current == NONE else "O1")
    elif latest not in promise.saving and promise.saving & set(verdict.claims.values()):
        found.add("O5")
    return found
