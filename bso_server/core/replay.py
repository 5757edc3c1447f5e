"""Histories made from trials, as their policies would have made them."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from bso_server.core.history import Arm, Cheapest, History, arms_after, is_counted_exploration
from bso_server.core.model import TrialRecord
from bso_server.core.registry import find
from zeus_plugins.protocol import ALIVE, FINAL, JobRegistration, Origin


def replay(job: JobRegistration, trials: Iterable[TrialRecord], survivors: tuple[int, ...] | None = None) -> History:
    """Replay all trials of a job, in order of dispatch: the summary that it must have.

    The sizes with which the bandit stage was entered are a decision that is kept and not replayed.
    """
    trials = tuple(trials)
    arms = {batch_size: Arm(batch_size) for batch_size in job.batch_sizes}
    for trial in trials:
        arms[trial.batch_size] = arms[trial.batch_size].after_dispatch()
    entered_at = bandit_entered_from_the_start(job)
    if entered_at is None:
        entered_at = next((trial.started_event for trial in trials if trial.origin is Origin.BANDIT), None)
    ended = sorted(
        (trial for trial in trials if trial.ended_event is not None), key=lambda trial: trial.ended_event or 0
    )
    cheapest: Cheapest | None = None
    for trial in ended:
        cheapest = Cheapest.of_both(cheapest, job, trial)
    arms |= arms_after(job, arms, ended, bandit_entered_at=entered_at)
    prunes = find(job.policy).prunes
    explorations = tuple(trial for trial in trials if prunes and is_counted_exploration(trial))
    in_flight = tuple(trial for trial in trials if trial.state in ALIVE)
    memory = memory_after(job, find(job.policy).begun_memory(job), ended)
    return History(job, arms, explorations, cheapest, entered_at, survivors, in_flight, memory)


def memory_after(job: JobRegistration, memory: Any, ended: Iterable[TrialRecord]) -> Any:
    """The policy's memory when these trials have ended, in this order; the same object if that changes nothing."""
    kept = find(job.policy).memory
    if kept is None:
        return None
    for trial in ended:
        # An abandoned trial may come back, and its end has then not been.
        if trial.state in FINAL:
            memory = kept.after(memory, job, trial)
    return memory


def bandit_entered_from_the_start(job: JobRegistration) -> int | None:
    """The event at which a new job is in its bandit stage: 0 without a pruning stage, else None."""
    return None if find(job.policy).prunes else 0
