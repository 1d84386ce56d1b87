"""Every case, scenario, soak and sweep has a Chinese title, and no title is left of one that is gone."""

from __future__ import annotations

import re

import pytest

from reports.contents.text import Text
from reports.contents.titles import load_titles, title_of
from st.soak import WORKLOADS
from st.sweep import MODES
from tests.reports.run_folder import every_id, system_ids

CHINESE = re.compile(r"[\u4e00-\u9fff]")
IDS = {
    "conformance": every_id(),
    "st": [*system_ids(), *(f"soak.{name}" for name in WORKLOADS), *(f"sweep.{name}" for name in MODES)],
}


@pytest.mark.parametrize("suite", sorted(IDS))
def test_each_case_has_a_chinese_title_of_its_own(suite: str) -> None:
    titles = load_titles()[suite]
    assert [name for name in IDS[suite] if not CHINESE.search(titles.get(name, ""))] == []
    assert [name for name in titles if name not in IDS[suite]] == []
    assert len(set(titles.values())) == len(titles)


def test_a_case_without_a_chinese_title_is_shown_in_english() -> None:
    assert title_of("conformance", "Z9", "something new") == Text(en="something new", zh="something new")
    assert title_of("st", "S3", "Llama goes on exactly").zh == "Llama 完全继续"
