"""Simulation of a job's recurrences, one after another or concurrently, each until a trial reaches the target."""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import count

import numpy as np

from bso_server.core.job import InMemoryJob
from bso_server.core.model import History, Report, TrialRecord, cost_of
from bso_server.core.policy import needs_bound
from bso_server.errors import NoSurvivorError
from bso_server.simulate.workload import Consumption, Landscape, Profile
from zeus_plugins.protocol import CreatedJob, Ending, StopRule, TrialState

# Trials without success after which a recurrence is given up.
_PATIENCE = 20

# The metric is 1 once the target is reached, and 0 before.
_TARGET = 1.0


@dataclass(frozen=True)
class Conditions:
    """Constant conditions of a job on a machine of its own; a subclass may vary them after the first recurrence."""

    landscape: Landscape

    def landscape_at(self, recurrence: int) -> Landscape:  # noqa: ARG002 - always the same
        """Return the `Landscape` of the recurrence with this number, counted from 0."""
        return self.landscape

    def waited_share(self, recurrence: int) -> float:  # noqa: ARG002 - never busy
        """Return the share of its time for which a run of this recurrence waits for a CPU core."""
        return 0.0

    def slowness(self, trial_number: int, draws: np.random.Generator) -> float:  # noqa: ARG002 - no chance here
        """Return a factor on the time and energy of the trial with this number, counted from 1."""
        return 1.0

    def crashes(self, draws: np.random.Generator) -> bool:  # noqa: ARG002 - no chance here
        """Return True if a trial crashes half way; if the policy stops the trial before that, it does not crash."""
        return False


@dataclass(frozen=True, slots=True)
class PlayedTrial:
    """Ended trial of a simulated job; recurrences are counted from 0.

    `epochs_to_target` is the number of epochs that it needed, infinite if it would never have reached the target.
    """

    recurrence: int
    record: TrialRecord
    cost_j: float
    epochs_to_target: float


@dataclass
class Played:
    """Simulated job; trials are in the order of their ends.

    Attributes:
        costs_j: Total cost of each recurrence, including its stopped trials. A recurrence that was given up includes a
            run at the default, whose cost is infinite if the default never reaches the target.
        consumed: Energy and time of each recurrence; without a run at the default of infinite cost.
        unfinished: Number of recurrences that were given up.
    """

    history: History
    costs_j: list[float]
    consumed: list[Consumption]
    unfinished: int = 0
    trials: list[PlayedTrial] = field(default_factory=list)


def half_way(epochs_to_target: float, max_epochs: int) -> int:
    """Return the epoch after which a trial that crashes half way has crashed."""
    return math.ceil(min(epochs_to_target, max_epochs) / 2)


def job_of(landscape: Landscape, policy: str, *, seed: int, **fields: object) -> CreatedJob:
    """Return the job of a landscape; `fields` are further fields of `CreatedJob`, such as ``eta_knob``."""
    # Without validation, which would refuse the names in traces.
    return CreatedJob.model_construct(
        job_id_prefix="simulated",
        job_id=f"simulated-{policy}",
        number_of_gpus=1,
        gpu_model="recorded",
        batch_sizes=tuple(landscape.profiles),
        default_batch_size=landscape.default.batch_size,
        target_metric=_TARGET,
        policy=policy,
        mab_seed=seed,
        **fields,  # type: ignore[arg-type]  # the keywords are its fields
    )


@dataclass
class _Run:
    """Trial under way."""

    recurrence: int
    trial: TrialRecord
    profile: Profile
    epochs_to_target: float
    profiles_limits: bool
    began_s: float
    attempts: int
    waited_share: float
    slowness: float
    crash_epoch: int | None
    epochs: int = 0

    @property
    def epoch_j(self) -> float:
        """Cost of an epoch after the first, joules."""
        return self.profile.epoch_j * self.slowness

    def report_at(self, epochs: int) -> Report:
        """Return the report after this number of epochs."""
        first = self.profile.profiling if self.profiles_limits and self.profile.profiling else self.profile.epoch
        return Report(
            time_s=(first.time_s + (epochs - 1) * self.profile.epoch.time_s) * self.slowness,
            energy_j=(first.energy_j + (epochs - 1) * self.profile.epoch.energy_j) * self.slowness,
            epoch=float(epochs),
            metric=_TARGET if epochs >= self.epochs_to_target else 0.0,
        )


class Simulation:
    """Simulation of a job with this number of recurrences, `concurrency` of which are always under way.

    The job's `mab_seed` seeds the draws of the policy; `seed` seeds the choice of the recorded run that each trial
    follows, and the draws of the conditions. Before each suggestion, `before_decision` is called with the number of the
    recurrence, counted from 0, and the history, which is valid only during the call.
    """

    def __init__(
        self,
        job: CreatedJob,
        conditions: Conditions,
        *,
        recurrences: int,
        concurrency: int = 1,
        seed: int = 0,
        before_decision: Callable[[int, History], None] | None = None,
    ) -> None:
        self._job, self._conditions, self._before_decision = job, conditions, before_decision
        self._recurrences, self._concurrency, self._started = recurrences, concurrency, 0
        self._rng = np.random.default_rng(job.mab_seed)
        self._playing = InMemoryJob(job)
        self._draws = np.random.default_rng([seed, len(job.batch_sizes)])
        self._profiled: set[int] = set()
        self._played = Played(self._playing.history, [0.0] * recurrences, [Consumption()] * recurrences)
        # Future reports: time, order of insertion, run.
        self._queue: list[tuple[float, int, _Run]] = []
        self._order = count()

    def play(self) -> Played:
        """Run the simulation; an object can run it only once."""
        for _ in range(self._concurrency):
            self._begin_next(now_s=0.0)
        while self._queue:
            now_s, _, run = heapq.heappop(self._queue)
            if not self._report_run(run):
                continue
            if run.trial.state is not TrialState.COMPLETED:
                if run.attempts >= _PATIENCE:
                    self._finish_by_default(run.recurrence)
                elif self._begin(run.recurrence, run.attempts, now_s):
                    continue
            self._begin_next(now_s)
        self._played.history = self._playing.history
        return self._played

    def _begin_next(self, now_s: float) -> None:
        """Begin the next recurrence for which a batch size is left."""
        while self._started < self._recurrences:
            self._started += 1
            if self._begin(self._started - 1, attempts=0, now_s=now_s):
                return

    def _begin(self, recurrence: int, attempts: int, now_s: float) -> bool:
        """Begin a trial; if no batch size is left, give up the recurrence and return False."""
        if self._before_decision is not None:
            self._before_decision(recurrence, self._playing.history)
        try:
            trial = self._playing.begin_trial(self._rng)
        except NoSurvivorError:
            self._finish_by_default(recurrence)
            return False
        profile = self._conditions.landscape_at(recurrence).profiles[trial.batch_size]
        needed = profile.epochs_to_target[int(self._draws.integers(len(profile.epochs_to_target)))]
        waited = self._conditions.waited_share(recurrence)
        run = _Run(
            recurrence,
            trial,
            profile,
            epochs_to_target=needed,
            profiles_limits=trial.batch_size not in self._profiled,
            began_s=now_s,
            attempts=attempts + 1,
            waited_share=waited,
            slowness=self._conditions.slowness(trial.trial_number, self._draws) / (1 - waited),
            crash_epoch=half_way(needed, self._job.max_epochs) if self._conditions.crashes(self._draws) else None,
        )
        self._profiled.add(trial.batch_size)
        self._schedule(run, epochs=1)
        return True

    def _finish_by_default(self, recurrence: int) -> None:
        """Give up a recurrence; its owner still needs a model, and trains it at the default."""
        default = self._conditions.landscape_at(recurrence).default
        slowness = 1 / (1 - self._conditions.waited_share(recurrence))
        self._played.unfinished += 1
        self._played.costs_j[recurrence] += default.expected_cost_j * slowness
        self._played.consumed[recurrence] += (default.expected_consumption or Consumption()) * slowness

    def _schedule(self, run: _Run, epochs: int) -> None:
        run.epochs = epochs
        heapq.heappush(self._queue, (run.began_s + run.report_at(epochs).time_s, next(self._order), run))

    def _report_run(self, run: _Run) -> bool:
        """Report the state of a run; return True if the run has ended."""
        report = run.report_at(run.epochs)
        run.trial, verdict = self._playing.judge(
            run.trial.trial_number,
            report,
            report_count=run.epochs,
            judged_by=self._own_judgement(run, report),
            waited_share=run.waited_share,
        )
        if not verdict.stop and run.epochs != run.crash_epoch:
            next_epoch = self._next_epoch(run)
            self._schedule(run, next_epoch if run.crash_epoch is None else min(next_epoch, run.crash_epoch))
            return False
        if not verdict.stop:
            run.trial = self._playing.end_trial(run.trial.trial_number, Ending())
        cost_j = cost_of(self._job, run.trial)
        self._played.costs_j[run.recurrence] += cost_j
        self._played.consumed[run.recurrence] += Consumption(report.energy_j, report.time_s)
        self._played.trials.append(PlayedTrial(run.recurrence, run.trial, cost_j, run.epochs_to_target))
        return True

    def _own_judgement(self, run: _Run, report: Report) -> StopRule | None:
        """Return the rule by which a training ends itself at this report, or None.

        It ends before the epoch that would cross its cost bound, as with Zeus's data loader.
        """
        rule = self._playing.stop_rule(run.trial.trial_number)
        if rule.max_cost_j is None:
            return None
        spent_j = cost_of(self._job, report)
        if spent_j > rule.max_cost_j or spent_j + run.epoch_j <= rule.max_cost_j:
            return None
        return StopRule(max_cost_j=rule.max_cost_j, max_epochs=run.epochs)

    def _next_epoch(self, run: _Run) -> int:
        """Return the next epoch at which a report may end the run.

        Without concurrency, the stop rule stays the same during a run, so reports without effect are skipped.
        """
        if self._concurrency > 1 or needs_bound(self._job, run.trial):
            return run.epochs + 1
        rule = self._playing.stop_rule(run.trial.trial_number)
        epochs = min(run.epochs_to_target, float(rule.max_epochs))
        if rule.max_cost_j is not None:
            left_j = rule.max_cost_j - cost_of(self._job, run.trial)
            # Rounding may give the epoch before the right one; a report at that epoch has no effect.
            epochs = min(epochs, run.epochs + math.floor(left_j / run.epoch_j))
        return max(int(epochs), run.epochs + 1)
