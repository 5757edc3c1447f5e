"""The trial protocol on a network that delays, repeats, drops and reorders messages, checked after each step.

The method is Jepsen's, but in one process and one thread, so that a failing history can be repeated and shortened.
Several runs of trainings call the functions of the service over each kind of database: they ask, report, send
heartbeats, end, and are resumed from checkpoints while they still run; the server's clock jumps. Any message may
arrive again at any time. `test_lifecycle.py` has the rules for single messages; this file checks the promises that hold
in every history.
"""

from __future__ import annotations

import random
import tempfile
import threading
from collections import Counter
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, replace
from datetime import timedelta
from pathlib import Path
from typing import Any, TypeVar

import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from bso_server.core.access import UNRESTRICTED, Caller
from bso_server.core.model import TrialRecord
from bso_server.errors import BsoError, KeyConflictError, NoSurvivorError
from bso_server.service.commands import Commands
from bso_server.service.health import differences
from bso_server.service.reports import Outcome, ReportBatch
from bso_server.storage.database import open_sqlite_file
from bso_server.storage.queries import epochs_between
from bso_server.storage.rows import StoredEpoch
from bso_server.storage.sqlite import SyncStore
from bso_server.storage.transaction import Transaction
from tests.support import jobs
from tests.support.databases import DATABASES, empty_database
from tests.support.properties import THOROUGH
from tests.support.service import START, BlockingStore, trial_id
from zeus_plugins.protocol import (
    ALIVE,
    CreatedJob,
    Heartbeat,
    HeartbeatResponse,
    ReportResponse,
    TrainingResult,
    TrialDispatch,
    TrialEnd,
    TrialId,
    TrialState,
)

MEMORY = Path("/dev/shm")  # noqa: S108 - a private folder is created there
PATIENCE_S = 60.0
STEPS = 30
YEAR_S = 365 * 86400.0
MEASURED = {TrialState.COMPLETED, TrialState.EARLY_STOPPED, TrialState.EXHAUSTED}
OVER = {*MEASURED, TrialState.FAILED, TrialState.INFEASIBLE, TrialState.WITHDRAWN}
OUTCOMES = [TrialState.SUSPENDED, TrialState.FAILED, TrialState.INFEASIBLE, TrialState.WITHDRAWN]
ACTIONS = ["ask", "train", "train", "train", "beat", "resume", "end", "again", "again", "together", "wait", "expire"]
FATES = ["arrives", "arrives", "arrives", "is lost", "is unanswered", "finds the server killed"]
"""The fate of a message, as its sender sees it. Whatever was sent may arrive later, or once more."""

T = TypeVar("T")


@dataclass(frozen=True)
class Asking:
    """A request for a trial."""

    key: str


@dataclass(eq=False)
class Run:
    """A run of a training, which believes that it has the trial."""

    trial: TrialId
    epochs: int = 0
    time_s: float = 0.0
    energy_j: float = 0.0


Sent = Asking | TrainingResult | TrialEnd | Heartbeat


class History:
    """A job, the runs of its trainings, and each message that they have sent so far."""

    def __init__(
        self,
        store: BlockingStore | SyncStore,
        random_source: random.Random,
        commands_of: type[Commands] = Commands,
        batch_of: type[ReportBatch] = ReportBatch,
    ) -> None:
        self.store, self.random, self.batch_of = store, random_source, batch_of
        self.now = START
        self.commands = commands_of(clock=lambda: self.now)
        self.job = CreatedJob.model_validate(jobs.job(**{**jobs.THREE_SIZES, "max_epochs": 4}))
        self.runs: list[Run] = []
        self.sent: list[Sent] = []
        self.register()

    def register(self) -> None:
        registered, is_new = self.write(lambda transaction: self.commands.register(transaction, self.job))
        assert is_new
        self.registration_id = registered.registration_id
        self.rows: dict[int, TrialRecord] = {}
        self.keys: dict[str, int] = {}
        self.acknowledged: set[tuple[float, ...]] = set()
        self.heard: dict[Sent, tuple[Any, TrialRecord]] = {}

    def end(self) -> None:
        """Check that everything acknowledged is stored and that the caches equal a replay, and delete the job."""
        assert self.read(lambda transaction: differences(transaction, self.job.job_id)) == []
        kept = self.read(lambda transaction: epochs_between(transaction, self.job.job_id, 1, len(self.rows)))
        found = {(it.trial_number, it.time_s, it.energy_j, it.epoch, it.metric) for it in kept}
        found |= {(it.trial_number, it.time_s, it.energy_j, it.epoch, it.metric or 0) for it in self.rows.values()}
        assert self.acknowledged <= found, f"acknowledged and lost: {self.acknowledged - found}"
        self.write(lambda transaction: self.commands.delete_job(transaction, self.job.job_id))

    # --- Trainings, network and time ----------------------------------------------------------------------------------

    def step(self) -> None:
        choose = self.random.choice
        match choose(ACTIONS):
            case "ask":
                self.ask()
            case "again" if self.sent:
                self.deliver(choose(self.sent))
            case "together" if reports := [message for message in self.sent if isinstance(message, TrainingResult)]:
                self.deliver(*(choose(reports) for _ in range(3)))
            case "wait":
                self.now += timedelta(seconds=choose([1.0, 200.0, 4000.0, 90000.0, -3600.0, -YEAR_S, YEAR_S]))
            case "expire":
                self.expire()
                if self.random.randrange(8) == 0:
                    self.end()
                    self.register()
            case "train" | "beat" | "resume" | "end" as action if self.runs:
                self.act(action, choose(self.runs))

    def ask(self) -> None:
        answer = self.send(Asking(f"key {len(self.sent)}"))
        if isinstance(answer, TrialDispatch):
            # Every fourth training has a client without lease epochs and registrations, such as Zeus's.
            names_ids = self.random.randrange(4) > 0
            self.runs.append(Run(TrialId(**answer.model_dump()) if names_ids else trial_id(answer)))

    def act(self, action: str, run: Run) -> None:
        name, choose = run.trial.model_dump(), self.random.choice
        match action:
            case "train":
                run.epochs, run.time_s = run.epochs + 1, run.time_s + choose([10.0, 2000.0])
                run.energy_j += choose([100.0, 5000.0]) + 2.0 ** -len(self.sent)  # no two reports are equal
                totals = {"time": run.time_s, "energy": run.energy_j, "current_epoch": run.epochs}
                self.send(TrainingResult(**name, **totals, metric=choose([0.1, 0.2, 0.95]), energy_source=None))
            case "beat":
                self.send(Heartbeat(**name, regular=choose([True, False])))
            case "end":
                self.send(TrialEnd(**name, outcome=choose(OUTCOMES)))
            case "resume":
                heard = self.send(Heartbeat(**name, regular=False, resumes=run.trial.lease_epoch is not None))
                if heard is not None and heard.state not in OVER:
                    epoch = heard.lease_epoch if run.trial.lease_epoch is not None else None
                    trial = run.trial.model_copy(update={"lease_epoch": epoch})
                    self.runs.append(Run(trial, int(heard.epochs or 0), heard.time_s or 0.0, heard.energy_j or 0.0))

    def send(self, message: Sent) -> Any:
        """Return the server's answer, or None for a refusal or a missing answer."""
        self.sent.append(message)
        fate = self.random.choice(FATES)
        if fate == "finds the server killed":
            self.break_off(message)
        answer = self.deliver(message) if fate in ("arrives", "is unanswered") else None
        return None if fate != "arrives" or isinstance(answer, BsoError) else answer

    def expire(self) -> None:
        """Let the reaper look for expired leases."""
        before, job_id = self.rows, self.job.job_id
        if job_id in self.read(self.commands.jobs_to_reap):
            self.write(lambda transaction: self.commands.reap(transaction, job_id))
        self.rows = self.read(self.found)
        for number, row in self.rows.items():
            assert row.state is before[number].state or row.state is TrialState.ABANDONED
            if row.lease_expires_at is not None:
                longest = timedelta(seconds=max(86400.0, 5 * row.longest_gap_s))
                assert self.now <= row.lease_expires_at <= self.now + longest

    # --- Server and promises ------------------------------------------------------------------------------------------

    def write(self, work: Any) -> Any:
        return self.store.write(work, timeout_s=PATIENCE_S)

    def read(self, work: Any) -> Any:
        return self.store.read(work, timeout_s=PATIENCE_S)

    def found(self, transaction: Transaction) -> dict[int, TrialRecord]:
        return {row.trial_number: row for row in transaction.all_trials(self.job.job_id)}

    def silent(self) -> list[int]:
        """Return the numbers of trials with expired leases."""
        leases = {number: row.lease_expires_at for number, row in self.rows.items()}
        return [number for number, lease_end in leases.items() if lease_end is not None and lease_end < self.now]

    def break_off(self, message: Sent) -> None:
        """Let the server process a message and die before its commit."""

        def killed(transaction: Transaction) -> None:
            self.served(transaction, message)
            raise BsoError("killed")

        with suppress(BsoError):
            self.write(killed)
        assert self.read(self.found) == self.rows

    def served(self, transaction: Transaction, *messages: Sent) -> list[Any]:
        match messages[0]:
            case Asking(key):
                return [self.commands.begin_trial(transaction, self.job.job_id, key)]
            case TrialEnd() as end:
                return [self.commands.end_trial(transaction, end)]
            case Heartbeat() as beat:
                return [self.commands.heartbeat(transaction, beat)]
        reports = [(message, UNRESTRICTED) for message in messages if isinstance(message, TrainingResult)]
        return list(self.batch_of(transaction, reports, self.commands.moment()).take())

    def deliver(self, *messages: Sent) -> Any:
        """Deliver messages together and check the promises; return the last answer or error."""
        before = self.rows
        try:
            answers = self.write(lambda transaction: self.served(transaction, *messages))
        except BsoError as error:
            answers = [error]
        self.rows = self.read(self.found)
        for message, answer in zip(messages, answers, strict=True):
            if isinstance(message, Asking):
                self.check_dispatch(message.key, answer)
            else:
                self.check_answer(message, answer, before.get(message.trial_number))
        self.check_rows(before, messages, answers)
        if len(messages) == 1:
            self.check_repetition(messages[0], answers[0], before)
        return answers[-1]

    def check_dispatch(self, key: str, answer: TrialDispatch | BsoError) -> None:
        """Check that each key has a trial of its own, and that a new trial abandons the silent trials."""
        is_new = key not in self.keys
        match answer:
            case KeyConflictError():
                assert self.rows[self.keys[key]].state in OVER
            case TrialDispatch():
                assert self.keys.setdefault(key, answer.trial_number) == answer.trial_number
                assert len(self.keys) == len(self.rows) == len(set(self.keys.values()))
                assert not is_new or self.silent() == []
                assert self.rows[answer.trial_number].state not in OVER
            case _:
                assert isinstance(answer, NoSurvivorError)

    def check_answer(
        self, message: TrainingResult | TrialEnd | Heartbeat, answer: Any, then: TrialRecord | None
    ) -> None:
        """Check that only the last run of a trial is heard, and that only contradictory reports are refused."""
        is_refused = isinstance(answer, BsoError)
        if (
            then is None
            or message.batch_size != then.batch_size
            or message.registration_id not in (None, self.registration_id)
            or message.lease_epoch not in (None, then.lease_epoch)
        ):
            assert is_refused
        elif not isinstance(message, TrainingResult):
            assert not is_refused
            if isinstance(message, Heartbeat) and then.state not in OVER:
                assert (answer.state, answer.lease_epoch) == (TrialState.RUNNING, then.lease_epoch + message.resumes)
        elif is_refused:
            row = self.rows[message.trial_number]
            decreases = message.time < row.time_s or message.energy < row.energy_j or message.current_epoch < row.epoch
            assert row.state in OVER or decreases
        else:
            number = message.trial_number
            self.acknowledged.add((number, message.time, message.energy, message.current_epoch, message.metric))

    def check_rows(self, before: dict[int, TrialRecord], messages: tuple[Sent, ...], answers: list[Any]) -> None:
        """Check that only the addressed trials have changed, without a step back, and that a report counts once."""
        heard = Counter(
            message.trial_number
            for message, answer in zip(messages, answers, strict=True)
            if not isinstance(message, Asking) and not isinstance(answer, BsoError)
        )
        for number, then in before.items():
            row = self.rows[number]
            # A dispatch also abandons silent trials.
            assert row == then or number in heard or len(self.rows) > len(before), f"trial {number} has changed"
            assert row == then or then.state not in OVER, f"trial {number} was {then.state} for good"
            assert row.time_s >= then.time_s
            assert row.energy_j >= then.energy_j
            assert row.lease_epoch >= then.lease_epoch
            assert then.report_count <= row.report_count <= then.report_count + heard[number]
        for row in self.rows.values():
            assert (row.ended_event is None) is (row.lease_expires_at is not None) is (row.state in ALIVE)
        ends = [row.ended_event for row in self.rows.values() if row.ended_event is not None]
        assert len(ends) == len(set(ends))

    def check_repetition(self, message: Sent, answer: Any, before: dict[int, TrialRecord]) -> None:
        """Check the verdict, and that a repeated message gets the same answer while its trial is unchanged."""
        number = self.keys.get(message.key) if isinstance(message, Asking) else message.trial_number
        if number not in self.rows or (isinstance(message, Heartbeat) and message.resumes):
            return
        row = self.rows[number]
        if isinstance(message, TrainingResult) and not isinstance(answer, BsoError):
            verdict = row.state in MEASURED, row.state is TrialState.COMPLETED
            assert (answer.stop_train, answer.converged) == verdict
            then = before[number]
            if then.state is TrialState.RUNNING and is_last_report(message, then):
                assert row == then
        told = outcome_of(answer)
        first, known = self.heard.setdefault(message, (told, row))
        assert before.get(number) != known or told == first


def is_last_report(message: TrainingResult, row: TrialRecord) -> bool:
    totals = message.time, message.energy, message.current_epoch, message.metric
    return totals == (row.time_s, row.energy_j, row.epoch, row.metric)


def outcome_of(answer: object) -> Any:
    """Return an answer as plain values without texts, or the type of a refusal."""
    match answer:
        case BsoError():
            return type(answer)
        case TrialDispatch():
            return trial_id(answer), answer.lease_epoch, answer.registration_id, answer.origin
        case ReportResponse():
            return answer.stop_train, answer.converged
        case HeartbeatResponse():
            return answer.state, answer.lease_epoch, answer.epochs
    return answer


@pytest.fixture(scope="module", params=DATABASES)
def database(request: pytest.FixtureRequest) -> Iterator[BlockingStore | SyncStore]:
    """One database of each kind for all histories, in turn; a SQLite file is in memory, where a commit is quick."""
    with (
        tempfile.TemporaryDirectory(dir=MEMORY if MEMORY.is_dir() else None) as folder,
        empty_database(request.param, Path(folder)) as url,
    ):
        file = open_sqlite_file(url, busy_timeout_s=1.0)
        store = BlockingStore(url) if file is None else SyncStore(file, threading.RLock())
        yield store
        store.close()


def play(
    store: BlockingStore | SyncStore,
    histories: int,
    commands_of: type[Commands] = Commands,
    batch_of: type[ReportBatch] = ReportBatch,
    phases: tuple[Phase, ...] = tuple(Phase),
) -> None:
    @settings(max_examples=histories, phases=phases, suppress_health_check=list(HealthCheck))
    @given(random_source=st.randoms(use_true_random=False))
    def run(random_source: random.Random) -> None:
        history = History(store, random_source, commands_of, batch_of)
        for _ in range(STEPS):
            history.step()
        history.end()

    run()


@pytest.mark.hypothesis
def test_random_histories_keep_the_promises_of_the_server(database: BlockingStore | SyncStore) -> None:
    histories = 400 if settings().max_examples >= THOROUGH else 40
    # On a database server, each statement is a round trip.
    play(database, histories if isinstance(database, SyncStore) else histories // 40)


# --- Servers with a defect --------------------------------------------------------------------------------------------


class EndsForTheDead(Commands):
    """Let any run end the trial."""

    def end_trial(self, transaction: Transaction, end: TrialEnd, caller: Caller = UNRESTRICTED) -> None:
        super().end_trial(transaction, end.model_copy(update={"lease_epoch": None}), caller)


class ForgetsArms(Commands):
    """Store only the trial of a dispatch."""

    def begin_trial(self, transaction: Transaction, job_id: str, *rest: Any, **named: Any) -> TrialDispatch:
        arms = transaction.arms(job_id)
        dispatch = super().begin_trial(transaction, job_id, *rest, **named)
        transaction.update_arms(job_id, arms.values())
        return dispatch


class LosesReports(ReportBatch):
    """Store only the last report of each trial."""

    def _save(self) -> None:
        self._epochs: list[StoredEpoch] = []
        super()._save()


class SavesTwice(ReportBatch):
    """Count a repeated report."""

    def take(self) -> list[Outcome]:
        self._trials_before = {key: _with_another(trial) for key, trial in self._trials_before.items()}
        self._trials = dict(self._trials_before)
        return super().take()


def _with_another(trial: TrialRecord) -> TrialRecord:
    return replace(trial, report_count=trial.report_count + 1) if trial.report_count > 1 else trial


@pytest.mark.slow
@pytest.mark.parametrize("database", ["sqlite"], indirect=True)
@pytest.mark.parametrize("broken", [EndsForTheDead, ForgetsArms, LosesReports, SavesTwice])
def test_random_histories_find_each_defective_server(
    database: BlockingStore | SyncStore, broken: type[Commands] | type[ReportBatch]
) -> None:
    commands_of = broken if issubclass(broken, Commands) else Commands
    batch_of = broken if issubclass(broken, ReportBatch) else ReportBatch
    with pytest.raises(AssertionError):
        play(database, 400, commands_of, batch_of, (Phase.generate,))
