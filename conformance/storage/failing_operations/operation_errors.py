"""T3: the N-th file operation fails, for N = 1, 2, ... to the last one; ten errors, once and from then on, on each rank.

Two ranks run one scenario (a first save, the next one with pointer and retention, the same step again, a save in the
background, a load, a resume) on file operations of which one fails. Both ranks must then report the same within the time limit:

- earlier checkpoints are unchanged, byte for byte; only those that retention may delete can be missing, for a newer one;
- a successful save is complete, and pointer and LATEST name it; a failed one has published nothing, or its error says so;
- the pointer names a checkpoint that loads;
- a file whose sync failed is never synced again, and is never published;
- names are synced too; a short write or read, which is no error, is continued;
- on a disk that works again the next save succeeds, and leaves no staged file, no trash and no open file;
- a load that meets an error which passes loads the newest checkpoint; an error that stays stops the run, and says that nothing
  is known to be damaged; no load takes an older checkpoint, and the pointer does not move;
- a failed load has not changed the live state, and succeeds when it is repeated.

One pair of ranks runs many N of a case, because a process must be able to save again after a failed save. A pair that hangs or
dies is killed, and another continues after that operation.
"""

from __future__ import annotations

import pickle
import random
import tempfile
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path

from conformance.processes.forked_ranks import Ended, Workers, fan_out, run_alone, run_ranks, scratch
from conformance.storage.failing_operations.judge import Judge, Verdict
from conformance.storage.failing_operations.runs import ERRORS, SCENARIOS, TIER, WORLD, Case, Rank, RankReport, Scenario
from conformance.storage.records import MOST_EXAMPLES, OperationErrors
from conformance.storage.workload import small_checkpoint as small

_THIRD = 3
# A case that never stops failing would be a bug of this module.
_MOST_OPERATIONS = 500
_PAIR_SECONDS = 180.0
# A rank that waits this long in one collective hangs: a whole run takes tenths of a second.
_COLLECTIVE_SECONDS = 10.0
_LIBRARY = "hyper_resume.checkpoint"


# ---- many runs ----------------------------------------------------------------------------------------------------------


class NothingToDo(RuntimeError):
    """The root of a scenario could not be saved: an error of the harness, or a broken library."""


def build(folder: Path, scenario: Scenario) -> Path:
    """Make the scenario's root below ``folder``; returns it.

    Raises:
        NothingToDo: a save failed.
    """

    def save(root: Path) -> None:
        from hyper_resume.checkpoint import DistributedCheckpointer

        checkpointer = DistributedCheckpointer(extra_state_per_rank=scenario.layout == "per_rank")
        checkpointer.begin_run(str(root), restored_from=None)
        for step in scenario.before:
            small.save(checkpointer, root, step)

    root = folder / scenario.name.replace(" ", "-") / "root"
    root.mkdir(parents=True)
    failed = [end.summary for end in run_ranks(save, root) if end.how != "returned"]
    if failed:
        raise NothingToDo("; ".join(failed))
    return root


def examine(template: Path, case: Case) -> list[Verdict]:
    """All runs of a case; in the last one nothing fails. Call it in a process without threads."""
    return [verdict for part in examine_in_parts(template, case) for verdict in part]


def examine_in_parts(
    template: Path, case: Case, *, most_hangs: int = 3, runs_of_a_pair: int = 40
) -> Iterator[list[Verdict]]:
    """The same, yielded per pair of ranks; gives up after ``most_hangs`` pairs in a row that hung or died.

    A pair costs as much as a run, so it makes ``runs_of_a_pair``.
    """
    scenario = next(one for one in SCENARIOS if one.name == case.scenario)
    first, hangs = case.at or case.first, 0
    while hangs < most_hangs and first < _MOST_OPERATIONS:
        with tempfile.TemporaryDirectory(prefix="errors-", dir=scratch()) as place:
            folder = Path(place)
            ends = run_ranks(
                lambda folder=folder, first=first: Rank(folder, template, scenario, case, runs_of_a_pair).run_from(
                    first
                ),
                limit_seconds=_PAIR_SECONDS,
                collective_seconds=_COLLECTIVE_SECONDS,
            )
            reports = [_read(folder / f"rank_{rank}") for rank in range(WORLD)]
            found = _judge_all(Judge(scenario, case, template), folder, reports)
        first += len(found) * case.stride
        is_whole = all(end.how == "returned" for end in ends)
        if not is_whole:
            found.append(_broken(case, first, ends))
            first += case.stride
        hangs = 0 if is_whole else hangs + 1
        yield found
        if case.at is not None or (is_whole and not found[-1].struck):
            return


def _judge_all(judge: Judge, folder: Path, reports: Sequence[Sequence[RankReport]]) -> list[Verdict]:
    both = list(zip(*reports, strict=False))
    end = run_alone(
        lambda: [
            judge.judge(of_rank[0].number, of_rank, folder / f"{of_rank[0].number}" / "after") for of_rank in both
        ],
        limit_seconds=60,
    )
    if end.how != "returned":
        raise NothingToDo(f"judging: {end.summary}\n{end.trace}")
    verdicts: list[Verdict] = end.value
    return verdicts


def _read(path: Path) -> list[RankReport]:
    found: list[RankReport] = []
    if path.exists():
        with path.open("rb") as file:
            while file.peek(1):
                try:
                    found.append(pickle.load(file))
                except (EOFError, pickle.UnpicklingError):
                    break
    return found


def _broken(case: Case, number: int, ends: Sequence[Ended]) -> Verdict:
    violations = tuple(dict.fromkeys(_how(end) for end in ends if end.how != "returned"))
    message = "; ".join(end.summary for end in ends)
    return Verdict(
        case=case,
        number=number,
        struck="?",
        survived=False,
        violations=violations,
        message=message,
        id=case.id_at(number),
    )


def _how(end: Ended) -> str:
    if end.how == "died":
        return "a rank died"
    # After a timeout torch aborts the collective on one rank; the other finds its connection closed.
    return "hung" if end.how == "hung" or "gloo" in end.message or "imed out" in end.message else "the harness failed"


def cases(scenarios: Sequence[Scenario] = SCENARIOS, *, thorough: bool = True) -> list[Case]:
    """Every error, once and from then on, on each rank, in each scenario.

    Without ``thorough``, EIO hits every operation, and each other error a third of them, with alternating offsets.
    """
    return [
        Case(
            scenario=scenario.name,
            rank=rank,
            error=error,
            persistent=persistent,
            first=1 if thorough or index == 0 or error.startswith("short") else 1 + index % _THIRD,
            stride=1 if thorough or index == 0 or error.startswith("short") else _THIRD,
        )
        for scenario in scenarios
        for index, error in enumerate(ERRORS)
        for persistent in (False, True)
        for rank in range(WORLD)
    ]


def run(*, share: float = 1.0, seed: int = 0, thorough: bool = False, workers: int = 2) -> tuple[OperationErrors, ...]:
    """Try a share of all cases (see :func:`cases`); one record for each scenario, error and form.

    Raises:
        WorkerError: harness trouble, or nothing could be saved.
    """
    return tuple(summarise(verdicts(share=share, seed=seed, thorough=thorough, workers=workers)))


def verdicts(*, share: float = 1.0, seed: int = 0, thorough: bool = False, workers: int = 2) -> list[Verdict]:
    """The verdict of every run."""
    chosen = cases(thorough=thorough)
    if share < 1.0:
        chosen = random.Random(seed).sample(chosen, max(1, round(share * len(chosen))))
    with (
        tempfile.TemporaryDirectory(prefix="errors-", dir=scratch()) as place,
        Workers(workers, preload=[_LIBRARY]) as pool,
    ):
        roots = pool.map(_build, [(place, one) for one in SCENARIOS])
        templates = {scenario.name: root for scenario, root in zip(SCENARIOS, roots, strict=True)}
        results = pool.map(_examine, [(templates[case.scenario], case) for case in chosen])
    return [verdict for of_case in results for verdict in of_case]


def _build(job: tuple[str, Scenario]) -> str:
    return str(build(Path(job[0]), job[1]))


def _examine(job: tuple[str, Case]) -> list[Verdict]:
    return examine(Path(job[0]), job[1])


def summarise(found: Sequence[Verdict]) -> list[OperationErrors]:
    """One record per scenario, error and form; runs in which nothing failed are not counted."""
    rows: dict[tuple[str, str, bool], list[Verdict]] = {}
    for verdict in found:
        key = (verdict.case.scenario, verdict.case.error, verdict.case.persistent)
        rows.setdefault(key, []).append(verdict)
    return [_record(*key, of_row) for key, of_row in rows.items()]


def _record(scenario: str, error: str, persistent: bool, of_row: Sequence[Verdict]) -> OperationErrors:
    struck = [verdict for verdict in of_row if verdict.struck]
    bad = [verdict for verdict in of_row if verdict.violations]
    return OperationErrors(
        scenario=scenario,
        error=error,
        persistent=persistent,
        runs=len(struck),
        survived=sum(verdict.survived for verdict in struck),
        violations=dict(Counter(name for verdict in bad for name in verdict.violations)),
        examples=tuple(verdict.id for verdict in bad[:MOST_EXAMPLES]),
    )


def parse_id(case_id: str) -> Case:
    """The case and the N of an id.

    Raises:
        ValueError: it is no such id.
    """
    tier, scenario, rank, error, form, number = case_id.split(":")
    known = {one.name.replace(" ", "-"): one.name for one in SCENARIOS}
    if tier != TIER or scenario not in known or form not in ("once", "for-good"):
        raise ValueError(f"no id of this tier: {case_id}")
    error, _, only = error.partition("@")
    return Case(
        scenario=known[scenario],
        only=only,
        rank=int(rank.removeprefix("rank-")),
        error=error.replace("-", " "),
        persistent=form == "for-good",
        at=int(number),
    )


def replay(case_id: str) -> Verdict:
    """Let that operation fail again, and judge it.

    Raises:
        ValueError: it is no such id.
    """
    (found,) = fan_out(_replay, [parse_id(case_id)], workers=1, preload=[_LIBRARY])
    verdict: Verdict = found
    return verdict


def examine_id(case_id: str) -> Verdict:
    """As :func:`replay`, in a process without threads."""
    return _replay(parse_id(case_id))


def _replay(case: Case) -> Verdict:
    scenario = next(one for one in SCENARIOS if one.name == case.scenario)
    with tempfile.TemporaryDirectory(prefix="errors-", dir=scratch()) as place:
        return examine(build(Path(place), scenario), case)[0]
