"""A master with real scripts in real processes, and its records."""

from __future__ import annotations

import json
import math
import os
import sys
from collections.abc import Iterator
from datetime import datetime
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.support import ROOT
from tests.support.master_training import MAX_POWER_W
from tests.support.masters import (
    GPUS,
    REACHES,
    SIZES,
    WRITES_A_RESULT,
    Listed,
    job_of,
    master_of,
    python_job,
)
from tests.support.servers import ServerProcess
from zeus_plugins.cli import main
from zeus_plugins.client import client_from_environment
from zeus_plugins.client.http import BsoClient
from zeus_plugins.client.local import LocalServer
from zeus_plugins.client.port import NO_RETRIES
from zeus_plugins.errors import ZeusBSOConfigError, ZeusBSORuntimeError, ZeusBSOTrainFailError
from zeus_plugins.master import FailedTryError, MasterState, Run, ServerOptimizer
from zeus_plugins.master.history import NextRun, PlannedRun, conclusion
from zeus_plugins.protocol import TrialState
from zeus_plugins.train_result import TrainResult


def planned(recurrence: int = 1, tries: int = 1, **fields: Any) -> PlannedRun:
    job_id = f"rec{recurrence:02d}+try{tries:02d}"
    known = {"bs": 64, "learning_rate": 0.5, "seed": 1, "cost_ub": math.inf, **fields}
    return PlannedRun(recurrence=recurrence, tries=tries, job_id=job_id, **known)


def run_once(tmp_path: Path, program: str, **options: Any) -> TrainResult:
    """Launch a script once, without a bound on its cost."""
    return master_of(tmp_path, **options).launch(python_job(program), planned(), tmp_path, 0.5)


# Description of the job.


def test_placeholders_of_a_command_are_filled_in() -> None:
    job = job_of("{python} train.py --bs={batch_size} '{{braces}} {width}' {seed} {learning_rate}", fields={"width": 7})
    assert job.command_line(128, 0.25, 3) == [sys.executable, "train.py", "--bs=128", "{braces} 7", "3", "0.25"]


@pytest.mark.parametrize(
    ("fields", "says"),
    [
        ({"command": "train {batch_size} {width}"}, r"\{width\}, which has no value"),
        ({"command": "train {batch_size} {a.b} {c}"}, r"\{a\}, \{c\}, which has no value"),
        ({"command": "train {seed}"}, r"lacks \{batch_size\}"),
        ({"command": "train {batch_size"}, "cannot be filled in"),
        ({"fields": {"seed": 1}}, r"\['seed'\] have their values already"),
        ({"name": "a/b"}, "becomes a part of file names"),
        ({"default_lr": 0.0}, "default_lr is 0.0"),
        ({"lr_scaling": "cubic"}, "cubic"),
    ],
)
def test_unusable_job_is_refused(fields: dict[str, Any], says: str) -> None:
    with pytest.raises(ZeusBSOConfigError, match=says):
        job_of(**fields)


@pytest.mark.parametrize(("rule", "rate"), [("linear", 1.0), ("sqrt", 0.5 * math.sqrt(2)), ("none", 0.5)])
def test_learning_rate_follows_the_batch_size(rule: str, rate: float) -> None:
    assert job_of(lr_scaling=rule).learning_rate(128) == pytest.approx(rate)


@pytest.mark.parametrize(("optimizer", "rate"), [("sgd", 1.0), ("adam", 0.5 * math.sqrt(2)), ("lion", 0.5)])
def test_rule_auto_follows_the_jobs_optimizer(optimizer: str, rate: float) -> None:
    assert job_of(lr_scaling="auto", optimizer=optimizer).learning_rate(128) == pytest.approx(rate)


# A single run.


def test_log_directory_contains_job_knobs_and_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    clock = SimpleNamespace(now=lambda: datetime(2026, 3, 1, 12, 5, 9))
    monkeypatch.setattr("zeus_plugins.master.runner.datetime", clock)
    master = master_of(tmp_path)
    made = master.build_logdir(job_of(), 12, 0.5, 2.0)
    assert made == str(tmp_path / "logs" / "tiny+x12+eta0.5+beta2.0+20260301-120509")
    assert Path(made).is_dir()
    assert master.build_logdir(job_of(), 12, 0.5, 2.0) == made
    with pytest.raises(FileExistsError):
        master.build_logdir(job_of(), 12, 0.5, 2.0, exist_ok=False)


def test_script_gets_documented_variables_in_the_environment(tmp_path: Path) -> None:
    program = REACHES + "; print(json.dumps([dict(os.environ), sys.argv[1:]]))"
    master = master_of(tmp_path, profile_warmup_iters=3, profile_measure_iters=7)
    run = planned(2, 11, bs=128, learning_rate=0.25, seed=9, cost_ub=1234.5)
    result = master.launch(python_job(program), run, tmp_path, 0.5)
    assert (result.energy, result.time, result.reached) == (30.0, 0.5, True)
    environ, arguments = json.loads((tmp_path / "rec02+try11.train.log").read_text())
    assert arguments == ["128", "0.25", "9"]
    of_tests = {"ZEUS_STATE_DIR", "ZEUS_BSO_DATABASE_TIMEOUT_S"}
    assert {name: value for name, value in environ.items() if name.startswith("ZEUS_") and name not in of_tests} == {
        "ZEUS_LOG_DIR": str(tmp_path),
        "ZEUS_JOB_ID": "rec02+try11",
        "ZEUS_COST_THRESH": "1234.5",
        "ZEUS_ETA_KNOB": "0.5",
        "ZEUS_TARGET_METRIC": "0.8",
        "ZEUS_PROFILE_PARAMS": "3,7",
    }


def test_output_of_a_script_reaches_its_log_while_running(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("PYTHONUNBUFFERED", raising=False)
    log = tmp_path / "rec01+try01.train.log"
    run_once(tmp_path, REACHES + f"\nprint('hear me')\nprint(open({str(log)!r}).read(), end='')")
    assert log.read_text() == "hear me\n" * 2


def test_removed_arguments_are_refused_with_the_replacement(tmp_path: Path) -> None:
    for name, instead in (("executor", "command submit the run and wait"), ("listener", "output is in its log")):
        with pytest.raises(ZeusBSOConfigError, match=f"ZeusMaster has no {name}=: .*{instead}"):
            master_of(tmp_path, **{name: object()})


def test_old_result_is_not_mistaken_for_a_new_result(tmp_path: Path) -> None:
    run_once(tmp_path, REACHES)
    with pytest.raises(FailedTryError, match="wrote no result"):
        run_once(tmp_path, "0")


@pytest.mark.parametrize(
    ("program", "outcome", "says"),
    [
        ("raise RuntimeError('the data are gone')", "failed", "exit status 1; its last words: RuntimeError: the data"),
        ("raise MemoryError", "infeasible", "out of memory: MemoryError"),
        ("raise RuntimeError('CUDA out of memory. Tried')", "infeasible", "out of memory: RuntimeError: CUDA out"),
        ("import os; os.kill(os.getpid(), 9)", "failed", "killed by SIGKILL, as by someone or by a memory limit"),
        ("import os; os.kill(os.getpid(), 15)", "failed", "ended by SIGTERM"),
        ("print('MemoryError')", "failed", "wrote no result"),
        (WRITES_A_RESULT + "open(where, 'w').write('{\"energy\": 1')", "failed", "holds no result of a training"),
        (WRITES_A_RESULT + "result['time'] = -1; open(where, 'w').write(json.dumps(result))", "failed", "time: Input"),
    ],
)
def test_script_without_a_result_has_failed(tmp_path: Path, program: str, outcome: str, says: str) -> None:
    with pytest.raises(FailedTryError, match=says.replace(".", r"\.")) as raised:
        run_once(tmp_path, program)
    assert raised.value.outcome == outcome
    assert raised.value.time_s > 0


def test_missing_command_does_not_count_as_a_failed_run(tmp_path: Path) -> None:
    master = master_of(tmp_path)
    with pytest.raises(ZeusBSOConfigError, match="nonesuch cannot be started in"):
        master.run(job_of("nonesuch {batch_size}"), 1, SIZES, 2.0, 0.5)


# Recurrences.


def test_recurrence_repeats_runs_until_the_target_is_reached(tmp_path: Path) -> None:
    # The first run of the second recurrence is stopped early, and the next crashes.
    program = WRITES_A_RESULT + (
        "seed = int(sys.argv[3])\n"
        "if seed == 12: result.update(reached=False, energy=5.0, time=0.1, end_epoch=1)\n"
        "if seed == 13: sys.exit(3)\n"
        "print(os.environ['ZEUS_JOB_ID'], sys.argv[1:], os.environ['ZEUS_COST_THRESH'])\n"
        "open(where, 'w').write(json.dumps(result))"
    )
    optimizer = Listed(64, 32, 64, 128, 64)
    master = master_of(tmp_path, optimizer, seed=11)
    logdir = tmp_path / "here"
    entries = master.run(python_job(program), 3, SIZES, 2.0, 0.5, logdir=logdir)

    crashed = entries[2]
    cost = 0.5 * 30 + 0.5 * MAX_POWER_W * 0.5
    found = [(entry.bs, entry.pl, entry.energy, entry.reached, entry.time) for entry in entries]
    assert found[:2] == [(64, None, 30.0, True, 0.5), (32, None, 5.0, False, 0.1)]
    assert (crashed.bs, crashed.reached) == (64, False)
    assert crashed.energy == MAX_POWER_W * crashed.time
    assert found[3:] == [(128, None, 30.0, True, 0.5), (64, None, 30.0, True, 0.5)]
    assert optimizer.seen == [
        (64, cost, True),
        (32, 7.5, False),
        (64, crashed.energy, False),
        (128, cost, True),
        (64, cost, True),
    ]
    printed = "".join(path.read_text() for path in sorted(logdir.glob("*.log")))
    assert printed.splitlines() == [
        "rec01+try01 ['64', '0.5', '11'] inf",
        f"rec02+try01 ['32', '0.5', '12'] {2 * cost}",
        f"rec02+try03 ['128', '1.0', '14'] {2 * cost}",
        f"rec03+try01 ['64', '0.5', '15'] {2 * cost}",
    ]
    kept = json.loads((logdir / "history.json").read_text())
    assert [(run["job_id"], run["outcome"]) for run in kept["history"]] == [
        ("rec01+try01", "completed"),
        ("rec02+try01", "early_stopped"),
        ("rec02+try02", "failed"),
        ("rec02+try03", "completed"),
        ("rec03+try01", "completed"),
    ]
    assert kept["history"][2]["reason"].startswith("exit status 3")
    assert (kept["history"][0]["cost_ub"], kept["running"], kept["observed"]) == ("Infinity", None, 5)


def test_default_missing_the_target_is_an_error(tmp_path: Path) -> None:
    program = WRITES_A_RESULT + "result.update(reached=False, end_epoch=20); open(where, 'w').write(json.dumps(result))"
    master = master_of(tmp_path, Listed(64, 32))
    for resume in ({"logdir": tmp_path / "here"}, {"resume_from": tmp_path / "here"}):
        with pytest.raises(
            ZeusBSOTrainFailError, match=r"default batch size 64 did not reach the target metric 0\.8 in 20"
        ):
            master.run(python_job(program), 2, SIZES, 2.0, 0.5, **resume)
    assert len(MasterState.read(tmp_path / "here").history) == 1


def test_recurrence_is_abandoned_after_too_many_runs_and_a_resume_continues_afterwards(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # The number is tested without processes below.
    for module in ("history", "runner"):
        monkeypatch.setattr(f"zeus_plugins.master.{module}.MAX_TRIES", 3)
    job = python_job(f"import os; assert os.path.exists({str(tmp_path / 'mended')!r})\n" + REACHES)
    with pytest.raises(ZeusBSOTrainFailError, match="recurrence 1 is given up, as none of its 3 runs"):
        master_of(tmp_path).run(job, 2, SIZES, 2.0, 0.5, logdir=tmp_path / "here")
    (tmp_path / "mended").touch()
    entries = master_of(tmp_path).run(job, 2, SIZES, 2.0, 0.5, resume_from=tmp_path / "here")
    assert [entry.reached for entry in entries] == [False] * 3 + [True]
    assert MasterState.read(tmp_path / "here").history[-1].job_id == "rec02+try01"


def test_directory_is_resumed_only_with_equal_settings_and_by_a_single_master(tmp_path: Path) -> None:
    import fcntl

    job, here = python_job(REACHES), tmp_path / "here"
    master = master_of(tmp_path)
    master.run(job, 1, SIZES, 2.0, 0.5, logdir=here)
    with pytest.raises(ZeusBSOConfigError, match="holds another master's history"):
        master.run(job, 1, SIZES, 2.0, 0.5, logdir=here)
    with pytest.raises(ZeusBSOConfigError, match=r"was begun with eta_knob 0.5, not 0.25"):
        master.run(job, 1, SIZES, 2.0, 0.25, resume_from=here)
    with pytest.raises(ZeusBSOConfigError, match="there is nothing to resume"):
        master.run(job, 1, SIZES, 2.0, 0.5, resume_from=tmp_path / "nowhere")
    with (here / ".master.lock").open("a") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        with pytest.raises(ZeusBSOConfigError, match="another master works in"):
            master.run(job, 2, SIZES, 2.0, 0.5, resume_from=here)


def test_resumed_master_restores_the_state_of_its_optimizer(tmp_path: Path) -> None:
    job, here = python_job(REACHES), tmp_path / "here"
    master_of(tmp_path, Listed(64, 32)).run(job, 2, SIZES, 2.0, 0.5, logdir=here)
    again = Listed(64, 32, 128)
    entries = master_of(tmp_path, again).run(job, 3, SIZES, 2.0, 0.5, resume_from=here)
    assert [entry.bs for entry in entries] == [64, 32, 128]
    assert [bs for bs, _, _ in again.seen] == [128]


def test_optimizer_of_zeus_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ZeusBSOConfigError, match=r"a object cannot .*: pass a ServerOptimizer, with "):
        master_of(tmp_path, object())


def run_of(bs: int, cost_j: float, *, reached: bool) -> Run:
    planned = {"recurrence": 1, "tries": 1, "job_id": "", "learning_rate": 0.1, "seed": 0, "cost_ub": math.inf}
    measured = {"energy": cost_j, "time": 1.0, "cost": cost_j, "end_epoch": job_of().max_epochs}
    outcome = "completed" if reached else "early_stopped"
    return Run.model_validate({**planned, **measured, "bs": bs, "reached": reached, "outcome": outcome, "reason": ""})


def runs_of(costs: list[tuple[float, bool]]) -> list[Run]:
    return [run_of(64, cost, reached=reached) for cost, reached in costs]


@given(
    st.lists(st.tuples(st.integers(1, 1000).map(float), st.booleans()), max_size=120),
    st.one_of(st.none(), st.floats(1.0, 10.0)),
    st.integers(0, 1000),
)
def test_recurrence_number_seed_and_bound_follow_from_the_runs(
    costs: list[tuple[float, bool]], beta: float | None, seed: int
) -> None:
    # Each recurrence ends with its first run that reaches the target, or with its twentieth run.
    recurrences: list[list[tuple[float, bool]]] = [[]]
    for run in costs:
        recurrences[-1].append(run)
        if run[1] or len(recurrences[-1]) == 20:
            recurrences.append([])
    totals = [sum(cost for cost, _ in tries) for tries in recurrences[:-1] if tries[-1][1]]

    upcoming = NextRun.after(runs_of(costs), seed=seed, beta_knob=beta)

    assert (upcoming.recurrence, upcoming.tries) == (len(recurrences), len(recurrences[-1]) + 1)
    assert upcoming.seed == seed + len(costs)
    assert upcoming.cost_ub == (beta * min(totals) if totals and beta else math.inf)


# Optimizers.


@pytest.fixture
def client(tmp_path: Path) -> Iterator[BsoClient | LocalServer]:
    """A client of the embedded server."""
    with client_from_environment(f"embedded://{tmp_path / 'bso.sqlite3'}") as client:
        yield client


def server_optimizer(client: LocalServer, **options: Any) -> ServerOptimizer:
    return ServerOptimizer(client, GPUS, options={"policy": "zeus", "num_pruning_rounds": 1, "mab_seed": 1, **options})


def test_master_stops_with_an_error_when_no_size_works(tmp_path: Path, client: LocalServer) -> None:
    with pytest.raises(ZeusBSORuntimeError, match="even batch size 32 ran out of memory"):
        master_of(tmp_path, server_optimizer(client)).run(python_job("raise MemoryError"), 1, SIZES, 2.0, 0.5)


def test_unknown_option_of_the_job_is_named(client: LocalServer) -> None:
    with pytest.raises(ZeusBSOConfigError, match="pruning"):
        server_optimizer(client, pruning=1).register_job(job_of(), SIZES)


def test_each_run_ends_the_trial_with_the_same_outcome(tmp_path: Path, client: LocalServer) -> None:
    program = WRITES_A_RESULT + (
        "bs = int(sys.argv[1])\n"
        "if bs == 32 and sys.argv[3] == '123457': sys.exit(2)\n"
        "if bs == 32: result.update(reached=False, end_epoch=2, energy=1.0, time=0.1)\n"
        "if bs == 128: raise MemoryError\n"
        "open(where, 'w').write(json.dumps(result))"
    )
    master = master_of(tmp_path, server_optimizer(client))
    entries = master.run(python_job(program), 3, SIZES, 2.0, 0.5, logdir=tmp_path / "here")

    shown = client.show_job("tiny")
    assert [(trial.batch_size, trial.state) for trial in shown.trials] == [
        (64, TrialState.COMPLETED),
        (32, TrialState.FAILED),
        (32, TrialState.EARLY_STOPPED),
        (128, TrialState.INFEASIBLE),
        (64, TrialState.COMPLETED),
        (64, TrialState.COMPLETED),
    ]
    assert [trial.batch_size for trial in shown.trials] == [entry.bs for entry in entries]
    assert "exit status 2" in (shown.trials[1].message or "")
    assert "out of memory: MemoryError" in (shown.trials[3].message or "")
    kept = MasterState.read(tmp_path / "here").history
    assert [trial.cost_j for trial in shown.trials if trial.metric is not None] == [
        pytest.approx(run.cost) for run in kept if run.was_measured
    ]
    assert shown.best_batch_size == 64


def test_run_ended_during_an_outage_keeps_the_local_verdict(
    server: ServerProcess, capsys: pytest.CaptureFixture[str]
) -> None:
    job = job_of()
    with BsoClient(server.url, retries=NO_RETRIES) as client:
        optimizer = server_optimizer(client)
        optimizer.register_job(job, SIZES)
        optimizer.predict(job)
        optimizer.observe_run(job, runs_of([(100.0, True)])[0])
        size = optimizer.predict(job)
        server.kill()
        # Stopped after 120 J, because its second epoch would have crossed the bound of 200 J.
        stopped = runs_of([(120.0, False)])[0].model_copy(
            update={"bs": size, "cost_ub": 200.0, "outcome": "early_stopped", "end_epoch": 1}
        )
        optimizer.observe_run(job, stopped)
        server.start()
        assert main(["sync"]) == 0
        assert "1 delivered" in capsys.readouterr().out
        last = client.show_job("tiny").trials[-1]
    assert (last.state, last.epochs) == (TrialState.EARLY_STOPPED, 1)


def test_job_on_the_server_has_the_masters_knobs(tmp_path: Path, client: LocalServer) -> None:
    master_of(tmp_path, server_optimizer(client)).run(python_job(REACHES), 1, SIZES, None, 1.0)
    job = client.show_job("tiny").job
    assert (job.eta_knob, job.beta_knob) == (1.0, None)


def test_only_another_rule_of_rates_revises_the_job(client: LocalServer) -> None:
    for rule in ("auto", "linear"):
        server_optimizer(client).register_job(job_of(lr_scaling=rule), SIZES)
    view = client.show_job("tiny")
    assert view.job.scaling == "master linear"
    assert [[*revision.changes] for revision in view.revisions] == [["scaling"]]
    with pytest.raises(ZeusBSOConfigError, match=r"eta_knob is 0\.5, not 1\.0"):
        server_optimizer(client).register_job(job_of(), SIZES, eta_knob=1.0)


def test_unrecorded_dispatch_returns_the_same_trial(client: LocalServer) -> None:
    job = job_of()
    before = server_optimizer(client)
    before.register_job(job, SIZES)
    kept = json.loads(json.dumps(before.state_dict()))
    assert before.predict(job) == 64
    after = server_optimizer(client)
    after.load_state_dict(kept)
    after.register_job(job, SIZES)
    assert after.predict(job) == 64
    assert len(client.show_job("tiny").trials) == 1
    before.interrupt()
    after.interrupt()


# Conclusion.


def test_conclusion_repeats_the_claim_of_the_page_and_lists_the_measurements(client: LocalServer) -> None:
    runs = runs_of([(100.0, True), (50.0, True), (40.0, True), (7.0, False)])
    optimizer, job = server_optimizer(client), job_of()
    optimizer.register_job(job, SIZES)
    assert optimizer.predict(job) == 64
    optimizer.observe_run(job, run_of(64, 100.0, reached=True))
    savings = optimizer.savings()
    assert savings is not None
    measured = [
        "3 of 4 runs reached the target, in 3.0 s and 190 J; all runs took 4.0 s and 197 J.",
        "Energy: as the script says.",
    ]
    assert conclusion(runs, savings).splitlines() == ["Your default, 64, is the best batch size so far.", *measured]
    assert conclusion(runs, None).splitlines() == measured


def test_unreachable_server_yields_no_claim(server: ServerProcess) -> None:
    with BsoClient(server.url, retries=NO_RETRIES) as client:
        optimizer = server_optimizer(client)
        assert optimizer.savings() is None
        optimizer.register_job(job_of(), SIZES)
        assert optimizer.savings() is not None
        server.kill()
        assert optimizer.savings() is None


def test_script_of_the_documentation_submits_a_run_with_its_variables(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shown = (ROOT / "docs" / "master.md").read_text().partition("`submit.sh` may be:")[2]
    submit, ray = tmp_path / "submit.sh", tmp_path / "ray"
    submit.write_text(shown.partition("```sh\n")[2].partition("```")[0])
    ray.write_text('#!/bin/sh\nshift 3\nexec env -i PATH="$PATH" "$@"\n')  # sets no variable itself
    for script in (submit, ray):
        script.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    job = job_of([str(submit), "{python}", "-c", REACHES.replace("{", "{{").replace("}", "}}"), "{batch_size}"])
    assert master_of(tmp_path).launch(job, planned(), tmp_path, 0.5).reached
