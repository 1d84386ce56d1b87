"""Plain data: dataclasses to and from it, YAML with line numbers, closed lists of names."""
