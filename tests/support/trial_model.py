"""Second, sequential implementation of the server's promises about the trials of one job.

`Model.apply` takes a message as it reaches the server and returns the required outcome. The model shares no code with
the server; the numbers of leases, states and moves are written out. The choice of sizes by a policy is out of scope.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from datetime import datetime, timedelta
from typing import Any

from bso_server.errors import (
    BsoError,
    InvalidReportError,
    KeyConflictError,
    OtherRegistrationError,
    ReportConflictError,
    StaleLeaseError,
    UnknownTrialError,
)
from zeus_plugins.protocol import Heartbeat, TrainingResult, TrialEnd, TrialId, TrialState

RUNNING, SUSPENDED, ABANDONED = TrialState.RUNNING, TrialState.SUSPENDED, TrialState.ABANDONED
COMPLETED, EARLY_STOPPED, EXHAUSTED = TrialState.COMPLETED, TrialState.EARLY_STOPPED, TrialState.EXHAUSTED
FAILED, INFEASIBLE, WITHDRAWN = TrialState.FAILED, TrialState.INFEASIBLE, TrialState.WITHDRAWN

MEASURED = {COMPLETED, EARLY_STOPPED, EXHAUSTED}
OVER = {*MEASURED, FAILED, INFEASIBLE, WITHDRAWN}
# Transitions that one message may cause: a suspended or abandoned trial first becomes running.
MOVES = {RUNNING: set(TrialState), SUSPENDED: set(TrialState), ABANDONED: set(TrialState) - {ABANDONED}}

BEATING_S, SILENT_S, SUSPENDED_S, GAPS = 360.0, 3600.0, 86400.0, 5.0
MAX_EPOCHS, TARGET, BETA, POWER_W, CRASHES = 4, 0.9, 2.0, 100.0, 3

Message = TrainingResult | TrialEnd | Heartbeat
Outcome = Any
"""An answer in plain values, or the type of the error."""


@dataclass(frozen=True)
class Trial:
    """A trial as the server must store it."""

    size: int
    lease_end: datetime | None
    state: TrialState = RUNNING
    lease_epoch: int = 1
    totals: tuple[float, float, float, float] | None = None
    reports: int = 0
    longest_gap_s: float = 0.0
    beats: bool = False

    @property
    def lease_s(self) -> float:
        """Permitted silence from now on, in seconds."""
        if self.state is SUSPENDED:
            return SUSPENDED_S
        return BEATING_S if self.beats else max(SILENT_S, GAPS * self.longest_gap_s)

    @property
    def cost_j(self) -> float:
        """Cost at η = 0.5."""
        time_s, energy_j, *_ = self.totals or (0.0, 0.0, 0.0, 0.0)
        return 0.5 * energy_j + 0.5 * POWER_W * time_s


@dataclass
class Model:
    """A job. A deleted and recreated job is a new model."""

    registration_id: str | None
    trials: dict[int, Trial] = field(default_factory=dict)
    keys: dict[str, int] = field(default_factory=dict)

    def apply(self, message: Message, now: datetime) -> Outcome:
        """Apply a message that reached the server; return the outcome."""
        before = self.trials.get(message.trial_number)
        refusal = self._refusal(before, message)
        if refusal is not None or before is None:
            return refusal
        match message:
            case TrainingResult():
                trial, outcome = self._reported(before, message)
            case TrialEnd():
                trial, outcome = self._ended(before, message.outcome), None
            case Heartbeat():
                trial = self._beating(before, message)
                outcome = trial.state, trial.lease_epoch, 0.0 if trial.totals is None else trial.totals[2]
        if isinstance(outcome, type):
            return outcome
        renewed = trial is not before
        if renewed:
            lease_end = None if trial.state in OVER else now + timedelta(seconds=trial.lease_s)
            trial = replace(trial, lease_end=lease_end)
        self.trials[message.trial_number] = trial
        return outcome

    def expire(self, now: datetime) -> None:
        """Abandon trials after too long a silence; shorten leases that were granted by a clock ahead."""
        for number, trial in self.trials.items():
            if trial.lease_end is None:
                continue
            own = now + timedelta(seconds=trial.lease_s)
            if trial.lease_end > max(own, now + timedelta(seconds=SUSPENDED_S)):
                self.trials[number] = replace(trial, lease_end=own)
            elif trial.lease_end < now:
                self.trials[number] = replace(trial, state=ABANDONED, lease_end=None)

    def dispatched(self, key: str) -> int | type[BsoError] | None:
        """Return the trial started with this key, its refusal, or None if a new trial must start."""
        number = self.keys.get(key)
        return KeyConflictError if number is not None and self.trials[number].state in OVER else number

    def begin(self, key: str, size: int, now: datetime) -> int:
        """Start a trial; return its number."""
        number = self.keys[key] = len(self.trials) + 1
        self.trials[number] = Trial(size, now + timedelta(seconds=SILENT_S))
        return number

    def _refusal(self, trial: Trial | None, sent: TrialId) -> type[BsoError] | None:
        if trial is None:
            return UnknownTrialError
        if sent.registration_id not in (None, self.registration_id):
            return OtherRegistrationError
        if sent.batch_size != trial.size:
            return InvalidReportError
        return StaleLeaseError if sent.lease_epoch not in (None, trial.lease_epoch) else None

    def _reported(self, trial: Trial, sent: TrainingResult) -> tuple[Trial, Outcome]:
        totals = (sent.time, sent.energy, sent.current_epoch, sent.metric)
        if trial.state in MEASURED and totals == trial.totals:
            return trial, (True, trial.state is COMPLETED)
        if trial.state in OVER:
            return trial, ReportConflictError
        if trial.state is RUNNING and totals == trial.totals:
            return trial, (False, False)
        known = trial.totals or (0.0, 0.0, 0.0, 0.0)
        if any(now < then for now, then in zip(totals[:3], known[:3], strict=True)):
            return trial, InvalidReportError
        gap_s = max(trial.longest_gap_s, totals[0] - known[0])
        trial = replace(trial, state=RUNNING, totals=totals, reports=trial.reports + 1, longest_gap_s=gap_s)
        costs = [each.cost_j for each in self.trials.values() if each.state is COMPLETED]
        if costs and trial.cost_j > BETA * min(costs):
            trial = replace(trial, state=EARLY_STOPPED)
        elif sent.metric >= TARGET:
            trial = replace(trial, state=COMPLETED)
        elif sent.current_epoch >= MAX_EPOCHS:
            trial = replace(trial, state=EXHAUSTED)
        return trial, (trial.state is not RUNNING, trial.state is COMPLETED)

    def _ended(self, trial: Trial, outcome: TrialState) -> Trial:
        if trial.state in OVER or trial.state is outcome:
            return trial
        same_size = [each.state for each in self.trials.values() if each.size == trial.size]
        if outcome is FAILED and same_size.count(FAILED) + 1 >= CRASHES and not MEASURED & set(same_size):
            outcome = INFEASIBLE
        return replace(trial, state=outcome)

    def _beating(self, trial: Trial, sent: Heartbeat) -> Trial:
        if trial.state in OVER:
            return trial
        lease_epoch = trial.lease_epoch + sent.resumes
        return replace(trial, state=RUNNING, beats=trial.beats or sent.regular, lease_epoch=lease_epoch)
