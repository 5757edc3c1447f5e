"""Value of an exploration trial under policy `gp_voi`, and its bound, against plain loops."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest
from scipy import stats

from bso_server.core.gp_voi import forecast as forecasts
from bso_server.core.gp_voi.beliefs import Belief
from bso_server.core.gp_voi.forecast import Forecast
from bso_server.core.gp_voi.gaussian_process import Posterior, WeightedStatistics
from bso_server.core.gp_voi.prior import CONSTANTS, Array, Sizes
from bso_server.core.gp_voi.run_costs import CostRun
from bso_server.core.gp_voi.value import bound_of_try, stop_shares, unbounded, worths

THREE, FIVE = Sizes((16, 32, 64), 1), Sizes((8, 16, 48, 64, 512), 3)


# --- Value of an exploration trial ------------------------------------------------------------------------------------


def forecast_of(
    epochs: Posterior,
    epoch_costs: Posterior,
    *,
    sizes: Sizes = THREE,
    incumbent: int = 1,
    horizon: float = 20.0,
    unseen: Sequence[int] = (),
    available: tuple[int, ...] | None = None,
) -> Forecast:
    runs = WeightedStatistics(1.0, 2.0)
    seen = Belief(observed=runs, exact=runs, costs=(CostRun(1.0, math.inf),), converged=True)
    count = len(sizes.batch_sizes)
    return Forecast(
        sizes=sizes,
        beliefs=tuple(Belief() if index in unseen else seen for index in range(count)),
        available=available or tuple(range(count)),
        epochs=epochs,
        epoch_costs=epoch_costs,
        retries=np.linspace(0.0, 0.02, count),
        incumbent=incumbent,
        in_flight={},
        horizon=horizon,
        length=7,
        max_epochs=200,
        known=(epochs, epoch_costs),
    )


def belief(mean: Sequence[float], sd: Sequence[float], run_sd: float) -> Posterior:
    covariance = np.outer(sd, sd) * (0.3 + 0.7 * np.eye(len(sd)))
    return Posterior(np.array([[mean]]), np.array([[1.0]]), np.array([covariance]), run_sd**2)


def worth_by_loops(
    forecast: Forecast, index: int, shares: Sequence[float], max_epochs: int
) -> tuple[list[float], list[float], float]:
    """Compute, per share, the expected saving of a later run by a trial stopped at this share, and the trial's loss.

    The third result is the share of samples in which the size is cheaper than the incumbent.

    Each sample in turn is taken for the truth and determines the trial's outcome, by which all samples are weighted.
    """
    samples, run_sd, incumbent = forecast.samples, math.sqrt(forecast.epochs.run_variance), forecast.incumbent
    costs_known = forecast.epoch_costs.variance[index] <= 1e-3
    cost_sd = max(math.sqrt(forecast.epoch_costs.run_variance), 0.03)
    log_epochs = np.where(samples.converges, samples.log_epochs, math.log(3 * max_epochs))
    log_runs = (samples.log_epochs + samples.log_costs)[:, incumbent]
    epoch_cost = np.exp(samples.log_costs - (log_runs.mean() + forecast.retries[incumbent] + run_sd**2 / 2))
    run_cost = np.clip(
        np.exp(log_epochs + run_sd**2 / 2 + forecast.retries) * epoch_cost, math.exp(-5), CONSTANTS.largest_cost
    )
    run_cost[log_epochs > math.log(max_epochs + 0.5)] = CONSTANTS.largest_cost
    count, base = len(run_cost), float(run_cost[:, incumbent].mean())

    def saving(weights: Array) -> float:
        expected = np.average(run_cost, axis=0, weights=weights)
        return float(expected[incumbent] - expected[list(forecast.available)].min())

    savings, losses = [], []
    for share in shares:
        saved = lost = 0.0
        survival = stats.norm.cdf((log_epochs[:, index] + np.log(epoch_cost[:, index]) - math.log(share)) / run_sd)
        for truth in range(count):
            outcome = log_epochs[truth, index] + run_sd * float(samples.luck[truth])
            each = float(epoch_cost[truth, index])
            limit = each * min(max(math.floor(share / each + 1e-9), 1), max_epochs)
            cost = math.exp(outcome) * each
            if cost > limit * (1 + 1e-9):
                saved += saving(survival)
                lost += limit
                continue
            logs = stats.norm.logpdf(outcome, log_epochs[:, index], run_sd)
            if not costs_known:
                logs = logs + stats.norm.logpdf(samples.log_costs[truth, index], samples.log_costs[:, index], cost_sd)
            saved += saving(np.exp(logs - logs.max()))
            lost += cost - base
        savings.append(saved / count)
        losses.append(lost / count)
    return savings, losses, float((run_cost[:, index] < run_cost[:, incumbent]).mean())


@pytest.mark.parametrize(
    ("mean", "sd", "cost_sd", "unseen", "max_epochs"),
    [
        ((2.0, 2.0, 2.0), (0.1, 0.05, 0.3), 0.01, (), 100),
        ((2.2, 2.0, 1.7), (0.2, 0.02, 0.2), 0.2, (2,), 100),
        ((2.5, 2.0, 2.6), (0.3, 0.1, 0.5), 0.01, (0, 2), 14),
    ],
)
def test_values_match_plain_loops(
    monkeypatch: pytest.MonkeyPatch,
    mean: Sequence[float],
    sd: Sequence[float],
    cost_sd: float,
    unseen: Sequence[int],
    max_epochs: int,
) -> None:
    monkeypatch.setattr(forecasts, "CONSTANTS", replace(CONSTANTS, samples=40))
    costs = belief((1.1, 1.0, 0.9), [cost_sd] * 3, 0.05)
    # The last size is four octaves from the incumbent and may never reach the target.
    sizes = Sizes((16, 32, 512), 1)
    forecast = replace(forecast_of(belief(mean, sd, 0.08), costs, sizes=sizes, unseen=unseen), max_epochs=max_epochs)
    assert len(forecast.samples.luck) == 40
    shares = (0.5, 0.85, 1.2, 2.0)
    found = worths(forecast, [0, 2], shares)
    for index in (0, 2):
        savings, losses, chance = worth_by_loops(forecast, index, shares, max_epochs)
        values = [forecast.horizon * saved - lost for saved, lost in zip(savings, losses, strict=True)]
        best = int(np.argmax(values))
        worth = found[index]
        assert worth.chance == chance
        assert worth.index == pytest.approx(values[best], abs=2e-3)
        if sorted(values)[-1] - sorted(values)[-2] > 5e-3:
            assert worth.stop_share == shares[best]
            assert worth.value == pytest.approx(forecast.horizon * savings[best], abs=2e-3)
            assert worth.loss == pytest.approx(losses[best], abs=1e-6)
    assert set(found) == {0, 2}


def test_stop_shares_end_at_beta() -> None:
    below_two = [share for share in CONSTANTS.stop_shares if share < 2]
    assert stop_shares(2.0) == (*below_two, 2.0)
    assert stop_shares(1.0) == (*(share for share in CONSTANTS.stop_shares if share < 1), 1.0)
    assert stop_shares(None) == (math.inf,)
    assert list(CONSTANTS.stop_shares) == sorted(set(CONSTANTS.stop_shares))


def test_sizes_further_out_may_never_reach_the_target() -> None:
    """The hazard per octave applies beyond the outermost successful sizes, and only after a success."""
    epochs, costs = belief([2.0] * 5, [0.1] * 5, 0.08), belief([1.0] * 5, [0.1] * 5, 0.02)
    forecast = forecast_of(epochs, costs, sizes=FIVE, unseen=(0, 2, 4))
    fails = 1 - forecast.samples.converges.mean(axis=0)
    expected = -np.expm1(-CONSTANTS.divergence * np.array([1, 0, 0, 0, 3]))
    assert fails == pytest.approx(expected, abs=1.5 / CONSTANTS.samples)
    assert forecast_of(epochs, costs, sizes=FIVE, unseen=range(5)).samples.converges.all()


def test_unseen_size_may_break_every_law() -> None:
    epochs, costs = belief([2.0] * 3, [1e-6] * 3, 0.08), belief([1.0] * 3, [1e-6] * 3, 0.02)
    drawn = forecast_of(epochs, costs, unseen=(2,)).samples.log_epochs - 2.0
    broken = np.abs(drawn) > 1e-3
    assert broken.mean(axis=0).tolist() == [0, 0, pytest.approx(CONSTANTS.break_chance, abs=1 / CONSTANTS.samples)]
    assert drawn[broken[:, 2], 2].std() == pytest.approx(CONSTANTS.break_sd, rel=0.4)
    assert drawn[:, 2].mean() == pytest.approx(0, abs=1e-3)


def test_stopped_size_may_break_the_laws_only_beyond_the_survived_epochs() -> None:
    epochs, costs = belief([2.0] * 3, [1e-6] * 3, 0.08), belief([1.0] * 3, [1e-6] * 3, 0.02)
    forecast = forecast_of(epochs, costs, unseen=(2,))
    fresh = np.sort(forecast.samples.log_epochs[:, 2])
    stopped = forecast.beliefs[2]._replace(costs=(CostRun(1.0, math.inf),), survived=math.exp(1.7))
    beliefs = (*forecast.beliefs[:2], stopped)
    drawn = np.sort(replace(forecast, beliefs=beliefs).samples.log_epochs[:, 2])
    # Only outcomes that the trial would already have shown are left out.
    assert drawn == pytest.approx(np.sort(np.where(fresh > 1.7, fresh, 2.0)), abs=1e-4)
    assert fresh.min() < 1.5 < drawn.min()


def test_samples_depend_on_the_number_of_trials_and_the_beliefs() -> None:
    epochs, costs = belief([2.0] * 3, [0.2] * 3, 0.08), belief([1.0] * 3, [0.1] * 3, 0.02)
    forecast = forecast_of(epochs, costs)
    assert forecast.samples.log_epochs.tolist() == replace(forecast).samples.log_epochs.tolist()
    other = replace(forecast, length=8).samples
    assert forecast.samples.log_epochs.tolist() != other.log_epochs.tolist()
    for drawn, mean, sd in ((other.log_epochs, 2.0, 0.2), (other.log_costs, 1.0, 0.1), (other.luck[:, None], 0, 1)):
        assert drawn.mean(axis=0) == pytest.approx([mean] * drawn.shape[1], abs=0.05 * sd)
        assert drawn.std(axis=0) == pytest.approx([sd] * drawn.shape[1], rel=0.1)


# --- The end of a try -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("share", "epoch_j", "epochs"),
    [
        (1.0, 10.0, 10),
        (0.5, 10.0, 5),
        (0.35, 10.0, 3),
        (1.2, 11.0, 10),
        (0.57, 19.0, 3),  # 56.99999999999999 J in floating point
        (2.0, 33.0, 6),
        (0.5, 60.0, 1),  # the first epoch always runs
        (0.5, 1e300, 1),
        (0.7, 0.7, 100),
        (2.0, 1.0, 200),
        (2.0, 0.9, 200),  # max_epochs
        (math.inf, 10.0, 200),
    ],
)
def test_trial_is_bounded_by_the_last_affordable_epoch(share: float, epoch_j: float, epochs: int) -> None:
    found = bound_of_try(share, epoch_j=epoch_j, incumbent_j=100.0, max_epochs=200)
    assert found.epochs == epochs
    if epochs < 200:
        assert found.reason == f"more would cost over {share:.3g} times what a run of the best size is expected to cost"
    else:
        assert found == unbounded(200)
