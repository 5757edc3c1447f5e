"""Predictions of policy `gp_voi` for the cost of a run at each batch size, to be compared with the truth."""

from __future__ import annotations

import math
from dataclasses import dataclass

from bso_server.core.chances import BAND_SDS
from bso_server.core.gp_voi.forecast import Forecast, beliefs_of
from bso_server.core.history import History


@dataclass(frozen=True, slots=True)
class PredictedCost:
    """Cost of a run at one batch size, the runs included that have to be repeated because they fail.

    Attributes:
        batch_size: The size.
        expected_j: Expected cost, joules.
        low_j: A run costs less with a probability of 5 %.
        high_j: A run costs more with a probability of 5 %.
    """

    batch_size: int
    expected_j: float
    low_j: float
    high_j: float


def predicted_costs(history: History) -> list[PredictedCost]:
    """The predicted cost of a run at each of a job's batch sizes, ascending; of none before the first measurement.

    The log of a run's cost is normal, with the variance of what is expected and that from run to run together.

    Args:
        history: The job's trials.
    """
    beliefs = beliefs_of(history, ())
    if not any(belief.is_observed for belief in beliefs):
        return []
    forecast = Forecast.of(history, beliefs, ())
    run_variance = forecast.epochs.run_variance + forecast.epoch_costs.run_variance
    costs = []
    for index, size in enumerate(history.job.batch_sizes):
        mean, variance = float(forecast.mean[index]), float(forecast.variance[index])
        reach = BAND_SDS * math.sqrt(variance + run_variance)
        expected_j = forecast.expected_cost_j(index)
        costs.append(PredictedCost(size, expected_j, math.exp(mean - reach), math.exp(mean + reach)))
    return costs
