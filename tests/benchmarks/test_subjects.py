"""Every benchmark once, in this process, at a size at which it takes no time. Several ranks: see test_command."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from benchmarks.contenders import async_peers, coordinator
from benchmarks.measuring import registry
from benchmarks.measuring.measure import measure
from benchmarks.protocol import GB, PAYLOAD, UNIT, Benchmark, Context, Options

TINY = Options(sizes_gb=(0.001,), smoke=True, repeat=1, worlds=(4,), ranks=(1,))
ALONE = [benchmark for benchmark in registry.all_benchmarks() if benchmark.name != "ranks"]


@pytest.mark.parametrize("benchmark", ALONE, ids=lambda benchmark: benchmark.name)
def test_a_benchmark_measures_all_that_its_figures_name_and_checks_what_it_measures(
    benchmark: Benchmark, tmp_path: Path
) -> None:
    (point,) = benchmark.points(TINY)
    scenario = benchmark.build(point, Context(options=TINY, folder=tmp_path))
    try:
        found = measure(scenario, rounds=1, warm_up=False)
    finally:
        scenario.close()
    assert {contender.role for contender in scenario.contenders} & {"limit", "peer"}
    assert scenario.figures
    for figure in scenario.figures:
        assert {*figure.above, figure.below} - {PAYLOAD, UNIT} <= set(found) | set(scenario.absent), figure.text
    ours = [contender for contender in scenario.contenders if contender.role == "ours"]
    assert any(found[contender.name].checked for contender in ours) or benchmark.name == "planning"
    assert all(len(timing.seconds) == 1 and timing.seconds[0] > 0 for timing in found.values())


def test_names_are_unique_and_found() -> None:
    names = [benchmark.name for benchmark in registry.all_benchmarks()]
    assert len(set(names)) == len(names)
    assert all(registry.find(name).name == name for name in names)


@pytest.mark.parametrize("name", ["saves", "no.such.module", "benchmarks.contenders.limits"])
def test_an_unknown_name_is_answered_with_those_that_there_are(name: str) -> None:
    with pytest.raises(ValueError, match="known: save, load"):
        registry.find(name)


def test_labels_are_unique_within_each_benchmark() -> None:
    options = replace(TINY, sizes_gb=(0.25, 1.0, 4.0), worlds=(64, 8192), ranks=(1, 2, 4))
    for benchmark in registry.all_benchmarks():
        labels = [point.label for point in benchmark.points(options)]
        assert len(set(labels)) == len(labels), benchmark.name


def test_goals_of_the_planning_are_asked_at_1024_ranks_and_large_worlds_run_once() -> None:
    planning = registry.find("planning")
    rounds = {point.value: point.rounds for point in planning.points(replace(TINY, worlds=(1024, 4096)))}
    assert rounds == {1024: None, 4096: 1}


def test_the_goals_of_a_load_are_nine_tenths_of_a_raw_read_and_one_payload_of_memory(tmp_path: Path) -> None:
    (point,) = registry.find("load").points(TINY)
    scenario = registry.find("load").build(point, Context(options=TINY, folder=tmp_path))
    goals = {
        (figure.above, figure.below, figure.relation, figure.bound) for figure in scenario.figures if figure.relation
    }
    assert goals == {
        (("raw readinto",), "hyper_resume load", "at least", 0.9),
        (("hyper_resume load",), PAYLOAD, "at most", 1.05),
    }
    assert any(figure.above == ("dcp.load",) and figure.bound is None for figure in scenario.figures)


def test_who_would_keep_a_copy_that_memory_has_no_room_for_is_left_out() -> None:
    """Found as a process that the kernel killed: five copies of 4 GB beside the state, in 23 GB."""
    pytest.importorskip("torch_checkpointing")
    found, absent, close = async_peers.async_peers(4 * GB, 17 * GB)
    close()
    assert [peer.name for peer in found] == [async_peers.STOCK, async_peers.STOCK_CACHED]
    assert absent == {
        async_peers.CHECKPOINTING: "its copy would be number 5 of 4 GB each, and 17.0 GB of memory are free"
    }
    found, absent, close = async_peers.async_peers(4 * GB, 16 * GB)
    close()
    assert set(absent) == {async_peers.STOCK_CACHED, async_peers.CHECKPOINTING}


def test_simulated_plans_cover_every_tensor_on_every_rank(tmp_path: Path) -> None:
    plans = coordinator.local_plans(3, 5)
    # Stock's own validation refuses plans that overlap or leave a part of a tensor out.
    assert coordinator.plan_and_close(plans, coordinator.local_results(plans), tmp_path) == 15
    assert (tmp_path / ".metadata").stat().st_size > 0
