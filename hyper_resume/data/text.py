"""A dataset of token sequences of one length, from text files.

The documents are concatenated, each followed by an end-of-document token, and cut into sequences of ``seq_length`` tokens
without overlap; tokens that don't fill the last sequence are dropped. The order of the documents depends only on their names,
so every rank gets the same sequences, and so does a resumed run. The fingerprint allows to check that.

Text is UTF-8. A named file is read whatever its suffix. From a named folder, the files with a suffix in ``FOLDER_SUFFIXES`` are
read, sorted by name, those of a folder before those of its subfolders; names that begin with a dot are skipped.
"""

from __future__ import annotations

import codecs
import os
import random
import sysconfig
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
import torch
import xxhash

from hyper_resume.config.schema import DataConfig
from hyper_resume.errors import ConfigError, UnsupportedError, describe

FOLDER_SUFFIXES = (".json", ".md", ".py", ".txt")

# Left out of the default corpus, because they differ between two installations of the same Python: installed packages, and the
# generated module of build settings, which contains paths. Test folders contain files that are broken on purpose.
_STDLIB_FOLDERS_LEFT_OUT = frozenset({"site-packages", "dist-packages", "test", "tests", "idle_test", "__pycache__"})
_STDLIB_FILES_LEFT_OUT = "_sysconfigdata"

_END_OF_DOCUMENT = 256  # the token behind the 256 byte values
_VOCAB_MULTIPLE = 8

Tokens = npt.NDArray[np.integer[Any]]


class TextDataset:
    """Sequences of tokens, by index.

    Args:
        tokens: array of shape ``[at least seq_length]``, uint16 or int32; the incomplete last sequence is dropped.
        seq_length: tokens per sequence.
        vocab_size: rows that the model's embedding needs.
        noise: fraction of a sequence's input tokens that is replaced, at each reading, by one random byte. NumPy's random
            stream selects the tokens, Python's the byte. The labels are not changed.

    Attributes:
        fingerprint: xxh3_128 of the tokens used, in hex.

    Raises:
        ConfigError: there are fewer tokens than one sequence needs.
    """

    def __init__(self, tokens: Tokens, *, seq_length: int, vocab_size: int, noise: float = 0.0) -> None:
        """Keep ``tokens`` with their dtype, 2 or 4 bytes each."""
        count = len(tokens) // seq_length
        if count == 0:
            expected = f"at least seq_length={seq_length} tokens"
            message = describe(
                "the text is too short for one sequence", expected=expected, found=f"{len(tokens)} tokens"
            )
            raise ConfigError(message)
        self.seq_length = seq_length
        self.noise = noise
        self.vocab_size = vocab_size
        used = np.ascontiguousarray(tokens[: count * seq_length])
        self.fingerprint: str = xxhash.xxh3_128_hexdigest(used.astype(used.dtype.newbyteorder("<"), copy=False).data)
        self._sequences = torch.from_numpy(used).view(count, seq_length)

    def __len__(self) -> int:
        """Number of sequences."""
        return self._sequences.shape[0]

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        """Sequence ``index``: ``input_ids`` and ``labels``, int64 ``[seq_length]``; a causal model shifts the labels.

        Without noise the two are equal, and no random number is drawn.

        Raises:
            IndexError: ``index`` is not between 0 and ``len(self) - 1``.
        """
        if not 0 <= index < len(self):
            raise IndexError(f"sequence {index} of {len(self)}")
        sequence = self._sequences[index].to(torch.int64)
        return {"input_ids": self._with_noise(sequence) if self.noise else sequence, "labels": sequence}

    def _with_noise(self, sequence: torch.Tensor) -> torch.Tensor:
        replaced = torch.from_numpy(np.random.random(len(sequence)) < self.noise)
        return sequence.masked_fill(replaced, random.randrange(_END_OF_DOCUMENT))


def collate(samples: list[dict[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
    """Stack samples: int64 ``[batch, seq_length]`` for each key; the keys don't share memory."""
    return {key: torch.stack([sample[key] for sample in samples]) for key in samples[0]}


def build_text_dataset(config: DataConfig) -> TextDataset:
    """The dataset that ``config`` describes: from its ``paths``, or from this Python's standard library if there are none.

    Files are read in order, until ``max_samples`` sequences are full.

    Raises:
        ConfigError: a number is out of range, a path or the tokenizer folder does not exist or can't be read, a named file is
            not UTF-8, or the text does not fill one sequence.
        UnsupportedError: a tokenizer folder is named, but ``transformers`` is not installed.
    """
    _check_sizes(config)
    files = _named_files(config.paths) if config.paths else _stdlib_files()
    tokenizer: _Tokenizer = _ByteTokenizer() if config.tokenizer == "bytes" else _FolderTokenizer(config.tokenizer)
    wanted = None if config.max_samples is None else config.max_samples * config.seq_length
    pieces: list[Tokens] = []
    total = 0
    for path in files:
        document = _read_text(path, wanted if tokenizer.token_per_byte else None, required=bool(config.paths))
        if not document:
            continue
        pieces.append(tokenizer.encode(document))
        total += len(pieces[-1])
        if wanted is not None and total >= wanted:
            break
    if not pieces:
        expected = f"files that aren't empty (in folders: {' '.join(FOLDER_SUFFIXES)})"
        raise ConfigError(describe("no text found", where=_source(config), expected=expected))
    try:
        tokens = np.concatenate(pieces)[:wanted]
        return TextDataset(
            tokens, seq_length=config.seq_length, vocab_size=tokenizer.vocab_size, noise=config.token_noise
        )
    except ConfigError as error:
        raise ConfigError(f"{error}; where: {_source(config)}") from None


class _Tokenizer(Protocol):
    vocab_size: int
    token_per_byte: bool

    def encode(self, document: bytes) -> Tokens: ...


class _ByteTokenizer:
    """One token per byte, and one after each document: 257 tokens."""

    token_per_byte = True

    def __init__(self) -> None:
        self.vocab_size = _round_up(_END_OF_DOCUMENT + 1)

    def encode(self, document: bytes) -> Tokens:
        tokens = np.empty(len(document) + 1, dtype=np.uint16)
        tokens[:-1] = np.frombuffer(document, dtype=np.uint8)
        tokens[-1] = _END_OF_DOCUMENT
        return tokens


class _FolderTokenizer:
    """A Hugging Face tokenizer in a local folder; its end-of-sequence token, if any, follows each document."""

    token_per_byte = False

    def __init__(self, folder: str) -> None:
        # For anything but a folder, transformers would search the network.
        if not Path(folder).is_dir():
            expected = "'bytes' or a folder with a Hugging Face tokenizer"
            raise ConfigError(describe("no such tokenizer", where="data.tokenizer", expected=expected, found=folder))
        try:
            from transformers import AutoTokenizer
        except ImportError as error:
            message = describe("a tokenizer folder needs transformers", do="pip install 'hyper_resume[models]'")
            raise UnsupportedError(message) from error
        try:
            self._tokenizer = AutoTokenizer.from_pretrained(folder, local_files_only=True)
        except (OSError, ValueError, KeyError, TypeError) as error:
            found = f"{type(error).__name__}: {error}"
            raise ConfigError(describe("the tokenizer can't be read", where=folder, found=found)) from error
        self._dtype = np.uint16 if len(self._tokenizer) <= 2**16 else np.int32
        self.vocab_size = _round_up(len(self._tokenizer))

    def encode(self, document: bytes) -> Tokens:
        text = document.decode("utf-8")
        # With verbose it would warn of every document that is longer than the model's context; documents are cut here anyway.
        token_ids = list(self._tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"])
        if self._tokenizer.eos_token_id is not None:
            token_ids.append(self._tokenizer.eos_token_id)
        return np.asarray(token_ids, dtype=self._dtype)


def _round_up(tokens: int) -> int:
    """Embedding rows for this many tokens: a multiple that small tensor-parallel sizes divide."""
    return -(-tokens // _VOCAB_MULTIPLE) * _VOCAB_MULTIPLE


def _check_sizes(config: DataConfig) -> None:
    # A causal model predicts each token from those before it, so it can't learn from a sequence of one token.
    if config.seq_length < 2:
        raise ConfigError(describe("data.seq_length is too small", expected="2 or more", found=str(config.seq_length)))
    if config.max_samples is not None and config.max_samples < 1:
        raise ConfigError(
            describe("data.max_samples is too small", expected="1 or more", found=str(config.max_samples))
        )


def _source(config: DataConfig) -> str:
    return f"data.paths: {', '.join(config.paths) or 'the standard library of this Python'}"


def _named_files(names: tuple[str, ...]) -> Iterator[Path]:
    paths = [Path(name) for name in names]
    missing = [str(path) for path in paths if not (path.is_file() or path.is_dir())]
    if missing:
        expected = "files or folders that exist"
        raise ConfigError(describe("text not found", where="data.paths", expected=expected, found=", ".join(missing)))
    return (file for path in paths for file in ([path] if path.is_file() else _folder_files(path, FOLDER_SUFFIXES)))


def _stdlib_files() -> Iterator[Path]:
    folder = Path(sysconfig.get_paths()["stdlib"])
    return (
        file
        for file in _folder_files(folder, (".py",), left_out=_STDLIB_FOLDERS_LEFT_OUT)
        if not file.name.startswith(_STDLIB_FILES_LEFT_OUT)
    )


def _folder_files(folder: Path, suffixes: tuple[str, ...], left_out: frozenset[str] = frozenset()) -> Iterator[Path]:
    """Files under ``folder``, by name, those of a folder before those of its subfolders; links to folders are not followed."""

    def cannot_list(error: OSError) -> None:
        raise ConfigError(describe("a folder of text can't be read", found=str(error))) from error

    for place, subfolders, names in os.walk(folder, onerror=cannot_list):
        # os.walk continues with the folders in this list, in this order.
        subfolders[:] = sorted(name for name in subfolders if name not in left_out and not name.startswith("."))
        for name in sorted(names):
            file = Path(place, name)
            if file.suffix in suffixes and not name.startswith(".") and file.is_file():
                yield file


def _read_text(path: Path, limit_bytes: int | None, *, required: bool) -> bytes:
    """The file's UTF-8 bytes, at most ``limit_bytes``; empty for a file that is neither UTF-8 nor ``required``."""
    try:
        with path.open("rb") as file:
            document = file.read(-1 if limit_bytes is None else limit_bytes)
    except OSError as error:
        raise ConfigError(describe("a text file can't be read", found=str(error))) from error
    try:
        # A character that the limit cuts in two is not an error.
        codecs.getincrementaldecoder("utf-8")().decode(
            document, final=limit_bytes is None or len(document) < limit_bytes
        )
    except UnicodeDecodeError as error:
        if not required:
            return b""
        found = f"byte {document[error.start]:#04x} at offset {error.start}"
        raise ConfigError(describe("a text file isn't UTF-8", where=str(path), found=found)) from error
    return document
