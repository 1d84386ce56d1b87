"""The recorder records every call to the kernel, and the orders of two ranks respect their collectives."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path
from typing import Any

import pytest

from conformance.processes.forked_ranks import fan_out
from conformance.storage.tracing import hooks
from conformance.storage.tracing.history import History, Operation, TraceError
from conformance.storage.tracing.orders import orders
from conformance.storage.tracing.recorder import ENTER, LEAVE, RankTrace, Recorder
from conformance.storage.tracing.trees import difference, read_tree


def _many_ways(root: Path) -> None:
    (root / "d").mkdir()
    with (root / "d/text").open("w", encoding="utf-8") as text:
        text.write("buffered")
    (root / "d/bytes").write_bytes(b"12345")
    with (root / "d/bytes").open("r+b") as file:
        file.seek(2)
        file.write(b"x")
        file.truncate(4)
        file.flush()
        os.fsync(file.fileno())
    with (root / "d/bytes").open("ab") as file:
        file.write(b"end")
    with (root / "d/text").open("w", encoding="utf-8") as text:
        text.write("again")
    descriptor = os.open(root / "raw", os.O_WRONLY | os.O_CREAT, 0o600)
    os.write(descriptor, b"one")
    os.write(descriptor, b"two")
    os.pwrite(descriptor, b"O", 0)
    os.ftruncate(descriptor, 5)
    os.close(descriptor)
    (root / "raw").replace(root / "d/moved")
    (root / "d/text").unlink()
    (root / "e").mkdir()
    (root / "e").rmdir()
    directory = os.open(root, os.O_RDONLY)
    os.fsync(directory)
    os.close(directory)


def _record(_: int) -> tuple[list[Operation], str]:
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder)
        recorder = Recorder(root)
        hooks.install(recorder, 0, wants_interface=False)
        _many_ways(root)
        operations = list(recorder.trace().operations)
        return operations, difference(History({}, operations).tree(), read_tree(root))


@pytest.fixture(scope="module")
def recorded() -> Any:
    (found,) = fan_out(_record, [0], workers=1)
    return found


def test_the_traced_operations_done_again_give_what_is_on_the_disk(recorded: Any) -> None:
    operations, different = recorded
    assert different == ""
    assert History({}, operations).tree() == {"d": None, "d/bytes": b"12x4end", "d/moved": b"Onetw"}


def test_a_buffer_is_written_when_it_is_flushed_and_a_sync_names_its_file(recorded: Any) -> None:
    operations, _ = recorded
    kinds = [(one.kind, one.path) for one in operations]
    assert kinds[:3] == [("make_directory", "d"), ("create", "d/text"), ("write", "d/text")]
    assert [path for kind, path in kinds if kind == "sync"] == ["d/bytes"]
    assert kinds[-1] == ("sync_directory", ".")


def rank_trace(rank: int, *items: str | int) -> RankTrace:
    """Numbers are operations (by which the recorded order goes), texts are marks that come right after them."""
    found: list[Operation] = []
    number = 0
    for item in items:
        if isinstance(item, int):
            number = item * 10
            found.append(Operation(number=number, rank=rank, kind="create", path=f"f{item}"))
        else:
            number += 1
            found.append(Operation(number=number, rank=rank, kind="mark", path=item))
    return RankTrace(operations=tuple(found))


def names(order: tuple[Operation, ...]) -> str:
    return " ".join(one.path for one in order if one.kind != "mark")


def test_either_rank_may_be_ahead_up_to_the_barrier_and_not_beyond() -> None:
    barrier = "default/1 all 0"
    zero = rank_trace(0, 1, 3, ENTER + barrier, LEAVE + barrier, 5)
    one = rank_trace(1, 2, 4, ENTER + barrier, LEAVE + barrier, 6)
    found = orders([zero, one])
    assert names(found["rank0_first"]) == "f1 f3 f2 f4 f5 f6"
    assert names(found["rank1_first"]) == "f2 f4 f1 f3 f6 f5"
    assert set(found) == {"rank0_first", "rank1_first", "in_turn"}, "as recorded is what in turn gives"


def test_a_rank_that_gathers_waits_and_those_that_are_gathered_from_do_not() -> None:
    gather = "default/1 dst 0"
    zero = rank_trace(0, 1, ENTER + gather, LEAVE + gather, 3)
    one = rank_trace(1, 2, ENTER + gather, LEAVE + gather, 4)
    found = orders([zero, one])
    assert names(found["rank1_first"]) == "f2 f4 f1 f3"
    assert names(found["rank0_first"]) == "f1 f2 f3 f4"


def test_a_rank_that_is_broadcast_to_waits_for_the_source() -> None:
    broadcast = "default/1 src 0"
    zero = rank_trace(0, 1, ENTER + broadcast, LEAVE + broadcast, 3)
    one = rank_trace(1, 2, ENTER + broadcast, LEAVE + broadcast, 4)
    found = orders([zero, one])
    assert names(found["rank0_first"]) == "f1 f3 f2 f4"
    assert names(found["rank1_first"]) == "f2 f1 f4 f3"


def test_collectives_that_do_not_fit_together_are_refused() -> None:
    barrier = "default/1 all 0"
    with pytest.raises(TraceError, match="do not match"):
        orders([rank_trace(0, 1, ENTER + barrier, LEAVE + barrier), rank_trace(1, 2)])
