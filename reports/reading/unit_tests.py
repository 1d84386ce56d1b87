"""Results of pytest for tests that are no cases: files in the results folder, written with ``--junitxml``."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from xml.etree import ElementTree

from conformance.records.trajectory import RecordError

UNIT_TESTS_NAME = "unit-tests.xml"
# The tests that run inside the ranks (``st/rank_side``).
RANK_SIDE_NAME = "rank_side.xml"


@dataclass(frozen=True, kw_only=True)
class UnitTests:
    """Counts of one pytest run."""

    tests: int
    failures: int
    errors: int
    skipped: int

    @property
    def good(self) -> bool:
        """True when something ran and nothing failed."""
        return self.tests > self.skipped and not self.failures and not self.errors


def read_unit_tests(path: Path) -> UnitTests:
    """Read the counts.

    Raises:
        RecordError: no JUnit file.
    """
    try:
        root = ElementTree.parse(path).getroot()
        suites = [root] if root.tag == "testsuite" else root.findall("testsuite")
        names = ("tests", "failures", "errors", "skipped")
        counts = {name: sum(int(suite.get(name, "0")) for suite in suites) for name in names}
    except (ElementTree.ParseError, ValueError) as error:
        raise RecordError(f"{path}: no JUnit file: {error}") from error
    if not suites:
        raise RecordError(f"{path}: no testsuite in it")
    return UnitTests(**counts)
