"""The checks that a case may name, each a pure function from evidence to an outcome; importing this registers all of them."""

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
