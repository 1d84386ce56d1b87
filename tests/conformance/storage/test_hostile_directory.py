"""A step directory with a hostile file has a right manifest, its judge finds what is wrong, and wrong readers are detected."""

from __future__ import annotations

import json
import os
import struct
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from random import Random
from typing import Any

import pytest
import torch
import xxhash
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import MetadataIndex

from conformance.storage.hostile import fuzz, indexes, opening, tables
from conformance.storage.hostile.directory import (
    INDEX,
    LINKS,
    OTHER_SHARD,
    OUTSIDE,
    SHARD,
    STEP,
    good_files,
    good_state,
    put,
    split_table,
    table_of,
)
from conformance.storage.hostile.material import Material, make_material
from conformance.storage.hostile.meaning import UnreadableError, covers_once, index_meaning, table_meaning
from conformance.storage.hostile.opening import Disagreement, LiveStateTouched, Opened
from conformance.storage.hostile.readers import Reader, library_readers
from hyper_resume.checkpoint import DistributedCheckpointer
from hyper_resume.errors import CheckpointMismatchError

# torch's, of types that only a hostile index names.
pytestmark = pytest.mark.filterwarnings("ignore::UserWarning")


@pytest.fixture(scope="module")
def material() -> Material:
    return make_material()


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


def _opened(home: Path, name: str, content: bytes) -> tuple[Opened, str]:
    put(home, name, content)
    opened = opening.open_directory(content)
    return opened, opening.doubt(name)(content, opened)


def _index(change: Callable[[Any], Any]) -> bytes:
    tree = json.loads(good_files()[INDEX])
    change(tree)
    return json.dumps(tree).encode()


# ---- the good one -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", [INDEX, SHARD])
def test_the_good_directory_is_loaded_in_full_and_without_a_doubt(home: Path, name: str) -> None:
    opened, doubt = _opened(home, name, good_files()[name])
    assert doubt == ""
    assert opened.live is not None
    assert opened.values is not None
    for key, saved in good_state().items():
        for found in (opened.live[key], opened.values[key]):
            assert torch.equal(found, saved) if isinstance(saved, torch.Tensor) else found == saved
    # A tensor that is a segment is known by its digest; this is what a hostile table could lie about.
    data = good_state()["model.whole"].numpy().tobytes()
    assert opened.data_digests == {"model.whole": xxhash.xxh3_128_digest(data)}
    assert set(opened.verified_files) == {SHARD, OTHER_SHARD}


def test_the_material_is_the_same_bytes_each_time() -> None:
    before = dict(good_files())
    good_files.cache_clear()
    assert good_files() == before


def test_what_lies_in_wait_outside_would_be_read_if_a_path_led_there(home: Path) -> None:
    put(home, INDEX, good_files()[INDEX])
    assert [(home / STEP / link).resolve() for link in LINKS] == [home / OUTSIDE / SHARD, home / OUTSIDE]
    for file in (SHARD, OTHER_SHARD):
        assert (home / OUTSIDE / file).read_bytes() == good_files()[file]


def test_a_directory_is_put_in_order_again_after_another_file_was_hostile(home: Path) -> None:
    put(home, INDEX, b"x")
    put(home, SHARD, b"y")
    assert {name: (home / STEP / name).read_bytes() for name in good_files()} == {**good_files(), SHARD: b"y"}


# ---- the manifest around it is right ------------------------------------------------------------------------------------


@pytest.mark.parametrize("make", [indexes.index_boxes, tables.table_segments, tables.shard_bytes])
def test_no_hostile_file_is_refused_for_its_digest(home: Path, material: Material, make: fuzz.Generator) -> None:
    name = INDEX if make is indexes.index_boxes else SHARD
    for number in range(60):
        content = make(Random(number), material)
        put(home, name, content)
        try:
            opening.open_directory(content)
        except (CheckpointMismatchError, Disagreement, RuntimeError, IndexError) as error:
            message = str(error)
        else:
            continue
        # A table that is none has no digest that could be right; all others have theirs.
        assert "no table of digests" in message or "expected digest" not in message or "found other bytes" in message, (
            message
        )


def test_the_same_seed_makes_the_same_files_and_another_one_others(material: Material) -> None:
    for kind, reader, generator in fuzz.KINDS:
        if reader not in ("index", "shard"):
            continue
        once, again = ([generator(Random(f"{seed}/x"), material) for seed in range(20)] for _ in range(2))
        assert once == again
        assert len(set(once)) > 5, kind


# ---- the judge ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("shape", "boxes", "covers"),
    [
        ((), [((), ())], True),
        ((), [((), ()), ((), ())], False),
        ((), [], False),
        ((0, 3), [], True),
        ((0, 3), [((0, 0), (1, 3))], False),
        ((4,), [((0,), (2,)), ((2,), (2,))], True),
        ((4,), [((2,), (2,)), ((0,), (2,)), ((4,), (0,))], True),
        ((4,), [((0,), (2,)), ((1,), (2,))], False),
        ((4,), [((0,), (3,))], False),
        ((4,), [((0,), (5,))], False),
        ((4,), [((0, 0), (4, 1))], False),
        # As many elements as there are, one of them twice and one not at all.
        ((2, 2), [((0, 0), (1, 2)), ((0, 1), (2, 1))], False),
        # Around a middle: no cut goes through.
        ((3, 3), [((0, 0), (1, 2)), ((0, 2), (2, 1)), ((2, 1), (1, 2)), ((1, 0), (2, 1)), ((1, 1), (1, 1))], True),
        ((2**62,), [((0,), (2**61,)), ((2**61,), (2**61,))], True),
    ],
)
def test_boxes_are_counted(shape: Any, boxes: Any, covers: bool) -> None:
    assert covers_once(shape, boxes) is covers


WRONG: dict[str, tuple[Callable[[Any], Any], str]] = {
    "a key more": (lambda tree: tree.update(more=1), "other keys"),
    "true as the version": (lambda tree: tree.update(format_version=True), "another format"),
    "a float as a size": (lambda tree: tree["tensors"]["model.whole"][2][0].__setitem__(1, [1.0, 30]), "no number"),
    "true as a size": (lambda tree: tree["tensors"]["model.whole"][2][0].__setitem__(1, [True, 30]), "no number"),
    "a type that is a module": (lambda tree: tree["tensors"]["model.whole"].__setitem__(0, "nn"), "no type"),
    "a path out": (lambda tree: tree["files"].append("../x"), "a file elsewhere"),
    "a detour": (lambda tree: tree["files"].append(f"./{SHARD}"), "a file elsewhere"),
    "an absolute path": (lambda tree: tree["files"].append("/etc/passwd"), "a file elsewhere"),
    "a hole": (lambda tree: tree["tensors"]["model.grid"][2].pop(), "do not cover"),
    "a place beyond": (lambda tree: tree["values"]["optimizer.lr"].__setitem__(1, 10**6), "bytes that no file has"),
    "shared bytes": (
        lambda tree: tree["values"].update(x=tree["values"]["optimizer.lr"]),
        "that two entries share",
    ),
    "shared bytes of a file that is listed twice": (
        lambda tree: (tree["files"].append(SHARD), tree["values"].update(x=[2, *tree["values"]["optimizer.lr"][1:]])),
        "that two entries share",
    ),
    "more elements than bytes": (
        lambda tree: tree["tensors"]["model.whole"][2][0].__setitem__(4, 119),
        "more elements than bytes",
    ),
}


@pytest.mark.parametrize("how", WRONG)
def test_the_judge_of_an_index_finds_what_is_wrong(how: str) -> None:
    change, reason = WRONG[how]
    with pytest.raises(UnreadableError, match=reason):
        index_meaning(_index(change), good_files())


@pytest.mark.parametrize("content", [b"", b"\xff", b'{"format": 1, "format": 1}', b"[" * 100_000, b"[NaN]"])
def test_the_judge_takes_no_other_json(content: bytes) -> None:
    with pytest.raises(UnreadableError):
        index_meaning(content, good_files())


def test_the_judge_of_a_table_finds_what_is_wrong() -> None:
    body, lengths = split_table(good_files()[SHARD])
    assert [length for _, length, _ in table_meaning(good_files()[SHARD])] == lengths
    wrong = {
        "not all that is before": table_of(body, lengths[:-1]),
        "no table": b"",
        "more segments": struct.pack("<Q8s", 1 << 40, b"hrsegm01"),
        "other bytes at 0": table_of(body, lengths, digests={0: bytes(16)}),
    }
    for reason, table in wrong.items():
        with pytest.raises(UnreadableError, match=reason):
            table_meaning(body + table)


# ---- readings that are wrong in one way each ----------------------------------------------------------------------------


def _other_place(opened: Opened) -> None:
    index = MetadataIndex("optimizer.lr")
    old = opened.metadata.storage_data[index]
    opened.metadata.storage_data[index] = _StorageInfo(old.relative_path, old.offset + 1, old.length)


def _other_segments(opened: Opened) -> None:
    opened.verified_files[SHARD].segments.pop(0)


def _entry_lost(opened: Opened) -> None:
    opened.metadata.state_dict_metadata.pop("model.rows")


def _boxes_in_another_order(opened: Opened) -> None:
    opened.metadata.state_dict_metadata["model.grid"].chunks.reverse()


@pytest.mark.parametrize(
    ("change", "doubt"),
    [
        (_other_place, "optimizer.lr: another place"),
        (_other_segments, "other segments than the table has"),
        (_entry_lost, "other entries than the index has"),
        (_boxes_in_another_order, "model.grid: another type, shape or boxes"),
    ],
)
def test_a_description_that_is_read_as_another_one_is_doubted(
    home: Path, change: Callable[[Opened], None], doubt: str
) -> None:
    content = good_files()[SHARD]
    opened, _ = _opened(home, SHARD, content)
    change(opened)
    assert opening.doubt(SHARD)(content, opened) == doubt


def test_values_and_digests_that_are_not_those_of_the_bytes_are_doubted(home: Path) -> None:
    content = good_files()[SHARD]
    opened, _ = _opened(home, SHARD, content)
    assert opened.live is not None
    assert opened.values is not None
    doubt = opening.doubt(SHARD)
    live = {**opened.live, "model.rows": opened.live["model.rows"] + 1}
    assert doubt(content, replace(opened, live=live)) == "model.rows: other values than its bytes are"
    values = {**opened.values, "optimizer.lr": 0.2}
    assert doubt(content, replace(opened, values=values)) == "optimizer.lr: other values than its bytes are"
    digests = {"model.whole": bytes(16)}
    assert doubt(content, replace(opened, data_digests=digests)).startswith("model.whole: known by a digest")


def _feed(tmp_path: Path, **how: Any) -> set[str]:
    """What is found of a reader of hostile indexes that is broken before or after it reads."""
    good = library_readers()["index"]
    result = fuzz.run(len(fuzz.KINDS), 3, tmp_path, readers={"index": replace(good, **how)})
    assert result.count == 5
    return {violation.what for violation in result.violations}


def _refuse(content: bytes) -> Any:
    raise CheckpointMismatchError("no")


def _touch(content: bytes) -> Any:
    raise LiveStateTouched("no")


def _opens(path: str) -> Callable[[bytes], Any]:
    def read(content: bytes) -> Any:
        with Path(path).open("rb"):
            return _refuse(content)

    return read


def _writes(content: bytes) -> Any:
    with (Path(STEP) / INDEX).open("ab"):
        return _refuse(content)


def _lists(path: str) -> Callable[[bytes], Any]:
    return lambda content: list(os.scandir(path)) and _refuse(content)


@pytest.mark.parametrize(
    ("read", "found"),
    [
        (_refuse, set()),
        (_opens(f"{STEP}/{SHARD}"), set()),
        (_lists(STEP), set()),
        (_opens(f"{STEP}/{LINKS[0]}"), {"file touched"}),
        (_opens(f"{STEP}/unlisted.distcp"), {"file touched"}),
        (_opens(f"{OUTSIDE}/{SHARD}"), {"file touched"}),
        (_opens("/dev/zero"), {"file touched"}),
        (_writes, {"file touched"}),
        (_lists(OUTSIDE), {"code run"}),
        (_touch, {"touched live state"}),
    ],
)
def test_a_reader_that_goes_elsewhere_is_found(tmp_path: Path, read: Callable[[bytes], Any], found: set[str]) -> None:
    assert _feed(tmp_path, read=read) == found


def test_a_refused_load_that_has_written_to_the_live_state_is_found(
    home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    original = DistributedCheckpointer.load

    def load(self: Any, path: str, state: dict[str, Any], **kwargs: Any) -> Any:
        state["model"]["scalar"].zero_()
        return original(self, path, state, **kwargs)

    monkeypatch.setattr(DistributedCheckpointer, "load", load)
    with pytest.raises(LiveStateTouched):
        _opened(home, INDEX, b"{}")


def test_a_load_that_takes_what_all_else_refuses_is_found(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(DistributedCheckpointer, "load", lambda *args, **kwargs: {})
    with pytest.raises(Disagreement):
        _opened(home, INDEX, b"{}")


def test_a_reader_of_directories_is_an_ordinary_reader() -> None:
    for name in ("index", "shard"):
        reader = library_readers()[name]
        assert isinstance(reader, Reader)
        assert reader.put is not None
        assert f"{STEP}/{INDEX}" in reader.may_open
