"""Random histories of one root, of runs that start anew, resume, go back and are killed: what is deleted, what LATEST means.

The model below knows which save continues which from what the test did, not from any manifest. The steps are real: the root's
bookkeeping, staging, commit, pointer and retention on a real directory, with a manifest and no tensors.

``HISTORIES=10000 pytest tests/checkpoint/history/test_histories.py`` tries that many (tox -e nightly does).
"""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from hyper_resume.checkpoint.disk import operations
from hyper_resume.checkpoint.format import layout
from hyper_resume.checkpoint.format.manifest import FileEntry, Manifest, encode, read_manifest
from hyper_resume.checkpoint.history.lineage import resume_order
from hyper_resume.checkpoint.history.retention import Retention
from hyper_resume.checkpoint.saving import publication
from hyper_resume.checkpoint.saving.root import WritableRoot
from hyper_resume.digest import bytes_digest_text

HISTORIES = int(os.environ.get("HISTORIES", "100"))


class _NotSynced(operations.FileOperations):
    """A power cut is no part of these histories, and syncs take most of their time."""

    def create(self, path: Path) -> operations.OutputFile:
        with super().create(path) as file:
            return _NotSyncedFile(os.dup(file._descriptor), path)

    def sync_directory(self, path: Path) -> None:
        return


class _NotSyncedFile(operations.OutputFile):
    def sync(self) -> None:
        return


@dataclass(frozen=True, kw_only=True)
class SaveOf:
    """One save to make: how many steps after the last one, its metric, and whether the run is killed, and when."""

    distance: int
    loss: float | None
    killed: str = ""


@dataclass(frozen=True, kw_only=True)
class RunOf:
    """One run: where it starts (``anew``, ``LATEST``, or the n-th of the saves that stand), its rules and its saves."""

    start: str | int
    rules: Retention
    saves: tuple[SaveOf, ...]


KILLS = ("", "", "", "", "before the commit", "before the pointer", "before retention")
RULES = st.builds(
    Retention,
    keep_last=st.sampled_from((None, 1, 2, 3)),
    keep_every=st.sampled_from((None, None, 2, 3)),
    keep_best=st.sampled_from((0, 0, 1, 2)),
    best_mode=st.sampled_from(("min", "max")),
)
SAVES = st.builds(
    SaveOf,
    distance=st.sampled_from((1, 2, 3)),
    loss=st.sampled_from((None, 0.0, 1.0, 2.0)),
    killed=st.sampled_from(KILLS),
)
RUNS = st.builds(
    RunOf,
    start=st.one_of(st.sampled_from(("anew", "LATEST", "LATEST")), st.integers(0, 5)),
    rules=RULES,
    saves=st.lists(SAVES, max_size=4).map(tuple),
)


@dataclass(eq=False)
class Saved:
    """A save as the model knows it."""

    step: int
    attempt: str
    loss: float | None
    number: int
    continues: Saved | None

    def line(self) -> list[Saved]:
        """This save and what it continues, newest first."""
        return [self, *(self.continues.line() if self.continues else [])]


@dataclass
class Model:
    """What stands in the root, by step; the step that was pointed to last; and what the last going back has left behind."""

    standing: dict[int, Saved] = field(default_factory=dict)
    pointer: int | None = None
    left_behind: set[Saved] = field(default_factory=set)
    number: int = 0

    def continuing(self, save: Saved) -> set[Saved]:
        """What stands and continues ``save``."""
        return {one for one in self.standing.values() if save in one.line()[1:]}

    @property
    def latest(self) -> Saved | None:
        """The newest that continues what the pointer names and was not left behind; without a pointer the newest of all."""
        if self.pointer is None:
            return max(self.standing.values(), key=lambda one: one.number, default=None)
        named = self.standing[self.pointer]
        return max(self.continuing(named) - self.left_behind, key=lambda one: one.number, default=named)

    def expected_to_go(self, new: Saved, rules: Retention, source: Saved | None) -> set[Saved]:
        """What the rules allow to delete after ``new``, written from their words."""
        line = [one for one in new.line() if self.standing.get(one.step) is one]
        gone = set()
        for age, one in enumerate(line):
            ranked = [other.loss for other in line if other.loss is not None]
            is_newest = age < max(1, rules.keep_last or 0)
            is_every = rules.keep_every is not None and one.step % rules.keep_every == 0
            if rules.keep_best and one.loss is not None:
                better = [
                    loss for loss in ranked if (loss < one.loss) == (rules.best_mode == "min") and loss != one.loss
                ]
                newer = [other for other in line[:age] if other.loss == one.loss]
                is_best = len(better) + len(newer) < rules.keep_best
            else:
                is_best = bool(rules.keep_best)
            if not (is_newest or is_every or is_best or one is source or rules.keeps_all):
                gone.add(one)
        return gone


class _KilledError(Exception):
    """The run was killed at this point."""


class History:
    """Runs a history on a real root, beside the model."""

    def __init__(self, root: Path) -> None:
        self.root, self.model = root, Model()

    def run(self, run: RunOf) -> None:
        """One run, from its start to its end or death."""
        model = self.model
        stands = sorted(model.standing.values(), key=lambda one: one.step)
        source = model.latest if run.start == "LATEST" else None
        if isinstance(run.start, int) and stands:
            source = stands[run.start % len(stands)]
        writer = WritableRoot(run.rules)
        path = None if source is None else self.root / f"global_step_{source.step}"
        writer.begin(self.root, path, is_latest=run.start == "LATEST")
        if source is not None:
            model.pointer = source.step
            if run.start != "LATEST":
                model.left_behind = model.continuing(source)
        self.compare(f"a run began from {source}")
        last = source
        step = 0 if source is None else source.step
        for one in run.saves:
            step += one.distance
            if not self.save(writer, run.rules, source, last, step, one):
                return
            last = model.standing[step]

    def save(
        self, writer: WritableRoot, rules: Retention, source: Saved | None, last: Saved | None, step: int, one: SaveOf
    ) -> bool:
        """One save; False if the run was killed in it."""
        model = self.model
        target = self.root / f"global_step_{step}"
        save = writer.new_save(target, step)
        try:
            # The save's id stands in .metadata, as in a real one.
            (save.staging / ".metadata").write_bytes(save.save_id.encode())
            (save.staging / "manifest.json").write_bytes(encode(_manifest(save, one.loss)))
            if one.killed == "before the commit":
                return False
            model.number += 1
            new = Saved(step, save.save_id, one.loss, model.number, last)

            def note_committed(saved: publication.SaveInProgress) -> None:
                model.standing[step] = new
                self.compare(f"step {step} was saved")
                if one.killed == "before the pointer":
                    raise _KilledError
                writer.note_committed(saved)

            replaced = publication.publish(save, note_committed, None)
            model.pointer = step
            if one.killed == "before retention":
                return False
            gone = model.expected_to_go(new, rules, source)
            publication.delete_outdated(save, replaced, rules, writer.protected, None)
            for each in gone:
                del model.standing[each.step]
            self.compare(f"retention {rules} acted after step {step}")
            return True
        except _KilledError:
            return False
        finally:
            writer.note_ended()
            layout._in_progress.discard(save.staging.absolute())

    def compare(self, when: str) -> None:
        """What stands is what the model says, save by save."""
        found = {}
        for step, path in layout.step_directories(self.root):
            manifest = read_manifest(path)
            assert manifest is not None
            found[step] = manifest.attempt
        assert found == {step: one.attempt for step, one in self.model.standing.items()}, when
        order = resume_order(self.root).directories
        latest = None if self.model.latest is None else f"global_step_{self.model.latest.step}"
        assert (order[0].name if order else None) == latest, f"{when}: LATEST"


def _manifest(save: publication.SaveInProgress, loss: float | None) -> Manifest:
    content = save.save_id.encode()
    return publication.draft_manifest(
        save,
        world_size=1,
        mesh=None,
        files={".metadata": FileEntry(size_bytes=len(content), digest=bytes_digest_text([content]), rank=0)},
        buckets={},
        names={},
        uncovered={},
        run={},
        metrics={} if loss is None else {"loss": loss},
    )


@pytest.fixture(scope="module")
def root() -> Iterator[Path]:
    """One directory for all histories, which is emptied for each: a lock is held until its process ends."""
    memory = Path("/dev/shm")
    with (
        tempfile.TemporaryDirectory(prefix="histories-", dir=memory if memory.is_dir() else None) as folder,
        operations.use(_NotSynced()),
    ):
        yield Path(folder)


@settings(
    max_examples=HISTORIES,
    deadline=None,
    database=None,
    phases=(Phase.explicit, Phase.generate, Phase.shrink),
    suppress_health_check=list(HealthCheck),
)
@given(runs=st.lists(RUNS, min_size=1, max_size=5))
@pytest.mark.timeout(max(120, HISTORIES))
def test_nothing_outside_the_rules_is_ever_deleted_and_latest_follows_the_run(root: Path, runs: list[RunOf]) -> None:
    for entry in root.iterdir():
        if entry.name != ".writer.lock":
            shutil.rmtree(entry) if entry.is_dir() else entry.unlink()
    history = History(root)
    for run in runs:
        history.run(run)
