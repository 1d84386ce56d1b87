"""Remove from texts what must not be published: secrets, and the paths of the machine that made the records."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

# "token" counts at the end of a name only: data.token_noise and max_tokens are no secrets.
_SECRET_NAME = (
    r"[\w.-]*(?:token(?:[_-]?(?:value|key|\d+))?(?![\w-])|secret|passw(?:or)?d|credential"
    r"|api[_-]?key|access[_-]?key|private[_-]?key)[\w.-]*"
)
_SECRET = re.compile(rf"(?i)\b({_SECRET_NAME})(\s*[=:]\s*|\s+)(['\"]?)([^\s'\",;]+)")
_URL_USER = re.compile(r"(\b[a-z][a-z0-9+.-]*://)[^/\s@]+@", re.I)
_SITE_PACKAGES = re.compile(r"(?<![\w.])/[^\s'\":]*?/((?:site|dist)-packages/)")
# An absolute path of some machine. Short made-up ones (/no/such/dir) are part of a case and stay.
_ABSOLUTE = re.compile(r"(?<![\w.…/])/(?:[\w.@+~-]+/){3,}([\w.@+~-]+/[\w.@+~-]+/?|[\w.@+~-]+)?")
_ROOTED = re.compile(r"(?<![\w.…/])/(?:home|root|tmp|Users|mnt|work|workspace|data|private)/([^\s'\",;:()]*)")
HIDDEN = "(hidden)"

# The variables of an environment that are shown; any other one may hold a secret.
_SHOWN = re.compile(
    r"(?:OMP|MKL|OPENBLAS|NCCL|HCCL|GLOO|TORCH|PYTORCH|CUDA|CUBLAS|ASCEND|HF|TRANSFORMERS|TOKENIZERS|PYTHON)_?\w*"
    r"|RANK|LOCAL_RANK|WORLD_SIZE|LC_ALL|LANG|TZ"
)


def redact(text: str) -> str:
    """``text`` without secrets and without paths of a machine; the names of files within the run are kept."""
    text = _URL_USER.sub(r"\1", text)
    text = _SECRET.sub(
        lambda found: f"{found[1]}{found[2]}{found[3]}{HIDDEN}" if "=" in found[2] or ":" in found[2] else found[0],
        text,
    )
    text = _SITE_PACKAGES.sub(r"\1", text)
    text = _ROOTED.sub(lambda found: "…/" + _tail(found[1]), text)
    return _ABSOLUTE.sub(lambda found: "…/" + (found[1] or ""), text)


def redact_command(words: Sequence[str]) -> str:
    """A command line, redacted; the value after an option with the name of a secret is hidden too."""
    shown: list[str] = []
    for word in words:
        hidden = bool(shown) and re.fullmatch(rf"(?i)--?{_SECRET_NAME}", shown[-1]) is not None
        shown.append(HIDDEN if hidden else redact(word))
    return " ".join(shown)


def redact_environment(environment: Mapping[str, str]) -> dict[str, str]:
    """The variables that matter and are known to be harmless, by name."""
    shown = {name: redact(value) for name, value in sorted(environment.items()) if _SHOWN.fullmatch(name)}
    return {name: HIDDEN if re.fullmatch(rf"(?i){_SECRET_NAME}", name) else value for name, value in shown.items()}


def _tail(path: str) -> str:
    return "/".join(path.rstrip("/").split("/")[-2:])
