"""The life of a job in memory: the same steps as the service's, without rows, leases and clocks."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

import numpy as np

from bso_server.core import policy
from bso_server.core.history import (
    Arm,
    Cheapest,
    History,
    after_report,
    arms_after,
    bandit_entered_from_the_start,
    is_counted_exploration,
)
from bso_server.core.model import Job, Report, Suggestion, TrialRecord
from bso_server.core.policy import Verdict
from zeus_plugins.protocol import Origin, PolicyName, StopRule, TrialState


@dataclass
class Life:
    """One job from its first trial on.

    Attributes:
        job: The job.
        rng: Its generator.
    """

    job: Job
    rng: np.random.Generator
    _arms: dict[int, Arm] = field(init=False)
    _in_flight: dict[int, TrialRecord] = field(default_factory=dict)
    _explorations: dict[int, TrialRecord] = field(default_factory=dict)
    _cheapest: Cheapest | None = None
    _survivors: tuple[int, ...] | None = None
    _bandit_entered_at: int | None = field(init=False)
    _events: int = 0
    _trials: int = 0

    def __post_init__(self) -> None:
        self._arms = {size: Arm(size) for size in self.job.batch_sizes}
        self._bandit_entered_at = bandit_entered_from_the_start(self.job)

    @property
    def history(self) -> History:
        """What the next decision rests on."""
        gp_voi = self.job.policy is PolicyName.GP_VOI
        return History(
            self.job,
            self._arms,
            () if gp_voi or self._survivors is not None else tuple(self._explorations.values()),
            self._cheapest,
            self._bandit_entered_at,
            self._survivors,
            tuple(self._in_flight.values()) if gp_voi else (),
        )

    def ask(self) -> tuple[TrialRecord, Suggestion]:
        """Start the next trial.

        Raises:
            NoSurvivorError: The policy has no batch size left.
        """
        suggestion = policy.suggest(self.history, self.rng)
        self._events += 1
        self._trials += 1
        trial = TrialRecord(
            trial_number=self._trials,
            batch_size=suggestion.batch_size,
            state=TrialState.RUNNING,
            origin=suggestion.origin,
            started_event=self._events,
            bound=suggestion.bound,
        )
        self._survivors = suggestion.survivors
        if suggestion.origin is Origin.BANDIT and self._bandit_entered_at is None:
            self._bandit_entered_at = self._events
        self._arms[trial.batch_size] = self._arms[trial.batch_size].after_dispatch()
        self._put(trial)
        return trial, suggestion

    def stop_rule(self, trial_number: int) -> StopRule:
        """When the running trial is stopped, as far as is known by now."""
        return policy.stop_rule(self.job, self._in_flight[trial_number], self._min_cost_j)

    def report(
        self, trial_number: int, report: Report, *, reports: int, judged_by: StopRule | None = None
    ) -> tuple[Verdict, TrialRecord]:
        """Judge where a running trial stands, and end it if the verdict says so.

        Args:
            trial_number: The trial.
            report: Its totals.
            reports: How many it has sent, this one included; those between may have been left out here.
            judged_by: The rule by which the training has judged itself, as in `policy.judge`.
        """
        trial = self._in_flight[trial_number]
        if policy.needs_bound(self.job, trial):
            trial = policy.bounded(self.history, trial, report)
        verdict = policy.judge(self.job, trial, report, self._min_cost_j, judged_by=judged_by)
        trial = replace(after_report(self.job, trial, report), message=verdict.message, reports=reports)
        if verdict.stop:
            self._events += 1
            trial = replace(trial, state=verdict.state, end_reason=verdict.reason, ended_event=self._events)
            self._arms |= arms_after(self.job, self._arms, [trial], bandit_entered_at=self._bandit_entered_at)
            self._cheapest = Cheapest.of_both(self._cheapest, self.job, trial)
        self._put(trial)
        return verdict, trial

    @property
    def _min_cost_j(self) -> float | None:
        return None if self._cheapest is None else self._cheapest.cost_j

    def _put(self, trial: TrialRecord) -> None:
        if trial.state is TrialState.RUNNING:
            self._in_flight[trial.trial_number] = trial
        else:
            del self._in_flight[trial.trial_number]
        if is_counted_exploration(trial):
            self._explorations[trial.trial_number] = trial
