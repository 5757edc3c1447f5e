"""A harness that runs the steps of a measurement: each training in a fresh process, with a real server on SQLite.

Finished trainings are recorded in a directory, so that a measurement that was killed continues at the next call.
"""

from __future__ import annotations

import json
import os
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path

from benchmarks.processes import BenchmarkError, serving_bso
from benchmarks.recurrences.plan import Step
from benchmarks.recurrences.runs import FAILED_STATUS, Order
from benchmarks.recurrences.tasks import REFUSED
from benchmarks.reports import Record
from zeus_plugins.client.http import BsoClient
from zeus_plugins.demo.processes import Launcher
from zeus_plugins.energy import EnergyMonitor
from zeus_plugins.protocol import Ending, TrialId, TrialState

RECORDS = "runs.jsonl"
DATABASE = "bso.sqlite3"

BROKEN = "broken"
"""State of a training that ended with an error."""

_PROCESS = "process"

MAX_BROKEN = 2
"""Number of broken trainings after which a step is given up."""

MAX_TRIES = 12
"""Number of trainings after which a recurrence is given up if none of them has reached the target."""


class State:
    """The records of the trainings in one directory, which is created if it is missing.

    Args:
        directory: Directory of the records and of the measurement's other files.
    """

    def __init__(self, directory: Path) -> None:
        directory.mkdir(parents=True, exist_ok=True)
        self.directory = directory
        self._file = directory / RECORDS
        self.records = read_records([directory])
        self._by_key: dict[str, list[Record]] = defaultdict(list)
        for record in self.records:
            self._by_key[record["key"]].append(record)
        if self._file.exists() and not self._file.read_bytes().endswith(b"\n"):
            # An earlier process was killed while it wrote the last line; this line is removed.
            whole = self._file.read_bytes().rpartition(b"\n")
            self._file.write_bytes(whole[0] + whole[1])

    def of(self, key: str) -> list[Record]:
        """Return the trainings of a step, in the order in which they ran."""
        return self._by_key[key]

    def add(self, record: Record) -> None:
        """Append the record of a training that has ended."""
        with self._file.open("a", encoding="utf-8") as file:
            file.write(json.dumps(record, ensure_ascii=False) + "\n")
        self.records.append(record)
        self._by_key[record["key"]].append(record)


def write_whole(file: Path, text: str) -> None:
    """Write a file atomically: if this process is killed, the file has all of the new text or is unchanged."""
    part = file.with_suffix(".part")
    part.write_text(text, "utf-8")
    part.replace(file)


def read_records(directories: Iterable[Path]) -> list[Record]:
    """Return the records of several directories.

    Raises:
        ValueError: Two directories contain the same step, so that they cannot be parts of one measurement.
    """
    records: list[Record] = []
    owners: dict[str, Path] = {}
    for directory in directories:
        file = directory / RECORDS
        lines = file.read_text("utf-8").splitlines(keepends=True) if file.exists() else []
        for record in (json.loads(line) for line in lines if line.endswith("\n")):
            other = owners.setdefault(record["key"], directory)
            if other != directory:
                raise ValueError(
                    f"{other} and {directory} have both measured {record['key']}: give parts of one measurement, "
                    "with other --tasks or another --first-seed each"
                )
            records.append(record)
    return records


class Trainings:
    """A runner of trainings, each in a fork of a process that has imported the frameworks; it records each outcome.

    Args:
        state: Records to which outcomes are added; its directory gets the logs.
        server_url: URL of the server.
        end_s: Time on the monotonic clock at which a running training is ended without a record; None: never.
        keeps_broken: Whether to record a training that broke, instead of raising an error.
        monitor: Measures the energy of whole processes, `process_j`; None: nothing does.
    """

    def __init__(
        self,
        state: State,
        server_url: str,
        *,
        end_s: float | None = None,
        keeps_broken: bool = False,
        monitor: EnergyMonitor | None = None,
    ) -> None:
        self._state, self._server_url, self._monitor = state, server_url, monitor
        self._end_s, self._keeps_broken = end_s, keeps_broken
        self._launcher = Launcher("benchmarks.recurrences.training")

    def attempt(self, step: Step) -> None:
        """Run the next training of a step and record it; each further training of the step uses the next seed.

        Raises:
            BenchmarkError: The training broke, and `keeps_broken` is False.
            TimeoutError: The training was ended at `end_s`.
        """
        tried = self._state.of(step.key)
        record = self._run(replace(step.order, seed=step.order.seed + len(tried)))
        facts = {"stage": step.stage, "task": step.task, "seed": step.seed, "number": step.number, "who": step.who}
        self._state.add({"key": step.key, **facts, "drifted": step.order.drifted, **record})

    def _run(self, order: Order) -> Record:
        """Train once; return the outcome, the start, the seconds of the process, and the machine's load."""
        log, file = self._state.directory / "training.log", self._state.directory / "outcome.json"
        begun_at, begun_s = datetime.now(UTC).isoformat(timespec="seconds"), time.monotonic()
        file.unlink(missing_ok=True)
        arguments = ["--order", order.to_json(), "--server-url", self._server_url, "--output", str(file)]
        if self._monitor is not None:
            self._monitor.begin_window(_PROCESS)
        process = self._launcher.start(arguments, log)
        process_j = None
        try:
            process.join(None if self._end_s is None else max(0.0, self._end_s - time.monotonic()))
            if process.is_alive():
                raise TimeoutError
        finally:
            process.terminate()  # after a timeout or an interruption, the process still runs
            process.join()
            if self._monitor is not None:
                process_j = self._monitor.end_window(_PROCESS).energy_j
        outcome: Record = json.loads(file.read_text("utf-8")) if file.exists() else {"state": BROKEN, "detail": ""}
        if process.exitcode not in (0, FAILED_STATUS) or outcome["state"] == BROKEN:
            told = outcome["detail"] or f"exit status {process.exitcode}"
            if not self._keeps_broken:
                raise BenchmarkError(f"a training broke: {told.strip()} ({log} may say more)")
            size = order.batch_size or order.training.default_batch_size
            nothing: Record = dict.fromkeys(("time_s", "energy_j", "cost_j"), 0.0)
            nothing |= dict.fromkeys(("peak_w", "memory_gib", "energy_source"))
            outcome = {"batch_size": size, "reached": False, "curve": [], **nothing, **outcome}
            outcome |= {"state": BROKEN, "detail": told.strip()}
        file.unlink(missing_ok=True)
        process_s = time.monotonic() - begun_s
        of_process = {"process_s": process_s, "process_j": process_j}
        return {**outcome, "begun_at": begun_at, **of_process, "load_1": os.getloadavg()[0]}


def is_done(step: Step, tried: Sequence[Record]) -> bool:
    """Return True if a step needs no further training."""
    if step.stage != "recurrence":
        return bool(tried) and (tried[-1]["state"] != BROKEN or len(tried) >= MAX_BROKEN)
    if sum(record["state"] == BROKEN for record in tried) >= MAX_BROKEN:
        return True
    return len(tried) >= MAX_TRIES or any(record["reached"] or record["state"] == REFUSED for record in tried)


def measure(steps: Sequence[Step], state: State, *, say: Callable[[str], None]) -> None:
    """Run the steps that are not done yet, and call `say` with a line for each step.

    Raises:
        BenchmarkError: The server did not start, or a training broke.
    """
    left = [step for step in steps if not is_done(step, state.of(step.key))]
    say(f"{len(steps) - len(left)} of {len(steps)} steps are done")
    if not left:
        return
    with served(state.directory) as url:
        with BsoClient(url) as client:
            withdraw_unfinished(client)
        trainings = Trainings(state, url)
        for number, step in enumerate(left, start=len(steps) - len(left) + 1):
            while not is_done(step, state.of(step.key)):
                trainings.attempt(step)
            last = state.of(step.key)[-1]
            say(
                f"{number} of {len(steps)}: {step.key}: size {last['batch_size']}, {last['state']}, "
                f"{last['cost_j']:.0f} J, load {last['load_1']:.1f}"
            )


@contextmanager
def served(directory: Path) -> Iterator[str]:
    """Run a server on the database in `directory` until the context exits; yield the server's URL."""
    database_url = f"sqlite:///{directory.resolve() / DATABASE}"
    # If the harness is killed, `following` ends the server, which would otherwise still write into the database.
    with serving_bso(database_url, directory, launcher=("benchmarks.recurrences.following",)) as target:
        yield f"http://{target.host}:{target.port}"


def withdraw_unfinished(client: BsoClient) -> None:
    """Withdraw trials that ran when an earlier harness was killed, because they show nothing about their sizes."""
    for summary in client.list_jobs().jobs:
        for trial in client.show_job(summary.job_id).trials:
            if trial.state is TrialState.RUNNING:
                of = TrialId(job_id=summary.job_id, batch_size=trial.batch_size, trial_number=trial.trial_number)
                client.end_trial(of, Ending(outcome=TrialState.WITHDRAWN, detail="the measurement was killed"))
