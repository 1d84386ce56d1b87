"""Every scenario on every platform that requires it: one test each, named by id and platform."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from _pytest.mark import ParameterSet

from conformance.matrix.case import Case
from conformance.matrix.platforms import Platform
from conformance.running.session import GOOD, Session, Work
from st import running
from st.hardware import missing_hardware

# A leg that hangs is ended by its own limit, and its scenario fails; this limit is for a harness that hangs.
_LIMIT_SECONDS = 3600


def _rows() -> list[ParameterSet]:
    rows = []
    for platform in running.platforms():
        for case in running.scenarios():
            if platform.takes(case):
                marks = [getattr(pytest.mark, platform.id), getattr(pytest.mark, f"class_{case.id[0].lower()}")]
                rows.append(pytest.param(case, platform, id=f"{case.id}-{platform.id}", marks=marks))
    return rows


@pytest.mark.timeout(_LIMIT_SECONDS)
@pytest.mark.parametrize(("case", "platform"), _rows())
def test_scenario(
    case: Case, platform: Platform, st_session: Callable[[Platform], Session], request: pytest.FixtureRequest
) -> None:
    """The scenario has the outcome that its level demands; on a missing platform it is skipped with the reason."""
    reason = missing_hardware(platform)
    if reason is not None:
        message = f"unsupported: {case.id}: {reason}"
        assert platform.id not in request.config.getoption("require"), f"--require {platform.id}: {message}"
        pytest.skip(message)
    chosen = running.by(request.config.getoption("launcher"), case)
    session = st_session(platform)
    (result,) = session.run([Work(case=chosen)])
    if result.outcome == "unsupported":
        pytest.fail(f"unsupported, although {platform.id} is there: {result.reason}")
    assert result.outcome in GOOD, (
        f"{result.outcome}: {result.reason}\nevidence: {session.folder / result.key}\nagain: {result.reproduce}"
    )
