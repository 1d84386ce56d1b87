"""Model families of transformers and optimizers of torch, trained and saved through the callback: nothing is called uncovered.

And a resume of each is exact: what a run is made of does not depend on the process that builds it.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from hyper_resume import CheckpointerCallback, CheckpointingConfig, ResumableLoader, TrainerState
from hyper_resume.state.certificate import read_certificate

pytestmark = pytest.mark.xdist_group("false-alarms")

STEPS, VOCABULARY = 6, 64
_COMMON: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 16,
    "intermediate_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "max_position_embeddings": 32,
}
_HEADS = {"head_dim": 8}
_EXPERTS = {"num_experts": 2, "num_experts_per_tok": 1, "moe_intermediate_size": 8, "output_router_logits": True}
_LATENT = {
    "n_routed_experts": 2, "num_experts_per_tok": 1, "n_group": 1, "topk_group": 1, "moe_intermediate_size": 8,
    "q_lora_rank": 8, "kv_lora_rank": 8, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8, "v_head_dim": 8,
    "first_k_dense_replace": 1,
}  # fmt: skip
_GPT2 = {"vocab_size": VOCABULARY, "n_embd": 16, "n_layer": 2, "n_head": 2, "n_positions": 32}
_MAMBA = {"vocab_size": VOCABULARY, "hidden_size": 16, "num_hidden_layers": 2, "state_size": 4}
_T5 = {
    "vocab_size": VOCABULARY,
    "d_model": 16,
    "d_kv": 8,
    "d_ff": 32,
    "num_layers": 2,
    "num_heads": 2,
    "decoder_start_token_id": 0,
}
_BERT = {key: value for key, value in _COMMON.items() if key != "num_key_value_heads"}
_VIT = {
    "hidden_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "intermediate_size": 32,
    "image_size": 8,
    "patch_size": 4,
    "num_labels": 4,
}
# Family -> configuration class, its options, model class.
FAMILIES: dict[str, tuple[str, dict[str, Any], str]] = {
    "llama": ("LlamaConfig", _COMMON, "LlamaForCausalLM"),
    "qwen3": ("Qwen3Config", {**_COMMON, **_HEADS}, "Qwen3ForCausalLM"),
    "qwen3-moe": ("Qwen3MoeConfig", {**_COMMON, **_HEADS, **_EXPERTS}, "Qwen3MoeForCausalLM"),
    "mixtral": ("MixtralConfig", {**_COMMON, "num_local_experts": 2}, "MixtralForCausalLM"),
    "gemma2": ("Gemma2Config", {**_COMMON, **_HEADS}, "Gemma2ForCausalLM"),
    "gemma3": ("Gemma3TextConfig", {**_COMMON, **_HEADS}, "Gemma3ForCausalLM"),
    "gpt2": ("GPT2Config", _GPT2, "GPT2LMHeadModel"),
    "deepseek-v3": ("DeepseekV3Config", {**_COMMON, **_LATENT}, "DeepseekV3ForCausalLM"),
    "mamba": ("MambaConfig", _MAMBA, "MambaForCausalLM"),
    "t5": ("T5Config", _T5, "T5ForConditionalGeneration"),
    "bert": ("BertConfig", _BERT, "BertForMaskedLM"),
    "vit": ("ViTConfig", _VIT, "ViTForImageClassification"),
}
OPTIMIZERS: dict[str, Callable[..., torch.optim.Optimizer]] = {
    "sgd": lambda parameters: torch.optim.SGD(parameters, 0.1, momentum=0.9),
    "adamw": lambda parameters: torch.optim.AdamW(parameters, amsgrad=True),
    **{
        name.lower(): getattr(torch.optim, name)
        for name in ("Adam", "Adafactor", "RMSprop", "Adagrad", "NAdam", "RAdam", "ASGD", "Adamax", "Rprop")
    },
}


def _family(name: str) -> tuple[nn.Module, list[Any]]:
    """The model, and a batch for each step."""
    import transformers

    config, options, kind = FAMILIES[name]
    torch.manual_seed(1)
    model = getattr(transformers, kind)(getattr(transformers, config)(**options))
    if name == "vit":
        images = torch.randn(STEPS, 2, 3, 8, 8)
        return model, [{"pixel_values": one, "labels": torch.tensor([0, 1])} for one in images]
    ids = torch.randint(0, VOCABULARY, (STEPS, 2, 8))
    return model, [{"input_ids": one, "labels": one} for one in ids]


def _train(root: Path, model: nn.Module, batches: list[Any], optimizer: Any = None, **more: Any) -> tuple[Any, ...]:
    """Train what is left to do; the weights at the end."""
    until = more.pop("until", STEPS)
    optimizer = optimizer or torch.optim.AdamW(model.parameters(), 1e-3)
    loader = ResumableLoader(batches)
    checkpoint = CheckpointingConfig(
        checkpoint_dir=str(root), save_steps=2, restore_from="LATEST", on_mismatch="error", verify="size"
    )
    trainer = SimpleNamespace(
        config=SimpleNamespace(checkpoint=checkpoint),
        model=model,
        optimizer=optimizer,
        lr_scheduler=torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=50),
        train_dataloader=loader,
        state=TrainerState(),
        train_steps=STEPS,
        start_epoch=0,
        start_step=0,
        **more,
    )
    checkpointer = CheckpointerCallback(trainer)
    checkpointer.on_train_begin()
    model.train()
    for batch in loader.batches(0):
        output = model(**batch) if isinstance(batch, dict) else model(batch)
        loss = output.loss if isinstance(batch, dict) else output.square().mean()
        loss.backward()
        optimizer.step()
        trainer.lr_scheduler.step()
        optimizer.zero_grad()
        if hasattr(trainer, "average"):
            trainer.average.update_parameters(model)
        trainer.state.global_step += 1
        checkpointer.on_step_end()
        if trainer.state.global_step == until:
            break
    return tuple(parameter.detach().clone() for parameter in model.parameters())


def _same(left: tuple[Any, ...], right: tuple[Any, ...]) -> bool:
    return len(left) == len(right) and all(torch.equal(one, other) for one, other in zip(left, right, strict=True))


def _check(root: Path, caplog: pytest.LogCaptureFixture, make: Callable[[], tuple[Any, ...]]) -> None:
    """Train without interruption, then to step 4 and again from there: equal weights, no warning, an exact certificate."""
    whole = _train(root / "whole", *make())
    caplog.clear()
    _train(root / "cut", *make(), until=4)
    assert [record.getMessage() for record in caplog.records if "not saved" in record.getMessage()] == []
    torch.manual_seed(7)
    assert _same(_train(root / "cut", *make()), whole)
    (path,) = (root / "cut" / "certificates").iterdir()
    assert read_certificate(path).is_exact


@pytest.mark.parametrize("family", FAMILIES)
def test_a_model_family_has_no_uncovered_state_and_resumes_exactly(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, family: str
) -> None:
    _check(tmp_path, caplog, lambda: _family(family))


def _small() -> tuple[nn.Module, list[torch.Tensor]]:
    torch.manual_seed(1)
    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Dropout(0.1), nn.Linear(4, 1))
    return model, list(torch.randn(STEPS, 3, 4))


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_an_optimizer_has_no_uncovered_state_and_resumes_exactly(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, name: str
) -> None:
    def make() -> tuple[Any, ...]:
        model, batches = _small()
        return model, batches, OPTIMIZERS[name](model.parameters())

    _check(tmp_path, caplog, make)


def test_a_compiled_model_has_no_uncovered_state(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    def make() -> tuple[Any, ...]:
        model, batches = _small()
        return torch.compile(model, backend="eager"), batches

    _check(tmp_path, caplog, make)


@pytest.mark.parametrize("kept", ["as an attribute", "in a list"])
def test_a_moving_average_is_named_only_where_no_save_holds_it(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, kept: str
) -> None:
    model, batches = _small()
    average = torch.optim.swa_utils.AveragedModel(model)
    if kept == "as an attribute":
        _train(tmp_path, model, batches, average=average, scaler=torch.amp.GradScaler("cpu"))
        assert "not saved" not in caplog.text
        return

    class Hidden(list):  # type: ignore[type-arg]
        def update_parameters(self, model: nn.Module) -> None:
            self[0].update_parameters(model)

    _train(tmp_path, model, batches, average=Hidden([average]))
    assert "is not saved, so a resume would not be exact: trainer.average.0." in caplog.text
