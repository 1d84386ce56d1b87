"""T7: the table matches the code, a change is applied without touching a file, and a surviving mutant is reported."""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Iterator
from pathlib import Path

import pytest

import hyper_resume
from conformance.processes.forked_ranks import Ended, WorkerError, Workers, run_alone
from conformance.storage.mutants import mutating, mutation_run
from conformance.storage.mutants.mutating import Change, MutationError, changed_source
from conformance.storage.mutants.table import MUTANTS, Entry
from conformance.storage.records import Mutant

# One worker for all of it: what its fixtures make takes seconds.
pytestmark = pytest.mark.xdist_group("storage-mutants")

SOURCE = """
class A:
    def same(self):
        return 1

    def other(self):
        return 1 + 1


def same():
    return 1
"""


@pytest.fixture(scope="module")
def worker() -> Iterator[Workers]:
    with Workers(1) as pool:
        yield pool


def change(function: str = "A.same", fragment: str = "return 1", replacement: str = "return 2") -> Change:
    return Change(module="format.layout", function=function, fragment=fragment, replacement=replacement)


def test_the_table_fits_the_code_and_is_long_enough() -> None:
    assert mutation_run.problems() == []
    assert len(MUTANTS) >= 25


def test_few_mutants_are_explained_away() -> None:
    assert len([entry for entry in MUTANTS if entry.explanation]) <= 0.05 * len(MUTANTS)


def test_only_the_named_function_changes() -> None:
    changed = changed_source(SOURCE, change())
    assert [line for line in changed.splitlines() if "2" in line] == ["        return 2"]
    assert changed.replace("return 2", "return 1") == SOURCE
    assert changed.index("return 2") < changed.index("other")


@pytest.mark.parametrize(
    ("asked", "complaint"),
    [
        (change(function="A.gone"), "there is no function A.gone"),
        (change(fragment="return 3"), "occurs 0 times"),
        (change(function="A.other", fragment="1"), "occurs 2 times"),
        (change(replacement="return ("), "was never closed"),
    ],
)
def test_a_change_that_does_not_fit_is_an_error_and_no_survivor(asked: Change, complaint: str) -> None:
    with pytest.raises(MutationError, match=complaint):
        changed_source(SOURCE, asked)


def test_a_stale_entry_stops_the_run_before_it_begins() -> None:
    stale = dataclasses.replace(MUTANTS[0], change=change(function="no_such_function"))
    with pytest.raises(MutationError, match=f"{MUTANTS[0].id}: format.layout: there is no function no_such_function"):
        mutation_run.run(entries=[stale])


def test_an_id_that_stands_twice_and_a_probe_that_is_none_are_told() -> None:
    entry = dataclasses.replace(MUTANTS[0], probes=("crash/nothing",))
    assert mutation_run.problems([entry, MUTANTS[0]]) == [
        f"{entry.id}: no probe crash/nothing",
        f"{entry.id}: stands twice",
    ]


def digest_of_the_tree() -> str:
    (package,) = hyper_resume.__path__
    hasher = hashlib.sha256()
    for path in sorted(Path(package).rglob("*.py")):
        hasher.update(path.read_bytes())
    return hasher.hexdigest()


EXISTS = Change(
    module="format.layout",
    function="parse_step",
    fragment="return int(match.group(1)) if match else None",
    replacement="return 77",
)


def _installed(asked: Change | None) -> tuple[Ended, int | None]:
    """What a process with the change sees, and what the one beside it that forked it still sees."""
    from hyper_resume.checkpoint.format import layout

    def life() -> int | None:
        mutating.install(asked)
        from hyper_resume.checkpoint.history import lineage

        return lineage.layout.parse_step("global_step_5")

    return run_alone(life), layout.parse_step("global_step_5")


def test_a_change_is_seen_by_the_whole_package_in_that_process_only_and_no_file_is_touched(worker: Workers) -> None:
    before = digest_of_the_tree()
    ((changed, beside), (unchanged, _)) = worker.map(_installed, [EXISTS, None])
    assert (changed.value, beside, unchanged.value) == (77, 5, 5)
    assert digest_of_the_tree() == before


def _examine(entry: Entry) -> Mutant:
    return mutation_run.examine(entry, dict.fromkeys(mutation_run.PROBES, ()))


NOTHING_LOST = Entry(
    id="nothing-lost",
    title="the same in other words",
    change=dataclasses.replace(EXISTS, replacement="return None if match is None else int(match.group(1))"),
    probes=("errors/save under another name",),
    explanation="it is the same",
)


def test_a_change_that_loses_nothing_survives_and_one_that_loses_a_sync_does_not(worker: Workers) -> None:
    lost = next(entry for entry in MUTANTS if entry.id == "root-sync-dropped")
    found: list[Mutant] = worker.map(_examine, [NOTHING_LOST, lost])
    assert (found[0].killed_by, found[0].explanation) == (None, "it is the same")
    assert found[1].killed_by is not None
    assert found[1].killed_by.startswith("errors/save under another name: ")
    assert mutation_run.score(found) == 0.5


def test_a_library_that_can_not_be_imported_any_more_is_noticed(worker: Workers) -> None:
    broken = Change(
        module="format.manifest", function="Manifest", fragment="    step: int", replacement="    step: int = nothing()"
    )
    entry = dataclasses.replace(NOTHING_LOST, change=broken, explanation="")
    (found,) = worker.map(_examine, [entry])
    assert found.killed_by is not None
    assert "it can't be imported (NameError)" in found.killed_by


def test_what_the_control_notices_too_kills_nobody(worker: Workers) -> None:
    entry = dataclasses.replace(next(one for one in MUTANTS if one.id == "file-sync-dropped"), explanation="known")
    (found,) = worker.map(_examine_beside_a_control_that_notices_all, [entry])
    assert found.killed_by is None


def _examine_beside_a_control_that_notices_all(entry: Entry) -> Mutant:
    return mutation_run.examine(entry, dict.fromkeys(mutation_run.PROBES, ("O1", "O2", "O3", "O4", "O10", "interface")))


def test_a_change_that_does_not_fit_is_harness_trouble_in_a_worker_too(worker: Workers) -> None:
    with pytest.raises(WorkerError, match="there is no function gone"):
        worker.map(_examine, [dataclasses.replace(NOTHING_LOST, change=change(function="gone"))])


def test_an_unknown_mutant_can_not_be_replayed() -> None:
    with pytest.raises(ValueError, match="no such mutant"):
        mutation_run.replay("mutant:none")
