"""Optimizers that hold optimizers, on two ranks: sharded slow weights, and moments that only one rank has.

In each run a moving average is a list of (sharded) tensors.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from hyper_resume.config import CheckpointingConfig
from hyper_resume.data import DataLoader
from hyper_resume.state.certificate import read_certificate
from hyper_resume.trainer.callbacks import CheckpointerCallback, TrainerState
from tests.ranks import run_ranks
from tests.trainer.held_optimizers import PlainLookahead, Sam, adamw
from tests.trainer.tiny_training import Ids, Net

SAVED, STEPS = 4, 8


def _sharded(net: nn.Module) -> nn.Module:
    fully_shard(net, mesh=init_device_mesh("cpu", (dist.get_world_size(),)))
    return net


def _replicated(net: nn.Module) -> nn.Module:
    return DistributedDataParallel(net)


class ListedAverage:
    """A moving average of sharded weights, as a list of tensors."""

    def __init__(self, model: nn.Module) -> None:
        self.model = model
        self.shadow = [parameter.detach().clone() for parameter in model.parameters()]

    def update(self) -> None:
        with torch.no_grad():
            for mine, its in zip(self.shadow, self.model.parameters(), strict=True):
                mine.lerp_(its, 0.25)

    def state_dict(self) -> dict[str, Any]:
        return {"shadow": self.shadow}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.shadow = state["shadow"]


def _trainer(
    root: str, wrap: Callable[[nn.Module], nn.Module], make: Callable[[nn.Module], Any], **checkpoint: Any
) -> Any:
    torch.manual_seed(7)
    model = wrap(Net())
    return SimpleNamespace(
        config=SimpleNamespace(checkpoint=CheckpointingConfig(checkpoint_dir=root, save_epochs=0, **checkpoint)),
        model=model,
        optimizer=make(model),
        average=ListedAverage(model),
        lr_scheduler=None,
        train_dataloader=DataLoader(
            Ids(64), batch_size=4, seed=3, dp_world_size=dist.get_world_size(), dp_rank=dist.get_rank()
        ),
        state=TrainerState(),
        train_steps=STEPS,
        start_epoch=0,
        start_step=0,
    )


def _trained(trainer: Any, until_step: int) -> list[list[torch.Tensor]]:
    """Train through the callback; returns this rank's weights and their averages after each step."""
    callback = CheckpointerCallback(trainer)
    callback.on_train_begin()
    found = []
    trainer.data_iterator = iter(trainer.train_dataloader)
    while trainer.state.global_step < until_step:
        ids = next(trainer.data_iterator)
        ((trainer.model(ids) - ids / 64) ** 2).mean().backward()
        trainer.optimizer.step()
        trainer.optimizer.zero_grad()
        trainer.state.global_step += 1
        trainer.average.update()
        tensors = [*trainer.model.parameters(), *trainer.average.shadow]
        parameters = [tensor.to_local() if isinstance(tensor, DTensor) else tensor for tensor in tensors]
        found.append([parameter.detach().clone() for parameter in parameters])
        callback.on_step_end()
    callback.on_train_end()
    return found


def _compare(root: str, wrap: Callable[[nn.Module], nn.Module], make: Callable[[nn.Module], Any]) -> dict[str, bool]:
    whole = _trained(_trainer(f"{root}/whole", wrap, make), STEPS)
    _trained(_trainer(f"{root}/saved", wrap, make), SAVED)
    resumed = _trained(_trainer(f"{root}/saved", wrap, make, restore_from="LATEST"), STEPS)
    fresh = _trainer(
        f"{root}/other", wrap, make, restore_from=f"{root}/saved/global_step_{SAVED}", restore_optimizer=False
    )
    other = _trained(fresh, STEPS)
    (file,) = (Path(root) / "saved" / "certificates").iterdir()
    return {
        "same": len(resumed) == STEPS - SAVED and _equal(resumed, whole[SAVED:]),
        "same without moments": _equal(other, whole[SAVED:]),
        "exact": read_certificate(file).is_exact,
    }


def _equal(left: list[list[torch.Tensor]], right: list[list[torch.Tensor]]) -> bool:
    return all(torch.equal(a, b) for mine, its in zip(left, right, strict=True) for a, b in zip(mine, its, strict=True))


def _zero_optimizer(model: nn.Module) -> Any:
    from torch.distributed.optim import ZeroRedundancyOptimizer  # warns of what it imports itself

    return ZeroRedundancyOptimizer(model.parameters(), torch.optim.AdamW, lr=0.01)


def _zero(root: str) -> dict[str, bool]:
    return _compare(root, _replicated, _zero_optimizer)


def _zero_on_one_rank(root: str) -> str:
    trainer = _trainer(f"{root}/one", _replicated, _zero_optimizer, restore_from=f"{root}/saved/global_step_{SAVED}")
    CheckpointerCallback(trainer).on_train_begin()
    (file,) = (Path(root) / "one" / "certificates").iterdir()
    (part,) = [part for part in read_certificate(file).parts if part.bucket == "optimizer"]
    return f"{part.verdict}: {part.reason}"


def _sam(root: str) -> dict[str, bool]:
    return _compare(root, _sharded, lambda m: Sam(m.parameters()))


def _lookahead(root: str) -> dict[str, bool]:
    return _compare(root, _sharded, lambda m: PlainLookahead(adamw(m.parameters())))


def _check(compare: Callable[[str], dict[str, bool]]) -> None:
    with tempfile.TemporaryDirectory() as root:
        for found in run_ranks(compare, 2, root):
            assert found == {"same": True, "same without moments": False, "exact": True}


def test_each_rank_gets_back_its_own_moments_of_a_zero_redundancy_optimizer() -> None:
    _check(_zero)


def test_on_another_number_of_ranks_the_moments_of_other_ranks_start_fresh_and_the_certificate_says_so() -> None:
    with tempfile.TemporaryDirectory() as root:
        run_ranks(_zero, 2, root)
        (found,) = run_ranks(_zero_on_one_rank, 1, root)
        assert found.startswith("degraded: the checkpoint holds no optimizer state of ")


def test_the_moments_behind_sam_come_back_sharded() -> None:
    _check(_sam)


def test_slow_weights_that_the_resumed_run_has_not_made_yet_come_back_sharded() -> None:
    _check(_lookahead)
