"""Order of a measurement's steps, its state, and its figures, with only one (slow) test that trains."""

from __future__ import annotations

import json
import subprocess
import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from benchmarks import reports
from benchmarks.recurrences.harness import MAX_TRIES, State, is_done, read_records
from benchmarks.recurrences.plan import Extent, Step, steps
from benchmarks.recurrences.runs import Order
from benchmarks.recurrences.tasks import REFUSED, TASKS, tasks_for
from benchmarks.reports import (
    RESULTS,
    Record,
    SizeFigure,
    best_size,
    bootstrap,
    break_even,
    hindsight,
    proof_results,
    share_saved,
)
from benchmarks.tables import NOT_MEASURED, policy_tables, proof_tables, write_tables
from tests.support import ROOT


@pytest.fixture(autouse=True)
def few_samples(monkeypatch: pytest.MonkeyPatch) -> None:
    """Draw fewer samples for intervals: a tenth shows the same."""
    monkeypatch.setattr(reports, "_RESAMPLES", 200)


SMALL = Extent(seeds=2, recurrences=3, repeats=1, pairs=2)


def step_of(stage: Any = "recurrence", who: str = "gp_voi", number: int = 0) -> Step:
    return Step(stage, "digits", 0, number, who, Order("digits", "digits", 0))


# Order of steps


def test_contenders_take_turns_within_each_recurrence() -> None:
    planned = list(steps(tasks_for("cpu", ["digits", "tabular"]), SMALL))
    assert {step.stage for step in planned[:12]} == {"recurrence"}
    assert [(step.task, step.number, step.who) for step in planned[:12]] == [
        *(("digits", 0, who) for who in ("gp_voi", "unscaled", "default")),
        *(("tabular", 0, who) for who in ("gp_voi", "unscaled", "default")),
        *(("digits", 1, who) for who in ("unscaled", "default", "gp_voi")),
        *(("tabular", 1, who) for who in ("unscaled", "default", "gp_voi")),
    ]


def test_every_step_is_planned_once() -> None:
    planned = list(steps(tasks_for("cpu", ["digits"]), SMALL))
    assert len({step.key for step in planned}) == len(planned)
    assert Counter(step.stage for step in planned) == {"recurrence": 2 * 3 * 3, "size": 2 * 8, "overhead": 2 * 2 * 2}
    assert [step.who for step in planned if step.stage == "overhead"][:4] == ["with", "without", "without", "with"]


def test_contenders_use_the_same_data_and_models() -> None:
    recurrence = [step.order for step in steps(tasks_for("cpu", ["drift"]), SMALL) if step.stage == "recurrence"]
    for first in range(0, len(recurrence), 3):
        assert len({order.seed for order in recurrence[first : first + 3]}) == 1
    assert [order.drifted for order in recurrence[:9:3]] == [False, True, True]
    assert len({order.seed for order in recurrence}) == 2 * 3


def test_callback_is_called_as_in_readme() -> None:
    sizes = TASKS["digits"].batch_sizes
    (scaled, unscaled, default) = (step.order for step in list(steps(tasks_for("cpu", ["digits"]), SMALL))[:3])
    readme = {"target": 0.965, "batch_sizes": sizes, "on_failure": "finish"}
    assert scaled.arguments == readme
    assert unscaled.arguments == {**readme, "lr_scaling": "none"}
    assert default.arguments == {**readme, "batch_sizes": (32,), "on_failure": "stop", "job": {"beta_knob": None}}


def test_given_number_of_epochs_is_trained_regardless_of_the_target() -> None:
    assert Order("digits", "digits", 0, batch_size=32, epochs=3).arguments["target"] == 1e9
    assert Order("characters", "characters", 0, batch_size=8, epochs=3).arguments["target"] == -1e9


# State


def test_state_continues_where_the_process_was_killed(tmp_path: Path) -> None:
    state = State(tmp_path)
    state.add({"key": "a", "reached": True})
    file = tmp_path / "runs.jsonl"
    with file.open("a") as lines:
        lines.write('{"key": "b", "rea')
    again = State(tmp_path)
    assert again.records == [{"key": "a", "reached": True}]
    again.add({"key": "b", "reached": False})
    assert [record["key"] for record in read_records([tmp_path])] == ["a", "b"]


def test_several_directories_form_a_measurement_without_duplicate_steps(tmp_path: Path) -> None:
    folders = [tmp_path / "one", tmp_path / "two"]
    for folder, key in zip(folders, "ab", strict=True):
        State(folder).add({"key": key})
    assert [record["key"] for record in read_records(folders)] == ["a", "b"]
    State(folders[1]).add({"key": "a"})
    with pytest.raises(ValueError, match="have both measured a"):
        read_records(folders)


def test_recurrence_repeats_trainings_until_the_target_is_reached() -> None:
    missed, reached = ({"reached": is_reached, "state": "ended"} for is_reached in (False, True))
    step = step_of()
    assert not is_done(step, [])
    assert not is_done(step, [missed] * (MAX_TRIES - 1))
    assert is_done(step, [missed, reached])
    assert is_done(step, [missed] * MAX_TRIES)
    assert is_done(step, [missed, {"reached": False, "state": REFUSED}])
    assert is_done(step_of("size", "64"), [missed])


# Figures


def record(stage: str, number: int, who: str, cost_j: float, size: int = 32, **fields: Any) -> Record:
    return {
        "key": f"{stage} {number} {who}",
        "stage": stage,
        "task": "digits",
        "seed": 0,
        "number": number,
        "who": who,
        "drifted": False,
        "batch_size": size,
        "reached": True,
        "state": "target_reached",
        "cost_j": cost_j,
        "energy_j": 2 * cost_j,
        "time_s": cost_j / 10,
        "energy_source": "estimate: 65 W assumed × CPU time",
        "fit_cpu_s": cost_j,
        "fit_wall_s": cost_j,
        "begun_at": "2026-01-02T03:04:05+00:00",
        "load_1": 1.0,
        **fields,
    }


RECORDS = [
    *(record("recurrence", number, "default", 100.0) for number in range(4)),
    record("recurrence", 0, "gp_voi", 120.0),
    record("recurrence", 1, "gp_voi", 30.0, 1024, reached=False),
    record("recurrence", 1, "gp_voi", 50.0, 64),
    record("recurrence", 2, "gp_voi", 50.0, 64),
    record("recurrence", 3, "gp_voi", 50.0, 64),
    *(record("recurrence", number, "unscaled", 100.0, 8) for number in range(3)),
    record("recurrence", 3, "unscaled", 60.0, 8, reached=False),
    *(record("size", 0, str(size), cost_j, size) for size, cost_j in ((32, 100.0), (64, 50.0))),
    record("overhead", 0, "with", 10.5),
    record("overhead", 0, "without", 10.0),
]


def test_figures_of_a_task_are_literal() -> None:
    task = proof_results(RECORDS, {"cores": "2"})["tasks"]["digits"]
    found = task["contenders"]["gp_voi"]
    assert (task["jobs"], task["recurrences"], task["longest_job"], task["best_sizes"]) == (1, 4, 4, [64])
    assert (found["cost_j"], found["energy_j"], found["tries"], found["given_up"]) == (300.0, 600.0, 5, 0)
    assert found["saved"]["cost_j"].value == pytest.approx(0.25)
    assert found["early"].value == pytest.approx(0.25)
    assert found["later"].value == pytest.approx(0.5)
    assert found["break_even"] == 2
    assert found["regret"] == pytest.approx(0.5)
    assert found["curve"] == pytest.approx([1.2, 1.0, 250 / 300, 0.75])
    assert task["overhead"]["cpu"].value == pytest.approx(1.05)


def test_abandoned_recurrence_is_finished_at_the_default() -> None:
    found = proof_results(RECORDS, {})["tasks"]["digits"]["contenders"]["unscaled"]
    assert (found["given_up"], found["cost_j"], found["break_even"]) == (1, 460.0, None)


def test_refusing_policy_has_abandoned_without_training() -> None:
    refused = record("recurrence", 3, "unscaled", 0.0, reached=False, state=REFUSED)
    others = [each for each in RECORDS if (each["who"], each["number"]) != ("unscaled", 3)]
    found = proof_results([*others, refused], {})["tasks"]["digits"]["contenders"]["unscaled"]
    assert (found["given_up"], found["tries"], found["cost_j"]) == (1, 3, 400.0)


def test_recurrences_missing_for_a_contender_do_not_count() -> None:
    fewer = [each for each in RECORDS if (each["who"], each["number"]) != ("unscaled", 3)]
    assert proof_results(fewer, {})["tasks"]["digits"]["recurrences"] == 3


def test_figures_of_a_simulated_gpu_are_labelled() -> None:
    told = {"task": "resnet18", "energy_source": "nvml"}
    simulated = [{**each, **told, "device": "simulated GPU, a CPU in its place"} for each in RECORDS]
    made = proof_tables(proof_results(simulated, {"cores": "2"}))
    of_hour = {"gpu-calibration", "gpu-check"}
    assert set(made) == {"gpu", "gpu-sizes", "gpu-hour", "gpu-conditions", "gpu-status"} | of_hour
    assert all("simulated GPU" in table or table == NOT_MEASURED for table in made.values())
    real = [{**each, **told, "device": "NVIDIA H200"} for each in RECORDS]
    made = proof_tables(proof_results(real, {"cores": "2"}))
    assert made["gpu-status"].startswith("On NVIDIA H200, `gp_voi` saved ")
    alone = [each for each in real if each["who"] != "gp_voi"]
    assert "**No saving was measured on a GPU yet.**" in proof_tables(proof_results(alone, {}))["gpu-status"]
    assert proof_tables(proof_results(alone, {}))["gpu-calibration"] == NOT_MEASURED
    assert "run.sh`, 2026-01-02; NVIDIA H200; nvml |" in made["gpu-summary"]
    assert not any("simulated" in table for table in made.values())


def test_figures_of_two_devices_cannot_be_combined() -> None:
    with pytest.raises(ValueError, match="CPU and GPU have both been measured"):
        proof_results([*RECORDS, {**RECORDS[0], "task": "resnet18"}], {})


@pytest.mark.slow
def test_smallest_task_runs_from_trainings_to_a_page(tmp_path: Path) -> None:
    state = tmp_path / "state"
    run = [sys.executable, "-m", "benchmarks.recurrences"]
    extent = ["--quick", "--recurrences", "1", "--repeats", "0", "--tasks", "tabular", "--state", str(state)]
    done = subprocess.run([*run, "run", *extent], cwd=ROOT, check=False, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    page = tmp_path / "page.md"
    page.write_text("<!-- table: proof -->\n<!-- end of table -->\n")
    figures = tmp_path / "figures.json"
    collect = [*run, "collect", "--state", str(state), "--results", str(figures), "--write", str(page)]
    subprocess.run(collect, cwd=ROOT, check=True, capture_output=True)
    task = json.loads(figures.read_text())["tasks"]["tabular"]
    given_up = {who: found["given_up"] for who, found in task["contenders"].items()}
    assert given_up == dict.fromkeys(["gp_voi", "unscaled", "default"], 0)
    assert min(found["cost_j"] for found in task["contenders"].values()) > 0
    assert task["overhead"]["pairs"] == 1
    assert "| tabular | 1, 1 | `gp_voi` |" in page.read_text()


# --- Savings, break-even, regret and intervals ------------------------------------------------------------------------


def test_interval_covers_the_resampled_values_reproducibly() -> None:
    samples = [(1.0, 2.0), (3.0, 2.0)]
    interval = bootstrap(samples, share_saved)
    # A quarter of the resamples of two samples contain one sample twice: 1 - 1/2 and 1 - 3/2 are the ends.
    assert interval == (0.0, -0.5, 0.5)
    many = [(float(spent), 10.0) for spent in (3, 4, 7, 11, 13, 17, 19)]
    assert bootstrap(many, share_saved) == bootstrap(many, share_saved)


def test_resamples_contain_as_many_samples_of_each_group() -> None:
    samples = [(1.0, 2.0), (1.0, 2.0), (3.0, 2.0)]
    assert bootstrap(samples, share_saved, [0, 0, 1]) == (1 - 5 / 6,) * 3


@pytest.mark.parametrize(
    ("costs_j", "expected"),
    [
        ([9.0, 9.0], 1),
        ([20.0, 5.0, 4.0, 10.0], 3),
        ([5.0, 20.0, 4.0], 3),
        ([5.0, 4.0, 30.0], None),
        ([10.0, 10.0], 1),
    ],
)
def test_break_even_is_permanent(costs_j: list[float], expected: int | None) -> None:
    assert break_even(costs_j, [10.0] * len(costs_j)) == expected


def test_size_missing_the_target_costs_the_repeated_runs() -> None:
    figures = hindsight({64: [(30.0, True), (50.0, True)], 8: [(20.0, False), (40.0, True)], 512: [(90.0, False)]})
    assert figures == [SizeFigure(8, 2, 1, 60.0), SizeFigure(64, 2, 2, 40.0), SizeFigure(512, 1, 0, None)]
    assert best_size(figures) == SizeFigure(64, 2, 2, 40.0)
    assert best_size(figures[2:]) is None


# --- Tables in documents ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("figures", "tables", "page"),
    [
        ("policies", policy_tables, "docs/policy-figures.md"),
        ("recurrences", proof_tables, "docs/proof.md"),
        ("recurrences", proof_tables, "README.md"),
        ("gpu", proof_tables, "docs/proof.md"),
    ],
)
def test_documented_tables_match_the_figures(
    figures: str, tables: Callable[[Any], dict[str, str]], page: str, tmp_path: Path
) -> None:
    shown = (ROOT / page).read_text()
    copy = tmp_path / "page.md"
    copy.write_text(shown)
    write_tables(tables(json.loads((RESULTS / f"{figures}.json").read_text())), [copy])
    assert copy.read_text() == shown
