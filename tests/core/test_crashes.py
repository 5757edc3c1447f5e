"""Crashes: number of runs that a crashing batch size costs, and which crashes exclude a size."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest

from bso_server.core.job import Crash, Crashes, InMemoryJob, JobState, dispatch_trial, end_by_training
from bso_server.core.model import Report, Suggestion, TrialRecord
from tests.support.histories import make_job
from zeus_plugins.protocol import GP_VOI, ZEUS, Ending, EndReason, Origin, TrialState

SIZES = (16, 32, 64, 128)

Fate = Callable[[int], str | bool]
"""Returns how a night at a batch size ends: True at the target, False without it, or the error of a crash."""


class Nights:
    """A job in memory with one run per night."""

    def __init__(
        self, sizes: tuple[int, ...] = SIZES, default: int = 16, policy: str = GP_VOI, **fields: object
    ) -> None:
        terms = {"policy": policy, "max_epochs": 6, "controls": "off", **fields}
        self.job = InMemoryJob(make_job(sizes, default, **terms))
        self.rng = np.random.default_rng(1)
        self.trials: list[TrialRecord] = []

    def night(self, fate: Fate, *, ending: Ending | None = None) -> TrialRecord:
        trial = self.job.begin_trial(self.rng)
        told = fate(trial.batch_size)
        if isinstance(told, str) or ending is not None:
            ending = ending or Ending(detail=str(told))
            trial = self.job.end_trial(trial.trial_number, ending)
        else:
            # A run that reaches the target takes five epochs; larger sizes cost less.
            for epoch in range(1, 7):
                spent = epoch * 10000 / trial.batch_size
                report = Report(spent / 100, spent, epoch, float(told and epoch == 5))
                trial, verdict = self.job.judge(trial.trial_number, report)
                if verdict.stop:
                    break
        self.trials.append(trial)
        return trial

    def nights(self, number: int, fate: Fate) -> list[int]:
        return [self.night(fate).batch_size for _ in range(number)]

    @property
    def excluded(self) -> Mapping[int, EndReason]:
        return self.job.history.excluded


def crashing_above_16(size: int) -> str | bool:
    return True if size == 16 else f"RuntimeError: shape [{size}, 3] at 0x7f{size:02x}"


def test_larger_sizes_with_equal_crashes_cost_three_nights_in_total() -> None:
    job = Nights()
    sizes = job.nights(40, crashing_above_16)
    assert Counter(size for size in sizes if size != 16) == {32: 2, 64: 1}
    assert all(after == 16 for before, after in pairwise(sizes) if before != 16)
    assert set(job.excluded) == {32, 64, 128}


def test_sizes_with_different_crashes_cost_at_most_two_nights_each() -> None:
    job = Nights()
    names = {32: "ValueError: a", 64: "KeyError: b", 128: "TypeError: c"}
    sizes = job.nights(60, lambda size: names.get(size, True))
    counts = Counter(sizes)
    assert all(1 <= counts[size] <= 2 for size in names)
    assert all(after == 16 for before, after in pairwise(sizes) if before != 16)
    assert job.excluded == dict.fromkeys(names, EndReason.CRASHED)
    messages = [trial.message for trial in job.trials if trial.state is TrialState.INFEASIBLE]
    assert f"infeasible: 32 crashed twice in the same way and is not tried again ({names[32]})" in messages


def test_size_with_differing_crashes_waits_ten_times_longer_after_second_crash() -> None:
    job = Nights((16, 32))
    errors = iter("abcdefghijklmnop")
    sizes = job.nights(12, lambda size: True if size == 16 else f"Error {next(errors)}")
    assert sizes.count(32) == 2


def test_equal_crashes_of_neighbours_exclude_smaller_sizes_too() -> None:
    job = Nights(default=128)
    job.nights(40, lambda size: True if size == 128 else f"ValueError: only {size} samples")
    assert set(job.excluded) == {16, 32, 64}
    assert Counter(trial.batch_size for trial in job.trials)[128] >= 36
    (last,) = [trial for trial in job.trials if trial.end_reason is EndReason.CRASHED_ALIKE]
    assert "and smaller sizes are" not in (last.message or "")
    assert "neither they nor smaller sizes are tried again" in (last.message or "")


@pytest.mark.parametrize("default", [16, 32, 128])
def test_crash_of_every_size_excludes_none_and_keeps_the_default(default: int) -> None:
    job = Nights(default=default)
    assert job.nights(8, lambda _: "NameError: name 'modle' is not defined") == [default] * 8
    assert not job.excluded
    assert job.nights(1, lambda _: True) == [default]


def test_crash_of_every_size_after_a_success_excludes_none() -> None:
    job = Nights()
    job.nights(1, lambda _: True)
    job.nights(12, lambda _: "NameError: name 'modle' is not defined")
    assert not job.excluded
    assert set(job.nights(30, lambda _: True)) > {16}


@pytest.mark.parametrize(("size", "reason"), [(32, EndReason.CRASHED), (64, EndReason.CRASHED_ALIKE)])
def test_crash_excludes_a_size_only_after_a_later_trial_ran_to_the_end(size: int, reason: EndReason) -> None:
    state, trial = dispatch_trial(
        JobState(registration=make_job(SIZES, 16, policy=GP_VOI)), Suggestion(size, Origin.EXPLORATION, "")
    )
    known = Crashes((Crash(32, "failed (E: 1)", 5),), frozenset({16}), frozenset({16}), 4)
    ending = Ending(detail="E: 2")
    assert end_by_training(state, trial, ending, earlier=known)[1].state is TrialState.FAILED
    _, trial = end_by_training(state, trial, ending, earlier=replace(known, proven_event=6))
    assert (trial.state, trial.end_reason) == (TrialState.INFEASIBLE, reason)


def test_default_ended_twice_by_the_users_rule_stays_until_a_size_reaches_the_target() -> None:
    job = Nights(default=32)
    early = Ending(ended_early=True, detail="EarlyStopping")
    job.night(lambda _: "", ending=early)
    assert job.nights(3, lambda _: False) == [16, 64, 128]
    assert [job.night(lambda _: "", ending=early).batch_size for _ in range(3)] == [32, 32, 32]
    assert not job.excluded


def test_crash_shared_with_a_successful_size_excludes_no_size() -> None:
    """A network that fails occasionally crashes every size."""
    job = Nights((16, 32))
    job.nights(2, lambda _: True if not job.trials else "ConnectionError: no route")
    job.nights(1, lambda _: "ConnectionError: no route")
    assert {trial.batch_size for trial in job.trials[1:]} == {16, 32}
    for _ in range(12):
        job.nights(1, lambda size: True if size == 16 else "ConnectionError: no route")
    assert not job.excluded


def test_best_size_crashing_twice_is_replaced_until_a_later_success() -> None:
    job = Nights((16, 32))
    job.nights(8, lambda _: True)
    assert {trial.batch_size for trial in job.trials} == {16, 32}
    assert job.trials[-1].batch_size == 32
    assert job.nights(3, lambda size: "ValueError: too few" if size == 32 else True) == [32, 32, 16]
    assert not job.excluded
    assert 32 in job.nights(40, lambda _: True)[-5:]


@pytest.mark.parametrize("outcome", [TrialState.SUSPENDED, TrialState.WITHDRAWN])
def test_preempted_and_withdrawn_trials_do_not_count_as_crashes(outcome: TrialState) -> None:
    job = Nights()
    job.nights(1, lambda _: True)
    for _ in range(3):
        trial = job.night(lambda _: "", ending=Ending(outcome=outcome, detail="ValueError"))
        assert trial.state is outcome
    assert all(belief.crashed == 0 for belief in job.job.history.memory)
    assert not job.excluded


@pytest.mark.parametrize("policy", [GP_VOI, ZEUS])
def test_size_refused_by_the_training_alone_is_excluded_after_a_night(policy: str) -> None:
    nights = Nights(default=32, policy=policy)
    nights.night(lambda _: True)
    refusal = Ending(outcome=TrialState.WITHDRAWN, refused_size=True, detail="too few batches")
    refused = nights.night(lambda _: False, ending=refusal)
    assert (refused.state, refused.end_reason) == (TrialState.INFEASIBLE, EndReason.REFUSED)
    assert (refused.message or "").endswith("is not tried again (too few batches)")
    assert nights.excluded == {refused.batch_size: EndReason.REFUSED}
    assert refused.batch_size not in nights.nights(12, lambda _: True)


def test_refusal_at_default_withdraws_the_trial() -> None:
    nights = Nights()
    refused = nights.night(lambda _: False, ending=Ending(outcome=TrialState.WITHDRAWN, refused_size=True))
    assert (refused.batch_size, refused.state, dict(nights.excluded)) == (16, TrialState.WITHDRAWN, {})


def test_out_of_memory_excludes_larger_sizes_and_next_night_succeeds() -> None:
    job = Nights()
    job.nights(1, lambda _: True)
    size = job.night(lambda _: "", ending=Ending(outcome=TrialState.INFEASIBLE)).batch_size
    assert job.excluded == dict.fromkeys((each for each in SIZES if each >= size), EndReason.OUT_OF_MEMORY)
    assert job.night(lambda _: True).batch_size == 16


def test_runs_ended_by_the_users_rule_miss_the_target() -> None:
    job = Nights(default=32)
    early = Ending(ended_early=True, detail="EarlyStopping(patience=3)")
    sizes = [job.night(lambda _: "", ending=early).batch_size for _ in range(8)]
    assert sizes == [32, 16, 64, 128, 32, 32, 32, 32]
    assert not job.excluded
    assert job.trials[-1].reason.startswith("every batch size has missed the target")


def test_always_missing_job_trains_the_default_and_learns_after_the_first_success() -> None:
    job = Nights(default=32)
    assert job.nights(7, lambda _: False) == [32, 16, 64, 128, 32, 32, 32]
    assert job.nights(1, lambda _: True) == [32]
    assert job.job.begin_trial(job.rng).origin in {Origin.EXPLORATION, Origin.INCUMBENT}
    assert "missed" not in job.job.history.in_flight[-1].reason


def test_policy_zeus_retries_a_crashing_size_three_times() -> None:
    job = Nights(policy=ZEUS, default=32)
    assert job.nights(3, lambda size: f"ValueError: {size}") == [32, 32, 32]
    assert job.excluded == {32: EndReason.CRASHED}
    reached = Nights(policy=ZEUS, default=16)
    sizes = reached.nights(8, crashing_above_16)
    assert sizes[:4] == [16, 32, 32, 32]
    assert reached.excluded == {32: EndReason.CRASHED}
