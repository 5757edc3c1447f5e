"""The hour on a GPU: its targets, its steps, its packed state and `run.sh`. Rehearsals on a CPU are run by hand."""

from __future__ import annotations

import json
import sqlite3
import subprocess
import sys
import tarfile
import time
from pathlib import Path
from typing import Any

import pytest

from benchmarks import bundle, reports
from benchmarks.processes import BenchmarkError
from benchmarks.recurrences import harness, hour
from benchmarks.recurrences.calibration import calibration_steps, load_problem, target
from benchmarks.recurrences.harness import MAX_BROKEN, State, Trainings, is_done
from benchmarks.recurrences.hour import HOUR, START_S, Hour, expected_s, pack
from benchmarks.recurrences.plan import Step, steps
from benchmarks.recurrences.runs import Order
from benchmarks.recurrences.tasks import HOUR_TASKS, tasks_for
from benchmarks.reports import Record, proof_results
from benchmarks.tables import proof_tables
from tests.support import ROOT

SECONDS = (40.0, 60.0)
RESNET, GPT2 = tasks_for("gpu", HOUR_TASKS)


def calibration(size: int, curve: list[tuple[float, float, float]], number: int = 0, **fields: Any) -> Record:
    return {
        "key": f"calibrate {size} {number}",
        "stage": "calibrate",
        "task": "resnet50",
        "seed": 0,
        "number": number,
        "who": str(size),
        "drifted": False,
        "batch_size": size,
        "state": "bare",
        "reached": False,
        "curve": curve,
        "idle_w": 90.0,
        "context_w": 120.0,
        "peak_w": 690.0,
        "limit_w": 700.0,
        "memory_gib": 12.0,
        "device": "NVIDIA H100",
        "energy_source": None,
        "begun_at": "2026-01-02T03:04:05+00:00",
        "load_1": 1.0,
        "process_s": 40.0,
        **fields,
    }


def rising(epoch_s: float, *metrics: float) -> list[tuple[float, float, float]]:
    return [(epoch_s * place, 500 * epoch_s * place, metric) for place, metric in enumerate(metrics, start=1)]


# ---- Targets


def test_target_is_the_first_value_reached_by_the_default_in_time() -> None:
    curves = {
        256: rising(2.0, *(place / 40 for place in range(1, 31))),
        64: rising(3.0, *(place / 30 for place in range(1, 31))),
        1024: rising(2.5, *(place / 50 for place in range(1, 31))),
    }
    found = target(RESNET, [calibration(size, curve) for size, curve in curves.items()], SECONDS)
    assert found.metric == 0.487
    assert found.reached_s == {256: 40.0, 64: 45.0, 1024: 62.5}
    assert found.problem == ""
    assert found.max_epochs == 15  # three times the five epochs of four evaluations each


def test_falling_metric_has_a_target_between_two_epochs() -> None:
    curve = rising(20.0, 5.0, 4.0, 3.5, 3.2)
    found = target(GPT2, [calibration(size, curve, task="gpt2-medium") for size in (32, 8, 128)], SECONDS)
    assert found.metric == 4.5
    assert found.reached_s == {8: 40.0, 32: 40.0, 128: 40.0}
    assert found.problem == "the default size evaluates only 2 times"


def recurrence(number: int, time_s: float, mean_w: float = 600.0, who: str = "default", **fields: Any) -> Record:
    spent = {"time_s": time_s, "energy_j": mean_w * time_s, "cost_j": time_s, "reached": True}
    of_step = {"stage": "recurrence", "number": number, "who": who}
    named = {"key": f"recurrence {number} {who}", **of_step, **spent, **fields}
    return {**calibration(256, []), **named}


def hour_with(directory: Path, *records: Record, mean_w: float = 600.0, targets: bool = True) -> Hour:
    state = State(directory)
    curve = [(20.0, 2_000.0, 0.2), (30.0, 2_000 + 10 * mean_w, 0.3)]  # the first evaluation includes the start
    warm_up = {**calibration(256, curve), "key": calibration_steps(RESNET, 60.0)[0].key, "stage": "warm-up"}
    for record in (warm_up, *records):
        state.add(record)
    if targets:
        told = {"resnet50": {"metric": 0.5, "max_epochs": 9, "reached_s": {}}}
        (directory / "earlier.json").write_text(json.dumps(told))
    made = Hour(state, time.monotonic() + 600, SECONDS, 1, directory / "gpu-state.tgz", tasks=("resnet50",))
    if targets:
        made.take_targets(directory / "earlier.json")
    return made


def test_task_at_low_power_is_not_measured(tmp_path: Path) -> None:
    assert [step.who for step in hour_with(tmp_path / "busy", mean_w=491.0, targets=False).left()][:1] == ["256"]
    for targets in (False, True):
        made = hour_with(tmp_path / f"idle {targets}", mean_w=489.0, targets=targets)
        with pytest.raises(BenchmarkError, match=r"draws 489 W of 700 W at its default size 256.* Raise the default"):
            made.left()
    idle = calibration(256, [(10.0, 100.0, 0.2)])
    assert "draws 10 W of 700 W" in load_problem(RESNET, idle)
    assert load_problem(tasks_for("gpu", ["resnet18"])[0], idle) == ""


@pytest.mark.parametrize(
    ("second", "told"),
    [
        (recurrence(1, 15.0), "0 missed it, and the others took 50 s, 15 s"),
        (recurrence(1, 121.0), "0 missed it, and the others took 50 s, 121 s"),
        (recurrence(1, 50.0, reached=False), "1 missed it, and the others took 50 s"),
    ],
)
def test_targets_are_checked_again_after_two_runs_at_the_default(tmp_path: Path, second: Record, told: str) -> None:
    assert hour_with(tmp_path / "one", recurrence(0, 50.0)).left()
    assert hour_with(tmp_path / "two", recurrence(0, 50.0), recurrence(1, 60.0)).left()
    with pytest.raises(BenchmarkError, match=f"{told}. Calibrate anew"):
        hour_with(tmp_path / "three", recurrence(0, 50.0), second).left()


# ---- Steps


def test_expected_seconds_follow_from_the_kind_or_the_task() -> None:
    step = Step("size", "resnet50", 0, 0, "16", Order("resnet50", "x", 0))
    records = [calibration(64, [], fit_wall_s=30.0), calibration(64, [], fit_wall_s=50.0)]
    assert expected_s(step, []) == 0
    assert expected_s(step, [calibration(64, [], state="broken")]) == 0
    assert expected_s(step, records) == 40 + START_S
    assert expected_s(step, [*records, calibration(16, [], stage="size", fit_wall_s=70.0)]) == 70 + START_S


class Endless:
    """A training process that does not end by itself."""

    exitcode = None

    def __init__(self) -> None:
        self.waits: list[float | None] = []
        self.is_terminated = False

    def join(self, timeout: float | None = None) -> None:
        self.waits.append(timeout)

    def is_alive(self) -> bool:
        return not self.is_terminated

    def terminate(self) -> None:
        self.is_terminated = True


def test_training_is_ended_with_the_call_and_not_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    process = Endless()
    monkeypatch.setattr(harness, "Launcher", lambda _: type("", (), {"start": lambda *_: process})())
    trainings = Trainings(State(tmp_path), "http://127.0.0.1:1", end_s=time.monotonic() + 5)
    with pytest.raises(TimeoutError):
        trainings.attempt(next(steps([RESNET], HOUR)))
    assert process.is_terminated
    assert process.waits[0] == pytest.approx(5, abs=5)
    assert State(tmp_path).records == []


def test_broken_training_is_kept_and_tried_once_more(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    process = Endless()
    process.terminate()
    monkeypatch.setattr(harness, "Launcher", lambda _: type("", (), {"start": lambda *_: process})())
    state, step = State(tmp_path), list(steps([RESNET], HOUR))[1]
    trainings = Trainings(state, "http://127.0.0.1:1", keeps_broken=True)
    for _ in range(MAX_BROKEN):
        assert not is_done(step, state.of(step.key))
        trainings.attempt(step)
    assert is_done(step, state.of(step.key))
    assert {each["state"] for each in State(tmp_path).records} == {"broken"}
    with pytest.raises(ValueError, match="all trainings broke: exit status None"):
        proof_results(state.records, {})
    with pytest.raises(BenchmarkError, match="a training broke: exit status None"):
        Trainings(state, "http://127.0.0.1:1").attempt(step)


# ---- The packed state


def test_packed_state_is_complete_at_any_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    directory, file = tmp_path / "state", tmp_path / "gpu-state.tgz"
    state = State(directory)
    state.add({"key": "a", "state": "ended"})
    with sqlite3.connect(directory / "bso.sqlite3") as database:
        database.execute("PRAGMA journal_mode=WAL")
        database.execute("CREATE TABLE trials (number INTEGER)")
        database.execute("INSERT INTO trials VALUES (7)")
        database.commit()
        pack(directory, file)  # while the server has the database open

    def killed(*_: object) -> None:
        raise KeyboardInterrupt

    state.add({"key": "b", "state": "ended"})
    with monkeypatch.context() as patched:
        patched.setattr(hour, "_back_up", killed)
        with pytest.raises(KeyboardInterrupt):
            pack(directory, file)
    with tarfile.open(file) as archive:
        archive.extractall(tmp_path / "unpacked", filter="data")
    assert [each["key"] for each in State(tmp_path / "unpacked").records] == ["a"]
    with sqlite3.connect(tmp_path / "unpacked" / "bso.sqlite3") as database:
        assert database.execute("SELECT number FROM trials").fetchall() == [(7,)]


def test_process_exits_before_the_end_of_the_call(tmp_path: Path) -> None:
    program = """
import sys, time
from pathlib import Path
from benchmarks.recurrences import hour
hour.EXIT_S = 0.1
call = hour.Hour(hour.State(Path(sys.argv[1])), time.monotonic() + 0.3, (20, 60), 1, Path(sys.argv[1]))
call.exit_in_time()
time.sleep(60)
"""
    done = subprocess.run([sys.executable, "-c", program, str(tmp_path)], cwd=ROOT, check=False)
    assert done.returncode == 3


# ---- Tables


@pytest.mark.parametrize(
    ("joules", "verdict"), [((50, 55), "saves"), ((150, 160), "loses"), ((90, 120), "not shown yet")]
)
def test_savings_have_an_interval_and_a_verdict(
    joules: tuple[int, int], verdict: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reports, "_RESAMPLES", 200)
    records = [
        calibration(
            64, [], stage="recurrence", number=number, who=who, reached=True, cost_j=each, energy_j=each, time_s=1
        )
        for number, spent in enumerate(joules)
        for who, each in (("default", 100), ("gp_voi", spent))
    ]
    (head, _, policy, _) = proof_tables(proof_results(records, {}))["gpu"].splitlines()
    assert "| energy saved (95 %) | verdict |" in head
    assert f" %) | {verdict} | " in policy


def test_energy_is_counted_in_all_ways_and_the_last_five_apart() -> None:
    warm_up = calibration(256, [], stage="warm-up", key="warm-up")
    records = [warm_up]
    for number in range(10):
        spent = {"default": 500.0, "gp_voi": 600.0 if number < 5 else 400.0}
        for who, mean_w in spent.items():
            energy = {"process_j": 10 * mean_w + 1000, "samples": 100.0}
            records.append(recurrence(number, 10.0, mean_w, who, **energy))
    records += [
        recurrence(0, 10.0, mean_w, str(size), stage="size", batch_size=size, state=state, reached=state == "ended")
        for size, mean_w, state in (
            (64, 450, "ended"),
            (256, 500, "ended"),
            (512, 400, "ended"),
            (1024, 1, "out_of_memory"),
        )
    ]
    found = proof_results(records, {})["tasks"]["resnet50"]["hour"]
    ways = {
        each["name"]: (each["default_j"], each["policy_j"], each["last"], each["wins"]) for each in found["counted"]
    }
    assert ways == {
        "all": (50_000, 50_000, pytest.approx(0.2), 5),
        "above 90 W, idle before CUDA starts": (41_000, 41_000, pytest.approx(1000 / 4100), 5),
        "above 120 W, idle with a CUDA context": (38_000, 38_000, pytest.approx(1000 / 3800), 5),
        "all of the processes, with their start": (60_000, 60_000, pytest.approx(1000 / 6000), 5),
    }
    assert found["sample_j"] == {"default": 50.0, "gp_voi": 50.0}
    assert (found["to_best"], found["to_largest"]) == (5000 / 4000, 5000 / 4000)
    table = proof_tables(proof_results(records, {}))["gpu-hour"]
    assert "| resnet50 | above 90 W, idle before CUDA starts | 41 | 41 | 0 % (" in table
    assert table.endswith(
        "- `resnet50`: one job: run-to-run spread only; `gp_voi` took 1.25 times the energy of the best size, 1.25 of"
        " the largest that fits; per sample 50 J and 50 J (default, `gp_voi`)"
    )


def test_several_jobs_are_resampled_as_a_whole() -> None:
    records = [
        recurrence(number, 10.0, mean_w, who, seed=seed, key=f"{seed} {number} {who}")
        for seed, saved_w in enumerate((100.0, 300.0))
        for number in range(4)
        for who, mean_w in (("default", 500.0), ("gp_voi", 500.0 - saved_w))
    ]
    found = proof_results(records, {})
    assert found["tasks"]["resnet50"]["hour"]["counted"][0]["saved"] == pytest.approx((0.4, 0.2, 0.6))
    assert "- `resnet50`: intervals by 2 jobs; " in proof_tables(found)["gpu-hour"]


# ---- The bundle


def test_bundle_brings_the_packages_of_a_training_without_pytorch_and_numpy() -> None:
    names = {each.partition("==")[0] for each in bundle.requirements()}
    assert {"lightning", "transformers", "accelerate", "litestar", "sqlalchemy", "httpx", "nvidia-ml-py"} <= names
    assert not names & {"torch", "numpy", "triton", "sympy", "zeus-plugins", "uvloop"}
    assert not [name for name in names if name.startswith("nvidia-") and name != "nvidia-ml-py"]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A bundle with an interpreter that writes its arguments to a file."""
    made = tmp_path / "gpu-bundle"
    (made / "wheels").mkdir(parents=True)
    (made / "tree").mkdir()
    (made / "requirements.txt").write_text("x==1\n")
    (made / "wheels" / "zeus_plugins-0.1.0-py3-none-any.whl").write_text("")
    (made / "run.sh").write_bytes((ROOT / "benchmarks" / "gpu_run.sh").read_bytes())
    stub = tmp_path / "python"
    stub.write_text(f'#!/bin/bash\n[ "$1" = -c ] && echo 3.12 && exit\necho "$@" >> {tmp_path}/called\nexit $STATUS\n')
    stub.chmod(0o755)
    return made


def called(folder: Path, *options: str, status: int = 0) -> tuple[int, list[str]]:
    home = folder.parent
    (home / "called").unlink(missing_ok=True)
    done = subprocess.run(
        ["/bin/bash", str(folder / "run.sh"), "--work", str(home / "work"), *options],
        env={"PATH": "/usr/bin:/bin", "PYTHON": str(home / "python"), "STATUS": str(status)},
        capture_output=True,
        text=True,
        check=False,
    )
    return done.returncode, (home / "called").read_text().splitlines()


def test_call_installs_once_offline_and_resumes_from_the_packed_state(folder: Path) -> None:
    home = folder.parent
    packages, state = home / "work" / "packages-3.12-", home / "work" / "state"
    status, (install, run) = called(folder, "--minutes", "7")
    assert status == 0
    for option in ("--no-index", f"--find-links {folder}/wheels", "--no-deps", f"--target {packages}"):
        assert option in install
    assert run.startswith("-m benchmarks.recurrences hour --minutes 7 --began ")
    assert f"--state {state} --out {home}" in run
    assert "--shrink" not in run

    State(state).add({"key": "of the killed call"})
    (state / "bso.sqlite3-wal").touch()  # belongs to another database than the packed one
    State(home / "packed").add({"key": "packed"})
    pack(home / "packed", home / "gpu-state.tgz")
    assert len(called(folder)[1]) == 1
    assert [each["key"] for each in State(home / "work" / "state").records] == ["packed"]
    assert not (home / "work" / "state" / "bso.sqlite3-wal").exists()
