"""Target learned from the first runs of a job, with literal values."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate, count

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from bso_server.core.job import InMemoryJob
from bso_server.core.model import Arm, Report, TrialRecord, after_report, changed
from bso_server.core.policy import needs_bound
from bso_server.core.quality import comparisons, left_out
from bso_server.core.targets import NumberedReport, judged_again, learned_target, reached_value
from tests.support.histories import make_job
from zeus_plugins.protocol import GP_VOI, OWN_POLICIES, CreatedJob, Ending, EndReason, Origin, Quality, TrialState


def job(target: float | None = None, **fields: object) -> CreatedJob:
    return make_job((8, 16, 32), 16, eta_knob=0.5, target_metric=target, max_epochs=4, **fields)


def reports_of(*metrics: float, epochs: Sequence[float] | None = None) -> list[NumberedReport]:
    """Return reports of these metrics, one per epoch by default, at 100 J each."""
    return [
        (n, Report(time_s=n, energy_j=100.0 * n, epoch=epoch, metric=metric))
        for n, (epoch, metric) in enumerate(zip(epochs or count(1), metrics, strict=False), 1)
    ]


@pytest.mark.parametrize(
    ("fields", "metrics", "value"),
    [
        ({}, (0.1, 0.9, 0.8), 0.9),
        ({}, (0.4,), 0.4),
        ({"confirm": 2}, (0.1, 0.9, 0.8), 0.8),
        ({"confirm": 2}, (0.9, 0.1, 0.7, 0.6), 0.6),
        ({"confirm": 2}, (0.5,), None),
        ({"confirm": 4}, (0.5, 0.4), None),
        ({"higher_is_better_metric": False}, (0.9, 0.2, 0.3), 0.2),
        ({"higher_is_better_metric": False, "confirm": 2}, (0.9, 0.2, 0.3), 0.3),
    ],
)
def test_reached_value_is_the_best_value_confirmed_by_consecutive_evaluations(
    fields: dict[str, object], metrics: tuple[float, ...], value: float | None
) -> None:
    assert reached_value(job(**fields), reports_of(*metrics)) == value


def test_repeated_epoch_of_a_resumed_run_confirms_no_value() -> None:
    reports = reports_of(0.9, 0.8, 0.8, 0.7, epochs=(1, 2, 2, 3))
    assert reached_value(job(confirm=3), reports) == 0.7
    assert reached_value(job(confirm=4), reports) is None


@given(
    metrics=st.lists(st.floats(0, 1), min_size=1, max_size=8),
    repeats=st.lists(st.booleans(), min_size=8, max_size=8),
    confirm=st.integers(1, 3),
    higher=st.booleans(),
)
def test_each_run_setting_a_target_has_reached_the_target(
    metrics: list[float], repeats: list[bool], confirm: int, higher: bool
) -> None:
    epochs = list(accumulate((not each for each in repeats), initial=1))
    reports = reports_of(*metrics, epochs=epochs)
    value = reached_value(job(confirm=confirm, higher_is_better_metric=higher), reports)
    if value is not None:
        ran = changed(trial(TrialState.COMPLETED, EndReason.NO_TARGET), report_count=len(reports))
        again = judged_again(job(value, confirm=confirm, higher_is_better_metric=higher), ran, reports)
        assert again.end_reason is EndReason.TARGET_REACHED


@pytest.mark.parametrize(
    ("fields", "curves", "target"),
    [
        # The first four of six epochs count, and the worst best value in them: the later 0.99 does not.
        ({}, [(0.1, 0.5, 0.7, 0.9, 0.8, 0.99), (0.9, 0.95), (0.7, 0.91, 0.8)], 0.9),
        ({"higher_is_better_metric": False}, [(0.9, 0.4, 0.3), (0.5, 0.1), (0.6, 0.2, 0.1)], 0.5),
        # One evaluation is all that a run has, and a value is confirmed by the third evaluation at the earliest.
        ({}, [(0.4,), (0.6,), (0.5,)], 0.4),
        ({"confirm": 3}, [(0.3, 0.4, 0.5)] * 3, 0.3),
    ],
)
def test_learned_target_is_the_worst_value_of_two_thirds_of_the_epochs(
    fields: dict[str, object], curves: list[tuple[float, ...]], target: float
) -> None:
    assert learned_target(job(**fields), [reports_of(*each) for each in curves]) == target


@pytest.mark.parametrize("higher", [True, False])
def test_learned_target_is_easier_by_the_noise_of_the_median_curve(higher: bool) -> None:
    calm, noisy = [0.5] * 20, [0.5 + 0.01 * (-1) ** n for n in range(20)]  # bends of 0.04 = 0.6745 · √6 · 0.0242
    sign = 1 if higher else -1

    def learned(*curves: list[float]) -> float:
        return learned_target(job(higher_is_better_metric=higher), [reports_of(*each) for each in curves])

    assert learned(calm, calm, noisy) == 0.5
    assert learned(calm, noisy, noisy) == pytest.approx(0.5 - sign * 0.0242, abs=1e-4)


@pytest.mark.parametrize("noise", [0.002, 0.01])
def test_few_later_runs_miss_a_learned_target(noise: float) -> None:
    rng = np.random.default_rng(1)

    def run() -> list[NumberedReport]:
        curve = 0.9 - 0.5 * np.exp(-np.arange(1, 31) / 10 * np.exp(rng.normal(0, 0.15)))
        return reports_of(*(curve + rng.normal(0, noise, 30)).tolist())

    missed = 0
    for _ in range(20):
        target = learned_target(job(), [run() for _ in range(3)])
        missed += sum(max(report.metric for _, report in run()) < target for _ in range(10))
    assert missed <= 6  # of 200; the worst of the best values would be missed by every fourth


def trial(state: TrialState, reason: EndReason) -> TrialRecord:
    return TrialRecord(
        trial_number=1, batch_size=16, state=state, origin=Origin.EXPLORATION, end_reason=reason,
        time_s=3.0, energy_j=300.0, epoch=3.0, metric=0.8, report_count=3,
        first_epoch=1.0, first_time_s=1.0, first_energy_j=100.0,
    )  # fmt: skip


REPORTS = reports_of(0.5, 0.9, 0.8)


def test_run_ends_at_the_evaluation_reaching_the_later_target() -> None:
    again = judged_again(job(0.85), trial(TrialState.COMPLETED, EndReason.NO_TARGET), REPORTS)
    assert (again.state, again.end_reason) == (TrialState.COMPLETED, EndReason.TARGET_REACHED)
    assert (again.epoch, again.time_s, again.energy_j, again.metric, again.report_count) == (2.0, 2.0, 200.0, 0.9, 2)


def test_shortened_run_has_no_watched_values() -> None:
    trained = changed(trial(TrialState.COMPLETED, EndReason.NO_TARGET), watched={"test_acc": 0.99})
    assert judged_again(job(0.85), trained, REPORTS).watched is None
    # Only the last report reached the target: its values are the values at the run's end.
    rising = [REPORTS[0], (2, REPORTS[2][1]), (3, Report(time_s=3.0, energy_j=300.0, epoch=3.0, metric=0.9))]
    assert judged_again(job(0.85), trained, rising).watched == {"test_acc": 0.99}


def test_shortened_runs_exclude_no_size() -> None:
    margins = job(0.85, policy=GP_VOI, no_worse_than_default={"test_acc": 0.005})
    arms = {size: Arm(size) for size in margins.batch_sizes}
    for number in range(3):
        of_default = changed(
            trial(TrialState.COMPLETED, EndReason.NO_TARGET), watched={"test_acc": 0.99 + number / 1e4}
        )
        cut = judged_again(margins, of_default, REPORTS)
        of_other = changed(cut, batch_size=32, watched={"test_acc": 0.9 + number / 1e4})
        for each in (cut, of_other):
            arms[each.batch_size] = arms[each.batch_size].after_end(margins, each, in_bandit=True)
    assert left_out(margins, arms) == {}
    assert [(each.name, each.verdict) for each in comparisons(margins, arms, 32)][1:] == [
        ("test_acc", Quality.NOT_SHOWN)
    ]
    assert arms[16].metric.count == 3


@pytest.mark.parametrize(
    ("reason", "state"),
    [(EndReason.NO_TARGET, TrialState.EXHAUSTED), (EndReason.TARGET_REACHED, TrialState.WITHDRAWN)],
)
def test_run_below_the_later_target_is_a_miss_or_withdrawn(reason: EndReason, state: TrialState) -> None:
    again = judged_again(job(0.95), trial(TrialState.COMPLETED, reason), REPORTS)
    assert (again.state, again.energy_j, again.report_count) == (state, 300.0, 3)


def test_run_ended_at_an_own_target_is_unchanged() -> None:
    ended = trial(TrialState.COMPLETED, EndReason.TARGET_REACHED)
    assert judged_again(job(0.85), ended, [REPORTS[0], REPORTS[2], (3, REPORTS[1][1])]) is ended


OPEN = (TrialState.RUNNING, TrialState.SUSPENDED, TrialState.ABANDONED)


def in_flight(state: TrialState, *metrics: float) -> tuple[TrialRecord, list[NumberedReport]]:
    """Return an open trial of a job without a target after reports of these metrics, and the reports."""
    begun = TrialRecord(trial_number=1, batch_size=16, state=state, origin=Origin.EXPLORATION)
    reports = reports_of(*metrics)
    for _, report in reports:
        begun = after_report(job(), begun, report)
    return begun, reports


@pytest.mark.parametrize("state", OPEN)
@pytest.mark.parametrize(
    ("fields", "metrics"),
    [({}, (0.1, 0.97, 0.94)), ({"higher_is_better_metric": False}, (0.98, 0.9, 0.96)), ({"confirm": 2}, (0.97, 0.96))],
)
def test_open_run_is_completed_where_the_later_target_was_reached(
    state: TrialState, fields: dict[str, object], metrics: tuple[float, ...]
) -> None:
    again = judged_again(job(0.95, **fields), *in_flight(state, *metrics))
    assert (again.state, again.end_reason) == (TrialState.COMPLETED, EndReason.TARGET_REACHED)
    assert (again.epoch, again.energy_j, again.metric, again.report_count) == (2.0, 200.0, metrics[1], 2)


@pytest.mark.parametrize("state", OPEN)
def test_open_run_below_the_later_target_continues(state: TrialState) -> None:
    begun, reports = in_flight(state, 0.93, 0.94)
    assert judged_again(job(0.95), begun, reports) is begun
    # Evaluations before the target was set count for its confirmation, too.
    begun, reports = in_flight(state, 0.94, 0.97)
    assert judged_again(job(0.95, confirm=2), begun, reports) == changed(begun, confirmed=1)


def test_run_without_a_target_gets_no_bound() -> None:
    running = TrialRecord(trial_number=1, batch_size=16, state=TrialState.RUNNING, origin=Origin.EXPLORATION)
    assert not needs_bound(job(policy=GP_VOI), running)
    assert needs_bound(job(0.9, policy=GP_VOI), running)


@pytest.mark.parametrize("policy", OWN_POLICIES)
def test_job_without_a_target_trains_only_the_default_and_stops_no_run(policy: str) -> None:
    memory = InMemoryJob(job(policy=policy, beta_knob=1.1))
    rng = np.random.default_rng(0)
    for number, cost_j in enumerate((100.0, 10_000.0, 100.0), 1):
        begun = memory.begin_trial(rng)
        assert (begun.batch_size, begun.reason) == (16, f"run {number} of 3 that set the target")
        for epoch in range(1, 5):
            report = Report(time_s=epoch, energy_j=cost_j * epoch, epoch=epoch, metric=0.99)
            ended, verdict = memory.judge(number, report)
            assert verdict.stop is (epoch == 4)
        assert (ended.state, ended.end_reason, verdict.converged) == (TrialState.COMPLETED, EndReason.NO_TARGET, True)
    assert memory.begin_trial(rng).reason == "the 3 runs that set the target have not all ended"


def test_run_ended_by_the_users_rule_contributes_to_the_target() -> None:
    memory = InMemoryJob(job())
    memory.begin_trial(np.random.default_rng(0))
    memory.judge(1, Report(time_s=1.0, energy_j=10.0, epoch=1.0, metric=0.7))
    ended = memory.end_trial(1, Ending(ended_early=True, detail="EarlyStopping"))
    assert (ended.state, ended.end_reason) == (TrialState.COMPLETED, EndReason.NO_TARGET)


def test_runs_too_short_to_confirm_a_target_are_reported() -> None:
    memory = InMemoryJob(job(confirm=2))
    rng = np.random.default_rng(0)
    for number in range(1, 4):
        memory.begin_trial(rng)
        memory.judge(number, Report(time_s=1.0, energy_j=10.0, epoch=4.0, metric=0.7))
    reason = "3 runs have ended, and the target needs 3 with at least 2 evaluations each"
    assert memory.begin_trial(rng).reason == reason
