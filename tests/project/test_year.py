"""A fleet's year: jobs, accidents of their runs, and a small fleet through a real server, on a made-up table."""

from __future__ import annotations

import json
import math
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

from benchmarks.policies.cases import VaryingConditions
from benchmarks.tables import year_tables
from benchmarks.year import FleetJob, Odds, by_default, draw_jobs, read_pool
from bso_server.simulate.results import Setting, landscape_of
from bso_server.simulate.workload import Epoch, SizeTrace, Workload
from tests.support import ROOT

MADE_UP = {
    "jobs": {
        "one": {"sizes": [8, 16, 32], "reports_to_target": [[10, 11], [10, 10], [9, 30]]},
        "two": {"sizes": [64, 128, 256], "reports_to_target": [[4, 4], [5, 6], [7, 8]]},
    }
}
CERTAIN = Odds(crash=0.0, preemption=0.0, vanishing=0.0)


def job_with(paths: Sequence[float], odds: Odds = CERTAIN, every: int = 1) -> FleetJob:
    """Return a job with one size and epochs of 10 s and 1 kJ each, which recurs twice."""
    workload = Workload("made up", (SizeTrace(32, tuple(paths), {300.0: Epoch(10.0, 1000.0)}),), 32, 20, 300.0)
    conditions = VaryingConditions(landscape_of(workload, Setting(optimal_power_limits=False)))
    return FleetJob(1, workload, conditions, 2, 1.0, every, odds)


def file_of(tmp_path: Path) -> Path:
    file = tmp_path / "convergence.json"
    file.write_text(json.dumps(MADE_UP))
    return file


def test_runs_are_evaluated_at_intervals_and_at_the_end() -> None:
    job = job_with([7.0], every=3)
    assert job.evaluations(7.0) == [3, 6, 9]
    assert job.evaluations(6.0) == [3, 6]
    assert job.evaluations(19.5) == [3, 6, 9, 12, 15, 18, 20]
    assert job.evaluations(math.inf) == [3, 6, 9, 12, 15, 18, 20]


def test_recurrence_at_the_default_costs_the_epochs() -> None:
    consumed = by_default(job_with([7.0]), 0)
    assert (consumed.time_s, consumed.energy_j) == (70.0, 7000.0)


def test_missed_run_is_charged_and_repeated() -> None:
    job = job_with([math.inf, 7.0])
    costs = {by_default(job, recurrence).energy_j for recurrence in range(40)}
    assert min(costs) == 7000.0
    assert {cost - 7000.0 for cost in costs} <= {20_000.0 * misses for misses in range(20)}
    assert len(costs) > 1


def test_crash_costs_the_training_until_then() -> None:
    job = job_with([10.0], Odds(crash=0.5, preemption=0.0, vanishing=0.0))
    costs = [by_default(job, recurrence).energy_j for recurrence in range(40)]
    assert min(costs) == 10_000.0
    assert 10_000.0 < max(costs) < 100_000.0
    assert any(cost % 10_000.0 for cost in costs)


def test_fate_of_a_run_depends_only_on_the_position() -> None:
    job = job_with([5.0, 7.0, 9.0], Odds(crash=0.3, preemption=0.3, vanishing=0.3))
    fates = [job.fate(32, recurrence, attempt) for recurrence in range(20) for attempt in range(3)]
    assert fates == [job.fate(32, recurrence, attempt) for recurrence in range(20) for attempt in range(3)]
    assert {fate.ends for fate in fates} == {"crash", "vanishing", None}
    assert {fate.is_preempted for fate in fates} == {True, False}


def test_equal_seeds_draw_equal_fleets(tmp_path: Path) -> None:
    pool = read_pool(file_of(tmp_path), None)
    fleets = [draw_jobs(pool, 30, mean_recurrences=10, evaluations=8, odds=Odds(), seed=3) for _ in range(2)]
    first, second = ([(job.workload.name, job.recurrences, job.scale) for job in fleet] for fleet in fleets)
    assert first == second
    assert min(job.recurrences for job in fleets[0]) >= 4
    assert 5 < sum(job.recurrences for job in fleets[0]) / 30 < 20
    drifting = [job for job in fleets[0] if job.conditions.drift_at is not None]
    assert 0 < len(drifting) < 15
    assert all(job.conditions.drift_at == job.recurrences // 2 for job in drifting)


def test_missing_table_yields_no_jobs() -> None:
    with pytest.raises(ValueError, match="give --mlperf FILE or --traces DIR"):
        read_pool(None, None)


def test_totals_state_the_savings() -> None:
    spending = {
        "energy_j": 3.6e9,
        "energy_kwh": 1000.0,
        "time_h": 10.0,
        "runs": 12,
        "given_up": 0,
        "ends": {"crash": 1},
    }
    results = {
        "at": "2026-01-02",
        "jobs": 3,
        "recurrences": 11,
        "drifting": 1,
        "in_flight": 4,
        "default": {"energy_j": 7.2e9, "energy_kwh": 2000.0, "time_h": 20.0},
        "policies": {
            "zeus": {**spending, "energy_share_saved": -0.125, "time_share_saved": 0.0},
            "gp_voi": {**spending, "energy_j": 2.7e9, "energy_share_saved": 0.5, "time_share_saved": 0.25},
        },
        "server": {
            "requests": {"GET /jobs/batch_size": 5, "POST /report": 15},
            "requests_per_s": 40.0,
            "decisions_per_s": 10.0,
            "cpu_ms_per_request": 1.25,
            "stuck_jobs": 0,
            "database_bytes": 2**20,
            "bytes_per_trial": 2048.0,
        },
    }
    made = year_tables(results)
    assert "| `gp_voi` | 1.0 | 50.0 % | 10 | 25.0 % | 12 | 0 |" in made["fleet"]
    assert "`gp_voi` against `zeus`: 25.0 % of the energy saved." in made["fleet"]
    assert "| `zeus` | 1.0 | −12.5 % |" in made["fleet"]
    assert "| requests | 20 |" in made["fleet-server"]
    assert "| runs that crashed | 2 |" in made["fleet-server"]


@pytest.mark.slow
def test_small_fleet_leaves_no_job_stuck(tmp_path: Path) -> None:
    figures, page = tmp_path / "fleet.json", tmp_path / "page.md"
    page.write_text("<!-- table: fleet -->\n<!-- end of table -->\n")
    command = [sys.executable, "-m", "benchmarks.year", "--mlperf", str(file_of(tmp_path)), "--jobs", "8"]
    done = subprocess.run(
        [*command, "--recurrences", "6", "--clients", "4", "--json", str(figures), "--write", str(page)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    results = json.loads(figures.read_text())
    assert results["server"]["stuck_jobs"] == 0
    for found in results["policies"].values():
        assert found["recurrences"] == results["recurrences"]
        assert found["runs"] >= found["recurrences"]
        assert found["energy_j"] > 0
    assert results["server"]["requests"]["POST /jobs"] == 2 * 8
    assert "always the default" in page.read_text()
