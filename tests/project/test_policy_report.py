"""Report on policies and their rivals: jobs, conditions, choices of rivals, tables and pictures."""

from __future__ import annotations

import math
import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from benchmarks.policies.__main__ import main
from benchmarks.policies.cases import Case, case_of, mlperf_workloads
from benchmarks.policies.contest import Paid, Task, paid, simulate
from benchmarks.reports import entry, read_policy_results
from benchmarks.tables import policy_tables
from bso_server.simulate.results import Setting
from bso_server.simulate.workload import Epoch, SizeTrace, Workload
from tests.support.simulated import HALF, WORKLOAD, only, paper_traces


def test_mlperf_file_yields_the_documented_jobs(tmp_path: Path) -> None:
    jobs = mlperf_workloads(paper_traces(tmp_path) / "mlperf_convergence.json")
    # Three saturations; from the second-smallest size, and from the second-largest.
    assert [job.default_batch_size for job in jobs] == [128, 256] * 3
    # Three times the default's mean of 32/3, or 12 epochs.
    assert [job.max_epochs for job in jobs] == [32, 36] * 3
    assert jobs[0].sizes[3].epochs_to_target == (16.0, 20.0)
    # The geometric mean of the sizes is 181: b₀ is an eighth of 181, equal to 181, and eight times 181.
    for job, saturates_at in zip(jobs, [22.627, 22.627, 181.02, 181.02, 1448.2, 1448.2], strict=True):
        smallest, largest = (size.epochs[job.max_power_w] for size in (job.sizes[0], job.sizes[-1]))
        assert smallest.time_s / largest.time_s == pytest.approx(
            (1 + saturates_at / 64) / (1 + saturates_at / 512), rel=1e-4
        )
        utilisation = 64 / (64 + saturates_at)
        assert smallest.energy_j / smallest.time_s / job.max_power_w == pytest.approx(
            0.35 + 0.65 * utilisation, rel=1e-4
        )


def fixed(epochs: dict[int, float], default: int, recurrences: int, *, slow_size: int = 0, **conditions: Any) -> Case:
    """Return a case at η = 1 with one run per size. Epochs take 10 s and 1000 J; at the slow size 20 s and 100 J."""
    quick, slow = Epoch(10, 1000), Epoch(20, 100)
    sizes = tuple(
        SizeTrace(size, (needed,), {100.0: slow if size == slow_size else quick}) for size, needed in epochs.items()
    )
    workload = Workload("fixed", sizes, default, max_epochs=50, max_power_w=100.0)
    return case_of(workload, Setting(recurrences=recurrences, eta=1.0), **conditions)


def costs(case: Case, name: str, seed: int = 0) -> list[float]:
    """Return the costs of the recurrences in epochs."""
    return [cost_j / 1000 for cost_j in paid(case, name, seed).costs_j]


# Sizes 1, 2, 4 and 8 need 9, 7, 3 and 5 epochs, and the default is 2.
FOUR = {1: 9.0, 2: 7.0, 4: 3.0, 8: 5.0}


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("default", [7] * 14),
        ("floor", [7] + [3] * 13),
        # Each size, the default first.
        ("grid", [7, 9, 3, 5] + [3] * 10),
    ],
)
def test_rivals_play_the_documented_sizes(name: str, expected: list[float]) -> None:
    assert costs(fixed(FOUR, default=2, recurrences=14), name) == expected


def test_missed_run_is_charged_and_followed_by_the_default() -> None:
    assert costs(fixed({1: math.inf, 2: 7.0}, default=2, recurrences=4), "grid") == [7, 50 + 7, 7, 7]


def test_default_never_reaching_the_target_costs_infinitely_much() -> None:
    hopeless = fixed({1: math.inf, 2: 7.0}, default=1, recurrences=6)
    assert costs(hopeless, "grid") == [math.inf] + [7] * 5


def test_rivals_find_power_limits_in_the_first_epoch_of_a_size() -> None:
    """All contenders except the default pay for profiling, 2,350 J instead of 1,900 J, on top of 7,600 J."""
    case = case_of(only(16), Setting(recurrences=3))
    assert paid(case, "grid", 0).costs_j == [8050, 7600, 7600]
    thrifty = case_of(only(16), Setting(recurrences=3, eta=1.0))
    assert paid(thrifty, "grid", 0).costs_j == [6500, 6400, 6400]
    assert paid(thrifty, "default", 0).costs_j == [7200, 7200, 7200]


def test_concurrent_recurrences_of_a_rival_are_literal() -> None:
    # Size 1 takes 180 s and costs least. Three begin at once; until 180 s, two continue with the best of the rest.
    case = fixed(FOUR, default=2, recurrences=18, slow_size=1)
    assert costs(case, "grid") == [7, 0.9, 3, 5] + [0.9] * 14
    case = replace(case, setting=replace(case.setting, concurrency=3))
    assert costs(case, "grid") == [7, 0.9, 3, 5] + [3] * 8 + [0.9] * 6


def test_conditions_apply_to_rivals_too() -> None:
    before, after = fixed(FOUR, default=2, recurrences=4), fixed(dict.fromkeys(FOUR, 2.0), default=2, recurrences=4)
    landscapes = (*[before.conditions.landscape] * 2, *[after.conditions.landscape] * 2)
    drifting = fixed(FOUR, default=2, recurrences=4, landscapes=landscapes)
    assert costs(drifting, "default") == [7, 7, 2, 2]
    noisy = fixed(FOUR, default=2, recurrences=50, cost_noise_sd=0.3)
    assert len(set(costs(noisy, "default"))) == 50
    assert costs(noisy, "default", seed=0) != costs(noisy, "default", seed=1)


def test_every_strategy_draws_the_same_runs_for_a_seed() -> None:
    """Compare the runs of a server's policy and of a rival, which share their randomness."""
    varied = replace(WORKLOAD, sizes=(SizeTrace(16, tuple(map(float, range(2, 12))), HALF),))
    case = case_of(varied, Setting(recurrences=20, beta=None, optimal_power_limits=False))
    assert paid(case, "default", 3).costs_j == pytest.approx(paid(case, "zeus", 3).costs_j)


def test_entries_of_a_row_are_literal() -> None:
    cases = [replace(fixed(FOUR, default=2, recurrences=20), name=name) for name in ("cheap", "dear")]
    # The oracle takes 3,000 J. The ratios are 1, or 2 and 4 in two seeds, with a mean of 3.
    jobs = [[Paid([3000.0] * 20)] * 2, [Paid([6000.0] * 20, given_up=4), Paid([12000.0] * 20)]]
    found = entry(cases, jobs)
    assert (found["cases"], found["seeds"], found["given_up"], found["worst_case"]) == (2, 2, 4, "dear")
    assert found["worst"] == {"10": 3.0, "20": 3.0}
    assert found["geometric_mean"] == {"10": 1.7321, "20": 1.7321}
    never = entry(cases[:1], [[Paid([3000.0] * 19 + [math.inf])]])
    assert never["geometric_mean"] == {"10": 1.0, "20": None}


TABLES = """# Costs
<!-- table: traces -->
<!-- end of table -->
between
<!-- table: mlperf -->
| old |
<!-- end of table -->
after
"""


def report(folder: Path, *options: str) -> int:
    return main(["--results", str(folder / "results.json"), *options])


def test_report_writes_results_and_tables(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    document, folder = tmp_path / "page.md", paper_traces(tmp_path)
    document.write_text(TABLES)
    measure = ["--traces", str(folder), "--only", "traces", "mlperf", "--policies", "zeus", "grid", "--workers", "1"]
    assert report(tmp_path, *measure, "--seeds", "1", "--write", str(document)) == 0
    shown = capsys.readouterr()
    # 36 and 6 cases of two contenders.
    assert shown.err.splitlines()[-1].startswith("84 of 84 parts")
    traces, mlperf = policy_tables(read_policy_results(tmp_path / "results.json")).values()
    filled = TABLES.replace("<!-- table: traces -->", f"<!-- table: traces -->\n{traces}").replace("| old |", mlperf)
    assert document.read_text() == filled
    assert shown.out == f"{traces}\n\n{mlperf}\n"
    # A repeated measurement replaces its earlier result; the rest stays.
    before = read_policy_results(tmp_path / "results.json")
    assert report(tmp_path, *measure[:3], "traces", "--policies", "grid", "--workers", "1", "--seeds", "9") == 0
    after = read_policy_results(tmp_path / "results.json")
    assert after["traces"]["grid"]["seeds"] == 9
    assert after["traces"]["zeus"] == before["traces"]["zeus"]
    assert after["mlperf"] == before["mlperf"]


@pytest.mark.slow
def test_results_do_not_depend_on_the_number_of_processes() -> None:
    case = case_of(WORKLOAD, Setting(recurrences=10), cost_noise_sd=0.3)
    tasks = [Task(case, name, seeds) for name in ("zeus", "grid") for seeds in (range(3), range(3, 5))]
    told: list[tuple[int, int]] = []
    alone = simulate(tasks, 1, lambda done, total: told.append((done, total)))
    assert told == [(1, 4), (2, 4), (3, 4), (4, 4)]
    assert [len(jobs) for jobs in alone] == [3, 2, 3, 2]
    assert len({job.costs_j[0] for jobs in alone for job in jobs}) > 3
    assert simulate(tasks, 2, lambda *_: None) == alone
    # Only the worker processes limit their threads.
    assert "OPENBLAS_NUM_THREADS" not in os.environ
