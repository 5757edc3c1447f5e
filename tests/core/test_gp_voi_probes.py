"""Probes in policy `gp_voi`: costs of epochs, the critical batch size, memory, and the first run."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace

import numpy as np
import pytest

from bso_server.core.gp_voi.gaussian_process import cost_posterior
from bso_server.core.gp_voi.prior import CONSTANTS, Sizes, epoch_families, laws
from bso_server.core.gp_voi.run_costs import CostRun, ProbedCost
from bso_server.core.model import Suggestion, changed
from bso_server.core.policy import suggest
from bso_server.simulate.play import PROBE_SHARE, Conditions, Simulation, critical_batch_size, drawn_probe, job_of
from bso_server.simulate.workload import Epoch, Landscape, SizeTrace, Workload, landscape
from tests.support.histories import Life, make_job, run
from zeus_plugins.protocol import GP_VOI, CreatedJob, Origin, Probe, ProbedSize, TrialState

SIZES = Sizes((8, 16, 32, 64, 128), 2)


def gp_voi_job(default: int, **fields: object) -> CreatedJob:
    """Return a job with policy `gp_voi` and the sizes of `SIZES`."""
    return make_job(SIZES.batch_sizes, default, policy=GP_VOI, **fields)


def probe_of(job: CreatedJob, costs_j: Mapping[int, float], critical: float | None = None, **fields: object) -> Probe:
    """Return a probe with cost = energy and an error of 10 %."""
    sizes = tuple(ProbedSize(batch_size=size, time_s=1, energy_j=cost_j, error=0.1) for size, cost_j in costs_j.items())
    error = None if critical is None else 1.6
    return Probe.model_validate(
        {"gpus": job.gpus, "sizes": sizes, "critical_batch_size": critical, "critical_error": error, **fields}
    )


def suggested(life: Life, probe: Probe | None) -> Suggestion:
    """Return the suggestion for a job with this probe."""
    return suggest(replace(life.history, probe=probe), np.random.default_rng(0))


def lawful(default: int, critical: float, *, saturation: float, spread: float = 0.1) -> Landscape:
    """Return a landscape by the laws: epochs ``20·(1 + b/critical)``, cost of an epoch ``1 + saturation/b``."""
    sizes = tuple(
        SizeTrace(
            size,
            tuple(round(20 * (1 + size / critical) * math.exp(spread * z)) for z in (-1.2, -0.4, 0.4, 1.2)),
            {100.0: Epoch(1.0, 1 + saturation / size)},
        )
        for size in (8, 16, 32, 64, 128, 256, 512, 1024)
    )
    return landscape(Workload("law", sizes, default, 600, 100.0), eta=1.0, optimal_power_limits=False)


def played(at: Landscape, seed: int, *, factor: float = 1.0, probes: bool = True, **fields: object) -> Simulation:
    """Simulate 20 recurrences of a job on a landscape."""
    job = job_of(
        at, GP_VOI, seed=seed, max_power=100.0, eta_knob=1.0, beta_knob=2.0, max_epochs=600, controls="off", **fields
    )
    conditions = Conditions(at, critical_factor=factor)
    return Simulation(job, conditions, recurrences=20, seed=seed, probes=probes)


# --- Costs of epochs ------------------------------------------------------------------------------------------------


def test_probed_costs_are_relative_to_the_measured_run() -> None:
    truth = [math.log(1 + 100 / size) for size in SIZES.batch_sizes]
    ran = CostRun(truth[2], 20.0)
    # At another power limit, all probed costs are a third higher.
    probed = tuple(ProbedCost(index, log_cost + 0.3, 0.01) for index, log_cost in enumerate(truth))
    found = cost_posterior(SIZES, ((), (), (ran,), (), ()), None, probed)
    assert found.mean == pytest.approx(np.array(truth), abs=0.06)
    assert max(found.variance) < 0.03
    without = cost_posterior(SIZES, ((), (), (ran,), (), ()))
    assert without.variance[0] > 10 * found.variance[0]


def test_probed_costs_without_runs_have_their_own_and_a_shared_error() -> None:
    probed = tuple(ProbedCost(index, 5.0 - index / 4, 0.01) for index in range(5))
    found = cost_posterior(SIZES, ((),) * 5, None, probed)
    assert found.mean == pytest.approx([each.log_cost for each in probed], abs=0.15)
    assert min(found.variance) > CONSTANTS.probe_bias_sd**2 / 2
    difference = np.array([1.0, 0, 0, 0, -1.0])
    spread = sum(each.weights.sum() * difference @ each.covariance @ difference for each in found.components)
    assert spread < 0.03


def test_measured_runs_of_a_size_override_the_probed_cost() -> None:
    ran = CostRun(4.0, 20.0)
    wrong = (ProbedCost(2, 4.0, 0.01), ProbedCost(3, 9.0, 0.01))
    runs = ((), (), (ran,), (ran,), ())
    assert cost_posterior(SIZES, runs, None, wrong).mean[3] == pytest.approx(4.0, abs=0.05)


# --- Critical batch size --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("sd", "used"), [(0.1, 1.6), (1.6, 1.6), (2.5, 2.5)])
def test_critical_batch_size_error_has_a_lower_limit(sd: float, used: float) -> None:
    (before, lawless), (after, same) = laws(SIZES).epochs, epoch_families(SIZES, (5.0, sd))
    assert same is lawless
    grid = laws(SIZES).log_critical
    wrong = CONSTANTS.critical_wrong
    expected = (1 - wrong) * np.exp(-0.5 * ((grid - 5.0) / used) ** 2) + wrong
    shift = after.log_weights - before.log_weights - np.log(expected)
    assert shift == pytest.approx(np.full(len(grid), shift[0]))
    assert np.exp(after.log_weights).sum() == pytest.approx(np.exp(before.log_weights).sum())


def test_critical_batch_size_beyond_the_grid_favours_flat_epochs() -> None:
    flat = int(np.argmin(np.ptp(laws(SIZES).epochs[0].means, axis=1)))
    before, after = (epoch_families(SIZES, critical)[0].log_weights[flat] for critical in (None, (30.0, 1.6)))
    assert after > before + 0.5


@pytest.mark.parametrize("critical", [64.0, 256.0])
def test_simulated_critical_batch_size_matches_the_law(critical: float) -> None:
    assert critical_batch_size(lawful(64, critical, saturation=64)) == pytest.approx(critical, rel=0.15)


@pytest.mark.slow
def test_noise_scale_wrong_by_a_factor_of_30_costs_at_most_2_percent() -> None:
    landscapes = [
        lawful(default, critical, saturation=300) for default, critical in ((32, 40.0), (512, 40.0), (32, 400.0))
    ]
    losses = []
    for factor in (30.0, 1 / 30):
        ratios = []
        for at in landscapes:
            wrong, without = (
                sum(sum(played(at, seed, factor=factor, probes=probes).play().costs_j) for seed in range(3))
                for probes in (True, False)
            )
            ratios.append(math.log(wrong / without))
        losses.append(math.expm1(sum(ratios) / len(ratios)))
    assert max(losses) < 0.02


# --- Memory ---------------------------------------------------------------------------------------------------------


def test_sizes_out_of_memory_in_the_probe_are_excluded() -> None:
    life = Life(gp_voi_job(32))
    history = replace(life.history, probe=probe_of(life.job, {8: 5, 16: 4, 32: 3}, out_of_memory=64))
    assert history.fitting_sizes == (8, 16, 32)
    assert history.runnable_sizes == {8, 16, 32}


def test_measured_size_fits_despite_the_probe() -> None:
    life = Life(gp_voi_job(64))
    run(life, life.ask(), needed=5)
    history = replace(life.history, probe=probe_of(life.job, {}, out_of_memory=32))
    assert history.fitting_sizes == (8, 16, 32, 64)


# --- The first run --------------------------------------------------------------------------------------------------

CHEAPER_WHEN_LARGER = {8: 1600.0, 16: 800.0, 32: 400.0, 64: 200.0, 128: 100.0}


def test_first_run_uses_the_predicted_size_if_requested_and_cheaper() -> None:
    for first_run, size in (("default", 32), ("predicted", 128)):
        life = Life(gp_voi_job(32, first_run=first_run))
        assert suggested(life, None).batch_size == 32
        found = suggested(life, probe_of(life.job, CHEAPER_WHEN_LARGER, 1000.0))
        assert (found.batch_size, found.origin) == (size, Origin.EXPLORATION)
    assert "by its probe, 128 is expected to save" in found.reason


def test_first_run_stays_at_the_default_if_uncertainty_costs_more_than_the_saving() -> None:
    life = Life(gp_voi_job(32, first_run="predicted"))
    little = {size: 100.0 - size / 100 for size in life.job.batch_sizes}
    assert suggested(life, probe_of(life.job, little)).batch_size == 32


def test_withdrawn_trial_at_the_default_leaves_the_prediction() -> None:
    life = Life(gp_voi_job(32, first_run="predicted"))
    life.move(life.ask(), TrialState.WITHDRAWN)
    found = suggested(life, probe_of(life.job, CHEAPER_WHEN_LARGER, 1000.0))
    assert found.batch_size == 128
    life.move(life.dispatch(128), TrialState.FAILED)
    assert suggested(life, probe_of(life.job, CHEAPER_WHEN_LARGER, 1000.0)).batch_size == 32


def test_epochs_from_replaced_gpus_are_combined_with_probed_costs() -> None:
    life = Life(gp_voi_job(32))
    run(life, life.ask(), needed=5)
    life.trials[0] = changed(life.trials[0], other_gpus=True)
    assert suggested(life, None).reason == "first run on the job's new GPUs: 32, near your own size"
    found = suggested(life, probe_of(life.job, CHEAPER_WHEN_LARGER, 1000.0))
    assert found.batch_size == 128
    assert found.reason.startswith("a trial with ")


def test_control_runs_at_the_default_follow_a_predicted_first_run() -> None:
    at = lawful(16, 1000.0, saturation=1000)
    job = job_of(at, GP_VOI, seed=0, max_power=100.0, eta_knob=1.0, max_epochs=600, first_run="predicted")
    trials = Simulation(job, Conditions(at), recurrences=30, probes=True).play().trials
    assert trials[0].record.batch_size > 16
    assert any(trial.record.origin is Origin.CONTROL for trial in trials)


def test_simulated_probe_is_charged_and_leaves_the_randomness_of_runs_unchanged() -> None:
    at = lawful(64, 200.0, saturation=64)
    found = {kind: played(at, 3, probes=probes).play() for kind, probes in (("probed", True), ("without", False))}
    first = {kind: job.trials[0].record for kind, job in found.items()}
    assert first["probed"].epoch == first["without"].epoch
    charged = PROBE_SHARE * at.profiles[64].epoch.energy_j
    assert first["probed"].energy_j - first["without"].energy_j == pytest.approx(charged)
    predicted = played(at, 3, first_run="predicted").play()
    spent = sum(trial.cost_j for trial in predicted.trials)
    assert sum(predicted.costs_j) - spent == pytest.approx(charged)


@pytest.mark.slow
def test_probing_finds_a_far_size_sooner() -> None:
    at = lawful(16, 1000.0, saturation=1000)
    default, probed, predicted = (
        sum(sum(played(at, seed, probes=probes, first_run=first).play().costs_j) for seed in range(4))
        for probes, first in ((False, "default"), (True, "default"), (True, "predicted"))
    )
    assert predicted < probed < default


def test_drawn_probes_follow_the_seed() -> None:
    at = lawful(64, 200.0, saturation=64)
    job, conditions = played(at, 0)._job, Conditions(at)
    assert drawn_probe(job, conditions, 1) == drawn_probe(job, conditions, 1) != drawn_probe(job, conditions, 2)
