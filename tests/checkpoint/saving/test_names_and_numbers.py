"""Whatever is saved with success loads again: any name that a file may have, any text in the state, every number that fits."""

from __future__ import annotations

import json
import os
import re
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import xxhash
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from hyper_resume.checkpoint import DistributedCheckpointer
from hyper_resume.checkpoint.format import layout
from hyper_resume.errors import CheckpointSaveError, StateNotPlainError
from tests.checkpoint.directories import latest, listing
from tests.checkpoint.single_value import manifest_content, save, state, steps, value_of

# Every byte but "/" and NUL may be in the name of a file; 13 bytes more are the save id.
FILE_NAMES = st.binary(min_size=1, max_size=240).map(lambda name: name.replace(b"/", b"-").replace(b"\0", b"+"))
FEW = settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])


@pytest.fixture(scope="module")
def folder() -> Iterator[Path]:
    with tempfile.TemporaryDirectory(dir="/dev/shm" if Path("/dev/shm").is_dir() else None) as name:
        yield Path(name)


def _fresh(folder: Path) -> Path:
    return Path(tempfile.mkdtemp(dir=folder))


def _refusal(target: Path, content: dict[str, Any], checkpointer: DistributedCheckpointer) -> str | None:
    """Save; what the refusal says, or None for a save."""
    try:
        checkpointer.save(str(target), content, global_step=5)
    except (CheckpointSaveError, StateNotPlainError) as error:
        return str(error)
    return None


@FEW
@given(name=FILE_NAMES)
def test_a_save_under_any_name_loads_again_or_is_refused(folder: Path, name: bytes) -> None:
    root = _fresh(folder)
    target = root / os.fsdecode(name)
    refusal = _refusal(target, state(1.0), DistributedCheckpointer())
    if refusal is not None:
        assert re.search("could not be loaded again|did not write|too long", refusal)
        assert {path.name for path in root.iterdir()} <= {".staging", ".writer.lock"}
        return
    assert value_of(target) == 1.0
    DistributedCheckpointer().save(str(target), state(2.0), global_step=5)
    assert value_of(target) == 2.0
    assert list((root / ".staging").iterdir()) == []


@FEW
@given(name=FILE_NAMES)
def test_the_parents_of_a_save_may_have_any_name(folder: Path, name: bytes) -> None:
    root = _fresh(folder) / os.fsdecode(name)
    if root.name in (".", ".."):
        return
    save(root, 5, 1.0)
    assert latest(root) == root / "global_step_5"
    assert value_of(root / "global_step_5") == 1.0


@pytest.mark.parametrize("name", ["a\tb", "a\nb", "\x1b[31mred", "100%", "%41", "%0A", "\udcff", ".hidden", "ü 检查点"])
def test_a_copy_that_was_moved_aside_gets_its_whole_name_back(tmp_path: Path, name: str) -> None:
    """The name of a staging directory tells the name of the directory; and it is a text that a log can show."""
    DistributedCheckpointer().save(str(tmp_path / name), state(2.0), global_step=2)
    save_id = manifest_content(tmp_path / name)["attempt"]
    assert save_id.isprintable()
    (tmp_path / name).rename(tmp_path / ".staging" / f"{save_id}.replaced")
    save(tmp_path, 3, 3.0)
    assert value_of(tmp_path / name) == 2.0


@pytest.mark.parametrize(
    "name", [".staging", ".trash", ".writer.lock", "latest_checkpoint_iteration.txt", "..", "global_step_7"]
)
def test_a_name_that_no_save_can_have_is_refused_before_anything_is_written(tmp_path: Path, name: str) -> None:
    save(tmp_path, 1, 1.0)
    before = listing(tmp_path)
    with pytest.raises(CheckpointSaveError, match=r"could not be loaded again|did not write"):
        DistributedCheckpointer().save(
            f"{tmp_path}/global_step_1/{name}" if name == ".." else str(tmp_path / name), state(5.0), global_step=5
        )
    assert listing(tmp_path) == before


@pytest.mark.parametrize("step", [-1, 10**18, 2**62, 2**63, 2**200])
def test_a_step_that_no_pointer_can_name_is_refused(tmp_path: Path, step: int) -> None:
    for name in (f"global_step_{step}", "best"):
        with pytest.raises(CheckpointSaveError, match="could not be loaded again") as caught:
            DistributedCheckpointer().save(str(tmp_path / name), state(1.0), global_step=step)
        assert f"found: global_step {step}" in str(caught.value)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("step", [0, 10**18 - 1, np.int64(7), torch.tensor(7), True])
def test_every_whole_number_of_a_step_is_saved_and_pointed_to(tmp_path: Path, step: Any) -> None:
    root = tmp_path / "root"
    DistributedCheckpointer().save(str(root / f"global_step_{int(step)}"), state(1.0), global_step=step)
    assert latest(root) == root / f"global_step_{int(step)}"
    assert value_of(root / f"global_step_{int(step)}") == 1.0


@pytest.mark.parametrize("step", [1.0, "1", None])
def test_what_is_no_whole_number_is_no_step(tmp_path: Path, step: Any) -> None:
    with pytest.raises(TypeError):
        DistributedCheckpointer().save(str(tmp_path / "global_step_1"), state(1.0), global_step=step)
    assert list(tmp_path.iterdir()) == []


def _with_ordinal(directory: Path, ordinal: int) -> None:
    content = {**manifest_content(directory), "ordinal": ordinal}
    del content["digest"]
    canonical = json.dumps(content, sort_keys=True, separators=(",", ":")).encode()
    digest = f"xxh3_128:{xxhash.xxh3_128_hexdigest(canonical)}"
    (directory / "manifest.json").write_text(json.dumps({**content, "digest": digest}))


def test_an_ordinal_that_leaves_no_room_for_another_is_refused_at_the_start_and_at_a_save(tmp_path: Path) -> None:
    _with_ordinal(save(tmp_path, 1, 1.0), 2**62)
    before = listing(tmp_path)
    with pytest.raises(CheckpointSaveError, match="no save can come after") as caught:
        DistributedCheckpointer().begin_run(str(tmp_path), restored_from=None)
    assert str(tmp_path / "global_step_1" / "manifest.json") in str(caught.value)
    with pytest.raises(CheckpointSaveError, match="no save can come after"):
        save(tmp_path, 2, 2.0)
    assert listing(tmp_path) == before


def test_the_last_ordinal_is_saved_and_loaded(tmp_path: Path) -> None:
    _with_ordinal(save(tmp_path, 1, 1.0), 2**62 - 1)
    assert value_of(save(tmp_path, 2, 2.0)) == 2.0
    assert manifest_content(tmp_path / "global_step_2")["ordinal"] == 2**62


# ---- texts in the state

TEXTS = st.text(st.characters(), max_size=40) | st.binary(max_size=20).map(os.fsdecode)
PLAIN = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | TEXTS | st.binary(max_size=9) | st.complex_numbers(),
    lambda items: (
        st.lists(items, max_size=3)
        | st.lists(items, max_size=3).map(tuple)
        | st.dictionaries(TEXTS | st.integers() | st.tuples(TEXTS, st.booleans()), items, max_size=3)
    ),
    max_leaves=8,
)


@FEW
@given(names=st.lists(TEXTS, min_size=1, max_size=3, unique=True), value=PLAIN, key=TEXTS)
@pytest.mark.parametrize("per_rank", [True, False])
def test_a_state_with_any_names_and_plain_values_loads_again_or_is_refused(
    folder: Path, names: list[str], value: Any, key: str, per_rank: bool
) -> None:
    target = _fresh(folder) / "global_step_5"
    model = {name: torch.arange(3.0) + place for place, name in enumerate(names)}
    given_state = {"model": model, "extra_state": {"stateful": {key: value}}}
    refusal = _refusal(target, given_state, DistributedCheckpointer(extra_state_per_rank=per_rank))
    if refusal is not None:
        assert re.search("can't be saved|ValueError", refusal)  # not plain; or two entries have one name
        assert not target.exists()
        return
    found = {"model": {name: torch.zeros(3) for name in names}}
    extra = DistributedCheckpointer().load(str(target), found, extra_state_skeleton={"stateful": None})
    for name, tensor in model.items():
        assert torch.equal(found["model"][name], tensor)
    assert repr(extra["stateful"]) == repr({key: value})


@pytest.mark.parametrize("per_rank", [True, False])
def test_a_state_is_refused_before_it_is_nested_too_deep_to_be_read(tmp_path: Path, per_rank: bool) -> None:
    value: Any = 0
    for _ in range(69):
        value = (value,)
    for depth in range(70, 120):
        value = [value] if depth % 2 else {"a": value}
        target = tmp_path / "global_step_5"
        content = {**state(1.0), "optimizer": {"0": (value,)}}
        content["extra_state"]["of_mine"] = value
        refusal = _refusal(target, content, DistributedCheckpointer(extra_state_per_rank=per_rank))
        if refusal is not None:
            break
        if depth > 80:
            assert value_of(target) == 1.0
    assert refusal is not None
    assert "nested too deep" in refusal
    assert depth > 80


def test_a_state_that_holds_itself_is_refused(tmp_path: Path) -> None:
    content = state(1.0)
    content["extra_state"]["stateful"] = content["extra_state"]
    assert "nested too deep" in (_refusal(tmp_path / "global_step_5", content, DistributedCheckpointer()) or "")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    "extra",
    [
        {"run": "my experiment"},
        {"run": {"n": 2**100}},
        {"run": {"x": float("nan")}},
        {"run": {1: {}, 10: {}, 2: {}}},
        {"run": {"text": "x" * 5000}},
    ],
    ids=["text", "number", "nan", "keys", "long"],
)
def test_a_description_of_the_run_that_no_manifest_can_hold_is_left_out_with_a_warning(
    tmp_path: Path, extra: dict[str, Any], caplog: pytest.LogCaptureFixture
) -> None:
    content = state(1.0)
    content["extra_state"].update(extra)
    DistributedCheckpointer().save(str(tmp_path / "global_step_1"), content, global_step=1)
    assert value_of(tmp_path / "global_step_1") == 1.0
    assert manifest_content(tmp_path / "global_step_1")["run"] == {}
    assert "has no description of the run" in caplog.text


def test_what_the_manifest_cant_hold_is_refused_before_the_commit(tmp_path: Path) -> None:
    """A remark of the training state that is longer than a reader allows."""
    save(tmp_path, 1, 1.0)
    before = listing(tmp_path)
    content = state(2.0)
    content["extra_state"]["uncovered"] = ("x" * 5000,)
    with pytest.raises(CheckpointSaveError, match="not a valid text"):
        DistributedCheckpointer().save(str(tmp_path / "global_step_2"), content, global_step=2)
    assert listing(tmp_path) == before
    assert steps(tmp_path) == [1]
    assert layout.read_pointer(tmp_path) == (1, "")


@pytest.mark.parametrize(
    ("part", "value"), [("rng_state", [1]), ("stateful", [2]), ("lr_scheduler", {"a": 1}), (3, "x")]
)
def test_a_training_state_that_no_load_would_take_is_refused_at_the_save(tmp_path: Path, part: Any, value: Any) -> None:
    content = state(1.0)
    content["extra_state"][part] = value
    refusal = _refusal(tmp_path / "global_step_5", content, DistributedCheckpointer())
    assert "no load would take it" in (refusal or "")
    assert not (tmp_path / "global_step_5").exists()
