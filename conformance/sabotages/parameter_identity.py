"""Defects in the assignment to parameters: optimizer state by name and dtype, weights by name, adapters."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from typing import Any

from conformance.sabotages.saboteur import Saboteur, sabotage

_PAYLOAD = "hyper_resume.trainer.payload"
_RESTORE = "hyper_resume.trainer.restore"
_CALLBACK = "hyper_resume.trainer.callbacks.checkpointer"
_OPTIMIZER = "hyper_resume.state.optimizer"


def _after_optimizers(put: Saboteur, spoil: Callable[[Any, Any], None]) -> None:
    """Call ``spoil(optimizer, its loaded state)`` after each optimizer's restore."""

    def apply(original: Any, optimizers: Any, names: Any, loaded: Any, **how: Any) -> None:
        original(optimizers, names, loaded, **how)
        for index, optimizer in enumerate(optimizers):
            spoil(optimizer, loaded.get(str(index)))

    put.replace(f"{_RESTORE}:apply_optimizers", apply)


def _dummy_step(optimizer: Any) -> None:
    """A step with zero gradients, as is often used to create lazy state."""
    import torch

    for group in optimizer.param_groups:
        for parameter in group["params"]:
            parameter.grad = torch.zeros_like(parameter)
    optimizer.step()
    optimizer.zero_grad()


# ---- moments and steps ----------------------------------------------------------------------------------------------


@sabotage("adam-step-off-by-one")
def _adam_step_off_by_one(put: Saboteur) -> None:
    def spoil(optimizer: Any, part: Any) -> None:
        for entries in optimizer.state.values():
            entries["step"] = entries["step"] + 1

    _after_optimizers(put, spoil)


@sabotage("moments-by-order")
def _moments_by_order(put: Saboteur) -> None:
    def spoil(optimizer: Any, part: Any) -> None:
        # By position among the parameters of one shape: a swap of shapes would crash.
        saved_names = [name for group in part["param_groups"] for name in group["params"] if name in part["state"]]
        by_shape = defaultdict(list)
        for name in saved_names:
            by_shape[part["state"][name]["exp_avg"].shape].append(part["state"][name])
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                optimizer.state[parameter] = dict(by_shape[parameter.shape].pop(0))

    _after_optimizers(put, spoil)


@sabotage("moments-widened")
def _moments_widened(put: Saboteur) -> None:
    def spoil(optimizer: Any, part: Any) -> None:
        for entries in optimizer.state.values():
            entries.update({key: entries[key].float() for key in ("exp_avg", "exp_avg_sq") if key in entries})

    _after_optimizers(put, spoil)


@sabotage("state-cast-to-parameter-type")
def _state_cast_to_parameter_type(put: Saboteur) -> None:
    def spoil(optimizer: Any, part: Any) -> None:
        for parameter, entries in optimizer.state.items():
            entries.update({key: value.to(parameter.dtype) for key, value in entries.items()})

    _after_optimizers(put, spoil)


@sabotage("dummy-step-before-load")
def _dummy_step_before_load(put: Saboteur) -> None:
    # The weights come last here, so the step is taken behind them, and the optimizer's state put back.
    def finish(original: Any, restoring: Any, extra_state: Any) -> None:
        import copy

        original(restoring, extra_state)
        optimizer = restoring._trainer.optimizer
        before = {parameter: copy.deepcopy(entries) for parameter, entries in optimizer.state.items()}
        _dummy_step(optimizer)
        optimizer.state.clear()
        optimizer.state.update(before)

    put.replace(f"{_RESTORE}:_Restore._finish", finish)


@sabotage("save-takes-a-dummy-step")
def _save_takes_a_dummy_step(put: Saboteur) -> None:
    def collect(original: Any, trainer: Any, config: Any) -> Any:
        # At the save of step 0 there is no state yet, so the step is taken at the others too: weights would hide it.
        rates = [group["lr"] for group in trainer.optimizer.param_groups]
        for group in trainer.optimizer.param_groups:
            group["lr"] = 0.0
        _dummy_step(trainer.optimizer)
        for group, rate in zip(trainer.optimizer.param_groups, rates, strict=True):
            group["lr"] = rate
        return original(trainer, config)

    put.replace(f"{_CALLBACK}:collect_payload", collect)


# ---- absent and half state ------------------------------------------------------------------------------------------


@sabotage("absent-state-refused")
def _absent_state_refused(put: Saboteur) -> None:
    def spoil(optimizer: Any, part: Any) -> None:
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                if not optimizer.state.get(parameter):
                    raise KeyError("no optimizer state for a parameter")

    _after_optimizers(put, spoil)


@sabotage("absent-state-invented")
def _absent_state_invented(put: Saboteur) -> None:
    def spoil(optimizer: Any, part: Any) -> None:
        import torch

        for group in optimizer.param_groups:
            for parameter in group["params"]:
                if not optimizer.state.get(parameter):
                    zero = torch.zeros_like(parameter.detach())
                    optimizer.state[parameter] = {"step": torch.zeros(()), "exp_avg": zero, "exp_avg_sq": zero.clone()}

    _after_optimizers(put, spoil)


@sabotage("half-state-tolerated")
def _half_state_tolerated(put: Saboteur) -> None:
    put.replace(f"{_OPTIMIZER}:_check_complete", lambda original, *args: None)


@sabotage("unread-state-refused")
def _unread_state_refused(put: Saboteur) -> None:
    def check(original: Any, *args: Any) -> Any:
        reasons = original(*args)
        if reasons:
            put.fired()
            raise KeyError(reasons[0])
        return reasons

    put.replace("hyper_resume.trainer.mismatches:check_optimizer_entries", check, fires=False)


# ---- several optimizers, groups -------------------------------------------------------------------------------------


@sabotage("second-optimizer-skipped")
def _second_optimizer_skipped(put: Saboteur) -> None:
    def apply(original: Any, optimizers: Any, names: Any, loaded: Any, **how: Any) -> None:
        original(optimizers[:1], names, loaded, **how)

    put.replace(f"{_RESTORE}:apply_optimizers", apply)


@sabotage("second-group-skipped")
def _second_group_skipped(put: Saboteur) -> None:
    def spoil(optimizer: Any, part: Any) -> None:
        for group in optimizer.param_groups[1:]:
            for parameter in group["params"]:
                optimizer.state.pop(parameter, None)

    _after_optimizers(put, spoil)


@sabotage("wrapped-optimizer-passed-over")
def _wrapped_optimizer_passed_over(put: Saboteur) -> None:
    put.replace(f"{_PAYLOAD}:flatten_optimizers", lambda original, optimizer: [])


@sabotage("unknown-wrapper-passed-over")
def _unknown_wrapper_passed_over(put: Saboteur) -> None:
    for module in (_PAYLOAD, _CALLBACK):
        put.replace(f"{module}:flatten_optimizers", lambda original, optimizer: [])


@sabotage("held-optimizer-passed-over")
def _held_optimizer_passed_over(put: Saboteur) -> None:
    put.replace("hyper_resume.state.held_optimizers:_Search._hold", lambda original, *args: None)


@sabotage("own-state-of-optimizer-not-restored")
def _own_state_of_optimizer_not_restored(put: Saboteur) -> None:
    put.replace("hyper_resume.state.own_state:OwnState.load_state_dict", lambda original, *args: None)


@sabotage("group-options-not-restored")
def _group_options_not_restored(put: Saboteur) -> None:
    put.replace(f"{_OPTIMIZER}:_apply_options", lambda original, *args: None)


@sabotage("empty-group-options-lost")
def _empty_group_options_lost(put: Saboteur) -> None:
    def matching(original: Any, own: list[str], saved_groups: Any, place: int) -> Any:
        if own:
            return original(own, saved_groups, place)
        put.fired()
        return None

    put.replace(f"{_OPTIMIZER}:_matching_group", matching, fires=False)


# ---- weights by name ------------------------------------------------------------------------------------------------


@sabotage("wrapper-prefixes-kept")
def _wrapper_prefixes_kept(put: Saboteur) -> None:
    for module in ("hyper_resume.state.names", "hyper_resume.trainer.saved_names"):
        put.replace(f"{module}:canonical_name", lambda original, name: name)


@sabotage("tied-weight-split")
def _tied_weight_split(put: Saboteur) -> None:
    def apply(original: Any, model: Any, loaded: Any, *, strict: bool) -> None:
        original(model, loaded, strict=strict)
        model.lm_head.weight = type(model.lm_head.weight)(model.lm_head.weight.detach().clone())

    put.replace(f"{_RESTORE}:apply_model", apply)


@sabotage("scratch-buffers-saved")
def _scratch_buffers_saved(put: Saboteur) -> None:
    def collect(original: Any, trainer: Any, config: Any) -> dict[str, Any]:
        payload: dict[str, Any] = original(trainer, config)
        return {**payload, "model": {**dict(trainer.model.named_buffers()), **payload["model"]}}

    put.replace(f"{_CALLBACK}:collect_payload", collect)


# ---- adapters -------------------------------------------------------------------------------------------------------


@sabotage("adapter-reinitialised")
def _adapter_reinitialised(put: Saboteur) -> None:
    def restore(original: Any, trainer: Any, *args: Any) -> Any:
        certificate = original(trainer, *args)
        for parameter in trainer.model.parameters():
            if parameter.requires_grad:
                parameter.data.normal_()
        return certificate

    put.replace(f"{_CALLBACK}:restore", restore)


@sabotage("base-overwritten")
def _base_overwritten(put: Saboteur) -> None:
    put.replace(f"{_PAYLOAD}:collect_model", lambda original, model, **options: original(model))


@sabotage("base-saved")
def _base_saved(put: Saboteur) -> None:
    def collect(original: Any, trainer: Any, config: Any) -> dict[str, Any]:
        base = {name: value.detach() for name, value in trainer.model.named_parameters()}
        payload: dict[str, Any] = original(trainer, config)
        return {**payload, "model": {**base, **payload["model"]}}

    put.replace(f"{_CALLBACK}:collect_payload", collect)
