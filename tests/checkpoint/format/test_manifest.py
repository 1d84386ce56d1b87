"""The manifest's file form: what is written reads back, and anything else is refused with its reason."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import xxhash
from hypothesis import given, settings
from hypothesis import strategies as st

from hyper_resume.checkpoint.format import manifest
from hyper_resume.checkpoint.format.manifest import FileEntry, Manifest
from hyper_resume.checkpoint.format.mesh import Mesh
from hyper_resume.errors import CheckpointMismatchError

GOLDEN = Path(__file__).parent / "golden" / "manifest_version_3.json"
EARLIER = [Path(__file__).parent / "golden" / f"manifest_version_{version}.json" for version in (1, 2)]
DIGEST = "xxh3_128:" + "0123456789abcdef" * 2

WHOLE = Manifest(
    step=12,
    attempt="global_step_12.0123456789ab",
    ordinal=4,
    ancestors=((4, "global_step_4.aaaaaaaaaaaa"), (8, "global_step_8.bbbbbbbbbbbb")),
    world_size=4,
    mesh=Mesh(names=("dp", "tp"), shape=(2, 2), ranks=(0, 2, 1, 3)),
    created_at="2026-11-30T08:00:00.000+00:00",
    versions={"hyper_resume": "0.1.0", "torch": "2.13.0"},
    metrics={"loss": 2.5, "steps": 3.0, "tiny": 5e-324, "large": 1.7976931348623157e308},
    files={
        ".metadata": FileEntry(size_bytes=906, digest=DIGEST, rank=0),
        "__0_0.distcp": FileEntry(size_bytes=2**40, digest=DIGEST, rank=0),
        "extra_state/extra_state_rank_3.pt": FileEntry(size_bytes=0, digest=DIGEST, rank=3),
    },
    buckets={"0": {"model": DIGEST, "rng_state": DIGEST}, "3": {}},
    names={"0": {"model": DIGEST}, "3": {}},
    uncovered={"3": ("trainer.ema.shadow.0", "trainer.stream")},
    run={
        "threads": 2,
        "optimizer": {"0": {"groups": {"head.weight": {"lr": 0.5, "betas": [0.9, 0.95], "fused": None}}}},
    },
)


def signed(content: dict[str, Any]) -> bytes:
    """The file of such a content with a digest that is right, computed here and not by the code under test."""
    content = {key: value for key, value in content.items() if key != "digest"}
    canonical = json.dumps(content, sort_keys=True, separators=(",", ":"))
    own = f"xxh3_128:{xxhash.xxh3_128_hexdigest(canonical.encode())}"
    return json.dumps({**content, "digest": own}).encode()


def plain() -> dict[str, Any]:
    found: dict[str, Any] = json.loads(manifest.encode(WHOLE))
    return found


def refusal(content: bytes) -> str:
    with pytest.raises(CheckpointMismatchError) as caught:
        manifest.decode(content, "/here/manifest.json")
    message = str(caught.value)
    assert "/here/manifest.json" in message
    assert len(message) < 2000, "a hostile file must not fill the log"
    return message


@pytest.mark.parametrize(
    "changed",
    [
        {},
        {"mesh": None},
        {"mesh": Mesh(names=("dp", "tp"), shape=(2, 2))},
        {"ancestors": ()},
        {"metrics": {}},
        {"buckets": {}},
        {"step": 0, "ordinal": 0, "world_size": 1},
        {"attempt": "my best run ü.0123456789ab"},
    ],
)
def test_what_is_written_reads_back(changed: dict[str, Any]) -> None:
    written = replace(WHOLE, **changed)
    assert manifest.decode(manifest.encode(written), "") == written


TEXTS = st.text(st.characters(), max_size=20) | st.sampled_from(["x" * 4097, "\udc80", "a\tb", "..", "1"])
NUMBERS = st.integers(-2, 5) | st.sampled_from([2**62, 2**62 + 1, -(2**62) - 1])
JSON = st.recursive(
    st.none() | st.booleans() | NUMBERS | st.floats() | TEXTS,
    lambda items: st.lists(items, max_size=2) | st.dictionaries(TEXTS | st.integers(0, 11), items, max_size=3),
    max_leaves=5,
)


@settings(max_examples=60, deadline=None)
@given(
    changed=st.fixed_dictionaries(
        {},
        optional={
            "step": NUMBERS,
            "ordinal": NUMBERS,
            "world_size": NUMBERS,
            "attempt": TEXTS,
            "created_at": TEXTS,
            "ancestors": st.lists(st.tuples(NUMBERS, TEXTS), max_size=2).map(tuple),
            "versions": st.dictionaries(TEXTS, TEXTS, max_size=2),
            "metrics": st.dictionaries(TEXTS, st.floats(), max_size=2),
            "buckets": st.dictionaries(TEXTS, st.dictionaries(TEXTS, st.just(DIGEST) | TEXTS, max_size=2), max_size=2),
            "uncovered": st.dictionaries(TEXTS, st.lists(TEXTS, max_size=2).map(tuple), max_size=2),
            "run": JSON,
        },
    )
)
def test_whatever_is_written_reads_back_and_anything_else_is_not_written(changed: dict[str, Any]) -> None:
    made = replace(WHOLE, **changed)
    try:
        content = manifest.encode(made)
    except (ValueError, TypeError):
        return
    assert manifest.decode(content, "") == replace(made, run=json.loads(json.dumps(made.run)))


@settings(max_examples=60, deadline=None)
@given(run=JSON)
def test_a_description_that_is_said_to_fit_is_written_and_read(run: Any) -> None:
    if manifest.can_hold(run):
        found = manifest.decode(manifest.encode(replace(WHOLE, run=run)), "").run
        assert found == json.loads(json.dumps(run))


def test_equal_manifests_give_equal_bytes_whatever_the_order_of_their_entries() -> None:
    other = replace(
        WHOLE, files=dict(reversed(list(WHOLE.files.items()))), metrics=dict(reversed(list(WHOLE.metrics.items())))
    )
    assert list(other.files) != list(WHOLE.files)
    assert manifest.encode(other) == manifest.encode(WHOLE)


def test_the_own_digest_is_the_one_of_the_canonical_json_without_it() -> None:
    found = plain()
    assert json.loads(signed(found)) == found


def test_the_file_that_was_checked_in_stays_readable() -> None:
    assert manifest.decode(GOLDEN.read_bytes(), "golden") == WHOLE


@pytest.mark.parametrize("file", EARLIER, ids=["1", "2"])
def test_the_files_of_earlier_versions_stay_readable_and_name_nothing_uncovered(file: Path) -> None:
    # Their meshes have no order of ranks.
    mesh = Mesh(names=("dp", "tp"), shape=(2, 2))
    assert manifest.decode(file.read_bytes(), "golden") == replace(WHOLE, uncovered={}, mesh=mesh, run={})


def test_a_file_of_version_3_may_lack_the_description_of_the_run() -> None:
    content = plain()
    del content["run"]
    assert manifest.decode(signed(content), "here") == replace(WHOLE, run={})


@pytest.mark.parametrize(
    "run",
    [
        [],
        {"name": "x" * 4097},
        {"x" * 4097: 1},
        {"number": 2**62 + 1},
        {"list": [[] for _ in range(100_001)]},
        {"deep": [[[[[[[[[[[[[[[[[1]]]]]]]]]]]]]]]]]},
    ],
    ids=["no-object", "text", "key", "number", "many", "deep"],
)
def test_a_description_of_a_run_beyond_the_limits_is_refused(run: Any) -> None:
    found = refusal(signed({**plain(), "run": run}))
    assert "run: " in found or "a key of 4097 characters; at most 4096 are read" in found


@pytest.mark.parametrize(
    ("uncovered", "complaint"),
    [
        ({"x": []}, "a rank that is no number"),
        ({"0": "trainer.ema"}, "uncovered.0"),
        ({"0": [1]}, "path"),
        ({"0": ["a"] * 1001}, "uncovered.0"),
        ([], "uncovered"),
    ],
)
def test_a_list_of_uncovered_state_of_another_form_is_refused(uncovered: Any, complaint: str) -> None:
    assert complaint in refusal(signed({**plain(), "uncovered": uncovered}))


def test_the_form_of_version_3_has_not_changed_without_a_new_version() -> None:
    assert manifest.encode(WHOLE) == GOLDEN.read_bytes()


def test_any_other_byte_is_refused_or_means_the_same() -> None:
    """Each byte once with another value; what is still read says exactly what was written."""
    content, same = GOLDEN.read_bytes(), 0
    for position in range(len(content)):
        changed = bytearray(content)
        changed[position] ^= 1
        try:
            found = manifest.decode(bytes(changed), "")
        except CheckpointMismatchError:
            continue
        assert found == WHOLE, position
        same += 1
    # Where another kind of space says the same.
    assert same <= content.count(b"\n") + content.count(b" ")


@pytest.mark.parametrize("depth", range(100, 2000, 50))
def test_nesting_of_any_depth_is_refused_and_nothing_else_goes_wrong(depth: int) -> None:
    """Reading, digesting and checking each have a depth of their own at which Python gives up."""
    message = refusal(manifest.encode(WHOLE).replace(b": 2.5", b": " + b"[" * depth + b"]" * depth))
    assert "digest" in message or "recursion" in message


@pytest.mark.parametrize("size", [0, 1, 100, -1, -3])
def test_a_part_of_the_file_is_refused(size: int) -> None:
    assert "not JSON" in refusal(manifest.encode(WHOLE)[:size].rstrip(b"}\n"))


def test_a_changed_value_without_a_new_digest_is_refused() -> None:
    found = plain()
    found["step"] = 13
    assert "does not have the digest that it states" in refusal(json.dumps(found).encode())


def test_a_newer_version_is_refused_with_what_to_do() -> None:
    message = refusal(signed({**plain(), "format_version": 4, "something": "new"}))
    assert "hyper_resume.manifest of version 4" in message
    assert "expected: hyper_resume.manifest of version 1 or 2 or 3" in message
    assert "resume with the version of hyper_resume that wrote it" in message


def test_a_file_of_another_format_is_refused() -> None:
    assert "another.format" in refusal(signed({**plain(), "format": "another.format"}))


@pytest.mark.parametrize(
    "key", [*sorted(plain().keys() - {"run"}), "files/.metadata/rank", "files/__0_0.distcp/digest", "mesh/names"]
)
def test_a_missing_key_is_refused_by_name(key: str) -> None:
    found = plain()
    *way, last = key.split("/")
    inside = found
    for part in way:
        inside = inside[part]
    del inside[last]
    content = json.dumps(found).encode() if key == "digest" else signed(found)
    message = refusal(content)
    assert last in message
    assert "missing" in message


@pytest.mark.parametrize("way", [(), ("mesh",), ("files", ".metadata")])
def test_an_unknown_key_is_refused_by_name(way: tuple[str, ...]) -> None:
    found = plain()
    inside = found
    for part in way:
        inside = inside[part]
    inside["surprise"] = 1
    assert "surprise: unknown key" in refusal(signed(found))


def test_a_key_that_stands_twice_is_refused() -> None:
    content = manifest.encode(WHOLE).replace(b'"step": 12', b'"step": 12, "step": 12')
    assert "a key occurs twice" in refusal(content)


def changed(*way: Any, to: Any) -> Callable[[], bytes]:
    """A whole file, rightly signed, with one value in it replaced."""

    def make() -> bytes:
        found = plain()
        inside: Any = found
        for part in way[:-1]:
            inside = inside[part]
        inside[way[-1]] = to
        return signed(found)

    return make


HOSTILE: dict[str, tuple[Callable[[], bytes], str]] = {
    "no object": (lambda: b"[1, 2]", "expected an object, found list"),
    "nothing": (lambda: b"", "not JSON"),
    "not UTF-8": (lambda: b'{"format": "\xff"}', "not JSON"),
    "NaN": (lambda: manifest.encode(WHOLE).replace(b": 2.5", b": NaN"), "NaN is not a JSON number"),
    "Infinity": (lambda: manifest.encode(WHOLE).replace(b": 2.5", b": -Infinity"), "-Infinity is not a JSON number"),
    "a number beyond floats": (lambda: manifest.encode(WHOLE).replace(b": 2.5", b": 1e999"), "digest"),
    "a number of 100,000 digits": (
        lambda: manifest.encode(WHOLE).replace(b'"step": 12', b'"step": ' + b"9" * 100_000),
        "not JSON",
    ),
    "deep nesting": (lambda: b"[" * 1_000_000 + b"]" * 1_000_000, "not JSON"),
    "deep nesting of objects": (lambda: b'{"a":' * 1_000_000 + b"1" + b"}" * 1_000_000, "not JSON"),
    "step as text": (changed("step", to="12"), "step: expected int, found str"),
    "step as a truth value": (changed("step", to=True), "step: expected int, found bool"),
    "step as a float": (changed("step", to=12.0), "step: expected int, found float"),
    "step below zero": (changed("step", to=-1), "step: out of range"),
    "step beyond 2**62": (changed("step", to=2**63), "step: out of range"),
    "world of no ranks": (changed("world_size", to=0), "world_size: out of range"),
    "files as a list": (changed("files", to=[]), "files: expected dict, found list"),
    "no metadata": (changed("files", to={}), "files: .metadata is not among them"),
    "negative size": (changed("files", ".metadata", "size_bytes", to=-1), "size_bytes: out of range"),
    "another algorithm": (changed("files", ".metadata", "digest", to="md5:00"), "expected a digest of xxh3_128"),
    "short digest": (changed("files", ".metadata", "digest", to=DIGEST[:-1]), "expected a digest"),
    "long digest": (changed("files", ".metadata", "digest", to=DIGEST + "0"), "expected a digest"),
    "metric as text": (changed("metrics", "loss", to="low"), "loss"),
    "metric as null": (changed("metrics", "loss", to=None), "loss"),
    "mesh as a list": (changed("mesh", to=[2, 2]), "expected an object, found list"),
    "mesh of 17 dimensions": (changed("mesh", to={"names": ["d"] * 17, "shape": [1] * 17}), "at most 16"),
    "mesh without names": (changed("mesh", to={"names": ["dp"], "shape": [2, 2]}), "1 names and 2 sizes"),
    "mesh with a rank twice": (changed("mesh", "ranks", to=[0, 1, 1, 2]), "4 places do not hold one rank each"),
    "mesh of too few ranks": (changed("mesh", "ranks", to=[0, 1]), "4 places do not hold one rank each"),
    "mesh of ranks as texts": (changed("mesh", "ranks", to=["0", "1", "2", "3"]), "rank: expected int, found str"),
    "too many ancestors": (changed("ancestors", to=[[1, "a"]] * 513), "at most 512 items, found 513"),
    "an ancestor of three": (changed("ancestors", to=[[1, "a", "b"]]), "expected an object, found list"),
    "an ancestor out of the root": (changed("ancestors", to=[[1, "../a"]]), "not a valid text"),
    "a long text": (changed("created_at", to="x" * 5000), "created_at: not a valid text"),
    "rank in other digits": (changed("buckets", to={"٣": {}}), "a rank that is not a number"),
    "rank in words": (changed("buckets", to={"one": {}}), "a rank that is not a number"),
    "huge rank": (changed("buckets", to={"9" * 1000: {}}), "a rank that is not a number"),
    "bucket digest as a number": (changed("buckets", "0", "model", to=5), "model: expected str, found int"),
}


@pytest.mark.parametrize("case", HOSTILE)
def test_what_no_save_writes_is_refused_with_its_reason(case: str) -> None:
    make, reason = HOSTILE[case]
    assert reason in refusal(make())


UNSAFE = [
    "../other",
    "extra_state/../../x",
    "/etc/passwd",
    "a/b/c",
    "extra_state/.hidden",
    "..",
    ".",
    "extra_state/..",
    "",
    "a//b",
    "a/",
    "a\x00b",
    "a\nb",
    "a b",
    "a\\b",
    "manifest.json",
    "extra_state/manifest.json",
    "ü",
    "a" * 256,
    "a" * 4000 + "/" + "b",
]


@pytest.mark.parametrize("name", UNSAFE, ids=[repr(name[:20]) for name in UNSAFE])
def test_a_file_name_that_no_save_writes_is_refused(name: str) -> None:
    assert "a file name that no save writes" in refusal(changed("files", name, to=plain()["files"][".metadata"])())


@pytest.mark.parametrize("attempt", ["", ".", "..", "a/b", "/a", "a\x00", "a\n", "x" * 256, "\ud800"])
def test_an_id_that_is_no_directory_name_is_refused(attempt: str) -> None:
    """Retention moves a step directory to a name of its id."""
    assert "attempt: not a valid text" in refusal(changed("attempt", to=attempt)())


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_a_number_that_could_not_be_read_back_is_not_written(value: float) -> None:
    with pytest.raises(ValueError, match="Out of range float values"):
        manifest.encode(replace(WHOLE, metrics={"loss": value}))


def test_a_file_that_is_too_large_is_not_read(tmp_path: Path) -> None:
    with (tmp_path / "manifest.json").open("wb") as file:
        # Takes no room on the disk.
        file.truncate((256 << 20) + 1)
    with pytest.raises(CheckpointMismatchError, match="larger than 268435456 bytes"):
        manifest.read_manifest(tmp_path)


def test_a_manifest_that_is_a_link_or_a_folder_is_refused(tmp_path: Path) -> None:
    for name in ("linked", "folder"):
        (tmp_path / name).mkdir()
    (tmp_path / "whole.json").write_bytes(manifest.encode(WHOLE))
    (tmp_path / "linked" / "manifest.json").symlink_to(tmp_path / "whole.json")
    (tmp_path / "folder" / "manifest.json").mkdir()
    for name in ("linked", "folder"):
        with pytest.raises(CheckpointMismatchError, match="the checkpoint's manifest can't be read"):
            manifest.read_manifest(tmp_path / name)


def test_a_directory_without_a_manifest_has_none(tmp_path: Path) -> None:
    assert manifest.read_manifest(tmp_path) is None
    assert manifest.read_manifest(tmp_path / "absent") is None
    (tmp_path / "file").write_text("x")
    assert manifest.read_manifest(tmp_path / "file") is None


def test_files_that_the_manifest_does_not_know_are_listed(tmp_path: Path) -> None:
    for name in (".metadata", "__0_0.distcp", "manifest.json", "notes.txt", "extra_state/extra_state_rank_9.pt"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text("x")
    (tmp_path / "away").symlink_to(tmp_path.parent)
    (tmp_path / "empty").mkdir()
    assert manifest.unlisted_files(tmp_path, WHOLE) == ["away", "extra_state/extra_state_rank_9.pt", "notes.txt"]
