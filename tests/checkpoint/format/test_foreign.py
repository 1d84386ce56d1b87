"""What is no checkpoint of DCP is refused with what it is and how it is imported; and the import works."""

from __future__ import annotations

import json
import pickle
import struct
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from hyper_resume import cli
from hyper_resume.checkpoint import DistributedCheckpointer
from hyper_resume.checkpoint.format.foreign import recognise
from hyper_resume.errors import CheckpointNotFoundError
from hyper_resume.trainer.callbacks import CheckpointerCallback
from tests.checkpoint.directories import listing, make_step
from tests.trainer.custom_trainer import make_custom_trainer

STATE = {"weight": torch.arange(6.0).view(2, 3), "bias": torch.zeros(2)}


class Hostile:
    """Unpickling it would leave a trace."""

    def __reduce__(self) -> object:
        return Path.touch, (Path("ran"),)


def _new(path: Path) -> None:
    torch.save(STATE, path)


def _legacy(path: Path) -> None:
    torch.save(STATE, path, _use_new_zipfile_serialization=False)


def _pickle(path: Path) -> None:
    path.write_bytes(pickle.dumps({"model": Hostile()}))


def _safetensors(path: Path) -> None:
    data = STATE["weight"].numpy().tobytes()
    head = json.dumps({"weight": {"dtype": "F32", "shape": [2, 3], "data_offsets": [0, len(data)]}}).encode()
    path.write_bytes(struct.pack("<Q", len(head)) + head + data)


def _text(path: Path) -> None:
    path.write_text("not a checkpoint at all")


FILES: dict[str, tuple[Callable[[Path], None], str, str]] = {
    "model.pt": (_new, "an archive as torch.save writes it", "torch.load(..., weights_only=True)"),
    "old.pth": (_legacy, "before torch 1.6", "torch.load(..., weights_only=True)"),
    "last.ckpt": (_new, "an archive as torch.save writes it", "torch.load(..., weights_only=True)"),
    "state.pkl": (_pickle, "one file, a pickle", "make a checkpoint of its weights once"),
    "model.safetensors": (_safetensors, "one file of safetensors", "safetensors.torch.load_file"),
    "notes": (_text, "found: a file", "name a step directory"),
}
LAYOUTS: dict[str, tuple[tuple[str, ...], str]] = {
    "hugging face trainer": (("trainer_state.json", "optimizer.pt", "model.safetensors"), "the Hugging Face Trainer"),
    "hugging face model": (("config.json", "model.safetensors"), "a model of Hugging Face"),
    "sharded model": (("model-00001-of-00002.safetensors",), "a model of Hugging Face"),
    "older model": (("config.json", "pytorch_model.bin"), "a model of Hugging Face"),
    "peft": (("adapter_config.json", "adapter_model.safetensors"), "an adapter of peft"),
    "deepspeed": (("global_step7/mp_rank_00_model_states.pt", "latest"), "DeepSpeed"),
    "megatron": (("mp_rank_00/model_optim_rng.pt",), "Megatron-LM"),
    "megatron root": (("latest_checkpointed_iteration.txt", "iter_0000007/x"), "Megatron-LM"),
    "accelerate": (("random_states_0.pkl", "pytorch_model.bin"), "accelerate"),
    "torchsnapshot": ((".snapshot_metadata",), "torchsnapshot"),
    "lightning": (("epoch=1.ckpt",), "files that torch.save wrote"),
}


def _refusal(path: Path, root: Path) -> str:
    trainer = make_custom_trainer(root, restore_from=str(path))
    with pytest.raises(CheckpointNotFoundError) as caught:
        CheckpointerCallback(trainer).on_train_begin()
    return str(caught.value)


@pytest.mark.parametrize("name", list(FILES))
def test_a_file_is_refused_by_what_it_is_and_says_how_to_import_it(
    tmp_path: Path, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    make, what, how = FILES[name]
    make(tmp_path / name)
    before = listing(tmp_path)
    message = _refusal(tmp_path / name, tmp_path / "root")
    assert "checkpoint.restore_from is not a directory" in message
    assert what in message
    assert how in message
    with pytest.raises(CheckpointNotFoundError, match="not a complete checkpoint") as caught:
        DistributedCheckpointer().load(str(tmp_path / name), {"model": {}})
    assert what in str(caught.value)
    assert listing(tmp_path) == before, "nothing was made, and nothing of it was run"


@pytest.mark.parametrize("name", list(LAYOUTS))
def test_a_directory_of_another_tool_is_refused_by_its_name(tmp_path: Path, name: str) -> None:
    files, what = LAYOUTS[name]
    for file in files:
        (tmp_path / "other" / file).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "other" / file).write_bytes(b"x")
    message = _refusal(tmp_path / "other", tmp_path / "root")
    assert "not a complete checkpoint" in message
    assert what in message
    assert "DistributedCheckpointer().save(" in message
    assert not (tmp_path / "root").exists()


@pytest.mark.parametrize("command", ["inspect", "verify"])
def test_the_commands_say_it_too(tmp_path: Path, command: str, capsys: pytest.CaptureFixture[str]) -> None:
    _new(tmp_path / "model.pt")
    assert cli.main([command, str(tmp_path / "model.pt")]) == 1
    assert "an archive as torch.save writes it" in capsys.readouterr().err


def test_an_incomplete_step_directory_is_not_taken_for_another_tools(tmp_path: Path) -> None:
    directory = make_step(tmp_path, 3, metadata=None)
    (directory / "extra_state").mkdir()
    (directory / "extra_state" / "extra_state_rank_0.pt").write_bytes(b"")
    assert recognise(directory) is None
    assert "no usable .metadata" in _refusal(directory, tmp_path)


def test_what_is_not_there_is_not_known() -> None:
    assert recognise(Path("/nowhere/at/all")) is None


def test_the_import_that_the_message_advises_works(tmp_path: Path) -> None:
    donor = make_custom_trainer(tmp_path)
    with torch.no_grad():
        donor.model.hidden.weight.fill_(0.5)
    torch.save(donor.model.state_dict(), tmp_path / "model.pt")
    assert "DistributedCheckpointer().save('<dir>/global_step_0', {'model': <state dict>}, global_step=0)" in _refusal(
        tmp_path / "model.pt", tmp_path / "root"
    )

    weights = torch.load(tmp_path / "model.pt", weights_only=True)
    DistributedCheckpointer().save(str(tmp_path / "imported/global_step_0"), {"model": weights}, global_step=0)
    trainer = make_custom_trainer(
        tmp_path / "root",
        restore_from=str(tmp_path / "imported" / "global_step_0"),
        restore_optimizer=False,
        restore_train_state=False,
    )
    CheckpointerCallback(trainer).on_train_begin()
    assert torch.equal(trainer.model.hidden.weight, torch.full((8, 8), 0.5))
    assert trainer.state.global_step == 0
