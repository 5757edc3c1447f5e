"""The demo: a server, and a job whose recurrences each run in a process of their own, as in production."""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import sys
import time
import webbrowser
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from multiprocessing.process import BaseProcess
from pathlib import Path

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from zeus_plugins.client.http import BsoClient
from zeus_plugins.demo import JOB
from zeus_plugins.demo.processes import Launcher
from zeus_plugins.errors import ZeusBSOError, ZeusBSORuntimeError, ZeusBSOTrainFailError
from zeus_plugins.protocol import JobView, TrialState, TrialView, is_estimated, is_time_alone, printable

_POLL_S = 0.3
_SERVER_START_S = 60.0
# Limits the launches of one recurrence: on a busy machine, every run may seem too costly.
_MAX_TRIES = len(JOB.batch_sizes) + 1


def run_demo(recurrences: int, directory: Path, *, opens: bool = False) -> None:
    """Let the job recur, each time until its training reaches the target, and show the runs on the terminal.

    Write a database to `directory`, and replace the files of an earlier demo. With `opens`, open the server's dashboard
    in a browser.

    Raises:
        ZeusBSORuntimeError: The server did not start, or a training broke.
    """
    directory.mkdir(parents=True, exist_ok=True)
    launcher = Launcher("zeus_plugins.demo.digits")
    database_url, log = f"sqlite:///{directory.resolve() / 'bso.sqlite3'}", directory / "training.log"
    for leftover in directory.glob("bso.sqlite3*"):
        leftover.unlink()
    console = Console(width=None if sys.stdout.isatty() else _WIDTH)
    with (
        _server(database_url, directory / "server.log") as server_url,
        BsoClient(server_url) as client,
    ):
        _introduce(console, recurrences, f"{server_url}/ui/")
        if opens:
            webbrowser.open(f"{server_url}/ui/")
        seed = 0
        for recurrence in range(1, recurrences + 1):
            for _try in range(_MAX_TRIES):
                seed += 1
                arguments = ["--server-url", server_url, "--seed", str(seed)]
                reached = _finished(launcher.start(arguments, log), log)
                _show(console, recurrence, client.show_job(JOB.job_id or "").trials[-1])
                if reached:
                    break
        job = client.show_job(JOB.job_id or "")
    _conclude(console, job, database_url)


@contextmanager
def _server(database_url: str, log: Path) -> Iterator[str]:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port = int(listener.getsockname()[1])
    command = [sys.executable, "-m", "bso_server", "serve", "--port", str(port), "--database-url", database_url]
    with log.open("w") as output:
        process = subprocess.Popen(command, stdout=output, stderr=subprocess.STDOUT)  # nosec B603  # noqa: S603 - our own server
    server_url, deadline = f"http://127.0.0.1:{port}", time.monotonic() + _SERVER_START_S
    try:
        while not _is_up(server_url):
            if process.poll() is not None or time.monotonic() > deadline:
                raise ZeusBSORuntimeError(f"the server did not start; {log} says why")
            time.sleep(_POLL_S)
        yield server_url
    finally:
        process.terminate()
        process.wait()


def _is_up(server_url: str) -> bool:
    with BsoClient(server_url, timeout_s=_SERVER_START_S) as client, suppress(ZeusBSOError):
        client.list_jobs()
        return True
    return False


def _finished(training: BaseProcess, log: Path) -> bool:
    """Wait until a training ends; return True if it reached its target."""
    try:
        training.join()
    finally:
        # The process still runs only after an interruption, such as Ctrl-C.
        training.terminate()
        training.join()
    if training.exitcode not in (0, ZeusBSOTrainFailError.exit_status):
        raise ZeusBSORuntimeError(f"the training broke with exit status {training.exitcode}; {log} says why")
    return training.exitcode == 0


_OUTCOMES = {
    TrialState.COMPLETED: "[green]target reached[/]",
    TrialState.EARLY_STOPPED: "[yellow]too costly[/]",
    TrialState.EXHAUSTED: "[yellow]out of epochs[/]",
}

# Columns of an output that is no terminal.
_WIDTH = 100


def _introduce(console: Console, recurrences: int, dashboard_url: str) -> None:
    """Introduce the job, print the dashboard's URL, and begin a table of trials."""
    for paragraph in (
        f"A network learns handwritten digits until {JOB.target_metric:.0%} of the validation images are right. "
        f"This training recurs {recurrences} times, each time in a new process.",
        f"Each run asks a server for its batch size, one of {', '.join(map(str, JOB.batch_sizes))}. The default, "
        f"which it would have without the server, is {JOB.default_batch_size}, as copied from a larger training. "
        "At the end it reports its cost in joules: half the energy plus half of maximum power × time.",
        "The server tries a new size if later runs are expected to save more than the trial costs. Otherwise it uses "
        "the best size so far.",
    ):
        console.print(paragraph, end="\n\n")
    console.print(f"Watch it live: {dashboard_url}", end="\n\n", soft_wrap=True)
    console.print(_row(_COLUMNS, style="bold"))


def _show(console: Console, recurrence: int, trial: TrialView) -> None:
    """Show an ended trial as a row of the table."""
    cells = [
        str(recurrence),
        str(trial.batch_size),
        _number(trial.epochs, 0),
        _number(trial.time_s, 1),
        _number(trial.cost_j, 0),
        _OUTCOMES.get(trial.state, trial.state),
        escape(printable(trial.reason)),
    ]
    console.print(_row(cells))


def _conclude(console: Console, job: JobView, database_url: str) -> None:
    """Print the verdict, the sources of the energy, and ways to look again."""
    say, savings = console.print, job.savings
    say()
    for line in filter(None, (f"[bold]{savings.claim}.[/]", savings.evidence, savings.so_far)):
        say(line)
    if not savings.is_shown:
        say("Let the job recur more often: --recurrences says how often.")
    sources = sorted({trial.energy_source or "not measured" for trial in job.trials})
    meaning = ""
    if all(map(is_time_alone, sources)):
        meaning = ". No energy counter was found here: the costs only say what takes less time"
    elif any(map(is_estimated, sources)):
        meaning = ". No energy counter was found here: energies and costs are estimated"
    say(f"Energy: {', '.join(sources)}{meaning}.")
    show = f"jobs show {job.job.job_id} --database-url {database_url}"
    say(f"Look again: {_command('bso-server')} {show}", soft_wrap=True)
    serve = f"{_command('bso-server')} serve --database-url {database_url}"
    say(f"Look at it: {serve}, then open http://127.0.0.1:8000/ui/jobs/{job.job.job_id}", soft_wrap=True)


_COLUMNS = ("run", "size", "epochs", "seconds", "cost J", "outcome", "why this size")
_WIDTHS = (3, 5, 6, 7, 6, 14)


def _row(cells: Sequence[str], style: str = "") -> Table:
    """Return a table of one row, so that each row appears as soon as its trial has ended."""
    table = Table(box=None, show_header=False, expand=True, padding=(0, 2, 0, 0), style=style)
    for width in _WIDTHS:
        table.add_column(width=width, justify="left" if width == _WIDTHS[-1] else "right")
    table.add_column(ratio=1)
    table.add_row(*cells)
    return table


def _number(value: float | None, digits: int) -> str:
    return "" if value is None else f"{value:.{digits}f}"


def _command(name: str) -> str:
    """Return the command's name, or its path if it is not on the PATH."""
    beside = Path(sys.executable).with_name(name)
    return name if shutil.which(name) or not beside.exists() else os.path.relpath(beside)
