"""Fresh processes that start at once: forks of one that has imported what takes seconds to import."""

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
    """Runs a module again and again, each time in a fresh process.

    A fork server imports the module in the background, once; each process is a fork of it. The server itself has never
    computed anything, so that no thread pool of PyTorch is forked. Where no fork server can start, each process is a
    new interpreter, which imports the module itself. The module has a function ``main(arguments) -> status``.
    """

    def __init__(self, module: str) -> None:
        self._module = module
        self._context: BaseContext = multiprocessing.get_context("spawn")
        if "forkserver" not in multiprocessing.get_all_start_methods():
            return
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload([module])
        try:
            forkserver.ensure_running()
        except OSError:
            return
        self._context = context

    def start(self, arguments: Sequence[str], log: Path) -> BaseProcess:
        """Run the module's `main` in a new process, whose exit code is the status and whose output goes to the log."""
        try:
            return self._started(arguments, log)
        except (OSError, EOFError):
            # The fork server does not answer any more.
            self._context = multiprocessing.get_context("spawn")
            return self._started(arguments, log)

    def _started(self, arguments: Sequence[str], log: Path) -> BaseProcess:
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
