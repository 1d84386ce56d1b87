"""Every crash state of a scenario, each judged by the subject's own loader: T1, and T8 for stock DCP.

A scenario is run once, by two real ranks, and traced. For each place between two operations, in several orders of the ranks,
each persistence model gives the possible states of the disk. Each distinct state is built and loaded once, and the loader's
verdict is compared with what was promised at that place.
"""

from __future__ import annotations

import dataclasses
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from conformance.processes import forked_ranks
from conformance.storage.crash_states.oracles import ORACLES, Progress, Promise, broken
from conformance.storage.crash_states.persistence_models import MODELS, states
from conformance.storage.records import MOST_EXAMPLES, CrashStates
from conformance.storage.tracing import trees
from conformance.storage.tracing.history import History, Operation, TraceError, Tree
from conformance.storage.workload.recording import Recording, RecordingError, record
from conformance.storage.workload.scenarios import Library, Loads, Scenario, Subject, Verdict, quietly
from conformance.storage.workload.stock import Stock

ID_PREFIX = "crash/"
SUBJECTS: Mapping[str, type[Library] | type[Stock]] = {"library": Library, "stock": Stock}
PRELOAD = (
    "hyper_resume.checkpoint",
    "conformance.storage.tracing.interface",
    "torch.distributed.checkpoint.state_dict_saver",
)
_JUDGE_SECONDS = 600.0


@dataclass(frozen=True, kw_only=True)
class Options:
    """How much is examined.

    Attributes:
        share: share of the states, chosen by their ids; 1.0 is all.
        models: the persistence models.
        load_anew_every: every so many distinct states, load all step directories in full, also those that were loaded in an
            earlier state. The loader's search and verification runs in every state. 0: never.
        aftermath_every: every so many distinct states, continue with a next save (O10). 0: never.
        most_aftermaths: the most such continuations per scenario.
    """

    share: float = 1.0
    models: tuple[str, ...] = MODELS
    load_anew_every: int = 1
    aftermath_every: int = 25
    most_aftermaths: int = 40

    def keep(self, model: str, where: str) -> Callable[[str], bool]:
        """Returns a filter for the choices at a place. Those after a kill are few, so all are kept."""
        if self.share >= 1.0 or model == "kill":
            return lambda choice: True
        return lambda choice: zlib.crc32((where + choice).encode()) < self.share * (1 << 32)


@dataclass(frozen=True, kw_only=True)
class Place:
    """A crash point: after the first ``point`` operations of one order, and what was promised there."""

    order: str
    point: int
    promise: Promise


@dataclass(frozen=True, kw_only=True)
class Job:
    """One scenario of one subject, for a worker."""

    subject: str
    scenario: str
    options: Options = field(default_factory=Options)


@dataclass(frozen=True, kw_only=True)
class Examined:
    """One record per model, or the error."""

    job: Job
    records: tuple[CrashStates, ...] = ()
    error: str = ""


def places(recording: Recording, model: str, *, all_orders: bool = False) -> Iterator[tuple[Place, History]]:
    """Every crash point.

    A point that an earlier order has too comes once, except with ``all_orders``: to a model only what was done matters.
    """
    seen = set()
    for order, history in recording.histories.items():
        progress = Progress(recording.scenario.current)
        done: list[Operation] = []
        for point in range(len(history) + 1):
            if point:
                done.append(history.operations[point - 1])
                progress.observe(done[-1])
            key = _key(done, model)
            if all_orders or key not in seen:
                seen.add(key)
                yield Place(order=order, point=point, promise=progress.promise()), history


_ON_NAMES = ("make_directory", "create", "rename", "exchange", "remove", "remove_directory")


def _key(done: Sequence[Operation], model: str) -> tuple[frozenset[int], tuple[int, ...]]:
    names = (one.number for one in done if one.kind in _ON_NAMES) if model == "journal" else ()
    return frozenset(one.number for one in done), tuple(names)


class Judge:
    """Builds states and lets the loader judge each distinct one once."""

    def __init__(self, subject: Subject, scenario: Scenario, options: Options) -> None:
        """For one scenario."""
        self._subject, self._scenario, self._options = subject, scenario, options
        self._loads = Loads(subject.load, scenario.tags)
        self._verdicts: dict[int, Verdict] = {}
        self._aftermaths = 0

    def verdict(self, tree: Tree) -> tuple[int, Verdict, bool]:
        """(the state's number, the loader's verdict, whether the state is new)."""
        key = hash(frozenset(tree.items()))
        known = self._verdicts.get(key)
        if known is not None:
            return key, known, False
        turn = self._options.load_anew_every
        self._loads.begin(tree, anew=bool(turn) and len(self._verdicts) % turn == 0)
        with trees.scratch_folder() as root:
            trees.write_tree(root, tree)
            self._verdicts[key] = self._subject.judge(root, self._loads)
        return key, self._verdicts[key], True

    @property
    def loaded(self) -> bool:
        """The state that was judged last was loaded in full."""
        return self._loads.count > 0

    def aftermath(self, tree: Tree) -> str:
        """Continue from some of the states; returns what went wrong ("" if nothing did, or this state is not one of them)."""
        every = self._options.aftermath_every
        if not every or self._aftermaths >= self._options.most_aftermaths or len(self._verdicts) % every:
            return ""
        self._aftermaths += 1
        with trees.scratch_folder() as root:
            trees.write_tree(root, tree)
            return self._subject.after(root)


def judge(subject: Subject, recording: Recording, options: Options) -> list[CrashStates]:
    """Judge every state of every model; one record per model. Call it in a process of its own."""
    scenario = recording.scenario
    found = []
    with quietly():
        judging = Judge(subject, scenario, options)
        for model in options.models:
            found.append(_judge_model(judging, recording, model, options))
    return found


def _judge_model(judging: Judge, recording: Recording, model: str, options: Options) -> CrashStates:
    scenario = recording.scenario
    count, points, loaded = 0, 0, 0
    distinct: set[int] = set()
    violations = {oracle: set[int]() for oracle in ORACLES}
    examples: list[str] = []
    for place, history in places(recording, model):
        points += 1
        where = f"{ID_PREFIX}{scenario.name}/{model}/{place.order}:{place.point}/"
        for choice, tree in states(history, place.point, model, options.keep(model, where)):
            name = where + choice
            count += 1
            key, verdict, is_new = judging.verdict(tree)
            wrong = broken(verdict, place.promise)
            if key not in distinct:
                distinct.add(key)
                loaded += is_new and judging.loaded
                if is_new and judging.aftermath(tree):
                    wrong.add("O10")
            new = [oracle for oracle in wrong if key not in violations[oracle]]
            for oracle in new:
                violations[oracle].add(key)
            if new and len(examples) < MOST_EXAMPLES:
                examples.append(f"{name} [{'+'.join(sorted(new))}]")
    counted = {oracle: len(keys) for oracle, keys in violations.items()}
    counted["interface"] = len(recording.around) if model == "kill" else 0
    if model == "kill" and recording.around:
        examples.append(f"around the interface: {recording.around[0]}")
    return CrashStates(
        scenario=scenario.name, model=model, crash_points=points, states=count, distinct=len(distinct), loaded=loaded,
        violations=counted, examples=tuple(examples),
    )  # fmt: skip


def examine(job: Job) -> Examined:
    """Record one scenario and judge it. To be called in a process without threads."""
    subject = subject_of(job.subject)
    try:
        recording = record(subject, scenario_of(subject, job.scenario))
    except (RecordingError, TraceError) as error:
        return Examined(job=job, error=str(error))
    ended = forked_ranks.run_alone(judge, subject, recording, job.options, limit_seconds=_JUDGE_SECONDS)
    if ended.how != "returned":
        return Examined(job=job, error=f"{job.scenario}: {ended.summary}\n{ended.trace}")
    return Examined(job=job, records=tuple(ended.value))


def subject_of(name: str) -> Subject:
    """The library, or stock DCP."""
    return SUBJECTS[name]()


def scenario_of(subject: Subject, name: str) -> Scenario:
    """The subject's scenario of that name.

    Raises:
        RecordingError: there is no such scenario.
    """
    for scenario in subject.scenarios():
        if scenario.name == name:
            return scenario
    raise RecordingError(f"no scenario {name!r}; there are {', '.join(one.name for one in subject.scenarios())}")


def run(options: Options | None = None, *, workers: int = 2) -> list[Examined]:
    """Examine all scenarios of the library and of stock DCP, whose counts become the ``baseline`` of the library's records."""
    options = options or Options()
    jobs = [
        Job(subject=name, scenario=scenario.name, options=options)
        for name in SUBJECTS
        for scenario in subject_of(name).scenarios()
    ]
    found: list[Examined] = forked_ranks.fan_out(examine, jobs, workers=workers, preload=PRELOAD)
    peer = {(one.scenario, one.model): one for each in found if each.job.subject == "stock" for one in each.records}
    joined = []
    for each in found:
        if each.job.subject == "library":
            records = tuple(_beside(one, peer.get((one.scenario, one.model))) for one in each.records)
            joined.append(dataclasses.replace(each, records=records))
    return joined + [each for each in found if each.job.subject == "stock"]


def _beside(one: CrashStates, peer: CrashStates | None) -> CrashStates:
    if peer is None:
        return one
    return dataclasses.replace(one, baseline=sum(peer.violations.values()), baseline_distinct=peer.distinct)
