"""Pruning stage: random walks against a simulation with plain loops, and cases beyond them."""

from __future__ import annotations

from collections.abc import Mapping
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bso_server.core.model import UNCOUNTED, TrialRecord
from bso_server.core.zeus import Explore, explore
from bso_server.errors import NoSurvivorError
from tests.support.histories import Life, make_job
from tests.support.properties import examples
from zeus_plugins.protocol import CreatedJob, Origin, TrialState

# Outcome of a run: its cost in joules if it reached the target, else its final state.
Outcome = float | TrialState
DID_NOT_REACH: list[Outcome] = [TrialState.EARLY_STOPPED, TrialState.EXHAUSTED]
SIZES = (8, 16, 32, 64, 128)


def end(life: Life, trial: TrialRecord, outcome: Outcome) -> None:
    if isinstance(outcome, TrialState):
        life.move(trial, outcome)
    else:
        life.complete(trial, outcome)


def test_size_excluded_outside_the_exploration_ends_the_direction() -> None:
    life = Life(make_job(SIZES, 32, num_pruning_rounds=1))
    life.run(16, Origin.OFFLINE, TrialState.INFEASIBLE, 0.0)
    explored = []
    while isinstance(step := explore(life.history), Explore):
        explored.append(step.batch_size)
        life.complete(life.dispatch(step.batch_size), 10.0)
    assert explored == [32, 64, 128]
    assert step == (32, 64, 128)


def test_exploration_waits_for_a_running_or_suspended_trial() -> None:
    life = Life(make_job((8, 16), 16))
    running = life.dispatch(16)
    assert explore(life.history) == running
    suspended = life.move(running, TrialState.SUSPENDED)
    assert explore(life.history) == suspended
    life.move(suspended, TrialState.ABANDONED)
    assert explore(life.history) == Explore(16, round_number=1, start=16)


def test_only_exploration_trials_count() -> None:
    life = Life(make_job((8, 16), 16, num_pruning_rounds=1))
    for origin in (Origin.CONCURRENT, Origin.OFFLINE):
        life.run(16, origin, TrialState.COMPLETED, 10.0)
    assert explore(life.history) == Explore(16, round_number=1, start=16)


def test_error_without_survivors_names_the_settings_to_change() -> None:
    life = Life(make_job((8, 16, 32), 16, num_pruning_rounds=3))
    life.run(16, Origin.EXPLORATION, TrialState.EXHAUSTED, 60.0)
    life.run(32, Origin.EXPLORATION, TrialState.EARLY_STOPPED, 60.0)
    with pytest.raises(NoSurvivorError) as caught:
        explore(life.history)
    for part in ("'job'", "target metric 1 ", "round 1 of 3", "from 16", "batch_sizes", "max_epochs", "beta_knob"):
        assert part in caught.value.message


def test_later_round_can_lose_the_last_survivor() -> None:
    life = Life(make_job((8, 16), 16))
    for batch_size, state in ((16, TrialState.COMPLETED), (8, TrialState.EXHAUSTED), (16, TrialState.EARLY_STOPPED)):
        life.run(batch_size, Origin.EXPLORATION, state, 60.0)
    with pytest.raises(NoSurvivorError, match="round 2 of 2, starting from 16"):
        explore(life.history)


# --- Random walks ---------------------------------------------------------------------------------------------------

# Cost of exploring a size in a round, or None if the size misses the target.
Plan = Mapping[tuple[int, int], float | None]


@st.composite
def plans(draw: st.DrawFn) -> tuple[CreatedJob, Plan]:
    sizes = tuple(sorted(draw(st.sets(st.integers(1, 512), min_size=1, max_size=6))))
    rounds = draw(st.integers(0, 3))
    # Few distinct costs, so that ties for the cheapest occur; rare failures, so that rounds get long.
    outcomes = st.sampled_from([None, 1.0, 2.0, 2.0, 3.0, 4.0])
    plan = {(size, round_number): draw(outcomes) for round_number in range(1, rounds + 1) for size in sizes}
    return make_job(sizes, draw(st.sampled_from(sizes)), num_pruning_rounds=rounds), plan


def played(job: CreatedJob, plan: Plan) -> tuple[list[int], tuple[int, ...] | None]:
    """Play the stage as nested loops; return the sizes in order, and the survivors or None if a round had none.

    This oracle uses no history: every trial ends at the moment of its request.
    """
    alive, start, order = list(job.batch_sizes), job.default_batch_size, list[int]()
    for round_number in range(1, job.num_pruning_rounds + 1):
        costs: dict[int, float] = {}
        position = alive.index(start)
        for first, stride in ((position, -1), (position + 1, +1)):
            here = first
            while 0 <= here < len(alive):
                order.append(alive[here])
                cost_j = plan[alive[here], round_number]
                if cost_j is None:
                    break
                costs[alive[here]] = cost_j
                here += stride
        if not costs:
            return order, None
        start = min(costs, key=costs.__getitem__)
        alive = [size for size in alive if size in costs]
    return order, tuple(alive)


def counted(life: Life) -> list[TrialRecord]:
    return [t for t in life.trials if t.origin is Origin.EXPLORATION and t.state not in UNCOUNTED]


def lived(job: CreatedJob, plan: Plan, random: Random) -> tuple[Life, tuple[int, ...] | None]:
    """Play the stage through the policy: requests and endings in random order, and some crashes."""
    life, running, crashes_left = Life(job), list[TrialRecord](), 8
    while True:
        if not running or (len(running) < 4 and random.random() < 0.5):
            try:
                trial = life.ask()
            except NoSurvivorError:
                return life, None
            if trial.origin is Origin.BANDIT:
                survivors = explore(life.history)
                assert isinstance(survivors, tuple)
                return life, survivors
            running.append(trial)
            continue
        trial = running.pop(random.randrange(len(running)))
        if crashes_left and random.random() < 0.25:
            crashes_left -= 1
            life.move(trial, random.choice(sorted(UNCOUNTED)))
        elif trial.origin is Origin.CONCURRENT:
            concurrent: list[Outcome] = [0.5, 5.0, TrialState.EXHAUSTED]
            end(life, trial, random.choice(concurrent))
        else:
            round_number = sum(earlier.batch_size == trial.batch_size for earlier in counted(life))
            cost_j = plan[trial.batch_size, round_number]
            end(life, trial, random.choice(DID_NOT_REACH) if cost_j is None else cost_j)


@given(plans(), st.randoms(use_true_random=False))
@settings(max_examples=examples(300), deadline=None)
def test_crashes_and_concurrency_do_not_change_the_exploration(case: tuple[CreatedJob, Plan], random: Random) -> None:
    job, plan = case
    life, survivors = lived(job, plan, random)
    assert ([trial.batch_size for trial in counted(life)], survivors) == played(job, plan)
