from __future__ import annotations

import os
import random
import subprocess
import sys
import sysconfig
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tokenizers
import torch
import transformers
import xxhash

from hyper_resume.config.schema import DataConfig
from hyper_resume.data import DataLoader, TextDataset, build_text_dataset, collate
from hyper_resume.errors import ConfigError


def _dataset(*paths: Path, seq_length: int = 4, **options: Any) -> TextDataset:
    return build_text_dataset(DataConfig(paths=tuple(map(str, paths)), seq_length=seq_length, **options))


def _tokens(dataset: TextDataset) -> list[int]:
    return [token for index in range(len(dataset)) for token in dataset[index]["input_ids"].tolist()]


def _write(path: Path, text: str | bytes) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    return path


def test_documents_are_their_bytes_each_followed_by_the_end_token_and_the_rest_is_dropped(tmp_path: Path) -> None:
    dataset = _dataset(_write(tmp_path / "a.txt", "héy"), _write(tmp_path / "b.txt", "12345"))
    assert _tokens(dataset) == [*"héy".encode(), 256, *b"123"]
    assert len(dataset) == 2
    assert dataset.vocab_size == 264


def test_a_sample_holds_ids_and_equal_labels_of_the_asked_length(tmp_path: Path) -> None:
    sample = _dataset(_write(tmp_path / "a.txt", "abcdefgh"))[1]
    assert set(sample) == {"input_ids", "labels"}
    for value in sample.values():
        assert value.dtype == torch.int64
        assert value.tolist() == [*b"efgh"]


def test_index_outside_the_dataset_is_an_index_error(tmp_path: Path) -> None:
    dataset = _dataset(_write(tmp_path / "a.txt", "abcdefgh"))
    for index in (-1, 2):
        with pytest.raises(IndexError):
            dataset[index]


def test_collate_stacks_and_separates_ids_from_labels(tmp_path: Path) -> None:
    dataset = _dataset(_write(tmp_path / "a.txt", "abcdefgh"))
    (batch,) = DataLoader(dataset, batch_size=2, shuffle=False, collate_fn=collate)
    assert batch["input_ids"].tolist() == batch["labels"].tolist() == [[*b"abcd"], [*b"efgh"]]
    batch["labels"].fill_(-100)
    assert batch["input_ids"].tolist() == [[*b"abcd"], [*b"efgh"]]
    assert dataset[0]["input_ids"].tolist() == [*b"abcd"]


def test_a_folder_gives_its_text_files_by_name_before_its_subfolders(tmp_path: Path) -> None:
    for name in ("z.md", "a.txt", "sub/a.py", "sub/b.json", "a/x.txt", ".hidden/x.txt", ".x.txt", "x.bin", "y.PY"):
        _write(tmp_path / name, name)
    dataset = _dataset(tmp_path, seq_length=2)
    text = bytes(token if token < 256 else 0 for token in _tokens(dataset)).decode()
    assert text.split("\0")[:5] == ["a.txt", "z.md", "a/x.txt", "sub/a.py", "sub/b.json"]
    assert len(_tokens(dataset)) // 2 == sum(len(name) + 1 for name in text.split("\0")[:5]) // 2


def test_a_named_file_is_read_whatever_its_suffix(tmp_path: Path) -> None:
    assert _tokens(_dataset(_write(tmp_path / "notes.rst", "abc"))) == [*b"abc", 256]


def test_max_samples_keeps_the_first_sequences_and_reads_no_further(tmp_path: Path) -> None:
    paths = _write(tmp_path / "a.txt", "0123456789"), _write(tmp_path / "b.txt", b"\xff\xff is never read")
    assert _tokens(_dataset(*paths, max_samples=2)) == [*b"01234567"]
    with pytest.raises(ConfigError, match=r"isn't UTF-8.*b\.txt.*0xff at offset 0"):
        _dataset(*paths, max_samples=3)


def test_a_character_cut_by_max_samples_is_no_error(tmp_path: Path) -> None:
    assert _tokens(_dataset(_write(tmp_path / "a.txt", "abcé and more"), max_samples=1)) == [*"abcé".encode()][:4]


def test_fingerprint_is_that_of_the_tokens_used(tmp_path: Path) -> None:
    first = _dataset(_write(tmp_path / "a.txt", "abcdefgh"))
    expected = xxhash.xxh3_128(b"".join(byte.to_bytes(2, "little") for byte in b"abcdefgh")).hexdigest()
    assert first.fingerprint == expected
    assert _dataset(_write(tmp_path / "b.txt", "abcdefgh")).fingerprint == expected
    assert _dataset(_write(tmp_path / "a.txt", "abcdefgx")).fingerprint != expected
    assert DataLoader(first, batch_size=1).state_dict()["fingerprint"] == expected


def test_default_corpus_is_the_standard_library_the_same_in_every_process() -> None:
    dataset = build_text_dataset(DataConfig(seq_length=64, max_samples=3000))
    first = (Path(sysconfig.get_paths()["stdlib"]) / "__future__.py").read_bytes()
    assert bytes(_tokens(dataset)[:640]) == first[:640]
    assert len(dataset) == 3000
    script = (
        "from hyper_resume.config.schema import DataConfig; from hyper_resume.data import build_text_dataset; "
        "print(build_text_dataset(DataConfig(seq_length=64, max_samples=3000)).fingerprint)"
    )
    environment = dict(os.environ, PYTHONHASHSEED="77")
    other = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True, env=environment)
    assert other.stdout.strip() == dataset.fingerprint


def test_whole_default_corpus_is_large_and_leaves_out_what_differs_between_machines() -> None:
    dataset = build_text_dataset(DataConfig(seq_length=1024))
    assert 5_000 < len(dataset) < 30_000
    text = bytes(token if token < 256 else 0 for token in _tokens(dataset))
    assert b"class OrderedDict" in text
    assert b"build_time_vars = {" not in text  # the generated module, with this machine's paths


def test_text_that_is_not_there_is_named_before_anything_is_read(tmp_path: Path) -> None:
    present = _write(tmp_path / "a.txt", "x" * 100)
    with pytest.raises(ConfigError, match=r"data\.paths.*gone\.txt, .*nowhere"):
        _dataset(present, tmp_path / "gone.txt", tmp_path / "nowhere", max_samples=1)


def test_empty_text_is_refused_with_its_place(tmp_path: Path) -> None:
    _write(tmp_path / "a.txt", "")
    _write(tmp_path / "b.bin", "text")
    with pytest.raises(ConfigError, match=rf"no text found.*{tmp_path.name}.*\.txt"):
        _dataset(tmp_path)


def test_text_too_short_for_one_sequence_is_refused_with_both_lengths(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"too short.*seq_length=128.*4 tokens.*short\.txt"):
        _dataset(_write(tmp_path / "short.txt", "abc"), seq_length=128)


@pytest.mark.parametrize(("options", "named"), [({"seq_length": 1}, "seq_length"), ({"max_samples": 0}, "max_samples")])
def test_numbers_out_of_range_are_refused(options: dict[str, int], named: str) -> None:
    with pytest.raises(ConfigError, match=named):
        build_text_dataset(DataConfig(**options))  # type: ignore[arg-type]


# ---- a tokenizer folder


@pytest.fixture(scope="module")
def tokenizer_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A real tokenizer, trained here: words become tokens, <eos> ends a document."""
    vocabulary = {"<unk>": 0, "<eos>": 1, "one": 2, "two": 3, "three": 4}
    inner = tokenizers.Tokenizer(tokenizers.models.WordLevel(vocabulary, unk_token="<unk>"))
    inner.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    folder = tmp_path_factory.mktemp("tokenizer")
    fast = transformers.PreTrainedTokenizerFast(tokenizer_object=inner, unk_token="<unk>", eos_token="<eos>")
    fast.save_pretrained(folder)
    return folder


def test_a_tokenizer_folder_gives_its_tokens_and_its_own_end_token(tmp_path: Path, tokenizer_folder: Path) -> None:
    paths = _write(tmp_path / "a.txt", "one two"), _write(tmp_path / "b.txt", "three what one")
    dataset = _dataset(*paths, seq_length=3, tokenizer=str(tokenizer_folder))
    assert _tokens(dataset) == [2, 3, 1, 4, 0, 2]
    assert dataset.vocab_size == 8


@pytest.mark.parametrize("name", ["gpt2", "no/such/folder"])
def test_a_tokenizer_that_is_no_folder_is_refused_and_not_looked_for_elsewhere(tmp_path: Path, name: str) -> None:
    with pytest.raises(ConfigError, match=rf"data\.tokenizer.*{name}"):
        _dataset(_write(tmp_path / "a.txt", "abcdef"), tokenizer=name)


def test_a_folder_without_a_tokenizer_is_refused_with_its_name(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=rf"tokenizer can't be read.*{tmp_path.name}"):
        _dataset(_write(tmp_path / "a.txt", "abcdef"), tokenizer=str(tmp_path))


def test_noise_replaces_inputs_from_the_global_streams_and_leaves_labels_clean() -> None:
    tokens = np.full(1000, 7, dtype=np.uint16)
    dataset = TextDataset(tokens, seq_length=1000, vocab_size=264, noise=0.25)
    random.seed(5)
    np.random.seed(6)
    sample = dataset[0]
    # What the same streams give, drawn here by hand.
    replaced = np.random.RandomState(6).random_sample(1000) < 0.25
    byte = random.Random(5).randrange(256)
    assert sample["labels"].tolist() == [7] * 1000
    assert sample["input_ids"].tolist() == [byte if hit else 7 for hit in replaced]
    assert dataset[0]["input_ids"].tolist() != sample["input_ids"].tolist()


def test_without_noise_nothing_is_drawn() -> None:
    dataset = TextDataset(np.arange(64, dtype=np.uint16), seq_length=32, vocab_size=264)
    before = (random.getstate(), np.random.get_state(legacy=False)["state"]["key"].tobytes())
    assert torch.equal(dataset[1]["input_ids"], dataset[1]["labels"])
    assert before == (random.getstate(), np.random.get_state(legacy=False)["state"]["key"].tobytes())
