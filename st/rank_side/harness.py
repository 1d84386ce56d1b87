"""Hooks that turn a pytest session into one of several MPI ranks that pass, fail and end together.

pytest-mpi starts the same pytest on every rank and does nothing more: a rank that fails before a collective leaves the
others waiting in it (or in the next test's), all ranks write one JUnit file, and with too few ranks a test is skipped. So:

- Each phase of a test (setup, call, teardown) ends with an exchange of its outcome over MPI. A phase that failed on one
  rank fails on all, with that rank's number, reason and traceback.
- A rank that fails shuts its process group down, so that ranks that wait for it fail at once and come to the exchange.
- A rank that does not come to the exchange ends the run: the others fail the test, write their JUnit files and abort.
- Every test runs in the default process group (gloo, loopback only). Fixtures must not enter collectives.
- Tests that can't be run are refused; none is skipped.
"""

from __future__ import annotations

import contextlib
import importlib
import os
import re
import shutil
import sys
import tempfile
import time
import traceback
from collections.abc import Generator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import pytest

from st.rank_side.agreement import Outcome, RankFailure, Ranks, explain, shorten
from st.rank_side.group import TestGroup
from st.rank_side.limits import GRACE, Limits, TimeLimitReached

COMMAND = "mpiexec -n {ranks} python -m pytest --with-mpi {paths}"
# Limit for all ranks to come to an exchange (start, end of the collection); importing torch is the slow part.
MEETING_SECONDS = 90.0
# The timeout of a collective as a share of the test's limit, so that a rank reports before that limit.
COLLECTIVE_SHARE = 1 / 3


@dataclass(kw_only=True)
class Run:
    """This rank's part of the run."""

    ranks: Ranks
    limits: Limits
    folder: Path
    group: TestGroup
    test_seconds: float
    session_seconds: float
    collection_errors: CollectionErrors
    started: float = field(default_factory=time.monotonic)
    test_started: float = 0.0
    over: str = ""  # why the ranks can't go on together


RUN = pytest.StashKey[Run]()
IS_RANK_SIDE = pytest.StashKey[bool]()


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add the two limits."""
    options = parser.getgroup("rank-side tests")
    options.addoption("--test-limit", type=float, default=90.0, help="seconds that one test may take on every rank")
    options.addoption("--session-limit", type=float, default=600.0, help="seconds after which no other test starts")


@pytest.hookimpl(tryfirst=True)
def pytest_cmdline_main(config: pytest.Config) -> None:
    """Exchange with the other ranks; before the JUnit plugin takes its path."""
    if not config.getoption("--with-mpi", False) or config.option.help:
        return
    if config.getoption("numprocesses", None):
        raise pytest.UsageError("rank-side tests run in the ranks that mpiexec starts: leave pytest-xdist's -n out")
    limits = Limits(_rank_by_launcher(), _real_stderr(config))
    limits.end_process_after(MEETING_SECONDS + GRACE)
    ranks = Ranks(_start_mpi())
    if ranks.size == 1:
        raise pytest.UsageError(f"this is a world of one rank; type: {_command(config, 4)}")
    if config.option.xmlpath:
        file = rank_file(Path(config.option.xmlpath), ranks.rank)
        file.unlink(missing_ok=True)  # of an earlier run; this one may end before it writes
        config.option.xmlpath = str(file)
    folder = _meet(ranks, tempfile.mkdtemp(prefix="rank-side-") if ranks.rank == 0 else None)[0]
    test_seconds = config.getoption("--test-limit")
    errors = CollectionErrors()
    config.pluginmanager.register(errors)
    config.stash[RUN] = Run(
        ranks=ranks,
        limits=limits,
        folder=Path(folder),
        group=TestGroup(Path(folder), ranks.rank, ranks.size, test_seconds * COLLECTIVE_SHARE),
        test_seconds=test_seconds,
        session_seconds=config.getoption("--session-limit"),
        collection_errors=errors,
    )


def rank_file(path: Path, rank: int) -> Path:
    """Return where ``rank`` writes what was to go to ``path``: NAME.xml -> NAME.rankR.xml."""
    return path.with_name(f"{path.stem}.rank{rank}{path.suffix}")


@pytest.hookimpl(trylast=True)
def pytest_configure(config: pytest.Config) -> None:
    """Let only rank 0 print; register the marker, also if pytest-mpi is not installed."""
    config.addinivalue_line("markers", "mpi(min_size): runs in so many ranks that mpiexec started")
    run = config.stash.get(RUN, None)
    if run is not None and run.ranks.rank != 0:
        config.pluginmanager.unregister(name="terminalreporter")
        nowhere = Path(os.devnull).open("w")  # noqa: SIM115  it serves until the process ends
        config.pluginmanager.register(pytest.TerminalReporter(config, nowhere), "terminalreporter")


def pytest_itemcollected(item: pytest.Item) -> None:
    """Collect the tests that these hooks act on (pytest calls this for tests below the conftest only).

    pytest-timeout is switched off for them: it ends the process of one rank, and it uses the alarm that is needed here.
    """
    item.stash[IS_RANK_SIDE] = True
    if item.config.pluginmanager.hasplugin("timeout"):
        item.add_marker(pytest.mark.timeout(0))


def pytest_collection_finish(session: pytest.Session) -> None:
    """Refuse tests that would not run on every rank.

    Raises:
        pytest.UsageError: no MPI, too few ranks, a test without its mark, or ranks that have other tests.
    """
    config = session.config
    items = [item for item in session.items if item.stash.get(IS_RANK_SIDE, False)]
    run = config.stash.get(RUN, None)
    if run is not None:
        # Also after an error: the other ranks wait here.
        _refuse_different_tests(run, [item.nodeid for item in session.items])
    if not items or config.option.collectonly:
        return
    unmarked = [item.nodeid for item in items if _min_size(item) is None]
    if unmarked:
        raise pytest.UsageError(f"rank-side tests without @pytest.mark.mpi(min_size=...): {', '.join(unmarked)}")
    needed = max(_min_size(item) or 0 for item in items)
    if run is None:
        raise pytest.UsageError(
            f"{len(items)} tests were not run: they run inside MPI ranks. Type: {_command(config, needed)}   "
            "(pip install -e '.[test,mpi]' brings mpiexec, mpi4py and pytest-mpi; tox -e mpi does all of it)"
        )
    if run.ranks.size < needed:
        raise pytest.UsageError(
            f"{needed} ranks are needed, these are {run.ranks.size}; type: {_command(config, needed)}"
        )


def _refuse_different_tests(run: Run, tests: list[str]) -> None:
    found = _meet(run.ranks, (tests, shorten("\n".join(run.collection_errors.texts))))
    different = [rank for rank in range(run.ranks.size) if found[rank] != found[0]]
    if different:
        reasons = "".join(f"\nrank {rank}: {found[rank][1]}" for rank in sorted(found) if found[rank][1])
        names = ", ".join(map(str, different))
        raise pytest.UsageError(f"rank {names} collected other tests than rank 0, or failed to{reasons}")


class CollectionErrors:
    """Keeps the collection errors of this rank; only rank 0's terminal is shown."""

    def __init__(self) -> None:
        """Start without any."""
        self.texts: list[str] = []

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        """Keep the text of a failed one."""
        if report.failed:
            self.texts.append(report.longreprtext)


@pytest.fixture
def shared_folder(request: pytest.FixtureRequest) -> Path:
    """One empty folder per test, the same on every rank."""
    folder = request.config.stash[RUN].folder / re.sub(r"\W+", "-", request.node.nodeid)
    folder.mkdir(exist_ok=True)
    return folder


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> Generator[None, object, object]:
    """Set up on all ranks or on none."""
    run = item.config.stash[RUN]
    run.test_started = time.monotonic()
    return (yield from _together(run, item, "setup"))


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_call(item: pytest.Item) -> Generator[None, object, object]:
    """Run the test in a process group of all ranks; it passes on all or on none."""
    return (yield from _together(item.config.stash[RUN], item, "call"))


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_teardown(item: pytest.Item) -> Generator[None, object, object]:
    """Tear down on all ranks, and stop after the session's limit."""
    return (yield from _together(item.config.stash[RUN], item, "teardown"))


def _together(run: Run, item: pytest.Item, phase: str) -> Generator[None, object, object]:
    """Run one phase under its limit and exchange its outcome."""
    __tracebackhide__ = True
    result, failure = None, None
    # The teardown gets the rest of the test's time, but at least enough to clean up.
    seconds = max(run.test_started + run.test_seconds - time.monotonic(), GRACE)
    deadline = time.monotonic() + seconds + GRACE
    try:
        with run.limits.phase(f"{phase} of {item.nodeid}", seconds):
            if phase == "call":
                _join(run, item, deadline)
            result = yield
            if phase == "call":
                run.group.check_matched()
    except BaseException as error:  # noqa: BLE001  pytest's outcomes and Ctrl-C are no Exceptions; all ranks must hear of them
        failure = error
    failed_at = time.monotonic()
    if run.over:
        if failure is not None:
            raise failure
        return result
    if failure is not None:
        run.group.leave()
    _conclude(run, item, _outcome(run, item, failure, failed_at), failure, deadline)
    return result


def _join(run: Run, item: pytest.Item, deadline: float) -> None:
    """Make the process group; no rank begins, and none can fail, while another still connects."""
    if run.group.is_joined:
        return
    failure = None
    try:
        run.group.join()
    except Exception as error:  # noqa: BLE001  the other ranks must hear of it
        failure = error
    outcome = _outcome(run, item, failure, time.monotonic())
    try:
        _conclude(run, item, outcome, failure, deadline)
    except RankFailure as error:
        # Torch counts the groups that it began to make, so the ranks would not find each other in the next one either.
        run.over = f"{item.nodeid}: the process group could not be made: {error}"
        item.session.shouldfail = "the process group could not be made"
        raise


def _conclude(run: Run, item: pytest.Item, mine: Outcome, failure: BaseException | None, deadline: float) -> None:
    """Exchange the outcome and raise :class:`RankFailure` on every rank when there is a failure on any."""
    __tracebackhide__ = True
    left = mine.kind == "left"
    outcomes = run.ranks.exchange(mine, 0.0 if left else max(deadline - time.monotonic(), 0.0))
    text = explain(outcomes, run.ranks.size, run.test_seconds + GRACE)
    headline = text.partition("\n")[0]
    if len(outcomes) < run.ranks.size or any(outcome.kind == "left" for outcome in outcomes.values()):
        run.over = f"{item.nodeid}: {text}"
        item.session.shouldfail = f"the ranks can't go on together: {headline}"
        if run.ranks.rank == min(outcomes):
            run.limits.say(f"the run is aborted: {run.over}")
    elif max(outcome.elapsed for outcome in outcomes.values()) > run.session_seconds:
        item.session.shouldfail = f"the session's limit of {run.session_seconds:g} s is reached"
    if left and failure is not None:
        raise failure
    if text:
        run.group.leave()
        raise RankFailure(text) from failure


def _outcome(run: Run, item: pytest.Item, failure: BaseException | None, at: float) -> Outcome:
    elapsed = at - run.started
    if failure is None:
        return Outcome(at=at, elapsed=elapsed)
    kind: Literal["failed", "timed out", "left"] = "failed"
    if isinstance(failure, TimeLimitReached):
        kind = "timed out"
    elif isinstance(failure, (KeyboardInterrupt, pytest.exit.Exception)):
        kind = "left"
    reason = f"{type(failure).__name__}: {failure}".strip()
    return Outcome(kind=kind, reason=shorten(reason), trace=shorten(_trace(item, failure)), at=at, elapsed=elapsed)


def _trace(item: pytest.Item, failure: BaseException) -> str:
    """The traceback from the test function on; the whole one if the test function was not reached."""
    place = failure.__traceback__
    while place is not None and place.tb_frame.f_code.co_filename != str(item.path):
        place = place.tb_next
    return "".join(traceback.format_exception(type(failure), failure, place or failure.__traceback__))


@pytest.hookimpl(trylast=True)
def pytest_sessionfinish(session: pytest.Session) -> None:
    """Keep the folder of a run that failed."""
    run = session.config.stash.get(RUN, None)
    if run is None or run.ranks.rank != 0:
        return
    if session.testsfailed or run.over:
        run.limits.say(f"what the tests wrote is kept in {run.folder}")
    else:
        shutil.rmtree(run.folder)


def pytest_unconfigure(config: pytest.Config) -> None:
    """End together: leave MPI, or, if a rank is missing, abort all processes once the others have written their files."""
    run = config.stash.get(RUN, None)
    if run is None:
        return
    run.limits.end_process_after(MEETING_SECONDS)  # leaving MPI waits for every rank
    run.group.leave()
    if run.over:
        run.ranks.exchange("my files are written", GRACE)
        run.ranks.abort()


def _min_size(item: pytest.Item) -> int | None:
    mark = item.get_closest_marker("mpi")
    return None if mark is None else mark.kwargs.get("min_size")


def _meet(ranks: Ranks, value: Any) -> dict[int, Any]:
    """Exchange ``value`` with all ranks.

    Raises:
        pytest.UsageError: a rank did not answer.
    """
    found = ranks.exchange(value, MEETING_SECONDS)
    missing = [str(rank) for rank in range(ranks.size) if rank not in found]
    if missing:
        raise pytest.UsageError(f"rank {', '.join(missing)} did not come within {MEETING_SECONDS:g} s")
    return found


def _start_mpi() -> Any:
    # Shared memory only: by default UCX listens on every network interface.
    os.environ.setdefault("UCX_TLS", "self,sm")
    try:
        # Importing it starts MPI, which is not needed to collect these tests.
        mpi = importlib.import_module("mpi4py.MPI")
    except ImportError as error:
        raise pytest.UsageError(f"{error}: pip install -e '.[test,mpi]', or tox -e mpi") from None
    return mpi.COMM_WORLD.Dup()


def _rank_by_launcher() -> int:
    """The rank before MPI runs, for messages about its start."""
    return int(os.environ.get("PMI_RANK") or os.environ.get("OMPI_COMM_WORLD_RANK") or 0)


def _real_stderr(config: pytest.Config) -> int:
    """A descriptor of the standard error that pytest captures."""
    capture = config.pluginmanager.getplugin("capturemanager")
    with capture.global_and_fixture_disabled() if capture else contextlib.nullcontext():
        return os.dup(sys.__stderr__.fileno() if sys.__stderr__ else 2)


def _command(config: pytest.Config, ranks: int) -> str:
    return COMMAND.format(ranks=ranks, paths=" ".join(config.args))
