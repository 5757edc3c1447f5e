"""Trainings on two nodes: two real processes, each the only one of its node."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import pytest

from tests.support.ranks import run_ranks
from tests.support.servers import ServerProcess
from tests.support.warm import LIGHTNING, TRANSFORMERS
from zeus_plugins.client.http import BsoClient

JOB_ID = "digits-nodes"


@pytest.mark.parametrize(("bench", "modules"), [("lightning_bench", LIGHTNING), ("hf_bench", TRANSFORMERS)])
def test_the_energy_of_both_nodes_is_reported_and_logged(
    server: ServerProcess, tmp_path: Path, bench: str, modules: Sequence[str]
) -> None:
    command = ["tests.support.node_training", bench, server.url, JOB_ID, str(tmp_path)]
    status = run_ranks(*command, modules=modules, output=tmp_path / "output", nodes=2)
    assert status == [0, 0], (tmp_path / "output").read_text()

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
