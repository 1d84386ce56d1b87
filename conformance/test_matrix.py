"""The matrix under pytest: one test per case, its id in the test's name, marked by class and platform."""

from __future__ import annotations

import pytest
from _pytest.mark import ParameterSet

from conformance.conftest import marker_of
from conformance.matrix.case import Case, load_cases
from conformance.matrix.platforms import load_platforms
from conformance.running.session import GOOD, Session, Work


def _rows() -> list[ParameterSet]:
    platforms = load_platforms()
    rows = []
    for case in load_cases():
        marks = [getattr(pytest.mark, f"class_{case.id[0].lower()}")]
        marks += [getattr(pytest.mark, marker_of(platform)) for platform in platforms if platform.takes(case)]
        rows.append(pytest.param(case, id=case.id, marks=marks))
    return rows


@pytest.mark.parametrize("case", _rows())
def test_case(case: Case, conformance_session: Session) -> None:
    """The case has the outcome that its level demands; a case that the platform can't run is skipped with the reason."""
    (result,) = conformance_session.run([Work(case=case)])
    if result.outcome == "unsupported":
        pytest.skip(f"unsupported: {result.reason}")
    assert result.outcome in GOOD, f"{result.outcome}: {result.reason}\nagain: {result.reproduce}"
