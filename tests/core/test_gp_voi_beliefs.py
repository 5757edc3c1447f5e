"""Memory of policy `gp_voi`: beliefs learned from trials, and how fast they fade."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from functools import partial, reduce

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats

from bso_server.core.gp_voi.beliefs import (
    Belief,
    Outcome,
    Streak,
    Surprises,
    after,
    after_all,
    after_outcome,
    begun,
    beliefs_with,
    posterior_of,
)
from bso_server.core.gp_voi.gaussian_process import cost_posterior, epochs_posterior
from bso_server.core.gp_voi.prior import CONSTANTS, Sizes
from bso_server.core.gp_voi.run_costs import CostRun, CostRuns, change_of, epoch_variance, run_variance, summary_of
from bso_server.core.model import Report, TrialRecord, after_other_rank, after_report, cost_deviations_j2
from tests.support.histories import make_job, new_life
from tests.support.properties import examples
from zeus_plugins.protocol import CreatedJob, GpuConfig, LearnedEpochs, Origin, TrialState, WarmStart

SIZES = Sizes((8, 16, 32, 64, 128), 3)
TRIAL = TrialRecord(trial_number=1, batch_size=64, state=TrialState.RUNNING, origin=Origin.EXPLORATION)


def outcome(index: int, epochs: float, *, reached: bool = True, conclusive: bool = False) -> Outcome:
    return Outcome(index, epochs, CostRun(math.log(10), 1), CostRun(math.log(10), epochs - 1), 1.0, reached, conclusive)


def learned(outcomes: Sequence[Outcome], sizes: Sizes = SIZES) -> tuple[Belief, ...]:
    beliefs = (Belief(),) * len(sizes.batch_sizes)
    for each in outcomes:
        beliefs = after_outcome(sizes, beliefs, each)
    return beliefs


def test_success_is_learned_and_fades() -> None:
    beliefs = learned([outcome(3, 10)])
    fade = CONSTANTS.forgetting
    assert beliefs[3].observed.weight == beliefs[3].exact.weight == fade
    assert beliefs[3].observed.mean == math.log(10)
    assert beliefs[3].converged
    assert beliefs[3].costs == (CostRun(math.log(10), 9),)
    assert beliefs[0] == Belief()
    beliefs = learned([outcome(3, 10), outcome(2, 10)])
    assert beliefs[3].observed.weight == pytest.approx(fade**2)


def test_stopped_run_shifts_the_belief_upwards_and_replaces_a_run() -> None:
    before = learned([outcome(3, 10), outcome(2, 10)])
    after = after_outcome(SIZES, before, outcome(2, 20, reached=False))
    assert after[2].observed.weight > before[2].observed.weight
    assert after[2].exact == before[2].exact
    assert (after[2].missed, after[2].failures, after[3].missed) == (1, 0, 0)
    assert (after[2].survived, after[3].survived) == (20, 0)
    shift = posterior_of(SIZES, after).mean - posterior_of(SIZES, before).mean
    assert shift[2] > 0.1
    # A run that was stopped long before its expected end carries almost no information.
    early = after_outcome(SIZES, before, outcome(2, 2, reached=False))
    assert early[2].observed == before[2].observed
    assert after_outcome(SIZES, after, outcome(2, 2, reached=False))[2].survived == 20


def test_failed_run_counts_as_bad_luck_until_failures_accumulate() -> None:
    failure = outcome(3, 50, reached=False, conclusive=True)
    beliefs = learned([outcome(3, 10)])
    chance = beliefs[3].failure_chance
    assert chance == pytest.approx(0.02 / (0.02 + beliefs[3].observed.weight + 1))
    once = after_outcome(SIZES, beliefs, failure)
    assert (once[3].failures, once[3].streak, once[3].converged) == (1.0, Streak(1, chance), True)
    assert once[3].observed == beliefs[3].observed
    assert once[3].failure_chance > 0.3
    # Two failures of 1 % each in a row are less probable than a change of the job.
    assert chance**2 < CONSTANTS.streak_chance
    twice = after_outcome(SIZES, once, failure)
    assert (twice[3].converged, twice[3].streak) == (False, Streak())
    assert twice[3].exact.weight == pytest.approx(CONSTANTS.kept_weight)
    # A single failure is no change, however many successes preceded the failure.
    assert learned([*[outcome(3, 10)] * 40, failure])[3].converged
    # A size that has never reached the target learns from its failure as from a stopped run.
    never = replace(failure, index=2)
    failed = after_outcome(SIZES, beliefs, never)
    stopped = after_outcome(SIZES, beliefs, replace(never, conclusive=False))
    assert failed[2].observed == stopped[2].observed
    assert posterior_of(SIZES, failed).mean[2] > posterior_of(SIZES, beliefs).mean[2] + 0.5
    assert (failed[2].failures, stopped[2].failures) == (1, 0)


def test_cost_of_epochs_uses_the_latest_eight_runs() -> None:
    costing = [replace(outcome(3, 10), cost=CostRun(number / 1000, 9)) for number in range(30)]
    assert learned(costing[:3])[3].costs == (CostRun(0, 9), CostRun(0.001, 9), CostRun(0.002, 9))
    # Eight runs are remembered, so that the belief follows a slow change of the machine.
    assert learned(costing)[3].costs == tuple(CostRun(number / 1000, 9) for number in range(22, 30))


def test_two_dear_runs_in_a_row_change_the_cost_of_epochs() -> None:
    usual, dear = (replace(outcome(3, 10), cost=CostRun(cost, 9, number=n)) for cost, n in ((2.0, 0), (3.5, 1)))
    elsewhere = replace(outcome(1, 10), cost=CostRun(2.1, 9))
    known = [elsewhere, elsewhere, usual, usual]
    # A single dear run may have been slowed.
    once = learned([*known, dear])
    assert len(once[3].costs) == 3
    assert not once[1].are_costs_guessed
    assert cost_posterior(SIZES, tuple(each.costs for each in once)).mean[3] == pytest.approx(2.0, abs=0.05)
    twice = learned([*known, dear, dear])
    assert (twice[3].costs, twice[3].are_costs_guessed) == ((CostRun(3.5, 9, number=1),) * 2, False)
    # Whether the costs of other sizes have changed equally is open until their next runs.
    assert (twice[1].costs, twice[1].are_costs_guessed) == ((CostRun(2.1, 9, drift=1.5),), True)
    assert (twice[0], twice[2], twice[4]) == (once[0], once[2], once[4])
    found = cost_posterior(SIZES, tuple(each.costs for each in twice))
    assert found.mean[3] == pytest.approx(3.5, abs=0.05)
    assert found.mean[1] > 3.0
    assert found.variance[1] > 10 * found.variance[3]
    again = learned([*known, dear, dear, replace(elsewhere, cost=CostRun(2.2, 9))])
    assert (again[1].costs, again[1].are_costs_guessed) == ((CostRun(2.2, 9),), False)


def test_jobs_with_single_epoch_runs_learn_from_first_epochs() -> None:
    only_first = [replace(outcome(3, 1), cost=None, first=CostRun(value, 1)) for value in (2.0, 3.0)]
    guessed = learned(only_first)[3]
    assert (guessed.costs, guessed.are_costs_guessed) == ((CostRun(2.0, 1), CostRun(3.0, 1)), True)
    # A longer run replaces the guesses, and no first epoch is added to it.
    long = replace(outcome(3, 10), first=CostRun(3.0, 1), cost=CostRun(2.5, 9))
    known = learned([*only_first, long, *only_first])[3]
    assert (known.costs, known.are_costs_guessed) == ((CostRun(2.5, 9),), False)


def test_success_ends_a_streak() -> None:
    # Failures are rare, so that this is a streak with a large chance and no sign of a change.
    beliefs = learned([outcome(3, 10)])
    beliefs = tuple(each._replace(failures=2.0) if each.converged else each for each in beliefs)
    beliefs = after_outcome(SIZES, beliefs, outcome(3, 50, reached=False, conclusive=True))
    assert beliefs[3].streak.length == 1
    assert after_outcome(SIZES, beliefs, outcome(3, 10))[3].streak == Streak()


def test_three_surprises_in_a_row_mean_a_change_of_the_job() -> None:
    beliefs = learned([*[outcome(3, 10), outcome(2, 12)] * 4])
    remembered = beliefs[2].observed.weight
    mean, variance = posterior_of(SIZES, beliefs).of_run(3)

    def off_by(sds: float) -> Outcome:
        return outcome(3, math.exp(mean + sds * math.sqrt(variance)))

    # Deviations count up to 4 σ, each minus ½ σ: two of them are luck, three in a row are a change.
    once = after_outcome(SIZES, beliefs, off_by(40.0))
    assert once[3].surprises == Surprises(up=3.5, down=0.0)
    assert once[2].observed.weight == pytest.approx(remembered * CONSTANTS.forgetting)
    assert Surprises().including(4.0).including(4.0).including(-0.5) == Surprises(up=6.0, down=0.0)
    assert Surprises(up=6.0).including(-40.0) == Surprises(up=1.5, down=3.5)
    assert Surprises(up=6.0).including(4.0).most > CONSTANTS.cusum_bound > Surprises(up=3.5).including(4.0).most
    near = beliefs_with(once, once[3]._replace(surprises=Surprises(up=7.0)), 3)
    changed = after_outcome(SIZES, near, off_by(40.0))
    assert changed[2].observed.weight == pytest.approx(CONSTANTS.kept_weight * CONSTANTS.forgetting)
    assert changed[3].observed.weight == pytest.approx((CONSTANTS.kept_weight + 1) * CONSTANTS.forgetting)
    assert (len(changed[2].costs), changed[3].surprises, changed[2].survived) == (1, Surprises(), 0)


@pytest.mark.parametrize("sd", [0.1, 0.35, 0.6])
def test_unchanged_job_is_seldom_forgotten(sd: float) -> None:
    rng, forgotten = np.random.default_rng(3), 0
    for _ in range(4):
        beliefs = learned([outcome(3, 20)])
        for _ in range(100):
            before = beliefs[3].observed.weight
            beliefs = after_outcome(SIZES, beliefs, outcome(3, 20 * math.exp(sd * rng.standard_normal())))
            forgotten += beliefs[3].observed.weight < before
    assert forgotten <= 1


def test_doubled_epochs_are_noticed_in_noise() -> None:
    """Epochs double in a job with a spread of 32 %: the memory restarts within twenty runs."""
    for seed in range(5):
        rng = np.random.default_rng(seed)
        beliefs = learned([outcome(3, 20 * math.exp(0.32 * rng.standard_normal())) for _ in range(20)])
        weights = []
        for _ in range(20):
            beliefs = after_outcome(SIZES, beliefs, outcome(3, 40 * math.exp(0.32 * rng.standard_normal())))
            weights.append(beliefs[3].observed.weight)
        assert min(weights) < 10


def history_of(job: CreatedJob, runs: int, seed: int) -> list[TrialRecord]:
    """Return ended trials of random sizes, of which a tenth missed the target or crashed; all double half-way."""
    rng, trials = np.random.default_rng(seed), []
    ends = (TrialState.COMPLETED, TrialState.EARLY_STOPPED, TrialState.EXHAUSTED, TrialState.FAILED)
    for number in range(1, runs + 1):
        size = int(rng.choice(job.batch_sizes))
        times = 2 if number > runs / 2 else 1
        epochs = max(2, round(times * 10 * math.exp(rng.normal(0, 0.1))))
        epoch_j = times * (1000 / size + 10) * math.exp(rng.normal(0, 0.05))
        state = ends[int(rng.choice(4, p=(0.9, 0.04, 0.03, 0.03)))]
        first = {"first_epoch": 1.0, "first_time_s": 2.0, "first_energy_j": 2 * epoch_j}
        totals = {"report_count": epochs, "epoch": epochs, "time_s": epochs, "energy_j": epochs * epoch_j}
        trials.append(replace(TRIAL, trial_number=number, batch_size=size, state=state, **first, **totals))
    return trials


@pytest.mark.parametrize("warm", [False, True])
def test_replay_equals_learning_one_by_one_with_few_posteriors(warm: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    job = make_job(SIZES.batch_sizes, 64)
    if warm:
        # The first own run at 64 refutes the other job.
        known = {"sd": 0.3, "weight": 20.0, "reached": True}
        epochs = [LearnedEpochs(batch_size=s, log_epochs=math.log(e), **known) for s, e in ((32, 10), (64, 40))]
        job = job.model_copy(
            update={
                "warm": WarmStart(
                    job_id="other", gpus=GpuConfig(max_power=1.0, number_of_gpus=1, gpu_model="B"), epochs=tuple(epochs)
                )
            }
        )
    decompose, calls = np.linalg.eigh, []
    monkeypatch.setattr(np.linalg, "eigh", lambda a: (calls.append(a), decompose(a))[1])
    trials = history_of(job, 200, seed=6)
    found = after_all(begun(job), job, trials)
    together, expected = len(calls), begun(job)
    epochs_posterior.cache_clear()
    for trial in trials:
        expected = after(expected, job, trial)
    assert found == expected
    assert warm or together < 0.4 * (len(calls) - together)
    assert sum(belief.exact.weight for belief in found) < 150


# --- Evidence of runs about the cost of an epoch: means, and spread of epochs -----------------------------------------


def runs_of(*log_costs: float) -> CostRuns:
    return tuple(CostRun(each, math.inf) for each in log_costs)


def test_single_slowed_run_among_equal_runs_is_ignored() -> None:
    found = summary_of([runs_of(2.0, 2.0 + math.log(4), 2.01, 1.99)])
    assert found.means[0] == pytest.approx(2.0, abs=1e-3)
    assert found.weights[0] == pytest.approx(3.0, abs=0.05)
    assert not found.suspect[0]
    assert math.sqrt(found.run_variance) < 0.03


def test_lower_of_two_disagreeing_runs_counts_and_is_in_doubt() -> None:
    for runs in (runs_of(2.0, 2.0 + math.log(4)), runs_of(2.0 + math.log(4), 2.0)):
        found = summary_of([runs, runs_of(3.0, 3.0, 3.0)])
        assert found.means[0] == pytest.approx(2.0, abs=0.01)
        assert (found.suspect[0], found.suspect[1]) == (True, False)
        assert found.weights[0] == pytest.approx(1.0, abs=0.05)


def test_runs_on_a_busy_machine_are_not_taken_for_slowed_runs() -> None:
    noise = np.random.default_rng(1).normal(0, 0.3, (4, 8))
    found = summary_of([runs_of(*row) for row in 2 + noise])
    assert math.sqrt(found.run_variance) == pytest.approx(0.3, abs=0.08)
    # None of these runs is taken for a slowed run.
    assert min(found.weights) > 7
    assert found.means == pytest.approx((2 + noise).mean(axis=1), abs=0.1)


def waiting(*runs: tuple[float, float]) -> CostRuns:
    """Return runs of these log costs and shares of waiting, with the numbers of their trials."""
    return tuple(
        CostRun(cost, math.inf, number=number, waited_share=share) for number, (cost, share) in enumerate(runs)
    )


def test_run_weighs_less_with_more_unusual_waiting() -> None:
    job = make_job((32, 64), 64)
    steps = [Report(1.0, 10.0 * epoch, epoch, 0.5) for epoch in range(1, 6)]
    quiet = reduce(partial(after_report, job), steps, TRIAL)
    found = {}
    for share in (None, 0.0, 0.2, 0.5, 1.0):
        trial = replace(quiet, waited_share=share, state=TrialState.COMPLETED)
        found[share] = after((Belief(),) * 2, job, trial)[1]
    assert [belief.costs[0].waited_share for belief in found.values()] == [0.0, 0.0, 0.2, 0.5, 1.0]
    assert len({belief.observed for belief in found.values()}) == 1
    idle, busy = (waiting(*[(3.0, share)] * 3) for share in (0.0, 0.5))
    weights = [summary_of([belief.costs, idle]).weights[0] for belief in found.values()]
    assert weights == sorted(weights, reverse=True)
    assert weights[0] > 2 * weights[2]
    # If all runs wait alike, no run weighs less.
    assert summary_of([found[0.5].costs, busy]) == summary_of([found[0.0].costs, idle])
    assert summary_of([found[0.0].costs, busy]).weights[0] == pytest.approx(weights[3])


def test_change_is_seen_among_runs_on_machines_as_busy_as_in_the_last_run() -> None:
    calm, busy = (2.0, 0.0), (3.1, 0.5)
    assert change_of([waiting(busy, busy, calm, calm)], 0) is None
    assert change_of([waiting(busy, busy, calm, calm, busy, calm)], 0) is None
    change = change_of([waiting(busy, busy, calm, (4.5, 0.5), calm, (4.5, 0.5))], 0)
    assert change == pytest.approx(1.4)


def test_costs_measured_since_a_change_are_kept() -> None:
    """A change of the cost at one size makes only older costs of the other sizes a guess."""

    def ended(index: int, cost: float, number: int) -> Outcome:
        return replace(outcome(index, 10), cost=CostRun(cost, 9, number=number))

    before = [ended(1, 2.1, 1), ended(2, 2.2, 2), ended(3, 2.0, 3), ended(3, 2.0, 4)]
    beliefs = learned([*before, ended(3, 3.5, 5), ended(1, 2.1, 6), ended(3, 3.5, 7)])
    assert (beliefs[1].costs, beliefs[1].are_costs_guessed) == ((CostRun(2.1, 9, number=6),), False)
    assert (beliefs[2].costs, beliefs[2].are_costs_guessed) == ((CostRun(2.2, 9, drift=1.5, number=2),), True)
    assert [run.number for run in beliefs[3].costs] == [5, 7]
    # This run shows that the cost at 16 has not changed, so that the cost at 32 has hardly changed.
    found = cost_posterior(SIZES, tuple(each.costs for each in beliefs))
    alike = cost_posterior(SIZES, tuple(each.costs for each in learned([*before, ended(3, 3.5, 5), ended(3, 3.5, 7)])))
    assert found.mean[2] < alike.mean[2] - 0.3


def test_variance_of_a_size_equals_the_prior_before_two_runs() -> None:
    grid = np.array(CONSTANTS.cost_run_sds)
    weights = stats.norm.pdf(np.log(grid), math.log(CONSTANTS.cost_run_sd), CONSTANTS.cost_run_sd_spread)
    assert run_variance([runs_of(2.0), (), runs_of(5.0)], 0.0) == pytest.approx(weights @ grid**2 / weights.sum())
    doubted = CostRun(5.0, math.inf, doubt=99 * run_variance([], 0.0))
    found = summary_of([runs_of(2.0), (), (doubted,)])
    assert found.means == pytest.approx((2.0, 0.0, 5.0))
    assert found.weights == pytest.approx((1.0, 0.0, 0.01))
    assert found.suspect == (True, False, True)


def test_variance_of_two_runs_matches_every_sd_of_the_grid() -> None:
    """The difference of the runs is normal with twice the variance, or one of the runs was slowed."""
    grid = np.array(CONSTANTS.cost_run_sds)
    prior = stats.norm.pdf(np.log(grid), math.log(CONSTANTS.cost_run_sd), CONSTANTS.cost_run_sd_spread)
    for apart in (0.0, 0.05, 0.4, 1.4):
        usual = stats.norm.pdf(apart, 0, grid * math.sqrt(2))
        slowed = stats.norm.pdf(apart, 0, np.sqrt(2 * grid**2 + CONSTANTS.slowed_sd**2))
        weights = prior * ((1 - CONSTANTS.slowed_chance) * usual + CONSTANTS.slowed_chance * slowed)
        expected = weights @ grid**2 / weights.sum()
        assert run_variance([runs_of(1.0, 1.0 + apart)], 0.0) == pytest.approx(expected)


def test_change_requires_two_runs_with_similar_deviations() -> None:
    four = math.log(4)

    def change(*runs: float) -> float | None:
        return change_of([runs_of(*runs), runs_of(3.0, 3.01)], 0)

    assert change(2.0, 2.01, 2 + four, 2.02 + four) == pytest.approx(four)
    assert change(2.0, 2.01, 2.02 - four, 2 - four) == pytest.approx(-four)
    # Of two different deviations, the smaller counts.
    assert change(2.0, 2.01, 2 + 2 * four, 2 + four) == pytest.approx(four)
    assert change(2.0, 2.01, 2.02, 2 + four) is None
    assert change(2.0, 2.01, 2 + four, 2.02) is None
    assert change(2.0, 2.01, 2 + four, 2 - four) is None
    assert change(2.0, 2.01, 2.02, 2.01) is None
    # A single run before them may itself have been slowed.
    assert change(2 + four, 2.0, 2.0) is None
    assert change(2.0) is None
    assert change() is None


def test_dear_runs_in_a_row_on_a_busy_machine_are_no_change() -> None:
    noise = np.random.default_rng(2).normal(0, 0.3, (500, 8))
    changes = [change_of([runs_of(*row) for row in noise[start : start + 4]], 0) for start in range(0, 500, 4)]
    assert sum(each is not None for each in changes) == 0
    # Two short runs of uneven epochs are no change either, because their mean is uncertain.
    uneven = [CostRun(2.0, 100, 100.0, 99)] * 3 + [CostRun(3.0, 1.0)] * 2
    assert change_of([tuple(uneven)], 0) is None
    assert change_of([tuple(run._replace(epochs=100) for run in uneven)], 0) is not None


@given(st.floats(0.03, 0.08), st.floats(0, 0.005), st.integers(2, 6))
@settings(max_examples=examples(50), deadline=None)
def test_shortcut_for_small_changes_misses_no_change(change: float, noise: float, before: int) -> None:
    even = runs_of(*[1.0, 1.0 + noise] * 4)
    sizes = [runs_of(*[1.0] * before, 1.0 + change, 1.0 + change), *[even] * 5]
    found = change_of(sizes, 0)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("bso_server.core.gp_voi.run_costs._least_change", lambda: 0.0)
        assert change_of(sizes, 0) == found


absurd_runs = st.builds(
    CostRun,
    st.floats(-700, 700),
    epochs=st.floats(1e-3, 1e6) | st.just(math.inf),
    deviations=st.floats(0, 1e12),
    freedom=st.integers(0, 1000).map(float),
    doubt=st.floats(0, 1),
    drift=st.sampled_from([0.0, 0.5, -3.0, 700.0]),
    waited_share=st.sampled_from([0.0, 0.1, 0.5, 1.0]),
)


@given(
    st.lists(st.lists(absurd_runs, max_size=8).map(tuple), min_size=1, max_size=4),
    st.randoms(use_true_random=False),
)
@settings(max_examples=examples(100), deadline=None)
def test_absurd_costs_leave_finite_numbers_in_any_order(sizes: list[CostRuns], random: object) -> None:
    found = summary_of(sizes)
    assert np.isfinite([*found.means, *found.weights, found.run_variance]).all()
    assert min(CONSTANTS.cost_run_sds) ** 2 <= found.run_variance * (1 + 1e-9)
    assert found.run_variance <= max(CONSTANTS.cost_run_sds) ** 2 * (1 + 1e-9)
    for index, runs in enumerate(sizes):
        change = change_of(sizes, index)
        assert change is None or (math.isfinite(change) and len(runs) > 3)
    for runs, mean, weight in zip(sizes, found.means, found.weights, strict=True):
        assert 0 <= weight <= len(runs) * (1 + 1e-9)
        if runs:
            assert weight > 0
            assert min(run.log_cost for run in runs) - 1e-6 <= mean <= max(run.log_cost for run in runs) + 1e-6
    mixed_up = []
    for runs in sizes:
        shuffled = list(runs)
        random.shuffle(shuffled)  # type: ignore[attr-defined]  # a random.Random
        mixed_up.append(tuple(shuffled))
    again = summary_of(mixed_up)
    assert again.means == pytest.approx(found.means)
    assert again.weights == pytest.approx(found.weights)
    assert again.run_variance == pytest.approx(found.run_variance)


# --- Within a run -----------------------------------------------------------------------------------------------------


def test_trial_records_the_unevenness_of_epoch_costs() -> None:
    """After the first report: one epoch of 10 J, two of 16 J, and half an epoch at 12 J per epoch."""
    life = new_life()
    trial = life.dispatch(32)
    assert cost_deviations_j2(life.job, trial) is None
    deviations_j2 = []
    for epoch, cost_j in ((1, 50), (2, 60), (4, 92), (4.5, 98)):
        trial = after_report(life.job, trial, Report(1.0, cost_j, epoch, 0.0))
        deviations_j2.append(cost_deviations_j2(life.job, trial))
    whole = 10**2 + 2 * 16**2 + 0.5 * 12**2 - 48**2 / 3.5
    assert deviations_j2 == [0, 0, pytest.approx(10**2 + 2 * 16**2 - 42**2 / 3), pytest.approx(whole)]
    run = CostRun.of(life.job, trial)
    assert run == pytest.approx(CostRun(math.log(48 / 3.5), 3.5, whole / (48 / 3.5) ** 2, 2, number=trial.trial_number))
    # A repeated report of the same epoch adds no information.
    again = after_report(life.job, trial, Report(1.0, 99.0, 4.5, 0.0))
    assert again.deviations == trial.deviations


def test_trial_begun_under_an_earlier_version_contributes_only_a_mean() -> None:
    life = new_life()
    trial = life.dispatch(32)
    for epoch in (1, 2, 3):
        trial = after_report(life.job, trial, Report(1.0, 10.0 * epoch**2, epoch, 0.0))
    from_before = after_report(life.job, replace(trial, deviations=None), Report(1.0, 160.0, 4, 0.0))
    assert from_before.deviations is None
    assert CostRun.of(life.job, from_before) == pytest.approx(CostRun(math.log(50), 3, number=trial.trial_number))
    # Another rank's larger totals change only the mean.
    later = after_other_rank(trial, Report(1.0, 100.0, 3, 0.0))
    assert later.deviations == trial.deviations


def test_variance_of_an_epoch_pools_all_runs() -> None:
    rng = np.random.default_rng(3)
    sizes: list[CostRuns] = []
    for _ in range(4):
        runs = []
        for epochs in (20, 50, 100):
            costs = 5.0 * (1 + 0.2 * rng.standard_normal(epochs))
            off = float(((costs / costs.mean() - 1) ** 2).sum())
            runs.append(CostRun(math.log(costs.mean()), epochs, off, epochs - 1))
        sizes.append(tuple(runs))
    assert math.sqrt(epoch_variance(sizes)) == pytest.approx(0.2, rel=0.1)
    # The epochs explain all differences between runs of a size: the runs themselves hardly vary.
    assert math.sqrt(summary_of(sizes).run_variance) < 0.03
    # Before the first run, the spread equals its prior.
    assert math.sqrt(epoch_variance([(), ()])) == pytest.approx(CONSTANTS.epoch_sd)


def test_weight_of_a_short_run_depends_on_the_spread_of_epochs() -> None:
    even, uneven = ([(CostRun(2.0, 100, off, 99),), (CostRun(3.0, 2, off / 99, 1),)] for off in (0.0, 99 * 0.3**2))
    assert summary_of(even).weights[1] > 0.9
    found = summary_of(uneven)
    assert found.weights[0] > 5 * found.weights[1]
