"""The verdict whether a job saves against its default batch size, and the control runs that the verdict needs.

Evidence are the runs at the default and at the best size since exploration ended. Runs of the exploration are no
evidence: the best size was chosen because it looked cheap there, and the first run of a job is often a slow one.

A policy that has found its best size never runs the default again. Control runs at the default therefore follow at
random distances: a fixed distance would meet other influences of the same period, such as a backup every fourth night.
"""

from __future__ import annotations

import math
import statistics
from dataclasses import dataclass
from enum import StrEnum

import numpy as np

from bso_server.core.effect import PRIOR_SD, Effect, EffectModel

LEAST_CONTROLS = 3
"""Number of control runs before any verdict: with fewer, the noise from run to run is hardly known."""
_FIRST, _EARLY, _LATE = (1, 2), (2, 6), (50, 75)
"""Least and greatest distance of a control run from the one before, in runs: the first, until the verdict is shown, and
afterwards. A control run costs what a run at the best size saves, so that late ones cost at most 2 % of the saving."""
_FAR = 3.0
"""A default that costs so many times as much as the best size needs no further control runs."""
_ERROR = 0.055
"""Greatest probability of "saves" at any look for a job that does not save; likewise "loses". Measured for jobs whose
noise the model does not foresee: `python -m benchmarks.honesty`."""
_NEAREST = 4
"""Number of runs at the best size that stand for a run at another size."""
_MEDIAN_SPREAD = 1.2
"""Spread of a cost about the median of `_NEAREST` others, over the spread of a cost."""
_NORMAL_90 = 1.645
_FORESEEN = 400
_SMALL = 0.1


class Word(StrEnum):
    """The verdict on a run now, at the best size, against one at the default."""

    SAVES = "saves"
    LOSES = "loses"
    NOT_SHOWN = "not shown yet"


@dataclass(frozen=True, slots=True)
class Run:
    """One run that reached the target.

    Attributes:
        batch_size: Its batch size.
        epochs: Epochs until the target.
        cost_j: Its cost, joules.
        wasted_j: Cost of trials that were stopped or failed since the run before, joules.
        is_exploration: Whether the policy chose its size to learn about that size.
    """

    batch_size: int
    epochs: float
    cost_j: float
    wasted_j: float = 0.0
    is_exploration: bool = False


@dataclass(frozen=True, slots=True)
class Share:
    """A share of the default's cost that is saved (negative: lost), with its 90 % interval; None: no bound known."""

    low: float | None
    middle: float
    high: float


@dataclass(frozen=True, slots=True)
class Verdict:
    """What is shown of a job's saving.

    Attributes:
        word: Whether a run now saves.
        now: Saving of a run now; None without evidence.
        so_far: Saving of all runs until now, exploration and control runs paid; None without evidence.
        paid_back: Whether the whole interval of `so_far` is above 0.
        controls: Runs at the default that count as evidence.
        runs_needed: About how many more runs would settle the verdict; None if it is shown, or nobody can say.
        cause: Why it is not shown; None if it is.
    """

    word: Word
    now: Share | None
    so_far: Share | None
    paid_back: bool
    controls: int
    runs_needed: int | None
    cause: str | None


class Judge:
    """Learns the runs of a job in the order in which they ended, and judges whether those at `best` save.

    Args:
        default: The job's default batch size.
        best: The batch size that is compared with the default. When the best size changes, a new judge learns all runs.
    """

    def __init__(self, default: int, best: int) -> None:
        self._default, self._best = default, best
        self._runs: list[Run] = []
        self._model = EffectModel()
        self._controls, self._others = 0, 0

    def add(self, run: Run) -> None:
        """Learn one run."""
        is_default = run.batch_size == self._default
        if is_default and not self._runs:
            self._model.add_epochs(run.epochs, is_default=True)
        elif run.is_exploration or run.batch_size not in (self._default, self._best):
            self._model.skip()
        else:
            self._model.add(run.epochs, run.cost_j, is_default=is_default)
            self._controls += is_default
            self._others += not is_default
        self._runs.append(run)

    def verdict(self) -> Verdict:
        """Return the verdict after the latest run."""
        if self._best == self._default:
            return self._no_evidence("the default is the best size")
        if not self._controls:
            return self._no_evidence("no run at the default since exploration ended")
        effect = self._model.effect(_ERROR)
        word = Word.NOT_SHOWN
        if self._controls >= LEAST_CONTROLS:
            word = Word.SAVES if effect.low > 0 else Word.LOSES if effect.high < 0 else Word.NOT_SHOWN
        so_far = self._saving_so_far(effect)
        is_shown = word is not Word.NOT_SHOWN
        return Verdict(
            word=word,
            now=Share(_saved(effect.low), -math.expm1(-effect.middle), -math.expm1(-effect.high)),
            so_far=so_far,
            paid_back=so_far.low is not None and so_far.low > 0,
            controls=self._controls,
            runs_needed=None if is_shown else self._runs_needed(effect),
            cause=None if is_shown else self._cause(effect),
        )

    def _no_evidence(self, cause: str) -> Verdict:
        return Verdict(Word.NOT_SHOWN, None, None, False, self._controls, None, cause)

    def _saving_so_far(self, effect: Effect) -> Share:
        """Return the saving of all runs, over runs at the default alone.

        A run at the default counts as it is. A run at the best size would have cost exp(effect) times as much at the
        default; so would the median of those at the best size nearest to it, in place of a run at another size.
        """
        at_best = [(number, run.cost_j) for number, run in enumerate(self._runs) if run.batch_size == self._best]
        spread = math.hypot(*self._model.spreads())
        paid_j = sum(run.cost_j + run.wasted_j for run in self._runs)
        fixed_j = sum(run.cost_j for run in self._runs if run.batch_size == self._default)
        scaled_j = sum(cost_j for _, cost_j in at_best)
        variance = 0.0
        for number, run in enumerate(self._runs):
            if run.batch_size not in (self._default, self._best) and at_best:
                nearest = sorted((abs(other - number), cost_j) for other, cost_j in at_best)[:_NEAREST]
                median_j = statistics.median(cost_j for _, cost_j in nearest)
                scaled_j += median_j
                variance += (_MEDIAN_SPREAD * spread * median_j) ** 2
        reach_j = _NORMAL_90 * math.sqrt(variance)

        def share(delta: float, error_j: float) -> float:
            if delta == math.inf:
                return 1.0
            return 1 - paid_j / (fixed_j + max(scaled_j + error_j, 1e-9) * math.exp(delta))

        low = None if effect.low == -math.inf else share(effect.low, -reach_j)
        return Share(low, share(effect.middle, 0.0), share(effect.high, reach_j))

    def _runs_needed(self, effect: Effect) -> int | None:
        """Return after how many more runs the effect as estimated now would be shown; None beyond `_FORESEEN`."""
        noise, prior, distance = sum(spread**2 for spread in self._model.spreads()), PRIOR_SD**2, sum(_EARLY) / 2
        for more in range(1, _FORESEEN):
            controls = self._controls + more / distance
            others = max(self._others + more - more / distance, 1.0)
            variance = noise * (1 / controls + 1 / others)
            evidence = effect.middle**2 / (2 * variance) * prior / (prior + variance)
            if controls >= LEAST_CONTROLS and evidence - math.log1p(prior / variance) / 2 > -math.log(2 * _ERROR):
                return more
        return None

    def _cause(self, effect: Effect) -> str:
        """Return in plain words why no verdict is shown."""
        if self._controls < LEAST_CONTROLS:
            return f"{self._controls} of at least {LEAST_CONTROLS} control runs so far"
        low, high = _saved(effect.low), -math.expm1(-effect.high)
        if low is not None and low > -_SMALL and high < _SMALL:
            return f"the difference is small: a run saves between {low:.0%} and {high:.0%}"
        epochs, rate = self._model.spreads()
        part, spread = ("cost of an epoch", rate) if rate > epochs else ("number of epochs", epochs)
        return f"the {part} varies by {spread:.0%} from run to run"


def _saved(effect: float) -> float | None:
    """Return the share of the default's cost that an effect saves; None if nothing bounds it from below."""
    return None if effect == -math.inf else -math.expm1(-effect)


def is_control_due(verdict: Verdict, runs_since: int, seed: int) -> bool:
    """Return whether the next run must use the default.

    Args:
        verdict: The verdict as of now, on the present best size.
        runs_since: Runs at the best size since the last control run, or since exploration ended.
        seed: The job's seed, from which distances are drawn.
    """
    if verdict.word is Word.LOSES:
        return False
    if verdict.word is Word.SAVES:
        if verdict.now is not None and verdict.now.middle > 1 - 1 / _FAR:
            return False
        least, most = _LATE
    else:
        least, most = _EARLY if verdict.controls else _FIRST
    distance = np.random.default_rng([seed, verdict.controls]).integers(least, most, endpoint=True)
    return runs_since + 1 >= int(distance)
