"""Generated landscapes and conditions in the report on policies, and calibration of a policy's expectations."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from benchmarks.policies import cases
from benchmarks.policies.__main__ import main
from benchmarks.policies.calibration import total
from benchmarks.policies.cases import ROWS, Case, case_of
from benchmarks.policies.contest import paid
from benchmarks.policies.landscapes import FAMILIES, MadeJob, made_jobs
from benchmarks.reports import read_policy_results
from benchmarks.tables import policy_tables
from bso_server.core.model import EpochBound, Expectations, ExpectedCost, History, Suggestion
from bso_server.core.policy import Policy
from bso_server.simulate import results
from bso_server.simulate.results import Setting, landscape_of
from bso_server.simulate.workload import Landscape
from tests.support.policies import given
from tests.support.simulated import WORKLOAD, only
from zeus_plugins.protocol import Origin, TrialState

# η = 0.5: an epoch of 10 s and 1000 J at 200 W costs 1500 J.
JOB = MadeJob(
    name="by hand",
    batch_sizes=(8, 16, 32),
    default_place=1,
    max_epochs=60,
    eta=0.5,
    max_power_w=200.0,
    mean_epochs=np.array([10.0, 20.0, 30.0]),
    epochs_sd=0.2,
    missing=np.zeros(3),
    epoch_s=np.array([10.0, 10.0, 20.0]),
    epoch_j=np.array([1000.0, 1000.0, 2000.0]),
    cost_noise_sd=0.0,
)


def sizes_of(job: MadeJob) -> Landscape:
    return landscape_of(job.workload(), Setting(eta=job.eta))


def test_generated_landscapes_are_within_the_documented_ranges() -> None:
    jobs = made_jobs()
    assert len({job.name for job in jobs}) == 60
    for job in jobs:
        family, count = job.name.split()[0], len(job.batch_sizes)
        assert family in FAMILIES
        few = range(2, 4) if family == "few-sizes" else range(12, 13) if family == "twelve-odd-sizes" else range(5, 13)
        assert count in few
        assert list(job.batch_sizes) == sorted(set(job.batch_sizes))
        assert 0.05 <= job.epochs_sd <= 0.6
        assert 0 <= job.cost_noise_sd <= 0.5
        sizes = sizes_of(job)
        assert 1 <= sizes.default.expected_cost_j / sizes.oracle.expected_cost_j < 8
        assert job.missing[job.default_place] == 0
        assert (job.missing[0] == 1) == (family == "small-sizes-fail")
        assert (job.missing[-1] == 1) == (family == "large-sizes-fail")
    assert {sum(job.name.startswith(f"{family} ") for job in jobs) for family in FAMILIES} == {6}


def test_quantiles_of_a_generated_job_are_exact() -> None:
    """Expect the job's mean; 97.5 % of runs within 1.96 σ."""
    exact = replace(JOB, mean_epochs=np.array([1e6] * 3), missing=np.array([0.0, 0.5, 1.0]))
    size, half, never = (np.array(each.epochs_to_target) for each in exact.workload().sizes)
    assert size.mean() == pytest.approx(1e6, rel=0.003)
    assert np.isinf(half).mean() == 0.5
    assert np.isinf(never).all()
    log_epochs = np.log(size / 1e6) + 0.2**2 / 2
    assert log_epochs[194:196].mean() / 0.2 == pytest.approx(1.96, rel=0.01)


def made_cases(row: str) -> list[Case]:
    return ROWS[row].cases(Path("not needed"), 100)


def test_waiting_runs_take_longer_and_so_do_the_oracles() -> None:
    conditions = cases.VaryingConditions(sizes_of(JOB), waited_shares=(0.0, 0.75))
    case = replace(case_of(JOB.workload(), Setting(recurrences=4)), conditions=conditions)
    job = case.play("gp_voi", 0)
    shares = [trial.record.waited_share for trial in job.trials if not trial.recurrence % 2 or trial.recurrence == 1]
    assert set(shares) == {0.0, 0.75}
    assert results.oracle_costs_j(conditions, 4) == pytest.approx([15000, 60000] * 2, rel=0.02)
    for trial in job.trials[2:]:
        epoch_j = conditions.landscape.profiles[trial.record.batch_size].epoch_j * (4 if trial.recurrence % 2 else 1)
        assert trial.cost_j / trial.record.epoch == pytest.approx(epoch_j, rel=0.05)
    assert paid(case, "default", 0).costs_j[1] > 3 * paid(case, "default", 0).costs_j[0]


def test_changing_rows_are_literal(monkeypatch: pytest.MonkeyPatch) -> None:
    failing = replace(JOB, name="failing", missing=np.array([1.0, 0.0, 0.0]))
    monkeypatch.setattr(cases, "made_jobs", lambda: (JOB, failing))
    changed = {row: made_cases(f"made-{row}") for row in ("abrupt-change", "gpu-change", "costs")}
    assert [len(row) for row in changed.values()] == [1, 2, 2]

    def expected_j(row: str, *recurrences: int) -> list[float]:
        at = (changed[row][0].conditions.landscape_at(recurrence) for recurrence in recurrences)
        return [each.profiles[8].expected_cost_j / 15000 for each in at]

    approx = {"rel": 0.02}
    assert expected_j("costs", 0, 99) == pytest.approx([1, 1], **approx)
    assert expected_j("abrupt-change", 49, 50) == pytest.approx([1, 3], **approx)
    assert changed["abrupt-change"][0].workload.max_epochs == 60
    assert expected_j("gpu-change", 39, 40) == pytest.approx([1, 0.4 * 3.639 / 2.3195], **approx)
    assert {case.conditions.cost_noise_sd for case in changed["costs"]} == {0.5}


def test_runs_crash_halfway_and_are_repeated() -> None:
    """Crash after two of four epochs of 1900 J."""
    case = case_of(only(16), Setting(recurrences=1000, beta=None, optimal_power_limits=False))
    case = replace(case, conditions=replace(case.conditions, crash_chance=0.05))
    job = case.play("zeus", seed=0)
    crashed = [trial for trial in job.trials if trial.record.state is TrialState.FAILED]
    assert 0.03 < len(crashed) / len(job.trials) < 0.07
    assert {trial.record.epoch for trial in crashed} == {2}
    assert {trial.cost_j for trial in crashed} == {3800}
    assert len(job.trials) == 1000 + len(crashed)
    assert sum(job.costs_j) == 1000 * 7600 + len(crashed) * 3800
    assert job.unfinished == 0
    # Rivals' runs crash by the same draws.
    assert paid(case, "default", 0).costs_j == job.costs_j


def test_calibration_of_a_made_up_history_is_exact() -> None:
    """Try 32 and 8, which is stopped; the sizes cost 15,200, 7,600, 5,700 and infinitely many joules."""

    def suggest(history: History, _: np.random.Generator) -> Suggestion:
        trials = sum(arm.trials for arm in history.arms.values())
        if trials == 2:
            return Suggestion(32, Origin.EXPLORATION, "a trial")
        if trials == 3:
            return Suggestion(8, Origin.EXPLORATION, "a trial", bound=EpochBound(1, "enough"))
        return Suggestion(16, Origin.INCUMBENT, "best so far")

    def expectations(history: History) -> Expectations:
        recurrences = history.recurrences
        if not recurrences:
            return Expectations({}, None)
        bands = {
            8: (15100.0, 15300.0) if recurrences < 8 else (15300.0, 15400.0),
            16: (7000.0, 7700.0) if recurrences > 1 else (7000.0, 7500.0),
            32: (1.0, 2.0),
            64: (1.0, 1e9),
        }
        return Expectations({size: ExpectedCost(1.0, band_j) for size, band_j in bands.items()}, 16)

    case = case_of(WORKLOAD, Setting(recurrences=12, optimal_power_limits=False))
    with given("seer", Policy(version="1", suggest=suggest, expectations=expectations)):
        tallies = paid(case, "seer", 0, calibrates=True).tallies
    # Recurrence 3, counted from 0, tries 8, and repeats the run at 16. Size 64 would never reach the target.
    assert tallies == {
        "best-1": (1, 2),
        "best-3": (7, 7),
        "best-10": (2, 2),
        "never-run": (1, 1),
        "stopped": (4, 6),
    }
    assert total([tallies, tallies])["stopped"] == (8, 12)


def report(folder: Path, *options: str) -> int:
    return main(["--results", str(folder / "results.json"), *options])


@pytest.mark.slow
def test_generated_rows_need_no_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert report(tmp_path, "--only", "landscapes", "traces", "mlperf") == 1
    assert "these rows need --traces DIR, the folder of the traces: traces, mlperf" in capsys.readouterr().err
    assert not (tmp_path / "results.json").exists()
    monkeypatch.setattr(cases, "made_jobs", lambda: (JOB,))
    chosen = ["--only", "landscapes", "made-crashes", "--policies", "gp_voi", "default", "--seeds", "1"]
    assert report(tmp_path, *chosen, "--workers", "1") == 0
    results = read_policy_results(tmp_path / "results.json")
    tables = policy_tables(results)
    assert list(tables) == ["landscapes", "made-conditions", "calibration"]
    head, _, own, default = tables["landscapes"].splitlines()
    assert "| worst | last size > 5 % too expensive | given up |" in head
    assert "| 0 % | 0 | 1 |" in own
    assert "| 100 % | 0 | 1 |" in default
    _, _, crashes, *_ = tables["made-conditions"].splitlines()
    assert re.fullmatch(r"\| 5 % of the runs crash half way( \| \d\.\d{3} / \d\.\d{3} \(\d\.\d{3}\)){2} \|", crashes)
    assert tables["calibration"].startswith("| 90 % band holds the expected cost of the | landscapes, `gp_voi` |\n")
    assert results["landscapes"]["gp_voi"]["calibration"]["best-10"][1] == 90
    assert "calibration" not in results["made-crashes"]["gp_voi"]
    # Without new measurements, the earlier results stay.
    assert report(tmp_path) == 0
    assert read_policy_results(tmp_path / "results.json") == results
