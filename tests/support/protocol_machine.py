"""Hypothesis state machine: runs of trainings, a network, a server, and invariants after each step.

`tests/server/test_protocol_histories.py` explains the purpose. A step is a rule; its requests end in
`Histories.deliver`, which asks both the service and the model (`trial_model.py`) and compares answers and rows.
"""

from __future__ import annotations

import contextlib
import itertools
from collections import deque
from collections.abc import Callable, Container, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from functools import partial
from typing import Any, ClassVar, TypeVar

from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, rule

from bso_server.core.access import UNRESTRICTED
from bso_server.core.model import TrialRecord
from bso_server.errors import STATUS_OF, BsoError, NoSurvivorError
from bso_server.service.commands import Commands
from bso_server.service.health import differences
from bso_server.service.reports import ReportBatch
from bso_server.storage.queries import epochs_between
from bso_server.storage.sqlite import SyncStore
from bso_server.storage.transaction import Transaction
from tests.support import jobs
from tests.support.service import BlockingStore
from tests.support.trial_model import (
    ABANDONED,
    CRASHES,
    FAILED,
    INFEASIBLE,
    MAX_EPOCHS,
    MOVES,
    OVER,
    SUSPENDED,
    SUSPENDED_S,
    WITHDRAWN,
    Message,
    Model,
    Outcome,
)
from zeus_plugins.client.delivery import taken_over
from zeus_plugins.errors import ZeusBSORuntimeError, ZeusBSOServerUnreachableError
from zeus_plugins.protocol import (
    CreatedJob,
    Ending,
    Evaluation,
    Heartbeat,
    HeartbeatResponse,
    Origin,
    ReportResponse,
    TrainingResult,
    TrialDispatch,
    TrialEnd,
    TrialId,
    TrialState,
)

T = TypeVar("T")

PATIENCE_S = 60.0
YEAR_S = 365 * 86400.0

ARRIVES, IS_LOST, IN_VAIN, KILLED = "arrives", "is lost", "is answered in vain", "finds the server killed"
FATES = st.sampled_from([ARRIVES, ARRIVES, ARRIVES, IS_LOST, IN_VAIN, KILLED])
"""The fate of a request, as its sender sees it. Whatever was sent may arrive later, or once more."""

PICKS = st.integers(0, 63)


@dataclass(frozen=True)
class Asking:
    """A request for a trial."""

    key: str


Sent = Asking | Message
Item = Asking | Evaluation | Ending


@dataclass(eq=False)
class Run:
    """A run of a training with its client, which resends unacknowledged messages in order.

    A plain client names neither lease epochs nor registrations, and never takes over a trial.
    """

    name: int
    is_plain: bool
    trial: TrialId | None = None
    resumes: bool = False
    epochs: int = 0
    time_s: float = 0.0
    energy_j: float = 0.0
    has_ended: bool = False
    waiting: deque[Item] = field(default_factory=deque)

    def __repr__(self) -> str:
        return f"<run {self.name}>"

    def count(self, epochs: float, time_s: float, energy_j: float) -> None:
        """Record the minimum totals that were spent."""
        self.epochs = max(self.epochs, int(epochs))
        self.time_s, self.energy_j = max(self.time_s, time_s), max(self.energy_j, energy_j)

    def worded(self, item: Item) -> Sent:
        """Return a waiting result as sent."""
        if isinstance(item, Asking):
            return item
        assert self.trial is not None
        name = (without_ids(self.trial) if self.is_plain else self.trial).model_dump()
        kind = TrainingResult if isinstance(item, Evaluation) else TrialEnd
        return kind(**name, **item.model_dump())


def picked(runs: Sequence[Run], pick: int) -> list[Run]:
    """Return one of these runs in a list, or an empty list."""
    return [runs[pick % len(runs)]] if runs else []


def without_ids(trial: TrialId) -> TrialId:
    """Return the trial as named by a plain client."""
    return TrialId(job_id=trial.job_id, batch_size=trial.batch_size, trial_number=trial.trial_number)


@dataclass
class Line:
    """A run's connection to the server; its first request has this fate."""

    machine: Histories
    fate: str

    def send(self, message: Sent) -> Any:
        """Return the server's answer, or raise the client's error for a refusal or a missing answer."""
        fate, self.fate = self.fate, ARRIVES
        self.machine.network.append(message)
        if fate == KILLED:
            self.machine.break_off(message)
        answer = self.machine.deliver([message])[0] if fate in (ARRIVES, IN_VAIN) else None
        if fate != ARRIVES:
            raise ZeusBSOServerUnreachableError(f"the request {fate}")
        if isinstance(answer, BsoError):
            status = STATUS_OF[type(answer)]
            raise ZeusBSORuntimeError(answer.message, status=status, reason=answer.reason)
        return answer

    def heartbeat(self, trial: TrialId, *, regular: bool = True, resumes: bool = False) -> HeartbeatResponse:
        """See `ServerPort.heartbeat`."""
        heard: HeartbeatResponse = self.send(Heartbeat(**trial.model_dump(), regular=regular, resumes=resumes))
        return heard


class Histories(RuleBasedStateMachine):
    """A job, the runs of its trainings, and the network between. A test sets the store."""

    store: ClassVar[BlockingStore | SyncStore]
    commands_of: ClassVar[type[Commands]] = Commands
    batch_of: ClassVar[type[ReportBatch]] = ReportBatch
    _job_numbers = itertools.count()

    def __init__(self) -> None:
        super().__init__()
        self.now = datetime(2026, 1, 1, tzinfo=UTC)
        self.commands = self.commands_of(clock=lambda: self.now, crash_retries=CRASHES)
        self.job_id = f"job-{next(self._job_numbers)}"
        self.job = CreatedJob.model_validate(
            jobs.job(job_id=self.job_id, **{**jobs.THREE_SIZES, "max_epochs": MAX_EPOCHS})
        )
        self.runs: list[Run] = []
        self.network: list[Sent] = []
        self._register()

    def _register(self) -> None:
        (registered, is_new), again = (
            self.write(lambda transaction: self.commands.register(transaction, self.job)) for _ in range(2)
        )
        assert is_new
        assert again == (registered, False)
        self.model = Model(registered.registration_id)
        self.rows: dict[int, TrialRecord] = {}
        self.acknowledged: set[tuple[float, ...]] = set()
        self.heard: dict[Sent, tuple[Outcome, TrialRecord]] = {}

    def teardown(self) -> None:
        """Check that everything promised is stored, and then delete the job."""
        self._check_memory()
        kept = self.read(lambda transaction: epochs_between(transaction, self.job_id, 1, len(self.rows)))
        found = {(it.trial_number, it.time_s, it.energy_j, it.epoch, it.metric) for it in kept}
        found |= {(it.trial_number, it.time_s, it.energy_j, it.epoch, it.metric or 0) for it in self.rows.values()}
        assert self.acknowledged <= found, f"acknowledged and lost: {self.acknowledged - found}"
        self.write(lambda transaction: self.commands.delete_job(transaction, self.job_id))

    # --- Trainings ----------------------------------------------------------------------------------------------------

    @rule(is_plain=st.sampled_from([False, False, False, True]), fate=FATES)
    def begin(self, fate: str = ARRIVES, is_plain: bool = False) -> None:
        """Let a training request a trial."""
        run = Run(len(self.runs) + 1, is_plain)
        self.runs.append(run)
        run.waiting.append(Asking(f"key-{run.name}"))
        self._pump(run, fate)

    @rule(
        pick=PICKS,
        time_s=st.sampled_from([10.0, 10.0, 2000.0]),
        energy_j=st.sampled_from([100.0, 5000.0]),
        metric=st.sampled_from([0.1, 0.2, 0.95]),
        fate=FATES,
    )
    def train(
        self, pick: int = 0, time_s: float = 10.0, energy_j: float = 100.0, metric: float = 0.1, fate: str = ARRIVES
    ) -> None:
        """Let a training train an epoch and report."""
        for run in self._living(pick):
            run.epochs, run.time_s, run.energy_j = run.epochs + 1, run.time_s + time_s, run.energy_j + energy_j
            totals = {"time": run.time_s, "energy": run.energy_j, "current_epoch": float(run.epochs)}
            run.waiting.append(Evaluation(**totals, metric=metric))
            self._pump(run, fate)

    @rule(pick=PICKS, regular=st.booleans(), fate=FATES)
    def beat(self, pick: int, regular: bool, fate: str) -> None:
        """Let a training send a heartbeat, independent of waiting results."""
        for run in self._living(pick):
            if run.trial is not None and not run.resumes:
                beat = Line(self, fate).heartbeat
                trial = without_ids(run.trial) if run.is_plain else run.trial
                self._speak(run, partial(beat, trial, regular=regular))

    @rule(pick=PICKS, outcome=st.sampled_from([SUSPENDED, FAILED, INFEASIBLE, WITHDRAWN]), fate=FATES)
    def end(self, pick: int, outcome: TrialState, fate: str) -> None:
        """End a training; its waiting results may still be delivered."""
        for run in self._living(pick):
            run.has_ended = True
            run.waiting.append(Ending.model_validate({"outcome": outcome}))
            self._pump(run, fate)

    @rule(pick=PICKS, fate=FATES)
    def deliver_what_waits(self, pick: int = 0, fate: str = ARRIVES) -> None:
        """Let a client retry, or ``sync`` after the end of its training."""
        for run in picked([run for run in self.runs if run.waiting], pick):
            self._pump(run, fate)

    @rule(pick=PICKS, epochs_lost=st.integers(0, 2), fate=FATES)
    def resume(self, pick: int = 0, epochs_lost: int = 0, fate: str = ARRIVES) -> None:
        """Resume a training from a checkpoint of a run that ended or is wrongly believed dead."""
        for run in picked([run for run in self.runs if run.trial is not None], pick) or self._living(pick):
            epochs = max(0, run.epochs - epochs_lost)
            part = epochs / run.epochs if run.epochs else 0.0
            resumed = Run(len(self.runs) + 1, run.is_plain, run.trial, resumes=not run.is_plain)
            resumed.count(epochs, run.time_s * part, run.energy_j * part)
            self.runs.append(resumed)
            self._speak(resumed, partial(self._enter, resumed, Line(self, fate)))

    def _enter(self, run: Run, line: Line) -> None:
        assert run.trial is not None
        known = run.trial
        if run.resumes:
            run.trial = known.model_copy(update={"lease_epoch": None})  # in case of an outage
            run.trial, heard = taken_over(line, known)
            run.resumes = False
        else:
            heard = line.heartbeat(without_ids(known), regular=False)
        run.has_ended = heard.state in OVER
        run.count(heard.epochs or 0.0, heard.time_s or 0.0, heard.energy_j or 0.0)

    def _living(self, pick: int) -> list[Run]:
        """Return a living run, creating one if necessary, because an empty step finds no error."""
        if not any(run.trial is not None and not run.has_ended for run in self.runs):
            self.begin()
        return picked([run for run in self.runs if run.trial is not None and not run.has_ended], pick)

    def _pump(self, run: Run, fate: str) -> None:
        """Deliver the waiting results as far as possible."""
        line = Line(self, fate)

        def deliver() -> None:
            if run.resumes and run.waiting and run.trial is not None:
                run.trial, _ = taken_over(line, run.trial)
                run.resumes = False
            while run.waiting:
                answer = line.send(run.worded(run.waiting[0]))
                run.waiting.popleft()
                if isinstance(answer, TrialDispatch):
                    run.trial = TrialId(**answer.model_dump())
                elif isinstance(answer, ReportResponse) and answer.stop_train:
                    run.has_ended = True
                    run.waiting.clear()

        self._speak(run, deliver)

    def _speak(self, run: Run, say: Callable[[], object]) -> None:
        """Send a message; a refused run falls silent, and a run without an answer retries in a later step."""
        try:
            say()
        except ZeusBSOServerUnreachableError:
            pass
        except ZeusBSORuntimeError:
            run.has_ended, run.resumes = True, False
            run.waiting.clear()

    # --- Network and time ---------------------------------------------------------------------------------------------

    @rule(pick=PICKS)
    def arrive_again(self, pick: int) -> None:
        """Deliver an earlier message late or again; the answer is lost."""
        if self.network:
            self.deliver([self.network[pick % len(self.network)]])

    @rule(picks=st.lists(PICKS, min_size=2, max_size=4))
    def arrive_together(self, picks: list[int]) -> None:
        """Deliver several reports at once, in a shared commit."""
        reports = [message for message in self.network if isinstance(message, TrainingResult)]
        if reports:
            self.deliver([reports[pick % len(reports)] for pick in picks])

    @rule(seconds=st.sampled_from([1.0, 100.0, 200.0, 4000.0, 90000.0, -3600.0, -YEAR_S, YEAR_S]))
    def pass_time(self, seconds: float) -> None:
        """Advance the clock during silence, or let the server's clock jump."""
        self.now += timedelta(seconds=seconds)

    @rule()
    def expire(self) -> None:
        """Let the reaper look for expired leases."""
        if self.job_id in self.read(self.commands.jobs_to_reap):
            self.write(lambda transaction: self.commands.reap(transaction, self.job_id))
        self.model.expire(self.now)
        self._check_rows(self.rows)
        for row in self.rows.values():
            if row.lease_expires_at is not None:
                longest_s = max(SUSPENDED_S, self.model.trials[row.trial_number].lease_s)
                assert self.now <= row.lease_expires_at <= self.now + timedelta(seconds=longest_s)

    @rule(really=st.integers(0, 7).map(lambda number: number == 1))
    def register_anew(self, really: bool) -> None:
        """Delete the job and register it again."""
        if not really:
            return
        self._check_memory()
        self.write(lambda transaction: self.commands.delete_job(transaction, self.job_id))
        before = self.model.registration_id
        self._register()
        assert self.model.registration_id != before

    # --- Server and invariants ----------------------------------------------------------------------------------------

    def write(self, work: Callable[[Transaction], T]) -> T:
        return self.store.write(work, timeout_s=PATIENCE_S)

    def read(self, work: Callable[[Transaction], T]) -> T:
        return self.store.read(work, timeout_s=PATIENCE_S)

    def break_off(self, message: Sent) -> None:
        """Let the server process a message and die before its commit."""

        def killed(transaction: Transaction) -> None:
            self._served(transaction, [message])
            raise BsoError("killed")

        with contextlib.suppress(BsoError):
            self.write(killed)
        self._check_rows(set())

    def deliver(self, messages: Sequence[Sent]) -> list[Any]:
        """Deliver messages together and compare with the model; return answers or errors."""
        before, found = self.rows, None

        def work(transaction: Transaction) -> tuple[list[Any], list[TrialRecord]]:
            return self._served(transaction, messages), transaction.all_trials(self.job_id)

        try:
            answers, found = self.write(work)
        except BsoError as error:
            answers = [error]
        outcomes = [outcome_of(answer) for answer in answers]
        expected = [self._expected(*each) for each in zip(messages, outcomes, strict=True)]
        assert outcomes == expected, f"{messages} came to {outcomes}, not {expected}"
        accepted = {
            message.trial_number
            for message, answer in zip(messages, answers, strict=True)
            if not isinstance(message, Asking) and not isinstance(answer, BsoError)
        }
        is_new = outcomes[0] is not NoSurvivorError and len(self.model.trials) > len(before)
        self._check_rows(before if is_new else accepted, found)
        for message, answer, outcome in zip(messages, answers, outcomes, strict=True):
            if isinstance(message, TrainingResult) and not isinstance(answer, BsoError):
                name = message.trial_number, message.time, message.energy, message.current_epoch, message.metric
                self.acknowledged.add(name)
            if len(messages) == 1:
                self._check_repetition(message, outcome, before)
        return answers

    def _served(self, transaction: Transaction, messages: Sequence[Sent]) -> list[Any]:
        match messages[0]:
            case Asking(key):
                return [self.commands.begin_trial(transaction, self.job_id, key)]
            case TrialEnd() as end:
                return [self.commands.end_trial(transaction, end)]
            case Heartbeat() as beat:
                return [self.commands.heartbeat(transaction, beat)]
        reports = [(message, UNRESTRICTED) for message in messages if isinstance(message, TrainingResult)]
        return list(self.batch_of(transaction, reports, self.commands.moment()).take())

    def _expected(self, message: Sent, outcome: Outcome) -> Outcome:
        if not isinstance(message, Asking):
            return self.model.apply(message, self.now)
        number = self.model.dispatched(message.key)
        if isinstance(number, type) or (number is None and outcome is NoSurvivorError):
            return number or outcome
        if number is None:
            # The policy chooses the size.
            self.model.expire(self.now)
            size, origin = outcome[1], outcome[-1]
            number = self.model.begin(message.key, size, self.now)
            uncounted = {FAILED, ABANDONED, WITHDRAWN}
            explored = [
                row.batch_size
                for row in self.rows.values()
                if row.origin is Origin.EXPLORATION and self.model.trials[row.trial_number].state not in uncounted
            ]
            assert origin is not Origin.EXPLORATION or size not in explored, f"{size} is explored by two"
        else:
            size, origin = self.rows[number].batch_size, self.rows[number].origin
        return number, size, 1, self.model.registration_id, origin

    def _check_rows(self, changed: Container[int], found: list[TrialRecord] | None = None) -> None:
        """Check that the rows match the model, changed by legal transitions, and only in these trials."""
        if found is None:
            found = self.read(lambda transaction: transaction.all_trials(self.job_id))
        before = self.rows
        self.rows = {row.trial_number: row for row in found}
        told = {number: as_told(row) for number, row in self.rows.items()}
        expected = {number: vars(trial) for number, trial in self.model.trials.items()}
        assert told == expected, f"the server has {told}, not {expected}"
        for number, then in before.items():
            row = self.rows[number]
            if row == then:
                continue
            assert number in changed, f"trial {number} has changed, and nobody may"
            assert then.state not in OVER, f"trial {number} was {then.state} for good"
            assert row.state is then.state or row.state in MOVES[then.state]
            assert row.time_s >= then.time_s
            assert row.energy_j >= then.energy_j
            assert row.lease_epoch >= then.lease_epoch
        ends = [row.ended_event for row in self.rows.values() if row.ended_event is not None]
        assert len(ends) == len(set(ends))

    def _check_repetition(self, message: Sent, outcome: Outcome, before: dict[int, TrialRecord]) -> None:
        """Check that a repeated request gets the same answer if its trial is unchanged (a take-over changes it)."""
        number = self.model.keys.get(message.key) if isinstance(message, Asking) else message.trial_number
        if number not in self.rows or (isinstance(message, Heartbeat) and message.resumes):
            return
        first, row = self.heard.setdefault(message, (outcome, self.rows[number]))
        assert before.get(number) != row or outcome == first

    def _check_memory(self) -> None:
        """Check that the memory of the job equals a replay of its trials."""
        assert self.read(lambda transaction: differences(transaction, self.job_id)) == []


def outcome_of(answer: object) -> Outcome:
    """Return an answer as plain values without texts, or the type of a refusal."""
    match answer:
        case BsoError():
            return type(answer)
        case TrialDispatch():
            return *(answer.trial_number, answer.batch_size, answer.lease_epoch, answer.registration_id), answer.origin
        case ReportResponse():
            return answer.stop_train, answer.converged
        case HeartbeatResponse():
            return answer.state, answer.lease_epoch, answer.epochs
    return answer


def as_told(row: TrialRecord) -> dict[str, Any]:
    """Return a row in the terms of the model."""
    reported = row.metric is not None
    return {
        "size": row.batch_size,
        "lease_end": row.lease_expires_at,
        "state": row.state,
        "lease_epoch": row.lease_epoch,
        "totals": (row.time_s, row.energy_j, row.epoch, row.metric) if reported else None,
        "reports": row.report_count,
        "longest_gap_s": row.longest_gap_s,
        "beats": row.heartbeats,
    }
