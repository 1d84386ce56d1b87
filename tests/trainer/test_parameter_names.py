"""Names of parameters do not depend on data parallel wrappers, nor on the order in which an optimizer has them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.parallel import DataParallel, DistributedDataParallel

from hyper_resume.errors import CheckpointMismatchError
from hyper_resume.state import names as naming_module
from hyper_resume.state.certificate import Certificate, read_certificate
from hyper_resume.state.model import collect_model
from hyper_resume.state.names import canonical_name, parameter_names
from hyper_resume.trainer.callbacks import CheckpointerCallback
from hyper_resume.trainer.run.fingerprint import RunFingerprint
from tests.ranks import run_ranks
from tests.trainer.custom_trainer import make_custom_trainer, saved_entries, train_custom_trainer

SAVED, STEPS = 4, 8
OUTSIDE_NAMES = {"outside/critics.0.weight", "outside/critics.1.weight", "outside/scale"}


def certificate_of(root: Path) -> Certificate:
    (file,) = (root / "certificates").iterdir()
    return read_certificate(file)


# ---- data parallel wrappers -----------------------------------------------------------------------------------------


class OwnModule(nn.Module):
    """Names a submodule ``module`` itself."""

    def __init__(self) -> None:
        super().__init__()
        self.module = nn.Linear(2, 2)


def test_only_the_part_that_a_data_parallel_wrapper_adds_is_removed() -> None:
    own = OwnModule()
    wrapped = DataParallel(nn.Sequential(DataParallel(OwnModule()), own))
    assert set(parameter_names(own).values()) == {"module.weight", "module.bias"}
    assert set(parameter_names(wrapped).values()) == {
        f"{place}.module.{kind}" for place in (0, 1) for kind in ("weight", "bias")
    }
    assert set(collect_model(wrapped)) == set(parameter_names(wrapped).values())


def wrapped_trainer(root: Path, wrap: Any, **checkpoint: Any) -> Any:
    trainer = make_custom_trainer(root, save_epochs=0, on_mismatch="error", **checkpoint)
    trainer.model = wrap(trainer.model)
    return trainer


def rows(records: list[Any]) -> list[tuple[float, str]]:
    return [(record.loss, record.live.moments) for record in records]


def _resume(root: Path, wrap_at_save: Any, wrap_now: Any) -> tuple[bool, bool]:
    reference = rows(train_custom_trainer(wrapped_trainer(root / "whole", wrap_now), STEPS))
    train_custom_trainer(wrapped_trainer(root / "saved", wrap_at_save), SAVED)
    resumed = rows(train_custom_trainer(wrapped_trainer(root / "saved", wrap_now, restore_from="LATEST"), STEPS))
    return resumed == reference[SAVED:], certificate_of(root / "saved").is_exact


def _unwrapped(model: nn.Module) -> nn.Module:
    return model


@pytest.mark.parametrize(("at_save", "now"), [(DataParallel, _unwrapped), (_unwrapped, DataParallel)])
def test_a_run_continues_with_and_without_data_parallel(tmp_path: Path, at_save: Any, now: Any) -> None:
    assert _resume(tmp_path, at_save, now) == (True, True)


def _both_ways(root: str) -> list[tuple[bool, bool]]:
    pairs = [(DistributedDataParallel, _unwrapped), (_unwrapped, DistributedDataParallel)]
    return [_resume(Path(root) / str(place), *pair) for place, pair in enumerate(pairs)]


def test_a_run_continues_with_and_without_ddp(tmp_path: Path) -> None:
    assert run_ranks(_both_ways, 1, str(tmp_path)) == [[(True, True), (True, True)]]


@pytest.mark.parametrize("now", [DataParallel, _unwrapped])
def test_a_checkpoint_that_an_earlier_version_wrote_below_the_wrapper_is_read(
    tmp_path: Path, now: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    reference = rows(train_custom_trainer(wrapped_trainer(tmp_path / "whole", now), STEPS))
    with monkeypatch.context() as earlier:
        earlier.setattr(naming_module, "_DATA_PARALLEL", ())
        # It did not describe its run.
        earlier.setattr(RunFingerprint, "description", {})
        train_custom_trainer(wrapped_trainer(tmp_path / "saved", DataParallel), SAVED)
    entries = saved_entries(tmp_path / "saved" / f"global_step_{SAVED}")
    assert "model.module.hidden.weight" in entries
    assert "optimizer.0.state.module.hidden.weight.exp_avg" in entries
    resumed = rows(train_custom_trainer(wrapped_trainer(tmp_path / "saved", now, restore_from="LATEST"), STEPS))
    assert resumed == reference[SAVED:]
    assert certificate_of(tmp_path / "saved").is_exact


def test_where_the_part_is_kept_the_checkpoint_does_not_fit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    train_custom_trainer(wrapped_trainer(tmp_path, _unwrapped), SAVED)
    monkeypatch.setattr(naming_module, "_DATA_PARALLEL", ())
    trainer = wrapped_trainer(tmp_path, DataParallel, restore_from="LATEST")
    with pytest.raises(CheckpointMismatchError, match="belongs to none of this optimizer's parameters"):
        CheckpointerCallback(trainer).on_train_begin()


# ---- parameters outside the model -----------------------------------------------------------------------------------


def with_critics(root: Path, *, turned: bool = False, hidden: bool = False, **checkpoint: Any) -> Any:
    """Three parameters outside the model, two of one shape; their gradients depend on their values only."""
    trainer = make_custom_trainer(root, save_epochs=0, **{"on_mismatch": "error", **checkpoint})
    torch.manual_seed(11)
    critics = [nn.Linear(3, 1, bias=False), nn.Linear(3, 1, bias=False)]
    scale = nn.Parameter(torch.full((1, 3), 0.5))
    outside = [critics[0].weight, critics[1].weight, scale]
    if not hidden:
        trainer.critics, trainer.scale = critics, scale
    group = list(reversed(outside)) if turned else outside
    trainer.optimizer.add_param_group({"params": group, "lr": 0.05})
    trainer.lr_scheduler = []
    trainer.outside = lambda: [parameter.detach().clone() for parameter in outside]
    for parameter, factor in zip(outside, (1.0, -2.0, 3.0), strict=True):
        trainer.model.register_forward_pre_hook(lambda *_, p=parameter, f=factor: setattr(p, "grad", p.detach() * f))
    # They are trained, and saved as any other object's state.
    trainer.saved = SavedParameters(outside)
    return trainer


class SavedParameters:
    """Brings the parameters themselves back; their moments are the optimizer's."""

    def __init__(self, parameters: list[nn.Parameter]) -> None:
        self._each = lambda: parameters

    def state_dict(self) -> dict[str, Any]:
        return {str(place): parameter.detach() for place, parameter in enumerate(self._each())}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        for place, parameter in enumerate(self._each()):
            parameter.data.copy_(state[str(place)])


def final(trainer: Any, until_step: int = STEPS) -> list[torch.Tensor]:
    train_custom_trainer(trainer, until_step)
    values: list[torch.Tensor] = trainer.outside()
    return values


def same(left: list[torch.Tensor], right: list[torch.Tensor]) -> bool:
    return all(torch.equal(a, b) for a, b in zip(left, right, strict=True))


@pytest.mark.parametrize("turned", [False, True])
def test_moments_of_parameters_outside_the_model_follow_their_name(tmp_path: Path, turned: bool) -> None:
    reference = final(with_critics(tmp_path / "whole"))
    final(with_critics(tmp_path / "saved"), SAVED)
    entries = saved_entries(tmp_path / "saved" / f"global_step_{SAVED}")
    stored = {name for name in entries if name.startswith("optimizer.0.state.outside/")}
    assert {name.removeprefix("optimizer.0.state.").rpartition(".")[0] for name in stored} == OUTSIDE_NAMES
    assert same(final(with_critics(tmp_path / "saved", turned=turned, restore_from="LATEST")), reference)
    assert certificate_of(tmp_path / "saved").is_exact


def test_without_a_name_a_changed_order_swaps_moments_and_is_refused(tmp_path: Path) -> None:
    reference = final(with_critics(tmp_path / "whole", hidden=True))
    final(with_critics(tmp_path / "saved", hidden=True), SAVED)
    with pytest.raises(
        CheckpointMismatchError, match="optimizer: 3 parameters of the optimizer belong to no attribute"
    ):
        final(with_critics(tmp_path / "saved", hidden=True, turned=True, restore_from="LATEST"))
    accepted = {"restore_from": "LATEST", "on_mismatch": "warn"}
    assert not same(final(with_critics(tmp_path / "saved", hidden=True, turned=True, **accepted)), reference)


def test_a_checkpoint_that_an_earlier_version_wrote_by_position_is_read_and_degraded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    reference = final(with_critics(tmp_path / "whole"))
    with monkeypatch.context() as earlier:
        earlier.setattr("hyper_resume.trainer.payload.outside_names", lambda owners, known: {})
        final(with_critics(tmp_path / "saved"), SAVED)
    assert "optimizer.0.state.unnamed/1/0.exp_avg" in saved_entries(tmp_path / "saved" / f"global_step_{SAVED}")
    with pytest.raises(
        CheckpointMismatchError, match="optimizer: the checkpoint names parameters outside the model by"
    ):
        final(with_critics(tmp_path / "saved", restore_from="LATEST"))
    accepted = {"restore_from": "LATEST", "on_mismatch": "warn"}
    assert same(final(with_critics(tmp_path / "saved", **accepted)), reference)


def test_the_string_function_alone_keeps_module() -> None:
    assert canonical_name("module._orig_mod.weight") == "module.weight"
