"""The page of two runs side by side, differences first. Its script only switches language and colours."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
from markupsafe import Markup

from reports.comparing.compare import Comparison, CurvePair
from reports.contents.text import load_words
from reports.output.charts import Chart, Series, draw, fitted, swatch
from reports.output.page import render_template
from reports.output.series import thin

_BEFORE, _AFTER = ("reference", "dot"), ("resumed-a", "cross")
_MOST_POINTS = 1800


def render_comparison(found: Comparison) -> str:
    """The page's HTML; the same for the same records."""
    versions = sorted({*found.before.versions, *found.after.versions})
    words = load_words()
    return render_template(
        "compare.html.j2",
        scripts=("switches.js",),
        words=words,
        data={},
        found=found,
        versions=[(name, found.before.versions.get(name), found.after.versions.get(name)) for name in versions],
        different=[row for row in found.legs if row.first_step is not None],
        figures=[(pair.metric, *_draw(pair)) for pair in found.curves if not all(map(math.isnan, pair.before))],
        swatches=[Markup(swatch(*look)) for look in (_BEFORE, _AFTER)],
    )


def _draw(pair: CurvePair) -> tuple[Markup, Markup]:
    before, after = np.array(pair.before), np.array(pair.after)
    difference = after - before
    difference[before.view(np.int64) == after.view(np.int64)] = 0.0
    chosen = list(range(len(pair.steps)))
    is_thinned = len(pair.steps) > _MOST_POINTS
    if is_thinned:
        chosen = thin([before, after, difference], _MOST_POINTS).tolist()

    def series(label: str, look: tuple[str, str], values: Sequence[float]) -> Series:
        return Series(
            label=label,
            style=look[0],
            marker=look[1],
            steps=[pair.steps[row] for row in chosen],
            values=[float(values[row]) for row in chosen],
            joined=is_thinned,
        )

    upper = Chart(
        title=f"{pair.metric} of both runs, by step",
        unit=pair.metric,
        series=[series("before", _BEFORE, pair.before), series("after", _AFTER, pair.after)],
        marks=(),
        bands=(),
        height=250,
        is_upper=True,
    )
    lower = Chart(
        title=f"{pair.metric} of the run after minus that of the run before, by step",
        unit="after − before",
        series=[series("after − before", _AFTER, difference.tolist())],
        marks=(),
        bands=(),
        height=160,
        differences=True,
    )
    return _fitted(upper, f"{pair.metric}-values"), _fitted(lower, f"{pair.metric}-difference")


def _fitted(chart: Chart, name: str) -> Markup:
    return Markup(fitted(draw(chart, name=name), draw(chart, name=f"narrow-{name}", is_narrow=True)))
