"""``python -m reports RESULTS_DIR [-o FILE]``: write the page of a proof's results folder."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from conformance.record import RecordError
from reports.resume_page import build_page


def main(arguments: list[str] | None = None) -> int:
    """Run the command line; 0 when the page is written, 2 when the folder can't be read."""
    parser = argparse.ArgumentParser(prog="python -m reports", description=__doc__, allow_abbrev=False)
    parser.add_argument("results", type=Path, help="a results folder of python -m st prove")
    parser.add_argument("-o", "--output", type=Path, help="default: index.html in the results folder")
    options = parser.parse_args(arguments)
    try:
        page = build_page(options.results)
    except RecordError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    output = options.output or options.results / "index.html"
    output.write_text(page, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
