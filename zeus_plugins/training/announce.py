"""Messages about a training: lines for its user, warnings and advice, and values for experiment trackers."""

from __future__ import annotations

import logging
from collections.abc import Iterable

from zeus_plugins.protocol import GP_VOI, ZEUS, EndingState, JobView, TrialState, printable
from zeus_plugins.training.defaults import JobPlan, first_report_warning
from zeus_plugins.training.lr_scaling import LrScaling, lr_scaling_in_words
from zeus_plugins.training.outcomes import is_refusal_of_size, outcome_of
from zeus_plugins.training.patches import Patches
from zeus_plugins.training.port import TrainerPort
from zeus_plugins.training.trial import TrialInfo

_logger = logging.getLogger("zeus_plugins")

LATEST_TRIALS = 100
"""Number of the job's latest trials that are checked for warnings."""

_CONSEQUENCES: dict[EndingState, str] = {
    TrialState.FAILED: "it counts as failed",
    TrialState.INFEASIBLE: "its batch size and larger ones are left out from now on",
    TrialState.SUSPENDED: "it continues if the training resumes from a checkpoint, and is abandoned otherwise",
    TrialState.WITHDRAWN: "it counts against no batch size",
}


class Announcer:
    """Reports one trial to the user and the experiment trackers."""

    def __init__(self, port: TrainerPort, plan: JobPlan, patches: Patches) -> None:
        self._port = port
        self._plan = plan
        self._patches = patches
        self._has_reported = False
        self._metrics: list[float] = []

    def begun(self, trial: TrialInfo, place: str, *, to_trackers: bool = True) -> None:
        """Report the batch size to the user and, unless `to_trackers` is False, to the experiment trackers.

        For the job's first trial or an offline trial, also report the job's guessed settings, and `place`, where the
        results are kept.
        """
        size, reason = trial.batch_size, trial.reason or "chosen by the server"
        hyperparameters: dict[str, str | int] = {
            "zeus/job_id": trial.job_id,
            "zeus/batch_size": size,
            "zeus/policy": str(self._plan.job.policy),
            "zeus/reason": reason,
        }
        if to_trackers:
            self._port.log_hyperparameters(hyperparameters, self._patches)
        # The model of a trial that finishes a run is trained already: its first metric says nothing about the target.
        self._has_reported = trial.metric is not None or trial.continues is not None
        is_first = trial.trial_number in (None, 1)
        # Details once per job: later lines end with the first clause, and the job's page has the whole reason.
        told = "; ".join(filter(None, (reason, self._plan.target_in_words))) if is_first else reason.partition(";")[0]
        name = trial.name if trial.job_id in reason else f"job {trial.job_id}, {trial.name}"
        self.say(f"batch size {size}{self._against(size)}: {told} ({name})")
        if not is_first:
            return
        if self._plan.guesses:
            self.say(f"guessed: {'; '.join(self._plan.guesses)} (job=JobSpec(…) sets them)")
        self.say(f"results are kept in {place}")

    def scaled(self, scaling: str, factors: Iterable[tuple[float, object]]) -> None:
        """Report the factor on the learning rate of each optimizer at another size than the default."""
        told = dict.fromkeys(lr_scaling_in_words(scaling, factor, optimizer) for factor, optimizer in factors)
        if scaling != LrScaling.NONE:
            self.say(f"learning rate {'; '.join(told)}")

    def moved(self, changes: Iterable[str]) -> None:
        """Report the settings that follow the samples; without changes, report nothing."""
        if told := ", ".join(changes):
            self.say(f"steps of your own size, for the same samples: {told} (steps='unchanged' keeps yours)")

    def started(self, trial: TrialInfo, lr_factor: float) -> None:
        """Log the trial at the start of the training."""
        self._port.log(
            {
                "zeus/batch_size": float(trial.batch_size),
                "zeus/trial_number": float(trial.trial_number or 0),
                "zeus/lr_factor": lr_factor,
            }
        )

    def reported(self, trial: TrialInfo) -> None:
        """Log the cost of the trial so far, and warn if its first report contradicts the target."""
        job, rule, verdict = self._plan.job, trial.stop_rule, trial.verdict
        self._metrics += [] if trial.metric is None else [trial.metric]
        metrics = {"zeus/epoch_bound": float(job.max_epochs if rule is None else rule.max_epochs)}
        if trial.cost_j is not None:
            metrics["zeus/cost_j"] = trial.cost_j
        if rule is not None and rule.max_cost_j is not None:
            metrics["zeus/cost_bound_j"] = rule.max_cost_j
        if verdict is not None and verdict.stop_train:
            metrics["zeus/target_reached"] = float(verdict.converged)
            metrics |= {"zeus/trial_time_s": trial.time_s, "zeus/trial_energy_j": trial.energy_j}
        self._port.log(metrics)
        if not self._has_reported and trial.metric is not None and self._port.rank == 0:
            is_reached = job.confirm == 1 and job.is_reached_by(trial.metric)
            warning = first_report_warning(job, self._plan.monitor, trial.metric, is_reached=is_reached)
            if warning is not None:
                _logger.warning("%s", warning)
        self._has_reported = True

    def ended(
        self, trial: TrialInfo, view: JobView | None, *, went_on: bool = False, next_step: str | None = None
    ) -> None:
        """Report the outcome of a trial that ended without an error.

        `view` is the job on the server, None if unknown. `went_on` is True if the training continued after the target.
        `next_step` is a sentence that replaces the advice derived from the job, or None.
        """
        self.say(f"{trial}")
        if went_on:
            self.say("the training continued to its own end, which is not counted")
        if trial.busy_remark is not None:
            self.say(f"it ran {trial.busy_remark}")
        told = [next_step or self._next_steps(trial, view)]
        if view is not None and self._plan.job.target_metric is None:
            told.insert(0, f"{view.job.target_in_words.capitalize()}.")
        # After a miss, the saving of the best size would read as this run's saving.
        elif view is not None and trial.converged:
            told.insert(0, f"{view.savings.claim}. {view.savings.evidence}".strip())
        self.say(" ".join(told))

    def broken_off(
        self, trial: TrialInfo, error: BaseException, view: JobView | None, next_step: str | None = None
    ) -> None:
        """Report the outcome of a trial that an error ended; `view` is the job on the server after a crash, or None."""
        if trial.is_over:
            return
        consequence = _CONSEQUENCES[outcome_of(error)]
        if is_refusal_of_size(error) and trial.batch_size != self._plan.job.default_batch_size:
            consequence = "its batch size is not tried again"
        if view is not None:
            consequence = _after_crash(trial, view)
        ended = f"{trial.name} of job {trial.job_id} was ended by {type(error).__name__}"
        self.say(" ".join(filter(None, (f"{ended} after {trial.spent}: {consequence}.", next_step))))

    def _against(self, size: int) -> str:
        """Return a phrase that compares a batch size with the job's default and with the script's own size."""
        default, own = self._plan.job.default_batch_size, self._plan.script_size
        script = (
            "" if own in (None, default) else f" (the script has {own}: `bso-server jobs revise` takes --default {own})"
        )
        if own == default:
            return ", your own" if size == default else f" in place of your {default}"
        return (
            f", the job's default{script}" if size == default else f" in place of the job's default {default}{script}"
        )

    def say(self, line: str) -> None:
        """Show a line to the user, unless the script has set the level of the logger `zeus_plugins` above INFO."""
        if _logger.level <= logging.INFO:
            self._port.say(printable(f"zeus: {line}"))

    def _next_steps(self, trial: TrialInfo, view: JobView | None) -> str:
        if trial.advice is not None:
            return f"{trial.advice[0].upper()}{trial.advice[1:]}."
        if (out_of_reach := self._out_of_reach(trial)) is not None:
            return out_of_reach
        if not trial.converged:
            return "Launch the training again to try the next batch size."
        if view is None:
            return "The next launch builds on this run if the server takes its results."
        able = [arm for arm in view.arms if arm.infeasible is None]
        tried = [arm for arm in able if arm.trials]
        if len(tried) < len(able):
            return f"Tried so far: {len(tried)} of {len(self._plan.job.batch_sizes)} batch sizes."
        return "All batch sizes are tried."

    def _out_of_reach(self, trial: TrialInfo) -> str | None:
        """Return a warning if the own size missed the target by more than the metric moved in its last third."""
        job, metrics = self._plan.job, self._metrics
        is_own = trial.batch_size == job.default_batch_size
        if job.target_metric is None or not trial.used_all_epochs or not is_own or len(metrics) < 3:
            return None
        moved, missed = abs(metrics[-1] - metrics[-1 - len(metrics) // 3]), abs(metrics[-1] - job.target_metric)
        if missed <= moved:
            return None
        return (
            f"The target is out of reach at your own batch size: {self._plan.monitor or 'the metric'} missed it by "
            f"{missed:.3g}, and moved by {moved:.3g} in the last third of the training. "
            f"{'Lower' if job.higher_is_better_metric else 'Raise'} the target or raise max_epochs."
        )


def _after_crash(trial: TrialInfo, view: JobView) -> str:
    """Return the consequence of a crash, in words."""
    ended = next((each for each in view.trials if each.trial_number == trial.trial_number), None)
    is_excluded = ended is not None and ended.state is TrialState.INFEASIBLE
    found = f"batch size {trial.batch_size} is not tried again" if is_excluded else "it counts as failed"
    if view.job.policy == GP_VOI and view.best_batch_size is not None:
        best = f"{view.best_batch_size} is the best so far"
        return f"{found}, and the next launch takes a size that has reached the target ({best})"
    is_repeated = view.job.policy == ZEUS or trial.batch_size == view.job.default_batch_size
    return f"{found}, and its batch size is tried again" if is_repeated and not is_excluded else found
