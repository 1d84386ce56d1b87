"""A copy and the digest of what was copied are found in one look at it, whatever kind of tensor it is."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
import xxhash

from hyper_resume.checkpoint.tensors.copying import copy_and_digest
from hyper_resume.checkpoint.tensors.threads import submit_or_run

_SMALL = 256 << 10
_PART = 2 << 20
_BLOCK = 64 << 20


def _made(nbytes: int, seed: int = 1) -> torch.Tensor:
    return torch.randint(0, 256, (nbytes,), dtype=torch.uint8, generator=torch.Generator().manual_seed(seed))


def _expected(source: torch.Tensor) -> bytes:
    """Of the elements' bytes in order; of more than a block, of the digests of its blocks."""
    data = source.detach().clone(memory_format=torch.contiguous_format).resolve_conj().resolve_neg()
    content = data.reshape(-1).view(torch.uint8).numpy().tobytes()
    blocks = [xxhash.xxh3_128_digest(content[at : at + _BLOCK]) for at in range(0, len(content), _BLOCK)]
    return blocks[0] if len(blocks) == 1 else xxhash.xxh3_128_digest(b"".join(blocks))


def _room(source: torch.Tensor) -> torch.Tensor:
    return torch.zeros(source.shape, dtype=source.dtype)


def _check(sources: list[torch.Tensor]) -> None:
    rooms = [_room(source) for source in sources]
    found = copy_and_digest(list(zip(rooms, sources, strict=True)))
    for room, source, digest in zip(rooms, sources, found, strict=True):
        same = room.reshape(-1).view(torch.uint8), source.detach().resolve_conj().resolve_neg().contiguous()
        assert torch.equal(same[0], same[1].reshape(-1).view(torch.uint8))
        assert digest == _expected(source)


@pytest.mark.parametrize(
    "nbytes",
    [1, _SMALL - 1, _SMALL, _SMALL + 1, _PART - 1, _PART, _PART + 1, 3 * _PART + 5, _BLOCK, _BLOCK + 1],
)
def test_every_size_is_copied_and_digested_to_its_last_byte(nbytes: int) -> None:
    _check([_made(nbytes)])


def test_many_of_all_sizes_are_told_apart_by_their_places() -> None:
    _check([_made(1 + number * 97_003 % (5 << 20), number) for number in range(60)])


class _Own(torch.Tensor):
    pass


KINDS: dict[str, Any] = {
    "float32": lambda: _made(4 << 20).view(torch.float32),
    "not a number": lambda: _made(4 << 20).view(torch.float32).fill_(float("nan")),
    "bfloat16": lambda: _made(4 << 20).view(torch.bfloat16),
    "complex": lambda: _made(4 << 20).view(torch.complex64),
    "conjugated": lambda: torch.view_as_complex(torch.rand(300_000, 2)).conj(),
    "negated, in its shape": lambda: torch.randn(500, 400)._neg_view(),
    "of a subclass": lambda: torch.rand(500, 400).as_subclass(_Own),
    "negated": lambda: torch.view_as_complex(torch.rand(300_000, 2)).conj().imag,
    "bool": lambda: _made(4 << 20) > 100,
    "a matrix": lambda: _made(4 << 20).view(torch.float32).view(1024, 1024),
    "transposed": lambda: _made(4 << 20).view(torch.float32).view(1024, 1024).t(),
    "every other": lambda: _made(4 << 20)[::2],
    "expanded": lambda: torch.tensor([2.5]).expand(600_000),
    "a part": lambda: _made(4 << 20)[3 : (3 << 20) + 8],
    "with a gradient": lambda: torch.nn.Parameter(torch.rand(600_000)),
    "transposed, with a gradient": lambda: torch.nn.Parameter(torch.rand(700, 900)).t(),
    "computed": lambda: torch.nn.Parameter(torch.rand(600_000)) * 2,
}


@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_of_tensor_is_copied_bit_for_bit(kind: str) -> None:
    _check([KINDS[kind](), _made(10)])


def test_nothing_is_copied_to_nothing() -> None:
    assert copy_and_digest([]) == []
    empty = torch.empty(0, 3)
    assert copy_and_digest([(empty, torch.empty(0, 3))]) == [xxhash.xxh3_128_digest(b"")]


class _Refusing(ThreadPoolExecutor):
    """Takes the first task and then has no thread for it, as where no more processes are allowed."""

    refused = 0

    def _adjust_thread_count(self) -> None:
        if not self.refused:
            self.refused += 1
            raise RuntimeError("can't start new thread")
        super()._adjust_thread_count()


def test_a_task_that_was_taken_though_no_thread_could_be_started_is_done_once() -> None:
    done: list[int] = []
    with _Refusing(1) as pool:
        found = [submit_or_run(pool, lambda item: done.append(item) or item * 2, item) for item in range(5)]
        assert [future.result() for future in found] == [0, 2, 4, 6, 8]
    assert done == [0, 1, 2, 3, 4]


def test_a_digest_is_of_what_was_copied_also_where_the_copy_goes_wrong(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of every kind of tensor on the CPU: what is wrong in the copy shows when it is loaded."""
    for source in (KINDS["transposed"](), KINDS["expanded"](), KINDS["every other"]()):
        original = torch.Tensor.copy_

        def damaging(target: torch.Tensor, other: torch.Tensor, original: Any = original) -> torch.Tensor:
            original(target, other)
            target.view(-1)[0] += 1
            return target

        with monkeypatch.context() as patch:
            patch.setattr(torch.Tensor, "copy_", damaging)
            room = _room(source)
            (found,) = copy_and_digest([(room, source)])
        assert not torch.equal(room, source)
        assert found == _expected(source)
