"""Trainings on two nodes: two real processes, each the only one of its node."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.servers import Server, free_port
from zeus_plugins.client.http import BsoClient

LIMIT_S = 120
JOB_ID = "digits-nodes"
REPOSITORY = Path(__file__).parent.parent


@pytest.mark.parametrize("training", ["lightning_nodes", "hf_nodes"])
def test_the_energy_of_both_nodes_is_reported_and_logged(server: Server, tmp_path: Path, training: str) -> None:
    here = {"WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "1", "LOCAL_RANK": "0"}
    address = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), **here}
    nodes = []
    for rank in range(2):
        with (tmp_path / f"output{rank}").open("w") as output:
            nodes.append(
                subprocess.Popen(
                    [sys.executable, "-m", f"tests.{training}", server.url, JOB_ID, str(tmp_path)],
                    cwd=REPOSITORY,
                    env=os.environ
                    | address
                    | {"NODE_RANK": str(rank)}
                    | ({"RANK": str(rank)} if training == "hf_nodes" else {}),
                    stdout=output,
                    stderr=subprocess.STDOUT,
                )
            )
    try:
        for rank, node in enumerate(nodes):
            assert node.wait(timeout=LIMIT_S) == 0, (tmp_path / f"output{rank}").read_text()
    finally:
        for node in nodes:
            node.kill()
            node.wait()

    first, second = (json.loads((tmp_path / f"rank{rank}.json").read_text()) for rank in range(2))
    assert first["steps"] == second["steps"] > 0
    with BsoClient(server.url) as client:
        view = client.show_job(JOB_ID)
    (trial,) = view.trials
    assert (trial.time_s, trial.energy_j) == (first["steps"], 2 * 10.0 * first["steps"])
    assert trial.energy_source == "2 nodes: counted steps"
    assert (view.job.number_of_gpus, view.job.max_power) == (2, 200.0)
    assert (first["metered_j"], second["metered_j"]) == (trial.energy_j, 0.0)
    assert first["open"] == second["open"] == [0, 0]
