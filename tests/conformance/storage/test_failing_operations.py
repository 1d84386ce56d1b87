"""T3: exactly the N-th operation fails; and each oracle detects a library that is broken for it."""

from __future__ import annotations

import errno
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from conformance.processes.forked_ranks import Workers, run_alone
from conformance.storage.failing_operations import operation_errors
from conformance.storage.failing_operations.injection import FailingOperations, Fault
from conformance.storage.failing_operations.judge import Verdict
from conformance.storage.failing_operations.runs import SCENARIOS, Case

# One worker for all of it: what its fixtures make takes seconds.
pytestmark = pytest.mark.xdist_group("storage-operation-errors")


@pytest.fixture(scope="module")
def worker() -> Iterator[Workers]:
    with Workers(1, preload=["hyper_resume.checkpoint"]) as pool:
        yield pool


# ---- one failing operation ----------------------------------------------------------------------------------------------


def fault(error: str, at: int, *, persistent: bool = False) -> FailingOperations:
    return FailingOperations(Fault(error=error, at=at, persistent=persistent))


def test_the_nth_operation_fails_once_and_the_others_go_well(tmp_path: Path) -> None:
    failing = fault("EACCES", 2)
    failing.make_directory(tmp_path / "a")
    with pytest.raises(PermissionError):
        failing.make_directory(tmp_path / "b")
    failing.make_directory(tmp_path / "c")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a", "c"]
    assert failing.struck == "make_directory b"


def test_for_good_means_from_the_nth_on_until_it_is_mended(tmp_path: Path) -> None:
    failing = fault("EIO", 1, persistent=True)
    for name in ("a", "b"):
        with pytest.raises(OSError, match="Input/output"):
            failing.make_directory(tmp_path / name)
    failing.mend()
    failing.make_directory(tmp_path / "c")
    assert [path.name for path in tmp_path.iterdir()] == ["c"]


def test_an_error_counts_only_operations_that_it_can_strike(tmp_path: Path) -> None:
    failing = fault("EMFILE", 1)
    failing.make_directory(tmp_path / "a")
    with pytest.raises(OSError, match="open files") as caught:
        failing.create(tmp_path / "b")
    assert caught.value.errno == errno.EMFILE


def test_a_full_disk_takes_half_of_the_write(tmp_path: Path) -> None:
    failing = fault("ENOSPC", 2)
    with failing.create(tmp_path / "a") as file, pytest.raises(OSError, match="No space"):
        file.write(b"0123456789")
    assert (tmp_path / "a").read_bytes() == b"01234"


def test_short_writes_and_reads_lose_nothing_where_they_are_gone_on_with(tmp_path: Path) -> None:
    failing = fault("short write", 1, persistent=True)
    with failing.create(tmp_path / "a") as file:
        assert file.write(b"0123456789") == 10
    assert (tmp_path / "a").read_bytes() == b"0123456789"
    with fault("short read", 1).open_read(tmp_path / "a") as reader:
        assert (reader.read(10), reader.read(10), reader.read(10)) == (b"01234", b"56789", b"")


def test_a_file_that_is_synced_again_after_its_sync_failed_is_told(tmp_path: Path) -> None:
    failing = fault("EIO", 2)  # the first is its creation
    with failing.create(tmp_path / "a") as file:
        with pytest.raises(OSError, match="Input/output"):
            file.sync()
        assert (failing.failed_sync, failing.synced_again) == (str(tmp_path / "a"), "")
        file.sync()
    assert failing.synced_again == str(tmp_path / "a")


def test_a_name_is_unsynced_until_its_directory_was_synced_wherever_it_moves(tmp_path: Path) -> None:
    failing = FailingOperations(None)
    failing.make_directory(tmp_path / "a")
    failing.create(tmp_path / "a" / "file").close()
    failing.rename(tmp_path / "a", tmp_path / "b")
    assert failing.unsynced == {tmp_path / "b", tmp_path / "b" / "file"}
    failing.sync_directory(tmp_path)
    assert failing.unsynced == {tmp_path / "b" / "file"}
    failing.sync_directory(tmp_path / "b")
    assert failing.unsynced == set()


@pytest.mark.parametrize("synced", [True, False])
def test_what_is_deleted_in_the_trash_has_left_its_name_for_good(tmp_path: Path, synced: bool) -> None:
    failing = FailingOperations(None)
    (tmp_path / "step").mkdir()
    (tmp_path / "step" / "file").write_text("")
    (tmp_path / ".trash").mkdir()
    failing.rename(tmp_path / "step", tmp_path / ".trash" / "step")
    if synced:
        failing.sync_directory(tmp_path)
    failing.remove(tmp_path / ".trash" / "step" / "file")
    assert failing.removed_early == ("" if synced else str(tmp_path / ".trash" / "step" / "file"))


# ---- the real library, and a broken one ---------------------------------------------------------------------------------


def _examine(job: tuple[Callable[[], None] | None, Case]) -> list[Verdict]:
    break_it, case = job

    def life() -> list[Verdict]:
        with tempfile.TemporaryDirectory(prefix="test-") as folder:
            scenario = next(one for one in SCENARIOS if one.name == case.scenario)
            template = operation_errors.build(Path(folder), scenario)
            if break_it is not None:
                break_it()
            parts = operation_errors.examine_in_parts(template, case, most_hangs=1)
            return [verdict for part in parts for verdict in part]

    end = run_alone(life, limit_seconds=100)
    assert end.how == "returned", f"{end.summary}\n{end.trace}"
    verdicts: list[Verdict] = end.value
    return verdicts


@pytest.mark.parametrize(
    "case",
    [
        Case(scenario="first save", rank=1, error="ENOSPC", persistent=True),
        Case(scenario="next save", rank=0, error="EIO", persistent=False, stride=7),
        Case(scenario="load", rank=1, error="ESTALE", persistent=False, stride=3),
        # Its first strikes the look at a copy that had stepped aside, which then stays there for the next run.
        Case(scenario="run after a crash", rank=0, error="EMFILE", persistent=False),
    ],
    ids=lambda case: case.scenario,
)
def test_the_library_holds_every_promise_and_the_last_run_meets_no_failure(worker: Workers, case: Case) -> None:
    (verdicts,) = worker.map(_examine, [(None, case)])
    assert [one.violations for one in verdicts] == [()] * len(verdicts), verdicts
    assert [bool(one.struck) for one in verdicts] == [True] * (len(verdicts) - 1) + [False]
    assert len(verdicts) > 3


def _say_success_whatever_comes() -> None:
    from hyper_resume.checkpoint import DistributedCheckpointer

    original = DistributedCheckpointer.save

    def save(self: Any, *args: Any, **kwargs: Any) -> None:
        try:
            original(self, *args, **kwargs)
        except Exception:  # noqa: BLE001  that it is swallowed is what is broken
            return

    DistributedCheckpointer.save = save  # type: ignore[method-assign]


def _each_rank_its_own_words() -> None:
    from hyper_resume import collective
    from hyper_resume.checkpoint import DistributedCheckpointer
    from hyper_resume.errors import CheckpointSaveError

    original = DistributedCheckpointer.save

    def save(self: Any, *args: Any, **kwargs: Any) -> None:
        try:
            original(self, *args, **kwargs)
        except Exception as error:
            raise CheckpointSaveError(f"rank {collective.rank()} failed") from error

    DistributedCheckpointer.save = save  # type: ignore[method-assign]


def _another_class() -> None:
    from hyper_resume.checkpoint import DistributedCheckpointer

    original = DistributedCheckpointer.save

    def save(self: Any, *args: Any, **kwargs: Any) -> None:
        try:
            original(self, *args, **kwargs)
        except Exception as error:
            raise ValueError(str(error)) from error

    DistributedCheckpointer.save = save  # type: ignore[method-assign]


def _lose_the_earlier_one() -> None:
    import shutil

    from hyper_resume.checkpoint.format import layout

    original = layout.new_staging_directory

    def instead(target: Path) -> Path:
        shutil.rmtree(target.parent / "global_step_30", ignore_errors=True)
        return original(target)

    layout.new_staging_directory = instead


def _publish_first() -> None:
    """The pointer is moved before anything is written."""
    from hyper_resume.checkpoint.format import layout

    original = layout.new_staging_directory

    def instead(target: Path) -> Path:
        (target.parent / layout.POINTER_NAME).write_text(target.name.removeprefix("global_step_"))
        return original(target)

    layout.new_staging_directory = instead


def _leave_the_staging() -> None:
    from hyper_resume.checkpoint.format import layout

    layout.discard_staging = layout.remove = lambda path: None


def _wait_for_ever() -> None:
    import time

    from hyper_resume.checkpoint import DistributedCheckpointer

    # So that the other rank gives up after less than the real ten seconds.
    operation_errors._COLLECTIVE_SECONDS = 3.0
    original = DistributedCheckpointer.save

    def save(self: Any, *args: Any, **kwargs: Any) -> None:
        try:
            original(self, *args, **kwargs)
        except Exception:
            time.sleep(6 if self._own_group.rank() else 0)
            raise

    DistributedCheckpointer.save = save  # type: ignore[method-assign]


def _sync_no_names() -> None:
    from hyper_resume.checkpoint.disk import operations
    from hyper_resume.checkpoint.format import layout

    layout.operations.make_directories = lambda path: path.mkdir(parents=True, exist_ok=True)  # type: ignore[attr-defined]
    original = operations.FileOperations.sync_directory

    def instead(self: Any, path: Path) -> None:
        if path.name != "root":
            original(self, path)

    from conformance.storage.failing_operations.injection import FailingOperations

    FailingOperations.sync_directory = instead  # type: ignore[method-assign]


NONE_FAILS = Case(scenario="next save", rank=1, error="EIO", persistent=False, at=499)
EARLY = Case(scenario="next save", rank=1, error="EIO", persistent=False, at=1)


@pytest.mark.parametrize(
    ("break_it", "case", "violation"),
    [
        (_say_success_whatever_comes, EARLY, "said success, and it is not there"),
        (_each_rank_its_own_words, EARLY, "ranks disagree"),
        (_another_class, EARLY, "wrong class of error"),
        (_lose_the_earlier_one, EARLY, "an earlier checkpoint is lost"),
        (_publish_first, EARLY, "the pointer names what does not load"),
        (_leave_the_staging, EARLY, "something is left behind"),
        (_sync_no_names, NONE_FAILS, "done before its names were synced"),
        (_wait_for_ever, EARLY, "hung"),
    ],
)  # fmt: skip
def test_each_oracle_notices_a_library_that_is_broken_there(
    worker: Workers, break_it: Callable[[], None], case: Case, violation: str
) -> None:
    (verdicts,) = worker.map(_examine, [(break_it, case)])
    assert any(violation in one.violations for one in verdicts), verdicts


def _touch_before_reading() -> None:
    from hyper_resume.checkpoint import DistributedCheckpointer

    original = DistributedCheckpointer.load

    def load(self: Any, path: str, state: dict[str, Any], **kwargs: Any) -> dict[str, Any]:
        state["model"]["norm.weight"].zero_()
        return original(self, path, state, **kwargs)

    DistributedCheckpointer.load = load  # type: ignore[method-assign]


def test_a_load_that_writes_before_it_has_read_is_noticed(worker: Workers) -> None:
    # An error that passes is healed, and the load succeeds.
    case = Case(scenario="load", rank=0, error="EIO", persistent=True, stride=4)
    (verdicts,) = worker.map(_examine, [(_touch_before_reading, case)])
    assert any("touched live state" in one.violations for one in verdicts)


@pytest.mark.parametrize("case", operation_errors.cases()[::37], ids=lambda case: case.id_at(4))
def test_an_id_is_enough_to_let_the_same_operation_fail(case: Case) -> None:
    found = operation_errors.parse_id(case.id_at(4))
    assert (found.scenario, found.rank, found.error, found.persistent, found.at) == (
        case.scenario,
        case.rank,
        case.error,
        case.persistent,
        4,
    )


def test_an_id_of_another_tier_is_refused() -> None:
    with pytest.raises(ValueError, match="no id of this tier"):
        operation_errors.parse_id("operation-errors:no-such-thing:rank-0:EIO:once:1")


def test_the_records_count_runs_and_violations_by_scenario_error_and_form() -> None:
    case = Case(scenario="load", rank=0, error="EIO", persistent=True)
    good = Verdict(case=case, number=1, struck="read .metadata", survived=True, id=case.id_at(1))
    bad = Verdict(
        case=case, number=2, struck="read a", survived=False, violations=("ranks disagree",), id=case.id_at(2)
    )
    last = Verdict(case=case, number=3, struck="", survived=False, id=case.id_at(3))
    (record,) = operation_errors.summarise([good, bad, last])
    assert (record.scenario, record.error, record.persistent) == ("load", "EIO", True)
    assert (record.runs, record.survived, record.violations) == (2, 1, {"ranks disagree": 1})
    assert record.examples == ("operation-errors:load:rank-0:EIO:for-good:2",)
