"""Starts a server and lets the job recur, each recurrence in a process of its own, as in production."""

from __future__ import annotations

import json
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from zeus_plugins.client.http import BsoClient
from zeus_plugins.demo.display import Display
from zeus_plugins.demo.job import FAILED_TRIAL_STATUS, JOB, job_by
from zeus_plugins.demo.plot import plot_costs
from zeus_plugins.errors import ZeusBSOError, ZeusBSORuntimeError
from zeus_plugins.protocol import JobView, PolicyName, TrialView

_POLL_S = 0.3
_SERVER_START_S = 60.0
# While the machine is busy with something else, every run may seem too costly: the next recurrence has better luck.
_MAX_TRIES = len(JOB.batch_sizes) + 1


@dataclass(frozen=True)
class Outcome:
    """What a demo found.

    Attributes:
        job: The job with all its trials, as the server tells it.
        recurrences: How often the training recurred.
        wall_s: Seconds that all of it took, server start and process starts included.
        best_batch_size: The batch size with the lowest mean cost.
        cost_ratio: Mean cost at the best batch size over mean cost at the default one.
        database_url: What to give to `bso-server serve` to see the trials again.
        directory: Where `summary.json` and `costs.png` are.
    """

    job: JobView
    recurrences: int
    wall_s: float
    best_batch_size: int | None
    cost_ratio: float | None
    database_url: str
    directory: Path


def run(recurrences: int, directory: Path, policy: PolicyName = JOB.policy, *, verbose: bool = False) -> Outcome:
    """Let the job recur, shown on the terminal; leave the database, a summary and a plot in `directory`.

    Args:
        recurrences: How often the training recurs, each time until it reaches its target.
        directory: Made if need be. The database of an earlier demo in it is replaced.
        policy: Chooses the batch sizes.
        verbose: Show the numbers behind each decision, too.

    Raises:
        ZeusBSORuntimeError: The server did not start, or a training broke.
    """
    began = time.monotonic()
    directory.mkdir(parents=True, exist_ok=True)
    database_url = _fresh_database(directory)
    display = Display(job_by(policy), recurrences, verbose=verbose)
    with _server(database_url, directory / "server.log") as server_url, BsoClient(server_url) as client, display.live():
        seed = 0
        for recurrence in range(1, recurrences + 1):
            for _try in range(_MAX_TRIES):
                seed += 1
                arguments = ["--server-url", server_url, "--seed", str(seed), "--policy", policy]
                if _train(arguments, recurrence, client, display, directory / "training.log"):
                    break
        job = client.show_job(JOB.job_id or "")
    outcome = Outcome(
        job=job,
        recurrences=recurrences,
        wall_s=time.monotonic() - began,
        best_batch_size=job.best_batch_size,
        cost_ratio=_cost_ratio(job),
        database_url=database_url,
        directory=directory,
    )
    _write_summary(outcome)
    plot_costs(job, directory / "costs.png")
    display.conclude(outcome)
    return outcome


def _fresh_database(directory: Path) -> str:
    database = directory.resolve() / "bso.sqlite3"
    for leftover in database.parent.glob(f"{database.name}*"):
        leftover.unlink()
    return f"sqlite:///{database}"


@contextmanager
def _server(database_url: str, log: Path) -> Iterator[str]:
    """A server process; yields its URL once it answers."""
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
        port: int = probe.getsockname()[1]
        return port


def _wait_until_up(process: subprocess.Popen[bytes], server_url: str, log: Path) -> None:
    deadline = time.monotonic() + _SERVER_START_S
    with BsoClient(server_url, timeout_s=_SERVER_START_S) as client:
        while True:
            try:
                client.list_jobs()
            except ZeusBSOError:
                if process.poll() is not None or time.monotonic() > deadline:
                    raise ZeusBSORuntimeError(f"the server did not start; {log} says why") from None
                time.sleep(_POLL_S)
            else:
                return


def _train(arguments: list[str], recurrence: int, client: BsoClient, display: Display, log: Path) -> bool:
    """Launch one training and show it until it ends; whether it reached its target."""
    command = [sys.executable, "-m", "zeus_plugins.demo.digits", *arguments]
    known = display.shown_trials
    with log.open("a") as output:
        process = subprocess.Popen(command, stdout=output, stderr=subprocess.STDOUT)  # noqa: S603 - our own training
    try:
        while process.poll() is None:
            display.show(recurrence, _latest_trial(client, known))
            time.sleep(_POLL_S)
    finally:
        # Only an interruption, such as Ctrl-C, leaves it running.
        process.terminate()
        process.wait()
    if process.returncode not in (0, FAILED_TRIAL_STATUS):
        raise ZeusBSORuntimeError(f"the training broke with exit status {process.returncode}; {log} says why")
    display.settle(recurrence, _latest_trial(client, known))
    return process.returncode == 0


def _latest_trial(client: BsoClient, known: int) -> TrialView | None:
    """The trial after the first `known` ones, or None while the training has not asked for it yet."""
    job_id = JOB.job_id or ""
    if not any(job.job_id == job_id and job.trials > known for job in client.list_jobs().jobs):
        return None
    return client.show_job(job_id).trials[-1]


def _cost_ratio(job: JobView) -> float | None:
    mean_cost_j = {arm.batch_size: arm.mean_cost_j for arm in job.arms}
    default_j = mean_cost_j[job.job.default_batch_size]
    best_j = None if job.best_batch_size is None else mean_cost_j[job.best_batch_size]
    return None if default_j is None or best_j is None else best_j / default_j


_SUMMARY_FIELDS = {
    "trial_number",
    "batch_size",
    "state",
    "time_s",
    "energy_j",
    "energy_source",
    "cost_j",
    "epochs",
    "metric",
}


def _write_summary(outcome: Outcome) -> None:
    summary = {
        "policy": outcome.job.job.policy,
        "recurrences": outcome.recurrences,
        "trials": [trial.model_dump(mode="json", include=_SUMMARY_FIELDS) for trial in outcome.job.trials],
        "best_batch_size": outcome.best_batch_size,
        "default_batch_size": outcome.job.job.default_batch_size,
        "cost_ratio_best_to_default": outcome.cost_ratio,
        "database": outcome.database_url,
        "wall_s": round(outcome.wall_s, 1),
    }
    (outcome.directory / "summary.json").write_text(json.dumps(summary, indent=2) + "\n")
