"""The rules of the YAML loader for blocks that are built in Python: ``CheckpointingConfig(save_steps="ten")`` is refused."""

from __future__ import annotations

import dataclasses
from typing import Any

from hyper_resume.config.annotations import block_path, child_hint, is_block, without_null
from hyper_resume.config.load import check_tree, is_loading, loading, refusal
from hyper_resume.config.schema import CONSTRUCTION_CHECKS
from hyper_resume.config.yaml_source import Located, NotYaml


def check_construction(block: Any) -> None:
    """Check a new block as the loader checks the same values in a file.

    Raises:
        ConfigError: any field has a wrong type or value; every mistake at once.
    """
    if is_loading():
        return
    kind: type = type(block)
    name = kind.__name__
    root = _located(block, kind, name)
    for key in reversed(block_path(kind)):
        root = Located(value={key: root}, origin=name)
    with loading():
        _, problems = check_tree(root)
    if problems:
        raise refusal(name, (problem.message for problem in problems))


def _located(value: Any, hint: Any, origin: str) -> Located:
    """Return the tree that a YAML file with these values would give; what no file can write is a :class:`NotYaml`."""
    inner = without_null(hint)
    children: Any
    if hint is Any:
        # Nothing is asked of it.
        return Located(value=None, origin=origin)
    if is_block(inner) and isinstance(value, inner):
        children = {field.name: getattr(value, field.name) for field in dataclasses.fields(value)}
    elif isinstance(value, dict) and not is_block(inner) and all(isinstance(key, str) for key in value):
        children = value
    elif isinstance(value, (list, tuple)):
        items = [_located(item, child_hint(hint, index), origin) for index, item in enumerate(value)]
        return Located(value=items, origin=origin)
    elif value is None or isinstance(value, (int, float, str)):
        return Located(value=value, origin=origin)
    else:
        return Located(value=NotYaml(value=value), origin=origin)
    nodes = {key: _located(child, child_hint(hint, key), origin) for key, child in children.items()}
    return Located(value=nodes, origin=origin)


CONSTRUCTION_CHECKS.append(check_construction)
