"""Simulator on synthetic traces with costs counted by hand."""

from __future__ import annotations

import asyncio
import json
import math
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest

from bso_server.cli import main
from bso_server.cli.simulate import ratios_text, savings_text
from bso_server.core.savings import savings
from bso_server.core.verdict import Judge
from bso_server.simulate import results
from bso_server.simulate.play import Conditions, Simulation, job_of
from bso_server.simulate.results import Setting, compare, geometric_means, landscape_of, played
from bso_server.simulate.traces import Selection, Traces, recorded_workload
from bso_server.simulate.workload import Consumption, Epoch, Landscape, SizeTrace, Workload, landscape
from tests.support.histories import make_job
from tests.support.service import job_service
from tests.support.simulated import DIGITS_ARGUMENTS, EPOCHS, NEVER, WORKLOAD, only, trace_files, without_padding
from zeus_plugins.protocol import GP_VOI, OWN_POLICIES, ZEUS, JobView, Origin, Stage, TrialState, TrialView


def test_landscape_costs_of_sizes_are_literal() -> None:
    found = landscape(WORKLOAD, eta=0.5, optimal_power_limits=True)
    assert [profile.epoch_j for profile in found.profiles.values()] == [1900, 1900, 950, 950]
    assert [profile.expected_cost_j for profile in found.profiles.values()] == [15200, 7600, 5700, math.inf]
    assert found.oracle.batch_size == 32
    assert found.default.expected_cost_j == 7600
    assert found.profiles[8].profiling == Epoch(15, 1700)
    # With η = 1, only energy counts: the lower limit is optimal.
    energy = landscape(WORKLOAD, eta=1.0, optimal_power_limits=True)
    assert [profile.epoch_j for profile in energy.profiles.values()] == [1600, 1600, 800, 800]
    assert energy.default.expected_cost_j == 4 * 1800
    assert landscape(WORKLOAD, eta=1.0, optimal_power_limits=False).profiles[8].profiling is None


def test_failed_runs_are_paid_for_and_repeated() -> None:
    lucky = replace(WORKLOAD, sizes=(SizeTrace(16, (4.0, math.inf, 30.0, 6.0), EPOCHS),))
    # Half of the runs fail, after 20 epochs each: one failure per success, which takes 5.
    assert landscape(lucky, eta=0.5, optimal_power_limits=True).oracle.expected_cost_j == 25 * 1900
    with pytest.raises(ValueError, match="no recorded run reaches the target within 20 epochs"):
        landscape(replace(lucky, sizes=(SizeTrace(16, NEVER, EPOCHS),)), eta=0.5, optimal_power_limits=True)


@pytest.mark.parametrize("policy", OWN_POLICIES)
@pytest.mark.parametrize("concurrency", [1, 3])
def test_job_with_a_single_size_costs_the_sum_of_runs(policy: str, concurrency: int) -> None:
    setting = Setting(recurrences=10, seeds=2, concurrency=concurrency)
    comparison = compare(only(16), [policy], setting)
    result = comparison.results[policy]
    # The first epoch of the first run tries both limits: 0.5·1700 + 0.5·200·15 = 2350 J instead of 1900 J.
    assert result.ratio == {10: pytest.approx(1 + 450 / 76000)}
    if concurrency == 1:
        first = played(only(16), Conditions(comparison.landscape), policy, setting, 0)
        assert first.costs_j == pytest.approx([7600 + 450, *[7600] * 9])
    assert result.unfinished == 0
    assert result.energy_reduction_last5 == pytest.approx(0)


@pytest.mark.parametrize(
    ("eta", "energy_j", "time_s"),
    [
        # 40 epochs, the first of which tries both limits: 1700 J and 15 s.
        (0.5, 1700 + 39 * 1800, 15 + 39 * 10),
        (1.0, 1700 + 39 * 1600, 15 + 39 * 20),
    ],
)
def test_recurrences_consume_literal_energy_and_time_against_the_default(
    eta: float, energy_j: float, time_s: float
) -> None:
    comparison = compare(only(16), [GP_VOI], Setting(recurrences=10, seeds=2, eta=eta))
    # 40 epochs at the maximum limit, for every η.
    assert comparison.default_consumption == Consumption(40 * 1800, 400)
    consumed = comparison.results[GP_VOI].consumed
    assert consumed == Consumption(energy_j, time_s)
    saved = consumed.saved_against(comparison.default_consumption)
    assert saved == pytest.approx((1 - energy_j / 72_000, 1 - time_s / 400))


def test_energy_and_time_convert_to_kwh_and_hours() -> None:
    consumption = Consumption(energy_j=7.2e6, time_s=5400)
    assert (consumption.energy_kwh, consumption.time_h) == (2, 1.5)
    assert consumption.saved_against(Consumption(0, 0)) == consumption.saved_against(None) == (None, None)


def test_default_never_reaching_the_target_has_no_cost() -> None:
    comparison = compare(replace(WORKLOAD, default_batch_size=64), OWN_POLICIES, Setting(recurrences=5, seeds=1))
    shown = comparison.as_json()
    assert shown["default"] == {"batch_size": 64, "cost_j": None, "ratio": None}
    assert shown["spending"]["default"] is None
    assert shown["policies"]["gp_voi"]["energy_reduction_last5"] is None
    assert "made up always 64 0.5 - -" in without_padding(savings_text([comparison]))
    json.dumps(shown, allow_nan=False)


def test_energy_saving_is_relative_to_the_default_at_the_maximum_limit() -> None:
    result = compare(only(16), [GP_VOI], Setting(recurrences=10, seeds=1, eta=1.0)).results
    assert result[GP_VOI].energy_reduction_last5 == pytest.approx(1 - 1600 / 1800)


def test_both_policies_find_the_best_size() -> None:
    setting = Setting(recurrences=40, seeds=2)
    comparison = compare(WORKLOAD, OWN_POLICIES, setting)
    for policy, result in comparison.results.items():
        first = played(WORKLOAD, Conditions(comparison.landscape), policy, setting, 0)
        records = [trial.record for trial in first.trials]
        assert {record.batch_size for record in records[-5:] if record.origin is not Origin.CONTROL} == {32}
        assert result.unfinished == 0
        assert result.ratio[10] > result.ratio[20] > result.ratio[40] > 1
        assert result.worst_seed_ratio >= result.ratio[40]
    assert geometric_means([comparison, comparison])["zeus"]["20"] == pytest.approx(comparison.results[ZEUS].ratio[20])


class BreakingConditions(Conditions):
    """Conditions in which no run reaches the target from the second recurrence on."""

    def landscape_at(self, recurrence: int) -> Landscape:
        at = self.landscape
        profiles = {size: replace(profile, epochs_to_target=NEVER) for size, profile in at.profiles.items()}
        return replace(at, profiles=profiles) if recurrence else at


def test_abandoned_recurrences_are_finished_at_the_default() -> None:
    conditions = BreakingConditions(landscape(WORKLOAD, eta=0.5, optimal_power_limits=True))
    # Zeus has no size left after a round without survivors.
    for policy, concurrency in ((GP_VOI, 1), (ZEUS, 2)):
        spec = job_of(conditions.landscape, policy, seed=0, max_power=200.0, max_epochs=20)
        job = Simulation(spec, conditions, recurrences=4, concurrency=concurrency).play()
        assert policy == ZEUS or [trial.recurrence for trial in job.trials].count(3) == 20
        assert job.unfinished == 3
        # The owner then trains at the default: 4 epochs of 1900 J and 10 s, in addition to the exploration.
        tried_j = [sum(trial.cost_j for trial in job.trials if trial.recurrence == number) for number in range(4)]
        assert job.costs_j == pytest.approx([tried_j[0], *(spent_j + 4 * 1900 for spent_j in tried_j[1:])])
        assert job.consumed[3].time_s >= 40


def test_job_without_a_finishing_size_saves_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    hopeless, setting = replace(WORKLOAD, default_batch_size=64), Setting(recurrences=10, seeds=1)
    monkeypatch.setattr(results, "Conditions", BreakingConditions)
    comparison = compare(hopeless, [GP_VOI], setting)
    shown = comparison.as_json()
    json.dumps(shown, allow_nan=False)
    assert shown["policies"]["gp_voi"]["ratio"] == {"10": None}
    assert shown["policies"]["gp_voi"]["worst_seed_ratio"] is None
    assert shown["spending"]["default"] is None
    assert geometric_means([comparison]) == {"gp_voi": {"10": None}}
    assert "made up gp_voi 0.5 - - 9 -" in without_padding(ratios_text([comparison]))


def test_training_ends_before_an_epoch_beyond_the_cost_bound() -> None:
    """Zeus's data loader does this. A size's first epoch costs 1175 J, because it tries both power limits."""
    setting = Setting(recurrences=5, seeds=1)
    trials = played(WORKLOAD, Conditions(landscape_of(WORKLOAD, setting)), ZEUS, setting, 0).trials
    stopped = {trial.record.batch_size: trial.cost_j for trial in trials if trial.record.state == "early_stopped"}
    # The bound is twice the cost of the first run at 32: 1175 J and 5 epochs of 950 J. One more epoch would cross it.
    assert stopped == {64: 1175 + 11 * 950}
    assert 1175 + 11 * 950 <= 2 * (1175 + 5 * 950) < 1175 + 12 * 950


# --- Traces and the command -------------------------------------------------------------------------------------------

DIGITS = Selection("digits", "mlp", "adam", 0.9, 20, 24)


@pytest.fixture
def files(tmp_path: Path) -> list[str]:
    return trace_files(tmp_path)


def simulated(folder: Path, *arguments: str) -> dict[str, Any]:
    """Run the command; return its results, which must be standard JSON."""
    results = folder / "results.json"
    assert main(["simulate", *arguments, "--json", str(results)]) == 0
    found: dict[str, Any] = json.loads(results.read_text(), parse_constant=pytest.fail)
    return found


def test_traces_are_read_from_csv(files: list[str]) -> None:
    workload = Traces.read(Path(files[1]), Path(files[3])).workload(DIGITS)
    sizes = SizeTrace(16, (4.0, 5.0), EPOCHS), SizeTrace(32, (math.inf, math.inf), {200.0: Epoch(5, 900)})
    assert workload == Workload("digits/mlp", sizes, default_batch_size=16, max_epochs=20, max_power_w=200.0)


def test_command_simulates_traces(files: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    shown = simulated(tmp_path, *files, *DIGITS_ARGUMENTS, "--seeds", "2", "--recurrences", "20")
    assert shown["oracle"] == {"batch_size": 16, "cost_j": 4.5 * 1900}
    assert shown["default"]["ratio"] == 1
    assert shown["workload"]["batch_sizes"] == [16, 32]
    assert set(shown["policies"]) == {"zeus", "gp_voi"}
    for result in shown["policies"].values():
        assert set(result) == {"ratio", "worst_seed_ratio", "unfinished", "energy_reduction_last5"}
        assert set(result["ratio"]) == {"10", "20"}
    text = capsys.readouterr().out
    assert "digits/mlp  gp_voi" in text


def test_each_option_changes_the_simulation(files: list[str], tmp_path: Path) -> None:
    def ratio(*options: str) -> float:
        given = ["--policy", "gp_voi", "--seeds", "1", "--recurrences", "10", *options]
        return float(simulated(tmp_path, *files, *DIGITS_ARGUMENTS, *given)["policies"]["gp_voi"]["ratio"]["10"])

    base = ratio()
    assert ratio("--eta", "1") != base
    assert ratio("--beta", "none") != base


def test_command_accepts_several_etas(files: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    options = ["--policy", "gp_voi", "--seeds", "1", "--recurrences", "20", "--eta", "0", "--eta", "1", "--eta", "0"]
    shown = simulated(tmp_path, *files, *DIGITS_ARGUMENTS, *options)
    assert [each["eta"] for each in shown["workloads"]] == [0, 1]
    assert set(shown["geometric_mean"]["gp_voi"]) == {"10", "20"}
    for each in shown["workloads"]:
        # 4.5 epochs of 1800 J and 10 s.
        assert each["spending"]["default"] == pytest.approx({"energy_j": 162_000, "time_s": 900})
    fast, frugal = (each["spending"]["policies"]["gp_voi"] for each in shown["workloads"])
    assert fast["energy_j"] > frugal["energy_j"]
    assert fast["time_s"] < frugal["time_s"]
    text = without_padding(capsys.readouterr().out)
    assert "finishing them" not in text
    assert "digits/mlp always 16 0 0.045 0.25 digits" in text
    assert f"digits/mlp gp_voi 0 {fast['energy_j'] / 3.6e6:.4g} " in text
    assert f" {100 * (1 - fast['energy_j'] / 162_000):.1f} % {100 * (1 - fast['time_s'] / 900):.1f} % digits" in text
    assert "what 20 recurrences took" in text


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--dataset", "digits"], "Give --network, --optimizer, --target-metric, --max-epochs, --default"),
        (["--all", "--dataset", "digits"], "leave out --dataset"),
        (["--all"], "no batch size up to 1024 of cifar100/shufflenetv2"),
        ([*DIGITS_ARGUMENTS, "--target-metric", "0.95"], "0 sizes in the train trace, 3 in the power trace, 0 in both"),
    ],
)
def test_unusable_arguments_are_reported(
    files: list[str], arguments: list[str], words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["simulate", *files, *arguments]) == 1
    assert words in capsys.readouterr().err


@pytest.mark.parametrize(
    ("option", "instead"),
    [
        (["--probe"], "the first run takes the default size"),
        (["--first-run", "predicted"], "the first run takes the default size"),
        (["--price", "0.25"], "multiply the column KWH by the price"),
        (["--power-limit", "max"], "each size runs at its cheapest limit"),
        (["--concurrency", "4"], "python -m benchmarks.policies --only made-in-flight-4"),
        (["--warm-start", "absent.csv"], "python -m benchmarks.policies --policies warm"),
    ],
)
def test_removed_option_names_what_to_do_instead(
    option: list[str], instead: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        main(["simulate", *option, *DIGITS_ARGUMENTS])
    assert f"{option[0]} was removed: {instead}" in capsys.readouterr().err


def test_files_without_trace_columns_are_reported(files: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["simulate", *files[:2], "--power-trace", files[1], *DIGITS_ARGUMENTS]) == 1
    assert "has no column average_power, power_limit, time_per_epoch" in capsys.readouterr().err


@pytest.mark.parametrize("wrong", [["--eta", "2"], ["--beta", "0"], ["--seeds", "0"]])
def test_wrong_numbers_are_refused(files: list[str], wrong: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["simulate", *files, *DIGITS_ARGUMENTS, *wrong])
    assert wrong[0] in capsys.readouterr().err


# --- A job's own trials -----------------------------------------------------------------------------------------------


def trial_view(number: int, batch_size: int, state: TrialState, epochs: float | None, epoch_s: float = 10) -> TrialView:
    unknown = dict.fromkeys(("message", "ended_at", "end_reason", "energy_source", "cost_j", "metric"))
    time_s = None if epochs is None else epochs * epoch_s
    return TrialView(
        trial_number=number,
        batch_size=batch_size,
        state=state,
        origin=Origin.EXPLORATION,
        reason="",
        started_at=datetime(2026, 1, 1, tzinfo=UTC),
        time_s=time_s,
        energy_j=None if time_s is None else time_s * 50,
        epochs=epochs,
        **unknown,
    )


def job_view(*trials: TrialView) -> JobView:
    job = make_job((8, 16, 32, 64), 16, max_epochs=20)
    return JobView(
        job=job,
        stage=Stage.BANDIT,
        min_cost_j=None,
        best_batch_size=None,
        arms=(),
        trial_count=len(trials),
        trials=trials,
        savings=savings(job, [], None, lambda _: Judge(16, 16)),
    )


def test_recorded_trials_become_a_workload() -> None:
    completed, stopped, exhausted = TrialState.COMPLETED, TrialState.EARLY_STOPPED, TrialState.EXHAUSTED
    view = job_view(
        trial_view(1, 8, completed, 5),
        trial_view(2, 8, stopped, 5),  # would have needed more epochs than any recorded run
        trial_view(3, 32, completed, 3.5, epoch_s=12),
        trial_view(4, 32, completed, 6, epoch_s=8),
        trial_view(5, 32, stopped, 5),
        trial_view(6, 32, exhausted, 20),
        trial_view(7, 32, TrialState.FAILED, 1),
        trial_view(8, 64, TrialState.RUNNING, None),
        trial_view(9, 64, TrialState.INFEASIBLE, None),
    )
    workload = recorded_workload(view)
    assert [(size.batch_size, size.epochs_to_target) for size in workload.sizes] == [
        (8, (5, math.inf)),
        (32, (4, 6, 6, math.inf)),
    ]
    (epoch,) = workload.sizes[1].epochs.values()
    mean_s = (3.5 * 12 + 6 * 8 + 5 * 10 + 20 * 10) / 34.5
    assert (epoch.time_s, epoch.energy_j) == (pytest.approx(mean_s), pytest.approx(50 * mean_s))
    # 16 was never tried: the smaller of the two nearest sizes is used.
    assert (workload.default_batch_size, workload.max_epochs, workload.max_power_w) == (8, 20, 100)
    with pytest.raises(ValueError, match="no trial has reached the target yet"):
        recorded_workload(job_view(trial_view(1, 8, stopped, 5)))


async def test_simulating_a_job_of_the_database(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    url = f"sqlite:///{tmp_path / 'bso.sqlite3'}"
    async with job_service(url, policy=GP_VOI) as server:
        for _ in range(6):
            trial = await server.suggest()
            epochs = {8: 6, 16: 4, 32: 3}[trial.batch_size]
            await server.report(trial, cost_j=100.0 * epochs, epoch=epochs, metric=0.95)
        arguments = ["simulate", "--job", server.job_id, "--database-url", url, "--seeds", "1", "--recurrences", "10"]
        shown = await asyncio.to_thread(simulated, tmp_path, *arguments[1:])
        assert shown["workload"]["name"] == server.job_id
        assert shown["oracle"] == {"batch_size": 32, "cost_j": pytest.approx(300)}
        assert shown["spending"]["default"]["energy_j"] == pytest.approx(10 * 400)
        text = capsys.readouterr().out
        assert "was never measured" not in text
        assert await asyncio.to_thread(main, [*arguments, "--all"]) == 1
        assert "leave out --all" in capsys.readouterr().err


def test_missing_source_of_trials_is_reported(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["simulate", "--all", "--power-trace", "power.csv"]) == 1
    assert "Give --train-trace, or --job for a job's own trials" in capsys.readouterr().err


async def test_default_out_of_memory_is_replaced_by_the_nearest_measured_size(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    url = f"sqlite:///{tmp_path / 'bso.sqlite3'}"
    async with job_service(url, policy=GP_VOI) as server:
        await server.end(await server.suggest(), TrialState.INFEASIBLE)
        await server.reach(await server.suggest())
        arguments = ["simulate", "--job", server.job_id, "--database-url", url, "--seeds", "1", "--recurrences", "2"]
        assert await asyncio.to_thread(main, arguments) == 0
    text = capsys.readouterr().out
    assert "always 8" in text
    assert "the default size, 16, was never measured: the nearest measured size is used" in text
