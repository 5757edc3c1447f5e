"""Comparison of the saving per later run that `gp_voi` expects from a trial with the trial's true saving."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from statistics import fmean

import numpy as np

from benchmarks.policies.cases import Case
from bso_server.core.gp_voi.policy import POLICY, Weighed
from bso_server.core.gp_voi.prior import CONSTANTS
from bso_server.core.model import History, Suggestion
from bso_server.core.policy import given
from zeus_plugins.protocol import GP_VOI, Origin

RANGES = ((0, 3), (3, 6), (6, 10), (10, 20), (20, 40))
"""Recurrences of each row of the table, counted from 0: the first, and the first that is no longer included."""


@dataclass(frozen=True, slots=True)
class Tried:
    """One trial of a size other than the incumbent; the unit of savings is the cost of a run of the incumbent.

    Attributes:
        recurrence: Number of runs that had reached the target before the trial.
        expected: Saving per later run that the policy expected before the trial.
        saved: True expected cost of the incumbent before the trial, less the true expected cost of the one after it.
    """

    recurrence: int
    expected: float
    saved: float


def tries_of(case: Case, seed: int) -> list[Tried]:
    """Play one job with `gp_voi`, and return the trials that the policy chose for their value of information.

    Only one recurrence of the job may be under way at a time, so that each trial has ended before the next decision.
    """
    found: list[Tried] = []
    pending: tuple[int, float, int] | None = None

    def suggest(history: History, rng: np.random.Generator) -> Suggestion:
        nonlocal pending
        suggestion = POLICY.suggest(history, rng)
        if not isinstance(suggestion.basis, Weighed):
            return suggestion
        forecast, worths = suggestion.basis
        sizes, recurrence = forecast.sizes.batch_sizes, history.recurrences
        incumbent = sizes[forecast.incumbent]
        if pending is not None:
            number, expected, before = pending
            profiles = case.conditions.landscape_at(recurrence).profiles
            before_j = profiles[before].expected_cost_j
            after_j = min(profiles[incumbent].expected_cost_j, CONSTANTS.largest_cost * before_j)
            found.append(Tried(number, expected, 1 - after_j / before_j))
        pending = None
        worth = worths.get(sizes.index(suggestion.batch_size))
        if suggestion.origin is Origin.EXPLORATION and worth is not None:
            pending = recurrence, worth.value / forecast.horizon, incumbent
        return suggestion

    with given(GP_VOI, replace(POLICY, suggest=suggest)):
        case.play(GP_VOI, seed)
    return found


def lines(tries: Iterable[Tried]) -> list[list[str]]:
    """Return the table's lines: the recurrences, the number of trials, and the means of both savings."""
    tries = list(tries)
    table = [["recurrences", "trials", "expected", "saved"]]
    for first, end in RANGES:
        some = [each for each in tries if first <= each.recurrence < end]
        if some:
            expected, saved = fmean(each.expected for each in some), fmean(each.saved for each in some)
            table.append([f"{first + 1}-{end}", str(len(some)), f"{expected:.1%}", f"{saved:.1%}"])
    return table
