"""The interface of a policy, the policies that are installed, and what the core asks the policy of a job.

A policy is a module of pure functions over `History`, named by one object, `Policy`. Packages offer theirs by the entry
point group `GROUP`. Ours have the same form in `_OWN`, so that they are there without any package's metadata, and no
package can take their names. Everything that depends on a job's policy asks `find`; its questions are which batch size
next (`suggest`), and go on or stop (`judge`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from difflib import get_close_matches
from functools import lru_cache
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
from bso_server.errors import InvalidReportError, PolicyNotInstalledError
from zeus_plugins.protocol import FINAL, GP_VOI, ZEUS, CreatedJob, Decision, StopRule, Verdict

GROUP = "zeus_plugins.policies"
"""The entry point group in which packages name their policies."""

MAX_VERSION_LENGTH = 64

Remembered = TypeVar("Remembered")


@dataclass(frozen=True, slots=True)
class Memory(Generic[Remembered]):
    """A policy's memory of a job beyond `History.arms`: a value, made and moved forward by pure functions.

    It stands beside the trials and must equal what a replay of them makes; another version of the policy replays them.

    Attributes:
        kind: Its type: anything that pydantic writes as JSON and reads back as it was, such as a frozen dataclass of
            numbers. Its size must not grow with the number of trials.
        begin: That of a new job.
        after: The value once this trial has ended for good, in whatever way; trials come in the order of their ends.
    """

    kind: type[Remembered]
    begin: Callable[[CreatedJob], Remembered]
    after: Callable[[Remembered, CreatedJob, TrialRecord], Remembered]


def own_bound(job: CreatedJob, trial: TrialRecord, min_cost_j: float | None) -> StopRule:  # noqa: ARG001 - the signature is the interface's
    """The rule that stops a trial at its own bound on its epochs, or at `max_epochs` if it has none."""
    return StopRule(max_epochs=job.max_epochs if trial.epoch_bound is None else trial.epoch_bound)


@dataclass(frozen=True, slots=True, kw_only=True)
class Policy:
    """A way of choosing batch sizes: pure functions, which read no clock and draw from the generator they are given.

    Attributes:
        version: Changes whenever the same trials would make another memory; at most 64 characters.
        suggest: The next trial's batch size and why. May raise `NoSurvivorError`, nothing else. The generator
            is the job's: with the same seed (`mab_seed`) and the same trials it makes the same draws.
        explain: The numbers behind a suggestion, from the history that it was made from. Simulations do not ask.
        expectations: The cost that is expected of each batch size, and the best one.
        stop_rule: When a trial is stopped that has not reached the target. Asked at each report, of the trial before
            it, with the lowest cost (J) of a trial of the job that reached the target, or None.
        bound: The bound of a running trial that was dispatched without one, as of a report; None if it is too early to
            tell. None in place of the function: bounds come with suggestions, or never.
        memory: None if `History` remembers enough.
        prunes: True if jobs begin with a pruning stage, which ends with the first suggestion of `Origin.BANDIT`. Only
            then `History.explorations` are there.
        check: Raises `InvalidJobError` for a new job that the policy could not serve.
        amended: A new job that names no policy, as a Zeus client's, with what `check` would refuse put right.
        missing: Why the policy is not there, for a stand-in (`find`); else None.
    """

    version: str
    suggest: Callable[[History, np.random.Generator], Suggestion]
    explain: Callable[[History, Suggestion], Decision] | None = None
    expectations: Callable[[History], Expectations] = lambda _: Expectations({}, None)
    stop_rule: Callable[[CreatedJob, TrialRecord, float | None], StopRule] = own_bound
    bound: Callable[[History, TrialRecord], EpochBound | None] | None = None
    memory: Memory[Any] | None = None
    prunes: bool = False
    check: Callable[[CreatedJob], None] = lambda _: None
    amended: Callable[[CreatedJob], CreatedJob] = lambda job: job
    missing: str | None = None

    def begun_memory(self, job: CreatedJob) -> Any:
        """The memory of a new job, or None."""
        return None if self.memory is None else self.memory.begin(job)


# In the notation of entry points, and loaded as they are.
_OWN = {
    name: EntryPoint(name, f"bso_server.core.{module}:POLICY", GROUP)
    for name, module in ((ZEUS, "zeus"), (GP_VOI, "gp_voi.policy"))
}


_given: dict[str, Policy] = {}


def find(name: str) -> Policy:
    """The policy of this name.

    One that cannot be had has a stand-in, with which a job's running trials go on to their own bounds: it suggests
    nothing, expects nothing, and says in `Policy.missing` what to do. What is found stays until the process ends.
    """
    return _given.get(name) or _found(name)


@contextmanager
def given(name: str, policy: Policy) -> Iterator[str]:
    """Have a policy found under this name that is not installed, for tests of it."""
    _given[name] = policy
    try:
        yield name
    finally:
        del _given[name]


# Names come from clients, too: few are remembered.
@lru_cache(maxsize=256)
def _found(name: str) -> Policy:
    found = [_OWN[name]] if name in _OWN else list(entry_points(group=GROUP, name=name))
    if not found:
        *others, last = names()
        meant = get_close_matches(name, [*others, last], n=1)
        return _stand_in(
            f"policy {name!r} is not installed where the server runs, which has {', '.join(others)} and {last}"
            + (f" (did you mean {meant[0]!r}?)" if meant else "")
            + f": install the package that has it (entry point group {GROUP}) there and start the server anew, or use "
            "one of those"
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
    """The names of the policies that are installed, ascending; some of them may not be loadable."""
    return sorted({*_OWN, *entry_points(group=GROUP).names})


def installed(name: str) -> Policy:
    """The policy of this name.

    Raises:
        PolicyNotInstalledError: There is none, or it cannot be loaded.
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
    """The packages that have these entry points, in words."""
    packages = sorted({each.dist.name for each in found if each.dist is not None})
    return f" ({' and '.join(packages)})" if packages else ""


LEAST_COST_J = 1e-6
"""The finest meters count tens of microjoules."""

LEAST_SHARE = 1e-5
"""The least part of the full power, or of another run's cost, that a run may have cost."""


def suggest(history: History, rng: np.random.Generator, *, explains: bool = False) -> Suggestion:
    """Choose the next trial's batch size by the job's policy, which may advance the job's generator, `rng`.

    Told that it `explains`, the suggestion has the numbers behind it, if the policy can tell them.

    Raises:
        NoSurvivorError: No batch size can run any more, or policy `zeus` has found none that reaches the target.
        PolicyNotInstalledError: The job's policy is not here.
        ValueError: The policy has suggested a size that the job does not have.
    """
    policy = find(history.job.policy)
    suggestion = policy.suggest(history, rng)
    if suggestion.batch_size not in history.arms:
        raise ValueError(
            f"policy {history.job.policy} suggests {suggestion.batch_size}, which is not one of the job's batch sizes "
            f"{list(history.job.batch_sizes)}: mend the policy"
        )
    if not explains or suggestion.decision is not None or policy.explain is None:
        return suggestion
    return replace(suggestion, decision=policy.explain(history, suggestion))


def expectations(history: History) -> Expectations:
    """The cost that the policy expects of each batch size, and the size that it holds to be the best."""
    return find(history.job.policy).expectations(history)


def needs_bound(job: CreatedJob, trial: TrialRecord) -> bool:
    """True if the trial's next report needs `bounded` first.

    Policy `gp_voi` decides once when to stop a trial: with the dispatch if it knows by then what an epoch costs, else
    after the first epochs.
    """
    return trial.epoch_bound is None and find(job.policy).bound is not None


def bounded(history: History, trial: TrialRecord, report: Report) -> TrialRecord:
    """A trial that `needs_bound`, with the bound that its next report gives it, if that tells enough."""
    bound = find(history.job.policy).bound
    return trial if bound is None else trial.bounded_by(bound(history, after_report(history.job, trial, report)))


def stop_rule(job: CreatedJob, trial: TrialRecord, min_cost_j: float | None) -> StopRule:
    """The rule by which a trial that has not reached the target is stopped.

    By policy `zeus` at ``β · min_cost``, by `gp_voi` at the trial's own bound, if it has one; by both at `max_epochs`.
    `min_cost_j` is the lowest cost of a trial of the job that reached the target, joules, or None.
    """
    return find(job.policy).stop_rule(job, trial, min_cost_j)


def judge(
    job: CreatedJob,
    trial: TrialRecord,
    report: Report,
    min_cost_j: float | None,
    *,
    judged_by: StopRule | None = None,
) -> Verdict:
    """Decide whether a running trial goes on.

    Policy `zeus`, with ``bound = β · min_cost``: within the bound, below `max_epochs` and not at the target, the
    training goes on. Otherwise it stops; reaching the target counts only within the bound. Policy `gp_voi`: the same
    with the trial's own bound on its epochs; to reach the target counts always.

    Totals never shrink, and a trial that has reported each epoch once, as a whole number, goes on with whole numbers:
    a fraction is then taken for a mistake. A training that validates within its epochs shows that by its first report.

    Args:
        job: The job.
        trial: The trial as of its report before this one, `bounded` if it needed to be.
        report: The report to judge.
        min_cost_j: As in `stop_rule`.
        judged_by: The rule by which the training has judged the report already, while the server was away. What it
            then did cannot be undone: measured by today's bound, a run to the target might count as stopped before.

    Raises:
        InvalidReportError: The report contradicts those before it, or reached the target at no cost.
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
    return verdict if verdict.rule is rule else replace(verdict, rule=rule)


def doubt(job: CreatedJob, report: Report, min_cost_j: float | None) -> str | None:
    """The reason for which a trial cannot have cost as little as it reports at its end; None if it can.

    A cost that no run has would stop every later run of policy `zeus` as too costly. What honest meters and estimates
    tell lies far above these limits: a chip at rest takes a hundredth of its power and more, and a size that suits a
    job better than another saves a part of its cost. `min_cost_j` as in `stop_rule`.
    """
    cost_j = cost_of(job, report)
    limits = [
        (LEAST_COST_J, "less than any meter counts"),
        (LEAST_SHARE * job.max_power * report.time_s, f"in {report.time_s:.4g} s on {job.max_power:g} W"),
        (0.0 if min_cost_j is None else LEAST_SHARE * min_cost_j, f"and the cheapest run {min_cost_j or 0:.4g} J"),
    ]
    told = next((why for least_j, why in limits if cost_j < least_j), None)
    if told is None:
        return None
    return f"a run cannot cost {cost_j:.4g} J, {told}: check how energy is measured, and that it is in joules"


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
    """The policy's memory when these trials have ended, in this order; the same object if that changes nothing."""
    kept = find(job.policy).memory
    if kept is None:
        return None
    for trial in ended:
        # An abandoned trial may come back, and its end has then not been.
        if trial.state in FINAL:
            memory = kept.after(memory, job, trial)
    return memory


def bandit_entered_from_the_start(job: CreatedJob) -> int | None:
    """The event at which a new job is in its bandit stage: 0 without a pruning stage, else None."""
    return None if find(job.policy).prunes else 0
