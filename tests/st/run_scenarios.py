"""The system tests with the stand-in as their trainer; ``DEFECT`` in the environment breaks it.

``python -m tests.st.run_scenarios run S1 ...`` is ``python -m st run S1 ...``, ``pytest -p tests.st.run_scenarios
st/test_scenarios.py`` is ``pytest st/test_scenarios.py``: with the scenarios and platforms next to this file.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

from conformance.running.adapter import ADAPTERS
from st import running
from st.__main__ import main
from tests.conformance.stand_in import FOR_TORCHRUN, MODULE, StandInAdapter

HERE = Path(__file__).parent


class Trainer(StandInAdapter):
    """The stand-in as both launchers can start it."""

    def __init__(self) -> None:
        super().__init__(os.environ.get("DEFECT", ""), argv=FOR_TORCHRUN, preload=MODULE)


def use_stand_in() -> None:
    """Replace the trainer, scenarios and platforms in this process."""
    ADAPTERS["hyper_resume"] = f"{__package__}.run_scenarios:Trainer"
    running.SCENARIOS = HERE / "scenarios"
    running.PLATFORMS = HERE / "platforms.yaml"


use_stand_in()

if __name__ == "__main__":
    sys.exit(main())
