"""What `gp_voi` expects a trial to save in each later run, against what that trial saved."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np

from benchmarks.policies.cases import Case
from bso_server.core.gp_voi.forecast import Forecast, beliefs_of
from bso_server.core.gp_voi.policy import Weighed, suggest
from bso_server.core.gp_voi.prior import CONSTANTS
from bso_server.core.gp_voi.thinning import thinned
from bso_server.core.model import History
from zeus_plugins.protocol import GP_VOI, Origin

RANGES = ((0, 3), (3, 6), (6, 10), (10, 20), (20, 40))
"""First recurrence of each row of the table, from 0, and the first after it."""


@dataclass(frozen=True, slots=True)
class Tried:
    """One trial of a size other than the incumbent; savings are in runs of the incumbent.

    Attributes:
        recurrence: Counted from 0.
        expected: Saving of each later run that the policy expected.
        saved: Difference between the true expected costs of the incumbents before and after the trial.
    """

    recurrence: int
    expected: float
    saved: float


def tries_of(case: Case, seed: int) -> list[Tried]:
    """Play one job with `gp_voi`, and return its trials that the policy chose for what they are worth."""
    found: list[Tried] = []
    pending: tuple[int, float, int] | None = None

    def look(recurrence: int, whole: History) -> None:
        nonlocal pending
        history = thinned(whole)
        beliefs = beliefs_of(history, ())
        if not any(belief.is_observed for belief in beliefs):
            return
        forecast, sizes = Forecast.of(history, beliefs, ()), history.job.batch_sizes
        profiles = case.conditions.landscape_at(recurrence).profiles
        if pending is not None:
            number, expected, before = pending
            before_j = profiles[before].expected_cost_j
            after_j = min(profiles[sizes[forecast.incumbent]].expected_cost_j, CONSTANTS.largest_cost * before_j)
            found.append(Tried(number, expected, 1 - after_j / before_j))
        pending = None
        suggestion = suggest(history, np.random.default_rng(seed))
        if suggestion.origin is Origin.EXPLORATION and isinstance(suggestion.basis, Weighed):
            worth = suggestion.basis.worths.get(sizes.index(suggestion.batch_size))
            if worth is not None and forecast.incumbent_converges:
                pending = recurrence, worth.value / forecast.horizon, sizes[forecast.incumbent]

    case.play(GP_VOI, seed, look)
    return found


def lines(tries: Iterable[Tried]) -> list[list[str]]:
    """Return the table's lines: the recurrences, the number of trials, and the means of both savings."""
    tries = list(tries)
    table = [["recurrences", "trials", "expected", "saved"]]
    for first, end in RANGES:
        some = [each for each in tries if first <= each.recurrence < end]
        if some:
            expected, saved = (np.mean([getattr(each, name) for each in some]) for name in ("expected", "saved"))
            table.append([f"{first + 1}-{end}", str(len(some)), f"{expected:.1%}", f"{saved:.1%}"])
    return table
