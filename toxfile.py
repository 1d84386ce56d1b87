"""tox plugin of this checkout: environments that name one ``env_dir`` share it.

tox rebuilds an environment folder whenever another environment used it last, although ours need the same packages: without
this, ``tox -e lint``, ``tox -e demo`` and ``tox -e ut`` would each install torch again.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from tox.plugin import impl
from tox.tox_env.info import Info
from tox.tox_env.python.virtual_env.runner import VirtualEnvRunner
from tox.tox_env.register import ToxEnvRegister


class SharedInfo(Info):
    """What tox remembers of an environment folder, but for the name of the environment that used it."""

    @contextmanager
    def compare(self, value: Any, section: str, sub_section: str | None = None) -> Iterator[tuple[bool, Any | None]]:
        """Compare as tox does, with one name for all environments."""
        if section == "ToxEnv":
            value = {**value, "name": "shared"}
        with super().compare(value, section, sub_section) as result:
            yield result


class SharedVirtualEnvRunner(VirtualEnvRunner):
    """The ordinary runner over a folder that several environments use."""

    @staticmethod
    def id() -> str:
        """Return the name that ``runner =`` takes."""
        return "shared-virtualenv"

    @property
    def cache(self) -> Info:
        """The folder's memory."""
        return SharedInfo(self.env_dir)


@impl
def tox_register_tox_env(register: ToxEnvRegister) -> None:
    """Make the runner known."""
    register.add_run_env(SharedVirtualEnvRunner)
