"""The address names the opened case and the language; curves fit the screen of a telephone."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from playwright.sync_api import Browser, Page

# One worker: the browser and the pages are made once.
pytestmark = pytest.mark.xdist_group("browser")

C9, D1 = "#case-conformance-all-C9", "#case-conformance-all-D1"
# Every drawing that can be seen, with the size in pixels of its smallest letters.
DRAWN = """
() => [...document.querySelectorAll("svg.chart")].filter((svg) => svg.getClientRects().length).map((svg) => {
  const box = svg.getBoundingClientRect();
  const letters = [...svg.querySelectorAll("text")].map((text) => parseFloat(getComputedStyle(text).fontSize));
  const scale = box.width / svg.viewBox.baseVal.width;
  const right = Math.max(...[...svg.querySelectorAll("text")].map((text) => text.getBoundingClientRect().right));
  return { left: box.left, right: Math.max(box.right, right), letters: Math.min(...letters) * scale };
})
"""


@pytest.mark.parametrize(
    ("locale", "words"),
    [
        ("en-US", {"": "REFUSED", "?lang=zh": "不通过"}),
        ("zh-CN", {"": "不通过", "?lang=en": "REFUSED", "?lang=tlh": "REFUSED"}),
        ("zh-TW", {"": "不通过"}),
        ("de-DE", {"": "REFUSED"}),
    ],
)
def test_the_language_is_that_of_the_address_or_of_the_browser(
    browser: Browser, refused: str, locale: str, words: dict[str, str]
) -> None:
    context = browser.new_context(locale=locale, offline=True)
    page = context.new_page()
    for query, word in words.items():
        page.goto(refused + query)
        assert page.locator("#verdict-word").inner_text() == word, query
        pressed = page.locator('[data-switch="language"] [aria-pressed="true"]').inner_text()
        assert pressed == ("中文" if word == "不通过" else "English")
    context.close()


def test_a_choice_of_language_wins_over_the_browser_and_is_written_into_an_address_that_names_one(
    browser: Browser, refused: str
) -> None:
    context = browser.new_context(locale="zh-CN", offline=True)
    page = context.new_page()
    page.goto(refused)
    page.get_by_role("button", name="English").click()
    page.reload()
    assert page.locator("#verdict-word").inner_text() == "REFUSED"
    assert "lang" not in page.url
    page.goto(refused + "?lang=en" + C9)
    page.get_by_role("button", name="中文").click()
    assert page.url.endswith("?lang=zh" + C9)
    page.reload()
    assert page.locator("#verdict-word").inner_text() == "不通过"
    context.close()


def test_a_case_has_its_title_in_both_languages(page: Page, refused: str) -> None:
    page.goto(refused)
    title = page.locator("details.case", has=page.locator(D1)).locator(".title")
    assert title.inner_text() == "D1 goes on"
    page.get_by_role("button", name="中文").click()
    assert title.inner_text() == "四个 rank（TP 2 × 分片 2）被杀后完全恢复"
    assert "TP 2 × 分片 2" in page.locator(".detail h3").first.inner_text()
    page.locator("#filter").fill("分片 2")
    assert page.locator("details.case:visible summary code").first.inner_text() == "D1"


def scrolled(page: Page) -> float:
    return float(page.evaluate("scrollY"))


def test_the_address_follows_the_opened_case_and_the_back_button_undoes_it(page: Page, refused: str) -> None:
    page.goto(refused)
    first, second = (page.locator("details.case", has=page.locator(anchor)) for anchor in (C9, D1))
    first.locator("summary").scroll_into_view_if_needed()
    place = scrolled(page)
    first.locator("summary").first.click()
    assert page.url == refused + C9
    assert scrolled(page) == place
    second.locator("summary").first.click()
    assert page.url == refused + D1
    assert first.get_attribute("open") is not None
    page.go_back()
    page.wait_for_function("!document.querySelector('#case-conformance-all-D1').closest('details').open")
    assert page.url == refused + C9
    page.go_back()
    page.wait_for_function("!document.querySelector('#case-conformance-all-C9').closest('details').open")
    assert page.url == refused
    page.go_forward()
    page.wait_for_function("document.querySelector('#case-conformance-all-C9').closest('details').open")
    assert page.url == refused + C9
    first.locator("summary").first.click()
    assert page.url == refused
    assert first.get_attribute("open") is None


def test_back_from_a_case_that_a_link_opened_leads_to_where_the_link_was(page: Page, refused: str) -> None:
    page.goto(refused)
    link = page.locator(f'.matrix a[href="{D1}"]').first
    link.scroll_into_view_if_needed()
    place = scrolled(page)
    link.click()
    case = page.locator("details.case", has=page.locator(D1))
    case.locator(".viewer svg.chart").first.wait_for()
    assert page.url == refused + D1
    page.go_back()
    page.wait_for_function("!document.querySelector('#case-conformance-all-D1').closest('details').open")
    page.wait_for_function(f"Math.abs(scrollY - {place}) < 2")
    assert page.url == refused


def test_a_link_to_another_case_leaves_the_first_one_open(page: Page, refused: str) -> None:
    page.goto(refused + C9)
    page.locator(f'.matrix a[href="{D1}"]').first.click()
    page.locator("details.case[open]", has=page.locator(D1)).wait_for()
    assert page.locator("details.case[open]", has=page.locator(C9)).count() == 1


@pytest.mark.parametrize("which", ["refused", "priced", "compared", "long"])
def test_curves_fit_a_screen_of_390_pixels_with_letters_that_can_be_read(
    page: Page, request: pytest.FixtureRequest, which: str
) -> None:
    page.set_viewport_size({"width": 390, "height": 844})
    address = request.getfixturevalue(which)
    page.goto(address + ("" if which == "compared" else C9))
    drawn = page.evaluate(DRAWN)
    assert len(drawn) >= 6
    assert [one for one in drawn if one["left"] < 0 or one["right"] > 390] == []
    assert min(one["letters"] for one in drawn) >= 9
    assert page.evaluate("document.documentElement.scrollWidth") == 390


def test_curves_are_drawn_again_when_the_screen_is_turned(page: Page, refused: str) -> None:
    page.set_viewport_size({"width": 390, "height": 844})
    page.goto(refused)
    chart = page.locator(".detail .viewer svg.chart").first
    assert chart.get_attribute("viewBox") == "0 0 334 250"
    page.set_viewport_size({"width": 1280, "height": 844})
    page.wait_for_function("document.querySelector('.detail .viewer svg.chart').viewBox.baseVal.width === 960")
    page.set_viewport_size({"width": 390, "height": 844})
    page.wait_for_function("document.querySelector('.detail .viewer svg.chart').viewBox.baseVal.width === 334")
