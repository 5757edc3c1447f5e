"""Research on policies: conditions that vary, predictions, every trial of a job, pictures."""

from __future__ import annotations

import asyncio
import csv
import json
import math
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from scipy import stats

from benchmarks.policies.__main__ import main
from benchmarks.policies.conditions import in_reverse, shuffled, with_bad_neighbours
from benchmarks.policies.plots import plot
from benchmarks.policies.predictions import predicted_costs
from benchmarks.policies.study import study
from bso_server.cli.simulate_tables import savings_text
from bso_server.simulate.results import Setting
from bso_server.simulate.savings import Consumption
from bso_server.simulate.traces import PAPER_WORKLOADS
from bso_server.simulate.workload import SizeTrace
from tests.support.service import Server, serve
from tests.support.simulated import DIGITS_ARGUMENTS, EPOCHS, NEVER, WORKLOAD, only, paper_traces, trace_files
from zeus_plugins.protocol import GP_VOI, OWN_POLICIES, ZEUS, TrialState

pytestmark = pytest.mark.slow


@pytest.fixture
def files(tmp_path: Path) -> list[str]:
    return trace_files(tmp_path)


def test_the_default_after_a_drift_is_another() -> None:
    # Size 16 takes 4 epochs, and 6 after the drift.
    drifting = study(WORKLOAD, [GP_VOI], Setting(recurrences=5, seeds=1), drift_at=3)
    assert drifting.comparison.default_consumption == Consumption((3 * 4 + 2 * 6) * 1800, 240)


@pytest.mark.parametrize(("foresight", "epochs"), [(True, 8), (False, 9)])
@pytest.mark.parametrize("concurrency", [1, 2])
def test_zeus_stops_before_or_after_its_bound(foresight: bool, epochs: int, concurrency: int) -> None:
    # The default costs 4·1900 J at the maximum limit. Twice that is the bound: eight epochs at size 8, which needs 9.
    slow = replace(WORKLOAD, sizes=(SizeTrace(8, (9.0,), EPOCHS), *WORKLOAD.sizes[1:2]))
    setting = Setting(recurrences=4, seeds=1, optimal_power_limits=False, concurrency=concurrency)
    trials = study(slow, [ZEUS], setting, foresight=foresight).first_jobs[ZEUS].trials
    assert (trials[0].record.batch_size, trials[0].record.state) == (16, TrialState.COMPLETED)
    tried = next(trial for trial in trials if trial.record.batch_size == 8)
    assert (tried.record.state, tried.record.epoch) == (TrialState.EARLY_STOPPED, epochs)
    assert tried.cost_j == epochs * 1900
    assert tried.epochs_to_target == 9


def test_a_job_of_which_nothing_is_known_in_the_end(tmp_path: Path) -> None:
    hopeless = replace(WORKLOAD, sizes=(SizeTrace(16, (*[math.inf] * 9999, 4.0), EPOCHS),))
    found = study(hopeless, [GP_VOI], Setting(recurrences=1, seeds=1))
    assert found.comparison.results[GP_VOI].unfinished == 1
    assert predicted_costs(found.first_jobs[GP_VOI].history) == []
    plot([found], tmp_path / "picture.svg")
    assert "as predicted" not in (tmp_path / "picture.svg").read_text()
    # What was given up has saved nothing.
    assert "for a run at the default, by which they end" in savings_text([found.comparison], None, None)


def test_predicted_costs() -> None:
    job = study(only(16), [GP_VOI], Setting(recurrences=10, seeds=1)).first_jobs[GP_VOI]
    (predicted,) = predicted_costs(job.history)
    assert predicted.batch_size == 16
    # Every run has taken 4 epochs of 1900 J, and one in 1/p is thought to fail; costs are log-normal around that.
    middle = 4 * 1900 / (1 - job.history.memory[0].failure_chance)
    assert math.sqrt(predicted.low_j * predicted.high_j) == pytest.approx(middle, rel=1e-3)
    middle = math.sqrt(predicted.low_j * predicted.high_j)
    sd = math.sqrt(2 * math.log(predicted.expected_j / middle))
    assert stats.norm(math.log(middle), sd).cdf(np.log([predicted.low_j, predicted.high_j])) == pytest.approx(
        [0.05, 0.95], abs=1e-4
    )


@pytest.mark.parametrize("concurrency", [1, 3])
def test_the_regret_of_a_job_of_one_size(concurrency: int) -> None:
    found = study(only(16), list(OWN_POLICIES), Setting(recurrences=10, seeds=2, concurrency=concurrency))
    for policy, regrets in found.regrets.items():
        # The first epoch of the first run tries both limits: 0.5·1700 + 0.5·200·15 = 2350 J in place of 1900 J.
        assert regrets[-1] == pytest.approx(450 / 7600)
        if concurrency == 1:
            assert regrets == pytest.approx([450 / 7600] * 10)
        assert found.curves[policy][9] == found.comparison.results[policy].ratio[10]


def test_landscapes_that_are_not_smooth() -> None:
    bad = with_bad_neighbours(WORKLOAD)
    assert [size.epochs_to_target for size in bad.sizes] == [(24.0,), (4.0,), (18.0,), NEVER]
    orders = {tuple(size.epochs_to_target[0] for size in shuffled(WORKLOAD, seed).sizes) for seed in range(60)}
    assert {tuple(sorted(order)) for order in orders} == {(4.0, 6.0, 8.0, math.inf)}
    # Four values in any order, but for those six in which the default would never reach the target.
    assert len(orders) == 18
    assert shuffled(WORKLOAD, 3) == shuffled(WORKLOAD, 3)
    assert [size.epochs for size in shuffled(WORKLOAD, 3).sizes] == [size.epochs for size in WORKLOAD.sizes]


def test_a_job_that_drifts() -> None:
    reversed_paths = [size.epochs_to_target for size in in_reverse(WORKLOAD).sizes]
    assert reversed_paths == [NEVER, (6.0,), (4.0,), (8.0,)]
    drifting = study(WORKLOAD, [GP_VOI], Setting(recurrences=60, seeds=3), drift_at=30)
    assert drifting.comparison.results[GP_VOI].unfinished == 0
    since = drifting.ratio_since_drift(GP_VOI)
    assert since is not None
    assert since < 1.5
    before, after = (drifting.comparison.conditions.landscape_at(recurrence).oracle for recurrence in (29, 30))
    assert (before.expected_cost_j, after.expected_cost_j) == (5700, 3800)


def test_a_picture(files: list[str], tmp_path: Path) -> None:
    picture = tmp_path / "picture.svg"
    options = ["--seeds", "1", "--recurrences", "20", "--plot", str(picture)]
    assert main(["study", *files, *DIGITS_ARGUMENTS, *options]) == 0
    drawn = picture.read_text()
    assert panels_in(drawn) == 5
    # Text is drawn as outlines, each with a comment that says what it is.
    for words in (
        *("digits/mlp, η = 0.5", "digits/mlp, η = 0.5: zeus", "digits/mlp, η = 0.5: gp_voi", "zeus", "gp_voi"),
        *("total cost / oracle's", "always 16, at full power", "regret, in runs of the oracle"),
        *("cost of a run (J)", "90 % of runs, as predicted", "expected, as predicted", "expected, in truth"),
        *("epochs", "its bound", "reached the target", "stopped", "what it would still have needed"),
    ):
        assert f"<!-- {words} -->" in drawn
    # Size 32 never reaches the target. It is stopped, and named there.
    assert main(["study", *files, *DIGITS_ARGUMENTS, *options, "--policy", "zeus", "--max-epochs", "99"]) == 0
    drawn = picture.read_text()
    assert panels_in(drawn) == 3
    assert "gp_voi" not in drawn
    assert "<!-- 32 -->" in drawn


def panels_in(svg: str) -> int:
    return svg.count('<g id="axes_')


def test_pictures_of_several_workloads(tmp_path: Path) -> None:
    folder, picture = paper_traces(tmp_path), tmp_path / "picture.svg"
    train, power = folder / "summary_train.csv", folder / "summary_power_v100.csv"
    arguments = ["study", "--all", "--train-trace", str(train), "--power-trace", str(power)]
    arguments += ["--seeds", "1", "--recurrences", "3", "--plot", str(picture)]
    assert main(arguments) == 0
    drawn = picture.read_text()
    assert panels_in(drawn) == 6 * 5
    # In six rows, of 3.6 inches of 72 points each.
    assert 'width="1800pt" height="1555.2pt"' in drawn
    for each in PAPER_WORKLOADS:
        assert f"<!-- {each.name}, η = 0.5: gp_voi -->" in drawn


@pytest.mark.parametrize(("ending", "begins"), [("png", b"\x89PNG"), ("PDF", b"%PDF"), ("svg", b"<?xml")])
def test_a_picture_is_what_its_ending_says(files: list[str], ending: str, begins: bytes, tmp_path: Path) -> None:
    picture = tmp_path / f"picture.{ending}"
    options = ["--seeds", "1", "--recurrences", "2", "--eta", "0", "--eta", "1", "--plot", str(picture)]
    assert main(["study", *files, *DIGITS_ARGUMENTS, *options]) == 0
    assert picture.read_bytes().startswith(begins)


def test_pictures_need_matplotlib(
    files: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)  # as if it were not installed
    results = tmp_path / "results.json"
    options = ["--plot", str(tmp_path / "picture.png"), "--json", str(results), "--seeds", "1"]
    assert main(["study", *files, *DIGITS_ARGUMENTS, *options]) == 1
    assert "pip install 'zeus-plugins[plot]'" in capsys.readouterr().err
    # That is said before anything is simulated.
    assert not results.exists()


def test_a_picture_of_a_default_and_sizes_without_a_cost(tmp_path: Path) -> None:
    hopeless = replace(WORKLOAD, default_batch_size=64)
    found = study(hopeless, [GP_VOI], Setting(recurrences=5, seeds=1))
    plot([found], tmp_path / "picture.svg")
    drawn = (tmp_path / "picture.svg").read_text()
    assert panels_in(drawn) == 4
    assert "always" not in drawn
    assert "<!-- missed the target -->" in drawn


def test_every_trial_of_the_first_job(files: list[str], tmp_path: Path) -> None:
    history = tmp_path / "history.csv"
    options = ["--seeds", "1", "--recurrences", "20", "--eta", "0", "--eta", "1", "--history", str(history)]
    assert main(["study", *files, *DIGITS_ARGUMENTS, *options]) == 0
    with history.open(newline="") as lines:
        trials = list(csv.DictReader(lines))
    assert {trial["policy"] for trial in trials} == {"zeus", "gp_voi"}
    assert trials[0]["reason"] == "exploring: your default size (round 1 of 2)"
    first = [trial["eta"] for trial in trials if trial["trial_number"] == "1" and trial["policy"] == "gp_voi"]
    assert first == ["0.0", "1.0"]


def test_options_change_what_is_simulated(files: list[str], tmp_path: Path) -> None:
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


def test_what_cannot_be_simulated_is_told(files: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["study", *files, "--all", "--dataset", "digits"]) == 1
    assert capsys.readouterr().err.startswith("benchmarks.policies: --all takes the six workloads as they are")


@pytest.mark.parametrize(
    "wrong",
    [
        ["--plot", "picture.gif"],
        ["--plot", "svg"],
        ["--drift", "often"],
        ["--landscape", "hilly"],
        ["--cost-noise", "-1"],
    ],
)
def test_wrong_values_are_refused(files: list[str], wrong: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["study", *files, *DIGITS_ARGUMENTS, *wrong])
    assert wrong[0] in capsys.readouterr().err


def test_a_picture_of_a_job_of_the_database(tmp_path: Path) -> None:
    url, picture = f"sqlite:///{tmp_path / 'bso.sqlite3'}", tmp_path / "picture.svg"

    async def use(server: Server) -> None:
        await server.reach(await server.suggest())
        arguments = ["--job", server.job_id, "--database-url", url, "--seeds", "1", "--recurrences", "5"]
        assert await asyncio.to_thread(main, ["study", *arguments, "--plot", str(picture)]) == 0
        assert f"<!-- {server.job_id}, η = 0.5: gp_voi -->" in picture.read_text()

    serve(url, use, policy=GP_VOI)
