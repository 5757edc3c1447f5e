"""Decisions of policy `gp_voi` on jobs with costs that the tests know and the policy does not."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bso_server.core.gp_voi.beliefs import Belief
from bso_server.core.gp_voi.forecast import Forecast, beliefs_of
from bso_server.core.gp_voi.run_costs import CostRun
from bso_server.core.gp_voi.value import bound, worths
from bso_server.core.model import EpochBound, TrialRecord
from bso_server.core.policy import expectations, find, stop_rule, suggest
from bso_server.errors import InvalidJobError, NoSurvivorError
from tests.support.histories import Life, make_job, new_life, run
from tests.support.properties import examples
from zeus_plugins.protocol import GP_VOI, EndReason, Origin, StopRule, TrialState


def begun_life(batch_sizes: tuple[int, ...] = (8, 16, 32, 64, 128), default: int = 64) -> Life:
    """Return a job in which the default size has reached the target once, in ten epochs."""
    life = new_life(batch_sizes, default)
    run(life, life.ask(), needed=10)
    return life


def bound_of(trial: TrialRecord) -> EpochBound:
    assert trial.bound is not None
    return trial.bound


def recur(life: Life, times: int, needed: Callable[[int], float], epoch_j: Callable[[int], float]) -> list[int]:
    """Run trials one after another until `times` of them have reached the target; return their sizes."""
    sizes: list[int] = []
    reached = 0
    while reached < times:
        trial = life.ask()
        sizes.append(trial.batch_size)
        reached += run(life, trial, needed(trial.batch_size), epoch_j(trial.batch_size)).state is TrialState.COMPLETED
    return sizes


# --- Choice of the size -----------------------------------------------------------------------------------------------


def test_before_first_success_sizes_are_tried_outwards_from_the_default() -> None:
    life = new_life()
    for expected in (64, 32, 128, 16, 8, 64, 64):
        trial = life.ask()
        assert (trial.batch_size, trial.origin) == (expected, Origin.EXPLORATION)
        assert run(life, trial, needed=math.inf).state is TrialState.EXHAUSTED
    assert suggest(life.history, life.rng).reason == (
        "every batch size has missed the target: lower the target or raise max_epochs"
    )


def test_job_with_more_sizes_than_a_decision_considers_is_refused() -> None:
    check = find(GP_VOI).check
    check(make_job(tuple(range(1, 65)), 8, policy=GP_VOI))
    with pytest.raises(InvalidJobError, match="at most 64 batch sizes, and the job has 65: name fewer") as caught:
        check(make_job(tuple(range(1, 66)), 8, policy=GP_VOI))
    assert caught.value.field == "batch_sizes"


def test_far_size_is_reached_in_a_single_step_if_costs_fall_on_the_way() -> None:
    life = new_life((8, 16, 32, 64, 128, 256, 512, 1024), default=8, max_epochs=100)
    # Equal epochs; doubling the size halves the cost of an epoch.
    sizes = recur(life, 10, lambda _: 20, lambda size: 8000 / size)
    assert sizes[0] == 8
    assert sizes[1] >= 64
    assert sizes[-3:] == [1024] * 3


def test_incumbent_follows_two_missed_runs() -> None:
    life = begun_life()
    trial = life.ask()
    assert (trial.batch_size != 64, trial.origin) == (True, Origin.EXPLORATION)
    assert run(life, trial, needed=math.inf).state is TrialState.EARLY_STOPPED
    # Another size is worth more than the incumbent, once.
    again = life.ask()
    assert (again.batch_size != 64, again.origin) == (True, Origin.EXPLORATION)
    assert run(life, again, needed=math.inf).state is TrialState.EARLY_STOPPED
    again = life.ask()
    assert (again.batch_size, again.origin) == (64, Origin.INCUMBENT)
    assert life.reason.endswith("nothing new after 2 runs that missed the target")
    assert run(life, again, needed=10).state is TrialState.COMPLETED


def test_sizes_out_of_memory_are_neither_tried_nor_considered() -> None:
    life = begun_life()
    life.exclude(life.dispatch(128))
    sizes = recur(life, 12, lambda _: 10, lambda size: 1000 / size)
    assert 128 not in sizes
    assert sizes[-1] == 64

    life.exclude(life.dispatch(16))
    trial = life.ask()
    # No size that still fits is known to reach the target, but the evidence of the excluded sizes helps.
    assert (trial.batch_size, trial.origin) == (8, Origin.EXPLORATION)
    life.exclude(trial)
    with pytest.raises(NoSurvivorError, match="smaller batch_sizes"):
        life.ask()


def test_size_excluded_for_crashes_makes_the_neighbours_adjacent() -> None:
    life = begun_life((8, 64, 512), default=8)
    life.exclude(life.dispatch(64), EndReason.CRASHED)
    again = life.ask()
    assert (again.batch_size, life.reason.rpartition("; ")[2]) == (8, "nothing new after a crash")
    run(life, again, needed=10)
    assert life.ask().batch_size == 512


def test_running_trials_count_as_ended_as_expected() -> None:
    life = begun_life()
    first = life.ask()
    assert first.origin is Origin.EXPLORATION
    asked = [life.ask() for _ in range(8)]
    # Running first trials will answer the question, so another trial of these sizes would be wasted.
    assert {trial.origin for trial in asked[3:]} == {Origin.INCUMBENT}
    assert suggest(life.history, life.rng).reason.endswith("; 4 trials of other sizes are under way")
    # Once they are given up, as if they had never been, but for the numbers of trials.
    for trial in (first, *asked):
        life.move(life.trials[trial.trial_number - 1], TrialState.ABANDONED)
    again = life.ask()
    assert (again.batch_size, again.origin) == (first.batch_size, Origin.EXPLORATION)


def test_before_any_result_all_concurrent_trials_get_the_default() -> None:
    life = new_life()
    assert [life.ask().batch_size for _ in range(3)] == [64, 64, 64]


def test_suspended_trial_counts_as_running() -> None:
    life = begun_life()
    trial = life.ask()
    running = suggest(life.history, life.rng)
    life.move(trial, TrialState.SUSPENDED)
    assert suggest(life.history, life.rng) == running


def test_reports_of_a_running_trial_change_the_cost_of_epochs_at_once() -> None:
    life = begun_life((32, 64))
    trial = life.dispatch(32)

    def cost_of_an_epoch() -> float:
        history = life.history
        forecast = Forecast.of(history, beliefs_of(history, history.in_flight), ())
        return math.exp(forecast.epoch_costs.mean[0])

    before = cost_of_an_epoch()
    life.report(trial, 15.0, epoch=1, metric=0.0)
    assert cost_of_an_epoch() == before  # perhaps including its start-up
    life.report(trial, 17.0, epoch=2, metric=0.0)
    assert cost_of_an_epoch() < 0.7 * before


def test_offline_trials_teach_like_dispatched_trials() -> None:
    life = new_life()
    run(life, life.dispatch(16, Origin.OFFLINE), needed=10, epoch_j=10)
    trial = life.ask()
    assert (trial.batch_size != 16, trial.origin) == (True, Origin.EXPLORATION)
    assert run(life, life.dispatch(8, Origin.OFFLINE), needed=math.inf).state is TrialState.EARLY_STOPPED
    assert life.belief(8).observed.weight > 0


def test_crashed_trial_shows_the_cost_of_an_epoch() -> None:
    life = begun_life()
    for second_j in (11.0, 90.0):
        trial = life.dispatch(32)
        life.report(trial, 10.0, epoch=1, metric=0.0)
        life.report(trial, 10.0 + second_j, epoch=2, metric=0.0)
        life.move(life.trials[-1], TrialState.FAILED, cost_j=10.0 + second_j)
        # The second crash adds no evidence to the first.
        belief = life.belief(32)
        assert belief._replace(crashed=0) == Belief(costs=belief.costs, are_costs_guessed=False)
        assert belief.costs == (pytest.approx(CostRun(math.log(11), 1, number=belief.costs[0].number)),)


def test_new_registration_may_change_the_default() -> None:
    life = new_life()
    recur(life, 8, {8: 30, 16: 12, 32: 10, 64: 14, 128: 30}.__getitem__, lambda _: 10)
    before = suggest(life.history, life.rng)
    life.job = life.job.model_copy(update={"default_batch_size": 8})
    after = suggest(life.history, life.rng)
    assert (after.batch_size, after.origin) == (before.batch_size, before.origin)


def test_reasons_count_the_misses_before_the_first_success() -> None:
    life = new_life((32, 64, 128))
    reasons = []
    for _ in range(4):
        run(life, life.ask(), needed=math.inf)
        reasons.append(suggest(life.history, life.rng).reason)
    assert reasons == [
        "one run missed the target; 32 has not been tried yet",
        "2 runs missed the target; 128 has not been tried yet",
        *["every batch size has missed the target: lower the target or raise max_epochs"] * 2,
    ]
    life.job = life.job.model_copy(update={"higher_is_better_metric": False})
    assert suggest(life.history, life.rng).reason.endswith(": raise the target or raise max_epochs")
    abandoned = new_life()
    abandoned.ask()
    assert suggest(abandoned.history, abandoned.rng).reason.endswith("the target yet; 64 is your own size")


def test_reasons_are_stated_in_plain_words() -> None:
    life = new_life((64, 128))
    assert suggest(life.history, life.rng).reason == "first run of job job"
    run(life, life.ask(), needed=10)
    # Ten epochs of 10 J; one percent more for failures, and a little for the mean of a log-normal cost.
    tried = r"a trial with about an? .* chance to beat 64, the best so far, expected 10[123] J"
    assert re.fullmatch(tried, suggest(life.history, life.rng).reason)
    for _ in range(2):
        run(life, life.dispatch(128), needed=math.inf)
    missed = r"best so far, expected 1[0-9]{2} J; nothing new after 2 runs that missed the target"
    assert re.fullmatch(missed, suggest(life.history, life.rng).reason)
    recur(life, 40, {64: 10, 128: 30}.__getitem__, lambda _: 10)
    assert suggest(life.history, life.rng).reason in {
        f"best so far, expected 100 J; {why}"
        for why in (
            "no other size is likely to beat it",
            "a trial of 128 (hardly any chance to beat it) would cost more than it is likely to save",
        )
    }
    alone = new_life((64,))
    run(alone, alone.ask(), needed=10)
    assert suggest(alone.history, alone.rng).reason.endswith("; there is no other size to try")


def test_cheapest_run_so_far_is_repeated() -> None:
    """Play real runs (epochs and joules): the first is the cheapest, against the expectation of the laws."""
    life = new_life((4, 8, 16, 32, 64, 128, 256), default=32)
    suggested = []
    for size, epochs, cost_j in (
        (32, 5, 22.4),
        (64, 10, 40.1),
        (8, 4, 31.7),
        (16, 6, 31.3),
        (8, 4, 28.4),
        (8, 6, 53.5),
    ):
        # Remove the bound, so that each trial runs to its end.
        trial = life.dispatch(size, Origin.OFFLINE).bounded_by(EpochBound(50, "all"))
        life.trials[-1] = trial
        assert run(life, trial, needed=epochs, epoch_j=cost_j / epochs).state is TrialState.COMPLETED
        suggested.append(suggest(life.history, life.rng))
    assert [each.batch_size for each in suggested[3:]] == [32, 32, 32]
    why = r"best so far, expected 2[5-9](\.[0-9])? J; .*16.*chance to beat it.*"
    assert all(re.fullmatch(why, each.reason) for each in suggested[3:])


def finished(life: Life, size: int, epochs: float, epoch_j: float = 10.0) -> None:
    """Let an unbounded run reach the target after `epochs` epochs."""
    trial = life.dispatch(size, Origin.OFFLINE).bounded_by(EpochBound(50, "all"))
    life.trials[-1] = trial
    assert run(life, trial, needed=epochs, epoch_j=epoch_j).state is TrialState.COMPLETED


def test_sizes_with_few_or_stopped_runs_are_in_doubt() -> None:
    life = new_life((8, 16, 32, 64), default=64)
    for size in (64, 64, 32):
        finished(life, size, 10)

    def stopped(size: int, epochs: int) -> None:
        life.dispatch(size)
        life.trials[-1] = life.trials[-1].bounded_by(EpochBound(epochs, "a share"))
        assert run(life, life.trials[-1], needed=math.inf).state is TrialState.EARLY_STOPPED

    def doubts() -> list[bool]:
        forecast = Forecast.of(life.history, beliefs_of(life.history, ()), ())
        return [forecast.is_in_doubt(index) for index in range(4)]

    stopped(16, 4)
    # 8 never ran, 16 was stopped after 4 epochs of 10, 32 may have been unlucky, 64 has run twice.
    assert doubts() == [True, True, True, False]
    stopped(16, 12)
    finished(life, 32, 10)
    assert doubts() == [True, False, False, False]


def test_another_run_of_the_incumbent_is_weighed_like_any_trial() -> None:
    life = new_life((16, 32), default=32)
    for size, epochs in ((32, 10), (16, 10), (32, 11)):
        finished(life, size, epochs)
    forecast = Forecast.of(life.history, beliefs_of(life.history, ()), ())
    repeat = worths(forecast, [forecast.incumbent], (0.5,))[forecast.incumbent]
    assert repeat.stop_share == math.inf
    assert repeat.value > 0
    assert abs(repeat.loss) < 0.05


# --- When a trial is stopped ------------------------------------------------------------------------------------------


def test_no_trial_is_bounded_before_a_size_has_reached_the_target() -> None:
    life = new_life()
    trial = life.ask()
    assert trial.bound is None
    assert stop_rule(life.job, trial, None) == StopRule(max_epochs=50)
    life.report(trial, 10.0, epoch=1, metric=0.0)
    assert life.trials[-1].bound == EpochBound(50, "all that max_epochs allows")


def test_incumbent_may_use_twice_the_expected_epochs() -> None:
    life = begun_life()
    life.report(life.dispatch(64, Origin.INCUMBENT), 10.0, epoch=1, metric=0.0)
    trial = life.trials[-1]
    limit = bound_of(trial)
    assert 20 <= limit.epochs <= 22
    assert limit.reason.startswith("2 times its expected epochs, 10")
    assert stop_rule(life.job, trial, 1.0) == StopRule(max_epochs=limit.epochs)
    ended = run(life, trial, needed=math.inf)
    assert (ended.state, ended.epoch) == (TrialState.EARLY_STOPPED, limit.epochs)
    assert life.belief(64).failures == 1
    life.report(life.dispatch(64, Origin.INCUMBENT), 10.0, epoch=1, metric=0.0)
    assert bound_of(life.trials[-1]) == limit
    # Misses of other sizes do not count. From its second consecutive miss on, the incumbent's bound doubles each time.
    beliefs = beliefs_of(life.history, ())
    for missed, of_other, times in ((1, 3, 2), (2, 0, 4), (3, 0, 8)):
        rows = (each._replace(missed=missed if index == 3 else of_other) for index, each in enumerate(beliefs))
        forecast = Forecast.of(life.history, tuple(rows), ())
        given = bound(life.job.model_copy(update={"max_epochs": 500}), forecast, 3, Origin.INCUMBENT)
        assert given.reason.startswith(f"{times} times its expected epochs, 10")


@pytest.mark.parametrize(("startup_s", "stops"), [(None, False), (0.5, True)])
def test_hopeless_trial_is_stopped_by_the_first_report_if_start_up_is_known(
    startup_s: float | None, stops: bool
) -> None:
    life = new_life((32, 64), default=64)
    run(life, life.ask(), needed=10)
    trial = life.dispatch(32)
    verdict = life.report(trial, 2000.0, epoch=1, metric=0.0, startup_s=startup_s)
    assert verdict.stop is stops
    if not stops:
        # A bound waits for the second report, which shows the cost of an epoch.
        assert life.trials[-1].bound is None
        assert life.report(trial, 3000.0, epoch=2, metric=0.0).reason is EndReason.EPOCH_BOUND_REACHED
        return
    assert (verdict.reason, verdict.state) == (EndReason.EPOCH_BOUND_REACHED, TrialState.EARLY_STOPPED)
    assert "after 1 epoch:" in verdict.message
    # The report took 1 s, and half of its cost is the start-up's.
    belief = life.belief(32)
    assert belief.costs == (pytest.approx(CostRun(math.log(1000.0), 1, number=trial.trial_number)),)
    assert not belief.are_costs_guessed


def test_start_up_neither_stops_a_run_nor_counts_in_the_cost_of_epochs() -> None:
    """The start-up of the trial costs as much as 40 epochs; a run of the incumbent costs 10."""
    life = new_life((32, 64), default=64)
    run(life, life.ask(), needed=10)
    trial = life.dispatch(32)
    assert not life.report(trial, 410.0, epoch=1, metric=0.0, startup_s=400 / 410).stop
    assert bound_of(life.trials[-1]).epochs > 2
    for epoch in range(2, 8):
        ended = life.report(trial, 400.0 + 10 * epoch, epoch=epoch, metric=float(epoch == 7))
    assert ended.converged
    assert life.belief(32).costs[0][:2] == pytest.approx((math.log(10.0), 7))
    assert expectations(life.history).costs[32].mean_j == pytest.approx(70, rel=0.1)


def test_trial_dispatched_as_incumbent_keeps_the_incumbents_bound() -> None:
    life = new_life()
    run(life, life.ask(), needed=10, epoch_j=100)
    trial = life.dispatch(64, Origin.INCUMBENT)
    # During this trial, another size turns out to cost a tenth.
    run(life, life.dispatch(32), needed=10, epoch_j=10)
    life.report(trial, 100.0, epoch=1, metric=0.0)
    assert bound_of(life.trials[1]).reason.startswith("2 times its expected epochs")


def test_start_up_is_not_mistaken_for_the_cost_of_epochs() -> None:
    life = new_life()
    trial = life.dispatch(64)
    life.report(trial, 500.0, epoch=1, metric=0.0)
    life.report(trial, 510.0, epoch=2, metric=0.0)
    life.report(trial, 590.0, epoch=10, metric=1.0)
    # Nine later epochs in both trials; the first trial sent them in two reports.
    assert life.belief(64).costs[-1][:4] == pytest.approx((math.log(10.0), 9, 0, 1))
    run(life, life.dispatch(64), needed=10, epoch_j=11, startup=3)
    assert life.belief(64).costs[-1][:4] == pytest.approx((math.log(11.0), 9, 0, 8))


def test_bound_is_fixed_by_the_second_report_and_stays() -> None:
    life = begun_life()
    trial = life.ask()
    life.report(trial, 10.0, epoch=1, metric=0.0)
    life.report(trial, 20.0, epoch=2, metric=0.0)
    bound = bound_of(life.trials[-1])
    assert 2 < bound.epochs < 50
    life.report(trial, 500.0, epoch=3, metric=0.0)
    assert life.trials[-1].bound == bound


def test_run_reaching_the_target_counts_at_any_cost() -> None:
    life = begun_life()
    trial = life.ask()
    assert life.report(trial, 1e6, epoch=1, metric=1.0).converged


def test_without_beta_no_trial_is_stopped_early() -> None:
    life = new_life(beta_knob=None)
    for _ in range(5):
        trial = life.ask()
        assert run(life, trial, needed=10 if trial.batch_size == 64 else math.inf).state in {
            TrialState.COMPLETED,
            TrialState.EXHAUSTED,
        }
    # A run of the incumbent that does not converge is not stopped either.
    assert run(life, life.dispatch(64, Origin.INCUMBENT), needed=math.inf).state is TrialState.EXHAUSTED


def test_job_finished_within_the_first_epoch_finds_the_cheapest_size() -> None:
    """Fractional epochs (validation within an epoch) have an optimum like whole epochs."""
    needed, epoch_j = {8: 0.6, 16: 0.3, 32: 0.2, 64: 0.4, 128: 0.9}, 100.0
    life = new_life(max_epochs=3)
    reached = 0
    while reached < 20:
        trial = life.ask()
        reached += run(life, trial, needed[trial.batch_size], epoch_j=epoch_j, step=0.05).state is TrialState.COMPLETED
    assert [trial.batch_size for trial in life.trials[-8:]] == [32] * 8


@given(
    costs=st.lists(st.floats(1e-300, 1e15), min_size=1, max_size=6),
    epochs=st.lists(st.floats(1e-300, 10), min_size=6, max_size=6),
    metrics=st.lists(st.sampled_from([0.0, 1.0]), min_size=6, max_size=6),
)
@settings(max_examples=examples(50), deadline=None)
def test_absurd_numbers_raise_no_error(costs: list[float], epochs: list[float], metrics: list[float]) -> None:
    """Databases of versions before input validation may contain such numbers."""
    life = new_life((8, 16, 32), 16)
    for cost_j, epoch, metric in zip(costs, epochs, metrics, strict=False):
        life.report(life.ask(), cost_j, epoch=epoch, metric=metric)
    assert life.ask().batch_size in (8, 16, 32)
    # The memory is stored as JSON.
    json.dumps([belief._asdict() for belief in life.history.memory], allow_nan=False)


def test_expected_cost_lies_within_a_band_after_a_run() -> None:
    """A run ends at `max_epochs`: the limit ends bands, and a band that would lie beyond the limit is not shown."""
    life = new_life((8, 16, 32, 64, 128, 256, 512), max_epochs=12)
    run(life, life.ask(), needed=11)
    bands = [(cost.mean_j, *(cost.band_j or (0.0, 0.0))) for cost in expectations(life.history).costs.values()]
    assert len(bands) == 7
    assert all(low_j < mean_j < high_j for mean_j, low_j, high_j in bands)
    for _ in range(8):
        run(life, life.dispatch(512), needed=math.inf)
        run(life, life.dispatch(64), needed=11)
    far = expectations(life.history).costs[512]
    assert far.band_j is None or far.band_j[0] < far.mean_j < far.band_j[1]
