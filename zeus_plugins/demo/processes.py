"""Fresh processes that start fast, as forks of a server that has imported their modules."""

from __future__ import annotations

import importlib
import multiprocessing
import os
import sys
from collections.abc import Sequence
from multiprocessing import forkserver
from multiprocessing.context import BaseContext
from multiprocessing.process import BaseProcess
from pathlib import Path


class Launcher:
    """Runs a module's ``main(arguments) -> status`` repeatedly, each time in a fresh process.

    A fork server imports the module once, in the background, and each process is a fork of it. The server computes
    nothing, so that no fork inherits a thread pool of PyTorch. If the fork server cannot start, each process is a new
    interpreter.
    """

    def __init__(self, module: str) -> None:
        self._module = module
        self._context: BaseContext = multiprocessing.get_context("spawn")
        context = multiprocessing.get_context("forkserver")
        # Importing the client of the server takes as long as an epoch, and happens only in a training.
        context.set_forkserver_preload([module, "httpx"])
        try:
            forkserver.ensure_running()
        except OSError:
            return
        self._context = context

    def start(self, arguments: Sequence[str], log: Path) -> BaseProcess:
        """Run `main` in a new process, with the status as exit code and the log as output."""
        process: BaseProcess = self._context.Process(  # type: ignore[attr-defined]  # typeshed has it on the subclasses
            target=_execute_module, args=(self._module, list(arguments), log)
        )
        process.start()
        return process


def _execute_module(module: str, arguments: Sequence[str], log: Path) -> None:
    with log.open("a") as output:
        os.dup2(output.fileno(), 1)
        os.dup2(output.fileno(), 2)
    sys.exit(importlib.import_module(module).main(arguments))
