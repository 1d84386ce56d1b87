"""The page in fewer bytes is the same document; in a browser, see in_browser/test_costs_and_size.py."""

from __future__ import annotations

from pathlib import Path

import pytest

from reports.judging.assemble import assemble
from reports.output.compact import compact
from reports.output.page import render, render_whole
from reports.reading.read import read_run
from tests.reports.html import Page
from tests.reports.run_folder import whole_run


@pytest.mark.parametrize(
    ("whole", "short"),
    [
        ('<td class="a">x</td>\n  <td>y</td>', "<td class=a>x\n<td>y"),
        ('<a href="#x" id="b-1.c:d">y</a>', "<a href=#x id=b-1.c:d>y</a>"),
        ('<p class="a b">x</p><p>y</p>', '<p class="a b">x</p><p>y</p>'),
        ('<meta content="">', '<meta content="">'),
        ('<rect rx="2"/><path d="M1 8H45"/>', '<rect rx="2"/><path d="M1 8H45"/>'),
        ('<a href="a/">y</a>', '<a href="a/">y</a>'),
        ("<p>it&#39;s &#34;a&#34; &lt;b&gt; &amp;</p>", '<p>it\'s "a" &lt;b&gt; &amp;</p>'),
        ('<p title="it&#39;s &#34;a&#34;">x</p>', '<p title="it&#39;s &#34;a&#34;">x</p>'),
        ("<code>a\n  b</code>", "<code>a\n  b</code>"),
        ('<script>if (a="b" ) "</td>\n\n&#39;"</script>', '<script>if (a="b" ) "</td>\n\n&#39;"</script>'),
        ('<style>[a="b" ]{}</style>', '<style>[a="b" ]{}</style>'),
        ("<ul>\n\n<li>a</li>\n</ul>", "<ul>\n<li>a\n</ul>"),
    ],
)
def test_what_html_implies_is_left_out_and_nothing_else(whole: str, short: str) -> None:
    assert compact(whole) == short


def test_the_page_says_the_same_with_every_tag_in_its_place(tmp_path: Path) -> None:
    made = assemble(read_run([whole_run(tmp_path / "run").finish()]))
    whole, short = render_whole(made), render(made)
    assert len(short) < len(whole)
    assert Page(short).text == Page(whole).text
    assert Page(short).attributes == Page(whole).attributes


def test_a_page_of_every_case_of_both_suites_is_well_below_a_megabyte(tmp_path: Path) -> None:
    page = render(assemble(read_run([whole_run(tmp_path / "run").finish()])))
    # These cases have neither legs nor checks but for two; a real run's are three times as long.
    assert len(page.encode()) < 500_000
