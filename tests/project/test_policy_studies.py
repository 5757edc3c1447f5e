"""Studies of policies: varying conditions, and every trial of a job."""

from __future__ import annotations

import csv
import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from benchmarks.policies.__main__ import main
from benchmarks.policies.cases import in_reverse, shuffled, with_bad_neighbours
from benchmarks.policies.study import study
from bso_server.simulate.results import Setting
from bso_server.simulate.workload import Consumption, SizeTrace
from tests.support.simulated import DIGITS_ARGUMENTS, EPOCHS, NEVER, WORKLOAD, trace_files
from zeus_plugins.protocol import GP_VOI, ZEUS, TrialState

pytestmark = pytest.mark.slow


@pytest.fixture
def files(tmp_path: Path) -> list[str]:
    return trace_files(tmp_path)


def test_default_after_a_drift_has_a_new_cost() -> None:
    # Size 16 takes 4 epochs, and 6 after the drift.
    drifting = study(WORKLOAD, [GP_VOI], Setting(recurrences=5, seeds=1), drift_at=3)
    assert drifting.comparison.default_consumption == Consumption((3 * 4 + 2 * 6) * 1800, 240)


@pytest.mark.parametrize(("foresight", "epochs"), [(True, 8), (False, 9)])
@pytest.mark.parametrize("concurrency", [1, 2])
def test_zeus_stops_before_or_after_the_bound(foresight: bool, epochs: int, concurrency: int) -> None:
    # The default costs 4·1900 J at the maximum limit. The bound is twice this cost: eight epochs at size 8, which needs
    # 9.
    slow = replace(WORKLOAD, sizes=(SizeTrace(8, (9.0,), EPOCHS), *WORKLOAD.sizes[1:2]))
    setting = Setting(recurrences=4, seeds=1, optimal_power_limits=False, concurrency=concurrency)
    trials = study(slow, [ZEUS], setting, foresight=foresight).first_jobs[ZEUS].trials
    assert (trials[0].record.batch_size, trials[0].record.state) == (16, TrialState.COMPLETED)
    tried = next(trial for trial in trials if trial.record.batch_size == 8)
    assert (tried.record.state, tried.record.epoch) == (TrialState.EARLY_STOPPED, epochs)
    assert tried.cost_j == epochs * 1900
    assert tried.epochs_to_target == 9


def test_irregular_landscapes_are_literal() -> None:
    bad = with_bad_neighbours(WORKLOAD)
    assert [size.epochs_to_target for size in bad.sizes] == [(24.0,), (4.0,), (18.0,), NEVER]
    orders = {tuple(size.epochs_to_target[0] for size in shuffled(WORKLOAD, seed).sizes) for seed in range(60)}
    assert {tuple(sorted(order)) for order in orders} == {(4.0, 6.0, 8.0, math.inf)}
    # Four values in any order, except the six orders in which the default would never reach the target.
    assert len(orders) == 18
    assert shuffled(WORKLOAD, 3) == shuffled(WORKLOAD, 3)
    assert [size.epochs for size in shuffled(WORKLOAD, 3).sizes] == [size.epochs for size in WORKLOAD.sizes]


def test_drifting_job_reverses_the_landscape() -> None:
    reversed_paths = [size.epochs_to_target for size in in_reverse(WORKLOAD).sizes]
    assert reversed_paths == [NEVER, (6.0,), (4.0,), (8.0,)]
    drifting = study(WORKLOAD, [GP_VOI], Setting(recurrences=60, seeds=3), drift_at=30)
    assert drifting.comparison.results[GP_VOI].unfinished == 0
    since = drifting.ratio_since_drift(GP_VOI)
    assert since is not None
    assert since < 1.5
    before, after = (drifting.comparison.conditions.landscape_at(recurrence).oracle for recurrence in (29, 30))
    assert (before.expected_cost_j, after.expected_cost_j) == (5700, 3800)


def test_study_lists_every_trial_of_the_first_job(files: list[str], tmp_path: Path) -> None:
    history = tmp_path / "history.csv"
    options = ["--seeds", "1", "--recurrences", "20", "--eta", "0", "--eta", "1", "--history", str(history)]
    assert main(["study", *files, *DIGITS_ARGUMENTS, *options]) == 0
    with history.open(newline="") as lines:
        trials = list(csv.DictReader(lines))
    assert {trial["policy"] for trial in trials} == {"zeus", "gp_voi"}
    assert trials[0]["reason"] == "exploring: your default size (round 1 of 2)"
    first = [trial["eta"] for trial in trials if trial["trial_number"] == "1" and trial["policy"] == "gp_voi"]
    assert first == ["0.0", "1.0"]


def test_each_option_changes_the_study(files: list[str], tmp_path: Path) -> None:
    def result(*options: str) -> Any:
        out = tmp_path / "out.json"
        given = ["--policy", "gp_voi", "--seeds", "1", "--recurrences", "10", "--json", str(out), *options]
        assert main(["study", *files, *DIGITS_ARGUMENTS, *given]) == 0
        return json.loads(out.read_text())["policies"]["gp_voi"]

    def ratio(*options: str) -> float:
        return float(result(*options)["ratio"]["10"])

    assert ratio("--cost-noise", "0.3") != ratio()
    # 32 never reaches the target, until sizes are dealt other epochs.
    never = ["--default-batch-size", "32"]
    hopeless = ratio(*never)
    assert hopeless > 1.3
    assert ratio(*never, "--landscape", "shuffled@1") < hopeless
    assert ratio(*never, "--landscape", "bad-neighbours") != hopeless
    assert "ratio_since_drift" not in result()
    assert result("--landscape", "shuffled@1", "--drift", "reversed@6")["ratio_since_drift"] > 0
    assert "ratio_since_drift" not in result("--drift", "reversed@11")


def test_unusable_arguments_are_reported(files: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["study", *files, "--all", "--dataset", "digits"]) == 1
    assert capsys.readouterr().err.startswith("benchmarks.policies: --all takes the six workloads as they are")


@pytest.mark.parametrize("wrong", [["--drift", "often"], ["--landscape", "hilly"], ["--cost-noise", "-1"]])
def test_invalid_values_are_refused(files: list[str], wrong: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["study", *files, *DIGITS_ARGUMENTS, *wrong])
    assert wrong[0] in capsys.readouterr().err
