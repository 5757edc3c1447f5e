"""The demo: a server, and a job that recurs on it, each recurrence in a process of its own, as in production."""

from __future__ import annotations

import socket
import subprocess
import sys
import time
import webbrowser
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing.process import BaseProcess
from pathlib import Path

from zeus_plugins.client.http import BsoClient
from zeus_plugins.demo.display import Display
from zeus_plugins.demo.job import FAILED_TRIAL_STATUS, JOB, job_by
from zeus_plugins.demo.outcome import Outcome, plot_costs
from zeus_plugins.demo.processes import Launcher
from zeus_plugins.errors import ZeusBSOError, ZeusBSORuntimeError
from zeus_plugins.protocol import TrialView

_POLL_S = 0.3
_SERVER_START_S = 60.0
# While the machine is busy with something else, every run may seem too costly: the next recurrence has better luck.
_MAX_TRIES = len(JOB.batch_sizes) + 1


def run(recurrences: int, directory: Path, policy: str = JOB.policy, *, opens: bool = False) -> Outcome:
    """Let the job recur, each time until its training reaches the target, shown on the terminal.

    The database, a summary and a plot are left in `directory`, where they replace those of an earlier demo. With
    `opens`, a browser shows the server's dashboard meanwhile.

    Raises:
        ZeusBSORuntimeError: The server did not start, or a training broke.
    """
    began = time.monotonic()
    directory.mkdir(parents=True, exist_ok=True)
    launcher = Launcher("zeus_plugins.demo.digits")
    database_url, log = _fresh_database(directory), directory / "training.log"
    display = Display(job_by(policy), recurrences)
    with (
        _server(database_url, directory / "server.log") as server_url,
        BsoClient(server_url) as client,
        display.live(f"{server_url}/ui/"),
    ):
        if opens:
            webbrowser.open(f"{server_url}/ui/")
        seed = 0
        for recurrence in range(1, recurrences + 1):
            for _try in range(_MAX_TRIES):
                seed += 1
                arguments = ["--server-url", server_url, "--seed", str(seed), "--policy", policy]
                display.show(recurrence, None)
                if _watch(launcher.start(arguments, log), recurrence, client, display, log):
                    break
        job = client.show_job(JOB.job_id or "")
    outcome = Outcome(job, recurrences, time.monotonic() - began, database_url, directory)
    outcome.write_summary()
    plot_costs(outcome, directory / "costs.png")
    display.conclude(outcome)
    return outcome


def _fresh_database(directory: Path) -> str:
    database = directory.resolve() / "bso.sqlite3"
    for leftover in database.parent.glob(f"{database.name}*"):
        leftover.unlink()
    return f"sqlite:///{database}"


@contextmanager
def _server(database_url: str, log: Path) -> Iterator[str]:
    port = _free_port()
    command = [sys.executable, "-m", "bso_server", "serve", "--port", str(port), "--database-url", database_url]
    with log.open("w") as output:
        process = subprocess.Popen(command, stdout=output, stderr=subprocess.STDOUT)  # noqa: S603 - our own server
    server_url = f"http://127.0.0.1:{port}"
    try:
        _wait_until_up(process, server_url, log)
        yield server_url
    finally:
        process.terminate()
        process.wait()


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def _wait_until_up(process: subprocess.Popen[bytes], server_url: str, log: Path) -> None:
    deadline = time.monotonic() + _SERVER_START_S
    with BsoClient(server_url, timeout_s=_SERVER_START_S) as client:
        while True:
            try:
                client.list_jobs()
                return
            except ZeusBSOError:
                if process.poll() is not None or time.monotonic() > deadline:
                    raise ZeusBSORuntimeError(f"the server did not start; {log} says why") from None
                time.sleep(_POLL_S)


def _watch(training: BaseProcess, recurrence: int, client: BsoClient, display: Display, log: Path) -> bool:
    """Show a training until it ends; whether it reached its target."""
    known = display.shown_trials
    try:
        while training.exitcode is None:
            display.show(recurrence, _latest_trial(client, known))
            training.join(_POLL_S)
    finally:
        # Only an interruption, such as Ctrl-C, leaves it running.
        training.terminate()
        training.join()
    if training.exitcode not in (0, FAILED_TRIAL_STATUS):
        raise ZeusBSORuntimeError(f"the training broke with exit status {training.exitcode}; {log} says why")
    display.settle(recurrence, _latest_trial(client, known))
    return training.exitcode == 0


def _latest_trial(client: BsoClient, known: int) -> TrialView | None:
    """The trial after the first `known` ones, or None while the training has not asked for it yet."""
    job_id = JOB.job_id or ""
    if not any(job.job_id == job_id and job.trials > known for job in client.list_jobs().jobs):
        return None
    return client.show_job(job_id).trials[-1]
