"""The persistence models against traces of a few operations whose states are counted by hand."""

from __future__ import annotations

from typing import Any

import pytest

from conformance.storage.crash_states.persistence_models import MODELS, states
from conformance.storage.tracing.history import History, Operation, TraceError, Tree


def trace(*items: tuple[Any, ...]) -> list[Operation]:
    """(kind, path, what else) as operations of rank 0, numbered from 0."""
    return [
        Operation(number=number, rank=0, kind=kind, path=path, **(rest[0] if rest else {}))
        for number, (kind, path, *rest) in enumerate(items)
    ]


def found(base: Tree, operations: list[Operation], point: int, model: str) -> list[Tree]:
    """The distinct states, sorted so that lists of them can be compared."""
    distinct = {frozenset(tree.items()): tree for _, tree in states(History(base, operations), point, model)}
    return sorted(distinct.values(), key=repr)


def ordered(*trees: Tree) -> list[Tree]:
    return sorted(trees, key=repr)


NEW_FILE = trace(
    ("create", "a"), ("write", "a", {"data": b"wxyz", "file": 0}), ("sync", "a", {"file": 0}), ("sync_directory", ".")
)


def test_before_the_first_operation_there_is_what_was_there() -> None:
    for model in MODELS:
        assert found({"old": b"1"}, NEW_FILE, 0, model) == [{"old": b"1"}]


def test_a_kill_keeps_all_that_was_asked_for_and_may_cut_the_last_write_in_half() -> None:
    assert found({}, NEW_FILE, 1, "kill") == [{"a": b""}]
    assert found({}, NEW_FILE, 2, "kill") == ordered({"a": b"wxyz"}, {"a": b"wx"})
    assert found({}, NEW_FILE, 3, "kill") == [{"a": b"wxyz"}]


@pytest.mark.parametrize("model", ["journal", "posix"])
def test_unsynced_bytes_are_there_in_full_in_half_as_zeros_or_not_and_the_name_may_be_missing(model: str) -> None:
    assert found({}, NEW_FILE, 1, model) == ordered({}, {"a": b""})
    expected = ordered({}, {"a": b""}, {"a": b"wx"}, {"a": b"\0\0\0\0"}, {"a": b"wxyz"})
    assert found({}, NEW_FILE, 2, model) == expected


def test_a_synced_file_keeps_its_name_in_a_journal_and_in_posix_only_its_bytes() -> None:
    assert found({}, NEW_FILE, 3, "journal") == [{"a": b"wxyz"}]
    assert found({}, NEW_FILE, 3, "posix") == ordered({}, {"a": b"wxyz"})
    assert found({}, NEW_FILE, 4, "posix") == [{"a": b"wxyz"}]


REPLACED = trace(
    ("create", "t"),
    ("write", "t", {"data": b"2", "file": 0}),
    ("sync", "t", {"file": 0}),
    ("rename", "t", {"target": "p"}),
    ("sync_directory", "."),
)


def test_a_rename_over_a_file_gives_the_old_or_the_new_and_the_new_one_only_once_its_directory_is_synced() -> None:
    old, both, new = {"p": b"1"}, {"p": b"1", "t": b"2"}, {"p": b"2"}
    assert found(old, REPLACED, 4, "kill") == [new]
    assert found(old, REPLACED, 4, "journal") == ordered(both, new)
    assert found(old, REPLACED, 4, "posix") == ordered(old, both, new)
    assert found(old, REPLACED, 5, "posix") == [new]


def test_a_file_renamed_before_its_bytes_are_synced_may_replace_a_whole_one_by_nothing() -> None:
    operations = [one for one in REPLACED if one.kind != "sync"]
    assert {"p": b""} in found({"p": b"1"}, operations, 4, "posix")
    assert {"p": b""} in found({"p": b"1"}, operations, 4, "journal")


def test_names_persist_in_their_order_in_a_journal_and_in_any_combination_in_posix() -> None:
    operations = trace(("create", "a"), ("create", "b"))
    assert found({}, operations, 2, "journal") == ordered({}, {"a": b""}, {"a": b"", "b": b""})
    assert found({}, operations, 2, "posix") == ordered({}, {"a": b""}, {"b": b""}, {"a": b"", "b": b""})


def test_a_sync_of_one_file_keeps_the_earlier_names_of_others_in_a_journal_only() -> None:
    operations = trace(("create", "a"), ("create", "b"), ("create", "c"), ("sync", "b", {"file": 1}))
    assert found({}, operations, 4, "journal") == ordered({"a": b"", "b": b""}, {"a": b"", "b": b"", "c": b""})
    assert len(found({}, operations, 4, "posix")) == 8


def test_what_is_in_a_directory_that_did_not_persist_is_gone_with_it() -> None:
    operations = trace(("make_directory", "d"), ("create", "d/a"), ("sync_directory", "d"))
    assert found({}, operations, 3, "posix") == ordered({}, {"d": None, "d/a": b""})


def test_a_directory_renamed_twice_is_in_one_place() -> None:
    base: Tree = {"s": None, "s/a": b"1"}
    operations = trace(("rename", "s", {"target": "n"}), ("rename", "n", {"target": "t"}))
    places = ({name: None, f"{name}/a": b"1"} for name in ("s", "n", "t"))
    assert found(base, operations, 2, "posix") == ordered(*places)


def test_two_directories_change_places_together_or_not_at_all() -> None:
    base: Tree = {"s": None, "s/d": None, "s/d/a": b"new", "d": None, "d/a": b"old"}
    operations = trace(("exchange", "s/d", {"target": "d"}), ("sync_directory", "."))
    changed = {**base, "s/d/a": b"old", "d/a": b"new"}
    for model in ("journal", "posix"):
        assert found(base, operations, 1, model) == ordered(base, changed)
        assert found(base, operations, 2, model) == [changed]


def test_a_file_written_over_may_be_old_empty_half_zeros_or_new() -> None:
    operations = trace(("open", "a"), ("truncate", "a", {"file": 0}), ("write", "a", {"data": b"new!", "file": 0}))
    contents = {tree["a"] for tree in found({"a": b"old"}, operations, 3, "journal")}
    assert contents == {b"old", b"", b"ne", b"\0\0\0\0", b"new!"}


def test_each_of_several_writes_may_be_the_last_that_persisted() -> None:
    writes = [("write", "a", {"data": bytes([48 + i]) * 2, "offset": 2 * i, "file": 0}) for i in range(3)]
    contents = {tree.get("a") for tree in found({}, trace(("create", "a"), *writes), 4, "journal")}
    assert contents == {None, b"", b"00", b"0011", b"001", b"\0" * 6, b"001122"}


def test_all_subsets_of_eight_unsynced_names_and_of_nine_those_with_one_missing_or_alone_and_the_prefixes() -> None:
    eight = trace(*(("create", f"f{i}") for i in range(8)))
    nine = trace(*(("create", f"f{i}") for i in range(9)))
    assert len(found({}, eight, 8, "posix")) == 2**8
    # all, none, nine without one, nine alone, and the prefixes of 2 to 7 (that of 1 is one alone, that of 8 lacks one).
    assert len(found({}, nine, 9, "posix")) == 2 + 9 + 9 + 6


def test_bytes_of_two_files_are_combined() -> None:
    operations = trace(
        ("create", "a"), ("create", "b"),
        ("write", "a", {"data": b"12", "file": 0}), ("write", "b", {"data": b"34", "file": 1}),
        ("sync_directory", "."),
    )  # fmt: skip
    # Each: all, none, half, zeros.
    assert len(found({}, operations, 5, "posix")) == 16


def test_a_choice_keeps_its_name_and_is_made_only_where_it_is_wanted() -> None:
    history = History({}, NEW_FILE)
    names = [choice for choice, _ in states(history, 2, "posix")]
    assert names == [choice for choice, _ in states(History({}, NEW_FILE), 2, "posix")]
    assert [choice for choice, _ in states(history, 2, "posix", names[3].__eq__)] == [names[3]]


def test_a_directory_that_two_ranks_make_is_made_once() -> None:
    history = History({}, trace(("make_directory", "d"), ("create", "d/a"), ("make_directory", "d")))
    assert history.tree() == {"d": None, "d/a": b""}


@pytest.mark.parametrize(
    "operations",
    [
        trace(("rename", "a", {"target": "b"})),
        trace(("create", "no/a")),
        trace(("create", "a"), ("create", "a")),
        trace(("write", "a", {"data": b"1", "file": 7})),
        trace(("remove", "a")),
    ],
)
def test_operations_that_could_not_have_succeeded_are_refused(operations: list[Operation]) -> None:
    with pytest.raises(TraceError, match="operation"):
        History({}, operations)
