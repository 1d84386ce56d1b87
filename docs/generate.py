"""Write the generated parts of the pages: the configuration reference from the schema, the rooms from the layer contracts.

``python docs/generate.py`` rewrites them; ``--check`` changes nothing and exits with 1 when a page is out of date. A generated
part stands between ``<!-- generated: NAME -->`` and ``<!-- end of NAME -->``.
"""

from __future__ import annotations

import argparse
import ast
import dataclasses
import inspect
import re
import sys
import textwrap
import tomllib
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, get_type_hints

from hyper_resume.config import RunConfig

DOCS = Path(__file__).parent
ROOT = DOCS.parent
_PART = re.compile(r"(<!-- generated: (?P<name>[a-z-]+) -->\n).*?(<!-- end of (?P=name) -->)", re.DOTALL)
_LONGEST_LINE = 110


def main(words: list[str] | None = None) -> int:
    """Rewrite or check every page that has a generated part."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true", help="change nothing; 1 when a page is out of date")
    is_check = parser.parse_args(words).check
    outdated = [page for page, (now, wanted) in pages().items() if now != wanted]
    for page in outdated:
        print(f"{page.relative_to(ROOT)}: {'out of date: run python docs/generate.py' if is_check else 'written'}")
        if not is_check:
            page.write_text(pages()[page][1], encoding="utf-8")
    return 1 if is_check and outdated else 0


def pages() -> Mapping[Path, tuple[str, str]]:
    """Each page with a generated part: its text as it is, and as it should be."""
    found = {}
    for page in sorted(DOCS.glob("*.md")):
        text = page.read_text(encoding="utf-8")
        wanted = _PART.sub(lambda part: f"{part[1]}\n{PARTS[part['name']]()}\n{part[3]}", text)
        if _PART.search(text):
            found[page] = (text, wanted)
    return found


def configuration() -> str:
    """Every block of the configuration: what its docstring says, and a table of its fields."""
    return "\n".join(_blocks(RunConfig, ""))


def _blocks(kind: type[Any], path: str) -> Iterator[str]:
    hints = get_type_hints(kind)
    blocks = [field for field in dataclasses.fields(kind) if dataclasses.is_dataclass(hints[field.name])]
    if path:
        yield f"## {path}\n\n{_markdown(inspect.getdoc(kind) or '')}\n"
        yield "| field | type | default |\n|---|---|---|"
        annotations = inspect.get_annotations(kind)
        for field in dataclasses.fields(kind):
            if field not in blocks:
                words = str(annotations[field.name]).replace("|", "\\|").replace('"', "")
                yield f"| `{path}.{field.name}` | {words} | `{_default(field)}` |"
        yield ""
    for field in blocks:
        yield from _blocks(hints[field.name], f"{path}.{field.name}".lstrip("."))


def _default(field: dataclasses.Field[Any]) -> str:
    value = field.default if field.default is not dataclasses.MISSING else field.default_factory()  # type: ignore[misc]
    words = {True: "true", False: "false", None: "null"}
    if isinstance(value, bool) or value is None:
        return words[value]
    return f"[{', '.join(map(str, value))}]" if isinstance(value, tuple) else str(value)


def _markdown(docstring: str) -> str:
    return re.sub(r"``(.+?)``", r"`\1`", docstring)


def rooms() -> str:
    """One drawing for each layer contract of pyproject.toml. A module may import what stands below it, never what stands above."""
    contracts = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["tool"]["importlinter"]["contracts"]
    drawings = []
    for contract in contracts:
        if contract["type"] != "layers":
            continue
        for container in contract.get("containers", [""]):
            layers = [
                [f"{container}.{name}".lstrip(".") for name in re.split(r"\s*[|:]\s*", layer.strip("()"))]
                for layer in contract["layers"]
            ]
            drawings.append(f"```text\n{_drawing(layers)}\n```\n")
    return "\n".join(drawings)


def _drawing(layers: list[list[str]]) -> str:
    package = layers[0][0].rpartition(".")[0]
    names = [name.rpartition(".")[2] for layer in layers for name in layer]
    width = max(map(len, names))
    lines = [f"{package}: {_summary(package)}"]
    for layer in layers:
        for place, name in enumerate(layer):
            edge = "├─" if place == 0 else "│ "
            summary = textwrap.shorten(_summary(name), _LONGEST_LINE - width, placeholder=" ...")
            lines.append(f"{edge} {name.rpartition('.')[2]:{width}}  {summary}")
    return "\n".join(lines)


def _summary(module: str) -> str:
    """The first line of a module's docstring."""
    path = ROOT / module.replace(".", "/")
    file = path / "__init__.py" if path.is_dir() else path.with_suffix(".py")
    docstring = ast.get_docstring(ast.parse(file.read_text(encoding="utf-8"))) or ""
    return docstring.partition("\n")[0].replace("``", "")


PARTS: Mapping[str, Callable[[], str]] = {"configuration": configuration, "rooms": rooms}

if __name__ == "__main__":
    sys.exit(main())
