"""The numbers behind a decision of policy `gp_voi`."""

from __future__ import annotations

import math

import numpy as np

from bso_server.core.chances import BAND_SDS
from bso_server.core.gp_voi.decisions import Weighed
from bso_server.core.gp_voi.forecast import Forecast, available_of
from bso_server.core.gp_voi.normal import bounded_exp
from bso_server.core.gp_voi.stopping import bound
from bso_server.core.history import History
from bso_server.core.model import Suggestion
from zeus_plugins.protocol import MAX_CANDIDATES, CandidateWorth, Decision, Origin, SizeBelief, StopRule


def explain(history: History, suggestion: Suggestion) -> Decision:
    """The beliefs about each size that may run, and the worth of a try of each candidate."""
    job, sizes = history.job, history.job.batch_sizes
    stop = None if suggestion.bound is None else StopRule(max_epochs=suggestion.bound.epochs)
    weighed = suggestion.basis
    if not isinstance(weighed, Weighed):
        unknown = tuple(SizeBelief(batch_size=sizes[index]) for index in available_of(history))
        return Decision(sizes=unknown, stop=stop)
    forecast, candidates = weighed.forecast, weighed.worths
    worthiest = sorted(candidates, key=lambda index: candidates[index].index, reverse=True)[:MAX_CANDIDATES]
    return Decision(
        sizes=_beliefs(forecast, sizes),
        candidates=tuple(
            CandidateWorth(
                batch_size=sizes[index],
                value=worth.value,
                loss=worth.loss,
                stop_epochs=None
                if forecast.beliefs[index].are_costs_guessed
                else bound(job, forecast, index, Origin.EXPLORATION, worth).epochs,
            )
            for index, worth in ((index, candidates[index]) for index in sorted(worthiest))
        ),
        incumbent=sizes[forecast.incumbent] if forecast.incumbent_converges else None,
        stop=stop,
    )


def _beliefs(forecast: Forecast, sizes: tuple[int, ...]) -> tuple[SizeBelief, ...]:
    available, samples = list(forecast.available), forecast.samples
    costs = samples.log_epochs + samples.log_costs + forecast.retries
    cheapest = np.where(samples.converges, costs, np.inf)[:, available].argmin(axis=1)
    chances = np.bincount(cheapest, minlength=len(available)) / len(cheapest)
    found = []
    for index, chance in zip(available, chances, strict=True):
        expected_j = forecast.expected_cost_j(index)
        sd = math.sqrt(float(forecast.variance[index]))
        # The expected cost is the mean over what is believed of it, which is log-normal.
        median_j = expected_j * bounded_exp(-sd * sd / 2)
        found.append(
            SizeBelief(
                batch_size=sizes[index],
                expected_cost_j=expected_j,
                low_j=median_j * bounded_exp(-BAND_SDS * sd),
                high_j=median_j * bounded_exp(BAND_SDS * sd),
                chance_best=float(chance),
            )
        )
    return tuple(found)
