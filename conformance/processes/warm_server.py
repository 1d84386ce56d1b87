"""A process that has imported a trainer and forks ranks. Started by :class:`conformance.processes.local.WarmServer`.

``python -m conformance.processes.warm_server MODULE``; the protocol is JSON lines on stdin and stdout:

* ``{"start": n, "arguments": [...], "environment": {...}, "folder": DIR, "log": FILE}`` is answered by
  ``{"started": n, "pid": p}`` and, when the child is dead, by ``{"ended": n, "status": wait status}``.

The launcher sends signals to its children itself. When stdin ends, all children are killed.

This process never runs a leg itself, has no threads and computes nothing. So a child starts like a fresh process, except for
the imports.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import faulthandler
import gc
import importlib
import json
import os
import selectors
import signal
import sys
import threading
import traceback
from collections.abc import Mapping
from typing import Any, NoReturn

_PR_SET_PDEATHSIG = 1


def main() -> None:
    """Serve until stdin ends."""
    module = importlib.import_module(sys.argv[1])
    prepare = getattr(module, "prepare", None)
    if prepare is not None:
        prepare()
    # A child that collects garbage would read, and so copy, every object that is loaded here.
    gc.collect()
    gc.freeze()
    # The output of a leg must not mix with the lines of the protocol.
    out = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    wake_read, wake_write = os.pipe()
    os.set_blocking(wake_read, False)
    os.set_blocking(wake_write, False)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    signal.set_wakeup_fd(wake_write, warn_on_full_buffer=False)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    Server(module, out, wake_read).serve()


class Server:
    """The loop, and the children by their number."""

    def __init__(self, module: Any, out: Any, wake: int) -> None:
        """``wake`` is readable when a child may have ended."""
        self._module, self._out, self._wake = module, out, wake
        self._children: dict[int, int] = {}

    def serve(self) -> None:
        """Answer until stdin ends, then kill what is left."""
        self._answer(ready=True)
        buffer = b""
        with selectors.DefaultSelector() as selector:
            selector.register(0, selectors.EVENT_READ)
            selector.register(self._wake, selectors.EVENT_READ)
            while True:
                ready = {key.fd for key, _ in selector.select()}
                if self._wake in ready:
                    with contextlib.suppress(BlockingIOError):
                        os.read(self._wake, 4096)
                    self._reap()
                if 0 in ready:
                    chunk = os.read(0, 65536)
                    if not chunk:
                        break
                    *lines, buffer = (buffer + chunk).split(b"\n")
                    for line in lines:
                        self._start_child(json.loads(line))
        for pid in self._children:
            # One that was forked just now leads no group yet.
            for kill in (os.kill, os.killpg):
                with contextlib.suppress(ProcessLookupError):
                    kill(pid, signal.SIGKILL)

    def _start_child(self, order: Mapping[str, Any]) -> None:
        pid = os.fork()
        if pid == 0:
            _become_leg(self._module, order)
        self._children[pid] = order["start"]
        self._answer(started=order["start"], pid=pid)

    def _reap(self) -> None:
        while self._children:
            try:
                pid, status = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                return
            if pid == 0:
                return
            if pid in self._children:
                self._answer(ended=self._children.pop(pid), status=status)

    def _answer(self, **answer: Any) -> None:
        self._out.write(json.dumps(answer) + "\n")
        self._out.flush()


def _become_leg(module: Any, order: Mapping[str, Any]) -> NoReturn:
    """Turn the forked child into a rank: its own session, streams and environment; run it; exit as an interpreter does."""
    code = 1
    try:
        signal.set_wakeup_fd(-1)
        for number in (signal.SIGCHLD, signal.SIGINT, signal.SIGTERM):
            signal.signal(number, signal.SIG_DFL)
        os.setsid()
        # A leg must not outlive the runner, and the runner's death closes this server.
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        log = os.open(order["log"], os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
        null = os.open(os.devnull, os.O_RDONLY)
        os.dup2(null, 0)
        os.dup2(log, 1)
        os.dup2(log, 2)
        os.closerange(3, 64)
        faulthandler.enable()
        os.environ.update(order["environment"])
        os.chdir(order["folder"])
        sys.argv = [module.__name__, *order["arguments"]]
        code = module.main(order["arguments"])
        threading._shutdown()  # type: ignore[attr-defined]  # waits for threads, as at an interpreter's end
    except SystemExit as error:
        code = error.code if isinstance(error.code, int) else 1
    except BaseException:  # noqa: BLE001  nothing may get back into the server's loop
        traceback.print_exc()
    finally:
        with contextlib.suppress(BaseException):
            atexit._run_exitfuncs()
        with contextlib.suppress(BaseException):
            sys.stdout.flush()
            sys.stderr.flush()
        os._exit(code)


if __name__ == "__main__":
    main()
