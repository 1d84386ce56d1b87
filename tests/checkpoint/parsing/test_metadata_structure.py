"""A description of a checkpoint is refused when it runs code, leads elsewhere, or does not add up."""

from __future__ import annotations

import itertools
import os
import pickle
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex

from hyper_resume.checkpoint.parsing import safe_load
from hyper_resume.checkpoint.parsing.metadata_structure import cover_complaint
from hyper_resume.errors import CheckpointMismatchError
from tests.checkpoint.metadata_made import MakesDirectory, small_metadata

# ---- payloads -------------------------------------------------------------------------------------------------------


def _with(change: Callable[[Any], Any]) -> bytes:
    metadata = small_metadata()
    change(metadata)
    return pickle.dumps(metadata)


PLACES: dict[str, Callable[[Any], bytes]] = {
    "the whole": pickle.dumps,
    "an attribute of the whole": lambda bad: _with(lambda m: setattr(m, "extra", bad)),
    "an attribute of a place": lambda bad: _with(lambda m: setattr(m.storage_data[MetadataIndex("value")], "x", bad)),
    "an attribute of an entry": lambda bad: _with(lambda m: setattr(m.state_dict_metadata["value"], "x", bad)),
    "planner_data": lambda bad: _with(lambda m: m.planner_data.update(tensor=bad)),
    "all of planner_data": lambda bad: _with(lambda m: setattr(m, "planner_data", bad)),
    "an entry": lambda bad: _with(lambda m: m.state_dict_metadata.update(tensor=bad)),
    "a list of names": lambda bad: _with(lambda m: m.storage_meta.modules.append(bad)),
    "a size": lambda bad: _with(lambda m: setattr(m.state_dict_metadata["tensor"], "size", bad)),
}


@pytest.mark.parametrize("place", PLACES)
def test_code_in_the_metadata_does_not_run(place: str, tmp_path: Path) -> None:
    content = PLACES[place](MakesDirectory(tmp_path / "ran"))
    with pytest.raises(CheckpointMismatchError, match=r"here.*'(posix|os).mkdir', which is not on the list") as caught:
        safe_load.load_metadata(content, "here")
    assert not (tmp_path / "ran").exists()
    assert "weights_only" not in str(caught.value)
    # The same bytes do run where they are believed.
    pickle.loads(content)
    assert (tmp_path / "ran").exists()


def test_an_attribute_that_metadata_does_not_have_is_refused() -> None:
    with pytest.raises(CheckpointMismatchError, match="the attribute 'extra', which Metadata does not have"):
        safe_load.load_metadata(_with(lambda m: setattr(m, "extra", 1)), "here")


# ---- paths ----------------------------------------------------------------------------------------------------------

ESCAPES = {
    "../other/__0_0.distcp": "leads out",
    "/elsewhere/__0_0.distcp": "absolute",
    "extra_state/../../__0_0.distcp": "leads out",
    "..": "leads out",
    "a/b/c": "not a plain path",
    "": "not a plain path",
    ".": "not a plain path",
    "a//b": "not a plain path",
    "./a": "not a plain path",
    "a/": "not a plain path",
    "a\\b": "not a plain path",
    "a\0b": "no file can have",
    "a\nb": "no file can have",
    "x" * 256: "no file can have",
}


@pytest.mark.parametrize("path", ESCAPES)
def test_a_path_that_is_not_in_the_checkpoint_is_refused(path: str, tmp_path: Path) -> None:
    content = _with(lambda m: setattr(m.storage_data[MetadataIndex("value")], "relative_path", path))
    with pytest.raises(CheckpointMismatchError, match=ESCAPES[path]):
        safe_load.load_metadata(content, "here")
    with pytest.raises(CheckpointMismatchError, match=ESCAPES[path]):
        safe_load.check_contained(tmp_path, path)


def test_files_of_the_directory_and_one_below_are_contained(tmp_path: Path) -> None:
    (tmp_path / "below").mkdir()
    for name in ("__0_0.distcp", "below/file.pt"):
        (tmp_path / name).touch()
        assert safe_load.check_contained(tmp_path, name) == tmp_path / name


def test_what_is_no_regular_file_is_refused(tmp_path: Path) -> None:
    step, elsewhere = tmp_path / "step", tmp_path / "elsewhere"
    for folder in (step, elsewhere, step / "folder"):
        folder.mkdir()
    (elsewhere / "file").touch()
    (step / "link").symlink_to(elsewhere / "file")
    (step / "linked").symlink_to(elsewhere)
    (step / "file").touch()
    os.mkfifo(step / "pipe")
    found = {
        "link": "a link",
        "linked/file": "a link",
        "folder": "not a regular file",
        "pipe": "not a regular file",
        "file/x": "not a directory",
        "missing": "no such file",
        "missing/file": "no such file",
    }
    for name, complaint in found.items():
        with pytest.raises(CheckpointMismatchError, match=complaint):
            safe_load.check_contained(step, name)


@pytest.mark.parametrize(("size", "complaint"), [(149, "found: 149 bytes"), (None, "no such file")])
def test_a_file_that_is_shorter_than_its_entries_is_named(size: int | None, complaint: str, tmp_path: Path) -> None:
    (tmp_path / "__1_0.distcp").write_bytes(bytes(100))
    if size is not None:
        (tmp_path / "__0_0.distcp").write_bytes(bytes(size))
    with pytest.raises(CheckpointMismatchError, match=f"__0_0.distcp.*{complaint}"):
        safe_load.check_file_sizes(tmp_path, small_metadata())
    (tmp_path / "__0_0.distcp").write_bytes(bytes(150))
    safe_load.check_file_sizes(tmp_path, small_metadata())


# ---- what must add up -----------------------------------------------------------------------------------------------


def _chunks(metadata: Any) -> list[ChunkStorageMetadata]:
    return metadata.state_dict_metadata["tensor"].chunks  # type: ignore[no-any-return]


def _place(metadata: Any, name: str = "value", offset: tuple[int, ...] | None = None) -> Any:
    return metadata.storage_data[MetadataIndex(name, offset)]


WRONG: dict[str, tuple[Callable[[Any], Any], str]] = {
    "a hole": (lambda m: setattr(_chunks(m)[1], "sizes", torch.Size([2, 2])), "leave a hole: 10 elements of 12"),
    "an overlap": (
        lambda m: (
            _chunks(m).append(ChunkStorageMetadata(torch.Size([1, 0]), torch.Size([2, 3]))),
            m.storage_data.update({MetadataIndex("tensor", (1, 0)): type(_place(m))("__2_0.distcp", 0, 100)}),
        ),
        "overlap: 18 elements of 12",
    ),
    "a chunk twice": (lambda m: _chunks(m).append(_chunks(m)[0]), "overlap"),
    "a chunk less": (lambda m: _chunks(m).pop(), "leave a hole"),
    "no chunk": (lambda m: _chunks(m).clear(), "leave a hole: 0 elements of 12"),
    "a chunk too far": (lambda m: setattr(_chunks(m)[1], "sizes", torch.Size([3, 3])), "reaches out of the tensor"),
    "a chunk of three axes": (lambda m: setattr(_chunks(m)[1], "sizes", torch.Size([2, 3, 1])), "dimensions"),
    "a tensor of 65 axes": (
        lambda m: setattr(m.state_dict_metadata["tensor"], "size", torch.Size([1] * 65)),
        "too many dimensions",
    ),
    "no place for a chunk": (lambda m: m.storage_data.pop(MetadataIndex("tensor", (2, 0))), "without a location"),
    "no place for a value": (lambda m: m.storage_data.pop(MetadataIndex("value")), "no location"),
    "a place for nothing": (lambda m: m.state_dict_metadata.pop("value"), "3 locations for 2 chunks"),
    "bytes shared": (lambda m: setattr(_place(m), "offset", 99), "share bytes of '__0_0.distcp'"),
    "a place before the file": (lambda m: setattr(_place(m), "offset", -1), "offset -1"),
    "a length below zero": (lambda m: setattr(_place(m), "length", -1), "with -1 bytes"),
    "an offset past all files": (lambda m: setattr(_place(m), "offset", 2**63 - 1), "invalid location"),
    "an offset that is True": (lambda m: setattr(_place(m), "offset", True), "offset that is True"),
    "a length that is a fraction": (lambda m: setattr(_place(m), "length", 1.0), "length that is 1.0"),
    "more values than bytes": (
        lambda m: setattr(_place(m, "tensor", (2, 0)), "length", 23),
        "24 bytes of values in 23 bytes",
    ),
    "a name that is a number": (lambda m: m.planner_data.update({"value": (1.5,)}), "a tuple that is 1.5"),
    "no places": (lambda m: setattr(m, "storage_data", None), "storage_data that is None"),
    "places in a list": (lambda m: setattr(m, "storage_data", []), "storage_data that is a list"),
    "an entry that is text": (lambda m: m.state_dict_metadata.update(value="x"), "entry 'value' that is 'x'"),
    "properties that are none": (
        lambda m: setattr(m.state_dict_metadata["tensor"], "properties", None),
        "properties that is None",
    ),
}


@pytest.mark.parametrize("what", WRONG)
def test_a_description_that_does_not_add_up_is_refused(what: str) -> None:
    change, complaint = WRONG[what]
    with pytest.raises(CheckpointMismatchError, match=complaint):
        safe_load.load_metadata(_with(change), "here")


@pytest.mark.parametrize(
    "content", [b"", b"x", b"\x80\x04.", b"\x80\x04N.", pickle.dumps({"a": 1}), pickle.dumps(small_metadata())[:-9]]
)
def test_what_is_no_description_is_refused(content: bytes) -> None:
    with pytest.raises(CheckpointMismatchError, match="metadata can't be read"):
        safe_load.load_metadata(content, "here")


def test_something_behind_the_description_is_refused() -> None:
    with pytest.raises(CheckpointMismatchError, match="something in addition to the one value"):
        safe_load.load_metadata(pickle.dumps(small_metadata()) + b"N.", "here")


def test_chunks_cover_a_tensor_exactly_when_counting_says_so() -> None:
    """Random boxes, most of them nearly right: the corner sum against a count of every element."""
    seeded = random.Random(5)
    right = 0
    for _ in range(3000):
        size = [seeded.randint(0, 4) for _ in range(seeded.randint(0, 3))]
        cuts = [sorted({0, whole, *(seeded.randint(0, whole) for _ in range(2))}) for whole in size]
        boxes = list(itertools.product(*(itertools.pairwise(cut) for cut in cuts)))
        for _ in range(seeded.choice((0, 0, 1, 2))):
            if boxes and size:
                _spoil(seeded, boxes, size)
        counted = torch.zeros(size)
        for box in boxes:
            counted[tuple(slice(*bounds) for bounds in box)] += 1
        chunks = [
            ChunkStorageMetadata(
                torch.Size([begin for begin, _ in box]), torch.Size([end - begin for begin, end in box])
            )
            for box in boxes
        ]
        expected = bool((counted == 1).all())
        assert (cover_complaint(torch.Size(size), chunks) == "") == expected, (size, boxes)
        right += expected
    assert 500 < right < 2800


def _spoil(seeded: random.Random, boxes: list[Any], size: list[int]) -> None:
    at, axis = seeded.randrange(len(boxes)), seeded.randrange(len(size))
    what = seeded.randrange(3)
    if what == 0:
        del boxes[at]
    elif what == 1:
        boxes.append(boxes[at])
    else:
        begin = seeded.randint(0, size[axis])
        boxes[at] = (*boxes[at][:axis], (begin, seeded.randint(begin, size[axis])), *boxes[at][axis + 1 :])
