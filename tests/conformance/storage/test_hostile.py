"""T6: the library refuses hostile files, and a reader that accepts them is detected."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch

from conformance.storage.hostile import fuzz
from conformance.storage.hostile.fuzz import KINDS, HostileResult
from conformance.storage.hostile.readers import Reader, library_readers, stock_readers
from hyper_resume.errors import CheckpointMismatchError

# One worker for all of it: what its fixtures make takes seconds.
pytestmark = pytest.mark.xdist_group("storage-hostile")

COUNT, STOCK_COUNT, SEED = 45 * len(KINDS), 30 * len(KINDS), 11


def _run(count: int, folder: Path, **how: Any) -> HostileResult:
    return fuzz.run(count, SEED, folder, **how)


@pytest.fixture(scope="module")
def ours(tmp_path_factory: pytest.TempPathFactory) -> HostileResult:
    return _run(COUNT, tmp_path_factory.mktemp("ours"))


@pytest.fixture(scope="module")
def stock(tmp_path_factory: pytest.TempPathFactory) -> HostileResult:
    return _run(STOCK_COUNT, tmp_path_factory.mktemp("stock"), readers=stock_readers(), seconds_each=0.5)


def test_the_library_refuses_hostile_files_or_reads_them_as_what_they_say(ours: HostileResult) -> None:
    assert ours.violations == ()
    assert ours.count == COUNT


def test_every_kind_is_tried_equally_and_some_files_are_read(ours: HostileResult) -> None:
    assert {kind: sum(found.values()) for kind, found in ours.outcomes.items()} == {
        kind: COUNT // len(KINDS) for kind, _, _ in KINDS
    }
    # Else the right answer could be to refuse everything.
    assert sum(found["read"] for found in ours.outcomes.values()) > COUNT / 50
    for kind in (
        "metadata with a payload",
        "metadata with a path elsewhere",
        "metadata bomb",
        "archive with a payload",
    ):
        assert ours.outcomes[kind] == {"refused": COUNT // len(KINDS)}


def test_reading_them_stays_within_time_and_memory(ours: HostileResult) -> None:
    assert ours.slowest_seconds < fuzz.SECONDS_EACH
    assert ours.peak_bytes < 64 << 20


@pytest.mark.parametrize(
    ("kind", "what"),
    [
        ("metadata with a payload", "code run"),
        ("metadata with a path elsewhere", "wrong value"),
        ("metadata that does not add up", "wrong value"),
        ("metadata bomb", "wrong value"),
        ("archive with a payload", "code run"),
        ("archive with a payload", "file touched"),
        ("archive bomb", "memory"),
        ("archive bomb", "time"),
    ],
)
def test_the_check_finds_what_stock_readers_do(kind: str, what: str, stock: HostileResult) -> None:
    assert [one for one in stock.violations if one.kind == kind and one.what == what]


def test_the_record_has_stock_beside_the_library(ours: HostileResult, stock: HostileResult) -> None:
    records = {record.kind: record for record in ours.records(stock)}
    assert list(records) == [kind for kind, _, _ in KINDS]
    payload = records["archive with a payload"]
    assert (payload.tried, payload.refused, payload.violations) == (45, 45, {})
    assert payload.baseline_tried == 30
    assert payload.baseline is not None
    assert payload.baseline > 10
    assert records["manifest, bytes damaged"].baseline is None
    assert records["table bomb"].baseline is None


def test_a_violation_can_be_made_again_from_its_id(stock: HostileResult, tmp_path: Path) -> None:
    found = next(one for one in stock.violations if one.kind == "archive with a payload" and one.what == "code run")
    kind, reader, content = fuzz.replay(found.case_id, found.seed)
    assert (kind, reader) == (found.kind, "archive")
    assert content == fuzz.replay(found.case_id, found.seed)[2]
    with pytest.raises(CheckpointMismatchError):
        library_readers()["archive"].read(content)


def test_a_case_keeps_its_name_whatever_kinds_are_added() -> None:
    names = [fuzz.case_id(place) for place in range(3 * len(KINDS))]
    assert len(set(names)) == len(names)
    first = [name for name in names if name.removeprefix("hostile-").isdecimal()]
    assert first == [f"hostile-{number}" for number in range(3 * 19)]
    rest = [name for name in names if name not in first]
    assert rest == [f"hostile-directory-{number}" for number in range(3 * 9)]
    kinds = [kind for kind, _, _ in KINDS]
    assert [fuzz.replay(name, SEED)[0] for name in names[: len(kinds)]] == kinds
    # Of the harness before there were other families.
    assert fuzz.replay("hostile-21", 0)[0] == "metadata with impossible numbers"


@pytest.mark.parametrize("name", ["hostile-x-1", "corruption:1", "hostile-directory-"])
def test_a_name_of_no_case_is_refused(name: str) -> None:
    with pytest.raises(ValueError, match=r"no such case|invalid literal"):
        fuzz.replay(name, SEED)


def test_two_runs_from_one_seed_are_the_same(tmp_path: Path) -> None:
    # In one folder, as the library's and stock's stand in one run.
    results = [_run(4 * len(KINDS), tmp_path) for _ in range(2)]
    assert results[0].outcomes == results[1].outcomes


# ---- readers that are wrong in one way each -------------------------------------------------------------------------


def _refuse(content: bytes) -> Any:
    raise CheckpointMismatchError("no")


def _read_with(behaviour: Any, tmp_path: Path, seconds_each: float = fuzz.SECONDS_EACH) -> set[str]:
    """What is found of a reader of manifests that behaves so."""
    result = _run(19, tmp_path, readers={"manifest": Reader(read=behaviour)}, seconds_each=seconds_each)
    assert result.count == 4
    return {violation.what for violation in result.violations}


def _write_elsewhere(path: Path) -> Any:
    def read(content: bytes) -> Any:
        path.write_bytes(content)
        return _refuse(content)

    return read


def _dies(content: bytes) -> Any:
    os._exit(3)


def _computes(content: bytes) -> Any:
    while True:
        pass


def _swallows_the_limit(content: bytes) -> Any:
    while True:
        try:
            _computes(content)
        except TimeoutError:
            continue


def _allocates(content: bytes) -> Any:
    torch.ones(fuzz.MEMORY_EACH // 2, dtype=torch.uint8)
    torch.ones(fuzz.MEMORY_EACH // 4 * 5, dtype=torch.uint8)
    return _refuse(content)


def test_a_reader_that_refuses_everything_has_no_violation(tmp_path: Path) -> None:
    assert _read_with(_refuse, tmp_path) == set()


@pytest.mark.parametrize(
    ("behaviour", "what"),
    [
        (lambda content: 1 // 0, {"other error"}),
        (lambda content: eval("1 + 1") or _refuse(content), {"code run"}),
        (lambda content: __import__("wsgiref.util") and _refuse(content), {"code run", "file touched"}),
        (_computes, {"time", "other error"}),
        (_swallows_the_limit, {"time"}),
        (_dies, {"died"}),
        (_allocates, {"memory", "other error"}),
    ],
    ids=["other error", "evaluates", "imports", "computes", "can't be interrupted", "dies", "allocates"],
)
def test_a_reader_that_is_wrong_in_one_way_is_found(behaviour: Any, what: set[str], tmp_path: Path) -> None:
    # Only what never ends needs a short limit; the others may run on a slow machine.
    assert _read_with(behaviour, tmp_path, 0.2 if "time" in what else fuzz.SECONDS_EACH) == what


def test_a_reader_that_writes_elsewhere_is_found(tmp_path: Path) -> None:
    target = tmp_path / "outside"
    (tmp_path / "scratch").mkdir()
    assert _read_with(_write_elsewhere(target), tmp_path / "scratch") == {"file touched"}


def test_a_reader_that_returns_something_else_is_found(tmp_path: Path) -> None:
    good = library_readers()["manifest"]
    reader = Reader(read=lambda content: b"", doubt=good.doubt)
    result = _run(19, tmp_path, readers={"manifest": reader})
    assert {violation.what for violation in result.violations} == {"wrong value"}


def _children() -> set[str]:
    lists = Path("/proc/self/task").glob("*/children")
    return {pid for children in lists for pid in children.read_text().split()}


def test_a_run_leaves_no_process_behind(tmp_path: Path) -> None:
    before = _children()
    _run(19, tmp_path)
    assert _children() == before
