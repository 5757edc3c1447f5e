"""The lines that people read of a training: sentences of what is known, and where a trainer shows them."""

from __future__ import annotations

import logging

from zeus_plugins.client.port import EMBEDDED
from zeus_plugins.protocol import EndingState, JobSpec, JobView, TrialState
from zeus_plugins.training.defaults import JobPlan, first_report_warning
from zeus_plugins.training.outcomes import outcome_of
from zeus_plugins.training.patches import Patches
from zeus_plugins.training.port import TrainerPort
from zeus_plugins.training.trial import TrialInfo

_logger = logging.getLogger("zeus_plugins")

_CONSEQUENCES: dict[EndingState, str] = {
    TrialState.FAILED: "it counts as failed, and its batch size is tried again",
    TrialState.INFEASIBLE: "its batch size and larger ones are left out from now on",
    TrialState.SUSPENDED: "it goes on when the training resumes from a checkpoint",
    TrialState.WITHDRAWN: "it counts against no batch size",
}


def start_line(plan: JobPlan, trial: TrialInfo, *, own_size: int, server_url: str) -> str:
    """The line at the begin of a training.

    Args:
        plan: Its job, as the server has it.
        trial: Its trial.
        own_size: The size that the script would train at.
        server_url: The server, or the file of the one in this process.
    """
    size = trial.batch_size
    against = "your own" if size == own_size else f"in place of your {own_size}"
    why = trial.reason or "chosen by the server"
    place = server_url.removeprefix(f"{EMBEDDED}//")
    line = f"zeus: job {trial.job_id}, {trial.name}: batch size {size} ({against}): {why}. Kept in {place}."
    guesses = plan.guesses
    if guesses:
        line += f" Guessed: {'; '.join(guesses)}; job=JobSpec(…) says otherwise."
    return line


def end_line(
    trial: TrialInfo, job: JobSpec, view: JobView | None, *, own_size: int, early_end: str | None = None
) -> str:
    """The line at the end of a training that no error ended.

    Args:
        trial: Its trial.
        job: The job.
        view: The job as the server shows it by now; None where it does not.
        own_size: The size that the script would train at.
        early_end: The trainer's own rule that ended it before the server said so, where it is known.
    """
    verdict = trial.verdict
    is_over = verdict is not None and verdict.stop_train
    early = early_end or "the training ended before the target was reached"
    outcome = verdict.message if verdict is not None and is_over else early
    line = f"zeus: {outcome}. Batch size {trial.batch_size} took {trial.time_s:.4g} s and {trial.energy_j:.4g} J"
    line += f" ({trial.energy_source})" if trial.energy_source else ""
    if view is not None:
        line += _against(view, trial, own_size)
    reached = verdict is not None and verdict.converged
    return f"{line}. {_next_steps(trial, job, view, reached=reached)}"


def _against(view: JobView, trial: TrialInfo, own_size: int) -> str:
    """The cost, against the user's own size."""
    cost_j = next((each.cost_j for each in view.trials if each.trial_number == trial.trial_number), None)
    if cost_j is None:
        return ""
    text = f", a cost of {cost_j:.4g} J"
    own = next((arm.mean_cost_j for arm in view.arms if arm.batch_size == own_size), None)
    if own is None or trial.batch_size == own_size:
        return text
    return f"{text}, {cost_j / own:.0%} of what your {own_size} costs"


def _next_steps(trial: TrialInfo, job: JobSpec, view: JobView | None, *, reached: bool) -> str:
    if trial.advice is not None:
        return f"{trial.advice[0].upper()}{trial.advice[1:]}."
    if not reached:
        return "Launch the training again to try the next batch size."
    if view is None:
        return "The next launch goes on from here."
    able = [arm for arm in view.arms if arm.infeasible is None]
    tried = [arm for arm in able if arm.trials]
    if len(tried) < len(able):
        return f"The next launch goes on: {len(tried)} of {len(job.batch_sizes)} batch sizes are tried."
    best = view.arm_of(view.best_batch_size)
    if best is None:
        return "All batch sizes are tried."
    expected = "" if best.expected_cost is None else f", where a run is expected to cost {best.expected_cost} J"
    return f"All batch sizes are tried; the best so far is {best.batch_size}{expected}."


class Announcer:
    """Tells the user of one trial, and the experiment trackers.

    Args:
        plan: The job, as the server has it.
        monitor: Name of the metric; may be empty.
        own_size: The size that the script would train at.
        quiet: Whether to leave out the lines at the begin and the end.
    """

    def __init__(self, plan: JobPlan, monitor: str, *, own_size: int, quiet: bool) -> None:
        self._plan = plan
        self._monitor = monitor
        self._own_size = own_size
        self._is_quiet = quiet
        self._has_reported = False

    def begun(self, port: TrainerPort, trial: TrialInfo, server_url: str, patches: Patches) -> None:
        """Tell of the batch size, the trackers too."""
        hyperparameters: dict[str, str | int] = {
            "zeus/job_id": trial.job_id,
            "zeus/batch_size": trial.batch_size,
            "zeus/policy": str(self._plan.job.policy),
            "zeus/reason": trial.reason or "chosen by the server",
        }
        port.log_hyperparameters(hyperparameters, patches)
        self._has_reported = trial.metric is not None
        if not self._is_quiet:
            port.say(start_line(self._plan, trial, own_size=self._own_size, server_url=server_url))

    def started(self, port: TrainerPort, trial: TrialInfo, lr_factor: float, patches: Patches) -> None:
        """Tell the trackers that it begins."""
        port.log(
            {
                "zeus/batch_size": float(trial.batch_size),
                "zeus/trial_number": float(trial.trial_number or 0),
                "zeus/lr_factor": lr_factor,
            }
        )
        self._patches = patches
        port.show_progress(self._progress(trial), patches)

    def reported(self, port: TrainerPort, trial: TrialInfo, cost_j: float | None) -> None:
        """Tell the trackers what it has cost so far, and what its first report tells of the target."""
        job, rule, verdict = self._plan.job, trial.stop_rule, trial.verdict
        told = {"zeus/epoch_bound": float(job.max_epochs if rule is None else rule.max_epochs)}
        if cost_j is not None:
            told["zeus/cost_j"] = cost_j
        if rule is not None and rule.max_cost_j is not None:
            told["zeus/cost_bound_j"] = rule.max_cost_j
        if verdict is not None and verdict.stop_train:
            told["zeus/target_reached"] = float(verdict.converged)
            told["zeus/trial_time_s"], told["zeus/trial_energy_j"] = trial.time_s, trial.energy_j
        port.log(told)
        port.show_progress(self._progress(trial), self._patches)
        if not self._has_reported and trial.metric is not None and port.rank == 0:
            is_reached = verdict is not None and verdict.converged
            warning = first_report_warning(job, self._monitor, trial.metric, is_reached=is_reached)
            if warning is not None:
                _logger.warning("%s", warning)
        self._has_reported = True

    def ended(self, port: TrainerPort, trial: TrialInfo, view: JobView | None, early_end: str | None) -> None:
        """Tell what became of it."""
        if not self._is_quiet:
            port.say(end_line(trial, self._plan.job, view, own_size=self._own_size, early_end=early_end))

    def broken_off(self, port: TrainerPort, trial: TrialInfo, error: BaseException) -> None:
        """Tell what an error makes of it."""
        if not self._is_quiet and not trial.is_over:
            spent = f"{trial.time_s:.4g} s and {trial.energy_j:.4g} J"
            port.say(
                f"zeus: {trial.name} of job {trial.job_id} was ended by {type(error).__name__} after {spent}: "
                f"{_CONSEQUENCES[outcome_of(error)]}."
            )

    def _progress(self, trial: TrialInfo) -> str:
        bound = self._plan.job.max_epochs if trial.stop_rule is None else trial.stop_rule.max_epochs
        return f"{trial.batch_size} (≤{bound} epochs)"
