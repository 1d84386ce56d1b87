"""The runs of T3: what two ranks do while one file operation fails, and what each reports afterwards."""

from __future__ import annotations

import os
import pickle
import shutil
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from conformance.storage.workload import small_checkpoint as small
from conformance.storage.workload.small_checkpoint import Layout

TIER = "operation-errors"
WORLD = 2
ERRORS = ("EIO", "ENOSPC", "EDQUOT", "EROFS", "EACCES", "ESTALE", "EMFILE", "EINTR", "short write", "short read")
ASIDE = ".staging/global_step_{step}.0123456789ab.replaced"
POINTER = "latest_checkpoint_iteration.txt"
LOCK = ".writer.lock"
_LATER = 50


@dataclass(frozen=True, kw_only=True)
class Scenario:
    """What is run, on a root with the checkpoints ``before`` (steps, in the order of their saves).

    ``saves`` is the (step, variant) to save; None for a load. ``restored`` is the step that the run resumed from.
    ``expendable`` are steps that retention may delete once the new one is durable. ``set_aside`` is a step that a save, which
    was then killed, had moved aside. ``directory`` is the name of the saved directory, if that is no ``global_step_N``. With
    ``resumes``, a run begins after the load.
    """

    name: str
    layout: Layout
    before: tuple[int, ...]
    restored: int | None = None
    saves: tuple[int, int] | None = None
    in_background: bool = False
    keep_last: int | None = None
    expendable: tuple[int, ...] = ()
    set_aside: int | None = None
    directory: str = ""
    resumes: bool = False

    @property
    def target(self) -> str:
        """The name of the directory that is saved."""
        assert self.saves is not None
        return self.directory or f"global_step_{self.saves[0]}"


SCENARIOS: tuple[Scenario, ...] = (
    Scenario(name="first save", layout="per_rank", before=(), saves=(10, 0)),
    Scenario(
        name="next save",
        layout="per_rank",
        before=(10, 20, 30),
        restored=30,
        saves=(40, 0),
        keep_last=3,
        expendable=(10,),
    ),
    Scenario(name="same step again", layout="embedded", before=(10, 20), restored=10, saves=(20, 1)),
    Scenario(name="background save", layout="per_rank", before=(10,), restored=10, saves=(20, 0), in_background=True),
    Scenario(name="save under another name", layout="per_rank", before=(), saves=(10, 0), directory="final"),
    Scenario(name="run after a crash", layout="per_rank", before=(10, 20), restored=10, saves=(30, 0), set_aside=20),
    Scenario(name="load", layout="per_rank", before=(10, 20)),
    Scenario(name="load, embedded", layout="embedded", before=(10, 20)),
    Scenario(name="resume", layout="per_rank", before=(10, 20), resumes=True),
)


@dataclass(frozen=True, kw_only=True)
class Case:
    """All N of one error in one scenario on one rank, until nothing fails; every ``stride``-th from ``first``; or one, ``at``.

    ``only`` names the kind of operation that fails; None for every kind.
    """

    scenario: str
    rank: int
    error: str
    persistent: bool
    at: int | None = None
    first: int = 1
    stride: int = 1
    only: str = ""

    def id_at(self, number: int) -> str:
        """``replay`` takes it."""
        error = f"{self.error}@{self.only}" if self.only else self.error
        words = (self.scenario, f"rank {self.rank}", error, "for good" if self.persistent else "once", str(number))
        return ":".join((TIER, *(word.replace(" ", "-") for word in words)))


@dataclass(frozen=True, kw_only=True)
class RankReport:
    """What one rank reports of one run. ``error`` is "" for success; ``phase`` is where it ended.

    ``found`` is the step of LATEST, ``wrong`` the first wrong value of a load, ``unsynced`` the final names that no sync of
    their directory has made durable.
    """

    number: int
    phase: str
    error: str = ""
    message: str = ""
    struck: str = ""
    failed_sync: str = ""
    synced_again: str = ""
    later: str = ""
    left: tuple[str, ...] = ()
    unsynced: tuple[str, ...] = ()
    removed_early: str = ""
    is_touched: bool = False
    found: int | None = None
    wrong: str = ""
    warnings: tuple[str, ...] = ()


# ---- inside the ranks ---------------------------------------------------------------------------------------------------


class Rank:
    """One rank of a pair: runs a scenario again and again, each time on a fresh copy of the root."""

    def __init__(self, folder: Path, template: Path, scenario: Scenario, case: Case, most: int) -> None:
        """``folder`` is the pair's own, ``template`` the scenario's root, ``most`` the largest number of runs."""
        import torch.distributed as dist

        from hyper_resume import collective

        self._folder = folder
        self._template = template
        self._scenario = scenario
        self._case = case
        self._most = most
        self._rank = dist.get_rank()
        # One group for all runs: it costs more than a save, and no disk error concerns it.
        self._group = collective.new_cpu_group()

    def _checkpointer(self, **choices: Any) -> Any:
        from hyper_resume.checkpoint import DistributedCheckpointer

        checkpointer = DistributedCheckpointer(**choices)
        checkpointer._own_group = self._group
        return checkpointer

    def run_from(self, first: int) -> None:
        """Run the next N from ``first``; each report is on disk before the next run begins."""
        import torch.distributed as dist

        for number in range(first, first + self._most * self._case.stride, self._case.stride):
            root = self._folder / f"{number}" / "root"
            if self._rank == 0:
                root.parent.mkdir()
                # The first save creates its root, whose name must be durable too.
                if self._scenario.before:
                    shutil.copytree(self._template, root)
                if self._scenario.set_aside:
                    set_step_aside(root, self._scenario.set_aside)
            dist.barrier()
            report = self._once(root, number)
            with (self._folder / f"rank_{self._rank}").open("ab") as file:
                pickle.dump(report, file)
            struck = [""] * WORLD
            dist.all_gather_object(struck, report.struck)
            if not any(struck) or self._case.at is not None:
                return

    def _once(self, root: Path, number: int) -> RankReport:
        import torch.distributed as dist

        from conformance.storage.failing_operations.injection import FailingOperations, Fault
        from hyper_resume.checkpoint.disk import operations

        case = self._case
        fault = Fault(error=case.error, at=number, persistent=case.persistent, only=case.only)
        failing = FailingOperations(fault if self._rank == self._case.rank else None)
        act = self._save if self._scenario.saves else self._load
        with small.collected_warnings() as warnings, operations.use(failing):
            report, again = act(root)
        dist.barrier()
        if self._rank == 0:
            after = root.with_name("after")
            if root.exists():
                shutil.copytree(root, after)
            else:
                after.mkdir()
        dist.barrier()
        goes_on = self._goes_on(number)
        later = _said(again) if goes_on else ""
        dist.barrier()
        return RankReport(
            number=number,
            struck=failing.struck,
            failed_sync=failing.failed_sync,
            synced_again=failing.synced_again,
            later=later,
            left=_left_behind(root, self._scenario) if self._scenario.saves and goes_on else (),
            unsynced=_unsynced(root, failing.unsynced),
            removed_early=failing.removed_early,
            warnings=tuple(warnings),
            **report,
        )

    def _goes_on(self, number: int) -> bool:
        """Whether to go on after a failure, which costs as much as the run: always for EIO, otherwise every fifth time."""
        turn = ERRORS.index(self._case.error) % 5
        return self._case.error == ERRORS[0] or self._case.at is not None or number % 5 == turn

    def _save(self, root: Path) -> tuple[dict[str, Any], Callable[[], None]]:
        from hyper_resume.checkpoint.history.retention import Retention

        scenario = self._scenario
        assert scenario.saves is not None
        step, variant = scenario.saves
        keep = Retention(keep_last=scenario.keep_last)
        per_rank = scenario.layout == "per_rank"
        checkpointer = self._checkpointer(extra_state_per_rank=per_rank, retention=keep)
        restored = None if scenario.restored is None else str(root / f"global_step_{scenario.restored}")
        report = {"phase": "begin", "error": "", "message": ""}
        try:
            checkpointer.begin_run(str(root), restored_from=restored)
            report["phase"] = "save"
            small.save(checkpointer, root, step, variant, save_async=scenario.in_background, name=scenario.directory)
            checkpointer.maybe_wait_for_async_save()
        except Exception as error:  # noqa: BLE001  which it is, is judged
            report.update(error=type(error).__name__, message=str(error))

        def again() -> None:
            small.save(checkpointer, root, _LATER - 1)
            # By another one, which a save of this process that has failed must not keep out.
            small.save(self._checkpointer(), root, _LATER)
            # What a failed save could not delete is deleted when the next run begins.
            self._checkpointer().begin_run(str(root), restored_from=str(root / f"global_step_{_LATER}"))
            found = self._checkpointer().find_latest_checkpoint(str(root))
            if found != str(root / f"global_step_{_LATER}"):
                raise AssertionError(f"LATEST is {found} after the next save")

        return report, again

    def _load(self, root: Path) -> tuple[dict[str, Any], Callable[[], None]]:
        live = small.sharded_destination()
        before = small.live_digest(live)
        report: dict[str, Any] = {"phase": "search", "error": "", "message": ""}
        try:
            step = self._restore(root, live, report)
        except Exception as error:  # noqa: BLE001  which it is, is judged
            is_touched = report["phase"] != "begin" and small.live_digest(live) != before
            report.update(error=type(error).__name__, message=str(error), is_touched=is_touched)
        else:
            report.update(found=step)

        def again() -> None:
            if self._restore(root, small.sharded_destination(), report) != max(self._scenario.before):
                raise AssertionError("LATEST is no more what it was")

        return report, again

    def _restore(self, root: Path, live: dict[str, Any], report: dict[str, Any]) -> int:
        checkpointer = self._checkpointer()
        found = checkpointer.find_latest_checkpoint(str(root))
        if found is None:
            raise AssertionError("LATEST found nothing, and said nothing")
        report["phase"] = "load"
        extra = checkpointer.load(found, live, extra_state_skeleton=dict.fromkeys(small.TRAINING_STATE_KEYS))
        step = int(Path(found).name.removeprefix("global_step_"))
        wrong = small.local_difference(live, step) or small.training_state_difference(extra, step, self._rank)
        report["wrong"] = report.get("wrong") or wrong
        if self._scenario.resumes:
            report["phase"] = "begin"
            checkpointer.begin_run(str(root), restored_from=found)
        return step


def _said(action: Callable[[], None]) -> str:
    try:
        action()
    except Exception as error:  # noqa: BLE001  whatever it is, it ought to have worked
        return f"{type(error).__name__}: {error}"
    return ""


def set_step_aside(root: Path, step: int) -> None:
    """Leave ``root`` as a save that is killed between its two renames (where two names can't be exchanged)."""
    (root / ".staging").mkdir(exist_ok=True)
    (root / f"global_step_{step}").rename(root / ASIDE.format(step=step))


def _unsynced(root: Path, names: Iterable[Path]) -> tuple[str, ...]:
    places = (os.path.relpath(name, root) for name in names)
    return tuple(sorted(place for place in places if not place.startswith((".staging", ".trash"))))


def _left_behind(root: Path, scenario: Scenario) -> tuple[str, ...]:
    """What a finished save must not leave: staged files, trash, temporary files, open files."""
    found = [str(path.relative_to(root)) for name in (".staging", ".trash") for path in (root / name).glob("*")]
    known = (".staging", ".trash", LOCK, POINTER, "latest_checkpoint_went_back.json", scenario.directory)
    found += [
        path.name for path in root.iterdir() if path.name not in known and not path.name.startswith("global_step_")
    ]
    for descriptor in os.listdir("/proc/self/fd") if os.path.isdir("/proc/self/fd") else ():  # noqa: PTH112, PTH208  many
        try:
            opened = os.readlink(f"/proc/self/fd/{descriptor}")  # noqa: PTH115  a name for what is open, no path
        except OSError:
            continue
        if opened.startswith(f"{root}/") and not opened.endswith(LOCK):
            found.append(f"open: {opened.removeprefix(str(root))}")
    return tuple(sorted(found))
