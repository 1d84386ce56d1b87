"""Choosing a device, its process group and its random stream.

No accelerator is needed: an NPU is stood in for by a package named ``torch_npu`` on disk that registers a device module
under torch's own extension point, exactly as the real one does. Registering is for the life of a process, so those
tests run in a process of their own.
"""

from __future__ import annotations

import gc
import os
import sys
import types
import weakref
from pathlib import Path
from typing import Literal

import pytest
import torch
import torch.distributed as dist

from hyper_resume import device
from hyper_resume.errors import ConfigError, UnsupportedError
from tests.ranks import run_ranks

STAND_IN = """
import sys, types, torch

class Npu(types.ModuleType):
    def __init__(self):
        super().__init__("torch.npu")
        self.state = torch.zeros(16, dtype=torch.uint8)
        self.calls = []
    def is_available(self): return {available}
    def device_count(self): return 2
    def set_device(self, device): self.calls.append(f"set_device {{device}}")
    def synchronize(self): self.calls.append("synchronize")
    def manual_seed(self, seed): self.state = torch.full((16,), seed, dtype=torch.uint8)
    def get_rng_state(self): return self.state.clone()
    def set_rng_state(self, state): self.state = state.clone()

torch.utils.rename_privateuse1_backend("npu")
torch._register_device_module("npu", Npu())
"""


def _install(folder: Path, source: str) -> str:
    package = folder / "torch_npu"
    package.mkdir()
    (package / "__init__.py").write_text(source)
    return str(folder)


def _resolve(folder: str, name: Literal["auto", "npu"], local_rank: str = "0") -> tuple[str, str, str]:
    sys.path.insert(0, folder)
    os.environ["LOCAL_RANK"] = local_rank
    context = device.resolve_device(name)
    return context.type, str(context.device), context.backend


def _use_the_streams(folder: str) -> tuple[list[int], list[int], list[str]]:
    _resolve(folder, "npu", "1")
    device.init_process_group(device.resolve_device("npu"), 5.0)
    device.seed_device("npu", 7)
    saved = device.get_device_rng_state("npu")
    device.seed_device("npu", 9)
    changed = device.get_device_rng_state("npu")
    device.set_device_rng_state("npu", saved)
    restored = device.get_device_rng_state("npu")
    device.synchronize("npu")
    assert changed is not None
    assert restored is not None
    module: types.ModuleType = torch.get_device_module("npu")
    return changed.tolist(), restored.tolist(), module.calls


def _group_of_this_process() -> str:
    """Leave the test's group and let the library make one from an environment as torchrun sets it."""
    dist.destroy_process_group()
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT="0", RANK="0", WORLD_SIZE="1")
    device.init_process_group(device.resolve_device("cpu"), 5.0)
    backend = str(dist.get_backend())
    device.init_process_group(device.resolve_device("cpu"), 5.0)
    device.destroy_process_group()
    device.destroy_process_group()
    assert not dist.is_initialized()
    return backend


def _no_group_when_started_alone() -> bool:
    dist.destroy_process_group()
    for name in ("RANK", "WORLD_SIZE"):
        del os.environ[name]
    device.init_process_group(device.resolve_device("cpu"), 5.0)
    return dist.is_initialized()


def _ask_for_cuda_with_none_visible() -> None:
    os.environ["CUDA_VISIBLE_DEVICES"] = ""
    device.resolve_device("cuda")


def test_cpu_is_itself_with_gloo() -> None:
    assert device.resolve_device("cpu") == device.DeviceContext(type="cpu", device=torch.device("cpu"), backend="gloo")


def test_an_available_npu_is_taken_by_name_and_by_auto(tmp_path: Path) -> None:
    folder = _install(tmp_path, STAND_IN.format(available=True))
    expected = ("npu", "npu:1", "cpu:gloo,npu:hccl")
    assert run_ranks(_resolve, 1, folder, "npu", "1") == [expected]
    assert run_ranks(_resolve, 1, folder, "auto", "1") == [expected]


def test_more_processes_than_devices_is_an_error(tmp_path: Path) -> None:
    folder = _install(tmp_path, STAND_IN.format(available=True))
    (error,) = run_ranks(_resolve, 1, folder, "npu", "2", expect_errors=True)
    assert isinstance(error, ConfigError)
    assert "LOCAL_RANK=2" in str(error)


@pytest.mark.parametrize(
    "source",
    ["raise OSError('libhccl.so: cannot open shared object file')", "raise ImportError('libascendcl.so missing')"],
)
def test_torch_npu_without_cann_is_explained_when_asked_for_and_passed_over_by_auto(
    tmp_path: Path, source: str
) -> None:
    folder = _install(tmp_path, source)
    (error,) = run_ranks(_resolve, 1, folder, "npu", expect_errors=True)
    assert isinstance(error, UnsupportedError)
    assert "CANN" in str(error)
    assert ".so" in str(error)
    ((kind, _, _),) = run_ranks(_resolve, 1, folder, "auto")
    assert kind == ("cuda" if torch.cuda.is_available() else "cpu")


def test_torch_npu_without_a_device_is_explained(tmp_path: Path) -> None:
    folder = _install(tmp_path, STAND_IN.format(available=False))
    (error,) = run_ranks(_resolve, 1, folder, "npu", expect_errors=True)
    assert isinstance(error, UnsupportedError)
    assert "torch.npu.is_available() is False" in str(error)


def test_the_device_stream_is_read_and_put_back_and_the_device_made_current(tmp_path: Path) -> None:
    folder = _install(tmp_path, STAND_IN.format(available=True))
    ((changed, restored, calls),) = run_ranks(_use_the_streams, 1, folder)
    assert changed == [9] * 16
    assert restored == [7] * 16
    assert calls == ["set_device npu:1", "synchronize"]


def test_cuda_that_is_not_there_is_refused_with_what_was_looked_for() -> None:
    (error,) = run_ranks(_ask_for_cuda_with_none_visible, 1, expect_errors=True)
    assert isinstance(error, UnsupportedError)
    assert "torch.cuda.is_available() is False" in str(error)


def test_an_unknown_name_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"unknown device.*'tpu'"):
        device.resolve_device("tpu")  # type: ignore[arg-type]


def test_cpu_has_no_device_stream() -> None:
    assert device.get_device_rng_state("cpu") is None
    device.set_device_rng_state("cpu", None)
    device.seed_device("cpu", 3)
    device.synchronize("cpu")


def test_a_device_stream_is_not_dropped_silently_on_cpu() -> None:
    with pytest.raises(UnsupportedError, match=r"device stream of 16 bytes"):
        device.set_device_rng_state("cpu", torch.zeros(16, dtype=torch.uint8))


def test_a_missing_device_stream_is_not_passed_over_on_an_accelerator() -> None:
    with pytest.raises(UnsupportedError, match=r"a stream of cuda"):
        device.set_device_rng_state("cuda", None)


def test_a_process_started_alone_gets_no_group() -> None:
    assert run_ranks(_no_group_when_started_alone, 1) == [False]


def test_torchruns_environment_gives_a_group_that_a_second_call_keeps() -> None:
    assert run_ranks(_group_of_this_process, 1) == ["gloo"]


def _destroy_with_a_group_in_a_cycle() -> bool:
    gc.disable()  # so that nothing but the call itself collects

    class Holder:
        pass

    holder = Holder()
    holder.itself, holder.group = holder, dist.new_group(backend="gloo")  # type: ignore[attr-defined]
    seen = weakref.ref(holder)
    del holder
    device.destroy_process_group()
    return seen() is None


def test_a_group_that_only_a_cycle_holds_does_not_wait_for_the_interpreters_end() -> None:
    assert run_ranks(_destroy_with_a_group_in_a_cycle, 2) == [True, True]


def test_a_broken_environment_names_the_missing_variables(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("RANK", "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("WORLD_SIZE", "4")
    with pytest.raises(ConfigError, match=r"no RANK, MASTER_ADDR, MASTER_PORT"):
        device.init_process_group(device.resolve_device("cpu"), 5.0)
    monkeypatch.setenv("WORLD_SIZE", "four")
    with pytest.raises(ConfigError, match=r"WORLD_SIZE.*'four'"):
        device.init_process_group(device.resolve_device("cpu"), 5.0)
