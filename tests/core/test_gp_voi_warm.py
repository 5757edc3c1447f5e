"""Warm starts of policy `gp_voi`: epochs to the target that another job has learned on other GPUs."""

from __future__ import annotations

import math

import numpy as np
import pytest

from bso_server.core.gp_voi.beliefs import Belief, Beliefs, begun, learned, posterior_of
from bso_server.core.gp_voi.gaussian_process import Seen, WeightedStatistics, epochs_posterior
from bso_server.core.gp_voi.prior import CONSTANTS, Sizes
from bso_server.core.model import Suggestion
from bso_server.core.policy import learned_by, suggest
from bso_server.simulate.play import Conditions, Simulation, job_of
from bso_server.simulate.workload import Epoch, Landscape, SizeTrace, Workload, landscape
from tests.support.histories import Life, make_job, run
from zeus_plugins.protocol import (
    GP_VOI,
    CreatedJob,
    Fingerprint,
    GpuConfig,
    LearnedEpochs,
    Origin,
    TrialState,
    WarmStart,
)

SIZES = (8, 16, 32, 64, 128)
A40 = GpuConfig(max_power=300.0, number_of_gpus=1, gpu_model="A40")


def learned_of(size: int, epochs: float, *, reached: bool = True) -> LearnedEpochs:
    """Return the epochs that five runs of a size have shown."""
    return LearnedEpochs(batch_size=size, log_epochs=math.log(epochs), sd=0.05, weight=5.0, reached=reached)


WARM = WarmStart(
    job_id="nightly",
    gpus=A40,
    epochs=(learned_of(16, 12), learned_of(32, 10), learned_of(64, 11), learned_of(128, 20, reached=False)),
)
WORDS = "epochs as learned by job nightly on A40"


def warm_job(**fields: object) -> CreatedJob:
    return make_job(SIZES, 32, policy=GP_VOI, **{"warm": WARM, "max_epochs": 100, **fields})


def suggested(life: Life) -> Suggestion:
    return suggest(life.history, np.random.default_rng(0))


# --- Beliefs --------------------------------------------------------------------------------------------------------


def test_warm_job_begins_with_the_learned_epochs_at_less_weight() -> None:
    # 5 runs with σ 0.05 of their mean, and σ 0.15 between GPUs: 5 · 0.05² / (0.05² + 0.15²).
    known = WeightedStatistics(0.5, math.log(10))
    found = begun(warm_job())
    assert found[0] == Belief()
    assert found[2].observed.weight == pytest.approx(known.weight)
    assert (found[2].observed.mean, found[2].converged, found[2].is_taken_over) == (known.mean, True, True)
    assert (found[4].converged, found[4].is_taken_over, found[4].is_observed) == (False, False, True)
    assert not any(belief.exact.weight or belief.costs for belief in found)


@pytest.mark.parametrize(
    ("fields", "is_warm"),
    [
        ({}, True),
        ({"warm_start": "off"}, False),
        ({"fingerprint": Fingerprint(optimizer="SGD")}, True),
        ({"fingerprint": Fingerprint(optimizer="Adam")}, False),
        ({"fingerprint": Fingerprint(optimizer="Adam"), "warm": WARM.model_copy(update={"optimizer": None})}, True),
    ],
)
def test_warm_start_counts_unless_it_is_off_or_has_another_optimizer(fields: dict[str, object], is_warm: bool) -> None:
    job = warm_job(**{"warm": WARM.model_copy(update={"optimizer": "SGD"}), **fields})
    assert (begun(job) != (Belief(),) * 5) is is_warm


def test_a_job_passes_on_epochs_with_errors_after_reaching_the_target() -> None:
    life = Life(make_job(SIZES, 32, policy=GP_VOI))
    assert learned_by(life.history) is None
    run(life, life.ask(), needed=5)
    found = learned_by(life.history)
    assert found is not None
    assert (found.job_id, found.gpus) == (life.job.job_id, life.job.gpus)
    (only,) = found.epochs
    assert (only.batch_size, only.log_epochs, only.reached) == (32, pytest.approx(math.log(5)), True)
    assert only.weight == pytest.approx(CONSTANTS.forgetting)
    assert 0.05 < only.sd < 0.15


def test_a_warm_job_passes_nothing_on_before_a_run() -> None:
    job = warm_job()
    assert learned(begun(job), job) == ()
    life = Life(job)
    run(life, life.ask(), needed=10)
    assert {each.batch_size for each in learned(life.history.memory, job)} == {16, 32, 64, 128}


def test_a_job_of_a_thousand_sizes_passes_on_a_few() -> None:
    job = make_job(tuple(range(1, 201)), 100, policy=GP_VOI)
    belief = Belief(observed=WeightedStatistics(2.0, 1.0), exact=WeightedStatistics(2.0, 1.0), converged=True)
    found = learned((belief,) * 199 + (belief._replace(observed=WeightedStatistics(9.0, 1.0)),), job)
    assert (len(found), found[-1].batch_size) == (64, 200)


def test_an_agreeing_first_run_leaves_a_doubt_and_contradicting_runs_confirm_the_doubt() -> None:
    life = Life(warm_job())
    sizes = Sizes.of(life.job)
    run(life, life.dispatch(32), needed=10)
    memory = life.history.memory
    agreed = share_alone(sizes, memory)
    assert 0 < agreed < CONSTANTS.warm_wrong
    # The other job said that 64 needs 11 epochs, and 16 needs 12.
    for size, needed in ((64, 16), (16, 8)):
        run(life, life.dispatch(size), needed=needed)
    assert share_alone(sizes, life.history.memory) > 2 * agreed


def share_alone(sizes: Sizes, memory: Beliefs) -> float:
    """Return the probability that the other job's epochs are wrong."""
    both, alone = (
        epochs_posterior(sizes, Seen(tuple(each), tuple(belief.exact for belief in memory), 1.0))
        for each in zip(*((belief.observed, belief.own) for belief in memory), strict=True)
    )
    mean = posterior_of(sizes, memory).mean[4]
    return float((mean - both.mean[4]) / (alone.mean[4] - both.mean[4]))


# --- Choices --------------------------------------------------------------------------------------------------------


def test_first_run_of_a_warm_job_is_at_the_default_and_unbounded() -> None:
    life = Life(warm_job())
    found = suggested(life)
    assert (found.batch_size, found.origin, found.bound) == (32, Origin.EXPLORATION, None)
    assert found.reason == f"first run of job {life.job.job_id}; {WORDS}"
    run(life, life.ask(), needed=90)
    assert life.trials[-1].epoch == 90
    # The surprise refutes the other job.
    assert [each.is_observed for each in life.history.memory] == [False, False, True, False, False]


def test_first_run_at_another_size_is_stopped_upon_refuting_the_other_job() -> None:
    life = Life(warm_job(max_epochs=500))
    run(life, life.ask(), needed=10, epoch_j=50)
    trial = life.dispatch(64, Origin.INCUMBENT)
    ended = run(life, trial, needed=490)
    # The other job needed 11 epochs at 64: a run refutes this at 2.5 σ. A size with an own run would get 25 epochs.
    assert (ended.state, ended.epoch) == (TrialState.EARLY_STOPPED, 20)
    assert not life.belief(64).converged


def test_own_runs_overrule_the_other_job() -> None:
    life = Life(warm_job())
    for _ in range(2):
        run(life, life.dispatch(64), needed=14)
    mean = life.history.memory[3].observed.mean
    assert mean == pytest.approx((0.5 * math.log(11) + 2 * math.log(14)) / 2.5, abs=0.01)


@pytest.mark.parametrize(("needed", "is_refuted"), [(11, False), (14, False), (25, True), (4, True)])
def test_a_surprising_run_refutes_the_other_job(needed: int, is_refuted: bool) -> None:
    life = Life(warm_job())
    run(life, life.dispatch(64), needed=needed)
    memory = life.history.memory
    assert memory[3].exact.weight > 0
    assert [each.is_observed for each in memory] == [False, not is_refuted, not is_refuted, True, not is_refuted]


# --- Costs ----------------------------------------------------------------------------------------------------------


def lawful(critical: float, *, level: float = 20.0, saturation: float = 300.0) -> Landscape:
    """A landscape by the laws: epochs to the target ``level·(1 + b/critical)``, cost of one ``1 + saturation/b``."""
    sizes = tuple(
        SizeTrace(
            size,
            tuple(round(level * (1 + size / critical) * math.exp(0.1 * z)) for z in (-1.2, -0.4, 0.4, 1.2)),
            {100.0: Epoch(1.0, 1 + saturation / size)},
        )
        for size in (8, 16, 32, 64, 128, 256, 512, 1024)
    )
    return landscape(Workload("law", sizes, 32, 2000, 100.0), eta=1.0, optimal_power_limits=False)


def spent_j(at: Landscape, seed: int, warm: WarmStart | None = None) -> float:
    """Return the cost of 20 recurrences."""
    return sum(_simulated(at, seed, warm=warm).play().costs_j)


def learned_on(at: Landscape, seed: int) -> WarmStart:
    """Return the warm start from a job of 20 recurrences."""
    found = learned_by(_simulated(at, seed).play().history)
    assert found is not None
    return found


def _simulated(at: Landscape, seed: int, **fields: object) -> Simulation:
    job = job_of(at, GP_VOI, seed=seed, max_power=100.0, eta_knob=1.0, beta_knob=2.0, max_epochs=2000, **fields)
    return Simulation(job.model_copy(update={"controls": 0.0}), Conditions(at), recurrences=20, seed=seed)


def test_a_warm_start_saves_the_search() -> None:
    warm = learned_on(lawful(30.0, saturation=300.0), 7)
    at = lawful(30.0, saturation=50.0)
    assert spent_j(at, 0, warm) < 0.97 * spent_j(at, 0)


def reversed_in_order(at: Landscape) -> Landscape:
    """Return a landscape whose sizes need each other's epochs, in reverse order."""
    sizes = tuple(
        SizeTrace(size, other.epochs_to_target, {100.0: at.profiles[size].epoch})
        for size, other in zip(at.profiles, reversed(at.profiles.values()), strict=True)
    )
    return landscape(Workload("law", sizes, 32, 2000, 100.0), eta=1.0, optimal_power_limits=False)


@pytest.mark.slow
def test_a_wrong_warm_start_costs_at_most_3_percent_on_average_and_4_at_worst() -> None:
    now = lawful(150.0)
    # With other data, epochs are five times as many or few, or the critical batch size is, or sizes change places.
    others = {
        "few": lawful(150.0, level=4.0),
        "many": lawful(150.0, level=100.0),
        "early": lawful(30.0),
        "late": lawful(750.0),
        "reversed": reversed_in_order(now),
    }
    without = sum(math.log(spent_j(now, seed)) for seed in range(3))
    losses = {
        name: (sum(math.log(spent_j(now, seed, learned_on(before, seed + 50))) for seed in range(3)) - without) / 3
        for name, before in others.items()
    }
    assert sum(losses.values()) / len(losses) < math.log(1.03), losses
    assert max(losses.values()) < math.log(1.04), losses
