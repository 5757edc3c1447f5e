from __future__ import annotations

import gc
import json
import logging
import os
import pickle
import signal
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from itertools import repeat
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch
from torch import distributed

from tests.support.answering import answering, responding
from tests.support.contract_double import CONVERGED, COST_BOUND, KEEP_TRAINING, ContractDouble
from tests.support.embedded import monitor
from tests.support.process_end import leave
from tests.support.ranks import stories_of
from tests.support.replay import ReplayMonitor
from tests.support.servers import ServerProcess
from tests.support.sessions import JOB, NO_LIMIT, TRIAL, monitor_of
from zeus_plugins import BatchSizeOptimizer, JobSpec
from zeus_plugins.client import client_from_environment
from zeus_plugins.client.http import BsoClient
from zeus_plugins.energy import Measurement
from zeus_plugins.errors import (
    ZeusBSOBadOperationError,
    ZeusBSOConfigError,
    ZeusBSOOperationOrderError,
    ZeusBSORuntimeError,
    ZeusBSOTrainFailError,
)
from zeus_plugins.protocol import ZEUS, GpuConfig, TrialState

MEASURED = {
    "energy_source": "nvml",
    "judged_by": None,
    "waited_share": 0.0,
    "startup_s": None,
    "watched": None,
    "rank": 0,
    **NO_LIMIT,
}
FAILED = TRIAL | NO_LIMIT | {"outcome": "failed", "refused_size": False, "ended_early": True, "detail": None}


def ended(outcome: str, detail: str) -> dict[str, Any]:
    return TRIAL | NO_LIMIT | {"outcome": outcome, "refused_size": False, "ended_early": False, "detail": detail}


def optimizer_of(server: ContractDouble) -> BatchSizeOptimizer:
    return BatchSizeOptimizer(monitor_of(*[(1.0, 50.0)] * 10), None, JOB, client=server.client())


def training_with(server: ContractDouble) -> BatchSizeOptimizer:
    optimizer = optimizer_of(server)
    optimizer.get_batch_size()
    optimizer.on_train_begin()
    return optimizer


@pytest.mark.parametrize(("default", "factor"), [(16, 4.0), (64, 1.0), (128, 1.0)])
def test_rates_are_raised_above_the_default_size_only(default: int, factor: float) -> None:
    sgd = torch.optim.SGD([torch.zeros(1)], lr=0.1)
    schedule = torch.optim.lr_scheduler.LambdaLR(sgd, lambda _: 0.5)
    job = JOB.model_copy(update={"default_batch_size": default, "batch_sizes": (16, 64, 128)})
    optimizer = BatchSizeOptimizer(monitor_of(), None, job, client=ContractDouble().client(), rank=1)
    optimizer.current_batch_size = 64
    optimizer.scale_learning_rate(sgd, schedule)
    assert sgd.param_groups[0]["lr"] == pytest.approx(0.05 * factor)
    assert schedule.base_lrs == pytest.approx([0.1 * factor])


def test_loop_registers_the_rule_of_scaling(tmp_path: Path) -> None:
    seen = []
    with client_from_environment(f"embedded://{tmp_path / 'bso.sqlite3'}") as client:
        for scales in (False, True, True, False, False):
            optimizer = BatchSizeOptimizer(monitor_of(*[(1.0, 50.0)] * 10), None, JOB, client=client)
            optimizer.get_batch_size()
            if scales:
                optimizer.scale_learning_rate(torch.optim.SGD([torch.zeros(1)], lr=0.1))
            optimizer.on_train_begin()
            optimizer.on_evaluate(JOB.target_metric or 0.0)
            view = client.show_job(JOB.job_id or "")
            seen.append((view.job.scaling, len(view.revisions)))
    assert seen == [(None, 0), ("rate auto", 1), ("rate auto", 1), ("rate none", 2), ("rate none", 2)]


def test_batch_size_is_requested_and_logged_once(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, logger="zeus_plugins")
    server = ContractDouble()
    optimizer = optimizer_of(server)
    assert [optimizer.get_batch_size(), optimizer.get_batch_size()] == [64, 64]
    assert len(server.sent("GET", "/jobs/batch_size")) == 1
    messages = [record.getMessage() for record in caplog.records if record.name == "zeus_plugins"]
    assert messages == ["job mnist-1, trial 7: batch size 64 (chosen by the server)"]


def test_stop_without_the_target_raises() -> None:
    optimizer = training_with(ContractDouble(COST_BOUND))
    with pytest.raises(ZeusBSOTrainFailError, match="cost bound crossed; launch the training again"):
        optimizer.on_evaluate(0.25)
    assert optimizer.training_finished


def test_repeated_loop_after_lack_of_memory_is_refused_with_a_remedy() -> None:
    optimizer = training_with(ContractDouble(KEEP_TRAINING))
    with pytest.raises(ZeusBSOOperationOrderError, match="If find_executable_batch_size repeats the loop, remove it"):
        optimizer.on_train_begin()


def test_further_rank_without_a_trial_refuses_every_call() -> None:
    optimizer = BatchSizeOptimizer(None, None, JOB, rank=3)
    for call in (
        optimizer.on_train_begin,
        lambda: optimizer.on_evaluate(0.5),
        lambda: optimizer.training_finished,
        lambda: optimizer.trial_number,
    ):
        with pytest.raises(ZeusBSOBadOperationError, match=r"rank 3.*set current_batch_size and trial_number"):
            call()
    optimizer.close()


def rank_1_of(server: ContractDouble, job: JobSpec = JOB, number: int = 7) -> BatchSizeOptimizer:
    """Return a further rank that received the double's trial as in Zeus's data-parallel scripts."""
    optimizer = BatchSizeOptimizer(monitor_of(*[(2.0, 60.0)] * 10), None, job, rank=1, client=server.client())
    optimizer.current_batch_size, optimizer.trial_number = 64, number
    return optimizer


def test_further_rank_reports_the_trial_of_rank_0_and_obeys_the_verdict() -> None:
    server = ContractDouble(KEEP_TRAINING, CONVERGED)
    with rank_1_of(server) as optimizer:
        with pytest.raises(ZeusBSOBadOperationError, match="only rank 0 asks for a batch size"):
            optimizer.get_batch_size()
        optimizer.on_train_begin()
        optimizer.on_evaluate(0.25)
        assert not optimizer.training_finished
        optimizer.on_evaluate(0.75)
        assert optimizer.training_finished
    measured = {**MEASURED, "rank": 1}
    assert server.requests == [
        ("POST", "/report", TRIAL | {"time": 2.0, "energy": 60.0, "metric": 0.25, "current_epoch": 1, **measured}),
        ("POST", "/report", TRIAL | {"time": 4.0, "energy": 120.0, "metric": 0.75, "current_epoch": 2, **measured}),
    ]


@pytest.mark.parametrize(
    ("error", "told"), [(ValueError("no"), []), (MemoryError("no"), [ended("infeasible", "MemoryError: no")])]
)
def test_failing_further_rank_ends_the_trial_only_when_out_of_memory(
    error: Exception, told: list[dict[str, Any]]
) -> None:
    server = ContractDouble()

    def fail() -> None:
        with rank_1_of(server) as optimizer:
            optimizer.on_train_begin()
            raise error

    with pytest.raises(type(error)):
        fail()
    assert server.sent("PATCH", "/trials") == told


def test_further_rank_of_an_offline_trial_judges_by_the_target_and_sends_nothing() -> None:
    server = ContractDouble()
    with rank_1_of(server, number=0) as optimizer:
        optimizer.on_train_begin()
        optimizer.on_evaluate(0.1)
        assert not optimizer.training_finished
        optimizer.on_evaluate(JOB.target_metric)
        assert optimizer.training_finished
    assert server.requests == []


def test_further_rank_requires_the_id_of_the_job() -> None:
    optimizer = rank_1_of(ContractDouble(), JOB.model_copy(update={"job_id": None}))
    with pytest.raises(ZeusBSOConfigError, match=r"rank 1 .* needs its id: .* or set ZEUS_JOB_ID"):
        optimizer.on_train_begin()


def test_rank_0_shows_the_trial_and_accepts_no_different_trial() -> None:
    optimizer = optimizer_of(ContractDouble())
    with pytest.raises(ZeusBSOOperationOrderError, match="ask for a batch size first"):
        optimizer.current_batch_size = 64
    optimizer.get_batch_size()
    assert (optimizer.current_batch_size, optimizer.trial_number) == (64, 7)
    optimizer.current_batch_size, optimizer.trial_number = 64, 7  # a script sets both on every rank
    with pytest.raises(ZeusBSOBadOperationError, match="trial_number is 7 in this trial, not 8"):
        optimizer.trial_number = 8
    optimizer.close()
    other = BatchSizeOptimizer(None, None, JOB, rank=1)
    for name, wrong in (("current_batch_size", 0), ("trial_number", -1)):
        with pytest.raises(ZeusBSOBadOperationError, match=f"{name} is {wrong}: set it to the {name} of rank 0"):
            setattr(other, name, wrong)


def test_rank_0_has_trial_number_0_while_offline() -> None:
    server = ContractDouble()
    server.down = True
    optimizer = optimizer_of(server)
    assert (optimizer.get_batch_size(), optimizer.trial_number) == (32, 0)
    optimizer.close()


def test_missing_server_url_is_read_from_the_environment(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("ZEUS_SERVER_URL", "http://127.0.0.1:9/of-environment")
    with BatchSizeOptimizer(monitor_of(), None, JOB) as optimizer:
        assert optimizer.get_batch_size() == JOB.default_batch_size
    assert "http://127.0.0.1:9/of-environment" in caplog.text


@pytest.mark.parametrize(
    ("said", "problem"),
    [
        ({"token": "zbso_1"}, "has no token=: set the environment variable ZEUS_BSO_TOKEN or ZEUS_BSO_TOKEN_FILE"),
        ({"on_unreachable": "raise"}, "has no on_unreachable=: a training always begins, at the default size"),
        ({"montor": None}, "did you mean monitor="),
    ],
)
def test_unknown_argument_is_answered_with_what_to_do_instead(said: dict[str, Any], problem: str) -> None:
    with pytest.raises(ZeusBSOConfigError, match=problem):
        BatchSizeOptimizer(None, None, JOB, **said)


# --- Unfinished trainings -------------------------------------------------------------------------------------------


def test_leaving_the_context_fails_an_unfinished_trial_once() -> None:
    server = ContractDouble()
    with optimizer_of(server) as optimizer:
        optimizer.get_batch_size()
    assert server.sent("PATCH", "/trials") == [FAILED]
    optimizer.close()
    assert server.sent("PATCH", "/trials") == [FAILED]


def test_exception_in_the_loop_fails_the_trial_and_propagates() -> None:
    server = ContractDouble()

    def crash_in_the_loop() -> None:
        with optimizer_of(server) as optimizer:
            optimizer.get_batch_size()
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        crash_in_the_loop()
    assert server.sent("PATCH", "/trials") == [ended("failed", "ZeroDivisionError: ")]


def test_dropping_the_optimizer_fails_an_unfinished_trial() -> None:
    server = ContractDouble()
    optimizer = training_with(server)
    del optimizer
    gc.collect()
    assert server.sent("PATCH", "/trials") == [FAILED]


def test_caught_sigterm_does_not_end_the_next_training() -> None:
    first, second = ContractDouble(), ContractDouble()
    optimizer = training_with(first)
    with pytest.raises(SystemExit):
        os.kill(os.getpid(), signal.SIGTERM)
    optimizer.close()
    assert [ending["outcome"] for ending in first.sent("PATCH", "/trials")] == ["suspended"]
    training_with(second).close()
    assert second.sent("PATCH", "/trials") == [FAILED]


def test_closing_the_optimizer_closes_the_connection(monkeypatch: pytest.MonkeyPatch) -> None:
    closed: list[BsoClient] = []
    with answering(400) as server:
        optimizer = BatchSizeOptimizer(monitor_of(), server.url, JOB)
        with pytest.raises(ZeusBSORuntimeError):
            optimizer.get_batch_size()
        monkeypatch.setattr(BsoClient, "close", lambda client: closed.append(client))
        optimizer.close()
    assert len(closed) == 1


@pytest.fixture
def listening_double() -> Iterator[tuple[ContractDouble, str]]:
    """Serve the double on a real socket, for programs in other processes."""
    double = ContractDouble()

    def answer(method: str, path: str, content: bytes) -> tuple[int, bytes]:
        answered = double(httpx.Request(method, f"http://bso{path}", content=content))
        return answered.status_code, answered.content

    with responding(answer) as server:
        yield double, server.url


PROGRAM = """
import os, sys
from zeus_plugins import BatchSizeOptimizer, JobSpec
from zeus_plugins.energy import EstimateMonitor

job = JobSpec(job_id="mnist-1", job_id_prefix="mnist", batch_sizes=(32, 64), default_batch_size=32)
optimizer = BatchSizeOptimizer(EstimateMonitor(65.0), None, job)
optimizer.get_batch_size()
optimizer.on_train_begin()
"""
TERMINATE = """
if True:
    import signal, time
    os.kill(os.getpid(), signal.SIGTERM)
    time.sleep(60)
"""
TERMINATE_BY_THE_SCRIPTS_OWN_HANDLER = """
import signal
with optimizer:
    signal.signal(signal.SIGTERM, lambda number, frame: os._exit(0))
    os.kill(os.getpid(), signal.SIGTERM)
"""
TERMINATE_A_FORKED_CHILD = """
import signal, time
reader, writer = os.pipe()
child = os.fork()
if child == 0:
    os.write(writer, b"!")  # a signal that comes sooner is lost to Python
    while True:
        time.sleep(0.05)  # one that comes just before a single long sleep would be seen after it
os.read(reader, 1)
os.kill(child, signal.SIGTERM)
_, status = os.waitpid(child, 0)
assert os.WTERMSIG(status) == signal.SIGTERM
"""
FORK_THEN_LEAVE_FOR_GOOD = """
child = os.fork()
if child == 0:
    sys.exit(0)
os.waitpid(child, 0)
os._exit(0)
"""


def in_context(ending: str) -> str:
    return "with optimizer:\n" + textwrap.indent(ending, "    ")


def test_pickled_optimizer_ends_the_trial(listening_double: tuple[ContractDouble, str]) -> None:
    double, url = listening_double
    optimizer = pickle.loads(pickle.dumps(BatchSizeOptimizer(monitor_of(), url, JOB)))  # noqa: S301
    optimizer.get_batch_size()
    optimizer.close()
    assert double.sent("PATCH", "/trials") == [FAILED]
    other_rank = pickle.loads(pickle.dumps(BatchSizeOptimizer(None, url, JOB, rank=1)))  # noqa: S301
    other_rank.close()


SLOW = pytest.mark.slow


@pytest.mark.parametrize(
    ("ending", "ended_trials"),
    [
        pytest.param("", [FAILED], id="runs-off-the-end", marks=SLOW),
        pytest.param("raise ValueError('no')", [ended("failed", "ValueError: no")], id="dies-of-an-exception"),
        pytest.param(TERMINATE, [ended("suspended", "SystemExit: 143")], id="is-terminated"),
        pytest.param(
            in_context(TERMINATE),
            [ended("suspended", "SystemExit: 143")],
            id="is-terminated-in-the-context",
            marks=SLOW,
        ),
        pytest.param(TERMINATE_BY_THE_SCRIPTS_OWN_HANDLER, [], id="has-its-own-handler"),
        pytest.param(TERMINATE_A_FORKED_CHILD, [FAILED], id="only-a-forked-child-is-terminated", marks=SLOW),
        pytest.param(FORK_THEN_LEAVE_FOR_GOOD, [], id="only-a-forked-child-exits", marks=SLOW),
        pytest.param(in_context(FORK_THEN_LEAVE_FOR_GOOD), [], id="only-a-forked-child-leaves-the-context"),
    ],
)
def test_ending_process_reports_the_unfinished_trial(
    listening_double: tuple[ContractDouble, str], ending: str, ended_trials: list[dict[str, object]]
) -> None:
    double, url = listening_double
    environ = {**os.environ, "ZEUS_SERVER_URL": url}
    subprocess.run([sys.executable, "-c", PROGRAM + ending], env=environ, check=False, capture_output=True, timeout=60)
    assert len(double.sent("GET", "/jobs/batch_size")) == 1
    assert double.sent("PATCH", "/trials") == ended_trials


# --- Against a real server --------------------------------------------------------------------------------------------


GPUS = GpuConfig(max_power=100, number_of_gpus=1, gpu_model="V100")
LOOP = JobSpec(
    job_id_prefix="loop",
    job_id="loop",
    batch_sizes=(8, 16, 32, 64),
    default_batch_size=32,
    target_metric=0.9,
    max_epochs=4,
    num_pruning_rounds=1,
    mab_num_explorations=1,
    mab_seed=7,
    policy=ZEUS,
)
EPOCHS = {8: 3, 16: 2, 32: 3, 64: 99}


def test_two_ranks_train_like_zeus_s_data_parallel_script(server: ServerProcess, tmp_path: Path) -> None:
    module = "tests.training.test_optimizer"
    seen = {"sizes": [32, 16], "numbers": [1, 2], "epochs": [3, 2], "finished": [True, True], "warnings": []}
    assert stories_of(module, tmp_path, server.url, modules=[module]) == [seen] * 2
    with BsoClient(server.url) as client:
        trials = client.show_job("loop").trials
    assert [(trial.state, trial.epochs, trial.metric) for trial in trials] == [
        (TrialState.COMPLETED, 3, 0.95),
        (TrialState.COMPLETED, 2, 0.95),
    ]
    evaluations = httpx.get(f"{server.url}/ui/jobs/loop/trials/1.json").json()["epochs"]
    assert [each["epoch"] for each in evaluations] == [1, 2, 3]  # two ranks, one evaluation


# --- Missed targets ---------------------------------------------------------------------------------------------------


def missed(url: str, job: JobSpec, metric: float) -> tuple[int, str]:
    """Run a training that misses its target; return its size and its message."""
    with BatchSizeOptimizer(monitor(), url, job) as optimizer:
        size = optimizer.get_batch_size()
        optimizer.on_train_begin()
        with pytest.raises(ZeusBSOTrainFailError) as raised:
            optimizer.on_evaluate(metric)
    return size, str(raised.value)


@pytest.mark.parametrize(("target", "higher", "move"), [(0.97, True, "lower"), (0.1, False, "raise")])
def test_unreachable_target_is_reported_with_the_setting_to_change(
    tmp_path: Path, target: float, *, higher: bool, move: str
) -> None:
    job = JobSpec(
        job_id="digits-1",
        job_id_prefix="digits",
        batch_sizes=(32, 64),
        default_batch_size=32,
        target_metric=target,
        higher_is_better_metric=higher,
        max_epochs=1,
    )
    url = f"embedded://{tmp_path / 'bso.sqlite3'}"
    told = {}
    for metric in (0.5, 0.75, 0.7, 0.6):
        size, text = missed(url, job, metric)
        told[metric] = size
        if len(set(told.values())) < 2:
            assert text.endswith("; launch the training again to try the next batch size")
    assert len(set(told.values())) == 2
    best = 0.75 if higher else 0.5
    assert text.endswith(
        f"; no batch size has reached the target, {target:g}; the best run reached {best:g} at {told[best]}: "
        f"{move} the target or raise max_epochs"
    )
    with client_from_environment(url) as client:  # as the message advises
        client.delete_job("digits-1")
    assert missed(url, job, 0.5)[1].endswith("launch the training again to try the next batch size")


FAILING = """
from zeus_plugins.training.outcomes import show_in_one_paragraph, train_fail_error
show_in_one_paragraph()
show_in_one_paragraph()
{}
"""


@pytest.mark.parametrize(
    ("end", "is_one_line", "status"),
    [
        ("raise train_fail_error(None)", True, 75),
        ("raise train_fail_error(None, 'move the target')", True, 1),
        ("raise ValueError('a fault')", False, 1),
        ("try:\n    1 / 0\nexcept ZeroDivisionError:\n    raise train_fail_error(None)", False, 75),
    ],
)
def test_missed_target_is_a_single_line_with_a_status_and_faults_keep_a_traceback(
    end: str, is_one_line: bool, status: int
) -> None:
    script = subprocess.run([sys.executable, "-c", FAILING.format(end)], capture_output=True, text=True, check=False)
    assert script.returncode == status
    said = script.stderr.splitlines()
    errors = ("zeus_plugins.errors.ZeusBSOTrainFailError: the training ended before the target", "ValueError: a fault")
    assert said[-1].startswith(errors)
    assert (len(said) == 1) == is_one_line


# A rank of a data-parallel loop as in Zeus's documentation: ``python -m tests.training.test_optimizer FOLDER URL``.


def train_rank(server_url: str, rank: int) -> dict[str, Any]:
    """Launch the script once; the ranks measure slightly different costs and compute the same metric."""
    monitor = ReplayMonitor(repeat(Measurement(1 + rank / 1000, 100 - rank, "replay")), GPUS)
    optimizer = BatchSizeOptimizer(monitor, server_url, LOOP, rank=rank)
    told = torch.zeros(2, dtype=torch.int)
    if rank == 0:
        told[0] = optimizer.get_batch_size()
        told[1] = optimizer.trial_number
    distributed.broadcast(told, src=0)
    optimizer.current_batch_size = told[0].item()  # type: ignore[assignment]  # as users write it
    optimizer.trial_number = told[1].item()  # type: ignore[assignment]
    optimizer.on_train_begin()
    for epoch in range(1, LOOP.max_epochs + 1):
        distributed.barrier()
        optimizer.on_evaluate(0.95 if epoch >= EPOCHS[optimizer.current_batch_size] else 0.5)
        if optimizer.training_finished:
            break
    return {
        "sizes": optimizer.current_batch_size,
        "numbers": optimizer.trial_number,
        "epochs": epoch,
        "finished": optimizer.training_finished,
    }


def main(folder: str, server_url: str) -> None:
    """Train twice, and write the observations and warnings of this rank."""
    warnings: list[str] = []
    handler = logging.Handler(logging.WARNING)
    handler.emit = lambda record: warnings.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("zeus_plugins").addHandler(handler)
    distributed.init_process_group("gloo")
    rank = distributed.get_rank()
    launches = [train_rank(server_url, rank) for _ in range(2)]
    story = {name: [launch[name] for launch in launches] for name in launches[0]} | {"warnings": warnings}
    Path(folder, f"{rank}.json").write_text(json.dumps(story))
    distributed.destroy_process_group()
    leave()


if __name__ == "__main__":
    main(*sys.argv[1:])
