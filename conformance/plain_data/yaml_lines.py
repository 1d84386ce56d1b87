"""A YAML reader whose mappings know the line they start on, and which refuses duplicate keys."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import yaml


class Mapped(dict[str, Any]):
    """A mapping from YAML. ``line`` counts from 1."""

    line: int = 1


class _Loader(yaml.CSafeLoader):
    pass


def _mapping(loader: _Loader, node: yaml.MappingNode) -> Mapped:
    result = Mapped()
    result.line = node.start_mark.line + 1
    for key_node, value_node in node.value:
        key = loader.construct_object(key_node, deep=True)
        if not isinstance(key, str):
            raise yaml.constructor.ConstructorError(None, None, f"key {key!r} is not a string", key_node.start_mark)
        if key in result:
            raise yaml.constructor.ConstructorError(None, None, f"key {key!r} is a duplicate", key_node.start_mark)
        result[key] = loader.construct_object(value_node, deep=True)
    return result


_Loader.add_constructor(yaml.resolver.BaseResolver.DEFAULT_MAPPING_TAG, _mapping)


def load_yaml(path: Path) -> Any:
    """Read one YAML file.

    Raises:
        yaml.YAMLError: it is no YAML, or a mapping has a key twice; the message has the line.
    """
    with path.open(encoding="utf-8") as file:
        return yaml.load(file, Loader=_Loader)
