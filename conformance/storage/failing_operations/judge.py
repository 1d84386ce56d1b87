"""Judges one run of T3: what the two ranks reported, and what was on disk right after."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from conformance.storage.damage.judge import read_tree
from conformance.storage.failing_operations.runs import ASIDE, LOCK, POINTER, Case, RankReport, Scenario
from conformance.storage.workload import small_checkpoint as small


@dataclass(frozen=True, kw_only=True)
class Verdict:
    """The outcome of one run: which operation failed, whether the run succeeded in spite of it, and the broken promises."""

    case: Case
    number: int
    struck: str
    survived: bool
    violations: tuple[str, ...] = ()
    message: str = ""
    id: str = ""


def _says_why(report: RankReport, step: int) -> bool:
    """A copy that was set aside may stay there if the run failed at its begin, or has warned that it leaves it there."""
    return report.phase == "begin" or any(
        f"global_step_{step}" in line and "can't be moved back" in line for line in report.warnings
    )


class Judge:
    """Compares the ranks' reports, and the disk right after, with the promises."""

    def __init__(self, scenario: Scenario, case: Case, template: Path) -> None:
        """``template`` is the root before the run."""
        self._scenario = scenario
        self._case = case
        self._before = read_tree(template)

    def judge(self, number: int, reports: Sequence[RankReport], after: Path) -> Verdict:
        """Judge one run. It loads checkpoints, so call it in a process of its own."""
        struck = next((one.struck for one in reports if one.struck), "")
        violations = [*self._of_the_ranks(reports)]
        if self._scenario.saves is None:
            violations += self._of_a_load(reports)
            now = read_tree(after)
            if _pointer(now) < _pointer(self._before):
                violations.append("the pointer moved down for what could not be read")
            # A run that resumes takes the lock, and nothing else of it changes.
            if {**now, LOCK: b""} != {**self._before, LOCK: b""}:
                violations.append("a file was changed by reading")
        else:
            violations += self._of_a_save(reports, after)
        return Verdict(
            case=self._case,
            number=number,
            struck=struck,
            survived=bool(struck) and not reports[0].error,
            violations=tuple(dict.fromkeys(violations)),
            message="; ".join(
                f"{one.phase} {one.error} {one.message} {one.later} {one.left or ''}".strip() for one in reports
            ),
            id=self._case.id_at(number),
        )

    def _of_the_ranks(self, reports: Sequence[RankReport]) -> Iterator[str]:
        if len({(one.error, one.message) for one in reports}) > 1:
            yield "ranks disagree"
        if any(one.later for one in reports):
            yield "the next one fails on a mended disk"
        for one in reports:
            if not one.error and one.unsynced:
                yield "done before its names were synced"
            if one.error and self._case.error.startswith("short"):
                yield "gave up on what is no error"
            if one.removed_early:
                yield "deleted before it had left its name for good"
            if one.synced_again:
                yield "synced again after a failed sync"
            if one.left:
                yield "something is left behind"
            if one.error and one.error not in _RIGHT_ERRORS[one.phase]:
                yield "wrong class of error"

    def _of_a_load(self, reports: Sequence[RankReport]) -> Iterator[str]:
        newest = max(self._scenario.before)
        for one in reports:
            if one.is_touched:
                yield "touched live state"
            if one.wrong:
                yield "loaded silently"
        if not reports[0].error and len({one.found for one in reports}) > 1:
            yield "ranks disagree"
        if self._case.error.startswith("short") and reports[0].found != newest:
            yield "gave up on what is no error"
        if reports[0].found not in (None, newest):
            yield "stepped back for what could not be read"
        if not self._case.persistent and reports[0].found != newest:
            yield "gave up on an error that passes"

    def _of_a_save(self, reports: Sequence[RankReport], after: Path) -> Iterator[str]:
        assert self._scenario.saves is not None
        step, variant = self._scenario.saves
        was_there = step in self._scenario.before
        content = read_tree(after)
        target = self._scenario.target
        published = (after / target).is_dir() and (not was_there or not self._is_old(content, step))
        is_good = published and not _load_problem(after / target, step, variant)
        for other in self._scenario.before:
            if other == step and published:
                continue
            missing = not (after / f"global_step_{other}").exists()
            if missing and other in self._scenario.expendable and is_good:
                continue
            if missing and self._is_still_set_aside(content, other) and _says_why(reports[0], other):
                continue
            if not self._is_old(content, other):
                yield "an earlier checkpoint is lost"
        if published and not is_good:
            yield "published what does not load"
        pointed = content.get(POINTER, b"").decode().strip()
        yield from self._of_the_pointer(pointed, after, (step, variant) if published else None)
        is_found = self._scenario.directory or (pointed == str(step) and _latest(after) == step)
        if not reports[0].error and not (is_good and is_found):
            yield "said success, and it is not there"
        if reports[0].error and published and _SAYS_PUBLISHED not in reports[0].message:
            yield "published a save that failed"
        if published and any("/.staging/global_step_" in one.failed_sync for one in reports):
            yield "published after a failed sync"

    def _of_the_pointer(self, pointed: str, after: Path, new: tuple[int, int] | None) -> Iterator[str]:
        if not pointed:
            if self._scenario.before:
                yield "the pointer is lost"
            return
        step = int(pointed)
        if step == self._scenario.set_aside and not (after / f"global_step_{step}").exists():
            return
        variant = new[1] if new is not None and new[0] == step else 0
        if _load_problem(after / f"global_step_{step}", step, variant):
            yield "the pointer names what does not load"

    def _is_old(self, content: dict[str, bytes], step: int) -> bool:
        prefix = f"global_step_{step}/"
        return _part(content, prefix) == _part(self._before, prefix)

    def _is_still_set_aside(self, content: dict[str, bytes], step: int) -> bool:
        place = f"{ASIDE.format(step=step)}/"
        found = {f"global_step_{step}/{name.removeprefix(place)}": data for name, data in _part(content, place).items()}
        return step == self._scenario.set_aside and found == _part(self._before, f"global_step_{step}/")


# Part of an error that came after the commit: only the pointer is missing.
_SAYS_PUBLISHED = "the checkpoint is committed"
# Nothing is damaged, so an error says that something could not be read.
_LOADING = ("CheckpointUnreadableError",)
_RIGHT_ERRORS = {
    # It is before any save, so the system's own error is allowed.
    "begin": ("CheckpointSaveError", "CheckpointUnreadableError", "OSError", "PermissionError"),
    "save": ("CheckpointSaveError",),
    "search": _LOADING,
    "load": _LOADING,
}


def _pointer(content: dict[str, bytes]) -> int:
    return int(content[POINTER].decode())


def _part(content: dict[str, bytes], prefix: str) -> dict[str, bytes]:
    return {name: data for name, data in content.items() if name.startswith(prefix)}


def _load_problem(directory: Path, step: int, variant: int) -> str:
    """Why the directory does not load as that step was saved; "" when it does."""
    from hyper_resume.checkpoint import DistributedCheckpointer

    live = small.destination()
    skeleton = dict.fromkeys(small.TRAINING_STATE_KEYS)
    try:
        with small.collected_warnings():
            extra = DistributedCheckpointer().load(str(directory), live, extra_state_skeleton=skeleton)
    except Exception as error:  # noqa: BLE001  whatever it is, it does not load
        return str(error)
    wrong = small.difference(live, small.expected(step, variant))
    return wrong or small.training_state_difference(extra, step, 0, variant)


def _latest(root: Path) -> int | None:
    from hyper_resume.checkpoint import DistributedCheckpointer

    with small.collected_warnings():
        found = DistributedCheckpointer().find_latest_checkpoint(str(root))
    return None if found is None else int(Path(found).name.removeprefix("global_step_"))
