"""The page in a real browser, from disk and offline: links, exact values, zoom, switches, print."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

import pytest

from tests.reports.formulas import loss, lr, single

if TYPE_CHECKING:
    from playwright.sync_api import Browser, Locator, Page

# One worker: the browser and the pages are made once.
pytestmark = pytest.mark.xdist_group("browser")


@pytest.mark.parametrize("which", ["accepted", "passed", "refused", "incomplete"])
def test_the_verdict_is_on_the_first_screen(page: Page, request: pytest.FixtureRequest, which: str) -> None:
    page.goto(request.getfixturevalue(which))
    word = page.locator("#verdict-word")
    assert word.inner_text() == which.upper()
    box = page.locator(".verdict").bounding_box()
    assert box is not None
    assert box["y"] + box["height"] < 500


def test_the_first_screen_of_a_refused_run_leads_to_the_values_that_differ(page: Page, refused: str) -> None:
    page.goto(refused)
    assert page.locator(".first-difference dd").all_inner_texts() == ["D1", "6", "2", "rng_state", "rng.torch_cpu"]
    page.get_by_role("link", name="Show the values").click()
    values = page.locator(".divergence")
    assert is_on_screen(values)
    assert "cc000602" in values.inner_text()
    first = page.locator(".grid-table .first")
    assert is_on_screen(first)
    assert first.inner_text().split() == ["from", "step", "6", "rng.torch_cpu", "7/7"]


def test_the_first_screen_of_a_failed_soak_leads_to_the_values_after_the_kill(page: Page, soaked: str) -> None:
    page.goto(soaked)
    assert page.locator(".first-difference dd").all_inner_texts() == ["soak.demo", "41", "1", "optimizer", "loss"]
    page.get_by_role("link", name="Show the values").click()
    row = page.locator('[id="kill-cpu4-soak.demo-40"]')
    values = page.locator(".divergence")
    assert is_on_screen(row)
    assert is_on_screen(values)
    assert loss(41, 1).hex() in values.inner_text()


def test_the_comparison_is_in_both_languages(page: Page, compared: str) -> None:
    page.goto(compared)
    assert page.locator("h2").first.inner_text().startswith("outcomes changed: 1")
    page.get_by_role("button", name="中文").click()
    assert page.locator("h2").first.inner_text().startswith("结果变化： 1")
    assert page.locator("html").get_attribute("lang") == "zh-Hans"
    latin = page.locator("thead th, tbody th[data-w]").all_inner_texts()
    assert [text for text in latin if text.isascii()] == []
    page.reload()
    assert page.locator("h2").first.inner_text().startswith("结果变化")


def is_on_screen(found: Locator) -> bool:
    box = found.bounding_box()
    return box is not None and box["y"] >= 40 and box["y"] + box["height"] <= 820


def test_a_matrix_cell_opens_its_case(page: Page, refused: str) -> None:
    page.goto(refused)
    case = page.locator("details.case", has=page.locator("#case-conformance-all-D1"))
    assert case.get_attribute("open") is None
    row = page.locator(".matrix tr", has=page.get_by_role("rowheader", name="D1", exact=True))
    row.get_by_role("link", name=re.compile("FAIL")).click()
    assert case.get_attribute("open") is not None
    assert is_on_screen(case.locator("summary"))
    case.locator(".viewer svg.chart").first.wait_for()


def test_a_link_from_elsewhere_opens_the_case_too(page: Page, refused: str) -> None:
    page.goto(refused + "#case-conformance-all-C9")
    assert is_on_screen(page.locator("details.case[open] summary"))


def chart(page: Page) -> Locator:
    return page.locator(".detail .viewer svg.chart").first


def point_at(page: Page, step: int, last: int) -> None:
    """Put the pointer on a step of the first chart, which shows half a step on either side of all of them."""
    found = chart(page)
    found.scroll_into_view_if_needed()
    box = found.bounding_box()
    assert box is not None
    x = 104 + (960 - 18 - 92 - 24) * (step - 0.5) / last
    page.mouse.move(box["x"] + x * box["width"] / 960, box["y"] + box["height"] / 2)


def readout(page: Page, leg: str, metric: str) -> str:
    return page.locator(f'.detail .readout [data-leg="{leg}"][data-metric="{metric}"]').first.inner_text()


def test_pointing_at_a_step_shows_the_exact_values_of_every_leg(page: Page, accepted: str) -> None:
    page.goto(accepted)
    point_at(page, 7, 12)
    assert readout(page, "reference", "loss") == f"reference loss {loss(7)!r}"
    assert readout(page, "resumed", "loss") == f"resumed loss {loss(7)!r} (same bits)"
    assert readout(page, "interrupted", "lr") == f"interrupted learning rate {lr(7)!r} (same bits)"
    assert float(readout(page, "reference", "grad_norm").split()[-1]) == single(1 + 1 / 7)


def test_where_values_differ_the_difference_and_both_hexadecimal_values_are_shown(page: Page, refused: str) -> None:
    page.goto(refused)
    point_at(page, 6, 12)
    other = single(loss(6, 2) + 2**-20)
    shown = readout(page, "resumed", "loss")
    assert f"resumed loss {other!r} (resumed − reference" in shown
    assert float(shown.partition("− reference ")[2].partition(")")[0]) == other - loss(6, 2)
    assert other.hex() in shown
    assert loss(6, 2).hex() in shown


def ticks(page: Page) -> list[int]:
    """The numbers of the step axis: they stand lowest."""
    found = chart(page).locator('text.tick[text-anchor="middle"]').all_text_contents()
    return [int(text) for text in found]


def test_dragging_zooms_in_and_a_double_click_shows_all_again(page: Page, long: str) -> None:
    page.goto(long)
    assert max(ticks(page)) == 10_000
    found = chart(page)
    found.scroll_into_view_if_needed()
    box = found.bounding_box()
    assert box is not None
    middle = box["y"] + box["height"] / 2
    page.mouse.move(box["x"] + box["width"] * 0.40, middle)
    page.mouse.down()
    page.mouse.move(box["x"] + box["width"] * 0.60, middle, steps=4)
    page.mouse.up()
    assert min(ticks(page)) > 3_000
    assert max(ticks(page)) < 7_000
    page.mouse.dblclick(box["x"] + box["width"] * 0.5, middle)
    assert max(ticks(page)) == 10_000


def test_a_spike_of_one_step_in_ten_thousand_is_drawn_and_found_by_the_keyboard(page: Page, long: str) -> None:
    page.goto(long)
    difference = page.locator('.detail figure[data-metric="loss"] svg.chart').nth(1)
    path = difference.locator("path.curve.resumed-a").get_attribute("d") or ""
    heights = [float(height) for height in re.findall(r"[ML][0-9.]+ ([0-9.]+)", path)]
    assert 1_000 < len(heights) < 3_000
    assert sum(height != heights[0] for height in heights) == 1
    chart(page).focus()
    page.keyboard.press("End")
    assert "step 10000" in page.locator(".detail .readout").inner_text()
    page.keyboard.press("ArrowLeft")
    page.keyboard.press("Home")
    assert "step 1\n" in page.locator(".detail .readout").inner_text() + "\n"
    page.keyboard.press("+")
    assert max(ticks(page)) < 10_000
    page.keyboard.press("0")
    assert max(ticks(page)) == 10_000


def test_the_log_scale_changes_the_axis_and_not_the_values(page: Page, accepted: str) -> None:
    page.goto(accepted)
    before = chart(page).locator("text.tick").all_text_contents()
    page.locator(".detail .viewer .log").check()
    assert chart(page).locator("text.tick").all_text_contents() != before
    point_at(page, 7, 12)
    assert readout(page, "reference", "loss") == f"reference loss {loss(7)!r}"


def test_another_rank_is_chosen_by_its_number(page: Page, accepted: str) -> None:
    page.goto(accepted)
    page.locator(".detail .viewer select.rank").select_option("3")
    point_at(page, 7, 12)
    assert readout(page, "reference", "loss") == f"reference loss {loss(7, 3)!r}"


def test_the_language_switch_changes_every_word_and_is_kept(page: Page, refused: str) -> None:
    page.goto(refused)
    page.get_by_role("button", name="中文").click()
    assert page.locator("#verdict-word").inner_text() == "不通过"
    assert "第 6 步" in page.locator("#verdict-sentence").inner_text()
    assert page.locator("#matrix").inner_text() == "矩阵"
    assert page.locator("html").get_attribute("lang") == "zh-Hans"
    assert "放大" in page.locator(".detail .viewer .bar").first.inner_text()
    page.reload()
    assert page.locator("#verdict-word").inner_text() == "不通过"
    page.get_by_role("button", name="English").click()
    assert page.locator("#verdict-word").inner_text() == "REFUSED"


def background(page: Page) -> str:
    return str(page.evaluate("getComputedStyle(document.body).backgroundColor"))


def test_colours_follow_the_system_and_the_switch(page: Page, accepted: str) -> None:
    page.goto(accepted)
    light = background(page)
    page.emulate_media(color_scheme="dark")
    dark = background(page)
    assert light != dark
    page.get_by_role("button", name="Light").click()
    assert background(page) == light
    page.emulate_media(color_scheme="light")
    page.get_by_role("button", name="Dark").click()
    assert background(page) == dark


CONTRAST = """
() => {
  const numbers = (text) => text.match(/[0-9.]+/g).map(Number);
  const channel = (c) => c / 255 <= 0.03928 ? c / 255 / 12.92 : ((c / 255 + 0.055) / 1.055) ** 2.4;
  const luminance = ([r, g, b]) => 0.2126 * channel(r) + 0.7152 * channel(g) + 0.0722 * channel(b);
  const behind = (node) => {
    for (; node; node = node.parentElement) {
      const found = numbers(getComputedStyle(node).backgroundColor);
      if (found.length === 3 || found[3] > 0) return found;
    }
    return [255, 255, 255];
  };
  const poor = [];
  for (const node of document.querySelectorAll("body *:not(svg *):not(script):not(style)")) {
    const hasText = [...node.childNodes].some((child) => child.nodeType === 3 && child.textContent.trim());
    if (!hasText || !node.getClientRects().length) continue;
    const [a, b] = [luminance(numbers(getComputedStyle(node).color)), luminance(behind(node))];
    const ratio = (Math.max(a, b) + 0.05) / (Math.min(a, b) + 0.05);
    if (ratio < 4.5) poor.push(`${ratio.toFixed(2)} ${node.className} ${node.textContent.trim().slice(0, 40)}`);
  }
  return poor;
}
"""


@pytest.mark.parametrize("which", ["accepted", "passed", "priced", "refused", "soaked", "incomplete", "compared"])
def test_all_text_has_enough_contrast(page: Page, request: pytest.FixtureRequest, which: str) -> None:
    page.emulate_media(color_scheme="light")
    page.goto(request.getfixturevalue(which))
    poor = {"light": page.evaluate(CONTRAST)}
    page.emulate_media(color_scheme="dark")
    poor["dark"] = page.evaluate(CONTRAST)
    assert poor == {"light": [], "dark": []}


def test_the_page_itself_never_scrolls_sideways(page: Page, refused: str) -> None:
    page.goto(refused)
    for width in (1280, 800, 390):
        page.set_viewport_size({"width": width, "height": 820})
        assert page.evaluate("document.documentElement.scrollWidth") == width


def test_without_a_script_verdict_matrix_and_curves_are_still_there(browser: Browser, refused: str) -> None:
    context = browser.new_context(java_script_enabled=False, offline=True)
    page = context.new_page()
    page.goto(refused)
    assert page.locator("#verdict-word").inner_text() == "REFUSED"
    assert page.locator(".matrix .fail").first.is_visible()
    assert page.locator(".detail .viewer svg.chart").first.is_visible()
    assert not page.locator(".switches").is_visible()
    page.goto(refused + "#case-conformance-all-D1")
    assert page.locator("#case-conformance-all-D1").is_visible()
    context.close()


def test_what_is_printed_is_light_and_has_no_controls(page: Page, refused: str) -> None:
    page.emulate_media(media="print", color_scheme="dark")
    page.goto(refused)
    assert background(page) == "rgb(255, 255, 255)"
    for name in (".switches", ".contents", ".detail .viewer .bar", ".command .copy", ".readout"):
        assert not page.locator(name).first.is_visible(), name
    assert page.locator(".detail .viewer svg.chart").first.is_visible()
    printed = page.pdf(format="A4", print_background=True)
    assert printed.startswith(b"%PDF")
    pages = len(re.findall(rb"/Type\s*/Page\b", printed))
    assert 3 <= pages <= 40


def test_the_filter_and_the_box_leave_what_was_asked_for(page: Page, refused: str) -> None:
    page.goto(refused)
    page.locator("#only-bad").check()
    assert page.locator("details.case:visible").count() == 1
    page.locator("#only-bad").uncheck()
    page.locator("#filter").fill("A10")
    assert page.locator("details.case:visible summary code").all_inner_texts()[0].startswith("A10")
    assert page.locator(".matrix .row:visible").count() == 1


def test_the_line_that_runs_a_case_again_is_copied(browser: Browser, refused: str) -> None:
    context = browser.new_context(permissions=["clipboard-read", "clipboard-write"], offline=True)
    page = context.new_page()
    page.goto(refused)
    page.locator(".detail .copy").first.click()
    page.locator(".detail .copy").first.filter(has_text="Copied").wait_for()
    assert page.evaluate("navigator.clipboard.readText()") == page.locator(".detail .command code").first.inner_text()
    context.close()


def test_every_control_is_reached_by_the_keyboard(page: Page, accepted: str) -> None:
    page.goto(accepted)
    page.keyboard.press("Tab")
    assert page.evaluate("document.activeElement.className") == "skip"
    seen = set()
    for _ in range(60):
        page.keyboard.press("Tab")
        seen.add(
            page.evaluate(
                "document.activeElement.tagName + '.' + (document.activeElement.id || document.activeElement.className)"
            )
        )
    assert {"INPUT.filter", "INPUT.only-bad"} <= seen
    assert any(name.startswith("A.") for name in seen)
    assert any(name.startswith("BUTTON") for name in seen)
