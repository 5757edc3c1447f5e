"""The cost that a policy expects of each batch size, and the size that it holds to be the best."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bso_server.core.model import ExpectedCost
from bso_server.core.policy import expectations
from tests.support.histories import Life, make_job
from tests.support.properties import examples
from zeus_plugins.protocol import GP_VOI, OWN_POLICIES, ZEUS, Origin, TrialState

SIZES = (8, 16, 32, 64)


def life_of(policy: str, **fields: object) -> Life:
    return Life(make_job(SIZES, 16, policy=policy, **fields))


@pytest.mark.parametrize("policy", OWN_POLICIES)
def test_nothing_is_expected_before_a_run_reaches_the_target(policy: str) -> None:
    life = life_of(policy)
    assert expectations(life.history).best is None
    life.run(16, Origin.EXPLORATION, TrialState.FAILED, 70)
    assert (dict(expectations(life.history).costs), expectations(life.history).best) == ({}, None)


def test_zeus_expects_the_mean_of_its_posterior() -> None:
    life = life_of(ZEUS)
    for size, cost_j in ((16, 400), (8, 900), (32, 200), (64, 990), (32, 500), (16, 380), (8, 950)):
        life.run(size, Origin.EXPLORATION, TrialState.COMPLETED, cost_j)
    found = expectations(life.history)
    # The luckiest run was one of 32: 350 ± 150/√2 J. 64 was stopped from being tried again; its one run says no spread.
    assert found.costs[32] == ExpectedCost(350, pytest.approx(150 / math.sqrt(2)))
    assert found.costs[16] == ExpectedCost(390, pytest.approx(10 / math.sqrt(2)))
    assert found.costs[64] == ExpectedCost(990, None)
    assert found.best == 32
    life.run(32, Origin.EXPLORATION, TrialState.COMPLETED, 500)
    assert life.history.cheapest is not None
    assert life.history.cheapest.batch_size == 32
    assert expectations(life.history).best == 16


def test_zeus_expects_nothing_of_sizes_that_do_not_run_or_did_not_survive() -> None:
    life = life_of(ZEUS)
    life.run(8, Origin.EXPLORATION, TrialState.COMPLETED, 300)
    life.run(16, Origin.EXPLORATION, TrialState.COMPLETED, 400)
    life.run(32, Origin.EXPLORATION, TrialState.EARLY_STOPPED, 100)
    life.run(64, Origin.EXPLORATION, TrialState.COMPLETED, 200)
    life.run(64, Origin.EXPLORATION, TrialState.INFEASIBLE, 0)
    assert list(expectations(life.history).costs) == [8, 16]
    life.survivors = (16,)
    assert list(expectations(life.history).costs) == [16]


def test_a_size_that_only_ran_beside_an_exploration_costs_what_it_did_there() -> None:
    life = life_of(ZEUS)
    life.run(16, Origin.CONCURRENT, TrialState.COMPLETED, 400)
    assert expectations(life.history).costs == {16: ExpectedCost(400, None)}


@given(st.integers(0, 2**32), st.sampled_from(OWN_POLICIES))
@settings(max_examples=examples(15), deadline=None)
def test_the_best_size_is_the_one_that_is_played_when_nothing_is_to_be_learned(seed: int, policy: str) -> None:
    rng = np.random.default_rng(seed)
    life, epochs_needed = life_of(policy, max_epochs=40, mab_seed=seed), rng.integers(2, 9, len(SIZES))
    for _ in range(25):
        history = life.history
        trial = life.ask()
        # The first decision of the bandit stage chooses among the sizes that it has just found to survive.
        before = expectations(replace(history, survivors=life.survivors))
        if trial.origin is Origin.INCUMBENT or life.reason.startswith("best so far"):
            assert trial.batch_size == before.best
        needed = epochs_needed[SIZES.index(trial.batch_size)] + rng.integers(0, 3)
        for epoch in range(1, 41):
            reached = float(epoch >= needed)
            cost_j = epoch * 10.0 * (1 + trial.batch_size / 64)
            if life.report(life.trials[-1], cost_j, epoch=float(epoch), metric=reached).stop:
                break
        if before.costs:
            assert before.best is None or before.costs[before.best].mean_j > 0


def test_gp_voi_does_not_hold_the_luckiest_run_for_the_best_size() -> None:
    life = life_of(GP_VOI, max_epochs=100)
    for size, epochs in ((16, 20), (16, 20), (32, 31), (32, 30), (16, 19), (32, 33), (32, 18), (16, 21)):
        trial = life.dispatch(size, Origin.INCUMBENT)
        for epoch in range(1, epochs + 1):
            life.report(life.trials[trial.trial_number - 1], 10.0 * epoch, epoch=epoch, metric=float(epoch == epochs))
    found, cheapest = expectations(life.history), life.history.cheapest
    assert cheapest is not None
    assert (cheapest.batch_size, found.best) == (32, 16)
    expected = found.costs[16]
    assert expected.std_j is not None
    assert expected.std_j > 0
    assert abs(expected.mean_j - 200) < 2 * expected.std_j
