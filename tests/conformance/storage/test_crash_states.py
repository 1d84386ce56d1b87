"""The enumeration of crash states finds the defects of toy protocols and of stock DCP, and none in a right protocol."""

from __future__ import annotations

from typing import Any

import pytest

from conformance.processes import forked_ranks
from conformance.storage.crash_states import enumeration
from tests.conformance.storage import toys

# One worker for all of it: what its fixtures make takes seconds.
pytestmark = pytest.mark.xdist_group("storage-crash-states")


@pytest.fixture(scope="module")
def found() -> dict[str, Any]:
    names = list(toys.PROGRAMS)
    return dict(zip(names, forked_ranks.fan_out(toys.violations, names, workers=1), strict=True))


@pytest.fixture(scope="module")
def stock() -> dict[str, Any]:
    names = ["first_save", "resave"]
    results = forked_ranks.fan_out(toys.stock, names, workers=1, preload=enumeration.PRELOAD)
    return dict(zip(names, results, strict=True))


def test_a_protocol_that_is_right_breaks_no_promise_in_any_model(found: dict[str, Any]) -> None:
    assert found["right"][0] == {"kill": {}, "journal": {}, "posix": {}}


def test_operations_that_do_not_go_through_the_interface_are_counted(found: dict[str, Any]) -> None:
    # mkdir, twice create, write, fsync, two fsyncs of directories, one rename.
    assert found["right"][1] == 1 + 2 * 3 + 2 + 1


def test_dropped_fsyncs_are_found_by_a_power_cut_and_not_by_a_kill(found: dict[str, Any]) -> None:
    by_model = found["no fsync of the files"][0]
    assert by_model["kill"] == {}
    assert by_model["journal"]["O3"] > 0
    assert by_model["posix"]["O3"] > 0


def test_a_directory_renamed_before_its_names_are_synced_is_found_where_names_persist_in_any_order(
    found: dict[str, Any],
) -> None:
    by_model = found["no fsync of the staging directory"][0]
    # A journal keeps names in order, and the files' own fsyncs keep theirs.
    assert (by_model["kill"], by_model["journal"]) == ({}, {})
    assert by_model["posix"]["O3"] > 0


def test_a_promise_given_before_the_rename_is_on_the_disk_is_found(found: dict[str, Any]) -> None:
    by_model = found["no fsync of the root"][0]
    assert by_model["kill"] == {}
    assert by_model["journal"]["O2"] > 0
    assert by_model["posix"]["O2"] > 0


def test_a_directory_that_appears_before_it_is_written_is_found_by_a_mere_kill(found: dict[str, Any]) -> None:
    assert found["renamed before it is written"][0]["kill"]["O3"] > 0


def test_a_write_that_was_not_traced_is_no_silent_gap(found: dict[str, Any]) -> None:
    assert "a write was not traced" in found["written from C"]


def test_stock_dcp_breaks_its_promise_after_a_power_cut_but_not_after_a_kill_of_a_first_save(
    stock: dict[str, Any],
) -> None:
    first = stock["first_save"]
    assert sum(first["kill"][0].values()) == 0
    for model in ("journal", "posix"):
        assert first[model][0]["O2"] > 0
        assert first[model][0]["O3"] > 0


def test_stock_dcp_saving_over_a_step_loads_mixtures_after_a_mere_kill(stock: dict[str, Any]) -> None:
    oracles, distinct = stock["resave"]["kill"]
    assert oracles["O4"] > 0
    assert 0 < oracles["O3"] < distinct
