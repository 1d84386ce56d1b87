"""The page has words for all texts of the benchmarks, in Chinese too, and no others."""

from __future__ import annotations

import re

import pytest

from benchmarks.measuring import registry
from benchmarks.protocol import Context, Options
from benchmarks.subjects import ranked
from reports.output.costs_page import load_words

TINY = Options(sizes_gb=(0.001,), smoke=True, repeat=1, worlds=(4,), ranks=(1,))
WORDS = load_words()


@pytest.fixture(scope="module")
def texts(tmp_path_factory: pytest.TempPathFactory) -> dict[str, set[str]]:
    """Benchmark -> what its figures say. Several ranks can't be built in one process, but say what they compare."""
    found = {"ranks": {figure.text for figure in ranked.figures()}}
    for benchmark in registry.all_benchmarks():
        for point in benchmark.points(TINY) if benchmark.name != "ranks" else ():
            scenario = benchmark.build(point, Context(options=TINY, folder=tmp_path_factory.mktemp("built")))
            scenario.close()
            found.setdefault(benchmark.name, set()).update(figure.text for figure in scenario.figures)
    return found


def test_every_figure_has_words(texts: dict[str, set[str]]) -> None:
    assert set(texts) == set(registry.MODULES)
    assert [text for of_one in texts.values() for text in sorted(of_one) if WORDS.figure(text).zh == text] == []


def test_no_word_is_of_a_figure_that_is_not_measured(texts: dict[str, set[str]]) -> None:
    all_texts = set().union(*texts.values())
    patterns = {known: re.escape(known).replace(r"\{\}", ".+") for known in WORDS.figures}
    unused = [known for known, pattern in patterns.items() if not any(re.fullmatch(pattern, one) for one in all_texts)]
    assert unused == []


def test_every_benchmark_and_every_axis_has_words() -> None:
    assert set(WORDS.titles) == set(registry.MODULES)
    axes = {point.axis for benchmark in registry.all_benchmarks() for point in benchmark.points(TINY)}
    assert set(WORDS.axes) == axes
