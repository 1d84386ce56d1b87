"""How YAML text becomes values that know their line."""

from __future__ import annotations

import math
import time
from pathlib import Path
from typing import Any

import pytest
import yaml

from hyper_resume.config import load_config
from hyper_resume.config.yaml_source import MAX_DEPTH, Problem, parse_value, read_file
from hyper_resume.errors import ConfigError


def read(tmp_path: Path, text: str) -> tuple[Any, list[Problem]]:
    """Values and problems of a file with this text."""
    path = tmp_path / "train.yaml"
    path.write_text(text, encoding="utf-8")
    root, problems = read_file(path)
    return root.plain(), problems


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("3e-4", 0.0003),
        ("1E5", 100000.0),
        ("-1e+2", -100.0),
        ("1.e3", 1000.0),
        (".5", 0.5),
        ("2.", 2.0),
        ("0.1", 0.1),
        ("-.inf", -math.inf),
        ("7", 7),
        ("+7", 7),
        ("-0", 0),
        ("1_000", 1000),
        ("true", True),
        ("off", False),
        ("null", None),
        ("~", None),
        ("", None),
        ("'10'", "10"),
        ("!!str 10", "10"),
        ("[a, 1, {k: v}]", ["a", 1, {"k": "v"}]),
    ],
)
def test_a_value_is_read_as_the_user_means_it(text: str, value: object) -> None:
    located, problems = parse_value(text, "here")
    assert problems == []
    assert located.plain() == value
    assert type(located.plain()) is type(value)
    assert located.origin == "here"


def test_nan_is_read_as_a_number() -> None:
    located, problems = parse_value(".nan", "here")
    assert problems == []
    assert math.isnan(located.value)


@pytest.mark.parametrize("text", ["010", "00", "12:30", "2024-01-01", "0x1f", "0o17", "1e", "e5", ".", "1_", "="])
def test_what_yaml_versions_disagree_about_stays_text(text: str) -> None:
    located, problems = parse_value(text, "here")
    assert problems == []
    assert located.plain() == text


def test_reading_leaves_the_loaders_of_pyyaml_alone() -> None:
    assert yaml.safe_load("3e-4") == "3e-4"
    assert yaml.safe_load("2024-01-01") != "2024-01-01"


def test_every_key_knows_its_line(tmp_path: Path) -> None:
    path = tmp_path / "train.yaml"
    path.write_text("# comment\na: 1\nb:\n  c:\n    - x\n    - y\n", encoding="utf-8")
    root, problems = read_file(path)
    assert problems == []
    assert root.value["a"].origin == f"{path}:2"
    assert root.value["b"].origin == f"{path}:3"
    assert root.value["b"].value["c"].origin == f"{path}:4"
    assert [item.origin for item in root.value["b"].value["c"].value] == [f"{path}:5", f"{path}:6"]


def test_keys_are_text_as_written(tmp_path: Path) -> None:
    values, problems = read(tmp_path, "0: a\non: b\n1e5: c\n")
    assert problems == []
    assert values == {"0": "a", "on": "b", "1e5": "c"}


@pytest.mark.parametrize("text", ["", "\n\n", "# only a comment\n", "---\n", "null\n", "\ufeff"])
def test_a_file_without_fields_is_an_empty_mapping(tmp_path: Path, text: str) -> None:
    assert read(tmp_path, text) == ({}, [])


def test_a_byte_order_mark_is_no_part_of_the_first_key(tmp_path: Path) -> None:
    assert read(tmp_path, "\ufeffa: 1\n") == ({"a": 1}, [])


def test_anchors_and_merges_are_resolved_and_keep_their_lines(tmp_path: Path) -> None:
    path = tmp_path / "train.yaml"
    path.write_text("a: &base\n  x: 1\n  y: 2\nb:\n  <<: *base\n  y: 3\nc: *base\n", encoding="utf-8")
    root, problems = read_file(path)
    assert problems == []
    assert root.plain() == {"a": {"x": 1, "y": 2}, "b": {"x": 1, "y": 3}, "c": {"x": 1, "y": 2}}
    assert root.value["b"].value["x"].origin == f"{path}:2"
    assert root.value["b"].value["y"].origin == f"{path}:6"
    assert root.value["c"].origin == f"{path}:7"


@pytest.mark.parametrize(
    ("text", "line", "words"),
    [
        ("a: 1\nb: 2\na: 3\n", 3, "duplicate key 'a'"),
        ("b:\n  c: 1\n  'c': 2\n", 3, "duplicate key 'c'"),
        ("- a\n- b\n", 1, "found: a list"),
        ("\njust words\n", 2, "found: a single value"),
        ("a: 1\nb: [1, 2\nc: 3\n", 3, "not YAML"),
        ("a:\n\t- 1\n", 2, "not YAML"),
        ("a: 1\n--- \nb: 2\n", 2, "not YAML"),
        ("a: *nowhere\n", 1, "undefined alias"),
        ("a: 1\nb: \x01\n", 2, "U+0001"),
        ("a: 1\nb: !!python/object/apply:os.system [id]\n", 2, "!!python/object/apply:os.system"),
        ("a: !!python/name:os.system\n", 1, "!!python/name:os.system"),
        ("a: !secret x\n", 1, "!secret"),
        ("a: !!binary aGk=\n", 1, "!!binary"),
        ("a: !!set {x, y}\n", 1, "!!set"),
        ("a: 1\n? [x, y]\n: 2\n", 2, "a key that is not text"),
        ("a: 1\nb: !!int ten\n", 2, "does not fit its tag !!int"),
        ("a: !!bool maybe\n", 1, "does not fit its tag !!bool"),
        ('a: "\\ud800"\n', 1, "surrogate"),
        ("a: 1\nb: &b\n  c: *b\n", 2, "an alias inside its own anchor"),
        ("a: " + "[" * (MAX_DEPTH + 1) + "]" * (MAX_DEPTH + 1), 1, "nested too deeply"),
        ("a: " + "[" * 5000, 1, "nested too deeply"),
    ],
)
def test_a_bad_file_is_refused_with_its_line(tmp_path: Path, text: str, line: int, words: str) -> None:
    _, problems = read(tmp_path, text)
    assert [problem.origin for problem in problems] == [f"{tmp_path / 'train.yaml'}:{line}"]
    assert words in problems[0].message


def test_a_duplicate_key_names_the_first_place(tmp_path: Path) -> None:
    _, problems = read(tmp_path, "a: 1\nb: 2\na: 3\n")
    assert f"{tmp_path / 'train.yaml'}:1" in problems[0].message


def test_a_refused_tag_runs_no_code(tmp_path: Path) -> None:
    witness = tmp_path / "witness"
    read(tmp_path, f"a: !!python/object/apply:os.mkdir ['{witness}']\n")
    assert not witness.exists()


def test_all_structural_mistakes_of_a_file_are_listed(tmp_path: Path) -> None:
    _, problems = read(tmp_path, "a: 1\na: 2\nb: !secret x\nc: !!int x\n")
    assert [problem.origin.rpartition(":")[2] for problem in problems] == ["2", "3", "4"]


def test_a_file_that_is_not_utf8_is_refused_with_its_line(tmp_path: Path) -> None:
    path = tmp_path / "train.yaml"
    path.write_bytes(b"a: 1\nb: 2\nc: \xff\n")
    _, problems = read_file(path)
    assert [str(problem) for problem in problems] == [
        f"{path}:3: the file is not UTF-8; found: byte 0xff; what to do: save the file as UTF-8"
    ]


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    path = tmp_path / "missing.yaml"
    _, problems = read_file(path)
    assert [problem.origin for problem in problems] == [str(path)]
    assert "does not exist" in problems[0].message


def test_a_directory_is_named(tmp_path: Path) -> None:
    _, problems = read_file(tmp_path)
    assert [problem.origin for problem in problems] == [str(tmp_path)]
    assert "directory" in problems[0].message


def test_a_file_that_cannot_be_read_is_named(tmp_path: Path) -> None:
    # A link to itself can't be read by root either, unlike a file without permissions.
    path = tmp_path / "loop.yaml"
    path.symlink_to(path)
    _, problems = read_file(path)
    assert [problem.origin for problem in problems] == [str(path)]
    assert "can't be read" in problems[0].message
    _, problems = read_file("bad\0name.yaml")
    assert "can't be read" in problems[0].message


@pytest.mark.parametrize("merge", [False, True])
def test_a_few_lines_that_expand_to_billions_of_nodes_are_refused_at_once(tmp_path: Path, merge: bool) -> None:
    # Every level names the one before nine times: nine to the twelfth nodes.
    lines = ["a0: &a0 {k: v}"]
    for level in range(1, 13):
        below = f"a{level - 1}"
        inside = ", ".join(f"k{i}: {{<<: *{below}}}" if merge else f"k{i}: *{below}" for i in range(9))
        lines.append(f"a{level}: &a{level} {{{inside}}}")
    path = tmp_path / "train.yaml"
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")
    started = time.process_time()
    with pytest.raises(ConfigError, match="expand to too many values"):
        load_config(path)
    assert time.process_time() - started < 5.0
