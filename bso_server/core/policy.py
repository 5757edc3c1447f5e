"""Interface of policies, the installed policies, and the questions that the core asks the policy of a job.

A policy consists of pure functions over `History`, collected in one object, `Policy`. Packages offer policies through
the entry point group `GROUP`. The built-in policies have the same form, but are listed in `_OWN`, so they need no
package metadata, and no package can take their names. `find` returns a policy by its name.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from difflib import get_close_matches
from functools import lru_cache, reduce
from importlib.metadata import EntryPoint, entry_points
from typing import Any, Generic, NoReturn, TypeVar

import numpy as np

from bso_server.core.model import (
    EpochBound,
    Expectations,
    History,
    Report,
    Suggestion,
    TrialRecord,
    after_report,
    cost_of,
)
from bso_server.core.targets import suggest_own_size
from bso_server.errors import InvalidReportError, PolicyNotInstalledError
from zeus_plugins.protocol import (
    FINAL,
    GP_VOI,
    ZEUS,
    CreatedJob,
    Decision,
    LearnedEpochs,
    Origin,
    StopRule,
    Verdict,
    WarmStart,
)

GROUP = "zeus_plugins.policies"
"""Entry point group in which packages name their policies."""

MAX_VERSION_LENGTH = 64

Remembered = TypeVar("Remembered")


@dataclass(frozen=True, slots=True)
class Memory(Generic[Remembered]):
    """Memory of a job that a policy keeps beyond `History.arms`: a value, created and updated by pure functions.

    The server stores the memory with the trials. It must equal the result of a replay of all trials, which a new
    version of the policy causes.

    Attributes:
        kind: Type of the memory, which pydantic writes as JSON and reads back unchanged, such as a frozen dataclass of
            numbers. Its size must not grow with the number of trials.
        begin: Returns the memory of a new job.
        after: Returns the memory after a trial has reached a final state; called in the order of ends. A trial with
            `other_gpus` says nothing about costs on the job's present GPUs.
        learned: Returns the epochs with which a job of the same training on other GPUs may begin (`CreatedJob.warm`);
            None if the policy has no warm starts.
        after_all: Returns the memory after several trials, exactly as `after` for one after the other does, but faster.
            None if the policy has no faster way.
    """

    kind: type[Remembered]
    begin: Callable[[CreatedJob], Remembered]
    after: Callable[[Remembered, CreatedJob, TrialRecord], Remembered]
    learned: Callable[[Remembered, CreatedJob], tuple[LearnedEpochs, ...]] | None = None
    after_all: Callable[[Remembered, CreatedJob, Sequence[TrialRecord]], Remembered] | None = None


def own_bound(job: CreatedJob, trial: TrialRecord, min_cost_j: float | None) -> StopRule:  # noqa: ARG001 - the signature is the interface's
    """Stop a trial at its own bound on epochs, or at `max_epochs` if it has none."""
    return StopRule(max_epochs=job.max_epochs if trial.epoch_bound is None else trial.epoch_bound)


@dataclass(frozen=True, slots=True, kw_only=True)
class Policy:
    """Policy for choosing batch sizes: pure functions that read no clock and use only the given random generator.

    Attributes:
        version: Changes whenever the same trials would result in a different memory; at most 64 characters.
        suggest: Returns the next trial's batch size and the reason. May raise only `NoSurvivorError`. The generator is
            the job's: the same seed (`mab_seed`) and the same trials lead to the same draws.
        explain: Returns the numbers behind a suggestion, from the same history. Not called in simulations.
        expectations: Returns the expected cost of each batch size, and the best size.
        stop_rule: Returns when a trial that has not reached the target is stopped. Called at each report, with the
            trial before that report, and the lowest cost (J) of a trial of the job that reached the target, or None.
        bound: Returns the bound of a running trial that was dispatched without one, after a report; None if it is too
            early to decide. The attribute itself is None if only suggestions contain bounds.
        memory: None if `History` is enough.
        controls: True if a job may replace runs at the best size with control runs at the default (`core.verdict`).
        prunes: True if jobs begin with a pruning stage, which ends with the first suggestion of `Origin.BANDIT`.
            `History.explorations` requires it.
        leaves_out: True if `suggest` never chooses a size that `core.quality.left_out` returns. Jobs with
            `no_worse_than_default` require it.
        check: Raises `InvalidJobError` for a new job that the policy cannot serve.
        amended: Corrects a new job that names no policy, such as a Zeus client's, so that `check` accepts it.
        missing: Reason why the policy is not available, for a stand-in (`find`); otherwise None.
    """

    version: str
    suggest: Callable[[History, np.random.Generator], Suggestion]
    explain: Callable[[History, Suggestion], Decision] | None = None
    expectations: Callable[[History], Expectations] = lambda _: Expectations({}, None)
    stop_rule: Callable[[CreatedJob, TrialRecord, float | None], StopRule] = own_bound
    bound: Callable[[History, TrialRecord], EpochBound | None] | None = None
    memory: Memory[Any] | None = None
    controls: bool = False
    prunes: bool = False
    leaves_out: bool = False
    check: Callable[[CreatedJob], None] = lambda _: None
    amended: Callable[[CreatedJob], CreatedJob] = lambda job: job
    missing: str | None = None

    def begun_memory(self, job: CreatedJob) -> Any:
        """Return the memory of a new job, or None."""
        return None if self.memory is None else self.memory.begin(job)


# Entry points, so that they are loaded like the policies of packages.
_OWN = {
    name: EntryPoint(name, f"bso_server.core.{module}:POLICY", GROUP)
    for name, module in ((ZEUS, "zeus"), (GP_VOI, "gp_voi.policy"))
}


# The cache is limited because names come from clients, too.
@lru_cache(maxsize=256)
def find(name: str) -> Policy:
    """Return the policy of this name, or a stand-in if it is not available. Results are cached for the process.

    With a stand-in, running trials continue to their own bounds. The stand-in raises an error in place of a suggestion,
    has no expected costs, and says in `Policy.missing` what to do.
    """
    found = [_OWN[name]] if name in _OWN else list(entry_points(group=GROUP, name=name))
    if not found:
        *others, last = names()
        meant = get_close_matches(name, [*others, last], n=1)
        return _stand_in(
            f"policy {name!r} is not installed where the server runs, which has {', '.join(others)} and {last}"
            + (f" (did you mean {meant[0]!r}?)" if meant else "")
            + f": install the package that has it (entry point group {GROUP}) there and restart the server, or "
            "use one of these"
        )
    if len(found) > 1:
        return _stand_in(f"policy {name!r} is in several packages, {_packages(found)}: uninstall all but one of them")
    (entry,) = found
    try:
        policy = entry.load()
    except Exception as error:
        what = f"{type(error).__name__}: {error}"
        return _stand_in(f"policy {name!r}{_packages(found)} cannot be loaded, {what}: mend or update its package")
    if not isinstance(policy, Policy) or not 0 < len(policy.version) <= MAX_VERSION_LENGTH:
        return _stand_in(f"policy {name!r}: {entry.value} is no bso_server.policies.Policy with a version: mend it")
    return policy


def names() -> list[str]:
    """Return the names of the installed policies, ascending; some of them may fail to load."""
    return sorted({*_OWN, *entry_points(group=GROUP).names})


def installed(name: str) -> Policy:
    """Return the policy of this name.

    Raises:
        PolicyNotInstalledError: It is not installed, or cannot be loaded.
    """
    policy = find(name)
    if policy.missing is not None:
        raise PolicyNotInstalledError(policy.missing)
    return policy


def _stand_in(reason: str) -> Policy:
    def suggest(history: History, rng: np.random.Generator) -> NoReturn:  # noqa: ARG001 - the signature is the interface's
        raise PolicyNotInstalledError(reason)

    return Policy(version="", suggest=suggest, missing=reason)


def _packages(found: list[EntryPoint]) -> str:
    """List the packages of these entry points in words."""
    packages = sorted({each.dist.name for each in found if each.dist is not None})
    return f" ({' and '.join(packages)})" if packages else ""


LEAST_COST_J = 1e-6
"""Least plausible cost of a run; the finest meters count tens of microjoules."""

LEAST_SHARE = 1e-5
"""Least plausible cost of a run, as a share of its cost at full power, or of the cheapest run's cost."""


def suggest(history: History, rng: np.random.Generator, *, explains: bool = False) -> Suggestion:
    """Choose the next trial's batch size by the job's policy, which may advance the job's generator, `rng`.

    If `explains`, the suggestion includes the numbers behind it, unless the policy has none. While the job has no
    target, `core.targets` chooses the size instead of the policy.

    Raises:
        NoSurvivorError: No batch size can run any more, or policy `zeus` has found none that reaches the target.
        PolicyNotInstalledError: The job's policy is not available.
        ValueError: The policy has suggested a size that the job does not have.
    """
    policy = find(history.job.policy)
    own = suggest_own_size(history) if history.job.target_metric is None else None
    if own is not None:
        return own
    suggestion = policy.suggest(history, rng)
    if suggestion.batch_size not in history.job.batch_sizes:
        raise ValueError(
            f"policy {history.job.policy} suggests {suggestion.batch_size}, which is not one of the job's batch sizes "
            f"{list(history.job.batch_sizes)}: mend the policy"
        )
    if not explains or suggestion.decision is not None or policy.explain is None:
        return suggestion
    return replace(suggestion, decision=policy.explain(history, suggestion))


def expectations(history: History) -> Expectations:
    """Return the cost that the policy expects of each batch size, and the best size."""
    return find(history.job.policy).expectations(history)


def needs_bound(job: CreatedJob, trial: TrialRecord) -> bool:
    """Return True if `bounded` must try to set the trial's bound before the next report is judged.

    Policy `gp_voi` sets the bound of a trial a single time: at the dispatch if the policy knows the cost of an epoch,
    otherwise after the first epochs of the trial.
    """
    if job.target_metric is None or trial.origin is Origin.FINISH:
        return False
    return trial.epoch_bound is None and find(job.policy).bound is not None


def bounded(history: History, trial: TrialRecord, report: Report) -> TrialRecord:
    """Set the bound of a trial that `needs_bound` by its next report, if this report suffices for a bound."""
    bound = find(history.job.policy).bound
    return trial if bound is None else trial.bounded_by(bound(history, after_report(history.job, trial, report)))


def stop_rule(job: CreatedJob, trial: TrialRecord, min_cost_j: float | None) -> StopRule:
    """Return the rule that stops a trial that has not reached the target.

    Policy `zeus` stops it at ``β · min_cost``, `gp_voi` at the trial's own bound, if it has one; both at `max_epochs`.
    Without a target, `max_epochs` alone stops a trial; the same holds for a trial that finishes another trial's run.
    `min_cost_j` is the lowest cost of a trial of the job that reached the target, in joules, or None. The rule contains
    the number of the trial's latest evaluations in a row at the target.
    """
    if job.target_metric is None:
        return StopRule(max_epochs=job.max_epochs)
    if trial.origin is Origin.FINISH:
        rule = StopRule(max_epochs=job.max_epochs)
    else:
        rule = find(job.policy).stop_rule(job, trial, None if trial.other_gpus else min_cost_j)
    if not trial.confirmed:
        return rule
    return rule.model_copy(update={"confirmed": trial.confirmed, "confirmed_epoch": trial.epoch})


def judge(
    job: CreatedJob,
    trial: TrialRecord,
    report: Report,
    min_cost_j: float | None,
    *,
    judged_by: StopRule | None = None,
) -> Verdict:
    """Decide whether a running trial continues; `trial` is its record before this report, `bounded` if necessary.

    Policy `zeus`, with ``bound = β · min_cost``: the training continues within the bound, below `max_epochs` and before
    the target. Otherwise it stops; reaching the target counts only within the bound. Policy `gp_voi` uses the trial's
    own bound on epochs instead, and reaching the target always counts. `min_cost_j` as in `stop_rule`.

    Totals never shrink. If a trial has reported each epoch as a whole number, a fraction is an error, because a
    training that validates within its epochs sends a fraction in its first report.

    `judged_by` is the rule by which the training has already judged the report while the server was unreachable. It
    takes precedence over the current rule, even if the current rule would have stopped the training earlier, because
    the training cannot be undone. The verdict contains the server's rule, updated by this report's count of evaluations
    at the target.

    Raises:
        InvalidReportError: The report contradicts earlier ones, or reached the target at no cost.
    """
    _check_against_earlier(trial, report)
    rule, spent_j = stop_rule(job, trial, min_cost_j), cost_of(job, report)
    because = trial.epoch_bound_reason
    if rule.max_cost_j is not None:
        because = f"{job.beta_knob:g} times the cheapest run"
    verdict = (judged_by or rule).judge(
        job,
        metric=report.metric,
        epochs=report.epoch,
        cost_j=spent_j,
        because=because if judged_by is None else None,
    )
    if verdict.converged and spent_j <= 0:
        raise InvalidReportError(
            "the target was reached at a cost of 0 J, which no later run could beat: with this job's eta_knob "
            f"({job.eta_knob:g}) time and energy must be measured",
            field="energy",
        )
    return replace(verdict, rule=rule.confirmed_as(verdict.rule))


def doubt(job: CreatedJob, report: Report, min_cost_j: float | None) -> str | None:
    """Return the reason why a trial's final cost is impossibly low, or None if it is plausible.

    Under policy `zeus`, such a cost would stop every later run as too costly. Correct measurements are far above these
    limits: an idle chip takes at least a hundredth of its full power, and a better size saves only a part of the cost.
    `min_cost_j` as in `stop_rule`.
    """
    cost_j = cost_of(job, report)
    limits = [
        (LEAST_COST_J, "less than any meter counts"),
        (LEAST_SHARE * job.max_power * report.time_s, f"in {report.time_s:.4g} s on {job.max_power:g} W"),
        (0.0 if min_cost_j is None else LEAST_SHARE * min_cost_j, f"and the cheapest run {min_cost_j or 0:.4g} J"),
    ]
    reason = next((why for least_j, why in limits if cost_j < least_j), None)
    if reason is None:
        return None
    return f"a run cannot cost {cost_j:.4g} J, {reason}: check how energy is measured, and that it is in joules"


def _check_against_earlier(trial: TrialRecord, report: Report) -> None:
    for field, now, before, unit in (
        ("time", report.time_s, trial.time_s, "s"),
        ("energy", report.energy_j, trial.energy_j, "J"),
        ("current_epoch", report.epoch, trial.epoch, "epochs"),
    ):
        if now < before:
            raise InvalidReportError(
                f"{field} is a total since the trial began and cannot shrink: {now:g} {unit} after {before:g} {unit}",
                field=field,
            )
    every_epoch_reported = trial.report_count > 0 and trial.epoch == trial.report_count
    if every_epoch_reported and report.epoch % 1:
        raise InvalidReportError(
            f"this trial has reported each of its {trial.report_count} epochs as a whole number, and {report.epoch:g} "
            "is none: count epochs from 1, or report the fraction at every validation from the first on",
            field="current_epoch",
        )


def memory_after(job: CreatedJob, memory: Any, ended: Iterable[TrialRecord]) -> Any:
    """Return the policy's memory after the ends of these trials, in this order; the same object if nothing changes."""
    kept = find(job.policy).memory
    if kept is None:
        return None
    # An abandoned trial may be revived, which cancels its end. A removed size has no place in a memory. A trial
    # that only finishes another trial's run says nothing about a whole run.
    counted = [
        trial
        for trial in ended
        if trial.state in FINAL and trial.batch_size in job.batch_sizes and trial.origin is not Origin.FINISH
    ]
    if kept.after_all is not None:
        return kept.after_all(memory, job, counted)
    return reduce(lambda known, trial: kept.after(known, job, trial), counted, memory)


def bandit_entered_from_the_start(job: CreatedJob) -> int | None:
    """Return the event with which a new job enters its bandit stage: 0 without a pruning stage, otherwise None."""
    return None if find(job.policy).prunes else 0


def learned_by(history: History) -> WarmStart | None:
    """Return the warm start that a job with this history offers to a new job, or None."""
    memory = find(history.job.policy).memory
    job = history.job
    epochs = () if memory is None or memory.learned is None else memory.learned(history.memory, job)
    if not epochs:
        return None
    return WarmStart(job_id=job.job_id, gpus=job.gpus, epochs=epochs)
