"""``proof.json`` comes back as it was written, and a file of another shape is refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from conformance.proof_record import Divergence, read_proof
from conformance.record import RecordError
from tests.reports.results_folder import results_folder


def test_a_record_comes_back_as_it_was_written(tmp_path: Path) -> None:
    divergence = Divergence(step=11, rank=2, bucket="rng_state", column="rng.python", reference="a", resumed="b")
    written = results_folder(tmp_path, divergence=divergence)
    assert read_proof(tmp_path) == written
    assert [path.name for path in tmp_path.iterdir() if path.is_file()] == ["proof.json"]


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        ("schema", "hyper_resume.proof/0", "schema is 'hyper_resume.proof/0'"),
        ("outcome", "fine", "outcome: expected"),
        ("ranks", "4", "ranks: expected"),
        ("legs", [{"leg": "reference"}], r"legs\[0\]: missing fields"),
        ("mood", "good", r"unknown fields \['mood'\]"),
    ],
)
def test_a_record_of_another_shape_is_refused(tmp_path: Path, key: str, value: Any, message: str) -> None:
    results_folder(tmp_path)
    path = tmp_path / "proof.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {key: value}))
    with pytest.raises(RecordError, match=message):
        read_proof(tmp_path)


def test_a_run_that_did_not_end_has_no_record(tmp_path: Path) -> None:
    with pytest.raises(RecordError, match=r"proof\.json: missing; the run did not come to its end"):
        read_proof(tmp_path)
    (tmp_path / "proof.json").write_text('{"schema": ')
    with pytest.raises(RecordError, match="not JSON"):
        read_proof(tmp_path)
