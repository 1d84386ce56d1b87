"""Checks: pure functions from evidence to outcomes, in one closed registry, and the comparison that they rest on.

The checks live in :mod:`conformance.checks`; what this module exports are the public names.
"""

from __future__ import annotations

from conformance.checks import CHECKS, CheckOutcome, run_check
from conformance.compare import (
    ALL_COLUMNS,
    COLUMNS,
    VERDICT_COLUMNS,
    ComparisonError,
    bits,
    cells,
    compare_trajectories,
    show,
)

__all__ = [
    "ALL_COLUMNS",
    "CHECKS",
    "COLUMNS",
    "VERDICT_COLUMNS",
    "CheckOutcome",
    "ComparisonError",
    "bits",
    "cells",
    "compare_trajectories",
    "run_check",
    "show",
]
