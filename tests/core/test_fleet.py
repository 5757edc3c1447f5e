"""Savings of several jobs together: literal sums, and groups that add up to the total."""

from __future__ import annotations

import math
from datetime import UTC, datetime, timedelta

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bso_server.core.savings import Amounts, JobVerdict, Tally, saved_since, savings
from bso_server.core.verdict import Evidence, Run, Saved, total
from bso_server.service.fleet import fleet_page
from bso_server.service.views import FleetJob, Tariff
from tests.support.histories import make_job
from zeus_plugins.protocol import Origin, SavingsWord, TrialState

NOW = datetime(2026, 1, 31, tzinfo=UTC)
JOB = make_job((16, 32), 16)


def test_estimates_add_and_distances_to_ends_add_as_squares() -> None:
    both = total([Saved(100.0, 17.0, 20.0, 26.0), Saved(200.0, -4.0, 0.0, 8.0), None])
    assert both == Saved(taken=300.0, low=20.0 - 5.0, middle=20.0, high=20.0 + 10.0)
    # The sums of the ends would be 13 and 34.
    assert both.is_shown
    assert (both.share.middle, both.share.low, both.share.high) == (20 / 320, 15 / 315, 30 / 330)
    assert both.share.in_words == "6 % (5 to 9 %)"


def test_an_end_without_bound_stays_without_bound_in_the_sum() -> None:
    both = total([Saved(100.0, 17.0, 20.0, None), Saved(100.0, None, -5.0, -3.0)])
    assert both == Saved(200.0, None, 15.0, None)
    assert not both.is_shown
    assert total([None, None]) is None


def test_loss_is_shown_if_the_whole_interval_is_below_0() -> None:
    assert Saved(100.0, -30.0, -20.0, -10.0).is_shown
    assert not Saved(100.0, -30.0, -20.0, 1.0).is_shown


AMOUNTS = st.floats(0, 1e12)
SAVED = st.builds(
    lambda taken, middle, below, above: Saved(
        taken, None if below is None else middle - below, middle, None if above is None else middle + above
    ),
    AMOUNTS,
    st.floats(-1e12, 1e12),
    st.none() | AMOUNTS,
    st.none() | AMOUNTS,
)


def job_of(number: int, owner: str | None, energy_j: float, saved: Saved | None) -> FleetJob:
    word = SavingsWord.NOT_SHOWN if saved is None else SavingsWord.SAVES if saved.middle > 0 else SavingsWord.LOSES
    counts = {"saves": int(word is SavingsWord.SAVES), "loses": int(word is SavingsWord.LOSES)}
    took = {"runs": 3, "energy_j": energy_j, "estimated_j": 0.0, "time_s": 2 * energy_j, "cost_j": energy_j}
    unset = dict.fromkeys(("model", "advice", "stuck"))
    return FleetJob(
        key=f"job-{number}", jobs=1, word=word, owner=owner, gpu_model="GPU", tags={}, **counts, **took, **unset,
        cost_saved_j=saved, energy_saved_j=saved, time_saved_s=saved,
    )  # fmt: skip


@given(st.lists(st.tuples(st.none() | st.text("abc", max_size=2), AMOUNTS, st.none() | SAVED), max_size=30))
def test_groups_add_up_to_the_total(parts: list[tuple[str | None, float, Saved | None]]) -> None:
    jobs = [job_of(number, *part) for number, part in enumerate(parts)]
    page = fleet_page(jobs, "owner", NOW - timedelta(days=30), NOW, 0, Tariff())
    for name in ("jobs", "saves", "loses", "runs", "energy_j", "time_s", "cost_j"):
        assert sum(getattr(each, name) for each in page.groups) == pytest.approx(getattr(page.total, name))
    groups, jobs_together = total(each.energy_saved_j for each in page.groups), page.total.energy_saved_j
    assert (groups is None) == (jobs_together is None) == all(each is None for *_, each in parts)
    if groups is not None and jobs_together is not None:
        for name in ("taken", "low", "middle", "high"):
            one, other = getattr(groups, name), getattr(jobs_together, name)
            assert (one is None) == (other is None)
            assert one is None or math.isclose(one, other, rel_tol=1e-9, abs_tol=1.0)


def test_many_groups_end_with_a_group_for_the_rest() -> None:
    jobs = [job_of(number, f"{number}", 1000.0 - number, None) for number in range(150)]
    page = fleet_page(jobs, "owner", NOW - timedelta(days=30), NOW, 0, Tariff())
    assert [each.key for each in (page.groups[0], *page.groups[-2:])] == ["0", "98", "51 others"]
    assert sum(each.energy_j for each in page.groups) == page.total.energy_j


def verdict_of(runs: list[Run], tallies: list[Tally]) -> JobVerdict:
    evidence = Evidence(16)
    evidence.add(runs)
    judge = evidence.judge(32)
    view = savings(JOB, tallies, 32, lambda _: judge)
    return JobVerdict(view, dict.fromkeys(Amounts._fields, judge.basis()))


def tallies_of(runs: list[Run]) -> list[Tally]:
    return [Tally(each.batch_size, TrialState.COMPLETED, Origin.INCUMBENT, 1, each.amount, 1.0) for each in runs]


def test_saving_of_a_period_counts_runs_and_stopped_trials_of_the_period_only() -> None:
    """16 runs at 200 J in place of 400 J, 10 of them in the period."""
    runs = [Run(16, 10, 400.0, is_exploration=True), *[Run(32, 10, 200.0), Run(32, 10, 200.0), Run(16, 10, 400.0)] * 8]
    stopped = Tally(32, TrialState.EARLY_STOPPED, Origin.EXPLORATION, 1, 90.0, 1.0)
    verdict = verdict_of(runs, [*tallies_of(runs), stopped])
    everything = saved_since(JOB, [*tallies_of(runs), stopped], verdict)["energy_j"]
    late = saved_since(JOB, tallies_of(runs[10:]), verdict)["energy_j"]
    assert late is not None
    assert late.taken == sum(run.amount for run in runs[10:])
    assert late.middle == pytest.approx(10 * 200, rel=0.03)
    assert everything is not None
    assert everything.middle == pytest.approx(16 * 200 - 90, rel=0.03)
    assert verdict.savings.energy_j.saved == pytest.approx(everything.middle)


def test_run_at_another_size_counts_as_the_nearest_runs_at_the_best_size() -> None:
    """A run of 900 J at size 64 would have taken 200 J at the best size, and therefore 400 J at the default."""
    runs = [Run(16, 10, 400.0, is_exploration=True), *[Run(32, 10, 200.0), Run(32, 10, 200.0), Run(16, 10, 400.0)] * 8]
    verdict = verdict_of([*runs, Run(64, 10, 900.0, is_exploration=True)], [])
    own = tallies_of([Run(64, 10, 900.0)])
    saved = saved_since(JOB, own, verdict)["energy_j"]
    assert saved is not None
    assert (saved.taken, saved.middle) == (900.0, pytest.approx(400.0 - 900.0, rel=0.03))
    # The interval of the effect, and the spread of the runs that replace the run at 64.
    basis = verdict.bases["energy_j"]
    assert basis is not None
    assert basis.reach > 0
    low, high = (200.0 * math.exp(each or 0.0) - 900.0 for each in (basis.low, basis.high))
    assert (saved.low or 0.0) < low < saved.middle < high < (saved.high or 0.0)


def test_job_without_a_shown_verdict_has_saved_nothing() -> None:
    runs = [Run(16, 10, 400.0, is_exploration=True), *[Run(32, 10, 420.0), Run(32, 9, 380.0), Run(16, 10, 400.0)] * 8]
    verdict = verdict_of(runs, tallies_of(runs))
    assert verdict.savings.controls == 9
    assert saved_since(JOB, tallies_of(runs), verdict) == dict.fromkeys(Amounts._fields)
