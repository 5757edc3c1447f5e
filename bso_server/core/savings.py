"""Savings of a job against always using its default batch size.

`core.verdict` judges the savings. This module combines the verdicts with the costs of the job's trials.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import NamedTuple, Protocol

from bso_server.core.model import OBSERVED, ExpectedCost, TrialRecord
from bso_server.core.policy import find
from bso_server.core.verdict import (
    CompletedRun,
    Evidence,
    Judge,
    Saved,
    SavingBasis,
    Verdict,
    run_of,
    why_no_controls,
)
from zeus_plugins.protocol import ALIVE, AmountSaved, CreatedJob, Origin, SavingsView, SavingsWord, Share, TrialState

UNSPENT = frozenset({TrialState.RUNNING, TrialState.SUSPENDED, TrialState.WITHDRAWN})
"""States of trials whose energy and time do not count: not yet for running trials, never for withdrawn trials."""
_UNKNOWN = Verdict(SavingsWord.NOT_SHOWN, 0, None)


@dataclass(frozen=True, slots=True)
class Tally:
    """Number of the trials of one batch size, state, origin and GPUs; sums of their energy (J) and time (s)."""

    batch_size: int
    state: TrialState
    origin: Origin
    trials: int
    energy_j: float
    time_s: float
    other_gpus: bool = False
    estimated_j: float = 0.0


class Amounts(NamedTuple):
    """Cost (J), energy (J) and time (s) of trials."""

    cost_j: float
    energy_j: float
    time_s: float


def amounts(job: CreatedJob, *, energy_j: float, time_s: float) -> Amounts:
    """Return the cost of energy and time, with the energy and the time."""
    return Amounts(job.cost_j(time_s=time_s, energy_j=energy_j), energy_j, time_s)


def completed_count(tallies: Iterable[Tally]) -> int:
    """Return the number of whole runs that reached the target on the job's GPUs."""
    return sum(tally.trials for tally in tallies if is_whole_run(tally) and not tally.other_gpus)


class _Ended(Protocol):
    @property
    def state(self) -> TrialState: ...

    @property
    def origin(self) -> Origin: ...


def is_whole_run(trial: _Ended) -> bool:
    """Return True if the trial reached the target from the start of the training."""
    return trial.state is TrialState.COMPLETED and trial.origin is not Origin.FINISH


def savings(
    job: CreatedJob, tallies: Sequence[Tally], best: int | None, judge_of: Callable[[str], Judge]
) -> SavingsView:
    """Return the savings of a job, as far as they are known.

    Args:
        job: The job.
        tallies: Tallies of all its trials. Trials on other GPUs are left out, because their costs cannot be compared.
        best: The best batch size; None before a run has reached the target.
        judge_of: Returns, for a field of `Amounts`, the judge of size `best`, which has learned all runs.
    """
    tallies = [tally for tally in tallies if not tally.other_gpus]
    spent = partial(spent_on, job, tallies)
    everything, compared = spent(lambda _: True), spent(lambda tally: not _is_own(job, tally))
    wasted = _wasted(job, tallies)
    verdicts = {
        name: _UNKNOWN if best is None else judge_of(name).verdict(getattr(wasted, name)) for name in Amounts._fields
    }
    cost = verdicts["cost_j"]
    if cost.cause is not None:
        ended = Counter[TrialState]()
        for tally in tallies:
            is_default = tally.batch_size == job.default_batch_size and tally.origin is not Origin.FINISH
            if is_default and tally.state not in ALIVE:
                ended[tally.state] += tally.trials
        observed = sum(ended[state] for state in OBSERVED)
        never = why_no_controls(
            job,
            reached=ended[TrialState.COMPLETED],
            missed=observed - ended[TrialState.COMPLETED],
            broken_off=ended.total() - observed,
            is_infeasible=bool(ended[TrialState.INFEASIBLE]),
        )
        if never is not None:
            cost = replace(cost, cause=never, runs_needed=None)
    saved = {
        name: AmountSaved(
            spent=getattr(everything, name),
            now=each.now,
            so_far=each.so_far,
            saved=_amount_saved(getattr(compared, name), each),
        )
        for name, each in verdicts.items()
    }
    return SavingsView(
        word=cost.word,
        default_batch_size=job.default_batch_size,
        batch_size=best,
        **saved,
        controls=cost.controls,
        runs_needed=cost.runs_needed,
        cause=cost.cause,
        recurrences=completed_count(tallies),
        exploration_cost_j=spent(lambda tally: tally.origin in (Origin.EXPLORATION, Origin.FINISH)).cost_j,
        control_cost_j=spent(lambda tally: tally.origin is Origin.CONTROL).cost_j,
        control_runs=f"{cost.control_runs.capitalize()}." if cost.control_runs else "",
    )


def spent_on(job: CreatedJob, tallies: Iterable[Tally], chosen: Callable[[Tally], bool] = lambda _: True) -> Amounts:
    """Return the amounts of a job's ended trials that `chosen` accepts, without withdrawn trials."""
    found = [tally for tally in tallies if tally.state not in UNSPENT and chosen(tally)]
    energy_j, time_s = sum(tally.energy_j for tally in found), sum(tally.time_s for tally in found)
    return amounts(job, energy_j=energy_j, time_s=time_s)


def _is_own(job: CreatedJob, tally: Tally) -> bool:
    # These failures at the default would have cost the same without other sizes, so they cancel out.
    ended = TrialState.COMPLETED, TrialState.EARLY_STOPPED
    is_default = tally.batch_size == job.default_batch_size and tally.origin is not Origin.FINISH
    return is_default and tally.state not in ended


def _wasted(job: CreatedJob, tallies: Iterable[Tally]) -> Amounts:
    return spent_on(job, tallies, lambda tally: not (is_whole_run(tally) or _is_own(job, tally)))


def default_cost(best_j: float, now: Share) -> ExpectedCost:
    """Return the expected cost of a run at the default, which follows from that of the best size and from its saving.

    So all figures agree. The policy's own belief about the default rests on the few runs there, some of them old; the
    saving compares runs that are close in time.
    """
    mean_j = best_j / (1 - now.middle)
    if now.low is None or now.high >= 1:
        return ExpectedCost(mean_j, None)
    return ExpectedCost(mean_j, (best_j / (1 - now.low), best_j / (1 - now.high)))


@dataclass(frozen=True, slots=True)
class JobVerdict:
    """The verdict on a job, and other properties that follow from its ended trials; servers store it.

    Attributes:
        savings: The verdict.
        bases: Basis of the savings of any period, by field of `Amounts`; None without a shown verdict.
        stuck: As in `JobView`.
        drift: As in `JobLine`.
        advice: Why the job saves nothing and what to do, in words; None for other jobs.
        trouble: Order of its worst problem: stuck (0), never at the target, loses, costs more than before, none (4).
    """

    savings: SavingsView
    bases: Mapping[str, SavingBasis | None]
    stuck: str | None = None
    drift: float | None = None
    advice: str | None = None
    trouble: int = 4


_VERSION = 1  # changes whenever the same trials would result in another `JobVerdict`


def verdict_version(policy: str) -> str:
    """Return the version of the verdicts on jobs with this policy."""
    return f"{_VERSION}/{find(policy).version}"


def no_verdict(job: CreatedJob) -> JobVerdict:
    """Return the verdict on a job of which none is stored."""
    return JobVerdict(savings(job, (), None, dict[str, Judge]().__getitem__), dict.fromkeys(Amounts._fields))


def saved_since(job: CreatedJob, tallies: Iterable[Tally], verdict: JobVerdict) -> dict[str, Saved | None]:
    """Return the saving of a job in a period, by field of `Amounts`; None for a field without a shown verdict.

    Args:
        job: The job.
        tallies: Tallies of its trials that ended in the period; trials on other GPUs are left out.
        verdict: The verdict on the job.
    """
    if not any(verdict.bases.values()):
        return dict.fromkeys(verdict.bases)
    tallies = [tally for tally in tallies if not tally.other_gpus]
    whole, default, best = list(filter(is_whole_run, tallies)), job.default_batch_size, verdict.savings.batch_size
    others = [tally for tally in whole if tally.batch_size not in (default, best)]
    fixed, scaled = (spent_on(job, [each for each in whole if each.batch_size == size]) for size in (default, best))
    parts = zip(fixed, scaled, spent_on(job, others), _wasted(job, tallies), verdict.bases.values(), strict=True)
    runs = sum(tally.trials for tally in others)
    saved = (basis and basis.saved(part[0], part[1], runs, sum(part)) for *part, basis in parts)
    return dict(zip(verdict.bases, saved, strict=True))


def learn(job: CreatedJob, by: Mapping[str, Evidence], trials: Sequence[TrialRecord | CompletedRun]) -> None:
    """Add trials that reached the target, in the order in which they ended, to the evidence by fields of `Amounts`."""
    for trial in trials:
        took = amounts(job, energy_j=trial.energy_j, time_s=trial.time_s)
        first = amounts(job, energy_j=trial.first_energy_j or 0.0, time_s=trial.first_time_s or 0.0)
        for name, evidence in by.items():
            evidence.add([run_of(trial, getattr(took, name), getattr(first, name))])


def _amount_saved(spent: float, verdict: Verdict) -> float | None:
    """Return what was saved if the job has paid back its exploration and control runs, otherwise None."""
    share = verdict.so_far
    return spent * share.middle / (1 - share.middle) if share is not None and verdict.is_paid_back else None
