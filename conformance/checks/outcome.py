"""The outcome of a check, the registry of checks, and how one is run."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from conformance.checks.compare import ComparisonError
from conformance.plain_data.registry import Registry
from conformance.plain_data.serial import to_plain
from conformance.records.comparison import Divergence
from conformance.records.evidence import Evidence, EvidenceError
from conformance.records.results import CheckRecord


@dataclass(frozen=True, kw_only=True)
class CheckOutcome:
    """``error`` means neither passed nor failed. ``blames`` is the bucket that a failure is attributed to."""

    status: Literal["passed", "failed", "error"]
    expected: str
    observed: str
    divergence: Divergence | None = None
    blames: str | None = None


CHECKS: Registry[Callable[..., CheckOutcome]] = Registry("check")


def verdict(
    right: bool, *, expected: str, observed: str, blames: str | None, divergence: Divergence | None = None
) -> CheckOutcome:
    """``passed`` if ``right``, otherwise ``failed``."""
    return CheckOutcome(
        status="passed" if right else "failed",
        expected=expected,
        observed=observed,
        blames=None if right else blames,
        divergence=divergence,
    )


def run_check(
    name: str, parameters: Mapping[str, Any], evidence: Evidence, *, blames: str | None = None
) -> CheckRecord:
    """Run one check. Any exception inside it makes its status ``error``, never ``passed``.

    Args:
        name: of the registry.
        parameters: typed, as :meth:`conformance.plain_data.registry.Registry.parameters` returns them.
        evidence: of one case.
        blames: the bucket that a failure is attributed to, instead of the check's own.
    """
    function = CHECKS.entries[name].function
    try:
        outcome = function(evidence, **parameters)
    except (EvidenceError, ComparisonError) as error:
        outcome = CheckOutcome(status="error", expected="evidence to judge by", observed=str(error))
    except Exception as error:  # noqa: BLE001  a check that throws is unknown, and unknown is not pass
        outcome = CheckOutcome(status="error", expected="a check that ends", observed=f"{name}: {error!r}")
    blamed = (blames or outcome.blames) if outcome.status == "failed" else None
    return CheckRecord(
        check=name,
        parameters=to_plain(dict(parameters)),
        status=outcome.status,
        expected=outcome.expected,
        observed=outcome.observed,
        divergence=outcome.divergence,
        blames=blamed,
    )
