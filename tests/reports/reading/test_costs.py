"""Costs: the records of the benchmarks are shown as measured, leave the verdict alone, and are refused where broken."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from reports.__main__ import main
from reports.comparing.compare import compare, text_of
from reports.comparing.compare_page import render_comparison
from reports.judging.assemble import Assembled, assemble
from reports.output.machine_files import make_files
from reports.output.page import render
from reports.reading.read import read_run
from tests.reports.bench_folder import MEMORY, QUICK, SLOW, SLOWER, SOURCE, SPEED, BenchFolder, costed
from tests.reports.html import Page
from tests.reports.run_folder import RunFolder, whole_run


def made(folder: Path, profile: str = "accept") -> Assembled:
    return assemble(read_run([folder]), profile=profile)


def section(assembled: Assembled) -> str:
    text = Page(render(assembled)).text
    return text[text.index("Ratios of two contenders") : text.index("Provenance run-1")]


def small(folder: Path, *, source: str = SOURCE) -> Path:
    """A run of one case, to which benchmarks may be added."""
    run = RunFolder(folder, suite="conformance", source=source)
    run.case("A6")
    return run.finish()


def test_each_figure_is_shown_with_its_spread_its_goal_and_whether_it_was_met(tmp_path: Path) -> None:
    costed(small(tmp_path / "run") / "bench").finish()
    text = section(made(tmp_path / "run"))
    assert "bench 2 met 1 missed 1 not measured" in text
    assert "0.25 GB 0.8 0.625–0.8 0.5–1 5 missed the goal is at least 0.9, 0.8 was measured" in text
    assert "目标至少 0.9，实测 0.8" in text
    assert "1 GB 1 1–1 0.8–1 5 met the goal is at least 0.9; the median meets it, some rounds do not" in text
    assert "0.25 GB 1.02 1 met the goal is at most 1.05, 1.02 was measured" in text
    assert "1 GB – not measured the goal is at most 1.05; peak_bytes of ours was not measured" in text
    assert "0.25 GB 0.8 0.625–0.8 0.5–1 5 no goal" in text
    assert "Not measured : torchsnapshot (1 GB). torchsnapshot is not installed" in text


def test_the_section_is_in_both_languages_and_keeps_what_it_has_no_word_for(tmp_path: Path) -> None:
    run = costed(small(tmp_path / "run") / "bench")
    where = {"benchmark": "odd", "point": "here"}
    run.figure(where, "a ratio of one's own", "seconds", ["raw write"], "ours", {}, 0, None, "ours was not measured")
    run.finish()
    text = section(made(tmp_path / "run"))
    assert f"{SPEED} 存盘速度 / 裸写入速度" in text
    assert "save: speedup over raw write raw write 的存盘时间 / 本库的存盘时间" in text
    assert "Save of large tensors 大张量存盘" in text
    assert "Something of one's own odd" in text
    assert "a ratio of one's own here – no goal ours was not measured" in text


def test_missed_goals_refuse_nothing_and_the_page_says_so(tmp_path: Path) -> None:
    folder = whole_run(tmp_path / "run").finish()
    costed(folder / "bench" / "one").finish()
    assembled = made(folder)
    assert (assembled.report.verdict.state, assembled.report.verdict.findings) == ("accepted", ())
    files = make_files(assembled)
    text = Page(files["index.html"]).text
    assert "a missed goal is shown as missed and does not change the verdict" in text
    assert text.index("cost goals met (not part of the verdict) 2 /4") < text.index("Matrix")
    assert "Cost goals met: 2 of 4; they are not part of the verdict." in files["summary.md"]
    assert [run["name"] for run in json.loads(files["results.json"])["costs"]] == ["bench/one"]


def test_a_benchmark_that_broke_off_leaves_the_run_incomplete(tmp_path: Path) -> None:
    folder = whole_run(tmp_path / "run").finish()
    run = costed(folder / "bench")
    run.failure(f"Traceback\nFileNotFoundError: {tmp_path}/bench/4/shard")
    run.finish()
    assembled = made(folder)
    (finding,) = assembled.report.verdict.findings
    assert (assembled.report.verdict.state, finding.kind, finding.anchor) == ("incomplete", "error", "costs")
    page = render(assembled)
    assert "Not completed 4 GB" in Page(page).text
    assert str(tmp_path) not in page


@pytest.mark.parametrize(
    ("source", "is_other"),
    [(SOURCE, False), (SOURCE + "+", False), ("f" * 40, True), ("", True)],
)
def test_the_page_says_when_costs_were_measured_at_another_commit(tmp_path: Path, source: str, is_other: bool) -> None:
    costed(small(tmp_path / "run") / "bench", source=source).finish()
    text = section(made(tmp_path / "run"))
    assert ("Measured at another commit than the results" in text) == is_other
    assert (f"commit {source[:12] or 'not in the records'}" in text) is True
    assert ("with local changes" in text) == source.endswith("+")


def test_a_smoke_run_is_called_one_and_counts_for_nothing(tmp_path: Path) -> None:
    costed(small(tmp_path / "run") / "bench", smoke=True).finish()
    text = Page(render(made(tmp_path / "run"))).text
    assert "A smoke run" in text
    assert "cost goals met" not in text


def test_the_machine_and_the_command_are_shown_without_paths_and_secrets(tmp_path: Path) -> None:
    costed(small(tmp_path / "run") / "bench").finish()
    assembled = made(tmp_path / "run")
    for text in (section(assembled), make_files(assembled)["results.json"]):
        assert "s3cret" not in text
        assert str(tmp_path) not in text
    for shown in ("cpu A CPU", "memory 3.0 GiB", "threads of torch 1", "OMP_NUM_THREADS=1", "feedfacefeedface"):
        assert shown in section(assembled)


def test_a_chart_is_drawn_where_a_ratio_has_several_places_with_its_goal(tmp_path: Path) -> None:
    costed(small(tmp_path / "run") / "bench").finish()
    page = render(made(tmp_path / "run"))
    assert "a: 1</text>" in page
    assert "goal of a, at least: 0.9</text>" in page
    # Its memory was weighed at one size only.
    assert "goal of b" not in page
    text = section(made(tmp_path / "run"))
    assert f"a · {SPEED}" in text
    assert f"· {MEMORY}" not in text
    single = BenchFolder(small(tmp_path / "single") / "bench")
    single.point(1.0, SLOW)
    single.finish()
    assert "goal of a" not in render(made(tmp_path / "single"))


def test_records_are_found_at_any_depth_but_not_within_results(tmp_path: Path) -> None:
    small(tmp_path / "all" / "conformance")
    costed(tmp_path / "all" / "bench" / "20260301" / "deep").finish()
    costed(tmp_path / "all").finish()
    costed(tmp_path / "all" / "conformance" / "A6" / "disk").finish()
    found = made(tmp_path / "all").report.costs
    assert [run.name for run in found] == ["20260301-110000", "bench/20260301/deep"]


def test_without_records_an_acceptance_says_so_and_a_selection_is_silent(tmp_path: Path) -> None:
    small(tmp_path / "run")
    assert "This run has no records of benchmarks." in Page(render(made(tmp_path / "run"))).text
    assert "Ratios of two contenders" not in Page(render(made(tmp_path / "run", "selection"))).text


def no_footer(run: BenchFolder) -> None:
    run.lines.pop()
    run.write()


def torn(run: BenchFolder) -> None:
    path = run.folder / "records.jsonl"
    path.write_text(path.read_text()[:-5])


def no_text(run: BenchFolder) -> None:
    (run.folder / "records.jsonl").write_bytes(b"\xff\xfe{}\n")


def other_version(run: BenchFolder) -> None:
    run.lines[0]["schema"] = "hyper_resume.benchmark/99"
    run.write()


def unknown_field(run: BenchFolder) -> None:
    run.lines[1]["surprise"] = 1
    run.write()


def unknown_record(run: BenchFolder) -> None:
    run.lines.insert(1, {"record": "applause"})
    run.write()


def no_header(run: BenchFolder) -> None:
    del run.lines[0]
    run.write()


def better_figure(run: BenchFolder) -> None:
    figure = next(line for line in run.lines if line.get("status") == "not met")
    figure |= {"median": 0.95, "status": "met"}
    run.counts |= {"met": run.counts["met"] + 1, "not met": 0}
    run.write()


def better_status(run: BenchFolder) -> None:
    next(line for line in run.lines if line.get("status") == "not met")["status"] = "met"
    run.write()


def missing_round(run: BenchFolder) -> None:
    next(line for line in run.lines if line.get("contender") == "ours")["seconds"].pop()
    run.write()


def better_count(run: BenchFolder) -> None:
    run.counts["met"] += 1
    run.write()


def strange_benchmark(run: BenchFolder) -> None:
    run.lines[0]["benchmarks"] = {"load": "Load"}
    run.write()


@pytest.mark.parametrize(
    ("damage", "shown"),
    [
        (no_footer, "no footer"),
        (torn, "torn"),
        (no_text, "can't decode"),
        (other_version, "benchmark/99"),
        (unknown_field, "unknown key 'surprise'"),
        (unknown_record, "no record is called 'applause'"),
        (no_header, "the first record is no header"),
        (better_figure, "is 0.95 (met), its measurements give 0.8 (not met)"),
        (better_status, "is 0.8 (met), its measurements give 0.8 (not met)"),
        (missing_round, "can't be made from its measurements"),
        (better_count, "the footer counts 3 goals met, there are 2"),
        (strange_benchmark, "a record of 'save', of which the header knows nothing"),
    ],
)
def test_broken_records_are_refused_by_name_and_nothing_is_written(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], damage: Callable[[BenchFolder], None], shown: str
) -> None:
    folder = small(tmp_path / "run")
    run = costed(folder / "bench")
    run.finish()
    damage(run)
    assert main(["build", str(folder), "-o", str(tmp_path / "report")]) == 2
    said = capsys.readouterr().err
    assert "records.jsonl" in said
    assert shown in said
    assert not (tmp_path / "report").exists()


def test_two_runs_of_one_name_are_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for name in ("a", "b"):
        run = RunFolder(tmp_path / name, run_id=name)
        run.case("A6")
        costed(run.finish() / "bench").finish()
    assert main(["build", str(tmp_path / "a"), str(tmp_path / "b")]) == 2
    assert "a run of benchmarks called 'bench' is there twice" in capsys.readouterr().err


def side(
    folder: Path, *points: tuple[float, tuple[tuple[float, ...], dict[str, object]], int], smoke: bool = False
) -> Assembled:
    run = BenchFolder(small(folder) / "bench", smoke=smoke)
    for size, rounds, peak in points:
        run.point(size, rounds, peak=peak)
    run.finish()
    return made(folder)


def test_a_comparison_lists_the_goals_that_got_worse_by_more_than_their_spread(tmp_path: Path) -> None:
    before = side(tmp_path / "before", (0.25, QUICK, 250_000_000), (1.0, SLOW, 10**9))
    after = side(tmp_path / "after", (0.25, SLOWER, 260_000_000), (1.0, SLOWER, 2 * 10**9))
    found = compare(before, after)
    # 0.25 GB: the speed lost 0.75 of a range of 0.2, the memory 4 %. 1 GB: 0.55 of a range of 0.5, and twice the memory.
    assert [(one.point, one.text, one.before, one.after) for one in found.worse] == [
        ("0.25 GB", SPEED, "1 (0.8–1)", "0.25 (0.2–0.25)"),
        ("1 GB", SPEED, "0.8 (0.5–1)", "0.25 (0.2–0.25)"),
        ("1 GB", MEMORY, "1", "2"),
    ]
    assert text_of(found).endswith("3 of 4 cost figures got worse by more than their spread\n")
    assert "got worse by more than their spread: 3 / 4" in Page(render_comparison(found)).text
    assert compare(after, before).worse == ()


def test_a_comparison_keeps_quiet_within_the_spread_and_about_smoke_runs(tmp_path: Path) -> None:
    before, after = side(tmp_path / "a", (1.0, QUICK, 10**9)), side(tmp_path / "b", (1.0, SLOW, 10**9))
    assert compare(before, after).worse == ()  # 0.2 of a range of 0.5
    smoke = side(tmp_path / "c", (1.0, SLOWER, 10**9), smoke=True)
    found = compare(before, smoke)
    assert (found.goals, found.worse) == (0, ())
    assert "cost figures" not in text_of(found)


def test_a_comparison_without_costs_has_no_section_of_them(tmp_path: Path) -> None:
    found = compare(made(small(tmp_path / "a")), made(small(tmp_path / "b")))
    assert "Ratios of two contenders" not in Page(render_comparison(found)).text
