"""What policy `gp_voi` decides, on jobs whose costs are known here and not to it."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Sequence
from dataclasses import asdict, replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bso_server.core.gp_voi.beliefs import Belief, Outcome, Streak, after_outcome, posterior_of
from bso_server.core.gp_voi.constants import CONSTANTS
from bso_server.core.gp_voi.decisions import _candidates
from bso_server.core.gp_voi.forecast import Forecast, beliefs_of
from bso_server.core.model import EpochBound, TrialRecord
from bso_server.core.policy import stop_rule, suggest
from bso_server.core.statistics import WeightedStatistics
from bso_server.errors import NoSurvivorError
from tests.support.histories import Life, make_job
from tests.support.properties import examples
from zeus_plugins.protocol import EndReason, Origin, PolicyName, StopRule, TrialState

SIZES = (8, 16, 32, 64, 128)


def new_life(batch_sizes: tuple[int, ...] = SIZES, default: int = 64, **fields: object) -> Life:
    return Life(make_job(batch_sizes, default, **{"max_epochs": 50, "policy": PolicyName.GP_VOI, **fields}))


def run(
    life: Life, trial: TrialRecord, needed: float, epoch_j: float = 10.0, startup: float = 1.0, step: float = 1.0
) -> TrialRecord:
    """Let a trial run that needs so many epochs, each of this cost, the first of `startup` times that."""
    number, epoch = trial.trial_number, 0.0
    while True:
        epoch = round(epoch + step, 6)
        cost_j = epoch_j * (epoch + (startup - 1) * step)
        if life.report(life.trials[number - 1], cost_j, epoch=epoch, metric=float(epoch >= needed)).stop:
            return life.trials[number - 1]


def recur(life: Life, times: int, needed: Callable[[int], float], epoch_j: Callable[[int], float]) -> list[int]:
    """Trials, one after another, until so many have reached the target: their sizes."""
    sizes: list[int] = []
    reached = 0
    while reached < times:
        trial = life.ask()
        sizes.append(trial.batch_size)
        reached += run(life, trial, needed(trial.batch_size), epoch_j(trial.batch_size)).state is TrialState.COMPLETED
    return sizes


# --- Which size -------------------------------------------------------------------------------------------------------


def test_until_one_reaches_the_target_sizes_are_tried_from_the_default_on() -> None:
    life = new_life()
    for expected in (64, 32, 128, 16, 8, 64, 32):
        trial = life.ask()
        assert (trial.batch_size, trial.origin) == (expected, Origin.EXPLORATION)
        assert run(life, trial, needed=math.inf).state is TrialState.EXHAUSTED
    assert suggest(life.history, life.rng).reason == (
        "no run has reached the target yet: 128 is near your default, 64 [7 trials missed it, those at 128 least often]"
    )


def test_the_cheapest_size_is_found_and_kept() -> None:
    needed, epoch_j = {8: 30, 16: 12, 32: 10, 64: 14, 128: 30}, {8: 60, 16: 40, 32: 25, 64: 20, 128: 18}
    life = new_life()
    sizes = recur(life, 30, needed.__getitem__, epoch_j.__getitem__)
    assert sizes[0] == 64
    assert sizes[10:] == [32] * len(sizes[10:])
    assert len(sizes) <= 34


def test_a_try_is_at_most_an_octave_from_a_size_that_reaches_the_target() -> None:
    life = new_life((1, 2, 4, 8, 64, 70, 80, 512), default=64)
    run(life, life.ask(), needed=10)
    # 80 is within an octave; 8 is three octaves away, but beside 64. 512 and 4 are neither.
    tried: set[int] = set()
    while len(life.trials) < 12:
        trial = life.ask()
        tried.add(trial.batch_size)
        run(life, trial, needed=math.inf if trial.batch_size != 64 else 10)
    assert tried == {8, 64, 80}


def test_where_costs_fall_from_the_default_on_tries_may_go_two_octaves() -> None:
    life = new_life((7, 14, 28, 56, 64, 100, 130, 200), default=64)
    run(life, life.ask(), needed=20)
    run(life, life.dispatch(56), needed=10)
    history = life.history
    forecast = Forecast.of(history, beliefs_of(history, ()), ())
    # 28 and 100 are within an octave, 14 two octaves beyond 56. 130 is nearer to 56 than that, but on the other side.
    assert [history.job.batch_sizes[index] for index in _candidates(history, forecast)] == [14, 28, 64, 100]


def test_after_a_try_that_was_stopped_comes_the_incumbent() -> None:
    life = new_life()
    run(life, life.ask(), needed=10)
    trial = life.ask()
    assert (trial.batch_size, trial.origin) == (32, Origin.EXPLORATION)
    assert run(life, trial, needed=math.inf).state is TrialState.EARLY_STOPPED
    again = life.ask()
    assert (again.batch_size, again.origin) == (64, Origin.INCUMBENT)
    assert run(life, again, needed=10).state is TrialState.COMPLETED
    assert life.ask().origin is Origin.EXPLORATION


def test_sizes_that_ran_out_of_memory_are_neither_tried_nor_counted_on() -> None:
    life = new_life()
    run(life, life.ask(), needed=10)
    trial = life.dispatch(128)
    life.trials[-1] = replace(life.move(trial, TrialState.INFEASIBLE), end_reason=EndReason.OUT_OF_MEMORY)
    sizes = recur(life, 12, lambda _: 10, lambda size: 1000 / size)
    assert 128 not in sizes
    assert sizes[-1] == 64

    trial = life.dispatch(16)
    life.trials[-1] = replace(life.move(trial, TrialState.INFEASIBLE), end_reason=EndReason.OUT_OF_MEMORY)
    trial = life.ask()
    # Nothing that still fits is known to reach the target, but much is known of the others.
    assert (trial.batch_size, trial.origin) == (8, Origin.EXPLORATION)
    life.trials[-1] = replace(life.move(trial, TrialState.INFEASIBLE), end_reason=EndReason.OUT_OF_MEMORY)
    with pytest.raises(NoSurvivorError, match="smaller batch_sizes"):
        life.ask()


def test_a_size_that_crashed_too_often_is_left_out_and_its_neighbours_are_near_each_other() -> None:
    life = new_life((8, 64, 512), default=8)
    run(life, life.ask(), needed=10)
    trial = life.dispatch(64)
    life.trials[-1] = replace(life.move(trial, TrialState.INFEASIBLE), end_reason=EndReason.CRASHED)
    assert life.ask().batch_size == 512


def test_trials_under_way_count_as_if_they_had_gone_as_expected() -> None:
    life = new_life()
    run(life, life.ask(), needed=10)
    first = life.ask()
    assert first.origin is Origin.EXPLORATION
    asked = [life.ask() for _ in range(6)]
    # What the first tries are going to tell need not be found out again.
    assert [trial.batch_size for trial in (first, *asked)] == [32, 128, 128, 32, 64, 64, 64]
    # Once they are given up, as if they had never been.
    alone = new_life()
    run(alone, alone.ask(), needed=10)
    for trial in (first, *asked):
        life.move(life.trials[trial.trial_number - 1], TrialState.ABANDONED)
    assert suggest(life.history, life.rng) == suggest(alone.history, alone.rng)


def test_before_anything_is_known_all_get_the_default() -> None:
    life = new_life()
    assert [life.ask().batch_size for _ in range(3)] == [64, 64, 64]


def test_a_suspended_trial_counts_as_under_way() -> None:
    life = new_life()
    run(life, life.ask(), needed=10)
    trial = life.ask()
    running = suggest(life.history, life.rng)
    life.move(trial, TrialState.SUSPENDED)
    assert suggest(life.history, life.rng) == running


def test_what_a_running_trial_says_of_its_epochs_is_used_at_once() -> None:
    life = new_life((32, 64), default=64)
    run(life, life.ask(), needed=10)
    trial = life.ask()
    assert trial.batch_size == 32
    before = suggest(life.history, life.rng).reason
    life.report(trial, 1.0, epoch=1, metric=0.0)
    assert suggest(life.history, life.rng).reason == before  # with its start-up, maybe
    life.report(trial, 2.0, epoch=2, metric=0.0)
    assert suggest(life.history, life.rng).reason != before


def test_offline_trials_teach_as_others_do() -> None:
    life = new_life()
    run(life, life.dispatch(16, Origin.OFFLINE), needed=10, epoch_j=10)
    trial = life.ask()
    assert (trial.batch_size, trial.origin) in {(8, Origin.EXPLORATION), (32, Origin.EXPLORATION)}
    assert run(life, life.dispatch(8, Origin.OFFLINE), needed=math.inf).state is TrialState.EARLY_STOPPED
    assert life.history.arms[8].belief.observed.weight > 0


def test_a_crashed_trial_tells_what_an_epoch_costs() -> None:
    life = new_life()
    run(life, life.ask(), needed=10)
    trial = life.dispatch(32)
    life.report(trial, 10.0, epoch=1, metric=0.0)
    life.report(trial, 21.0, epoch=2, metric=0.0)
    life.move(life.trials[-1], TrialState.FAILED, cost_j=21.0)
    belief = life.history.arms[32].belief
    assert belief.costs.mean == pytest.approx(math.log(11))
    # One report after the first: r = 3.
    assert belief == Belief(costs=WeightedStatistics(1 / 4, belief.costs.mean, 0.0), are_costs_guessed=False)


def test_the_default_may_be_another_in_a_new_registration() -> None:
    life = new_life()
    recur(life, 8, {8: 30, 16: 12, 32: 10, 64: 14, 128: 30}.__getitem__, lambda _: 10)
    before = suggest(life.history, life.rng)
    life.job = life.job.model_copy(update={"default_batch_size": 8})
    assert suggest(life.history, life.rng) == before


@given(st.integers(0, 2**32))
@settings(max_examples=examples(10), deadline=None)
def test_a_decision_follows_from_the_history_alone(seed: int) -> None:
    rng = np.random.default_rng(seed)
    life = new_life()
    for _ in range(8):
        run(life, life.ask(), needed=float(rng.integers(5, 60)), epoch_j=float(rng.uniform(5, 20)))
    assert suggest(life.history, np.random.default_rng(1)) == suggest(life.history, np.random.default_rng(2))


def test_reasons_have_the_numbers_in_them() -> None:
    life = new_life()
    run(life, life.ask(), needed=10)
    reason = suggest(life.history, life.rng).reason
    # Ten epochs of 10 J; a percent more for failures, and a little as the mean of a log-normal cost.
    for part in (
        "tried 32: could be cheaper than 64 (chance ",
        " %) [expected cost ",
        " J at 32, 101.7 J at 64;",
        "chance to cost less 0.",
        "expected loss of",
    ):
        assert part in reason
    recur(life, 40, {8: 50, 16: 40, 32: 30, 64: 10, 128: 30}.__getitem__, lambda _: 10)
    assert suggest(life.history, life.rng).reason.startswith("best so far; a try of 128 would not pay [expected cost ")
    run(life, life.dispatch(32), needed=math.inf)
    reason = suggest(life.history, life.rng).reason
    assert reason.startswith("best so far, after a run that missed the target [expected cost ")
    assert reason.endswith(" J; 1 missed it in a row]")


# --- When a trial is stopped ------------------------------------------------------------------------------------------


def test_nothing_is_bounded_until_a_size_is_known_to_reach_the_target() -> None:
    life = new_life()
    trial = life.ask()
    assert trial.bound is None
    assert stop_rule(life.job, trial, None) == StopRule(max_epochs=50)
    life.report(trial, 10.0, epoch=1, metric=0.0)
    assert life.trials[-1].bound == EpochBound(50, "all that max_epochs allows")


def test_the_incumbent_has_twice_the_epochs_that_it_is_expected_to_need() -> None:
    life = new_life()
    run(life, life.ask(), needed=10)
    trial = replace(life.dispatch(64), origin=Origin.INCUMBENT)
    life.trials[-1] = trial
    life.report(trial, 10.0, epoch=1, metric=0.0)
    trial = life.trials[-1]
    assert trial.bound == EpochBound(20, "2 times the epochs that it should need [10]")
    assert stop_rule(life.job, trial, 1.0) == StopRule(max_epochs=20)
    ended = run(life, trial, needed=math.inf)
    assert (ended.state, ended.epoch) == (TrialState.EARLY_STOPPED, 20)
    assert life.history.arms[64].belief.failures == 1
    assert life.ask().bound == EpochBound(20, "2 times the epochs that it should need [10]")
    # From the second miss in a row on, it gets twice as many each time.
    life.move(life.trials[-1], TrialState.ABANDONED)
    assert run(life, life.dispatch(8), needed=math.inf, epoch_j=1000).epoch <= 2
    bound = life.ask().bound
    assert bound is not None
    assert bound.reason.startswith("4 times the epochs that it should need [10")


def test_a_hopeless_try_is_stopped_by_its_first_report_if_start_up_is_known() -> None:
    life = new_life()
    run(life, life.ask(), needed=10, startup=2.0)
    trial = life.ask()
    assert (trial.batch_size, trial.bound) == (32, None)
    # Twice what an epoch costs at 64, but so was its first.
    assert not life.report(trial, 20.0, epoch=1, metric=0.0).stop
    assert life.trials[-1].bound is None
    life.move(life.trials[-1], TrialState.ABANDONED)

    trial = life.ask()
    verdict = life.report(trial, 2000.0, epoch=1, metric=0.0)
    assert (verdict.reason, verdict.state) == (EndReason.EPOCH_BOUND_REACHED, TrialState.EARLY_STOPPED)
    assert "after 1 epochs" in verdict.message
    # What an epoch costs is then guessed from that, and the next run of the size has the last word.
    guessed = life.history.arms[32].belief
    assert guessed.costs.mean == pytest.approx(math.log(1000.0))
    assert (guessed.costs.weight, guessed.are_costs_guessed) == (CONSTANTS.first_epoch_weight, True)
    run(life, life.dispatch(32), needed=10, epoch_j=11)
    known = life.history.arms[32].belief
    assert (known.costs.mean, known.costs.weight) == (pytest.approx(math.log(11)), 9 / 12)
    assert life.history.arms[64].belief.costs.mean == pytest.approx(math.log(10))


def test_nothing_is_stopped_by_its_first_report_alone_if_start_up_is_not_known() -> None:
    life = new_life()
    run(life, life.ask(), needed=1)  # one report, which does not tell start-up from epochs
    trial = life.ask()
    assert not life.report(trial, 10_000.0, epoch=1, metric=0.0).stop
    assert life.report(trial, 20_000.0, epoch=2, metric=0.0).reason is EndReason.EPOCH_BOUND_REACHED


@pytest.mark.parametrize(("epoch_j", "stops"), [(32.0, False), (36.0, True)])
def test_a_first_report_stops_a_trial_only_if_less_would_do(epoch_j: float, stops: bool) -> None:
    life = new_life(batch_sizes=(32, 64))
    run(life, life.ask(), needed=4, epoch_j=20)
    # The first one could be worth it if start-up takes a fifth of that here.
    assert life.report(life.ask(), epoch_j, epoch=1, metric=0.0).stop is stops


def test_whoever_was_sent_as_the_incumbent_is_treated_as_one() -> None:
    life = new_life()
    run(life, life.ask(), needed=10, epoch_j=100)
    trial = replace(life.dispatch(64), origin=Origin.INCUMBENT)
    life.trials[-1] = trial
    # Meanwhile another size turns out to cost a tenth.
    run(life, life.dispatch(32), needed=10, epoch_j=10)
    life.report(trial, 100.0, epoch=1, metric=0.0)
    bound = life.trials[1].bound
    assert bound is not None
    assert bound.reason.startswith("2 times the epochs")


def test_start_up_is_not_taken_for_the_cost_of_epochs() -> None:
    life = new_life()
    run(life, life.ask(), needed=10, startup=1.0)
    trial = life.ask()
    # Four times the incumbent's; the second epoch costs the same as the incumbent's.
    assert not life.report(trial, 40.0, epoch=1, metric=0.0).stop or life.trials[-1].epoch == 1
    life = new_life()
    life.trials.clear()
    trial = life.dispatch(64)
    life.report(trial, 500.0, epoch=1, metric=0.0)
    life.report(trial, 510.0, epoch=2, metric=0.0)
    life.report(trial, 590.0, epoch=10, metric=1.0)
    belief = life.history.arms[64].belief
    assert belief.costs.mean == pytest.approx(math.log(10.0))
    assert belief.log_startup == pytest.approx(math.log(50.0))
    # Later trials of the size change the cost of its epochs, not its start-up.
    run(life, life.dispatch(64), needed=10, epoch_j=11, startup=3)
    belief = life.history.arms[64].belief
    # Two later reports in the first trial, nine in the second.
    weights = [2 / 5, 9 / 12]
    assert belief.costs.mean == pytest.approx(np.average(np.log([10.0, 11.0]), weights=weights))
    assert belief.log_startup == pytest.approx(math.log(50.0))


def test_a_bound_is_fixed_by_the_second_report_and_stays() -> None:
    life = new_life()
    run(life, life.ask(), needed=10)
    trial = life.ask()
    life.report(trial, 10.0, epoch=1, metric=0.0)
    life.report(trial, 20.0, epoch=2, metric=0.0)
    bound = life.trials[-1].bound
    assert bound is not None
    assert 2 < bound.epochs < 50
    life.report(trial, 500.0, epoch=3, metric=0.0)
    assert life.trials[-1].bound == bound


def test_a_run_to_the_target_counts_whatever_it_cost() -> None:
    life = new_life()
    run(life, life.ask(), needed=10)
    trial = life.ask()
    assert life.report(trial, 1e6, epoch=1, metric=1.0).converged


def test_without_beta_nothing_is_stopped_early() -> None:
    life = new_life(beta_knob=None)
    for _ in range(5):
        trial = life.ask()
        assert run(life, trial, needed=10 if trial.batch_size == 64 else math.inf).state in {
            TrialState.COMPLETED,
            TrialState.EXHAUSTED,
        }


def test_validations_within_epochs() -> None:
    """A job that is done within its first epoch has an optimum like any other."""
    needed, epoch_j = {8: 0.6, 16: 0.3, 32: 0.2, 64: 0.4, 128: 0.9}, 100.0
    life = new_life(max_epochs=3)
    reached = 0
    while reached < 20:
        trial = life.ask()
        reached += run(life, trial, needed[trial.batch_size], epoch_j=epoch_j, step=0.05).state is TrialState.COMPLETED
    assert [trial.batch_size for trial in life.trials[-8:]] == [32] * 8


# --- What is learned --------------------------------------------------------------------------------------------------


def outcome(index: int, epochs: float, *, reached: bool = True, conclusive: bool = False) -> Outcome:
    return Outcome(index, epochs, math.log(10), math.log(10), 3, 1.0, reached, conclusive)


def learned(outcomes: Sequence[Outcome], sizes: tuple[int, ...] = SIZES) -> tuple[Belief, ...]:
    beliefs: tuple[Belief, ...] = tuple(Belief() for _ in sizes)
    for each in outcomes:
        beliefs = after_outcome(sizes, beliefs, each)
    return beliefs


def test_a_success_is_learned_and_fades() -> None:
    beliefs = learned([outcome(3, 10)])
    fade = CONSTANTS.forgetting
    assert beliefs[3].observed.weight == beliefs[3].exact.weight == fade
    assert beliefs[3].observed.mean == math.log(10)
    assert (beliefs[3].converged, beliefs[3].tried) == (True, True)
    assert beliefs[3].costs == WeightedStatistics(0.5, math.log(10), 0.0)
    assert beliefs[0] == Belief()
    beliefs = learned([outcome(3, 10), outcome(2, 10)])
    assert beliefs[3].observed.weight == pytest.approx(fade**2)


def test_a_stopped_run_shifts_the_belief_upwards_and_takes_the_place_of_a_run() -> None:
    before = learned([outcome(3, 10), outcome(2, 10)])
    after = after_outcome(SIZES, before, outcome(2, 20, reached=False))
    assert after[2].observed.weight > before[2].observed.weight
    assert after[2].exact == before[2].exact
    assert (after[2].missed, after[2].failures, after[3].missed) == (1, 0, 0)
    shift = posterior_of(SIZES, after).expected.mean - posterior_of(SIZES, before).expected.mean
    assert shift[2] > 0.1
    # A run that was stopped long before it was expected to end says next to nothing.
    early = after_outcome(SIZES, before, outcome(2, 2, reached=False))
    assert early[2].observed == before[2].observed


def test_a_run_that_fails_counts_as_bad_luck_until_there_are_too_many() -> None:
    beliefs = learned([outcome(3, 10)])
    chance = beliefs[3].failure_chance
    assert chance == pytest.approx(0.02 / (0.02 + beliefs[3].observed.weight + 1))
    once = after_outcome(SIZES, beliefs, outcome(3, 50, reached=False, conclusive=True))
    assert (once[3].failures, once[3].streak, once[3].converged) == (1.0, Streak(1, chance), True)
    assert once[3].observed == beliefs[3].observed
    assert once[3].failure_chance > 0.3
    # 1 % twice in a row is less probable than a change of the job.
    assert chance**2 < CONSTANTS.streak_chance
    twice = after_outcome(SIZES, once, outcome(3, 50, reached=False, conclusive=True))
    assert (twice[3].converged, twice[3].tried, twice[3].streak) == (False, True, Streak())
    assert twice[3].exact.weight == pytest.approx(CONSTANTS.kept_weight)
    # Where more successes have been seen, one failure is already less probable than that.
    assert not after_outcome(SIZES, learned([outcome(3, 10)] * 4), outcome(3, 50, reached=False, conclusive=True))[
        3
    ].converged


def test_what_epochs_cost_is_the_mean_of_the_latest_runs() -> None:
    costing = [replace(outcome(3, 10), log_cost=float(number)) for number in range(30)]
    costs = learned(costing[:3])[3].costs
    assert (costs.weight, costs.mean) == (1.5, pytest.approx(1.0))
    # One that was reported on three times as often weighs 9/12 instead of 3/6.
    often = replace(costing[3], later_reports=9)
    assert learned([*costing[:3], often])[3].costs.mean == pytest.approx((0.5 * (0 + 1 + 2) + 0.75 * 3) / 2.25)
    costs = learned(costing)[3].costs
    assert costs.weight == pytest.approx(CONSTANTS.most_cost_runs)
    # From the sixteenth on, each takes a sixteenth of the weight of all before it.
    weights = [(15 / 16) ** min(29 - number, 14) for number in range(30)]
    assert costs.mean == pytest.approx(np.average(range(30), weights=weights))


def test_first_epochs_are_all_that_is_known_of_some_jobs() -> None:
    only_first = [replace(outcome(3, 1), log_cost=None, log_first_cost=value) for value in (2.0, 3.0)]
    belief = learned(only_first)[3]
    assert (belief.costs.weight, belief.costs.mean, belief.are_costs_guessed) == (2.0, 2.5, True)
    assert belief.log_startup is None


def test_an_unlucky_first_epoch_does_not_bar_a_size_for_ever() -> None:
    """The cheapest size is tried while something else keeps the machine busy, and is given up after one epoch."""
    needed, epoch_j = {16: 14, 32: 10, 64: 14, 128: 20}, {16: 11.0, 32: 10.0, 64: 9.5, 128: 9.0}
    life = new_life((16, 32, 64, 128), max_epochs=100)
    noise = np.random.default_rng(0)

    def noisy(size: int) -> float:
        return epoch_j[size] * float(noise.lognormal(0, 0.15))

    run(life, life.ask(), needed[64], epoch_j[64])
    trial = life.ask()
    assert trial.batch_size == 32
    assert run(life, trial, needed[32], 5 * epoch_j[32]).epoch == 1
    sizes = recur(life, 40, needed.__getitem__, noisy)
    assert sizes[-5:] == [32] * 5


def test_a_success_ends_a_streak() -> None:
    # Seldom, so that it is a streak of failures with a large chance, and no sign of a change.
    beliefs = learned([outcome(3, 10)])
    beliefs = tuple(replace(each, failures=2.0) if each.converged else each for each in beliefs)
    beliefs = after_outcome(SIZES, beliefs, outcome(3, 50, reached=False, conclusive=True))
    assert beliefs[3].streak.length == 1
    assert after_outcome(SIZES, beliefs, outcome(3, 10))[3].streak == Streak()


def test_surprises_mean_that_the_job_has_changed() -> None:
    beliefs = learned([*[outcome(3, 10), outcome(2, 12)] * 4])
    assert beliefs[2].tried
    # About five σ: once is luck, twice in a row is a change.
    surprising = outcome(3, 14)
    once = after_outcome(SIZES, beliefs, surprising)
    assert CONSTANTS.drift_sds < once[3].surprise < 2 * CONSTANTS.drift_sds
    assert once[2].tried
    assert after_outcome(SIZES, once, outcome(3, 10))[2].tried
    twice = after_outcome(SIZES, once, outcome(3, 16))
    assert [belief.tried for belief in twice] == [False, False, False, True, False]
    assert twice[2].observed.weight == pytest.approx(CONSTANTS.kept_weight * CONSTANTS.forgetting)
    assert twice[3].observed.weight == pytest.approx((CONSTANTS.kept_weight + 1) * CONSTANTS.forgetting)
    # One of more than six σ is a change at once.
    assert not after_outcome(SIZES, beliefs, outcome(3, 16.5))[2].tried


def test_after_a_change_another_size_is_found() -> None:
    life = new_life()
    recur(life, 25, {8: 60, 16: 40, 32: 20, 64: 10, 128: 8}.__getitem__, lambda _: 10)
    assert life.trials[-1].batch_size == 128
    sizes = recur(life, 25, {8: 8, 16: 10, 32: 20, 64: 40, 128: 45}.__getitem__, lambda _: 10)
    assert sizes[-5:] == [8] * 5


outcomes = st.builds(
    Outcome,
    index=st.integers(0, 4),
    epochs=st.one_of(st.integers(1, 1000), st.floats(1e-3, 1e6)),
    log_first_cost=st.one_of(st.none(), st.floats(-20, 40)),
    log_cost=st.one_of(st.none(), st.floats(-20, 40)),
    later_reports=st.integers(1, 1000),
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
        assert 0 <= belief.costs.weight <= CONSTANTS.most_cost_runs * (1 + 1e-9)
        assert belief.costs.squared_deviations >= -1e-9
    if any(belief.is_observed for belief in beliefs):
        posterior = posterior_of(SIZES, beliefs)
        assert np.isfinite(posterior.expected.mean).all()
        assert (np.diag(posterior.expected.covariance) > -1e-6).all()


@given(
    costs=st.lists(st.floats(1e-300, 1e15), min_size=1, max_size=6),
    epochs=st.lists(st.floats(1e-300, 10), min_size=6, max_size=6),
    metrics=st.lists(st.sampled_from([0.0, 1.0]), min_size=6, max_size=6),
)
@settings(max_examples=examples(50), deadline=None)
def test_absurd_numbers_raise_nothing(costs: list[float], epochs: list[float], metrics: list[float]) -> None:
    """In databases that took them before they were told from others."""
    life = new_life((8, 16, 32), 16)
    for cost_j, epoch, metric in zip(costs, epochs, metrics, strict=False):
        life.report(life.ask(), cost_j, epoch=epoch, metric=metric)
    assert life.ask().batch_size in (8, 16, 32)
