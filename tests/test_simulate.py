"""The simulator on traces made here, whose costs can be counted by hand."""

from __future__ import annotations

import asyncio
import csv
import json
import math
import sys
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats

from bso_server.cli import main
from bso_server.cli.simulate_tables import spending_text
from bso_server.core.history import History
from bso_server.core.model import TrialRecord
from bso_server.simulate.play import Phase, job_of, play
from bso_server.simulate.plots import plot
from bso_server.simulate.predictions import believed_costs
from bso_server.simulate.recorded import recorded_account, recorded_workload
from bso_server.simulate.results import Setting, compare, geometric_means
from bso_server.simulate.savings import Account, Spending
from bso_server.simulate.traces import PAPER_WORKLOADS, Selection, Traces
from bso_server.simulate.workload import Epoch, SizeTrace, Workload, landscape
from tests.support.service import Server, serve
from zeus_plugins.protocol import JobRegistration, JobView, Origin, PolicyName, Stage, TrialState, TrialView

# Two power limits; an epoch at the lower one takes longer and less energy.
EPOCHS = {100.0: Epoch(20, 1600), 200.0: Epoch(10, 1800)}
# At η = 0.5 and 200 W an epoch costs 0.5·1600 + 0.5·200·20 = 2800 J, or 0.5·1800 + 0.5·200·10 = 1900 J.
HALF = {100.0: Epoch(10, 800), 200.0: Epoch(5, 900)}
NEVER = (math.inf,)
WORKLOAD = Workload(
    "made up",
    (
        SizeTrace(8, (8.0,), EPOCHS),
        SizeTrace(16, (4.0,), EPOCHS),
        SizeTrace(32, (6.0,), HALF),
        SizeTrace(64, NEVER, HALF),
    ),
    default_batch_size=16,
    max_epochs=20,
    max_power_w=200.0,
)


def test_what_sizes_cost() -> None:
    found = landscape(WORKLOAD, eta=0.5, optimal_power_limits=True)
    assert [profile.epoch_j for profile in found.profiles.values()] == [1900, 1900, 950, 950]
    assert [profile.expected_cost_j for profile in found.profiles.values()] == [15200, 7600, 5700, math.inf]
    assert found.oracle.batch_size == 32
    assert found.default.expected_cost_j == 7600
    assert found.profiles[8].profiling == Epoch(15, 1700)
    # Energy alone: the lower limit.
    energy = landscape(WORKLOAD, eta=1.0, optimal_power_limits=True)
    assert [profile.epoch_j for profile in energy.profiles.values()] == [1600, 1600, 800, 800]
    assert energy.default.expected_cost_j == 4 * 1800
    assert landscape(WORKLOAD, eta=1.0, optimal_power_limits=False).profiles[8].profiling is None


def test_runs_that_fail_are_paid_for_and_done_again() -> None:
    lucky = replace(WORKLOAD, sizes=(SizeTrace(16, (4.0, math.inf, 30.0, 6.0), EPOCHS),))
    # Half of the runs fail, after 20 epochs each: one failure per success, which takes 5.
    assert landscape(lucky, eta=0.5, optimal_power_limits=True).oracle.expected_cost_j == 25 * 1900
    with pytest.raises(ValueError, match="no recorded run reaches the target within 20 epochs"):
        landscape(replace(lucky, sizes=(SizeTrace(16, NEVER, EPOCHS),)), eta=0.5, optimal_power_limits=True)


def only(batch_size: int, **changes: object) -> Workload:
    """The workload with that size alone."""
    sizes = tuple(size for size in WORKLOAD.sizes if size.batch_size == batch_size)
    return replace(WORKLOAD, sizes=sizes, default_batch_size=batch_size, **changes)  # type: ignore[arg-type]


@pytest.mark.parametrize("policy", PolicyName)
@pytest.mark.parametrize("concurrency", [1, 3])
def test_a_job_of_one_size_costs_what_its_runs_cost(policy: PolicyName, concurrency: int) -> None:
    setting = Setting(recurrences=10, seeds=2, concurrency=concurrency)
    comparison = compare(only(16), [policy], setting)
    result = comparison.results[policy]
    # The first epoch of the first run tries both limits: 0.5·1700 + 0.5·200·15 = 2350 J in place of 1900 J.
    assert result.ratio == {10: pytest.approx(1 + 450 / 76000)}
    assert comparison.regrets[policy][-1] == pytest.approx(450 / 7600)
    if concurrency == 1:
        assert comparison.regrets[policy] == pytest.approx([450 / 7600] * 10)
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
def test_what_recurrences_take_against_the_default(eta: float, energy_j: float, time_s: float) -> None:
    comparison = compare(only(16), [PolicyName.GP_VOI], Setting(recurrences=10, seeds=2, eta=eta))
    # 40 epochs at the maximum limit, whatever η is.
    assert comparison.default_spending == Spending(40 * 1800, 400)
    account = comparison.account(PolicyName.GP_VOI)
    assert (account.recurrences, account.spent) == (10, Spending(energy_j, time_s))
    assert account.saved == Spending(72_000 - energy_j, 400 - time_s)
    assert account.energy_share_saved == pytest.approx(1 - energy_j / 72_000)
    assert account.time_share_saved == pytest.approx(1 - time_s / 400)


def test_energy_and_time_in_other_units() -> None:
    spending = Spending(energy_j=7.2e6, time_s=5400)
    assert spending.as_json(None) == {"energy_j": 7.2e6, "energy_kwh": 2, "time_h": 1.5}
    assert spending.as_json(0.3)["money"] == pytest.approx(0.6)
    assert Account(3, spending, Spending(0, 0)).energy_share_saved is None


def test_the_default_after_a_drift_is_another() -> None:
    # Size 16 takes 4 epochs, and 6 after the drift.
    comparison = compare(WORKLOAD, [PolicyName.GP_VOI], Setting(recurrences=5, seeds=1, drift_at=3))
    assert comparison.default_spending == Spending((3 * 4 + 2 * 6) * 1800, 240)


def test_a_default_that_never_reaches_the_target_has_no_cost() -> None:
    comparison = compare(replace(WORKLOAD, default_batch_size=64), PolicyName, Setting(recurrences=5, seeds=1))
    shown = comparison.as_json(0.3)
    assert shown["default"] == {"batch_size": 64, "cost_j": None, "ratio": None}
    assert shown["spending"]["default"] is None
    assert shown["spending"]["policies"]["zeus"]["saved"] is None
    assert shown["policies"]["gp_voi"]["energy_reduction_last5"] is None
    assert "made up always 64 0.5 5 - - -" in without_padding(spending_text([comparison], None, None))
    json.dumps(shown, allow_nan=False)


def without_padding(text: str) -> str:
    """The text with a single blank between words."""
    return " ".join(text.split())


def test_energy_saved_is_that_of_the_default_at_the_maximum_limit() -> None:
    result = compare(only(16), [PolicyName.GP_VOI], Setting(recurrences=10, seeds=1, eta=1.0)).results
    assert result[PolicyName.GP_VOI].energy_reduction_last5 == pytest.approx(1 - 1600 / 1800)


@pytest.mark.parametrize(("foresight", "epochs"), [(True, 8), (False, 9)])
@pytest.mark.parametrize("concurrency", [1, 2])
def test_zeus_stops_before_or_after_its_bound(foresight: bool, epochs: int, concurrency: int) -> None:
    # The default costs 4·1900 J at the maximum limit. Twice that is the bound: eight epochs at size 8, which needs 9.
    slow = replace(WORKLOAD, sizes=(SizeTrace(8, (9.0,), EPOCHS), *WORKLOAD.sizes[1:2]))
    setting = Setting(recurrences=4, seeds=1, optimal_power_limits=False, foresight=foresight, concurrency=concurrency)
    trials = compare(slow, [PolicyName.ZEUS], setting).first_jobs[PolicyName.ZEUS].trials
    assert (trials[0].record.batch_size, trials[0].record.state) == (16, TrialState.COMPLETED)
    tried = next(trial for trial in trials if trial.record.batch_size == 8)
    assert (tried.record.state, tried.record.epoch) == (TrialState.EARLY_STOPPED, epochs)
    assert tried.cost_j == epochs * 1900
    assert tried.epochs_to_target == 9


def test_a_job_of_which_nothing_is_known_in_the_end(tmp_path: Path) -> None:
    hopeless = replace(WORKLOAD, sizes=(SizeTrace(16, (*[math.inf] * 9999, 4.0), EPOCHS),))
    comparison = compare(hopeless, [PolicyName.GP_VOI], Setting(recurrences=1, seeds=1))
    assert comparison.results[PolicyName.GP_VOI].unfinished == 1
    assert believed_costs(comparison.first_jobs[PolicyName.GP_VOI].history) == []
    plot([comparison], tmp_path / "picture.svg")
    assert "as believed" not in (tmp_path / "picture.svg").read_text()
    # What was given up has saved nothing.
    assert "finishing them would cost more" in spending_text([comparison], None, None)


def test_what_is_believed_of_costs_in_the_end() -> None:
    job = compare(only(16), [PolicyName.GP_VOI], Setting(recurrences=10, seeds=1)).first_jobs[PolicyName.GP_VOI]
    (believed,) = believed_costs(job.history)
    assert believed.batch_size == 16
    # Every run has taken 4 epochs of 1900 J, and one in 1/p is thought to fail; costs are log-normal around that.
    middle = 4 * 1900 / (1 - job.history.arms[16].belief.failure_chance)
    assert math.sqrt(believed.low_j * believed.high_j) == pytest.approx(middle)
    sd = math.sqrt(2 * math.log(believed.expected_j / middle))
    assert stats.norm(math.log(middle), sd).cdf(np.log([believed.low_j, believed.high_j])) == pytest.approx(
        [0.05, 0.95], abs=1e-4
    )


def test_both_policies_find_the_best_size() -> None:
    comparison = compare(WORKLOAD, PolicyName, Setting(recurrences=40, seeds=3))
    for policy, result in comparison.results.items():
        last = comparison.first_jobs[policy].trials[-5:]
        assert [trial.record.batch_size for trial in last] == [32] * 5
        assert result.unfinished == 0
        assert result.ratio[10] > result.ratio[20] > result.ratio[40] > 1
        assert result.worst_seed_ratio >= result.ratio[40]
        assert comparison.curves[policy][9] == result.ratio[10]
    assert geometric_means([comparison, comparison])["zeus"]["20"] == pytest.approx(
        comparison.results[PolicyName.ZEUS].ratio[20]
    )


def test_landscapes_that_are_not_smooth() -> None:
    bad = WORKLOAD.with_bad_neighbours()
    assert [size.epochs_to_target for size in bad.sizes] == [(24.0,), (4.0,), (18.0,), NEVER]
    orders = {tuple(size.epochs_to_target[0] for size in WORKLOAD.shuffled(seed).sizes) for seed in range(60)}
    assert {tuple(sorted(order)) for order in orders} == {(4.0, 6.0, 8.0, math.inf)}
    # Four values in any order, but for those six in which the default would never reach the target.
    assert len(orders) == 18
    assert WORKLOAD.shuffled(3) == WORKLOAD.shuffled(3)
    assert [size.epochs for size in WORKLOAD.shuffled(3).sizes] == [size.epochs for size in WORKLOAD.sizes]


def test_a_job_that_drifts() -> None:
    reversed_paths = [size.epochs_to_target for size in WORKLOAD.reversed().sizes]
    assert reversed_paths == [NEVER, (6.0,), (4.0,), (8.0,)]
    comparison = compare(WORKLOAD, [PolicyName.GP_VOI], Setting(recurrences=60, seeds=3, drift_at=30))
    result = comparison.results[PolicyName.GP_VOI]
    assert result.unfinished == 0
    assert result.ratio_since_drift is not None
    assert result.ratio_since_drift < 1.5
    before, after = (phase.landscape.oracle for phase in comparison.phases)
    assert (before.expected_cost_j, after.expected_cost_j) == (5700, 3800)


def test_recurrences_without_an_end_are_given_up() -> None:
    hopeless = [Phase(0, landscape(WORKLOAD, eta=0.5, optimal_power_limits=True))]
    # From the second recurrence on nothing ever reaches the target.
    broken = replace(hopeless[0].landscape)
    for profile in broken.profiles.values():
        assert profile.epochs_to_target
    profiles = {size: replace(profile, epochs_to_target=NEVER) for size, profile in broken.profiles.items()}
    phases = [*hopeless, Phase(1, replace(broken, profiles=profiles))]
    fields = {"max_power": 200.0, "max_epochs": 20}
    gp_voi = play(job_of(broken, PolicyName.GP_VOI, seed=0, **fields), phases, recurrences=4)
    assert gp_voi.unfinished == 3
    assert [trial.recurrence for trial in gp_voi.trials].count(3) == 20
    # Zeus has no size left after a round without any.
    zeus = play(job_of(broken, PolicyName.ZEUS, seed=0, **fields), phases, recurrences=4)
    assert zeus.unfinished == 3


@given(st.integers(0, 2**32), st.sampled_from(PolicyName), st.sampled_from([1, 3]))
@settings(max_examples=20, deadline=None)
def test_a_simulated_job_decides_as_a_replay_of_its_trials_would(
    seed: int, policy: PolicyName, concurrency: int
) -> None:
    rng = np.random.default_rng(seed)
    paths = [tuple(rng.choice([3.0, 5.0, 9.0, math.inf], 3)) for _ in range(4)]
    sizes = [SizeTrace(8 * 2**n, (4.0, *path), EPOCHS if n % 2 else HALF) for n, path in enumerate(paths)]
    workload = replace(WORKLOAD, sizes=tuple(sizes))
    at = landscape(workload, eta=0.5, optimal_power_limits=True)
    job = job_of(at, policy, seed=seed, max_power=200.0, max_epochs=20)
    played = play(job, [Phase(0, at)], recurrences=12, concurrency=concurrency, seed=seed)
    records = sorted((trial.record for trial in played.trials), key=lambda record: record.trial_number)
    assert_numbered(records)
    survivors = (8,) if any(record.origin == "bandit" for record in records) else None
    replayed = History.of(job, records, survivors)
    assert replayed.arms == played.history.arms
    assert replayed.cheapest == played.history.cheapest
    assert sum(played.costs_j) == pytest.approx(sum(trial.cost_j for trial in played.trials))


def assert_numbered(records: list[TrialRecord]) -> None:
    assert [record.trial_number for record in records] == list(range(1, len(records) + 1))


def test_the_same_seed_gives_the_same_job() -> None:
    setting = Setting(recurrences=20, seeds=2)
    one, other = (compare(WORKLOAD, PolicyName, setting).as_json() for _ in range(2))
    assert one == other


# --- Traces and the command -------------------------------------------------------------------------------------------

TRAIN = """dataset,network,batch_size,optimizer,learning_rate,run,target_metric,target_epoch
digits,mlp,16,adam,1e-2,1,0.9,4
digits,mlp,16,adam,1e-2,1,0.8,2
digits,mlp,16,adam,1e-2,2,0.9,5
digits,mlp,32,adam,1e-2,1,0.90,
digits,mlp,32,adam,1e-2,2,0.9,nan
digits,mlp,64,adam,1e-2,1,0.9,3
digits,mlp,16,sgd,1e-2,1,0.9,1
faces,mlp,16,adam,1e-2,1,0.9,1
"""
POWER = """dataset,network,batch_size,optimizer,power_limit,time_per_epoch,average_power
digits,mlp,16,adam,100,20,80
digits,mlp,16,adam,200,10,180
digits,mlp,32,adam,200,5,180
digits,mlp,128,adam,200,5,180
"""
DIGITS = Selection("digits", "mlp", "adam", 0.9, 20, 24)


@pytest.fixture
def files(tmp_path: Path) -> list[str]:
    """Traces on disk, and the arguments that name them."""
    train, power = tmp_path / "train.csv", tmp_path / "power.csv"
    train.write_text(TRAIN)
    power.write_text(POWER)
    return ["--train-trace", str(train), "--power-trace", str(power)]


DIGITS_ARGUMENTS = [
    *("--dataset", "digits", "--network", "mlp", "--optimizer", "adam"),
    *("--target-metric", "0.9", "--max-epochs", "20", "--default-batch-size", "24"),
]


def test_reading_traces(files: list[str]) -> None:
    workload = Traces.read(Path(files[1]), Path(files[3])).workload(DIGITS)
    assert workload == Workload(
        "digits/mlp",
        (
            SizeTrace(16, (4.0, 5.0), {100.0: Epoch(20, 1600), 200.0: Epoch(10, 1800)}),
            SizeTrace(32, (math.inf, math.inf), {200.0: Epoch(5, 900)}),
        ),
        default_batch_size=16,
        max_epochs=20,
        max_power_w=200.0,
    )


def test_simulating_by_command(files: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    results, history = tmp_path / "results.json", tmp_path / "history.csv"
    options = ["--seeds", "2", "--recurrences", "20", "--json", str(results), "--history", str(history)]
    assert main(["simulate", *files, *DIGITS_ARGUMENTS, *options]) == 0
    shown = json.loads(results.read_text())
    assert shown["oracle"] == {"batch_size": 16, "cost_j": 4.5 * 1900}
    assert shown["default"]["ratio"] == 1
    assert shown["workload"]["batch_sizes"] == [16, 32]
    assert set(shown["policies"]) == {"zeus", "gp_voi"}
    for result in shown["policies"].values():
        assert set(result) == {"ratio", "worst_seed_ratio", "unfinished", "energy_reduction_last5"}
        assert set(result["ratio"]) == {"10", "20"}
    with history.open(newline="") as lines:
        trials = list(csv.DictReader(lines))
    assert {trial["policy"] for trial in trials} == {"zeus", "gp_voi"}
    assert trials[0]["reason"] == "exploring: your default size [round 1 of 2]"
    text = capsys.readouterr().out
    assert "digits/mlp  gp_voi" in text


def test_options_change_what_is_simulated(files: list[str], tmp_path: Path) -> None:
    def ratio(*options: str) -> float:
        out = tmp_path / "out.json"
        given = ["--policy", "gp_voi", "--seeds", "1", "--recurrences", "10", "--json", str(out), *options]
        assert main(["simulate", *files, *DIGITS_ARGUMENTS, *given]) == 0
        results = json.loads(out.read_text(), parse_constant=refuse)
        return float(results["policies"]["gp_voi"]["ratio"]["10"])

    def refuse(constant: str) -> None:
        raise AssertionError(f"{constant} is no JSON")

    base = ratio()
    assert ratio("--power-limit", "max") < base
    assert ratio("--eta", "1") != base
    assert ratio("--beta", "none") > base
    assert ratio("--cost-noise", "0.3") != base
    # 32 never reaches the target, until sizes are dealt other epochs.
    never = ["--default-batch-size", "32"]
    assert ratio(*never) > 1.5
    assert ratio(*never, "--landscape", "shuffled@1") < 1.5
    assert ratio(*never, "--landscape", "bad-neighbours") != ratio(*never)


def test_several_etas_and_a_price(files: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out, history = tmp_path / "out.json", tmp_path / "history.csv"
    options = ["--policy", "gp_voi", "--seeds", "1", "--recurrences", "20", "--json", str(out)]
    options += ["--eta", "0", "--eta", "1", "--eta", "0", "--price", "0.4", "--history", str(history)]
    assert main(["simulate", *files, *DIGITS_ARGUMENTS, *options]) == 0
    shown = json.loads(out.read_text())
    assert [each["eta"] for each in shown["workloads"]] == [0, 1]
    assert set(shown["geometric_mean"]["gp_voi"]) == {"10", "20"}
    for each in shown["workloads"]:
        spending = each["spending"]
        assert (spending["recurrences"], spending["price_per_kwh"]) == (20, 0.4)
        # 4.5 epochs of 1800 J and 10 s.
        expected = {"energy_j": 162_000, "energy_kwh": 0.045, "time_h": 0.25, "money": 0.018}
        assert spending["default"] == pytest.approx(expected)
        took = spending["policies"]["gp_voi"]
        assert took["saved"] == {name: pytest.approx(value - took[name]) for name, value in expected.items()}
        assert took["energy_share_saved"] == pytest.approx(1 - took["energy_j"] / 162_000)
    fast, frugal = (each["spending"]["policies"]["gp_voi"] for each in shown["workloads"])
    assert fast["energy_j"] > frugal["energy_j"]
    assert fast["time_h"] < frugal["time_h"]
    with history.open(newline="") as lines:
        assert [trial["eta"] for trial in csv.DictReader(lines) if trial["trial_number"] == "1"] == ["0.0", "1.0"]
    text = without_padding(capsys.readouterr().out)
    assert "finishing them" not in text
    assert "digits/mlp always 16 0 20 1.62e+05 0.045 0.25 0.018" in text
    assert "SAVED J SAVED KWH SAVED HOURS SAVED MONEY SAVED ENERGY SAVED TIME" in text


def test_a_picture(files: list[str], tmp_path: Path) -> None:
    picture = tmp_path / "picture.svg"
    options = ["--seeds", "1", "--recurrences", "20", "--plot", str(picture)]
    assert main(["simulate", *files, *DIGITS_ARGUMENTS, *options]) == 0
    drawn = picture.read_text()
    assert panels_in(drawn) == 5
    # Text is drawn as outlines, each with a comment that says what it is.
    for words in (
        *("digits/mlp, η = 0.5", "digits/mlp, η = 0.5: zeus", "digits/mlp, η = 0.5: gp_voi", "zeus", "gp_voi"),
        *("total cost / oracle's", "always 16, at full power", "regret, in runs of the oracle"),
        *("cost of a run (J)", "90 % of runs, as believed", "expected, as believed", "expected, in truth"),
        *("epochs", "its bound", "reached the target", "stopped", "what it would still have needed"),
    ):
        assert f"<!-- {words} -->" in drawn
    # Size 32 never reaches the target. It is stopped, and named there.
    assert main(["simulate", *files, *DIGITS_ARGUMENTS, *options, "--policy", "zeus", "--max-epochs", "99"]) == 0
    drawn = picture.read_text()
    assert panels_in(drawn) == 3
    assert "gp_voi" not in drawn
    assert "<!-- 32 -->" in drawn


def panels_in(svg: str) -> int:
    return svg.count('<g id="axes_')


def test_pictures_of_several_workloads(tmp_path: Path) -> None:
    train, power, picture = tmp_path / "train.csv", tmp_path / "power.csv", tmp_path / "picture.svg"
    rows = {train: [TRAIN.splitlines()[0]], power: [POWER.splitlines()[0]]}
    for each in PAPER_WORKLOADS:
        for size, epochs in ((each.default_batch_size // 2, 2), (each.default_batch_size, 3)):
            workload = f"{each.dataset},{each.network},{size},{each.optimizer}"
            rows[train].append(f"{workload},1e-2,1,{each.target_metric},{epochs}")
            rows[power].append(f"{workload},200,10,180")
    for file, lines in rows.items():
        file.write_text("\n".join(lines))
    arguments = ["simulate", "--all", "--train-trace", str(train), "--power-trace", str(power)]
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
    assert main(["simulate", *files, *DIGITS_ARGUMENTS, *options]) == 0
    assert picture.read_bytes().startswith(begins)


def test_pictures_need_matplotlib(
    files: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)  # as if it were not installed
    results = tmp_path / "results.json"
    options = ["--plot", str(tmp_path / "picture.png"), "--json", str(results), "--seeds", "1"]
    assert main(["simulate", *files, *DIGITS_ARGUMENTS, *options]) == 1
    assert "pip install 'zeus-plugins[plot]'" in capsys.readouterr().err
    # That is said before anything is simulated.
    assert not results.exists()


def test_a_picture_of_a_default_and_sizes_without_a_cost(tmp_path: Path) -> None:
    hopeless = replace(WORKLOAD, default_batch_size=64)
    comparison = compare(hopeless, [PolicyName.GP_VOI], Setting(recurrences=5, seeds=1))
    plot([comparison], tmp_path / "picture.svg")
    drawn = (tmp_path / "picture.svg").read_text()
    assert panels_in(drawn) == 4
    assert "always" not in drawn
    assert "<!-- missed the target -->" in drawn


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (
            ["--dataset", "digits"],
            "which workload? Give --network, --optimizer, --target-metric, --max-epochs, --default",
        ),
        (["--all", "--dataset", "digits"], "leave out --dataset"),
        (["--all"], "no batch size up to 1024 of cifar100/shufflenetv2"),
        ([*DIGITS_ARGUMENTS, "--target-metric", "0.95"], "0 sizes in the train trace, 3 in the power trace, 0 in both"),
    ],
)
def test_what_cannot_be_simulated_is_told(
    files: list[str], arguments: list[str], words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["simulate", *files, *arguments]) == 1
    assert words in capsys.readouterr().err


def test_files_that_are_no_traces_are_told(files: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["simulate", *files[:2], "--power-trace", files[1], *DIGITS_ARGUMENTS]) == 1
    assert "has no column average_power, power_limit, time_per_epoch" in capsys.readouterr().err


@pytest.mark.parametrize(
    "wrong",
    [
        ["--eta", "2"],
        ["--price", "-1"],
        ["--plot", "picture.gif"],
        ["--plot", "svg"],
        ["--beta", "0"],
        ["--seeds", "0"],
        ["--drift", "often"],
        ["--landscape", "hilly"],
        ["--cost-noise", "-1"],
    ],
)
def test_wrong_numbers_are_refused(files: list[str], wrong: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["simulate", *files, *DIGITS_ARGUMENTS, *wrong])
    assert wrong[0] in capsys.readouterr().err


# --- A job's own trials -----------------------------------------------------------------------------------------------


def trial_view(number: int, batch_size: int, state: TrialState, epochs: float | None, epoch_s: float = 10) -> TrialView:
    return TrialView(
        trial_number=number,
        batch_size=batch_size,
        state=state,
        origin=Origin.EXPLORATION,
        reason="",
        message=None,
        started_at=datetime(2026, 1, 1, tzinfo=UTC),
        ended_at=None,
        end_reason=None,
        time_s=None if epochs is None else epochs * epoch_s,
        energy_j=None if epochs is None else epochs * epoch_s * 50,
        energy_source=None,
        cost_j=None,
        epochs=epochs,
        metric=None,
    )


def job_view(*trials: TrialView) -> JobView:
    job = JobRegistration(
        job_id="job",
        job_id_prefix="job",
        batch_sizes=(8, 16, 32, 64),
        default_batch_size=16,
        max_epochs=20,
        max_power=100,
        number_of_gpus=1,
        gpu_model="V100",
    )
    return JobView(job=job, stage=Stage.BANDIT, min_cost_j=None, best_batch_size=None, arms=(), trials=trials)


def test_a_job_of_recorded_trials() -> None:
    completed, stopped, exhausted = TrialState.COMPLETED, TrialState.EARLY_STOPPED, TrialState.EXHAUSTED
    workload = recorded_workload(
        job_view(
            trial_view(1, 8, completed, 5),
            trial_view(2, 8, stopped, 5),  # would have needed more than any run that is known
            trial_view(3, 32, completed, 3.5, epoch_s=12),
            trial_view(4, 32, completed, 6, epoch_s=8),
            trial_view(5, 32, stopped, 5),
            trial_view(6, 32, exhausted, 20),
            trial_view(7, 32, TrialState.FAILED, 1),
            trial_view(8, 64, TrialState.RUNNING, None),
            trial_view(9, 64, TrialState.INFEASIBLE, None),
        )
    )
    assert [(size.batch_size, size.epochs_to_target) for size in workload.sizes] == [
        (8, (5, math.inf)),
        (32, (4, 6, 6, math.inf)),
    ]
    (epoch,) = workload.sizes[1].epochs.values()
    mean_s = (3.5 * 12 + 6 * 8 + 5 * 10 + 20 * 10) / 34.5
    assert (epoch.time_s, epoch.energy_j) == (pytest.approx(mean_s), pytest.approx(50 * mean_s))
    # 16 was never tried: of those that are as near, the smaller.
    assert (workload.default_batch_size, workload.max_epochs, workload.max_power_w) == (8, 20, 100)
    with pytest.raises(ValueError, match="no trial has reached the target yet"):
        recorded_workload(job_view(trial_view(1, 8, stopped, 5)))


def test_what_a_recorded_job_really_took() -> None:
    view = job_view(
        trial_view(1, 16, TrialState.COMPLETED, 4),
        trial_view(2, 8, TrialState.COMPLETED, 5),
        trial_view(3, 16, TrialState.FAILED, 1),
        trial_view(4, 64, TrialState.RUNNING, None),
    )
    # Ten epochs of 500 J and 10 s, and two recurrences; the default would have taken four epochs each.
    account = recorded_account(view, recorded_workload(view))
    assert account == Account(2, Spending(5000, 100), Spending(4000, 80))
    assert account.as_json(36.0) == {
        "recurrences": 2,
        "energy_j": 5000,
        "energy_kwh": pytest.approx(5 / 3600),
        "time_h": pytest.approx(1 / 36),
        "money": pytest.approx(0.05),
        "saved": {
            "energy_j": -1000,
            "energy_kwh": pytest.approx(-1 / 3600),
            "time_h": pytest.approx(-1 / 180),
            "money": pytest.approx(-0.01),
        },
        "energy_share_saved": -0.25,
        "time_share_saved": -0.25,
    }


def test_simulating_a_job_of_the_database(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    url = f"sqlite:///{tmp_path / 'bso.sqlite3'}"

    async def use(server: Server) -> None:
        for _ in range(6):
            trial = await server.suggest()
            epochs = {8: 6, 16: 4, 32: 3}[trial.batch_size]
            await server.report(trial, cost_j=100.0 * epochs, epoch=epochs, metric=0.95)
        arguments = ["simulate", "--job", server.job_id, "--database-url", url, "--seeds", "1", "--recurrences", "10"]
        out = tmp_path / "out.json"
        assert await asyncio.to_thread(main, [*arguments, "--json", str(out)]) == 0
        shown = json.loads(out.read_text())
        assert shown["workload"]["name"] == server.job_id
        assert shown["oracle"] == {"batch_size": 32, "cost_j": pytest.approx(300)}
        assert shown["spending"]["default"]["energy_j"] == pytest.approx(10 * 400)
        recorded = shown["spending"]["recorded"]
        assert recorded["recurrences"] == 6
        assert recorded["energy_j"] + recorded["saved"]["energy_j"] == pytest.approx(6 * 400)
        text = capsys.readouterr().out
        assert "what it really did" in text
        picture = tmp_path / "picture.svg"
        assert await asyncio.to_thread(main, [*arguments, "--plot", str(picture)]) == 0
        assert f"<!-- {server.job_id}, η = 0.5: gp_voi -->" in picture.read_text()
        capsys.readouterr()
        assert "was never measured" not in text
        assert await asyncio.to_thread(main, [*arguments, "--all"]) == 1
        assert "leave out --all" in capsys.readouterr().err

    serve(url, use, policy=PolicyName.GP_VOI)


def test_nothing_to_simulate_is_told(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["simulate", "--all", "--power-trace", "power.csv"]) == 1
    assert "Give --train-trace, or --job for a job's own trials" in capsys.readouterr().err


def test_a_default_that_ran_out_of_memory_is_stood_for(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    url = f"sqlite:///{tmp_path / 'bso.sqlite3'}"

    async def use(server: Server) -> None:
        await server.end(await server.suggest(), TrialState.INFEASIBLE)
        await server.reach(await server.suggest())
        arguments = ["simulate", "--job", server.job_id, "--database-url", url, "--seeds", "1", "--recurrences", "2"]
        assert await asyncio.to_thread(main, arguments) == 0

    serve(url, use, policy=PolicyName.GP_VOI)
    text = capsys.readouterr().out
    assert "always 8" in text
    assert "the default size, 16, was never measured: the nearest one that was stands for it" in text
