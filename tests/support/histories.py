"""Life of a job without a server: trials start and end, and each such event gets the next number."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

import numpy as np

from bso_server.core.gp_voi.beliefs import Belief
from bso_server.core.job import check_transition, replay
from bso_server.core.model import Cheapest, History, Report, TrialRecord, after_report
from bso_server.core.policy import bounded, judge, needs_bound, suggest
from tests.support import jobs
from zeus_plugins.protocol import GP_VOI, CreatedJob, EndReason, Origin, TrialState, Verdict


def make_job(batch_sizes: tuple[int, ...], default_batch_size: int, **fields: object) -> CreatedJob:
    """Return a job with cost = energy (η = 1), target metric 1 and 10 epochs at most."""
    sizes = {"batch_sizes": batch_sizes, "default_batch_size": default_batch_size, "gpu_model": "GPU"}
    target = {"eta_knob": 1.0, "target_metric": 1.0, "max_epochs": 10}
    return CreatedJob.model_validate(jobs.job(**{"job_id": "job", **sizes, **target, **fields}))


@dataclass
class Life:
    """Trials of a job so far, and its generator."""

    job: CreatedJob
    rng: np.random.Generator = field(default_factory=lambda: np.random.default_rng(0))
    trials: list[TrialRecord] = field(default_factory=list)
    events: int = 0
    survivors: tuple[int, ...] | None = None
    reason: str = ""  # reason of the policy's latest trial

    @property
    def history(self) -> History:
        return replay(self.job, self.trials, self.survivors)

    def belief(self, batch_size: int) -> Belief:
        """Return the belief of policy `gp_voi` about a size."""
        belief: Belief = self.history.memory[self.job.batch_sizes.index(batch_size)]
        return belief

    def dispatch(self, batch_size: int, origin: Origin = Origin.EXPLORATION) -> TrialRecord:
        """Start a trial independent of the policy."""
        self.events += 1
        trial = TrialRecord(
            trial_number=len(self.trials) + 1,
            batch_size=batch_size,
            state=TrialState.RUNNING,
            origin=origin,
            started_event=self.events,
        )
        self.trials.append(trial)
        return trial

    def ask(self) -> TrialRecord:
        """Start the trial that the policy suggests."""
        suggestion = suggest(self.history, self.rng)
        self.survivors, self.reason = suggestion.survivors, suggestion.reason
        trial = self.dispatch(suggestion.batch_size, suggestion.origin).bounded_by(suggestion.bound)
        self.trials[-1] = trial
        return trial

    def move(self, trial: TrialRecord, state: TrialState, cost_j: float = 0.0) -> TrialRecord:
        """Put a trial into another state, having cost `cost_j` joules."""
        check_transition(self.trials[trial.trial_number - 1].state, state)
        ended_event = None
        if state not in {TrialState.RUNNING, TrialState.SUSPENDED}:
            self.events += 1
            ended_event = self.events
        moved = replace(trial, state=state, ended_event=ended_event, energy_j=cost_j)
        self.trials[trial.trial_number - 1] = moved
        return moved

    def exclude(self, trial: TrialRecord, reason: EndReason = EndReason.OUT_OF_MEMORY) -> None:
        """Let a trial show that its size cannot run."""
        self.trials[-1] = replace(self.move(trial, TrialState.INFEASIBLE), end_reason=reason)

    def complete(self, trial: TrialRecord, cost_j: float) -> TrialRecord:
        """Let a trial reach the target."""
        return self.move(trial, TrialState.COMPLETED, cost_j)

    def run(self, batch_size: int, origin: Origin, state: TrialState, cost_j: float) -> TrialRecord:
        """Dispatch a trial and let it end at once."""
        return self.move(self.dispatch(batch_size, origin), state, cost_j)

    def report(
        self, trial: TrialRecord, cost_j: float, *, epoch: float, metric: float, startup_s: float | None = None
    ) -> Verdict:
        """Judge a report (at 1 s) as the server does, and end the trial if the verdict demands this."""
        report = Report(1.0, cost_j, epoch, metric)
        trial = self.trials[trial.trial_number - 1]
        trial = trial if trial.report_count else replace(trial, startup_s=startup_s)
        if needs_bound(self.job, trial):
            trial = bounded(self.history, trial, report)
        cheapest: Cheapest | None = None
        for ended in self.trials:
            cheapest = Cheapest.of_both(cheapest, self.job, ended)
        verdict = judge(self.job, trial, report, None if cheapest is None else cheapest.cost_j)
        trial = self.trials[trial.trial_number - 1] = after_report(self.job, trial, report)
        if verdict.stop:
            self.move(trial, verdict.state, cost_j)
        return verdict


def new_life(batch_sizes: tuple[int, ...] = (8, 16, 32, 64, 128), default: int = 64, **fields: object) -> Life:
    """Return a job with policy `gp_voi`."""
    return Life(make_job(batch_sizes, default, **{"max_epochs": 50, "policy": GP_VOI, **fields}))


def run(
    life: Life, trial: TrialRecord, needed: float, epoch_j: float = 10.0, startup: float = 1.0, step: float = 1.0
) -> TrialRecord:
    """Run a trial that needs `needed` epochs of `epoch_j` joules, the first `startup` times as expensive."""
    number, epoch = trial.trial_number, 0.0
    while True:
        epoch = round(epoch + step, 6)
        cost_j = epoch_j * (epoch + (startup - 1) * step)
        if life.report(life.trials[number - 1], cost_j, epoch=epoch, metric=float(epoch >= needed)).stop:
            return life.trials[number - 1]
