"""``storage.json``: what is written can be read, and every violation is a complaint."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from conformance.records.trajectory import RecordError
from conformance.storage.proofs import Extent, Proof, chosen, prove
from conformance.storage.records import (
    Corruption,
    CrashStates,
    Hostile,
    Mutant,
    OperationErrors,
    Part,
    PowerCuts,
    Storage,
    read_storage,
    write_storage,
)

CRASH = CrashStates(
    scenario="next_save", model="kill", crash_points=3, states=5, distinct=4, loaded=2, violations={"O1": 0}, baseline=7
)
WHOLE = Storage(
    parts=(Part(name="crash", status="run", seconds=1.0),),
    crash_states=(CRASH,),
    power_cuts=(PowerCuts(scenario="s", file_system="ext4", trials=0, violations={}, skipped="no root"),),
    corruption=(Corruption(kind="flip", tried=2, refused=2, fell_back=0, loaded_silently=0),),
    operation_errors=(
        OperationErrors(scenario="s", error="EIO", persistent=False, runs=1, survived=0, violations={"hang": 0}),
    ),
    hostile=(Hostile(kind="pickle", tried=1, refused=1, harmless=0, violations={}),),
    mutants=(Mutant(id="m", title="t", killed_by=None, explanation="equal"),),
    facts={"seed": "0"},
)


def test_what_is_written_is_read_back(tmp_path: Path) -> None:
    path = write_storage(tmp_path / "new", WHOLE)
    assert path.name == "storage.json"
    assert read_storage(path) == WHOLE
    assert WHOLE.complaints() == []


def test_two_files_add_up_and_an_empty_one_is_nothing(tmp_path: Path) -> None:
    both = Storage() + WHOLE + Storage(crash_states=(CRASH,))
    assert len(both.crash_states) == 2
    assert both.facts == {"seed": "0"}
    assert WHOLE
    assert not Storage()


@pytest.mark.parametrize(
    ("broken", "message"),
    [
        (Storage(crash_states=(replace(CRASH, violations={"O2": 3}, examples=("id",)),)), "O2 3 (first: id)"),
        (Storage(parts=(Part(name="mutants", status="missing", seconds=0.0, reason="no module"),)), "mutants: missing"),
        (Storage(mutants=(Mutant(id="m", title="t", killed_by=None),)), "mutant m (t) was not noticed"),
        (
            Storage(corruption=(Corruption(kind="flip", tried=1, refused=0, fell_back=0, loaded_silently=0,
                                           touched_live_state=1),)),
            "touched live state 1",
        ),
    ],
)  # fmt: skip
def test_what_must_not_be_is_a_complaint(broken: Storage, message: str) -> None:
    (complaint,) = broken.complaints()
    assert message in complaint


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"schema": "hyper_resume.storage/1"}, "run the proofs again"),
        ({"schema": "something else"}, "no record of schema"),
        ({"surprise": 1}, "unknown key 'surprise'"),
        ({"crash_states": [{"scenario": "s"}]}, "missing key"),
    ],
)
def test_another_schema_and_a_malformed_record_are_refused(
    tmp_path: Path, change: dict[str, object], message: str
) -> None:
    path = write_storage(tmp_path, WHOLE)
    path.write_text(json.dumps(json.loads(path.read_text()) | change))
    with pytest.raises(RecordError, match=message):
        read_storage(path)


def test_a_proof_that_breaks_off_or_is_not_there_is_on_record_with_its_reason() -> None:
    def fails(extent: Extent) -> dict[str, object]:
        raise RuntimeError("no luck")

    def absent(extent: Extent) -> dict[str, object]:
        raise ModuleNotFoundError("No module named 'conformance.storage.nothing'", name="conformance.storage.nothing")

    for run, status, reason in ((fails, "error", "no luck"), (absent, "missing", "conformance.storage.nothing")):
        (part,) = prove(Proof(name="p", tier="t0", title="", run=run), Extent()).parts
        assert part.status == status
        assert reason in part.reason


def test_proofs_are_chosen_by_name_or_tier_and_an_unknown_one_is_refused() -> None:
    assert [one.name for one in chosen(["t5", "crash"])] == ["crash", "power_cut"]
    assert [one.name for one in chosen(["t8"])] == ["crash"]
    with pytest.raises(ValueError, match="no such proof: t9"):
        chosen(["t9"])
