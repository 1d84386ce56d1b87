"""Write the generated parts of the pages: the configuration reference from the schema, the rooms from the layer contracts.

``python docs/generate.py`` rewrites them; ``--check`` changes nothing and exits with 1 when a page is out of date. A generated
part stands between ``<!-- generated: NAME -->`` and ``<!-- end of NAME -->``.
"""

from __future__ import annotations

import argparse
import ast
import re
import sys
import textwrap
import tomllib
from collections.abc import Callable, Mapping
from pathlib import Path

from hyper_resume.config.reference import reference_markdown

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
        wanted = _PART.sub(lambda part: f"{part[1]}\n{PARTS[part['name']]().rstrip()}\n\n{part[3]}", text)
        if _PART.search(text):
            found[page] = (text, wanted)
    return found


def rooms() -> str:
    """One drawing for each layer contract of pyproject.toml; a module may import what stands below it, never what is above."""
    contracts = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["tool"]["importlinter"][
        "contracts"
    ]
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


PARTS: Mapping[str, Callable[[], str]] = {"configuration": reference_markdown, "rooms": rooms}

if __name__ == "__main__":
    sys.exit(main())
