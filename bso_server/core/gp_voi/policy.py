"""Policy `gp_voi` as the server asks it, and its memory of a job: a belief for each batch size."""

from __future__ import annotations

import numpy as np

from bso_server.core.gp_voi import decisions
from bso_server.core.gp_voi.beliefs import Belief, Beliefs, Outcome, after_crash, after_outcome
from bso_server.core.gp_voi.explanation import explain
from bso_server.core.gp_voi.laws import Sizes
from bso_server.core.gp_voi.run_costs import CostRun
from bso_server.core.history import History, log_costs_per_epoch
from bso_server.core.model import OBSERVED, Suggestion, TrialRecord
from bso_server.core.registry import Memory, Policy
from zeus_plugins.protocol import JobRegistration, Origin, TrialState


def suggest(history: History, rng: np.random.Generator) -> Suggestion:  # noqa: ARG001 - the signature is the interface's
    """Choose the next trial's batch size; nothing is drawn from the generator.

    Raises:
        NoSurvivorError: No batch size can run any more.
    """
    return decisions.suggest(history)


def begun(job: JobRegistration) -> Beliefs:
    """The beliefs about a new job's batch sizes."""
    return (Belief(),) * len(job.batch_sizes)


def after(beliefs: Beliefs, job: JobRegistration, trial: TrialRecord) -> Beliefs:
    """The beliefs once this trial has ended."""
    index = job.batch_sizes.index(trial.batch_size)
    log_first_cost, _ = log_costs_per_epoch(job, trial)
    cost = CostRun.of(job, trial)
    if trial.state in OBSERVED:
        outcome = Outcome(
            index=index,
            epochs=trial.epoch,
            log_first_cost=log_first_cost,
            cost=cost,
            epoch_step=trial.epoch / trial.report_count,
            reached=trial.state is TrialState.COMPLETED,
            conclusive=trial.state is TrialState.EXHAUSTED or trial.origin is Origin.INCUMBENT,
        )
        return after_outcome(Sizes.of(job), beliefs, outcome)
    if trial.state is TrialState.FAILED and cost is not None:
        return after_crash(beliefs, index, cost)
    return beliefs


POLICY = Policy(
    version="2",
    suggest=suggest,
    explain=explain,
    expectations=decisions.expectations,
    bound=decisions.bound_of,
    memory=Memory(tuple[Belief, ...], begun, after),
)
