"""Configuration of the documentation site: ``tox -e docs`` builds it with Sphinx, without a network."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path
from typing import Any

from sphinx.application import Sphinx
from sphinx.errors import SphinxError

from hyper_resume import __version__

project = "hyper_resume"
version = release = __version__
extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon"]
exclude_patterns = ["ci"]

html_theme = "furo"
html_title = f"hyper_resume {release}"
html_copy_source = False
html_show_copyright = False
html_show_sphinx = False

myst_heading_anchors = 3
autodoc_member_order = "bysource"
autodoc_typehints = "description"
autodoc_typehints_description_target = "documented"

# A page may link to another site. What a browser fetches by itself when it opens a page must be part of the site.
_FETCHED = re.compile(
    r"<(?:script|img|iframe|link|source)\b[^>]*?\b(?:src|href)=[\"'](?:https?:)?//[^\"']*", re.IGNORECASE
)

_SOURCE = tomllib.loads((Path(__file__).parents[1] / "pyproject.toml").read_text(encoding="utf-8"))["project"]["urls"][
    "Source"
]


def _link_to_source(app: Sphinx, page: str, content: list[str]) -> None:
    """A link from a page to a file outside of docs/ leads to the source on the project's own site."""
    content[0] = content[0].replace("](../", f"]({_SOURCE}")


def _refuse_fetches(app: Sphinx, exception: Exception | None) -> None:
    if exception is not None or app.builder.format != "html":
        return
    for page in sorted(Path(app.outdir).rglob("*.html")):
        found = _FETCHED.search(page.read_text(encoding="utf-8"))
        if found is not None:
            raise SphinxError(f"{page.name} fetches from outside the site: {found.group()}")


def setup(app: Sphinx) -> dict[str, Any]:
    """Treat links to the source, and check the finished site."""
    app.connect("source-read", _link_to_source)
    app.connect("build-finished", _refuse_fetches)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
