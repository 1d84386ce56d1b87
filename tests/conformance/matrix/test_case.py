"""The loader refuses unknown words, and names file and line."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from conformance.matrix.case import CaseError, load_cases, select
from conformance.matrix.given import complete, merge
from tests.conformance.stand_in import case_of

HEAD = """\
# a comment line
- id: C9
  title: a title
  spec: "8.2"
  why: a reason
  script:
    - {leg: saving, until_step: 2}
  expect:
    - {check: saved_steps, leg: saving, steps: [2]}
"""


def write(folder: Path, text: str, name: str = "c.yaml") -> Path:
    folder.mkdir(exist_ok=True)
    (folder / name).write_text(text)
    return folder


def test_a_case_is_read_with_the_line_it_stands_on(tmp_path: Path) -> None:
    (case,) = load_cases(write(tmp_path, HEAD))
    assert (case.id, case.where, case.level, case.given) == ("C9", "c.yaml:2", "must", {})
    assert case.leg_given(case.legs[0]).data.samples == 20


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("  why: a reason", "  whyy: a reason", "c.yaml:2: case C9: unknown key 'whyy'"),
        ("steps: [2]", "stepz: [2]", "c.yaml:9: case C9: saved_steps has no parameter 'stepz'"),
        ("steps: [2]", "steps: 2", "c.yaml:9: case C9: saved_steps.steps: expected a list of a whole number, found 2"),
        (", steps: [2]", "", "c.yaml:9: case C9: saved_steps needs 'steps'"),
        ("saved_steps", "save_steps", "c.yaml:9: case C9: no check is called 'save_steps'; did you mean saved_steps?"),
        ("{leg: saving, until", "{leg: training, until", "leg 'training': reference, saving, interrupted or resumed"),
        ("until_step: 2", "until_step: two", "c.yaml:7: case C9: until_step: expected a whole number, found 'two'"),
        (", until_step: 2", "", "leg saving: it needs until_step, or given.epochs"),
        ("leg: saving, steps", "leg: resumed, steps", "check saved_steps: leg: no leg is called 'resumed'"),
        ("id: C9", "id: E9", "the id is a class letter"),
        ("id: C9", "id: C09", "the id is a class letter"),
        ("title: a title", "title: it should resume", "without 'should'"),
        ("title: a title", "title: tests that it resumes", "without 'tests that'"),
        ("title: a title", "title: it resumes.", "no full stop"),
        ('  spec: "8.2"\n', "", "it needs why (the harm) and a source"),
        ("  why: a reason", "  why: a reason\n  bugs: [bug7]", "'bug7' is no row"),
        ("  why: a reason", "  why: a reason\n  given: {modle: tied}", "unknown key 'modle'; known: trainer"),
        ("  why: a reason", "  why: a reason\n  given: {model: tide}", "model: kind: expected one of tiny-dropout"),
        ("  why: a reason", "  why: a reason\n  given: {checkpoint: {save_step: 1}}", "unknown key 'save_step'"),
        ("  why: a reason", "  why: a reason\n  why: again", "key 'why' is a duplicate"),
        ("    - {leg", "    - {fault: remove_fil, path: x}\n    - {leg", "did you mean remove_file?"),
        ("    - {leg", "    - {sleep: 3}\n    - {leg", "a step of the script has one of leg, fault, look"),
        ("until_step: 2}", "until_step: 2, fault: {kind: kill, after_step: 3}}", "its fault lies behind its last step"),
    ],
)
def test_what_is_unknown_or_ill_said_is_refused(tmp_path: Path, old: str, new: str, message: str) -> None:
    assert old in HEAD
    with pytest.raises(CaseError) as caught:
        load_cases(write(tmp_path, HEAD.replace(old, new)))
    assert message in str(caught.value)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("nodes: 3", "2 ranks can't be 3 nodes of one size"),
        ("nodes: 0", "2 ranks can't be 0 nodes of one size"),
        ("fault: {moment: file_operation}", "file_operation has rank and operation, no other moment has them"),
        ("fault: {moment: file_operation, rank: 1}", "file_operation has rank and operation"),
        ("fault: {moment: file_operation, rank: 1, operation: fsync}", "'fsync' is no name such as"),
        ("fault: {moment: file_operation, rank: 1, operation: fsyn *.distcp}", "one of create, write, fsync"),
        ("fault: {moment: file_operation, rank: 1, operation: 'write  '}", "and a pattern of where"),
        ("fault: {moment: file_operation, rank: 1, operation: 0}", "operation is counted from 1"),
        ("fault: {rank: 1, operation: 1}", "file_operation has rank and operation"),
        ("fault: {moment: file_operation, rank: 2, operation: 1}", "there is no rank 2"),
        ("fault: {moment: at-lunch}", "expected one of after_step"),
        ("fault: {victims: rank-2}", "victims 'rank-2' are neither all nor one of its ranks or nodes"),
        ("fault: {victims: node-1}", "victims 'node-1' are neither all nor one of its ranks or nodes"),
        ("fault: {victims: everybody}", "victims 'everybody' are neither all nor one of its ranks or nodes"),
        ("fault: {kind: terminate, victims: launcher-1}", "victims 'launcher-1' are neither all nor"),
        ("fault: {victims: launcher-0}", "a launcher alone is terminated; killed, it takes its ranks along"),
        ("fault: {kind: raise, victims: rank-1}", "victims 'rank-1' are neither all nor one of its ranks or nodes"),
    ],
)
def test_a_fault_that_can_not_be_is_refused(tmp_path: Path, words: str, message: str) -> None:
    if "kind" not in words:
        words = words.replace("fault: {", "fault: {kind: kill, ")
    words = words.replace("fault: {", "fault: {after_step: 1, ")
    text = HEAD.replace("until_step: 2}", f"until_step: 2, given: {{world_size: 2}}, {words}}}")
    with pytest.raises(CaseError) as caught:
        load_cases(write(tmp_path, text))
    assert message in str(caught.value)


def test_all_problems_of_all_files_are_told_together(tmp_path: Path) -> None:
    write(tmp_path, HEAD.replace("steps: [2]", "steps: 2"), "a.yaml")
    write(tmp_path, HEAD.replace("  why: a reason\n", ""), "b.yaml")
    with pytest.raises(CaseError) as caught:
        load_cases(tmp_path)
    assert str(caught.value).splitlines() == [
        "a.yaml:9: case C9: saved_steps.steps: expected a list of a whole number, found 2",
        "b.yaml:2: case C9: missing key 'why'",
    ]


def test_an_id_and_a_title_are_used_once_and_a_retired_id_never_again(tmp_path: Path) -> None:
    write(tmp_path, HEAD, "a.yaml")
    write(tmp_path, HEAD, "b.yaml")
    (tmp_path / "retired.txt").write_text("# ids\nC9 was a duplicate of C8\n")
    with pytest.raises(CaseError) as caught:
        load_cases(tmp_path)
    assert "b.yaml:2: case C9: the id is taken by a.yaml:2" in str(caught.value)
    assert "the title is that of C9" in str(caught.value)
    assert "a.yaml:2: case C9: the id was retired" in str(caught.value)


def test_no_case_and_an_empty_selection_are_errors(tmp_path: Path) -> None:
    with pytest.raises(CaseError, match="no case here"):
        load_cases(write(tmp_path, "", "note.txt"))
    with pytest.raises(CaseError, match="no case matches 'Q7'"):
        select([case_of()], ["Z1", "Q7"])


@pytest.mark.parametrize(("pattern", "ids"), [("A8", ["A8.a", "A8.b"]), ("A8.b", ["A8.b"]), ("A*", ["A8.a", "A8.b"])])
def test_a_pattern_names_an_id_its_sub_cases_or_a_glob(pattern: str, ids: list[str]) -> None:
    cases = [case_of(id=name, title=f"case {name}") for name in ("A8.a", "A8.b", "B8")]
    assert [case.id for case in select(cases, [pattern])] == ids


def test_a_leg_s_given_is_merged_over_the_case_s() -> None:
    base: dict[str, Any] = {"model": {"kind": "tied", "width": 4}, "data": {"samples": 8}, "optimizer": "sgd"}
    found = complete(merge(base, {"data": {"batch_size": 2}, "model": {"width": 6}, "optimizer": "muon"}), "here")
    assert (found.model.kind, found.model.width) == ("tied", 6)
    assert (found.data.samples, found.data.batch_size, found.optimizer.kind) == (8, 2, "muon")
    assert complete(merge(base, {"model": "buffers"}), "here").model.width == 8


def test_the_shipped_cases_load() -> None:
    assert {case.id for case in load_cases()} >= {"A6", "B1", "C2", "C5", "C9"}
