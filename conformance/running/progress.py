"""What a run prints while it runs: one line for each finished case, with its number, on a terminal and in a file alike."""

from __future__ import annotations

from conformance.records.results import ResultRecord
from conformance.running.session import GOOD


def print_result(result: ResultRecord, number: int, total: int) -> None:
    """Print ``[12/295] pass C9 title (0.8 s)``; under a failure its reason and the command that runs it again.

    A failure with a sabotage is what the sabotage is for, so it gets its one line only.
    """
    counter = f"[{number:>{len(str(total))}}/{total}]"
    blamed = f" [{result.blamed}]" if result.blamed else ""
    print(f"{counter} {result.outcome:11} {result.key:10} {result.title}{blamed} ({result.seconds:.1f} s)", flush=True)
    if result.sabotage is None and result.outcome not in GOOD:
        indent = " " * (len(counter) + 13)
        print(f"{indent}{result.reason}\n{indent}{result.reproduce}", flush=True)
