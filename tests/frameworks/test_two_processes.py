"""Two processes train together: the first asks the server, and both use its answer."""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.frameworks.conftest import IS_ABSENT
from tests.support import ROOT
from tests.support.frameworks import FrameworkBench, Work
from tests.support.job_bench import AT_ONCE, NEVER, NEXT_SIZE, seconds_and_joules
from tests.support.process_end import leave
from tests.support.ranks import run_ranks
from tests.support.servers import ServerProcess, free_port
from tests.support.versions import is_older
from tests.support.warm import LIGHTNING, TRANSFORMERS
from zeus_plugins.client import client_from_environment
from zeus_plugins.errors import ZeusBSOError
from zeus_plugins.protocol import JobView, Origin, TrialState
from zeus_plugins.training import port

# A rank of two trains in several ways, one after another: ``python -m tests.frameworks.test_two_processes BENCH URL
# FOLDER WAY…``, with ``BENCH`` the module of a framework's bench. It writes down its observations.


BATCH_SIZE = 48
WORLD_SIZE = 2
NOWHERE = "http://127.0.0.1:9"  # the port of an obsolete service, where no server listens
# Lightning's metric is local to each rank until the callback averages; the Trainer's metric covers all data.
SCORES = {"lightning_bench": (0.25, 0.75), "hf_bench": (0.5, 0.5)}
MEAN_SCORE = 0.5
TARGETS = {
    "plain": MEAN_SCORE,
    "guessed": MEAN_SCORE,
    **dict.fromkeys(("never", "memory", "preempted", "finish", "crash"), NEVER),
}
OPTIONS: dict[str, dict[str, Any]] = {
    "lightning_bench": {"devices": WORLD_SIZE, "strategy": "ddp"},
    "hf_bench": {"ddp_backend": "gloo"},
}
OUT_OF_MEMORY = torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")


def job_id_of(way: str) -> str:
    return f"digits-{way.replace(' ', '-')}"


def rank_here() -> int:
    # Lightning sets no rank for its script's own process
    return int(os.environ.get("RANK", os.environ.get("LOCAL_RANK", "0")))


def train(name: str, server_url: str, folder: Path, way: str) -> dict[str, Any]:
    """Train at most two epochs.

    Returns:
        Observations of this process.
    """
    kind = import_module(f"tests.support.{name}").Bench
    url = NOWHERE if way == "without server" else server_url
    bench: FrameworkBench = kind(argparse.Namespace(url=url), job_id_of(way), folder / "checkpoints" / way)
    target = TARGETS.get(way, AT_ONCE)
    sizes_of_job = (NEXT_SIZE, BATCH_SIZE) if way in ("finish", "crash") else (BATCH_SIZE,)
    spec = {"default_batch_size": BATCH_SIZE, "max_epochs": 2, "higher_is_better_metric": True}
    job = bench.job(target, batch_sizes=sizes_of_job, **spec)
    options = {"scores": (SCORES[name][rank_here()],), "epochs": 2, **OPTIONS[name]}
    said: dict[str, Any] = {"server_url": url}
    asked = {"mode": "max", "target": target, "job_id": bench.job_id} if way == "guessed" else {"job": job}
    if way == "beyond":
        said["after_target"] = "continue"
    if way in ("finish", "crash"):
        said |= {"on_failure": "finish", "energy_monitor": seconds_and_joules(1.0, 10.0)}
        if rank_here() == 0:
            bench.complete_first_trial(job)
    sizes: list[int] = []
    checkpoint = None
    if way == "preempted":
        first = bench.training(bench.callback(job), work=Work({5: SystemExit(143)}), save_every=0, **options)
        with suppress(SystemExit):
            first.train()
        sizes, checkpoint = first.sizes, bench.checkpoint(4)
        if rank_here() > 0:  # only the first rank may contact the server
            said["server_url"] = NOWHERE
    callback, meter = bench.BatchSize(**asked, monitor="score", **said), bench.Energy()
    work = Work({2: OUT_OF_MEMORY} if way == "memory" and rank_here() == 1 else None)
    if way == "crash":
        port.AGREEMENT_S = 120.0  # a busy machine may delay one of the processes
        work = Work({9: RuntimeError("in the second epoch of each process")})
    training = bench.training(callback, meter, work=work, **options)
    seen: dict[str, Any] = {}
    try:
        training.train(checkpoint)
    except ZeusBSOError as error:
        seen |= {"error": type(error).__name__, "message": str(error)}
    else:
        seen |= {"converged": callback.trial.verdict.converged, "trial_number": callback.trial.trial_number}
    return seen | {
        "score": SCORES[name][rank_here()],
        "time_s": meter.time_s,
        "energy_rows": len(training.logged("zeus/time_s")),
        "sizes": sizes + training.sizes,
        "steps": training.steps if training.sizes else None,
    }


def main(name: str, server_url: str, folder: str, *ways: str) -> None:
    """Train each way, and write the observations to a file per process and way."""
    torch.set_num_threads(1)
    for way in ways:
        seen = train(name, server_url, Path(folder), way)
        Path(folder, f"{way} {rank_here()}.json").write_text(json.dumps(seen))
    leave()


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
        command = ["tests.frameworks.test_two_processes", self.bench, server_url, str(folder), *ways]
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
FORKED = [
    pytest.param(Start("lightning_bench"), id="lightning", marks=pytest.mark.slow),
    pytest.param(Start("hf_bench"), id="huggingface", marks=NEEDS_TRANSFORMERS),
]
LAUNCHED = [
    # A user starts a script with this command; Lightning starts the second process.
    pytest.param(Start("lightning_bench", ""), id="lightning, script", marks=pytest.mark.slow),
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


def run_in(start: Start, folder: Path, *ways: str) -> Iterator[Ran]:
    """Yield the records of a training in each of these ways."""
    server = ServerProcess(f"sqlite:///{folder / 'bso.sqlite3'}", folder / "server.log")
    server.start()
    went_well, output = start.train(server.url, folder, *ways)
    assert went_well, output
    yield Ran(start, server, folder)
    server.kill()


@pytest.fixture(scope="module", params=FORKED)
def ran(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Ran]:
    ways = ["plain", "guessed", "never", "without server", "beyond", "finish", "crash"]
    if RESUMES[request.param.bench]:
        ways.append("preempted")
    yield from run_in(request.param, tmp_path_factory.mktemp("ran"), *ways)


def assert_shared(ran: Ran) -> None:
    """Assert that both processes shared the trial of the plain training, and reported the mean."""
    seen = ran.seen("plain")
    for each in seen:
        assert (each["converged"], each["trial_number"]) == (True, 1)
        # The first evaluation reaches the target, and the second one confirms it.
        assert each["sizes"] == ran.epoch * 2
        assert each["steps"] == [2 * len(ran.epoch)] * 2
    # The report has the mean; each process's own value stays visible to further callbacks.
    assert tuple(each["score"] for each in seen) == SCORES[ran.start.bench]
    (trial,) = ran.job("plain").trials
    assert (trial.state, trial.metric, trial.epochs) == (TrialState.COMPLETED, MEAN_SCORE, 1)


def test_both_processes_share_trial_and_report_mean(ran: Ran) -> None:
    assert_shared(ran)


def test_first_process_measures_energy(ran: Ran) -> None:
    first, second = ran.seen("plain")
    assert (first["energy_rows"], second["energy_rows"]) == (2, 0)
    assert first["time_s"] > 0
    assert second["time_s"] == 0


def test_job_is_read_from_training_on_two_processes(ran: Ran) -> None:
    for each in ran.seen("guessed"):
        assert (each["converged"], set(each["sizes"])) == (True, {16, each["sizes"][-1]})
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


def test_crash_of_both_processes_is_trained_at_own_size(ran: Ran) -> None:
    for each in ran.seen("crash"):
        assert (each["converged"], each["trial_number"]) == (False, 3)
        assert each["sizes"] == [PER_PROCESS // 2] * 9 + ran.epoch * 2
    _, crashed, finishing = ran.job("crash").trials
    assert (crashed.state, crashed.batch_size) == (TrialState.FAILED, BATCH_SIZE // 2)
    assert (finishing.state, finishing.batch_size, finishing.epochs) == (TrialState.EXHAUSTED, BATCH_SIZE, 2)


def assert_out_of_memory(url: str, went_well: bool, output: str) -> None:
    """Assert that the trial of the training without memory counts against its size."""
    assert not went_well
    assert "CUDA out of memory" in output
    with client_from_environment(url) as client:
        (trial,) = client.show_job(job_id_of("memory")).trials
    assert trial.state is TrialState.INFEASIBLE, output
    assert "CUDA out of memory" in (trial.message or "")


@pytest.mark.parametrize("start", FORKED)
def test_out_of_memory_on_second_process_excludes_size(server: ServerProcess, tmp_path: Path, start: Start) -> None:
    for url in (server.url, f"embedded://{tmp_path / 'embedded.sqlite3'}"):
        assert_out_of_memory(url, *start.train(url, tmp_path, "memory"))


@pytest.mark.parametrize("start", LAUNCHED)
def test_processes_of_every_launcher_share_trials_and_errors(
    server: ServerProcess, tmp_path: Path, start: Start
) -> None:
    ended = start.train(server.url, tmp_path, "plain", "memory")
    assert_shared(Ran(start, server, tmp_path))
    assert_out_of_memory(server.url, *ended)


if __name__ == "__main__":
    main(*sys.argv[1:])
