"""Quality of models: whether the runs of a batch size end with metrics as good as those of the default.

D is the difference between the mean final metrics of n_a runs of a size and of n_b runs of the default. Its interval
remains valid however often it is read: the probability that it ever misses the true difference is at most α. It inverts
a t-test with a normal mixture over the difference in standard deviations, N(0, 1/φ) (Robbins, Annals of Mathematical
Statistics 41(5), 1970; Howard, Ramdas, McAuliffe, Sekhon, Annals of Statistics 49(2), 2021; with an unknown variance:
Lindon, Ham, Tingley, Bojinov, arXiv:2210.08589, 2022). With ν = n_a + n_b − 2 degrees of freedom, N = n_a·n_b/(n_a +
n_b), r = φ/(φ + N) and K = (α·√r)^(−2/(ν + 1))::

    |D − difference| ≤ s · √(1/n_a + 1/n_b) · √(ν · (K − 1)/(1 − K·r))

The interval is exact for normal values of one variance, of which s² is the pooled estimate over both sizes. If one
size's own variance is above s², it replaces s² for this size, which only widens the interval.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

from bso_server.core.model import Arm, Statistics
from zeus_plugins.protocol import CreatedJob, Quality, is_lower_better

ALPHA = 0.05
"""Probability that an interval ever misses the true difference."""

LEAST_RUNS = 3
"""Least number of runs of each of two sizes for a comparison."""

RELATIVE_MARGIN = 0.01
"""Margin of a metric without a margin in `no_worse_than_default`, as a share of the default's mean."""

# φ. With this value and few runs, the interval is narrowest for differences of about three standard deviations.
_PRECISION = 0.1


@dataclass(frozen=True, slots=True)
class Interval:
    """Difference of two means, and the half width of its interval."""

    difference: float
    reach: float

    @property
    def low(self) -> float:
        """Lower end."""
        return self.difference - self.reach

    @property
    def high(self) -> float:
        """Upper end."""
        return self.difference + self.reach


@dataclass(frozen=True, slots=True)
class Comparison:
    """A metric of a batch size beside the default's.

    Attributes:
        name: The metric's name; None for the job's own metric.
        values: The metric at the ends of the size's runs.
        is_lower_better: True if the metric falls as the model improves.
        margin: Loss up to which the size counts as no worse; None before the default has a value.
        limit: Loss beyond which the job excludes the size (`no_worse_than_default`); infinite if no margin is set.
        interval: Interval of the size's mean less the default's; None for the default, or while too little is known.
    """

    name: str | None
    values: Statistics
    is_lower_better: bool
    margin: float | None
    limit: float
    interval: Interval | None

    @property
    def loss(self) -> Interval | None:
        """The interval of the loss against the default, positive if the size is worse."""
        if self.interval is None or self.is_lower_better:
            return self.interval
        return Interval(-self.interval.difference, self.interval.reach)

    @property
    def verdict(self) -> Quality:
        """The verdict against the default."""
        if self.loss is None or self.margin is None:
            return Quality.NOT_SHOWN
        if self.loss.high < self.margin:
            return Quality.NO_WORSE
        return Quality.WORSE if self.loss.low > 0 else Quality.NOT_SHOWN


def interval_of(size: Statistics, default: Statistics) -> Interval | None:
    """Return the interval of a size's mean less the default's; None after too few runs, or if no value varies.

    Values that do not vary, as with a fixed seed, do not show how much runs would vary.
    """
    if min(size.count, default.count) < LEAST_RUNS:
        return None
    runs = size.count + default.count
    freedom = runs - 2
    pooled = (size.squared_deviations + default.squared_deviations) / freedom
    if pooled <= 0:
        return None
    ratio = _PRECISION / (_PRECISION + size.count * default.count / runs)
    bound = (ALPHA * math.sqrt(ratio)) ** (-2 / (freedom + 1))
    if bound * ratio >= 1:
        return None
    quantile = math.sqrt(freedom * (bound - 1) / (1 - bound * ratio))
    variance = sum(max(pooled, each.squared_deviations / (each.count - 1)) / each.count for each in (size, default))
    return Interval(size.mean - default.mean, quantile * math.sqrt(variance))


def comparisons(job: CreatedJob, arms: Mapping[int, Arm], batch_size: int) -> list[Comparison]:
    """Compare the metrics of a size, the job's own first, with those of the default.

    The job's own metric has one row, even if trainings watch it by its name, too.
    """
    arm, default = arms[batch_size], arms[job.default_batch_size]
    if not arm.metric.count:
        return []
    found = []
    watched = [(name, values) for name, values in sorted(arm.watched.items()) if not job.is_monitor(name)]
    for name, values in [(None, arm.metric), *watched]:
        theirs = default.metric if name is None else default.watched.get(name, Statistics())
        given = _given_margin(job, name)
        margin = abs(theirs.mean) * RELATIVE_MARGIN if given is None else abs(given)
        found.append(
            Comparison(
                name=name,
                values=values,
                is_lower_better=not job.higher_is_better_metric if name is None else is_lower_better(name, given),
                margin=margin if theirs.count else None,
                limit=math.inf if given is None else abs(given),
                interval=None if arm is default else interval_of(values, theirs),
            )
        )
    return found


def _given_margin(job: CreatedJob, name: str | None) -> float | None:
    """Return the user's margin for a metric, or for the job's own (None)."""
    margins = job.no_worse_than_default or {}
    if name is None:
        return next((margin for each, margin in margins.items() if job.is_monitor(each)), None)
    return margins.get(name)


def left_out(job: CreatedJob, arms: Mapping[int, Arm]) -> dict[int, str]:
    """Return the sizes that are shown to be worse than `no_worse_than_default` allows, each with the reason."""
    own = None if job.fingerprint is None else job.fingerprint.monitor
    found: dict[int, str] = {}
    for size in arms if job.no_worse_than_default else ():
        for each in comparisons(job, arms, size):
            loss = each.loss
            if loss is not None and loss.low > each.limit:
                side = "above" if each.is_lower_better else "below"
                found[size] = (
                    f"its {each.name or own} is {loss.difference:.3g} ± {loss.reach:.2g} {side} that of your default, "
                    f"{job.default_batch_size}, and you allow {each.limit:g}"
                )
                break
    return found
