"""Step directories whose files say what somebody wants them to say, with digests that match: for tests of what reads them."""

from __future__ import annotations

import contextlib
import io
import json
import resource
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
import xxhash

from hyper_resume import cli

MANIFEST, INDEX, EXTRA = "manifest.json", "index.json", "extra_state/extra_state_rank_0.pt"


def sign(content: Mapping[str, Any]) -> bytes:
    """A manifest's bytes with the digest of its content, computed from the format's description."""
    bare = {key: value for key, value in content.items() if key != "digest"}
    canonical = json.dumps(bare, sort_keys=True, separators=(",", ":")).encode()
    return json.dumps({**bare, "digest": f"xxh3_128:{xxhash.xxh3_128_hexdigest(canonical)}"}).encode()


def replace(path: Path, content: bytes) -> None:
    """Put a new file in the place of one: the old one may still be mapped."""
    path.unlink()
    path.write_bytes(content)


def forge_file(step: Path, name: str, content: bytes) -> None:
    """Give a file other content, and the manifest the size and digest of it."""
    replace(step / name, content)
    manifest = json.loads((step / MANIFEST).read_text())
    digest = f"xxh3_128:{xxhash.xxh3_128_hexdigest(content)}"
    manifest["files"][name] = {**manifest["files"][name], "size_bytes": len(content), "digest": digest}
    # Of the values; without them nothing but the files' digests is compared.
    manifest["buckets"] = {}
    replace(step / MANIFEST, sign(manifest))


def saved(value: Any) -> bytes:
    """What ``torch.save`` writes."""
    buffer = io.BytesIO()
    torch.save(value, buffer)
    return buffer.getvalue()


def forge_training_state(step: Path, change: Mapping[Any, Any]) -> None:
    """Change parts of rank 0's training state."""
    state = torch.load(step / EXTRA, weights_only=True)
    forge_file(step, EXTRA, saved({**state, **change}))


class Told:
    """What one command did: its exit code, what it printed, and what it took."""

    def __init__(self, *words: str) -> None:
        """Run it in this process.

        Raises:
            Exception: what a user would see as a traceback.
        """
        out, err = io.StringIO(), io.StringIO()
        began, most = time.process_time(), resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
            self.code = cli.main(words)
        self.seconds = time.process_time() - began
        self.grown_bytes = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - most) << 10
        self.out, self.err = out.getvalue(), err.getvalue()

    @property
    def text(self) -> str:
        """All that was printed."""
        return self.out + self.err
