"""The memory of policy `gp_voi`: what it learns from a trial, and how long it remembers."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import asdict, replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bso_server.core.gp_voi.beliefs import Belief, Outcome, Streak, after_outcome, posterior_of
from bso_server.core.gp_voi.gaussian_process import cost_posterior
from bso_server.core.gp_voi.prior import CONSTANTS, Sizes
from bso_server.core.gp_voi.run_costs import CostRun
from tests.support.properties import examples

SIZES = Sizes((8, 16, 32, 64, 128), 3)


def outcome(index: int, epochs: float, *, reached: bool = True, conclusive: bool = False) -> Outcome:
    return Outcome(index, epochs, math.log(10), CostRun(math.log(10), epochs - 1), 1.0, reached, conclusive)


def learned(outcomes: Sequence[Outcome], sizes: Sizes = SIZES) -> tuple[Belief, ...]:
    beliefs = (Belief(),) * len(sizes.batch_sizes)
    for each in outcomes:
        beliefs = after_outcome(sizes, beliefs, each)
    return beliefs


def test_a_success_is_learned_and_fades() -> None:
    beliefs = learned([outcome(3, 10)])
    fade = CONSTANTS.forgetting
    assert beliefs[3].observed.weight == beliefs[3].exact.weight == fade
    assert beliefs[3].observed.mean == math.log(10)
    assert beliefs[3].converged
    assert beliefs[3].costs == (CostRun(math.log(10), 9),)
    assert beliefs[0] == Belief()
    beliefs = learned([outcome(3, 10), outcome(2, 10)])
    assert beliefs[3].observed.weight == pytest.approx(fade**2)


def test_a_stopped_run_shifts_the_belief_upwards_and_takes_the_place_of_a_run() -> None:
    before = learned([outcome(3, 10), outcome(2, 10)])
    after = after_outcome(SIZES, before, outcome(2, 20, reached=False))
    assert after[2].observed.weight > before[2].observed.weight
    assert after[2].exact == before[2].exact
    assert (after[2].missed, after[2].failures, after[3].missed) == (1, 0, 0)
    assert (after[2].survived, after[3].survived) == (20, 0)
    shift = posterior_of(SIZES, after).mean - posterior_of(SIZES, before).mean
    assert shift[2] > 0.1
    # A run that was stopped long before it was expected to end says next to nothing.
    early = after_outcome(SIZES, before, outcome(2, 2, reached=False))
    assert early[2].observed == before[2].observed
    assert after_outcome(SIZES, after, outcome(2, 2, reached=False))[2].survived == 20


def test_a_run_that_fails_counts_as_bad_luck_until_there_are_too_many() -> None:
    failure = outcome(3, 50, reached=False, conclusive=True)
    beliefs = learned([outcome(3, 10)])
    chance = beliefs[3].failure_chance
    assert chance == pytest.approx(0.02 / (0.02 + beliefs[3].observed.weight + 1))
    once = after_outcome(SIZES, beliefs, failure)
    assert (once[3].failures, once[3].streak, once[3].converged) == (1.0, Streak(1, chance), True)
    assert once[3].observed == beliefs[3].observed
    assert once[3].failure_chance > 0.3
    # 1 % twice in a row is less probable than a change of the job.
    assert chance**2 < CONSTANTS.streak_chance
    twice = after_outcome(SIZES, once, failure)
    assert (twice[3].converged, twice[3].streak) == (False, Streak())
    assert twice[3].exact.weight == pytest.approx(CONSTANTS.kept_weight)
    # Where more successes have been seen, one failure is already less probable than that.
    assert not learned([*[outcome(3, 10)] * 4, failure])[3].converged


def test_what_epochs_cost_by_the_latest_runs() -> None:
    costing = [replace(outcome(3, 10), cost=CostRun(number / 1000, 9)) for number in range(30)]
    assert learned(costing[:3])[3].costs == (CostRun(0, 9), CostRun(0.001, 9), CostRun(0.002, 9))
    # Eight runs are remembered, so that a slow change of the machine is followed.
    assert learned(costing)[3].costs == tuple(CostRun(number / 1000, 9) for number in range(22, 30))


def test_two_dear_runs_in_a_row_say_that_epochs_cost_something_else_now() -> None:
    usual, dear = (replace(outcome(3, 10), cost=CostRun(cost, 9)) for cost in (2.0, 3.5))
    elsewhere = replace(outcome(1, 10), cost=CostRun(2.1, 9))
    known = [elsewhere, elsewhere, usual, usual]
    # One of them may have been slowed.
    once = learned([*known, dear])
    assert len(once[3].costs) == 3
    assert not once[1].are_costs_guessed
    assert cost_posterior(SIZES, tuple(each.costs for each in once)).mean[3] == pytest.approx(2.0, abs=0.05)
    twice = learned([*known, dear, dear])
    assert (twice[3].costs, twice[3].are_costs_guessed) == ((CostRun(3.5, 9),) * 2, False)
    # Whether those of other sizes have changed as much is open; their next run tells.
    assert (twice[1].costs, twice[1].are_costs_guessed) == ((CostRun(2.1, 9, drift=1.5),), True)
    assert (twice[0], twice[2], twice[4]) == (once[0], once[2], once[4])
    found = cost_posterior(SIZES, tuple(each.costs for each in twice))
    assert found.mean[3] == pytest.approx(3.5, abs=0.05)
    assert found.mean[1] > 3.0
    assert found.variance[1] > 10 * found.variance[3]
    again = learned([*known, dear, dear, replace(elsewhere, cost=CostRun(2.2, 9))])
    assert (again[1].costs, again[1].are_costs_guessed) == ((CostRun(2.2, 9),), False)


def test_first_epochs_are_all_that_is_known_of_some_jobs() -> None:
    only_first = [replace(outcome(3, 1), cost=None, log_first_cost=value) for value in (2.0, 3.0)]
    belief = learned(only_first)[3]
    assert (belief.costs, belief.are_costs_guessed) == ((CostRun(2.0, 1), CostRun(3.0, 1)), True)
    assert belief.log_startup is None
    # Where start-up is known it is taken off, and little is made of the rest; a longer run replaces it.
    long = replace(outcome(3, 10), log_first_cost=3.0, cost=CostRun(2.0, 9))
    guessed = learned([long, replace(outcome(2, 1), cost=None, log_first_cost=4.0)])[2]
    assert guessed.costs == (CostRun(3.0, 1, doubt=CONSTANTS.first_epoch_sd**2),)
    assert guessed.are_costs_guessed
    known = guessed.costing(CostRun(2.5, 3))
    assert (known.costs, known.are_costs_guessed) == ((CostRun(2.5, 3),), False)
    assert known.perhaps_costing(9.0, None) == known


def test_start_up_is_that_of_the_nearest_size_that_knows() -> None:
    far = replace(outcome(0, 10), log_first_cost=4.0, cost=CostRun(1.0, 9))
    near = replace(outcome(3, 10), log_first_cost=3.0, cost=CostRun(2.0, 9))
    guessed = learned([far, near, replace(outcome(2, 1), cost=None, log_first_cost=4.0)])[2]
    assert guessed.costs[0].log_cost == 3.0


def test_a_success_ends_a_streak() -> None:
    # Seldom, so that it is a streak of failures with a large chance, and no sign of a change.
    beliefs = learned([outcome(3, 10)])
    beliefs = tuple(replace(each, failures=2.0) if each.converged else each for each in beliefs)
    beliefs = after_outcome(SIZES, beliefs, outcome(3, 50, reached=False, conclusive=True))
    assert beliefs[3].streak.length == 1
    assert after_outcome(SIZES, beliefs, outcome(3, 10))[3].streak == Streak()


def test_surprises_mean_that_the_job_has_changed() -> None:
    beliefs = learned([*[outcome(3, 10), outcome(2, 12)] * 4])
    remembered = beliefs[2].observed.weight
    mean, variance = posterior_of(SIZES, beliefs).of_run(3)

    def off_by(sds: float) -> Outcome:
        return outcome(3, math.exp(mean + sds * math.sqrt(variance)))

    # Once is luck, twice in a row is a change.
    once = after_outcome(SIZES, beliefs, off_by(4.0))
    assert once[3].surprise == pytest.approx(4.0, rel=1e-3)
    assert once[2].observed.weight == pytest.approx(remembered * CONSTANTS.forgetting)
    # What comes as expected in between makes it luck again.
    between = after_outcome(SIZES, after_outcome(SIZES, once, outcome(3, 10)), off_by(4.0))
    assert between[2].observed.weight == pytest.approx(remembered * CONSTANTS.forgetting**3)
    twice = after_outcome(SIZES, once, off_by(8.0))
    assert twice[2].observed.weight == pytest.approx(CONSTANTS.kept_weight * CONSTANTS.forgetting)
    assert twice[3].observed.weight == pytest.approx((CONSTANTS.kept_weight + 1) * CONSTANTS.forgetting)
    assert (len(twice[2].costs), twice[3].surprise) == (1, 0.0)
    stopped = after_outcome(SIZES, after_outcome(SIZES, once, outcome(2, 20, reached=False)), off_by(8.0))
    assert stopped[2].survived == 0
    # One that is twice as far off is a change at once.
    assert after_outcome(SIZES, beliefs, off_by(5.9))[2].observed.weight > 3
    assert after_outcome(SIZES, beliefs, off_by(6.1))[2].observed.weight < 1


outcomes = st.builds(
    Outcome,
    index=st.integers(0, 4),
    epochs=st.one_of(st.integers(1, 1000), st.floats(1e-3, 1e6)),
    log_first_cost=st.one_of(st.none(), st.floats(-20, 40)),
    cost=st.none()
    | st.builds(
        CostRun,
        st.floats(-20, 40),
        epochs=st.floats(1e-3, 1e6),
        deviations=st.floats(0, 1e12),
        freedom=st.integers(0, 1000).map(float),
        doubt=st.floats(0, 10),
        drift=st.just(0.0),
    ),
    epoch_step=st.floats(1e-6, 10),
    reached=st.booleans(),
    conclusive=st.booleans(),
)


@given(st.lists(outcomes, max_size=60))
@settings(max_examples=examples(50), deadline=None)
def test_whatever_happens_beliefs_stay_finite(history: list[Outcome]) -> None:
    beliefs = learned(history)
    for belief in beliefs:
        assert belief.observed.weight >= belief.exact.weight * (1 - 1e-9) >= 0
        assert belief.exact.squared_deviations >= 0
        assert 0 < belief.failure_chance < 1
        numbers = json.loads(json.dumps(asdict(belief), allow_nan=False))
        assert len(numbers) == len(asdict(Belief()))
        assert len(belief.costs) <= CONSTANTS.most_cost_runs
    if any(belief.has_cost for belief in beliefs):
        costs = cost_posterior(SIZES, tuple(belief.costs for belief in beliefs))
        assert np.isfinite([costs.mean, costs.variance]).all()
    if any(belief.is_observed for belief in beliefs):
        posterior = posterior_of(SIZES, beliefs)
        assert np.isfinite(posterior.mean).all()
        assert (posterior.variance > 0).all()
        assert np.isfinite(posterior.variance).all()
