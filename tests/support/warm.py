"""Processes that start quickly: forks of a process that has already imported slow modules.

Such a process runs ``python -m MODULE ARGUMENT…`` with a separate environment, output and signals; it may be
stopped and killed like any other process. It ends with the tests at the latest. Without ``os.fork``, it is started
in the ordinary way.

The process that forks is itself a fork of this one, made by tests/conftest.py when all test files are imported and no
test has begun. It imports missing modules at the first request.
"""

from __future__ import annotations

import atexit
import faulthandler
import gc
import importlib
import json
import logging
import os
import random
import runpy
import signal
import subprocess
import sys
import threading
import time
import traceback
import warnings
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NoReturn, TextIO, TypeAlias

POLL_S = 0.005
# A hanging process becomes a failing test through this limit, which a busy machine must not reach.
LIMIT_S = 600.0

# Modules that processes of each kind need to have imported.
LIGHTNING = ("lightning.pytorch", "httpcore", "torch.distributed", "zeus_plugins.lightning")
TRANSFORMERS = (
    "transformers.trainer",
    "transformers.models.bert",
    "torch.distributed",
    "zeus_plugins.huggingface",
    "httpcore",
)


class Warm:
    """A process that imports modules and forks."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        theirs, requests = os.pipe()
        answers, back = os.pipe()
        # All present objects stay until the end: garbage collection skips them, and forks do not copy them.
        gc.collect()
        gc.freeze()
        with warnings.catch_warnings():
            # Python 3.12 and newer warn of other threads, such as pytest-xdist's, which hold no lock while waiting for
            # tests.
            warnings.simplefilter("ignore", DeprecationWarning)
            self._pid = os.fork()
        if self._pid == 0:
            serve(theirs, back)
        os.close(theirs)
        os.close(back)
        self._requests, self._answers = os.fdopen(requests, "w"), os.fdopen(answers)
        atexit.register(self._end)

    def _end(self) -> None:
        self._requests.close()  # the process and all its forks end with this input
        self._answers.close()
        os.waitpid(self._pid, 0)

    def ask(self, **request: Any) -> Any:
        with self._lock:
            self._requests.write(json.dumps(request) + "\n")
            self._requests.flush()
            return json.loads(self._answers.readline())


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


Process: TypeAlias = Fork | subprocess.Popen[bytes]


@cache
def warm() -> Warm:
    """Return the forking process of this test run."""
    return Warm()


def start(
    *command: str,
    modules: Sequence[str],
    output: Path,
    errors: Path | None = None,
    environ: Mapping[str, str] | None = None,
    folder: Path | None = None,
) -> Process:
    """Run ``python -m`` with a module's name and its arguments.

    Args:
        command: The module and the arguments.
        modules: Modules to import beforehand.
        output: The file to which the process appends its standard output and error.
        errors: A separate file for its standard error, if given.
        environ: Its environment, by default the environment of the tests.
        folder: Its working directory, by default the directory of the tests.
    """
    if not hasattr(os, "fork"):
        with output.open("a") as file, (errors or output).open("a") as other:
            return subprocess.Popen(
                [sys.executable, "-m", *command], cwd=folder, env=environ, stdout=file, stderr=other
            )
    pid = warm().ask(
        command=command,
        modules=modules,
        output=str(output),
        errors=str(errors or output),
        environ=dict(os.environ if environ is None else environ),
        folder=str(folder or Path.cwd()),
    )
    return Fork(warm(), pid)


def run(
    *command: str, modules: Sequence[str], environ: Mapping[str, str] | None = None, folder: Path | None = None
) -> subprocess.CompletedProcess[str]:
    """Start a process as `start` does, and wait for its end."""
    with TemporaryDirectory() as files:
        output, errors = Path(files, "output"), Path(files, "errors")
        started = start(*command, modules=modules, output=output, errors=errors, environ=environ, folder=folder)
        status = started.wait(LIMIT_S)
        return subprocess.CompletedProcess(command, status, output.read_text(), errors.read_text())


def serve(input_fd: int, output_fd: int) -> NoReturn:
    """Run the forking process until the end of its input."""
    status = 1
    try:
        forget_the_tests(input_fd, output_fd)
        with os.fdopen(input_fd) as requests, os.fdopen(output_fd, "w") as answers:
            take(requests, answers)
        status = 0
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(status)


def forget_the_tests(*kept: int) -> None:
    """Undo pytest's changes to this process: its output, hooks and files."""
    os.setsid()
    faulthandler.disable()
    low, high = sorted(kept)
    os.closerange(3, low)
    os.closerange(low + 1, high)
    os.closerange(high + 1, 256)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    # Output of imports is neither an answer nor captured by a test.
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
    sys.stdin = open(0, closefd=False)  # noqa: SIM115
    sys.stdout = open(1, "w", buffering=1, closefd=False)  # noqa: SIM115
    sys.stderr = open(2, "w", buffering=1, closefd=False, errors="backslashreplace")  # noqa: SIM115
    # The importer of test files runs none as a program.
    sys.meta_path[:] = [each for each in sys.meta_path if type(each).__module__ != "_pytest.assertion.rewrite"]
    sys.excepthook, sys.unraisablehook = sys.__excepthook__, sys.__unraisablehook__
    threading.excepthook = threading.__excepthook__
    logging.getLogger().handlers.clear()
    for reference in logging._handlerList:  # type: ignore[attr-defined]  # including handlers of the frameworks
        handler = reference()
        if type(handler) is logging.StreamHandler:
            handler.setStream(sys.stderr)
    warnings.resetwarnings()
    for unseen in (DeprecationWarning, PendingDeprecationWarning, ImportWarning, ResourceWarning):
        warnings.simplefilter("ignore", unseen)
    warnings.filterwarnings("default", category=DeprecationWarning, module="__main__")


def take(requests: TextIO, answers: TextIO) -> None:
    imported: set[str] = set()
    running: set[int] = set()
    for line in requests:
        request = json.loads(line)
        if "poll" in request:
            pid, status = os.waitpid(request["poll"], os.WNOHANG)
            running.discard(pid)
            answer = os.waitstatus_to_exitcode(status) if pid else None
        else:
            missing = set(request.pop("modules")) - imported
            if missing:
                for module in sorted(missing):
                    importlib.import_module(module)
                imported |= missing
                gc.freeze()
            answer = os.fork()
            if answer == 0:
                become(**request)
            running.add(answer)
        answers.write(json.dumps(answer) + "\n")
        answers.flush()
    for pid in running:
        os.kill(pid, signal.SIGKILL)


def become(command: Sequence[str], output: str, errors: str, environ: dict[str, str], folder: str) -> NoReturn:
    """Become the requested process, until its end."""
    os.setsid()
    nothing = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, 0)
    for number, file in ((1, output), (2, errors)):
        os.dup2(os.open(file, os.O_WRONLY | os.O_CREAT | os.O_APPEND), number)
    os.closerange(3, 256)
    os.environ.clear()
    os.environ.update(environ)
    os.chdir(folder)
    random.seed()
    module, *arguments = command
    if not hasattr(sys.modules.get(module), "__path__"):
        sys.modules.pop(module, None)  # a test file may have imported it
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
        # The interpreter does this at its end.
        threading._shutdown()  # type: ignore[attr-defined]
        atexit._run_exitfuncs()
        sys.stdout.flush()
        sys.stderr.flush()
    os._exit(status)
