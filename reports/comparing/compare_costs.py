"""Costs of two runs side by side: the figures with a goal that got worse by more than the spread of their rounds."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from benchmarks.reporting.records import FigureRecord
from benchmarks.reporting.table import ratio_text
from reports.reading.costs import CostRun

# The spread of a figure that was measured once (peak memory), as a share of it.
_SHARE_OF_ONE = 0.05


@dataclass(frozen=True, kw_only=True)
class Worse:
    """A figure of both runs whose median moved away from its goal by more than the larger of its two spreads."""

    benchmark: str
    point: str
    text: str
    before: str
    after: str
    goal: str

    @property
    def words(self) -> str:
        """Both values and the goal, in words."""
        return f"{self.before} -> {self.after} (the goal is {self.goal})"


def worse_costs(before: Sequence[CostRun], after: Sequence[CostRun]) -> tuple[Worse, ...]:
    """What got worse; a figure that one side does not have, or of a smoke run, is not compared."""
    old, new = _measured(before), _measured(after)
    return tuple(
        Worse(
            benchmark=key[0],
            point=key[1],
            text=key[2],
            before=_shown(old[key]),
            after=_shown(one),
            goal=f"{one.relation} {ratio_text(one.bound)}",
        )
        for key, one in new.items()
        if key in old and _is_worse(old[key], one)
    )


def goals_in_common(before: Sequence[CostRun], after: Sequence[CostRun]) -> int:
    """How many figures with a goal both runs measured."""
    return len(_measured(before).keys() & _measured(after).keys())


def _measured(runs: Sequence[CostRun]) -> dict[tuple[str, str, str], FigureRecord]:
    """Every measured goal, by benchmark, point and text; of two runs of one benchmark the later one counts."""
    found = {}
    for run in sorted(runs, key=lambda run: run.started_at):
        if not run.is_smoke:
            found.update({(one.benchmark, one.point, one.text): one for one in run.goals if one.median is not None})
    return found


def _is_worse(before: FigureRecord, after: FigureRecord) -> bool:
    assert before.median is not None  # only measured figures are compared
    assert after.median is not None
    lost = before.median - after.median if after.relation == "at least" else after.median - before.median
    return lost > max(_spread(before), _spread(after))


def _spread(figure: FigureRecord) -> float:
    assert figure.median is not None  # a measured figure has all of these
    assert figure.least is not None
    assert figure.most is not None
    return figure.most - figure.least if figure.samples > 1 else _SHARE_OF_ONE * figure.median


def _shown(figure: FigureRecord) -> str:
    span = f" ({ratio_text(figure.least)}–{ratio_text(figure.most)})" if figure.samples > 1 else ""
    return ratio_text(figure.median) + span
