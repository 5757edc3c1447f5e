"""The verdict whether a job saves against its default batch size, and the control runs that the verdict needs.

The evidence is the runs at the default and at the best size. Exploration runs are no evidence, because the best size
was chosen for its low cost in these runs. The first run of a job, at the default, is evidence, without its
start-up.

A policy that has found its best size never runs the default again. Therefore some runs become control runs at the
default, as long as the cost that they forgo, as the model estimates it, is at most a share of the job's cost. Their
places are random: at a fixed distance, control runs could coincide with another influence of the same period, such as a
backup every fourth night. A place depends only on the seed of the job and the number of trials, so that the server does
not repeat a failed control run at once.
"""

from __future__ import annotations

import math
import statistics
import zlib
from bisect import bisect
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np

from bso_server.core.effect import PRIOR_SD, Effect, EffectModel
from bso_server.core.model import EpochBound, History, Suggestion, TrialRecord, set_apart
from bso_server.core.policy import find
from zeus_plugins.protocol import CONTROLS, CreatedJob, Origin, SavingsWord, Share, StopRule, is_busy

LEAST_CONTROLS = 2
"""Least number of runs at the default for a verdict, because one run says nothing about their spread."""
_CHANCE = 0.3
"""Chance that a run at the best size becomes a control run if the budget allows it."""
_LATE = 0.02
"""Largest budget of control runs once a job is shown to save."""
_ERROR = 0.055
"""Highest probability that a job that does not save is ever shown to save, or that a job that does not lose is ever
shown to lose. `python -m benchmarks.honesty` measures it for jobs with noise that the model does not foresee."""
_NEAREST = 4
"""Number of runs at the best size whose median replaces a run at another size."""
_MEDIAN_SPREAD = 1.2
"""Standard deviation of a cost around the median of `_NEAREST` other costs, over the standard deviation of a cost."""
_NORMAL_90 = 1.645
_FORESEEN = ((10, 17), (30, 55), (100, 170))
"""Orders of magnitude of the further runs until a verdict, each with the largest number of runs for which it stands."""
_LARGEST = 50.0
"""Replaces the upper end of an effect without an upper bound (log)."""
_SMALL = 0.1
SMALL = "the difference is small"
"""First words of the cause if no verdict is shown because runs hardly save or lose anything."""
_FAILURES = 5
"""Control runs end once the trials at the default that crashed or broke off outnumber, by more than this, the trials
that reached the target."""
_UNKNOWN_PACE = 0.6
"""No verdict while the effect on the cost per epoch keeps more than this share of its prior variance, for example if
all runs at one of the sizes were on a busy machine: the prior would decide."""
_LEARNED = 2000
"""In a long job, between this number and twice this number of the latest runs are evidence, because learning a run
takes 0.15 ms."""


@dataclass(frozen=True, slots=True)
class Run:
    """One run that reached the target.

    Attributes:
        batch_size: Its batch size.
        epochs: Epochs until the target.
        amount: Its cost (J), energy (J) or time (s).
        is_exploration: True if the policy chose its size in order to learn about that size.
        is_busy: True if the machine was busy; then its cost of an epoch is compared with other runs on busy machines.
        is_control: True if it was a control run.
        later_pace: Log of the amount that an epoch took, without the part that is `set_apart`; None if unknown.
    """

    batch_size: int
    epochs: float
    amount: float
    is_exploration: bool = False
    is_busy: bool = False
    is_control: bool = False
    later_pace: float | None = None


@dataclass(frozen=True, slots=True)
class CompletedRun:
    """Stored facts about a trial that reached the target; `epoch` is None if the trial was imported from Zeus."""

    ended_event: int
    trial_number: int
    batch_size: int
    origin: Origin
    epoch: float | None
    time_s: float
    energy_j: float
    waited_share: float | None
    first_epoch: float | None = None
    first_time_s: float | None = None
    first_energy_j: float | None = None
    startup_s: float | None = None


def run_of(trial: TrialRecord | CompletedRun, amount: float, first_amount: float) -> Run:
    """Return the run of a trial that reached the target and took this amount, `first_amount` until its first report."""
    epochs, first_epoch = trial.epoch or 0.0, trial.first_epoch or 0.0
    share, apart_epochs = set_apart(trial.startup_s, trial.first_time_s or 0.0, first_epoch)
    usual, usual_epochs = amount - share * first_amount, epochs - apart_epochs
    pace = math.log(usual) - math.log(usual_epochs) if first_epoch > 0 and min(usual, usual_epochs) > 0 else None
    explored, control = trial.origin is Origin.EXPLORATION, trial.origin is Origin.CONTROL
    return Run(trial.batch_size, epochs, amount, explored, is_busy(trial.waited_share), control, pace)


@dataclass(frozen=True, slots=True)
class Verdict:
    """Judgement of a job's saving in one measure.

    Attributes:
        word: The verdict on the next run: saves, loses, or not shown yet.
        now: Saving of a run now; None without evidence.
        so_far: Saving of all runs until now, less the cost of exploration and control runs; None without evidence.
        controls: Runs at the default that count as evidence.
        runs_needed: Order of magnitude of the further runs until a verdict is shown: 10, 30 or 100; None if one is
            shown, or if it takes more.
        control_runs: Share of the amount of all runs that control runs have forgone, in words.
        cause: Reason why no verdict is shown; None if one is shown, or if the default is the best size.
    """

    word: SavingsWord
    controls: int
    cause: str | None
    now: Share | None = None
    so_far: Share | None = None
    runs_needed: int | None = None
    control_runs: str = ""

    @property
    def is_paid_back(self) -> bool:
        """True if a verdict is shown, and the whole interval of `so_far` is above 0."""
        is_shown = self.word is not SavingsWord.NOT_SHOWN
        return is_shown and self.so_far is not None and self.so_far.low is not None and self.so_far.low > 0


class Judge:
    """Learns the runs of a job in the order in which they ended, and judges whether those at `best` save.

    Args:
        default: The job's default batch size.
        best: The batch size that is compared with the default. When the best size changes, a new judge learns all runs.
        budget: Share of the job's amount that control runs may forgo until a verdict is shown.
    """

    def __init__(self, default: int, best: int, budget: float = CONTROLS) -> None:
        self._default, self._best, self._budget = default, best, budget
        self._compared = default, best
        self._runs: list[Run] = []
        self._first_learned = 0
        self._forget()

    def _forget(self) -> None:
        self._model = EffectModel()
        self._controls = self._others = self._busy = 0

    @property
    def count(self) -> int:
        """Number of runs learned."""
        return len(self._runs)

    def learn(self, runs: Sequence[Run]) -> None:
        """Learn further runs."""
        known = len(self._runs)
        self._runs += runs
        first = max(len(self._runs) // _LEARNED - 1, 0) * _LEARNED
        if first > self._first_learned:
            # The result depends on the runs alone, not on the number of runs in each call.
            self._first_learned = known = first
            self._forget()
        for number in range(known, len(self._runs)):
            self._learn(self._runs[number], is_first=not number)

    def _learn(self, run: Run, *, is_first: bool) -> None:
        is_default = run.batch_size == self._default
        is_evidence = not run.is_exploration or (is_default and is_first)
        is_compared = is_default or run.batch_size == self._best
        if min(run.amount, run.epochs) <= 0 or not (is_evidence and is_compared):
            self._model.skip()
        else:
            pace = run.later_pace if is_first else None
            pace = math.log(run.amount) - math.log(run.epochs) if pace is None else pace
            self._model.add(run.epochs, pace, is_default=is_default, is_busy=run.is_busy)
            self._busy += run.is_busy
            self._controls += is_default
            self._others += not is_default

    def now(self) -> tuple[SavingsWord, Effect | None]:
        """Return the verdict on the next run, and the effect of the batch size (None without evidence)."""
        if self._best == self._default or not self._controls:
            return SavingsWord.NOT_SHOWN, None
        effect = self._model.effect(_ERROR)
        if self._is_pace_unknown or self._controls < LEAST_CONTROLS or effect.low <= 0 <= effect.high:
            return SavingsWord.NOT_SHOWN, effect
        return SavingsWord.SAVES if effect.low > 0 else SavingsWord.LOSES, effect

    def forgone(self, more: int = 0) -> float:
        """Return the share of the amount of all runs that control runs have forgone, with `more` further ones.

        A control run forgoes the extra cost of the cheapest run at the default over the mean at the best size. After
        the first one, it forgoes at least `EffectModel.expected_loss` of a run at the best size, so that noise never
        makes a cheap default look free. The model alone would at first take a very expensive default for an outlier.
        If the job has changed and its default now costs far more, both are too low. So a control run forgoes at least
        half of what the control runs have cost more than the best size, as a mean; noise seldom doubles this mean.
        """
        controls = [run.amount for run in self._runs if run.is_control]
        made = len(controls)
        if not made + more or self._best == self._default:
            return 0.0
        best, default = ([run.amount for run in self._runs if run.batch_size == x] for x in (self._best, self._default))
        if not sum(best):
            return math.inf
        mean = statistics.fmean(best)
        loss = max(self._model.expected_loss() if made or not default else 0.0, min(default, default=0.0) / mean - 1)
        loss = max(loss, (statistics.fmean(controls) / mean - 1) / 2 if made else 0.0)
        return (made + more) * loss * mean / math.fsum(run.amount for run in self._runs)

    def forgone_in_words(self) -> str:
        """Return the share that control runs have forgone, beside their budget; empty if there are none."""
        limit = self.limit()
        if not self._budget:
            made = any(run.is_control for run in self._runs)
            return f"earlier control runs have cost {self.forgone():.1%} of the job" if made else ""
        words = "and the next one waits until this is below" if limit < self._budget else "at most"
        return f"control runs have cost {self.forgone():.1%} of the job so far, {words} {limit:.0%}"

    def limit(self) -> float:
        """Return the share that control runs may forgo now: less of it once the job is shown to save."""
        return min(self._budget, _LATE) if self.now()[0] is SavingsWord.SAVES else self._budget

    @property
    def _is_pace_unknown(self) -> bool:
        return self._model.unknown_pace() > _UNKNOWN_PACE

    def verdict(self, wasted: float = 0.0) -> Verdict:
        """Return the verdict after the latest run; `wasted` is the amount that trials without the target took."""
        word, effect = self.now()
        if effect is None:
            none = f"no control run at {self._default} yet"
            return Verdict(word, self._controls, None if self._best == self._default else none)
        if self._is_pace_unknown:
            return Verdict(word, self._controls, self._cause(effect))
        is_shown = word is not SavingsWord.NOT_SHOWN
        needed = None if is_shown else self._runs_needed(effect)
        not_soon = "; it will not be settled soon" if needed is None and self._controls >= LEAST_CONTROLS else ""
        return Verdict(
            word=word,
            controls=self._controls,
            cause=None if is_shown else f"{self._cause(effect)}{not_soon}",
            now=Share(low=_saved(effect.low), middle=-math.expm1(-effect.middle), high=-math.expm1(-effect.high)),
            so_far=self._saving_so_far(effect, wasted),
            runs_needed=needed,
            control_runs=self.forgone_in_words(),
        )

    def basis(self) -> SavingBasis | None:
        """Return the basis of the saving of any runs; None unless a verdict is shown."""
        word, effect = self.now()
        return None if word is SavingsWord.NOT_SHOWN or effect is None else self._basis(effect)

    def _saving_so_far(self, effect: Effect, wasted: float) -> Share:
        """Return the saving of all runs, as a share of their amount if all were at the default."""
        at = {size: sum(run.amount for run in self._runs if run.batch_size == size) for size in self._compared}
        others = sum(run.batch_size not in self._compared for run in self._runs)
        paid = wasted + sum(run.amount for run in self._runs)
        return self._basis(effect).saved(at[self._default], at[self._best], others, paid).share

    def _basis(self, effect: Effect) -> SavingBasis:
        at_best = [number for number, run in enumerate(self._runs) if run.batch_size == self._best]
        medians = []
        for number, run in enumerate(self._runs):
            if run.batch_size not in self._compared and at_best:
                place = bisect(at_best, number)
                around = at_best[max(place - _NEAREST, 0) : place + _NEAREST]
                nearest = sorted(around, key=lambda other: abs(other - number))[:_NEAREST]
                medians.append(statistics.median(self._runs[other].amount for other in nearest))
        spread = _MEDIAN_SPREAD * math.hypot(*self._model.spreads())
        return SavingBasis(
            low=None if effect.low == -math.inf else effect.low,
            middle=effect.middle,
            high=None if effect.high == math.inf else effect.high,
            replaced=statistics.fmean(medians or [0.0]),
            reach=_NORMAL_90 * spread * math.sqrt(statistics.fmean(each**2 for each in medians or [0.0])),
        )

    def _runs_needed(self, effect: Effect) -> int | None:
        """Return the order of magnitude of the runs that would show the effect as estimated now; None if too many."""
        prior, (epochs, rate), walk = PRIOR_SD**2, self._model.spreads(), self._model.drift()
        # Variance of the pace between control runs, in the steady state of a local level model.
        pace = (walk**2 + walk * math.sqrt(walk**2 + 4 * rate**2)) / 2
        share = min(_CHANCE, self._budget / max(math.expm1(effect.middle), _LATE))
        for about, more in _FORESEEN:
            controls = self._controls + more * share
            others = max(self._others + more - more * share, 1.0)
            variance = (epochs**2 + rate**2 + pace) / controls + epochs**2 / others
            evidence = effect.middle**2 / (2 * variance) * prior / (prior + variance)
            if controls >= LEAST_CONTROLS and evidence - math.log1p(prior / variance) / 2 > -math.log(2 * _ERROR):
                return about
        return None

    def _cause(self, effect: Effect) -> str:
        """Return in plain words why no verdict is shown."""
        if self._controls < LEAST_CONTROLS:
            return f"{self._controls} of at least {LEAST_CONTROLS} runs at {self._default} so far"
        low, high = _saved(effect.low), -math.expm1(-effect.high)
        if low is not None and low > -_SMALL and high < _SMALL:
            return f"{SMALL}: a run saves between {low:.0%} and {high:.0%}"
        if 2 * self._busy > self._controls + self._others:
            return f"{self._busy} of {self._controls + self._others} runs were on a busy machine"
        epochs, rate = self._model.spreads()
        drift = self._model.drift()
        if drift > max(epochs, rate):
            return f"the machine's pace drifts: the cost of an epoch changes by {drift:.0%} from run to run"
        part, spread = ("cost of an epoch", rate) if rate > epochs else ("number of epochs", epochs)
        return f"the {part} varies by {spread:.0%} from run to run"


def _saved(effect: float) -> float | None:
    """Return the share of the default's cost that an effect saves; None if the effect has no lower bound."""
    return None if effect == -math.inf else -math.expm1(-effect)


class Evidence:
    """The runs of a job in one measure, with a judge for each batch size that has been the best one."""

    def __init__(self, default: int, budget: float = CONTROLS) -> None:
        self._default, self._budget = default, budget
        self._runs: list[Run] = []
        self._judges: dict[int, Judge] = {}

    def add(self, runs: Iterable[Run]) -> None:
        """Add further runs, in the order in which they ended."""
        self._runs.extend(runs)

    def judge(self, best: int) -> Judge:
        """Return the judge of this best size, which has learned all runs."""
        judge = self._judges.setdefault(best, Judge(self._default, best, self._budget))
        judge.learn(self._runs[judge.count :])
        return judge


def is_control_due(job: CreatedJob, judge: Judge, number: int) -> bool:
    """Return True if the next run, after `number` trials, must be a control run, not a run at the best size."""
    # From the prefix and not the id, so that a copy of a job under another id gets the same control runs.
    seed = zlib.crc32(job.job_id_prefix.encode()) if job.mab_seed is None else job.mab_seed
    if np.random.default_rng([seed, number]).random() >= _CHANCE:
        return False
    return judge.now()[0] is not SavingsWord.LOSES and judge.forgone(1) <= judge.limit()


def why_no_controls(job: CreatedJob, *, reached: int, missed: int, broken_off: int, is_infeasible: bool) -> str | None:
    """Return in plain words why a job gets no control runs; None if it may get some.

    The numbers are those of its trials at the default that `reached` the target, that `missed` it after all epochs or a
    stop, and that ended in any other way (`broken_off`). An infeasible default ran out of memory, or kept crashing.
    """
    default, ended = job.default_batch_size, reached + missed + broken_off
    if not job.controls:
        return "control runs are off"
    if not find(job.policy).controls:
        return f"the policy {job.policy} makes no control runs"
    if is_infeasible:
        return f"{default} does not run on this hardware"
    if missed >= max(reached, 1) or broken_off > reached + _FAILURES:
        return f"{default} reached the target in {reached} of {ended} runs, too few for control runs"
    return None


def with_control(history: History, suggestion: Suggestion, judge_of: Callable[[int], Judge]) -> Suggestion:
    """Return the suggestion, or a control run at the default in its place.

    A control run replaces a run at the best size, unless another control run is under way.

    Args:
        history: The history on which the suggestion is based.
        suggestion: The policy's suggestion.
        judge_of: Returns the judge of a best size, which has learned the costs of all runs.
    """
    job = history.job
    default, arm = job.default_batch_size, history.arms[job.default_batch_size]
    under_way = sum(trial.batch_size == default for trial in history.in_flight)
    never = why_no_controls(
        job,
        reached=arm.reached,
        missed=arm.measured - arm.reached,
        broken_off=arm.trials - under_way - arm.measured,
        is_infeasible=default in history.excluded,
    )
    if (
        never is not None
        or suggestion.origin is not Origin.INCUMBENT
        or suggestion.batch_size == default
        or any(trial.origin is Origin.CONTROL for trial in history.in_flight)
    ):
        return suggestion
    judge = judge_of(suggestion.batch_size)
    if not is_control_due(job, judge, sum(each.trials for each in history.arms.values())):
        return suggestion
    decision = suggestion.decision
    if decision is not None:
        decision = decision.model_copy(update={"stop": StopRule(max_epochs=job.max_epochs)})
    return replace(
        suggestion,
        batch_size=default,
        origin=Origin.CONTROL,
        reason=f"control run at your default, {default}: it measures the saving; {judge.forgone_in_words()}",
        bound=EpochBound(job.max_epochs, "a control run is not stopped early"),
        decision=decision,
    )


@dataclass(frozen=True, slots=True)
class Saved:
    """Amount (J or s) that runs took less than at the default batch sizes, negative if they took more.

    Attributes:
        taken: Amount that the runs took, exploration and control runs included.
        low: Lower end of the 90 % interval of the saving; None: no bound known.
        middle: The saving.
        high: Upper end; None: no bound known.
    """

    taken: float
    low: float | None
    middle: float
    high: float | None

    @property
    def is_shown(self) -> bool:
        """True if the whole interval is above 0, or the whole interval is below 0."""
        return (self.low is not None and self.low > 0) or (self.high is not None and self.high < 0)

    @property
    def share(self) -> Share:
        """Saving as a share of what the runs would have taken at the default batch sizes."""
        low, middle, high = (None if each is None else self._share(each) for each in (self.low, self.middle, self.high))
        return Share(low=low, middle=middle or 0.0, high=1.0 if high is None else high)

    def _share(self, saved: float) -> float | None:
        at_default = self.taken + saved
        return saved / at_default if at_default > 0 else None


class SavingBasis(NamedTuple):
    """Verdict on an amount (J or s) of a job, from which the saving of any of its runs follows.

    A run at the default counts unchanged. A run at the best size would have taken exp(effect) times as much at the
    default. A run at another size is replaced by the median of the nearest runs at the best size, times exp(effect).

    Attributes:
        low: Lower end of the effect; None: no bound known.
        middle: The effect of the batch size (log).
        high: Upper end; None: no bound known.
        replaced: Mean of the medians that replace runs at other sizes.
        reach: Half of the 90 % interval of such a median.
    """

    low: float | None
    middle: float
    high: float | None
    replaced: float
    reach: float

    def saved(self, fixed: float, scaled: float, others: int, taken: float) -> Saved:
        """Return the saving of runs that took `taken`, together with trials that missed the target.

        Args:
            fixed: Amount of those at the default.
            scaled: Amount of those at the best size.
            others: Number of those at other sizes.
            taken: Amount of all.
        """

        def saving(effect: float, error: float) -> float:
            at_best = max(scaled + others * self.replaced + error * self.reach * math.sqrt(others), 0.0)
            return fixed + at_best * math.exp(min(effect, _LARGEST)) - taken

        return Saved(
            taken=taken,
            low=None if self.low is None else saving(self.low, -1),
            middle=saving(self.middle, 0),
            high=None if self.high is None else saving(self.high, 1),
        )


def total(parts: Iterable[Saved | None]) -> Saved | None:
    """Return the saving of independent jobs together; None if none is known.

    The savings add up. On each side, the distance to the end of the interval is the root of the sum of the squared
    distances of the jobs, because variances of independent errors add, and bounds do not.
    """
    known = [part for part in parts if part is not None]
    if not known:
        return None
    middle = math.fsum(part.middle for part in known)
    below = _reach([None if part.low is None else part.middle - part.low for part in known])
    above = _reach([None if part.high is None else part.high - part.middle for part in known])
    return Saved(
        taken=math.fsum(part.taken for part in known),
        low=None if below is None else middle - below,
        middle=middle,
        high=None if above is None else middle + above,
    )


def _reach(distances: Sequence[float | None]) -> float | None:
    known = [each for each in distances if each is not None]
    return math.hypot(*known) if len(known) == len(distances) else None
