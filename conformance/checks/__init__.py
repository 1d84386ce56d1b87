"""All checks. A module that defines some is imported here, which files them in the registry."""

from conformance.checks import certificates, endings, ordering, printing, ranks, restoring, saving, trajectories
from conformance.checks.outcome import CHECKS, CheckOutcome, run_check

__all__ = [
    "CHECKS",
    "CheckOutcome",
    "certificates",
    "endings",
    "ordering",
    "printing",
    "ranks",
    "restoring",
    "run_check",
    "saving",
    "trajectories",
]
