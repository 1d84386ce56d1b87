"""Makes the storage backend that ``checkpoint.manager`` names."""

from __future__ import annotations

import inspect
import logging
from collections.abc import Callable, Mapping
from typing import Any

from hyper_resume.checkpoint.base import CHECKPOINTER_REGISTRY, CheckpointerBase
from hyper_resume.checkpoint.history.retention import Retention
from hyper_resume.config.schema import CheckpointingConfig
from hyper_resume.errors import ConfigError, describe

logger = logging.getLogger(__name__)

# A keyword of the backend's constructor -> the fields that it carries.
_FIELDS: Mapping[str, tuple[str, ...]] = {
    "extra_state_per_rank": ("save_extra_state_per_rank",),
    "verify": ("verify",),
    "async_mode": ("async_mode",),
    "retention": ("keep_last", "keep_every", "keep_best", "keep_best_metric", "keep_best_mode"),
}


def build_backend(config: CheckpointingConfig, build: Callable[..., CheckpointerBase]) -> CheckpointerBase:
    """Make the backend with those options that its constructor takes; a warning names fields that then have no effect.

    Args:
        config: names the backend, and holds its options.
        build: makes a backend from its name and options (``build_checkpointer``).

    Raises:
        ConfigError: there is no backend of this name, its package can't be imported, or it is no storage backend.
    """
    options: dict[str, Any] = {
        "extra_state_per_rank": config.save_extra_state_per_rank,
        "verify": config.verify,
        "async_mode": config.async_mode,
        "retention": Retention(
            keep_last=config.keep_last,
            keep_every=config.keep_every,
            keep_best=config.keep_best,
            best_metric=config.keep_best_metric,
            best_mode=config.keep_best_mode,
        ),
    }
    taken = _taken_options(_find(config.manager))
    default = CheckpointingConfig()
    without_effect = [
        f"checkpoint.{field}"
        for option in options
        if option not in taken
        for field in _FIELDS[option]
        if getattr(config, field) != getattr(default, field)
    ]
    if without_effect:
        logger.warning("the storage backend %r has no %s", config.manager, ", ".join(without_effect))
    return build(ckpt_manager=config.manager, **{name: value for name, value in options.items() if name in taken})


def _find(name: str) -> type[CheckpointerBase]:
    try:
        found = CHECKPOINTER_REGISTRY.get(name)
    except KeyError as error:
        raise _refusal("there is no storage backend of this name", name, str(error.args[0])) from error
    except Exception as error:
        raise _refusal("the storage backend can't be imported", name, f"{type(error).__name__}: {error}") from error
    if not (isinstance(found, type) and issubclass(found, CheckpointerBase)):
        raise _refusal("this is no storage backend", name, f"{found!r}, which does not derive from CheckpointerBase")
    return found


def _refusal(what: str, name: str, found: str) -> ConfigError:
    return ConfigError(
        describe(
            what,
            where=f"checkpoint.manager={name}",
            expected=f"one of {', '.join(CHECKPOINTER_REGISTRY.names())}",
            found=found,
            do="correct the name, import the module that registers it, or install the package that offers it",
        )
    )


def _taken_options(backend: type[CheckpointerBase]) -> set[str]:
    parameters = inspect.signature(backend).parameters.values()
    if any(parameter.kind is inspect.Parameter.VAR_KEYWORD for parameter in parameters):
        return set(_FIELDS)
    return {parameter.name for parameter in parameters}
