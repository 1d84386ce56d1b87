"""What can't be restored fails on all ranks alike, within seconds, and changes nothing on disk."""

from __future__ import annotations

import json
import shutil
import time
from typing import Any

import pytest
import torch
import torch.distributed as dist

from hyper_resume.checkpoint import DistributedCheckpointer
from hyper_resume.errors import CheckpointMismatchError, CheckpointNotFoundError
from hyper_resume.state.model import collect_model
from tests.checkpoint.directories import forget_manifest, listing, unmark
from tests.checkpoint.payloads import SKELETON, full_state, payload, same, sharded_tiny
from tests.checkpoint.refusal_cases import CASES, STEP, another_attempt, nothing
from tests.ranks import run_ranks

# One worker for all of it: what its fixtures make takes seconds.
pytestmark = pytest.mark.xdist_group("refusals")

RANKS = 4
SECONDS = 5.0


def _save_all(folder: str) -> None:
    """The checkpoints that the cases start from."""
    model = sharded_tiny(1)
    optimizer = torch.optim.AdamW(model.parameters())
    for name, per_rank in (("files", True), ("embedded", False)):
        checkpointer = DistributedCheckpointer(extra_state_per_rank=per_rank)
        checkpointer.save(f"{folder}/{name}/global_step_{STEP}", payload(model, optimizer, STEP), global_step=STEP)
    files = DistributedCheckpointer()
    files.save(f"{folder}/again/global_step_{STEP}", payload(model, optimizer, STEP), global_step=STEP)
    files.save(f"{folder}/weights/global_step_{STEP}", payload(model), global_step=STEP)
    files.save(f"{folder}/later/global_step_9", payload(model, step=9), global_step=9)


def _try_to_load(paths: dict[str, tuple[str, str]]) -> dict[str, dict[str, Any]]:
    """SaveInProgress every case on every rank, one after the other in the same process group.

    The second of each pair says how the running model differs from the one that was saved.
    """
    checkpointer = DistributedCheckpointer()
    reports = {}
    for case, (path, difference) in paths.items():
        model = sharded_tiny(7)
        parts: dict[str, Any] = {"model": collect_model(model)}
        if difference == "key":
            parts["model"]["head.weight"] = torch.zeros(2)
        elif difference == "shape":
            parts["model"]["scale"] = torch.zeros(4)
        elif difference == "type":
            parts["model"]["scale"] = torch.zeros(3, dtype=torch.float64)
        before = full_state(model)
        started = time.monotonic()
        error: Exception | None = None
        try:
            checkpointer.load(path, parts, extra_state_skeleton=dict(SKELETON))
        except Exception as caught:  # noqa: BLE001  the error is what is looked at
            error = caught
        reports[case] = {
            "error": error,
            "seconds": time.monotonic() - started,
            "untouched": same(full_state(model), before),
        }
    # The group must still work after all of these.
    dist.barrier()
    return reports


VARIANTS = ("with manifest", "without manifest")


@pytest.fixture(scope="module")
def attempts(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Every case, with and without its manifest, in one world of four ranks: reports of all ranks, and what was changed."""
    root = tmp_path_factory.mktemp("refusals")
    run_ranks(_save_all, RANKS, str(root / "saved"))
    paths, changes, others = {}, {}, {}
    for number, (case, (source, change, difference, *_)) in enumerate(CASES.items()):
        for variant in VARIANTS:
            top = root / f"{number} {variant}"
            shutil.copytree(root / "saved", top)
            directory = top / source / f"global_step_{STEP}"
            if variant == "without manifest":
                forget_manifest(directory)
            before = listing(directory)
            change(directory)
            after = listing(directory) if directory.is_dir() else {}
            changes[f"{case}, {variant}"] = {
                name: "missing" if name not in after else "changed"
                for name, found in before.items()
                if after.get(name) != found and found != "folder"
            }
            if case == "metadata of another attempt" and variant == "without manifest":
                # The copied one tells of a manifest again.
                unmark(directory)
            paths[f"{case}, {variant}"] = (str(directory), difference)
    for part, directory in (
        ("another attempt", another_attempt(root / "saved" / "files" / f"global_step_{STEP}")),
        ("another step", root / "saved" / "later" / "global_step_9"),
    ):
        others[part] = json.loads((directory / "manifest.json").read_text())["attempt"]
    paths["root instead of a step"] = (str(root / "saved" / "files"), "")
    before = listing(root)
    results = run_ranks(_try_to_load, RANKS, paths)
    assert listing(root) == before
    return {
        "others": others,
        "changes": changes,
        "reports": {case: [result[case] for result in results] for case in paths},
    }


def assert_refused(reports: list[dict[str, Any]], error_class: type[Exception], *messages: str) -> None:
    """One error on all ranks, soon, that says all of ``messages``; and the model is as it was."""
    for rank, report in enumerate(reports):
        assert type(report["error"]) is error_class, (rank, report["error"])
        for message in messages:
            assert message in str(report["error"]), rank
        assert report["seconds"] < SECONDS, rank
        assert report["untouched"], rank
    assert len({str(report["error"]) for report in reports}) == 1


@pytest.mark.parametrize("case", CASES)
def test_a_refusal_is_the_same_on_all_ranks(case: str, attempts: dict[str, Any]) -> None:
    _, _, _, error_class, message = CASES[case]
    assert_refused(attempts["reports"][f"{case}, without manifest"], error_class, message)


# Nothing that a manifest could tell of is changed, or nothing is left to tell.
DEEPER = [
    case for case, (_, change, *_) in CASES.items() if change is nothing or case in ("path missing", "path a file")
]


TAKEN_OUT = {
    "model key removed from the checkpoint": "missing model key: model.up.weight; ",
    "files removed": "no training state (extra_state): extra_state/extra_state_rank_0.pt: it is missing",
    "entries removed": "no training state (extra_state): extra_state.rank_0.",
    "step of rank 2 removed": "no training state (extra_state): extra_state.rank_2.global_step; ",
    "streams of rank 2 removed": "no training state (extra_state): extra_state.rank_2.rng_state; ",
    "file of rank 2 missing": "no training state (extra_state): extra_state/extra_state_rank_2.pt: it is missing; ",
    "file of rank 0 missing": "no training state (extra_state): extra_state/extra_state_rank_0.pt: it is missing; ",
}


@pytest.mark.parametrize("case", CASES)
def test_what_is_not_as_the_manifest_says_is_refused_by_the_name_of_the_file(
    case: str, attempts: dict[str, Any]
) -> None:
    reports = attempts["reports"][f"{case}, with manifest"]
    if case in DEEPER:
        _, _, _, error_class, message = CASES[case]
        assert_refused(reports, error_class, message)
        return
    changes = attempts["changes"][f"{case}, with manifest"]
    assert changes, "the case must change something, or it proves nothing"
    # What was taken out is named first, in the words and with the class of specification 9.3.
    if case in TAKEN_OUT:
        _, _, _, error_class, _ = CASES[case]
        assert_refused(reports, error_class, "the checkpoint is not as it was written", *sorted(changes)[:3])
        assert str(reports[0]["error"]).startswith(TAKEN_OUT[case])
        return
    only_missing = set(changes.values()) == {"missing"}
    what = "files of the checkpoint are missing" if only_missing else "the checkpoint is not as it was written"
    # Three are named, in the order of ranks; the others are counted.
    named = [f"{name}: it is missing" if only_missing else f"{name}: " for name in sorted(changes)[:3]]
    assert_refused(reports, CheckpointNotFoundError if only_missing else CheckpointMismatchError, what, *named)


@pytest.mark.parametrize("case", [case for case in CASES if "another attempt" in case or "another step" in case])
def test_a_file_of_another_save_is_refused_with_the_id_of_that_save(case: str, attempts: dict[str, Any]) -> None:
    (other,) = [save_id for part, save_id in attempts["others"].items() if part in case]
    error = attempts["reports"][f"{case}, with manifest"][0]["error"]
    assert f"(it is a part of another save: {other})" in str(error)


def test_a_file_under_the_name_of_another_is_told_apart(attempts: dict[str, Any]) -> None:
    error = attempts["reports"]["file of rank 2 is rank 1's, with manifest"][0]["error"]
    assert "extra_state/extra_state_rank_2.pt: expected digest" in str(error)
    assert "(it has the content of extra_state/extra_state_rank_1.pt)" in str(error)


def test_a_root_that_is_named_instead_of_a_step_says_what_to_name(attempts: dict[str, Any]) -> None:
    for report in attempts["reports"]["root instead of a step"]:
        assert isinstance(report["error"], CheckpointNotFoundError)
        assert "name one global_step_N of this directory" in str(report["error"])


def test_a_refusal_is_the_builtin_that_the_specification_names() -> None:
    assert issubclass(CheckpointNotFoundError, FileNotFoundError)
    assert issubclass(CheckpointMismatchError, RuntimeError)
