"""Two processes train together: the first asks the server, and both use its answer."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from tests.frameworks.conftest import IS_ABSENT
from tests.support import ROOT
from tests.support.rank_training import BATCH_SIZE, MEAN_SCORE, SCORES, WORLD_SIZE, job_id_of
from tests.support.ranks import run_ranks
from tests.support.servers import ServerProcess, free_port
from tests.support.versions import is_older
from tests.support.warm import LIGHTNING, TRANSFORMERS
from zeus_plugins.client import client_from_environment
from zeus_plugins.protocol import JobView, Origin, TrialState

# A process that waits forever for its partner fails its test by this limit.
LIMIT_S = 240
MODULES = {"lightning_bench": LIGHTNING, "hf_bench": TRANSFORMERS}
PER_PROCESS = BATCH_SIZE // WORLD_SIZE
# transformers names the device of a process "cpu:0", from which torch restores no optimizer.
RESUMES = {"lightning_bench": True, "hf_bench": not is_older("transformers", "5.0")}
# Accelerate fills the last batch with samples of the first one.
EPOCHS = {"lightning_bench": [PER_PROCESS] * 3 + [PER_PROCESS // 2], "hf_bench": [PER_PROCESS] * 4}


@dataclass(frozen=True)
class Start:
    """A framework and the launcher of its processes, with the port last; None: fork them, which is fast."""

    bench: str
    launcher: str | None = None

    def train(self, server_url: str, folder: Path, *ways: str) -> tuple[bool, str]:
        """Train in two processes; return whether both succeeded, and their whole output."""
        output = folder / "output"
        command = ["tests.support.rank_training", self.bench, server_url, str(folder), *ways]
        if self.launcher is None:
            ended = run_ranks(*command, modules=MODULES[self.bench], output=output)
            return not any(ended), output.read_text()
        launcher = self.launcher.split()
        port = [str(free_port())] if launcher else []
        with output.open("w") as file:
            training = subprocess.Popen(
                [sys.executable, "-m", *launcher, *port, *(["-m"] if launcher else []), *command],
                cwd=ROOT,
                start_new_session=True,
                stdout=file,
                stderr=subprocess.STDOUT,
            )
        try:
            return training.wait(LIMIT_S) == 0, output.read_text()
        except subprocess.TimeoutExpired:
            os.killpg(training.pid, signal.SIGKILL)  # The later processes are children of the first.
            training.wait()
            pytest.fail(f"the processes hang: {output.read_text()}")


NEEDS_TRANSFORMERS = pytest.mark.skipif(IS_ABSENT, reason="needs the transformers")
STARTS = [
    pytest.param(Start("lightning_bench"), id="lightning", marks=pytest.mark.slow),
    # A user starts a script with this command; Lightning starts the second process.
    pytest.param(Start("lightning_bench", ""), id="lightning, script", marks=pytest.mark.slow),
    pytest.param(Start("hf_bench"), id="huggingface", marks=NEEDS_TRANSFORMERS),
    pytest.param(
        Start("hf_bench", f"torch.distributed.run --nproc_per_node {WORLD_SIZE} --master_port"),
        id="huggingface, torchrun",
        marks=[NEEDS_TRANSFORMERS, pytest.mark.slow],
    ),
    pytest.param(
        # The launcher takes this name for several processes on a machine; the training itself asks for the CPU.
        Start(
            "hf_bench",
            f"accelerate.commands.launch --multi_gpu --num_processes {WORLD_SIZE} --num_machines 1 "
            "--mixed_precision no --dynamo_backend no --main_process_port",
        ),
        id="huggingface, accelerate",
        marks=[NEEDS_TRANSFORMERS, pytest.mark.slow],
    ),
]


@dataclass
class Ran:
    """The records of two processes that trained in every way."""

    start: Start
    server: ServerProcess
    folder: Path

    @property
    def epoch(self) -> list[int]:
        """Return the batch sizes of each process in an epoch."""
        return EPOCHS[self.start.bench]

    def seen(self, way: str) -> list[dict[str, Any]]:
        return [json.loads((self.folder / f"{way} {rank}.json").read_text()) for rank in range(WORLD_SIZE)]

    def job(self, way: str) -> JobView:
        with client_from_environment(self.server.url) as client:
            return client.show_job(job_id_of(way))


@pytest.fixture(scope="module", params=STARTS)
def ran(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Ran]:
    folder = tmp_path_factory.mktemp("ran")
    server = ServerProcess(f"sqlite:///{folder / 'bso.sqlite3'}", folder / "server.log")
    server.start()
    ways = ["plain", "guessed", "never", "without server", "beyond", "finish"]
    if RESUMES[request.param.bench]:
        ways.append("preempted")
    went_well, output = request.param.train(server.url, folder, *ways)
    assert went_well, output
    yield Ran(request.param, server, folder)
    server.kill()


def test_both_processes_share_trial_and_report_mean(ran: Ran) -> None:
    seen = ran.seen("plain")
    for each in seen:
        assert (each["converged"], each["trial_number"]) == (True, 1)
        assert each["sizes"] == ran.epoch
        assert each["steps"] == [len(ran.epoch), 2 * len(ran.epoch)]
    # The report has the mean; each process's own value stays visible to further callbacks.
    assert tuple(each["score"] for each in seen) == SCORES[ran.start.bench]
    (trial,) = ran.job("plain").trials
    assert (trial.state, trial.metric, trial.epochs) == (TrialState.COMPLETED, MEAN_SCORE, 1)


def test_first_process_measures_energy(ran: Ran) -> None:
    first, second = ran.seen("plain")
    assert (first["energy_rows"], second["energy_rows"]) == (1, 0)
    assert first["time_s"] > 0
    assert second["time_s"] == 0


def test_job_is_read_from_training_on_two_processes(ran: Ran) -> None:
    for each in ran.seen("guessed"):
        assert (each["converged"], set(each["sizes"][:-1])) == (True, {16})
    view = ran.job("guessed")
    # The script's own size counts a step over all processes; the further sizes are multiples of the number of
    # processes.
    assert (view.job.default_batch_size, view.job.max_epochs) == (WORLD_SIZE * 16, 2)
    assert view.job.batch_sizes == (4, 8, 16, 32, 64, 128)
    assert [trial.state for trial in view.trials] == [TrialState.COMPLETED]


def test_failed_trial_raises_on_both_processes(ran: Ran) -> None:
    assert [each["error"] for each in ran.seen("never")] == ["ZeusBSOTrainFailError"] * WORLD_SIZE
    assert [trial.state for trial in ran.job("never").trials] == [TrialState.EXHAUSTED]


def test_both_processes_train_without_server(ran: Ran) -> None:
    for each in ran.seen("without server"):
        assert (each["converged"], each["trial_number"]) == (True, None)
        assert each["sizes"] == ran.epoch


def test_preempted_trial_resumes_on_both_processes(ran: Ran) -> None:
    if not RESUMES[ran.start.bench]:
        pytest.skip("transformers before 5.0 cannot resume on two processes without GPUs")
    for each in ran.seen("preempted"):
        assert each["error"] == "ZeusBSOTrainFailError"
        # The interrupted batch comes twice.
        assert each["sizes"] == [*ran.epoch, PER_PROCESS, *ran.epoch]
        assert each["steps"] == [2 * len(ran.epoch)] * 2
    (trial,) = ran.job("preempted").trials
    assert (trial.state, trial.trial_number, trial.epochs) == (TrialState.EXHAUSTED, 1, 2)


def test_both_processes_train_on_after_target(ran: Ran) -> None:
    for each in ran.seen("beyond"):
        assert (each["converged"], each["sizes"]) == (True, ran.epoch * 2)
    (trial,) = ran.job("beyond").trials
    assert (trial.state, trial.epochs) == (TrialState.COMPLETED, 1)


def test_both_processes_finish_missed_run(ran: Ran) -> None:
    missed = [PER_PROCESS // 2] * 7
    for each in ran.seen("finish"):
        assert (each["converged"], each["trial_number"]) == (False, 3)
        assert each["sizes"] == missed * 2 + ran.epoch * 2
    trials = ran.job("finish").trials
    assert [trial.batch_size for trial in trials] == [BATCH_SIZE, BATCH_SIZE // 2, BATCH_SIZE]
    assert trials[-1].origin is Origin.FINISH


@pytest.mark.parametrize("start", STARTS)
def test_out_of_memory_on_second_process_excludes_size(server: ServerProcess, tmp_path: Path, start: Start) -> None:
    embedded = f"embedded://{tmp_path / 'embedded.sqlite3'}"
    for url in (server.url, embedded) if start.launcher is None else (server.url,):
        went_well, output = start.train(url, tmp_path, "memory")
        assert not went_well
        assert "CUDA out of memory" in output
        with client_from_environment(url) as client:
            (trial,) = client.show_job(job_id_of("memory")).trials
        assert trial.state is TrialState.INFEASIBLE, output
        assert "CUDA out of memory" in (trial.message or "")
