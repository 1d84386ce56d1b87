"""The backend contract, the registry and the constructor by name."""

from __future__ import annotations

from typing import Any

import pytest

from hyper_resume.checkpoint import (
    CHECKPOINTER_REGISTRY,
    CheckpointerBase,
    CheckpointingConfig,
    DistributedCheckpointer,
    build_checkpointer,
)


class InMemory(CheckpointerBase):
    """The least a backend must bring."""

    def save(self, path: str, state: dict[str, Any], *, global_step: int, save_async: bool = False) -> None:
        return

    def load(
        self,
        path: str,
        state: dict[str, Any],
        *,
        strict_model: bool = True,
        extra_state_skeleton: dict[str, Any] | None = None,
    ) -> dict[str, Any]:
        return {}


def test_the_base_class_is_abstract() -> None:
    with pytest.raises(TypeError, match="abstract"):
        CheckpointerBase()  # type: ignore[abstract]


@pytest.mark.parametrize("missing", ["save", "load"])
def test_a_backend_must_define_save_and_load(missing: str) -> None:
    methods = {name: getattr(InMemory, name) for name in ("save", "load") if name != missing}
    incomplete = type("Incomplete", (CheckpointerBase,), methods)
    with pytest.raises(TypeError, match=missing):
        incomplete()


def test_the_defaults_of_a_backend_do_nothing_or_say_that_they_cant() -> None:
    backend = InMemory()
    backend.maybe_wait_for_async_save()
    assert backend.describe("anywhere") is None
    with pytest.raises(NotImplementedError, match="InMemory"):
        backend.find_latest_checkpoint("anywhere")


def test_dcp_is_the_registered_and_the_default_backend() -> None:
    assert CHECKPOINTER_REGISTRY.names() == ["dcp"]
    assert CHECKPOINTER_REGISTRY.get("dcp") is DistributedCheckpointer
    assert isinstance(build_checkpointer(), DistributedCheckpointer)
    assert isinstance(build_checkpointer(ckpt_manager="dcp", extra_state_per_rank=False), DistributedCheckpointer)


def test_an_unknown_name_lists_the_known_ones() -> None:
    with pytest.raises(KeyError, match=r"no checkpointer named 'dpc'; registered: dcp"):
        build_checkpointer("dpc")


def test_an_option_that_the_backend_does_not_have_is_refused() -> None:
    with pytest.raises(TypeError, match="extra_state_per_node"):
        build_checkpointer("dcp", extra_state_per_node=True)


def test_a_name_belongs_to_one_class() -> None:
    registry = type(CHECKPOINTER_REGISTRY)()
    registry.register("memory")(InMemory)
    registry.register("memory")(InMemory)
    with pytest.raises(ValueError, match="'memory' is taken by InMemory"):
        registry.register("memory")(DistributedCheckpointer)


def test_the_configuration_class_is_exported_with_its_defaults() -> None:
    config = CheckpointingConfig()
    assert (config.save_ckpt, config.save_steps, config.save_epochs, config.restore_from) == (True, 0, 1, None)
