"""Two processes train together with the Hugging Face Trainer: one asks the server, both obey."""

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

if not os.environ.get("CI"):
    pytest.importorskip("transformers", reason="the Trainer's callback needs zeus-plugins[transformers]")

from tests.support.hf_distributed_training import BATCH_SIZE, NOWHERE, WAYS, WORLD_SIZE, batch_size_of
from tests.support.hf_models import TRAIN_IMAGES
from tests.support.ranks import run_ranks
from tests.support.servers import Server, free_port
from tests.support.warm import TRANSFORMERS
from zeus_plugins.client.http import BsoClient
from zeus_plugins.protocol import TrialState, TrialView

# A process that waits for another one for ever shows as a test that fails by this limit.
LIMIT_S = 240
JOB_ID = "digits"
REPOSITORY = Path(__file__).parent.parent
# Each with its port last.
LAUNCHERS = {
    "torchrun": f"torch.distributed.run --nproc_per_node {WORLD_SIZE} --master_port".split(),
    "accelerate": (
        # Its name for several processes of one machine; the training itself asks for the CPU.
        f"accelerate.commands.launch --multi_gpu --num_processes {WORLD_SIZE} --num_machines 1 --mixed_precision no "
        "--dynamo_backend no --main_process_port"
    ).split(),
}
ENDS_AT_ONCE = {"unreachable", "without server", "never", "memory"}
PER_PROCESS = BATCH_SIZE // WORLD_SIZE


def run(server_url: str, folder: Path, *ways: str) -> bool:
    """Train on two processes; whether both ended well."""
    command = ["tests.support.hf_distributed_training", server_url, JOB_ID, str(folder), *ways]
    return not any(run_ranks(*command, modules=TRANSFORMERS, output=folder / "output"))


def launch(launcher: str, server_url: str, folder: Path, *ways: str) -> int:
    """Train on two processes that a launcher starts.

    Returns:
        The launcher's exit status.
    """
    command = [
        sys.executable,
        "-m",
        *LAUNCHERS[launcher],
        str(free_port()),
        "-m",
        "tests.support.hf_distributed_training",
    ]
    with (folder / "output").open("w") as output:
        training = subprocess.Popen(
            [*command, server_url, JOB_ID, str(folder), *ways],
            cwd=REPOSITORY,
            start_new_session=True,
            stdout=output,
            stderr=subprocess.STDOUT,
        )
    try:
        return training.wait(timeout=LIMIT_S)
    except subprocess.TimeoutExpired:
        os.killpg(training.pid, signal.SIGKILL)  # the processes are children of the launcher
        training.wait()
        pytest.fail(f"the processes hang: {(folder / 'output').read_text()}")


def seen_by_each(folder: Path, way: str) -> list[dict[str, Any]]:
    files = [folder / f"{way} {rank}.json" for rank in range(WORLD_SIZE)]
    assert all(file.exists() for file in files), (folder / "output").read_text()
    return [json.loads(file.read_text()) for file in files]


def only_trial(server: Server, way: str) -> TrialView:
    with BsoClient(server.url) as client:
        (trial,) = client.show_job(f"{JOB_ID}-{way.replace(' ', '-')}").trials
    return trial


@dataclass
class Ran:
    """What two processes left behind that trained in every way."""

    server: Server
    folder: Path


@pytest.fixture(scope="module")
def ran(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Ran]:
    folder = tmp_path_factory.mktemp("ran")
    server = Server(f"sqlite:///{folder / 'bso.sqlite3'}", folder / "server.log")
    server.start()
    went_well = run(server.url, folder, *(way for way in WAYS if way != "memory"))
    assert went_well, (folder / "output").read_text()
    yield Ran(server, folder)
    server.kill()


@pytest.mark.parametrize("way", [way for way in WAYS if way not in ENDS_AT_ONCE])
def test_both_processes_train_at_the_servers_size(ran: Ran, way: str) -> None:
    accumulation = WAYS[way].get("gradient_accumulation_steps", 1)
    for seen in seen_by_each(ran.folder, way):
        assert set(seen["sizes"][:-1]) == {batch_size_of(way) // WORLD_SIZE // accumulation}
        assert (seen["converged"], seen["trial_number"]) == (True, 1)
        assert seen["steps"] == seen["max_steps"]
    trial = only_trial(ran.server, way)
    assert (trial.state, trial.metric) == (TrialState.COMPLETED, 0.5)


@pytest.mark.parametrize("way", [way for way in WAYS if way not in ENDS_AT_ONCE])
def test_the_first_process_measures_the_energy(ran: Ran, way: str) -> None:
    first, second = seen_by_each(ran.folder, way)
    assert (first["energy_rows"], second["energy_rows"]) == (1, 0)
    assert first["time_s"] > 0
    assert second["time_s"] == 0


def test_a_failed_trial_raises_on_both_processes(ran: Ran) -> None:
    assert [seen["error"] for seen in seen_by_each(ran.folder, "never")] == ["ZeusBSOTrainFailError"] * WORLD_SIZE
    assert only_trial(ran.server, "never").state is TrialState.EXHAUSTED


def test_an_unreachable_server_raises_on_both_processes_where_that_is_wanted(ran: Ran) -> None:
    for seen in seen_by_each(ran.folder, "unreachable"):
        assert (seen["error"], seen["sizes"]) == ("ZeusBSOServerUnreachableError", [])
        assert NOWHERE in seen["message"]


def test_both_processes_train_without_the_server(ran: Ran) -> None:
    for seen in seen_by_each(ran.folder, "without server"):
        assert (seen["converged"], seen["trial_number"]) == (True, None)
        assert set(seen["sizes"][:-1]) == {PER_PROCESS}


def test_memory_that_runs_out_on_another_process_is_told(server: Server, tmp_path: Path) -> None:
    run(server.url, tmp_path, "memory")
    assert only_trial(server, "memory").state is TrialState.INFEASIBLE, (tmp_path / "output").read_text()


@pytest.mark.slow
@pytest.mark.parametrize("launcher", LAUNCHERS)
def test_launchers(server: Server, tmp_path: Path, launcher: str) -> None:
    assert launch(launcher, server.url, tmp_path, "plain") == 0, (tmp_path / "output").read_text()
    for seen in seen_by_each(tmp_path, "plain"):
        assert set(seen["sizes"][:-1]) == {PER_PROCESS}
        assert seen["steps"] == -(-TRAIN_IMAGES // BATCH_SIZE)
    assert only_trial(server, "plain").state is TrialState.COMPLETED


@pytest.mark.slow
def test_memory_that_runs_out_on_another_process_is_told_under_torchrun(server: Server, tmp_path: Path) -> None:
    launch("torchrun", server.url, tmp_path, "memory")
    assert only_trial(server, "memory").state is TrialState.INFEASIBLE, (tmp_path / "output").read_text()
