"""The part of JSON Schema that the shipped schema uses, written from the standard and not from the code that made it."""

from __future__ import annotations

from typing import Any

_TYPES: dict[str, tuple[type, ...]] = {
    "object": (dict,),
    "array": (list,),
    "string": (str,),
    "number": (int, float),
    "integer": (int,),
    "boolean": (bool,),
    "null": (type(None),),
}
_KNOWN = {
    "$schema", "title", "description", "$defs", "$ref", "anyOf", "enum", "const", "type", "required", "properties",
    "additionalProperties", "items",
}  # fmt: skip


def complaints(instance: Any, schema: dict[str, Any], root: dict[str, Any], where: str = "$") -> list[str]:
    """What is wrong with ``instance``; an empty list where it is valid."""
    unknown = set(schema) - _KNOWN
    assert not unknown, f"this validator does not know {unknown}"
    found: list[str] = []
    if "$ref" in schema:
        name = schema["$ref"].removeprefix("#/$defs/")
        found += complaints(instance, root["$defs"][name], root, where)
    if "anyOf" in schema and all(complaints(instance, option, root, where) for option in schema["anyOf"]):
        found.append(f"{where}: fits no option")
    if "enum" in schema and instance not in schema["enum"]:
        found.append(f"{where}: {instance!r} is none of {schema['enum']}")
    if "const" in schema and instance != schema["const"]:
        found.append(f"{where}: {instance!r} is not {schema['const']!r}")
    if "type" in schema:
        of_type = isinstance(instance, _TYPES[schema["type"]])
        if not of_type or (isinstance(instance, bool) and schema["type"] != "boolean"):
            return [*found, f"{where}: {instance!r} is no {schema['type']}"]
    if isinstance(instance, dict):
        found += [f"{where}: {name} is missing" for name in schema.get("required", ()) if name not in instance]
        found += _of_object(instance, schema, root, where)
    if isinstance(instance, list) and "items" in schema:
        for place, item in enumerate(instance):
            found += complaints(item, schema["items"], root, f"{where}[{place}]")
    return found


def _of_object(instance: dict[str, Any], schema: dict[str, Any], root: dict[str, Any], where: str) -> list[str]:
    found: list[str] = []
    properties, others = schema.get("properties", {}), schema.get("additionalProperties", True)
    for name, value in instance.items():
        if name in properties:
            found += complaints(value, properties[name], root, f"{where}.{name}")
        elif others is False:
            found.append(f"{where}: {name} is not known")
        elif isinstance(others, dict):
            found += complaints(value, others, root, f"{where}.{name}")
    return found
