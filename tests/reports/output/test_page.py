"""The acceptance page without a browser: order, words, links, nothing from outside, nothing of this machine."""

from __future__ import annotations

import base64
import hashlib
import re
from pathlib import Path

import pytest

from conformance.storage.records import CrashStates, PowerCuts, Storage, write_storage
from reports.contents.document import QUESTIONS
from reports.contents.text import load_words
from reports.judging.assemble import assemble
from reports.output.page import render
from reports.reading.read import read_run
from tests.reports.html import Page
from tests.reports.run_folder import RunFolder, every_id, refused_run, whole_run


@pytest.fixture(scope="module")
def refused(tmp_path_factory: pytest.TempPathFactory) -> str:
    return render(assemble(read_run([refused_run(tmp_path_factory.mktemp("refused") / "run").finish()])))


@pytest.fixture(scope="module")
def accepted(tmp_path_factory: pytest.TempPathFactory) -> str:
    run = whole_run(tmp_path_factory.mktemp("accepted") / "run")
    run.sabotage("seen", "A6")
    return render(assemble(read_run([run.finish()])))


def test_the_sections_come_in_the_order_in_which_they_are_read(refused: str) -> None:
    sections = [
        "verdict-word", "matrix", "done", "details", "timeline-1", "curves-1", "divergence-1", "sabotages", "kills",
        "storage", "costs", "provenance", "trend", "not_tested", "cases",
    ]  # fmt: skip
    ids = [value for _, name, value in Page(refused).attributes if name == "id"]
    assert [name for name in ids if name in sections] == sections


def test_the_first_screen_leads_to_case_step_rank_and_bucket(refused: str) -> None:
    page = Page(refused)
    text = page.text
    assert text.index("REFUSED") < text.index("case D1 step 6 rank 2 bucket rng_state seen in rng.torch_cpu")
    assert text.index("seen in rng.torch_cpu") < text.index("Matrix")
    assert page.count("a", "href", "#divergence-1") == 1


def test_the_depth_of_a_refused_run_shows_both_values_and_which_rank_differs(refused: str) -> None:
    text = Page(refused).text
    detail = text[text.index("Case details the worst") : text.index("Sabotages Defects")]
    assert "reference cc000602" in detail
    assert "resumed cc000600" in detail
    assert "rng rng_state equal equal from step 6 rng.torch_cpu 7/7 equal" in detail
    assert "Columns without a difference : samples, lr, grad_norm, optimizer, model" in detail
    assert "torch_cpu 000502 → 000500" in detail


def test_an_accepted_run_says_so_and_opens_its_hardest_case(accepted: str) -> None:
    text = Page(accepted).text
    assert text.index("ACCEPTED") < text.index("All ")
    assert "REFUSED" not in text
    assert "1 / 1 caught" in text
    assert "the hardest case that passed" in text
    assert "No column differs on any rank." in text


def test_every_link_leads_somewhere_and_every_id_is_unique(refused: str) -> None:
    page = Page(refused)
    ids = [value for _, name, value in page.attributes if name == "id"]
    assert len(ids) == len(set(ids))
    links = [link.removeprefix("#") for link in page.values("a", "href")]
    assert len(links) > 100
    assert set(links) <= set(ids)


def test_every_case_has_its_place_and_its_line_to_run_it_again(refused: str) -> None:
    text = Page(refused).text
    for name in every_id():
        assert f"python -m conformance run --case {name} --keep" in text


def test_the_page_needs_nothing_from_outside_and_its_policy_lets_nothing_in(refused: str) -> None:
    page = Page(refused)
    assert not re.search(r"https?://(?!www\.w3\.org/2000/svg)|@import", refused)
    assert [value for _, name, value in page.attributes if name == "src"] == []
    assert page.values("link", "href") == ["data:,"]
    assert not [name for _, name, _ in page.attributes if name.startswith("on") or name == "style"]
    (policy,) = [value for value in page.values("meta", "content") if "default-src" in value]
    assert policy.startswith("default-src 'none';")
    assert "unsafe" not in policy
    for tag, directive in (("style", "style-src"), ("script", "script-src")):
        (body,) = re.findall(rf"<{tag}>(.*?)</{tag}>", refused, re.S)
        digest = base64.b64encode(hashlib.sha256(body.encode()).digest()).decode()
        assert f"{directive} 'sha256-{digest}'" in policy


def test_tables_are_tables_with_headers_and_figures_have_their_words(refused: str) -> None:
    page = Page(refused)
    assert set(page.values("th", "scope")) <= {"col", "row", "rowgroup"}
    assert len(page.values("th", "scope")) == len(re.findall("<th[ >]", refused))
    assert refused.count("<svg") == page.count("svg", "role", "img") + page.count("svg", "class", "swatch")


def test_both_languages_are_there_for_every_word() -> None:
    words = load_words()
    assert all(text.en.strip() and text.zh.strip() for text in words.values())
    chinese = re.compile("[一-鿿]")
    untranslated = {name for name, text in words.items() if not chinese.search(text.zh)}
    # What is the same in both: the specification's own words.
    assert untranslated == {"loss", "rank", "epoch"}
    assert not any(chinese.search(text.en) for text in words.values())


def test_no_word_of_the_list_is_left_unused() -> None:
    folder = Path(__file__).parents[3] / "reports"
    text = "".join(path.read_text() for path in (folder / "templates").iterdir())
    dynamic = {
        "exact",
        "differs",
        "absent",
        "no_counterpart",
        "accepted",
        "refused",
        "incomplete",
        "loss",
        "lr",
        "grad_norm",
        *QUESTIONS,
    }
    for name in set(load_words()) - dynamic:
        prefix = (
            name.startswith(("state_", "done_", "proof_", "goal_", "four_"))
            or f"'{name}'" in text
            or f'"{name}"' in text
        )
        assert prefix, name


def test_storage_is_shown_by_scenario_and_model_with_its_baseline_and_skips_with_their_reason(
    tmp_path: Path,
) -> None:
    folder = whole_run(tmp_path / "run").finish()
    crash = CrashStates(
        scenario="next_save", model="posix", crash_points=98, states=10793, distinct=858, loaded=107,
        violations={"O2": 5, "O3": 0}, baseline=36, baseline_distinct=162,
    )  # fmt: skip
    cut = PowerCuts(scenario="all", file_system="ext4", trials=0, violations={}, skipped="mounting needs root")
    write_storage(folder / "crash", Storage(crash_states=(crash,), power_cuts=(cut,)))
    text = Page(render(assemble(read_run([folder])))).text
    assert "next_save posix 98 10793 858 107 5 O2 5 36 / 162" in text
    assert "all ext4 skipped : mounting needs root" in text


def test_paths_of_the_machine_and_secrets_stay_out(tmp_path: Path) -> None:
    run = RunFolder(tmp_path / "run", argv=["run", "--results", str(tmp_path / "run"), "--hub-token", "s3cret"])
    run.case("A6", "fail", reason=f"FileNotFoundError: {tmp_path}/run/A6/disk/x; API_KEY=s3cret")
    page = render(assemble(read_run([run.finish()])))
    assert "s3cret" not in page
    assert str(tmp_path) not in page
    assert "…/disk/x" in page


CONFIGURED = {
    "training.max_steps": [25, "examples/demo.yaml:9"],
    "checkpoint.save_steps": [10, "override --checkpoint.save_steps"],
    "checkpoint.is_async": [False, "default"],
}


def test_the_whole_configuration_is_shown_with_the_source_of_each_value(tmp_path: Path) -> None:
    run = RunFolder(tmp_path / "run", suite="st", platform="cpu4")
    later = {**CONFIGURED, "checkpoint.restore_from": ["LATEST", "override --checkpoint.restore_from"]}
    run.resumed_case("D1", ranks=2, configured={"reference": CONFIGURED, "interrupted": CONFIGURED, "resumed": later})
    page = Page(render(assemble(read_run([run.finish()]))))
    text = page.text[page.text.index("Configuration after overrides") :]
    assert "training.max_steps 25 examples/demo.yaml:9" in text
    assert "checkpoint.save_steps 10 override --checkpoint.save_steps" in text
    assert "defaults : checkpoint.is_async=false" in text
    new = text[text.index("leg resumed only what differs from reference") :]
    assert 'checkpoint.restore_from "LATEST" override --checkpoint.restore_from' in new
    assert "leg interrupted" not in text
    assert page.text.count("Configuration after overrides") == 1


def test_of_a_second_case_only_what_its_configuration_has_new_is_shown(tmp_path: Path) -> None:
    run = RunFolder(tmp_path / "run", suite="st", platform="cpu4")
    run.resumed_case("D1", ranks=4, configured={"reference": CONFIGURED})
    run.resumed_case(
        "D3", ranks=2, configured={"reference": {**CONFIGURED, "checkpoint.is_async": [True, "override x"]}}
    )
    run.resumed_case("D5", ranks=2, configured={"reference": CONFIGURED})
    text = Page(render(assemble(read_run([run.finish()])))).text
    assert text.count("training.max_steps 25") == 1
    assert "leg reference only what differs from D1 field value set by checkpoint.is_async true override x" in text
    assert "leg reference only what differs from D1 : none" in text


def test_the_machine_and_its_settings_are_part_of_the_provenance(tmp_path: Path) -> None:
    run = RunFolder(tmp_path / "run", suite="st", platform="cpu4")
    run.case("A6", suite="st")
    text = Page(render(assemble(read_run([run.finish()])))).text
    provenance = text[text.index("Provenance run-1") :]
    for shown in ("cpu A CPU", "cores 2", "memory 3.0 GiB", "file system ext4", "packages_digest feedfacefeedface"):
        assert shown in provenance
    assert "environment OMP_NUM_THREADS 1" in provenance
    assert "s3cret" not in text
    assert "SURPRISE" not in text


def test_a_run_without_any_leg_still_has_a_page(tmp_path: Path) -> None:
    run = RunFolder(tmp_path / "run")
    run.case("A6")
    text = Page(render(assemble(read_run([run.finish()])))).text
    assert "INCOMPLETE" in text
    assert "No leg of this case finished a step." in text


def test_a_sabotaged_run_says_at_the_top_what_was_put_in(tmp_path: Path) -> None:
    run = RunFolder(tmp_path / "run")
    run.case("A6", "fail", sabotage="streams-mixed")
    text = Page(render(assemble(read_run([run.finish()])))).text.partition("Skip to the report")[2]
    assert text.index("A sabotage was put in on purpose : streams-mixed") < text.index("REFUSED")
