"""The prospects of a job whose batch sizes have all missed the target, and trials that do not compare."""

from __future__ import annotations

import logging

from zeus_plugins.energy.nvml_notes import scopes_in
from zeus_plugins.protocol import JobView, TrialState

LATEST_TRIALS = 100
"""Trials of the job that are looked at, the latest ones."""

# Measured to the end that the server decided on, without the target.
_MISSED = frozenset({TrialState.EARLY_STOPPED, TrialState.EXHAUSTED})


_logger = logging.getLogger("zeus_plugins")


def warn_of_scopes(job: JobView) -> None:
    """Warn where the energy of some trials is that of GPUs, and that of others that of the modules around them.

    Args:
        job: As the server shows it, with its latest trials.
    """
    numbers = scopes_in(trial.energy_source or "" for trial in job.trials)
    if all(numbers):
        _logger.warning(
            "of the latest trials of job %s, the energy of %d is that of the GPUs alone and that of %d is that of "
            "their modules, with CPU and memory: their costs do not compare. Use one driver for all trials of a job",
            *(job.job.job_id, *numbers),
        )


def advice(job: JobView) -> str | None:
    """Advice on a job no batch size of which has reached the target; None while another launch may do.

    Args:
        job: As the server shows it, with its latest trials.
    """
    missed = [trial for trial in job.trials if trial.state in _MISSED and trial.metric is not None]
    untried = {arm.batch_size for arm in job.arms if arm.infeasible is None} - {trial.batch_size for trial in missed}
    if untried or not missed or any(arm.n for arm in job.arms):
        return None
    asked = job.job
    best = (max if asked.higher_is_better_metric else min)(missed, key=lambda trial: trial.metric or 0.0)
    target, move = f"{asked.target_metric:g}", "lower" if asked.higher_is_better_metric else "raise"
    return (
        f"no batch size reached {target} in {len(missed)} trials, the best was {best.metric:.4g} at "
        f"{best.batch_size}: {move} the target or raise max_epochs, and start over under another job_id or after "
        f"bso-server jobs delete {asked.job_id}"
    )
