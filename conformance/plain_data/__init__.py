"""Plain data: dataclasses to and from dicts, YAML with line numbers, registries of functions that YAML may name."""
