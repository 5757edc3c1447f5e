"""Two processes train together with the Trainer, which gets its data and arguments in many ways."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.hf_bench import WAYS
from tests.support.rank_training import WORLD_SIZE, batch_size_of, job_id_of
from tests.support.ranks import run_ranks
from tests.support.servers import ServerProcess
from tests.support.warm import TRANSFORMERS
from zeus_plugins.client.http import BsoClient
from zeus_plugins.protocol import TrialState


@pytest.fixture(scope="module", name="ran")
def train_in_every_way(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[ServerProcess, Path]]:
    """Yield a server and the folder with the records of two processes."""
    folder = tmp_path_factory.mktemp("ran")
    server = ServerProcess(f"sqlite:///{folder / 'bso.sqlite3'}", folder / "server.log")
    server.start()
    command = ["tests.support.rank_training", "hf_bench", server.url, str(folder), *WAYS]
    ended = run_ranks(*command, modules=TRANSFORMERS, output=folder / "output")
    assert not any(ended), (folder / "output").read_text()
    yield server, folder
    server.kill()


@pytest.mark.parametrize("way", WAYS)
def test_both_processes_train_at_size_of_server(ran: tuple[ServerProcess, Path], way: str) -> None:
    server, folder = ran
    per_process = batch_size_of(way) // WORLD_SIZE // WAYS[way].get("accumulation", 1)
    for rank in range(WORLD_SIZE):
        seen = json.loads((folder / f"{way} {rank}.json").read_text())
        assert set(seen["sizes"][:-1]) == {per_process}
        assert (seen["converged"], seen["trial_number"]) == (True, 1)
        assert seen["steps"][0] == seen["steps"][1]
        assert seen["energy_rows"] == (1 if rank == 0 else 0)
        assert (seen["time_s"] > 0) is (rank == 0)
    with BsoClient(server.url) as client:
        (trial,) = client.show_job(job_id_of(way)).trials
    assert (trial.state, trial.metric) == (TrialState.COMPLETED, 0.5)
