"""What a run is made of is saved with it: each difference at a resume is named, with whose value holds, and certified."""

from __future__ import annotations

import logging
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

from hyper_resume.checkpoint.format.extra_state import RUN
from hyper_resume.checkpoint.format.manifest import read_manifest
from hyper_resume.config import CheckpointingConfig
from hyper_resume.errors import CheckpointMismatchError
from hyper_resume.state.certificate import read_certificate
from hyper_resume.trainer.callbacks import CheckpointerCallback
from hyper_resume.trainer.run.description import describe_run
from hyper_resume.trainer.run.differences import find_differences
from tests.ranks import run_ranks
from tests.trainer.changed_runs import Change, certified, trained, unchanged, verdicts, warnings, with_options
from tests.trainer.custom_trainer import make_custom_trainer
from tests.trainer.live_snapshot import live_snapshot
from tests.trainer.tiny_training import run_config, train

# ---- the description ------------------------------------------------------------------------------------------------


def test_the_manifest_says_what_the_run_is_made_of(tmp_path: Path) -> None:
    config = run_config(tmp_path, training={"max_steps": 4}, optimizer={"weight_decay": 0.2}, save_steps=2)
    train(config)
    manifest = read_manifest(tmp_path / "global_step_4")
    assert manifest is not None
    run = manifest.run
    assert run["configuration"]["training"]["max_steps"] == 4
    assert run["model"]["modules"]["dropout"] == {
        "class": "torch.nn.modules.dropout.Dropout",
        "p": 0.25,
        "inplace": False,
    }
    groups = run["optimizer"]["0"]["groups"]
    # lr: the configured one, although the warmup has set another; matrices decay, vectors do not.
    assert {name: (one["lr"], one["weight_decay"]) for name, one in groups.items()} == {
        "embed_tokens.weight": (0.01, 0.2),
        "hidden.bias": (0.01, 0.0),
    }
    assert groups["hidden.bias"]["betas"] == [0.9, 0.95]
    assert run["lr_scheduler"]["0"]["horizon"] == 4
    assert run["lr_scheduler"]["0"]["warmup"] == 2
    assert run["train_dataloader"]["dataset"]["samples"] == 20
    assert run["train_dataloader"]["order"]["batch_size"] == 3
    assert run["precision"]["autocast"] is None
    assert run["versions"]["torch"] == torch.__version__
    assert run["threads"] == torch.get_num_threads()
    assert run["frozen"] == {}


def test_numbered_layers_are_described_together_and_secrets_are_left_out(tmp_path: Path) -> None:
    def change(trainer: Any) -> None:
        trainer.model.layers = nn.ModuleList([nn.Dropout(0.1), nn.Dropout(0.1), nn.Dropout(0.3)])
        trainer.config.logging = {"api_key": "1234", "hub_token": "5678", "tokenizer": "bytes"}

    trained(tmp_path, 2, change)
    manifest = read_manifest(tmp_path / "global_step_2")
    assert manifest is not None
    assert manifest.run["model"]["modules"]["layers.*"]["p"] == [0.1, 0.1, 0.3]
    assert manifest.run["configuration"]["logging"] == {"tokenizer": "bytes"}


# ---- no false alarm -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("is_custom", [False, True], ids=["BaseTrainer", "own-loop"])
def test_the_same_command_with_latest_is_exact_and_silent(
    is_custom: bool, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    for restore_from in (None, "LATEST"):
        caplog.clear()
        with caplog.at_level(logging.INFO):
            checkpoint = {"restore_from": restore_from, "on_mismatch": "error", "save_steps": 2, "save_epochs": 0}
            if is_custom:
                trained(tmp_path, 4 if restore_from is None else 6, **checkpoint)
            else:
                lasting = {"decay_steps": 6}
                steps = {"max_steps": 4 if restore_from is None else 6}
                train(run_config(tmp_path, training=steps, lr_scheduler=lasting, **checkpoint))
    assert verdicts(tmp_path, 4) == {"exact"}
    assert warnings(caplog) == []
    differing = [message for message in caplog.messages if " -> " in message]
    assert differing == (
        []
        if is_custom
        else [
            "differs from the run that was saved, which changes no bits: training.max_steps: 4 -> 6 (this run's holds)"
        ]
    )


def test_a_checkpoint_without_a_description_is_read_and_nothing_is_said(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        whole = CheckpointerCallback._training_state
        patch.setattr(
            CheckpointerCallback,
            "_training_state",
            lambda *arguments: {key: value for key, value in whole(*arguments).items() if key != RUN},
        )
        trained(tmp_path, 4)
    manifest = read_manifest(tmp_path / "global_step_4")
    assert manifest is not None
    assert manifest.run == {}
    with caplog.at_level(logging.INFO):
        trained(tmp_path, 6, with_options(lr=0.5), restore_from="LATEST")
    assert verdicts(tmp_path, 4) == {"exact"}
    assert [message for message in caplog.messages if " -> " in message] == []


# ---- each kind of difference ----------------------------------------------------------------------------------------


def other_dropout(trainer: Any) -> None:
    trainer.model.dropout.p = 0.5


def dropout_left_out(trainer: Any) -> None:
    trainer.model.dropout = nn.Identity()


def hugging_face_config(dropout: float) -> Change:
    def change(trainer: Any) -> None:
        values = {
            "attention_dropout": dropout,
            "_name_or_path": f"/models/{dropout}",
            "transformers_version": str(dropout),
        }
        trainer.model.config = SimpleNamespace(to_dict=lambda: values)

    return change


def noise(share: float) -> Change:
    def change(trainer: Any) -> None:
        trainer.train_dataloader.dataset.noise = share

    return change


def clipping(norm: float) -> Change:
    def change(trainer: Any) -> None:
        trainer.config.training = SimpleNamespace(max_grad_norm=norm)

    return change


# name: (the run that saves, the run that resumes, bucket, reasons)
DIFFERENCES: dict[str, tuple[Change, Change, str, list[str]]] = {
    "lr": (unchanged, with_options(lr=0.5), "optimizer", ["optimizer.lr: 0.01 -> 0.5 (the checkpoint's holds)"]),
    "options": (
        unchanged,
        with_options(weight_decay=0.0, betas=(0.5, 0.9)),
        "optimizer",
        [
            "optimizer.betas: [0.9, 0.999] -> [0.5, 0.9] (the checkpoint's holds)",
            "optimizer.weight_decay: 0.1 -> 0.0 (the checkpoint's holds)",
        ],
    ),
    "dropout": (unchanged, other_dropout, "model", ["model.dropout.p: 0.25 -> 0.5 (this run's holds)"]),
    "no-dropout": (
        unchanged,
        dropout_left_out,
        "model",
        [
            "model.dropout.class: 'torch.nn.modules.dropout.Dropout' -> 'torch.nn.modules.linear.Identity' "
            "(this run's holds)"
        ],
    ),
    "model-configuration": (
        hugging_face_config(0.0),
        hugging_face_config(0.1),
        "model",
        ["model.config.attention_dropout: 0.0 -> 0.1 (this run's holds)"],
    ),
    "data": (
        noise(0.0),
        noise(0.2),
        "train_dataloader",
        ["train_dataloader.dataset.noise: 0.0 -> 0.2 (this run's holds)"],
    ),
    "clipping": (clipping(1.0), clipping(0.5), "progress", ["training.max_grad_norm: 1.0 -> 0.5 (this run's holds)"]),
}


@pytest.mark.parametrize("name", DIFFERENCES)
def test_a_difference_is_named_and_degrades_its_bucket_alone(
    name: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    before, after, bucket, reasons = DIFFERENCES[name]
    trained(tmp_path, 4, before)
    with caplog.at_level(logging.WARNING):
        trained(tmp_path, 6, after, restore_from="LATEST")
    assert warnings(caplog) == reasons
    parts = certified(tmp_path, 4)
    assert parts[bucket].reason == "; ".join(reasons)
    assert {part.bucket for part in parts.values() if part.verdict == "degraded"} == {bucket}


@pytest.mark.parametrize("name", DIFFERENCES)
def test_a_difference_is_refused_before_anything_is_changed_and_accepted_where_it_is_declared(
    name: str, tmp_path: Path
) -> None:
    before, after, bucket, reasons = DIFFERENCES[name]
    trained(tmp_path, 4, before)
    trainer = make_custom_trainer(tmp_path, restore_from="LATEST", on_mismatch="error")
    after(trainer)
    snapshot = live_snapshot(trainer)
    with pytest.raises(CheckpointMismatchError, match="on_mismatch is error") as caught:
        CheckpointerCallback(trainer).on_train_begin(trainer.state)
    assert f"{bucket}: {reasons[0]}" in str(caught.value)
    assert live_snapshot(trainer) == snapshot
    declared = tuple(reason.split(":")[0] for reason in reasons)
    trained(tmp_path, 6, after, restore_from="LATEST", on_mismatch="error", override_on_restore=declared)
    assert verdicts(tmp_path, 4) == {"exact"}
    assert certified(tmp_path, 4)[bucket].overridden.split(": ")[0] == declared[0]
    # The next resume of that command is the same run.
    trained(tmp_path, 7, after, restore_from="LATEST", on_mismatch="error")
    assert {part.overridden for part in certified(tmp_path, 6).values()} == {""}


def test_the_run_goes_on_with_the_options_of_the_checkpoint_and_its_saves_say_so(tmp_path: Path) -> None:
    reference = trained(tmp_path / "reference", 8)
    trained(tmp_path / "own", 4)
    resumed = trained(tmp_path / "own", 6, with_options(lr=0.5), restore_from="LATEST")
    assert [record.lrs for record in resumed] == [record.lrs for record in reference[4:6]]
    again = trained(tmp_path / "own", 8, restore_from="LATEST", on_mismatch="error")
    assert [record.live for record in again] == [record.live for record in reference[6:]]
    assert verdicts(tmp_path / "own", 6) == {"exact"}


def test_another_precision_of_matrix_products_degrades_the_model(tmp_path: Path) -> None:
    trained(tmp_path, 4)
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("medium" if before != "medium" else "high")
    try:
        trained(tmp_path, 6, restore_from="LATEST")
    finally:
        torch.set_float32_matmul_precision(before)
    assert "precision.float32_matmul" in certified(tmp_path, 4)["model"].reason


# ---- what no save holds ---------------------------------------------------------------------------------------------


def frozen(value: float) -> Change:
    """All but the head is frozen, as a base model under adapters is, and a buffer that no save holds."""

    def change(trainer: Any) -> None:
        trainer.model.requires_grad_(False)
        trainer.model.lm_head.requires_grad_(True)
        trainer.model.hidden.weight.data.fill_(value)
        trainer.model.register_buffer("angles", torch.full((2,), value), persistent=False)

    return change


def test_adapters_on_another_base_are_no_exact_model(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    trained(tmp_path, 4, frozen(0.5), is_peft=True)
    trained(tmp_path, 5, frozen(0.5), is_peft=True, restore_from="LATEST", on_mismatch="error")
    assert verdicts(tmp_path, 4) == {"exact"}
    with caplog.at_level(logging.WARNING):
        trained(tmp_path, 6, frozen(0.25), is_peft=True, restore_from="LATEST")
    part = certified(tmp_path, 5)["model"]
    assert part.verdict == "degraded"
    # embed_tokens, hidden (2), norm (2) and the buffer are not saved; two of them have other values.
    assert "2 of 6 parameters and buffers that are not saved have other values: angles, hidden.weight" in part.reason
    assert [message for message in warnings(caplog) if message.startswith("model.frozen: ")] == [part.reason]
    with pytest.raises(CheckpointMismatchError, match=r"model: model\.frozen"):
        trained(tmp_path, 8, frozen(0.5), is_peft=True, restore_from="LATEST", on_mismatch="error")
    declared = {"override_on_restore": ("model.frozen",), "on_mismatch": "error"}
    trained(tmp_path, 8, frozen(0.5), is_peft=True, restore_from="LATEST", **declared)


def _describe_sharded(folder: str) -> dict[str, str]:
    mesh = init_device_mesh("cpu", (2,))
    trainer = make_custom_trainer(Path(folder))
    frozen(0.5)(trainer)
    trainer.model.hidden.weight = nn.Parameter(
        distribute_tensor(torch.arange(64.0).view(8, 8), mesh, [Shard(0)]), requires_grad=False
    )
    found: dict[str, str] = describe_run(trainer, CheckpointingConfig(is_peft=True))["frozen"]
    return found


def test_each_rank_describes_its_own_part_of_a_sharded_weight_and_where_it_lies(tmp_path: Path) -> None:
    ranks = run_ranks(_describe_sharded, 2, str(tmp_path))
    for rank, found in enumerate(ranks):
        (name,) = [name for name in found if name.startswith("hidden.weight")]
        assert name == f"hidden.weight[{4 * rank}:{4 * rank + 4}, 0:8]"
    whole = [{name: one for name, one in found.items() if "[" not in name} for found in ranks]
    assert whole[0] == whole[1]
    # A part that another run does not have is not compared.
    first, second = ({"frozen": found, "precision": {"device": "cpu"}} for found in ranks)
    assert find_differences(first, second) == []
    other = {**ranks[0], "hidden.weight[0:4, 0:8]": "0" * 32}
    (difference,) = find_differences({"frozen": other, "precision": {"device": "cpu"}}, first)
    assert (difference.name, difference.bucket) == ("model.frozen", "model")
    assert (
        "1 of 6 parameters and buffers that are not saved have other values: hidden.weight[0:4, 0:8]" in difference.now
    )


# ---- weights alone --------------------------------------------------------------------------------------------------

WEIGHTS_ALONE = {"restore_train_state": False, "restore_optimizer": False}


def norm_epsilon(value: float) -> Change:
    def change(trainer: Any) -> None:
        trainer.model.norm.eps = value

    return change


def test_weights_under_another_model_configuration_are_no_exact_model(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    trained(tmp_path / "saved", 2)
    source = str(tmp_path / "saved" / "global_step_2")
    with caplog.at_level(logging.WARNING):
        trained(tmp_path / "own", 2, norm_epsilon(0.5), restore_from=source, **WEIGHTS_ALONE)
    reason = "model.norm.eps: 1e-05 -> 0.5 (this run's holds)"
    assert warnings(caplog) == [reason]
    (path,) = (tmp_path / "own" / "certificates").iterdir()
    parts = {part.bucket: part for part in read_certificate(path).parts}
    assert (parts["model"].verdict, parts["model"].reason) == ("degraded", reason)
    assert {part.verdict for part in parts.values() if part.bucket != "model"} == {"absent"}
    with pytest.raises(CheckpointMismatchError, match=r"model: model\.norm\.eps"):
        trained(tmp_path / "refused", 2, norm_epsilon(0.5), restore_from=source, on_mismatch="error", **WEIGHTS_ALONE)
    declared = {"override_on_restore": ("model.norm.eps",), "on_mismatch": "error"}
    trained(tmp_path / "declared", 2, norm_epsilon(0.5), restore_from=source, **declared, **WEIGHTS_ALONE)


def test_adapters_alone_on_another_base_are_no_exact_model(tmp_path: Path) -> None:
    trained(tmp_path / "saved", 2, frozen(0.5), is_peft=True)
    source = str(tmp_path / "saved" / "global_step_2")
    options = {"restore_from": source, "is_peft": True, "on_mismatch": "error", **WEIGHTS_ALONE}
    trained(tmp_path / "same", 2, frozen(0.5), **options)
    with pytest.raises(CheckpointMismatchError, match=r"model: model\.frozen.*hidden\.weight"):
        trained(tmp_path / "other", 2, frozen(0.25), **options)


@pytest.mark.parametrize(
    "change",
    [with_options(lr=0.5, weight_decay=0.0), other_dropout, dropout_left_out, noise(0.2), clipping(0.5)],
    ids=["optimizer", "dropout", "no-dropout", "data", "clipping"],
)
@pytest.mark.parametrize("restore_optimizer", [False, True])
def test_another_training_of_the_same_weights_is_silent(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, change: Change, restore_optimizer: bool
) -> None:
    trained(tmp_path / "saved", 2)
    options = {**WEIGHTS_ALONE, "restore_optimizer": restore_optimizer}
    with caplog.at_level(logging.INFO):
        source = str(tmp_path / "saved" / "global_step_2")
        trained(tmp_path / "own", 2, change, restore_from=source, on_mismatch="error", **options)
    assert warnings(caplog) == []
    assert [message for message in caplog.messages if " -> " in message] == []
