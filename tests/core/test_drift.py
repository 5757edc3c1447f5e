"""Change of what a run costs: told when it is more than noise, and by no run on a busy machine."""

from __future__ import annotations

import random

import pytest

from bso_server.core.gp_voi.run_costs import drift_of
from bso_server.core.verdict import CompletedRun
from tests.support import jobs
from zeus_plugins.protocol import CreatedJob, Origin

JOB = CreatedJob.model_validate(jobs.job(**jobs.THREE_SIZES, eta_knob=1.0))


def runs(*costs_j: float, size: int = 16, waited_share: float = 0.0) -> list[CompletedRun]:
    kind = (size, Origin.INCUMBENT, 4.0, 10.0)
    return [CompletedRun(n, n, *kind, cost_j, waited_share) for n, cost_j in enumerate(costs_j, 1)]


@pytest.mark.parametrize("factor", [0.5, 2.0])
def test_two_runs_of_another_cost_are_a_change_and_a_single_run_is_none(factor: float) -> None:
    before = [100.0, 103.0, 98.0, 101.0, 99.0]
    assert drift_of(JOB, runs(*before, 100 * factor)) is None
    assert drift_of(JOB, runs(*before, 100 * factor, 101 * factor)) == pytest.approx(factor - 1, abs=0.03)


def test_noise_is_no_change() -> None:
    chance = random.Random(3)  # noqa: S311 - no secret
    for noise in (0.02, 0.1, 0.3):
        costs_j = [100.0 * chance.lognormvariate(0, noise) for _ in range(60)]
        assert [drift_of(JOB, runs(*costs_j[:count])) for count in range(1, 61)] == [None] * 60


def test_other_sizes_and_busy_machines_are_not_compared() -> None:
    before = runs(100.0, 103.0, 98.0, 101.0, 99.0)
    assert drift_of(JOB, before + runs(300.0, 301.0, size=8)) is None
    assert drift_of(JOB, before + runs(300.0, 301.0, waited_share=0.5)) is None
    assert drift_of(JOB, [*before, *runs(300.0, waited_share=0.5), *runs(301.0)]) is None
    assert drift_of(JOB, [*before, *runs(300.0, 301.0), *runs(100.0, waited_share=0.5)]) is None
    assert drift_of(JOB, []) is None


@pytest.mark.slow
def test_rates_on_simulated_jobs(capsys: pytest.CaptureFixture[str]) -> None:
    """The figures of docs/alerts.md."""
    chance = random.Random(1)  # noqa: S311 - no secret

    def changes(costs_j: list[float]) -> list[int]:
        found, first = list[int](), 0
        for count in range(1, len(costs_j) + 1):
            if drift_of(JOB, runs(*costs_j[first:count])) is not None:
                found.append(count)
                first = count - 2
        return found

    def costs_j(noise: float, *parts: tuple[int, float]) -> list[float]:
        return [mean_j * chance.lognormvariate(0, noise) for number, mean_j in parts for _ in range(number)]

    mistakes, noticed = dict[float, int](), dict[float, int]()
    for noise in (0.02, 0.05, 0.1, 0.2, 0.3):
        mistakes[noise] = sum(len(changes(costs_j(noise, (100, 100.0)))) for _ in range(60))
        doubled = [costs_j(noise, (20, 100.0), (6, 200.0)) for _ in range(60)]
        noticed[noise] = sum(any(count > 20 for count in changes(each)) for each in doubled)
    with capsys.disabled():
        print(f"\nmistakes in 6000 runs by noise: {mistakes}; of 60 doublings noticed within 6 runs: {noticed}")
    assert max(mistakes.values()) <= 6
    assert noticed[0.05] >= 55
