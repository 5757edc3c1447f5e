"""Processes that start at once: forks of one that has imported already what takes seconds to import.

Such a process runs ``python -m MODULE ARGUMENT…`` and has an environment, an output and signals of its own; it may be
stopped and killed like any other. It ends with the tests at the latest. Where there is no ``os.fork``, it is started
the ordinary way.

Usage of the module itself, which the tests leave to `Warm`: ``python -m tests.support.warm MODULE…``. It imports the
modules and takes one request a line, as JSON.
"""

from __future__ import annotations

import atexit
import gc
import importlib
import json
import os
import random
import runpy
import signal
import subprocess
import sys
import threading
import time
import traceback
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any, NoReturn, Protocol

REPOSITORY = Path(__file__).parents[2]
POLL_S = 0.005

# What processes of each kind need to have imported.
LIGHTNING = ("lightning.pytorch", "torch.distributed", "zeus_plugins.lightning")
TRANSFORMERS = ("transformers.trainer", "transformers.models.bert", "torch.distributed", "zeus_plugins.huggingface")


class Process(Protocol):
    """The part of `subprocess.Popen` that the tests use."""

    pid: int

    def poll(self) -> int | None: ...

    def wait(self, timeout: float | None = None) -> int: ...

    def send_signal(self, sig: int) -> None: ...

    def terminate(self) -> None: ...

    def kill(self) -> None: ...


class Warm:
    """A process that has imported modules, and forks.

    Args:
        modules: The modules to import.
    """

    def __init__(self, *modules: str) -> None:
        self._lock = threading.Lock()
        self._process = subprocess.Popen(
            [sys.executable, "-m", "tests.support.warm", *modules],
            cwd=REPOSITORY,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )
        atexit.register(self._end)

    def start(
        self, *command: str, output: Path, environ: Mapping[str, str] | None = None, folder: Path | None = None
    ) -> Process:
        """Run ``python -m`` with a module's name and its arguments.

        Args:
            command: The module and the arguments.
            output: The file to which the process appends its standard output and error.
            environ: Its environment; the tests' own unless said otherwise.
            folder: Its working directory; the tests' own unless said otherwise.
        """
        started = self.ask(
            command=command,
            output=str(output),
            environ=dict(os.environ if environ is None else environ),
            folder=str(folder or Path.cwd()),
        )
        return Fork(self, started)

    def _end(self) -> None:
        with self._process:
            pass  # it ends with its input, and all forks with it

    def ask(self, **request: Any) -> Any:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        with self._lock:
            self._process.stdin.write(json.dumps(request) + "\n")
            self._process.stdin.flush()
            return json.loads(self._process.stdout.readline())


class Fork:
    """A process that `Warm` has started."""

    def __init__(self, parent: Warm, pid: int) -> None:
        self.pid = pid
        self.returncode: int | None = None
        self._parent = parent

    def poll(self) -> int | None:
        if self.returncode is None:
            self.returncode = self._parent.ask(poll=self.pid)
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        deadline = None if timeout is None else time.monotonic() + timeout
        while (status := self.poll()) is None:
            if deadline is not None and time.monotonic() > deadline:
                raise subprocess.TimeoutExpired([str(self.pid)], timeout or 0)
            time.sleep(POLL_S)
        return status

    def send_signal(self, sig: int) -> None:
        if self.poll() is None:
            os.kill(self.pid, sig)

    def terminate(self) -> None:
        self.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)


@cache
def warm(*modules: str) -> Warm:
    """The process of this test run that has imported the modules."""
    return Warm(*modules)


def start(
    *command: str,
    modules: Sequence[str],
    output: Path,
    environ: Mapping[str, str] | None = None,
    folder: Path | None = None,
) -> Process:
    """Run ``python -m`` with a module's name and its arguments, in a fork of a process that has imported `modules`."""
    if hasattr(os, "fork"):
        return warm(*modules).start(*command, output=output, environ=environ, folder=folder)
    with output.open("a") as file:
        arguments = [sys.executable, "-m", *command]
        return subprocess.Popen(arguments, cwd=folder, env=environ, stdout=file, stderr=subprocess.STDOUT)


def main(modules: Sequence[str]) -> None:
    requests, answers = sys.stdin, os.fdopen(os.dup(1), "w")
    # Whatever an import prints is no answer.
    os.dup2(2, 1)
    for module in modules:
        importlib.import_module(module)
    gc.freeze()
    running: set[int] = set()
    for line in requests:
        request = json.loads(line)
        if "poll" in request:
            pid, status = os.waitpid(request["poll"], os.WNOHANG)
            running.discard(pid)
            answer = os.waitstatus_to_exitcode(status) if pid else None
        else:
            answer = os.fork()
            if answer == 0:
                become(**request)
            running.add(answer)
        answers.write(json.dumps(answer) + "\n")
        answers.flush()
    for pid in running:
        os.kill(pid, signal.SIGKILL)


def become(command: Sequence[str], output: str, environ: dict[str, str], folder: str) -> NoReturn:
    """Be the process that was asked for, to its end."""
    os.setsid()
    nothing = os.open(os.devnull, os.O_RDONLY)
    file = os.open(output, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(nothing, 0)
    os.dup2(file, 1)
    os.dup2(file, 2)
    os.closerange(3, 256)
    os.environ.clear()
    os.environ.update(environ)
    os.chdir(folder)
    random.seed()
    module, *arguments = command
    sys.argv = [module, *arguments]
    status = 0
    try:
        runpy.run_module(module, run_name="__main__", alter_sys=True)
    except SystemExit as end:
        status = end.code if isinstance(end.code, int) else 0 if end.code is None else 1
        if isinstance(end.code, str):
            sys.stderr.write(f"{end.code}\n")
    except BaseException:
        traceback.print_exc()
        status = 1
    finally:
        # As the interpreter does at its end.
        threading._shutdown()  # type: ignore[attr-defined]
        atexit._run_exitfuncs()
        sys.stdout.flush()
        sys.stderr.flush()
    os._exit(status)


if __name__ == "__main__":
    main(sys.argv[1:])
