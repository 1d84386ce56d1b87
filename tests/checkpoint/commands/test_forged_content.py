"""Content that somebody forged: each command ends with an answer or a clear error, within limits of time, memory and output."""

from __future__ import annotations

import copy
import json
import os
import shutil
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import xxhash
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from hyper_resume.checkpoint import DistributedCheckpointer
from hyper_resume.errors import CheckpointMismatchError, HyperResumeError
from hyper_resume.state.rng import check_rng, collect_rng
from tests.checkpoint.forging import (
    EXTRA,
    INDEX,
    MANIFEST,
    Told,
    forge_file,
    forge_training_state,
    replace,
    saved,
    sign,
)
from tests.ranks import run_ranks

# Of one command on files of some kB; the largest that is forged here has 5 MB.
MOST_SECONDS, MOST_PRINTED, MOST_GROWN_BYTES = 5.0, 200_000, 256 << 20
BAD = "\x1b[2J\x1b]0;owned\x07line\nhyper-resume: good\r"


def _payload(step: int) -> dict[str, Any]:
    state = {
        "global_step": step,
        "epoch": 0,
        "rng_state": {"torch_cpu": torch.arange(9)},
        "lr_scheduler": [{"last": 1}],
    }
    return {"model": {"weight": torch.arange(12.0), "n": 3}, "extra_state": state}


@pytest.fixture(scope="module")
def good(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A root with steps 1 and 2."""
    root = tmp_path_factory.mktemp("good")
    for step in (1, 2):
        DistributedCheckpointer().save(str(root / f"global_step_{step}"), _payload(step), global_step=step)
    return root


@pytest.fixture
def step(good: Path, tmp_path: Path) -> Path:
    """Step 2 of a root of its own."""
    return shutil.copytree(good, tmp_path / "root") / "global_step_2"


def _commands(step: Path) -> Iterator[Told]:
    """Every command that reads the step directory, on it and on its root."""
    for words in (["verify"], ["verify", "--json"], ["inspect"], ["inspect", "--json"]):
        yield Told(*words, str(step))
        yield Told(*words, str(step.parent))
    yield Told("diff", str(step.parent / "global_step_1"), str(step))
    yield Told("diff", "--json", str(step), str(step.parent / "global_step_1"))
    yield Told("doctor", str(step.parent))


def _read(step: Path) -> None:
    """Run all of them, and a load of LATEST and of the step; each must stay within the limits and end."""
    for told in _commands(step):
        assert told.code in (0, 1, 2)
        assert told.seconds < MOST_SECONDS
        assert told.grown_bytes < MOST_GROWN_BYTES
        assert len(told.text) < MOST_PRINTED
        assert told.text.replace("\n", "").isprintable()
    for path in (str(step), None):
        checkpointer = DistributedCheckpointer()
        state = {"model": {"weight": torch.zeros(12)}}
        try:
            chosen = path or checkpointer.find_latest_checkpoint(str(step.parent))
            checkpointer.load(str(chosen), state, extra_state_skeleton={"global_step": None, "rng_state": None})
        except HyperResumeError:
            assert not state["model"]["weight"].any()


# ---- any field, any type, any size ------------------------------------------------------------------------------------

_TEXTS = st.one_of(
    st.sampled_from([BAD, "\x00", "‮", "a" * 5_000, "../x", "x" * 300_000, "9" * 400]), st.text(max_size=20)
)
_LEAVES = st.one_of(
    st.none(),
    st.booleans(),
    st.sampled_from([0, -1, 1, 2**31, 2**62, 2**63, 10**15, 10**400, 1.5, -0.0, 1e308]),
    st.integers(),
    _TEXTS,
)
_VALUES = st.recursive(
    _LEAVES, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(_TEXTS, inner, max_size=3), max_leaves=6
)


def _places(tree: Any) -> list[tuple[Any, Any]]:
    """(container, key) of everything in a tree."""
    items = tree.items() if isinstance(tree, dict) else enumerate(tree) if isinstance(tree, list) else ()
    return [found for key, value in items for found in ((tree, key), *_places(value))]


def _forged(tree: Any, data: st.DataObject) -> Any:
    """The tree with one to three values changed, left out, or under another key."""
    found = copy.deepcopy(tree)
    for _ in range(data.draw(st.integers(1, 3), label="changes")):
        container, key = data.draw(st.sampled_from(_places(found)), label="place")
        what = data.draw(st.sampled_from(("value", "value", "key", "gone")), label="what")
        if what == "value":
            container[key] = data.draw(_VALUES, label="value")
        elif what == "gone":
            del container[key]
        elif isinstance(container, dict):
            container[data.draw(_TEXTS, label="key")] = container.pop(key)
        if not _places(found):
            break
    return found


_ANY = settings(
    max_examples=int(os.environ.get("FORGED_EXAMPLES", "12")),
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow, HealthCheck.large_base_example],
)


@given(data=st.data())
@_ANY
def test_whatever_a_manifest_says_every_command_answers_within_limits(
    good: Path, tmp_path_factory: pytest.TempPathFactory, data: st.DataObject
) -> None:
    step = shutil.copytree(good, tmp_path_factory.mktemp("forged") / "root") / "global_step_2"
    replace(step / MANIFEST, sign(_forged(json.loads((step / MANIFEST).read_text()), data)))
    _read(step)


@given(data=st.data())
@_ANY
def test_whatever_an_index_says_every_command_answers_within_limits(
    good: Path, tmp_path_factory: pytest.TempPathFactory, data: st.DataObject
) -> None:
    step = shutil.copytree(good, tmp_path_factory.mktemp("forged") / "root") / "global_step_2"
    tree = _forged(json.loads((step / INDEX).read_text()), data)
    forge_file(step, INDEX, json.dumps(tree).encode())
    _read(step)


_TENSORS = st.sampled_from(
    [torch.zeros(3), torch.zeros(1).expand(2**31), torch.zeros(()), torch.eye(2).to_sparse(), torch.zeros(0)]
)
_PARTS = st.recursive(
    st.one_of(_LEAVES, _TENSORS, st.sampled_from([b"x", 1j, torch.float32])),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(_TEXTS | st.integers(0, 3), inner, max_size=3),
    max_leaves=6,
)
_KEYS = st.one_of(st.sampled_from(sorted({*_payload(1)["extra_state"], "rank", "world_size", "run", "mesh"})), _TEXTS)


@given(change=st.dictionaries(_KEYS | st.integers(0, 9) | st.none(), _PARTS, min_size=1, max_size=2))
@example(change={"lr_scheduler": [torch.eye(2).to_sparse()]})
@_ANY
def test_whatever_a_training_state_holds_every_command_answers_within_limits(
    good: Path, tmp_path_factory: pytest.TempPathFactory, change: dict[Any, Any]
) -> None:
    step = shutil.copytree(good, tmp_path_factory.mktemp("forged") / "root") / "global_step_2"
    forge_training_state(step, change)
    _read(step)


# ---- what was found ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"rng_state": [1, 2]}, "rng_state that is a list"),
        ({7: 1}, "a part whose name is not text: 7"),
        ({"world_size": 10**15}, "world_size 1000000000000000; 1 to 1,000,000 are read"),
        ({"a" * 5_000_000: 1}, "a part whose name has 5000000 characters"),
        ({"epoch": "0"}, "epoch that is '0'"),
        ({"rank": -1}, "rank -1"),
    ],
    ids=["rng_state is a list", "a key is a number", "world size", "long name", "epoch is text", "rank"],
)
def test_a_training_state_in_another_form_is_refused_in_one_line(
    step: Path, change: dict[Any, Any], words: str
) -> None:
    forge_training_state(step, change)
    for told in (Told("inspect", str(step)), Told("diff", str(step.parent / "global_step_1"), str(step))):
        assert told.code == 1
        assert f"found: {words}" in told.err
        assert told.err.count("\n") == 1
    with pytest.raises(CheckpointMismatchError, match="does not have the form that a save writes"):
        DistributedCheckpointer().load(str(step), {"model": {}}, extra_state_skeleton={})


def test_a_part_of_a_known_name_may_hold_control_characters_and_they_are_shown_as_escapes(step: Path) -> None:
    forge_training_state(step, {BAD: 1, "uncovered": [BAD], "rng_state": {BAD: 1}})
    for told in _commands(step):
        assert told.text.replace("\n", "").isprintable()
    told = Told("inspect", str(step))
    assert told.code == 0
    assert r"\x1b[2J\x1b]0;owned\x07line\nhyper-resume: good\r" in told.out
    assert "\nhyper-resume: good" not in told.out


def test_a_difference_in_a_forged_name_is_shown_on_one_line(step: Path) -> None:
    forge_training_state(step, {"rng_state": {BAD: 1, "torch_cpu": torch.arange(9)}})
    told = Told("diff", str(step.parent / "global_step_1"), str(step))
    assert told.code == 1
    # One line for the step, one for the streams, and the count.
    assert told.out.splitlines()[-1] == f"{len(told.out.splitlines()) - 1} entries differ"
    assert r"\x1b[2J" in told.out


def test_a_name_of_5_mb_is_not_printed(step: Path) -> None:
    tree = json.loads((step / INDEX).read_text())
    tree["tensors"]["model." + "a" * 5_000_000] = tree["tensors"].pop("model.weight")
    forge_file(step, INDEX, json.dumps(tree).encode())
    for told in _commands(step):
        assert len(told.text) < 20_000
    assert "a key of 5000006 characters" in Told("inspect", str(step)).err


def test_a_world_size_of_a_million_names_the_first_ranks_that_are_missing_only(step: Path) -> None:
    forge_training_state(step, {"world_size": 1_000_000})
    told = Told("inspect", "--json", str(step))
    assert json.loads(told.out)["missing_ranks"] == list(range(1, 1001))
    assert told.seconds < MOST_SECONDS


def test_an_expanded_tensor_of_8_gb_in_7_kb_is_refused(step: Path) -> None:
    forge_training_state(step, {"stateful": {"x": torch.zeros(1).expand(2**31)}})
    assert (step / EXTRA).stat().st_size < 7_000
    told = Told("diff", str(step.parent / "global_step_1"), str(step))
    assert "tensors that unfold to far more than the" in told.err
    assert told.grown_bytes < MOST_GROWN_BYTES


def test_an_expanded_tensor_that_a_run_holds_is_saved_with_its_values_and_loaded(tmp_path: Path) -> None:
    # More elements than a load accepts of an expanded tensor.
    state = {"global_step": 1, "stateful": {"x": torch.ones(1).expand(2**25)}}
    DistributedCheckpointer().save(str(tmp_path / "global_step_1"), {"model": {}, "extra_state": state}, global_step=1)
    found = DistributedCheckpointer().load(str(tmp_path / "global_step_1"), {"model": {}}, extra_state_skeleton={})
    assert found["stateful"]["x"].shape == (2**25,)
    assert bool((found["stateful"]["x"] == 1).all())


def test_a_table_in_a_hole_ends_verify_with_a_complaint(step: Path) -> None:
    count = 40_000_000  # with 24 bytes each; the file takes some kB of the disk
    body, end = (step / "__0_0.distcp").read_bytes(), struct.pack("<Q8s", count, b"hrsegm01")
    (step / "__0_0.distcp").unlink()
    with (step / "__0_0.distcp").open("wb") as file:
        file.write(body)
        file.truncate(len(body) + 24 * count)
        file.seek(0, os.SEEK_END)
        file.write(end)
    size = len(body) + 24 * count + len(end)
    hasher = xxhash.xxh3_128()
    for _ in range(24):
        hasher.update(bytes(count))
    hasher.update(end)
    manifest = json.loads((step / MANIFEST).read_text())
    entry = {"size_bytes": size, "digest": f"xxh3_128/table:{hasher.hexdigest()}"}
    manifest["files"]["__0_0.distcp"] |= entry
    replace(step / MANIFEST, sign(manifest))
    told = Told("verify", str(step))
    assert (told.code, told.err) == (1, "")
    assert "no table of digests" in told.out
    assert told.grown_bytes < MOST_GROWN_BYTES


@pytest.mark.parametrize(
    ("stream", "value"),
    [
        ("numpy", {**collect_rng("cpu")["numpy"], "pos": 10**6}),
        ("numpy", [1]),
        ("python", (3, (1, 2), None)),
        ("python", None),
        ("torch_cpu", torch.zeros(4, dtype=torch.uint8)),
        ("torch_cpu", "x"),
        ("torch_device", 3),
    ],
)
def test_a_forged_stream_is_refused_before_a_stream_is_set(stream: str, value: Any) -> None:
    streams = collect_rng("cpu")
    assert check_rng(streams, "cpu") == []
    with pytest.raises(CheckpointMismatchError, match=f"found: {stream}: "):
        check_rng({**streams, stream: value}, "cpu")


# ---- changed between LATEST and the load ------------------------------------------------------------------------------


def _change_between(folder: str, per_rank: bool) -> list[str]:
    root = Path(folder)
    checkpointer = DistributedCheckpointer(extra_state_per_rank=per_rank)
    path = checkpointer.find_latest_checkpoint(folder)
    assert path is not None
    if int(os.environ["RANK"]) == 0:
        state = torch.load(root / "global_step_2" / EXTRA, weights_only=True)
        replace(root / "global_step_2" / EXTRA, saved({**state, "run": {"seed": 5}, "world_size": 7}))
    torch.distributed.barrier()
    try:
        found = checkpointer.load(
            path, {"model": {"weight": torch.zeros(12)}}, extra_state_skeleton={"global_step": None}
        )
    except CheckpointMismatchError as error:
        return ["refused", str(error)]
    return ["taken", str(found["world_size"])]


def test_a_training_state_that_was_changed_after_latest_was_verified_is_refused_by_another_number_of_ranks(
    step: Path,
) -> None:
    outcomes = run_ranks(_change_between, 2, str(step.parent), True)
    assert [how for how, _ in outcomes] == ["refused", "refused"]
    assert "extra_state file is not as it was written" in outcomes[1][1]
