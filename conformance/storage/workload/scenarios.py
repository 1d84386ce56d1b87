"""Scenarios for crashes: saves by two ranks through the library, and the verdict of its real loader afterwards."""

from __future__ import annotations

import contextlib
import functools
import logging
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from conformance.storage.tracing.history import Tree
from conformance.storage.tracing.recorder import Recorder
from conformance.storage.workload import small_checkpoint as small

WORLD_SIZE = 2
Mark = Callable[[str], None]
Program = Callable[[Path, Mark], None]

# The marks that a scenario's program records. ``begin TAG``: a save is requested; ``durable TAG``: it is durable;
# ``going back TAG`` and ``back TAG``: a run begins to resume from that save, and has recorded that.
BEGIN, DURABLE, GOING_BACK, BACK = "begin ", "durable ", "going back ", "back "
NONE = "none"


def tag(step: int, variant: int = 0) -> str:
    """The name of one save's content; ``variant`` distinguishes saves of one step."""
    return f"{step}/{variant}"


@dataclass(frozen=True, kw_only=True)
class Scenario:
    """Programs of a run, each in processes of its own; the last one is traced.

    Attributes:
        name: permanent.
        title: one line.
        before: programs that run first, to their end; all their changes are durable.
        program: the traced program.
        current: the save that LATEST names before; ``none`` before the first.
        tags: all saves, in the order in which they are made.
    """

    name: str
    title: str
    before: tuple[Program, ...]
    program: Program
    current: str
    tags: tuple[str, ...]


@dataclass(frozen=True, kw_only=True)
class Verdict:
    """A loader's verdict on one state of the disk.

    ``latest`` is a tag, ``none`` (nothing was found), ``refused: ...`` (the search raised), ``error: ...`` (it was found and
    did not load) or ``other: ...`` (it loaded, and equals no save). ``claims`` is the same for every step directory that
    counts as complete.
    """

    latest: str
    claims: Mapping[str, str] = field(default_factory=dict)


class Loads:
    """Full loads of the step directories of successive states.

    The result depends on the directory's bytes, so a directory that was loaded before is loaded again only with ``anew``.
    """

    def __init__(self, load: Callable[[Path, tuple[str, ...]], str], tags: tuple[str, ...]) -> None:
        """``load`` is the loader; ``tags`` are all saves."""
        self._load = load
        self._tags = tags
        self._known: dict[tuple[str, int], str] = {}
        self._state: Tree = {}
        self._anew = False
        self.count = 0

    def begin(self, state: Tree, *, anew: bool) -> None:
        """Go on to the next state."""
        self._state, self._anew, self.count = state, anew, 0

    def of(self, path: Path) -> str:
        """The result of loading one step directory: a tag, ``error: ...`` or ``other: ...``."""
        prefix = f"{path.name}/"
        inside = frozenset(item for item in self._state.items() if item[0].startswith(prefix))
        key = path.name, hash(inside)
        if self._anew or key not in self._known:
            self.count += 1
            self._known[key] = self._load(path, self._tags)
        return self._known[key]


class Subject(Protocol):
    """The storage under test: the library, or stock DCP."""

    name: str
    wants_interface: bool

    def scenarios(self) -> tuple[Scenario, ...]:
        """All of its scenarios."""
        ...

    def installed(self, recorder: Recorder) -> contextlib.AbstractContextManager[None]:
        """Additional hooks of the recorder, besides the system's functions, in each rank."""
        ...

    def load(self, path: Path, tags: tuple[str, ...]) -> str:
        """Load a step directory in full; the tag of the save that it is, ``error: ...`` or ``other: ...``."""
        ...

    def judge(self, root: Path, loads: Loads) -> Verdict:
        """Its loader's verdict on the state in ``root``; changes nothing there."""
        ...

    def after(self, root: Path) -> str:
        """Continue after the crash: begin a run, save again, check. Returns "" or what is wrong. Changes ``root``."""
        ...


# ---- the library -----------------------------------------------------------------------------------------------------------


def _checkpointer(mark: Mark, variants: Mapping[int, int] | None = None, **options: Any) -> Any:
    from hyper_resume.checkpoint import build_checkpointer

    checkpointer = build_checkpointer("dcp", **options)

    def on_event(event: Any) -> None:
        if event.state == "durable":
            mark(DURABLE + tag(event.global_step, (variants or {}).get(event.global_step, 0)))

    checkpointer.add_listener(on_event)
    return checkpointer


def saving(
    *saves: tuple[int, int], start: tuple[int, int] | None = None, save_async: bool = False, **options: Any
) -> Program:
    """A program that makes ``saves`` ((step, variant)), resuming from ``start``. ``options`` are the checkpointer's."""

    def program(root: Path, mark: Mark) -> None:
        checkpointer = _checkpointer(mark, dict(saves), **options)
        if start is not None:
            mark(GOING_BACK + tag(*start))
        checkpointer.begin_run(
            str(root), restored_from=None if start is None else str(root / f"global_step_{start[0]}")
        )
        if start is not None:
            mark(BACK + tag(*start))
        for step, variant in saves:
            mark(BEGIN + tag(step, variant))
            small.save(checkpointer, root, step, variant, save_async=save_async)
        checkpointer.maybe_wait_for_async_save()

    return program


def _without_exchange(program: Program) -> Program:
    def instead(root: Path, mark: Mark) -> None:
        from hyper_resume.checkpoint.disk import operations

        recording: Any = operations.current()
        recording.can_exchange = False
        program(root, mark)

    return instead


def _retention(**keep: Any) -> Any:
    from hyper_resume.checkpoint.history.retention import Retention

    return Retention(**keep)


class Library:
    """hyper_resume."""

    name = "hyper_resume"
    wants_interface = True

    def scenarios(self) -> tuple[Scenario, ...]:
        """See :class:`Subject`."""
        one, two, three = (1, 0), (2, 0), (3, 0)
        again = (2, 1)
        first = saving(one)
        both = saving(one, two)
        resave = saving(again, start=two)
        embedded = functools.partial(saving, extra_state_per_rank=False)
        return (
            _scenario("first_save", "the first save into an empty root", (), saving(one), (one,)),
            _scenario("next_save", "a save after an earlier one", (first,), saving(two, start=one), (one,), two),
            _scenario("resave", "a step is saved again: the two directories are exchanged", (both,), resave, (one, two), again),
            _scenario(
                "resave_two_renames", "the same where names can't be exchanged", (both,), _without_exchange(resave),
                (one, two), again,
            ),
            _scenario("async", "a save in the background", (first,), saving(two, start=one, save_async=True), (one,), two),
            _scenario(
                "retention", "a save after which an older one is deleted", (both,),
                saving(three, start=two, retention=_retention(keep_last=1)), (one, two), three,
            ),
            _scenario("pointer", "two saves in a row: the pointer moves twice", (first,), saving(two, three, start=one),
                      (one,), two, three),
            _scenario("embedded", "training state inside the shards", (embedded(one),),
                      embedded(two, start=one), (one,), two),
            _scenario("lineage", "a run that goes back and passes a step again",
                      (saving(one, two, three),), saving(again, start=one), (one, two, three), again),
        )  # fmt: skip

    @contextlib.contextmanager
    def installed(self, recorder: Recorder) -> Iterator[None]:
        """See :class:`Subject`."""
        from conformance.storage.tracing.interface import RecordingOperations
        from hyper_resume.checkpoint.disk import operations

        with operations.use(RecordingOperations(recorder)):
            yield

    def load(self, path: Path, tags: tuple[str, ...]) -> str:
        """See :class:`Subject`."""
        return load(path, tags)

    def judge(self, root: Path, loads: Loads) -> Verdict:
        """See :class:`Subject`."""
        from hyper_resume.checkpoint.format import layout

        claims = {
            path.name: loads.of(path) for _, path in layout.step_directories(root) if not layout.why_incomplete(path)
        }
        try:
            found = _checkpointer(_ignore).find_latest_checkpoint(str(root))
        except Exception as error:  # noqa: BLE001  whatever it is, it is the verdict
            return Verdict(latest=f"refused: {_first_line(error)}", claims=claims)
        latest = NONE if found is None else claims.get(Path(found).name) or loads.of(Path(found))
        return Verdict(latest=latest, claims=claims)

    def after(self, root: Path) -> str:
        """See :class:`Subject`."""
        checkpointer = _checkpointer(_ignore)
        try:
            found = checkpointer.find_latest_checkpoint(str(root))
        except Exception:  # noqa: BLE001  judged already; a run that is refused starts from scratch
            found = None
        try:
            checkpointer.begin_run(str(root), restored_from=found)
            small.save(checkpointer, root, 9)
            latest = checkpointer.find_latest_checkpoint(str(root))
        except Exception as error:  # noqa: BLE001  whatever it is, it is the verdict
            return f"the next save failed: {_first_line(error)}"
        loaded = NONE if latest is None else load(Path(latest), (tag(9),), ranks=1)
        if loaded != tag(9):
            return f"after the next save LATEST is {latest}: {loaded}"
        left = [
            path.relative_to(root).as_posix() for folder in (".staging", ".trash") for path in root.glob(f"{folder}/*")
        ]
        return f"left over after the next save: {', '.join(left)}" if left else ""


def _ignore(_: str) -> None:
    return


def _first_line(error: BaseException) -> str:
    return f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"


def _scenario(
    name: str,
    title: str,
    before: tuple[Program, ...],
    program: Program,
    first_tags: tuple[tuple[int, int], ...],
    *later: tuple[int, int],
) -> Scenario:
    current = tag(*first_tags[-1]) if before else NONE
    return Scenario(
        name=name, title=title, before=before, program=program, current=current,
        tags=tuple(tag(*one) for one in (*first_tags, *later)),
    )  # fmt: skip


def load(path: Path, tags: tuple[str, ...], *, ranks: int = WORLD_SIZE) -> str:
    """Load a step directory in this process alone, with the training state of each of ``ranks``.

    Returns:
        the tag of the save that it is, bit for bit; otherwise ``error: ...`` or ``other: ...`` (see :class:`Verdict`).
    """
    from hyper_resume.checkpoint.format import extra_state

    state = small.destination()
    skeleton = dict.fromkeys(small.TRAINING_STATE_KEYS)
    try:
        mine = _checkpointer(_ignore).load(str(path), state, extra_state_skeleton=skeleton)
        training = {0: mine}
        if (path / extra_state.DIRECTORY_NAME).is_dir():
            training |= {rank: extra_state.read_file(path, rank) for rank in range(ranks)}
    except Exception as error:  # noqa: BLE001  whatever it is, it is the verdict
        return f"error: {_first_line(error)}"
    return which(state, training, tags)


def which(state: Mapping[str, Any], training: Mapping[int, Mapping[str, Any]], tags: tuple[str, ...]) -> str:
    """The tag of the save that was loaded, or ``other: ...`` with the first difference from the nearest."""
    found: dict[str, str] = {}
    for one in tags:
        step, variant = map(int, one.split("/"))
        found[one] = small.difference(state, wanted(step, variant)) or next(
            (
                f"rank {rank}: {different}"
                for rank, extra in training.items()
                if (different := small.training_state_difference(extra, step, rank, variant))
            ),
            "",
        )
        if not found[one]:
            return one
    return f"other: {'; '.join(f'{name} differs from {one}' for one, name in found.items())}"


_wanted: dict[tuple[int, int], dict[str, Any]] = {}


def wanted(step: int, variant: int) -> dict[str, Any]:
    """The expected values of a load; computed once."""
    if (step, variant) not in _wanted:
        _wanted[step, variant] = small.expected(step, variant)
    return _wanted[step, variant]


@contextlib.contextmanager
def quietly() -> Iterator[None]:
    """Suppress the library's warnings: thousands of directories are damaged on purpose here."""
    logger = logging.getLogger("hyper_resume")
    before = logger.disabled, logger.level
    logger.setLevel(logging.CRITICAL + 1)
    try:
        yield
    finally:
        logger.disabled = before[0]
        logger.setLevel(before[1])
