"""LATEST follows the run that the pointer means, and never the future that a run left behind when it went back."""

from __future__ import annotations

import json
import logging
import warnings
from pathlib import Path

import pytest
import torch
from torch.distributed.checkpoint.state_dict_saver import save as dcp_save

from hyper_resume.checkpoint import DistributedCheckpointer
from hyper_resume.checkpoint.format.manifest import MAX_ANCESTORS
from hyper_resume.checkpoint.history import lineage
from hyper_resume.errors import CheckpointNotFoundError
from tests.checkpoint.directories import latest, listing, make_step, point_to
from tests.checkpoint.single_value import damage, manifest_content, save, value_of
from tests.ranks import run_ranks


def run(root: Path, *steps: int, restored_from: Path | None = None, name: float = 0.0) -> DistributedCheckpointer:
    """One run from its beginning through its saves, each of the value ``step + name``."""
    checkpointer = DistributedCheckpointer()
    checkpointer.begin_run(str(root), restored_from=None if restored_from is None else str(restored_from))
    for step in steps:
        save(root, step, step + name, by=checkpointer)
    return checkpointer


def reasons(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]


def test_every_save_tells_what_it_descends_from_and_comes_after(tmp_path: Path) -> None:
    run(tmp_path, 10, 20, 30)
    found = [manifest_content(tmp_path / f"global_step_{step}") for step in (10, 20, 30)]
    ids = [content["attempt"] for content in found]
    assert len(set(ids)) == 3
    assert [content["ordinal"] for content in found] == [1, 2, 3]
    assert [content["ancestors"] for content in found] == [[], [[10, ids[0]]], [[10, ids[0]], [20, ids[1]]]]


def test_a_run_that_resumes_goes_on_in_the_same_line(tmp_path: Path) -> None:
    run(tmp_path, 10, 20)
    run(tmp_path, 30, restored_from=tmp_path / "global_step_20")
    content = manifest_content(tmp_path / "global_step_30")
    assert [step for step, _ in content["ancestors"]] == [10, 20]
    assert content["ordinal"] == 3


def test_a_run_that_went_back_is_the_latest_though_higher_steps_stand_beside_it(tmp_path: Path) -> None:
    run(tmp_path, 10, 20, 30)
    run(tmp_path, 15, restored_from=tmp_path / "global_step_10", name=0.5)
    assert latest(tmp_path) == tmp_path / "global_step_15"
    assert [step for step, _ in manifest_content(tmp_path / "global_step_15")["ancestors"]] == [10]
    assert manifest_content(tmp_path / "global_step_15")["ordinal"] == 4


def test_a_run_that_went_back_and_died_before_its_first_save_is_resumed_where_it_went_back_to(tmp_path: Path) -> None:
    run(tmp_path, 10, 20, 30)
    run(tmp_path, restored_from=tmp_path / "global_step_10")
    assert (tmp_path / "latest_checkpoint_iteration.txt").read_text() == "10\n"
    assert latest(tmp_path) == tmp_path / "global_step_10"


@pytest.mark.parametrize("way", ["through a link", "with dots", "relative"])
def test_going_back_by_another_way_to_the_same_directory_is_going_back(
    tmp_path: Path, way: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    root = tmp_path / "root"
    run(root, 10, 20)
    (tmp_path / "link").symlink_to("root")
    monkeypatch.chdir(tmp_path)
    source = {"through a link": "link", "with dots": f"{root}/../root", "relative": "root"}[way]
    run(root, 15, restored_from=Path(source) / "global_step_10")
    assert [step for step, _ in manifest_content(root / "global_step_15")["ancestors"]] == [10]


def test_a_damaged_newest_step_falls_back_within_the_line_and_every_reason_is_told(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    run(tmp_path, 10, 20, 30, 40)
    run(tmp_path, 15, 25, restored_from=tmp_path / "global_step_10", name=0.5)
    damage(tmp_path / "global_step_25")
    (tmp_path / "global_step_15" / "__0_0.distcp").unlink()
    with caplog.at_level(logging.WARNING):
        assert latest(tmp_path) == tmp_path / "global_step_10"
    told = reasons(caplog)
    for step, reason in (
        (25, "__0_0.distcp: expected digest xxh3_128/table:"),
        (15, "__0_0.distcp: it is missing"),
        (20, "the run that LATEST means does not continue it"),
        (30, "the run that LATEST means does not continue it"),
        (40, "the run that LATEST means does not continue it"),
    ):
        assert [message for message in told if f"global_step_{step}" in message and reason in message], (step, told)
    assert value_of(tmp_path / "global_step_10") == 10.0


@pytest.mark.parametrize("ruin", ["damaged", "cut", "manifest cut", "gone", "emptied"])
def test_an_abandoned_future_is_never_chosen_whatever_happens_to_the_line(tmp_path: Path, ruin: str) -> None:
    """The whole line is ruined from its end, step by step; what comes is always the newest that is left of it."""
    run(tmp_path, 10, 20, 30)
    run(tmp_path, 15, 18, restored_from=tmp_path / "global_step_10", name=0.5)
    expected = {18: 15, 15: 10}
    for step, next_step in expected.items():
        directory = tmp_path / f"global_step_{step}"
        if ruin == "damaged":
            damage(directory)
        elif ruin == "cut":
            (directory / "__0_0.distcp").write_bytes(b"")
        elif ruin == "manifest cut":
            (directory / "manifest.json").write_bytes((directory / "manifest.json").read_bytes()[:100])
        elif ruin == "gone":
            directory.rename(tmp_path / f"away {step}")
        else:
            for file in [path for path in directory.rglob("*") if path.is_file()]:
                file.unlink()
        assert latest(tmp_path) == tmp_path / f"global_step_{next_step}"
    damage(tmp_path / "global_step_10")
    with pytest.raises(CheckpointNotFoundError, match="none can be resumed from") as caught:
        latest(tmp_path)
    assert "global_step_10: the checkpoint is not as it was written" in str(caught.value)


def test_without_a_pointer_the_save_that_was_last_in_time_is_the_latest(tmp_path: Path) -> None:
    run(tmp_path, 10, 20, 30)
    run(tmp_path, 15, restored_from=tmp_path / "global_step_10")
    (tmp_path / "latest_checkpoint_iteration.txt").unlink()
    assert latest(tmp_path) == tmp_path / "global_step_15"
    damage(tmp_path / "global_step_15")
    assert latest(tmp_path) == tmp_path / "global_step_10"


@pytest.mark.parametrize("pointer", ["missing", "empty"])
@pytest.mark.parametrize("ruin", ["bit", "size", "manifest"])
def test_a_root_of_which_nothing_is_good_is_an_error_and_no_fresh_start(
    tmp_path: Path, ruin: str, pointer: str
) -> None:
    directory = save(tmp_path, 10, 1.0)
    if ruin == "bit":
        damage(directory)
    elif ruin == "size":
        (directory / "__0_0.distcp").write_bytes(b"")
    else:
        damage(directory, "manifest.json")
    point_to(tmp_path, "")
    if pointer == "missing":
        (tmp_path / "latest_checkpoint_iteration.txt").unlink()
    with pytest.raises(CheckpointNotFoundError, match=r"none can be resumed from.*global_step_10"):
        latest(tmp_path)


def test_a_step_that_is_saved_again_after_going_back_takes_the_place_of_the_abandoned_one(tmp_path: Path) -> None:
    run(tmp_path, 10, 20, 30)
    abandoned = manifest_content(tmp_path / "global_step_20")["attempt"]
    run(tmp_path, 20, restored_from=tmp_path / "global_step_10", name=0.5)
    assert value_of(tmp_path / "global_step_20") == 20.5
    assert latest(tmp_path) == tmp_path / "global_step_20"
    assert [abandoned] == [attempt for step, attempt in manifest_content(tmp_path / "global_step_30")["ancestors"]][1:]
    damage(tmp_path / "global_step_20")
    assert latest(tmp_path) == tmp_path / "global_step_10", "30 descends from another 20"


def test_going_back_twice_leaves_both_futures_behind(tmp_path: Path) -> None:
    run(tmp_path, 10, 20, 30)
    run(tmp_path, 25, 35, restored_from=tmp_path / "global_step_20")
    run(tmp_path, 22, restored_from=tmp_path / "global_step_20")
    assert latest(tmp_path) == tmp_path / "global_step_22"
    for step, expected in ((22, 20), (20, 10)):
        damage(tmp_path / f"global_step_{step}")
        assert latest(tmp_path) == tmp_path / f"global_step_{expected}"


def test_a_start_from_scratch_in_a_used_root_descends_from_nothing(tmp_path: Path) -> None:
    run(tmp_path, 10, 20)
    run(tmp_path)
    assert latest(tmp_path) == tmp_path / "global_step_20", "until it has saved, there is only the earlier run"
    run(tmp_path, 5)
    assert manifest_content(tmp_path / "global_step_5")["ancestors"] == []
    assert latest(tmp_path) == tmp_path / "global_step_5"
    damage(tmp_path / "global_step_5")
    with pytest.raises(CheckpointNotFoundError, match="none can be resumed from"):
        latest(tmp_path)


def test_a_run_from_a_checkpoint_of_another_root_begins_a_line_of_its_own(tmp_path: Path) -> None:
    source = save(tmp_path / "pretrained", 500, 1.0)
    run(tmp_path / "fine", 510, restored_from=source)
    assert manifest_content(tmp_path / "fine" / "global_step_510")["ancestors"] == []
    assert latest(tmp_path / "pretrained") == source


def stock(root: Path, step: int) -> Path:
    directory = root / f"global_step_{step}"
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        dcp_save({"model": {"w": torch.full((8,), float(step))}}, checkpoint_id=directory, no_dist=True)
    return directory


def test_a_stock_directory_is_tried_after_all_of_the_line_and_the_highest_first(tmp_path: Path) -> None:
    for step in (5, 50):
        stock(tmp_path, step)
    assert latest(tmp_path) == tmp_path / "global_step_50"
    run(tmp_path, 60, 70, restored_from=tmp_path / "global_step_50")
    order = lineage.resume_order(tmp_path).directories
    assert [path.name for path in order] == ["global_step_70", "global_step_60", "global_step_50", "global_step_5"]
    damage(tmp_path / "global_step_70")
    damage(tmp_path / "global_step_60")
    assert latest(tmp_path) == tmp_path / "global_step_50"


def test_a_stock_directory_that_is_pointed_to_is_the_latest_and_leads_to_no_higher_save(tmp_path: Path) -> None:
    run(tmp_path, 10, 30)
    stock(tmp_path, 20)
    point_to(tmp_path, "20\n")
    assert [path.name for path in lineage.resume_order(tmp_path).directories] == ["global_step_20", "global_step_10"]


def test_a_torch_metadata_of_0_bytes_is_not_complete_and_is_passed_over(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    stock(tmp_path, 5)
    (stock(tmp_path, 6) / ".metadata").write_bytes(b"")
    point_to(tmp_path, "6")
    assert latest(tmp_path) == tmp_path / "global_step_5"
    assert "names global_step_6, which is incomplete (no usable .metadata)" in caplog.text


def test_looking_changes_nothing(tmp_path: Path) -> None:
    run(tmp_path, 10, 20)
    damage(tmp_path / "global_step_20")
    make_step(tmp_path, 30)
    before = listing(tmp_path)
    assert latest(tmp_path) == tmp_path / "global_step_10"
    assert listing(tmp_path) == before


def test_the_list_of_ancestors_keeps_its_newest_and_a_step_passed_again_ends_it() -> None:
    ancestors: lineage.Ancestors = ()
    for step in range(1, 1001):
        ancestors = lineage.extend_ancestors(ancestors, step, f"first_{step}")
    assert len(ancestors) == MAX_ANCESTORS == 512
    assert ancestors[0] == (489, "first_489")
    assert ancestors[-1] == (1000, "first_1000")
    again = lineage.extend_ancestors(ancestors, 995, "second_995")
    assert again[-2:] == ((994, "first_994"), (995, "second_995"))


def _fall_back(folder: str) -> tuple[str | None, list[str]]:
    """Rank 1's file alone is damaged; each rank reads its own."""
    handler = _Messages()
    logging.getLogger("hyper_resume").addHandler(handler)
    found = DistributedCheckpointer().find_latest_checkpoint(folder)
    return found, handler.messages


class _Messages(logging.Handler):
    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.messages: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.messages.append(record.getMessage())


def _two_saves(folder: str) -> None:
    run(Path(folder), 10, 20)


def test_damage_that_one_rank_sees_makes_all_ranks_fall_back(tmp_path: Path) -> None:
    run_ranks(_two_saves, 2, str(tmp_path))
    damage(tmp_path / "global_step_20", "extra_state/extra_state_rank_1.pt")
    results = run_ranks(_fall_back, 2, str(tmp_path))
    assert [found for found, _ in results] == [str(tmp_path / "global_step_10")] * 2
    for _, messages in results:
        assert [message for message in messages if "extra_state_rank_1.pt: expected digest" in message]


def test_an_ancestor_list_is_what_the_file_says_and_no_more(tmp_path: Path) -> None:
    """The checker of this file reads JSON itself: a line that the library invents would be seen."""
    run(tmp_path, 1, 2)
    content = json.loads((tmp_path / "global_step_2" / "manifest.json").read_text())
    (candidate,) = [one for one in lineage.list_candidates(tmp_path) if one.step == 2]
    assert candidate.manifest is not None
    assert [list(pair) for pair in candidate.manifest.ancestors] == content["ancestors"]
