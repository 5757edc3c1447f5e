"""Runs the steps of a measurement, each training in a fresh process, through a real server on SQLite."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path

from benchmarks.errors import BenchmarkError
from benchmarks.processes import bso_server, serving
from benchmarks.recurrences.parts import Bench, do_parts, parts_to_do
from benchmarks.recurrences.plan import Step
from benchmarks.recurrences.runs import FAILED_STATUS, REFUSED, Order
from benchmarks.recurrences.state import Record, State
from zeus_plugins.client.http import BsoClient
from zeus_plugins.demo.processes import Launcher
from zeus_plugins.protocol import Ending, TrialId, TrialState

MAX_TRIES = 12
"""Trainings of one recurrence; if none of them has reached the target, it is given up, or if the policy refuses."""


@dataclass(frozen=True, slots=True)
class Parts:
    """The order for the parts of a GPU; fields as in `Bench`."""

    shrink: int
    power_limits: str


class Trainings:
    """Trains in fresh processes, forks of one that has imported the frameworks, and keeps what came of it.

    Args:
        state: Where it is kept, and the logs.
        server_url: The server.
    """

    def __init__(self, state: State, server_url: str) -> None:
        self._state, self._server_url = state, server_url
        self._launcher = Launcher("benchmarks.recurrences.training")

    def attempt(self, step: Step) -> None:
        """The next training of a step: of a recurrence, the first or another one after those that missed the target.

        Raises:
            BenchmarkError: The training broke.
        """
        tried = self._state.of(step.key)
        record = self.run(replace(step.order, seed=step.order.seed + len(tried)))
        facts = {"stage": step.stage, "task": step.task, "seed": step.seed, "number": step.number, "who": step.who}
        self._state.add({"key": step.key, **facts, "drifted": step.order.drifted, **record})

    def run(self, order: Order, *, may_break: bool = False) -> Record:
        """Train once; the outcome, when it was, and the machine's load.

        Raises:
            BenchmarkError: The training broke, which it may if `may_break` says so.
        """
        return self.runs_at_once([order], may_break=may_break)[0]

    def runs_at_once(self, orders: Sequence[Order], *, may_break: bool = False) -> list[Record]:
        """Train in several processes at the same time; as `run`."""
        log = self._state.directory / "training.log"
        begun_at, begun_s = datetime.now(UTC).isoformat(timespec="seconds"), time.monotonic()
        files = [self._state.directory / f"outcome-{place}.json" for place in range(len(orders))]
        processes = []
        for order, file in zip(orders, files, strict=True):
            file.unlink(missing_ok=True)
            arguments = ["--order", order.to_json(), "--server-url", self._server_url, "--output", str(file)]
            processes.append(self._launcher.start(arguments, log))
        try:
            for process in processes:
                process.join()
        finally:
            for process in processes:
                process.terminate()  # only an interruption leaves one running
                process.join()
        records = []
        for process, file in zip(processes, files, strict=True):
            outcome = outcome_in(file)
            broke = process.exitcode not in (0, FAILED_STATUS) or outcome["state"] == "broken"
            if broke and not may_break:
                told = outcome["detail"] or f"exit status {process.exitcode}"
                raise BenchmarkError(f"a training broke: {told.strip()} ({log} may say more)")
            file.unlink(missing_ok=True)
            process_s = time.monotonic() - begun_s
            records.append({**outcome, "begun_at": begun_at, "process_s": process_s, "load_1": os.getloadavg()[0]})
        return records


def outcome_in(file: Path) -> Record:
    """The outcome that a training has written, or what is said of one that ended without a word."""
    if file.exists():
        outcome: Record = json.loads(file.read_text("utf-8"))
        return outcome
    return {"state": "broken", "detail": "", "batch_size": None, "energy_source": None, "notes": {}}


def is_done(step: Step, tried: Sequence[Record]) -> bool:
    """True if nothing is left to do of a step."""
    if step.stage != "recurrence":
        return bool(tried)
    return len(tried) >= MAX_TRIES or any(record["reached"] or record["state"] == REFUSED for record in tried)


class Piece:
    """The time of one piece of a measurement, in which at least one thing is done, so that pieces come to an end.

    Args:
        minutes: Its length; None: without an end.
    """

    def __init__(self, minutes: float | None) -> None:
        self._end_s = None if minutes is None else time.monotonic() + 60 * minutes
        self._is_empty = True

    def may_begin(self, expected_s: float) -> bool:
        """True if something of so many seconds ends in time, or is the first; then it is begun."""
        allowed = self._end_s is None or self._is_empty or time.monotonic() + expected_s <= self._end_s
        self._is_empty = self._is_empty and not allowed
        return allowed


def measure(
    steps: Sequence[Step],
    state: State,
    *,
    minutes: float | None,
    say: Callable[[str], None],
    parts: Parts | None = None,
) -> int:
    """Do the parts and the steps that are not done yet, for so many minutes at most.

    No training is begun that would end later, if it takes as long as the longest one of its task until then; but one
    thing is done in any case.

    Returns:
        The number of parts and steps that are left.

    Raises:
        BenchmarkError: The server did not start, or a training broke.
    """
    piece = Piece(minutes)
    left = [step for step in steps if not is_done(step, state.of(step.key))]
    say(f"{len(steps) - len(left)} of {len(steps)} steps are done")
    parts_left = 0 if parts is None else parts_to_do(state.directory)
    if not left and not parts_left:
        return 0
    with served(state.directory) as url:
        withdraw_unfinished(url)
        trainings = Trainings(state, url)
        if parts is not None:
            parts_left = _show_parts(parts, trainings, url, state.directory, say, piece)
        while left and not parts_left and piece.may_begin(_longest_s(state, left[0].task)):
            step = left[0]
            trainings.attempt(step)
            if not is_done(step, tried := state.of(step.key)):
                continue
            del left[0]
            say(
                f"{len(steps) - len(left)} of {len(steps)}: {step.key}: size {tried[-1]['batch_size']}, "
                f"{tried[-1]['state']}, {tried[-1]['cost_j']:.0f} J, load {tried[-1]['load_1']:.1f}"
            )
    return len(left) + parts_left


def _longest_s(state: State, task: str) -> float:
    return max((record["process_s"] for record in state.records if record["task"] == task), default=0.0)


@contextmanager
def served(directory: Path) -> Iterator[str]:
    """The URL of a server within the block, on the database of a state's directory."""
    database_url = f"sqlite:///{directory.resolve() / 'bso.sqlite3'}"
    bso_server(database_url, directory, "db", "upgrade")
    # A server that outlived a harness that was killed would write into the same database.
    following, command = "benchmarks.recurrences.following", ("bso_server", "serve")
    with serving("bso-server", following, command, database_url=database_url, directory=directory) as target:
        yield f"http://{target.host}:{target.port}"


def _show_parts(
    parts: Parts, trainings: Trainings, url: str, directory: Path, say: Callable[[str], None], piece: Piece
) -> int:
    """As `do_parts`, with the trainings and the server of a measurement."""
    with BsoClient(url) as client:
        bench = Bench(
            train=lambda orders: trainings.runs_at_once(orders, may_break=True),
            state_of=lambda job_id, number: client.show_job(job_id).trials[number - 1].state.name,
            shrink=parts.shrink,
            power_limits=parts.power_limits,
        )
        return do_parts(bench, directory, say, may_begin=piece.may_begin)


def withdraw_unfinished(server_url: str) -> None:
    """Withdraw the trials of trainings that were killed with an earlier harness: they say nothing on their sizes."""
    with BsoClient(server_url) as client:
        for summary in client.list_jobs().jobs:
            for trial in client.show_job(summary.job_id).trials:
                if trial.state is TrialState.RUNNING:
                    of = TrialId(job_id=summary.job_id, batch_size=trial.batch_size, trial_number=trial.trial_number)
                    client.end_trial(of, Ending(outcome=TrialState.WITHDRAWN, detail="the measurement was killed"))
