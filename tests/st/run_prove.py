"""``python -m st`` with the stand-in as its trainer: ``run_prove.py prove PROOF.yaml ...``."""

from __future__ import annotations

import sys
from pathlib import Path

from st.__main__ import main

STAND_IN = (str(Path(__file__).with_name("stand_in.py")),)

if __name__ == "__main__":
    sys.exit(main(program=STAND_IN))
