"""The configuration reference has every field of the schema."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any

import pytest

from hyper_resume import cli
from hyper_resume.config import RunConfig
from hyper_resume.config.reference import config_reference, reference_markdown, reference_text


def _leaves(block: Any, above: str = "") -> Iterator[tuple[str, Any]]:
    """Dotted path and default of every field that is no block, read from the dataclasses themselves."""
    for field in dataclasses.fields(block):
        value = getattr(block, field.name)
        path = f"{above}{field.name}"
        if dataclasses.is_dataclass(value):
            yield from _leaves(value, f"{path}.")
        else:
            yield path, value


FIELDS = dict(_leaves(RunConfig()))


def test_every_field_has_a_type_and_one_line_of_meaning() -> None:
    found = {field.path: field for block in config_reference() for field in block.fields}
    assert set(found) == set(FIELDS)
    assert len(found) > 60
    for field in found.values():
        assert field.type
        assert field.meaning.endswith(".")
        assert "\n" not in field.meaning
        assert len(field.meaning) <= 110


def test_types_ranges_and_defaults_are_those_of_the_schema() -> None:
    found = {field.path: (field.type, field.default) for block in config_reference() for field in block.fields}
    assert found["checkpoint.save_steps"] == ("a whole number; at least 0", "0")
    assert found["checkpoint.restore_from"] == (
        "text or null; a path of a mounted file system, without a scheme",
        "null",
    )
    assert found["checkpoint.on_mismatch"] == ("one of warn, error", "warn")
    assert found["optimizer.betas"][1] == "[0.9, 0.95]"
    assert found["model.overrides"] == ("a mapping, {key: value}", "{}")
    assert found["training.deterministic"] == ("true or false", "true")


def test_both_forms_name_every_field_once() -> None:
    text, markdown = reference_text().splitlines(), reference_markdown().splitlines()
    for path in FIELDS:
        assert text.count(f"  {path}") == 1
        assert len([line for line in markdown if line.startswith(f"| `{path}` | ")]) == 1
    assert [line for line in markdown if line.startswith("## ")] == [
        f"## `{block}`"
        for block in (
            *("model", "model.lora", "data", "optimizer", "lr_scheduler", "accelerator", "training", "checkpoint"),
            "trajectory",
        )
    ]


def test_the_command_prints_it(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        cli.main(["train", "--help-config"])
    assert caught.value.code == 0
    assert capsys.readouterr().out == reference_text() + "\n"
