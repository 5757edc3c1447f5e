"""Two processes train together: one asks the server, both obey."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from tests.support.ddp_training import BATCH_SIZE, SCORES, WORLD_SIZE
from tests.support.lightning_models import TRAIN_IMAGES
from tests.support.servers import Server, free_port
from tests.support.two_ranks import JOB_ID, run_two_ranks
from zeus_plugins.client.http import BsoClient
from zeus_plugins.protocol import TrialState, TrialView


def train_on_two_ranks(server_url: str, target: float, folder: Path, scenario: str = "plain") -> list[dict[str, Any]]:
    """What each rank saw."""
    status, output = run_two_ranks(server_url, target, folder, scenario)
    assert status == 0, output
    return [json.loads((folder / f"rank{rank}.json").read_text()) for rank in range(WORLD_SIZE)]


def only_trial(server: Server) -> TrialView:
    with BsoClient(server.url) as client:
        (trial,) = client.show_job(JOB_ID).trials
    return trial


def test_both_ranks_share_one_trial_and_report_the_mean(server: Server, tmp_path: Path) -> None:
    ranks = train_on_two_ranks(server.url, target=sum(SCORES) / 2, folder=tmp_path)
    per_rank = BATCH_SIZE // WORLD_SIZE
    full, rest = divmod(TRAIN_IMAGES // WORLD_SIZE, per_rank)
    for rank in ranks:
        assert (rank["converged"], rank["trial_number"]) == (True, 1)
        assert rank["sizes"] == [per_rank] * full + [rest]
        assert rank["steps"] == full + 1
        assert rank["estimated_steps"] == 2 * (full + 1)
    trial = only_trial(server)
    assert (trial.state, trial.metric, trial.epochs) == (TrialState.COMPLETED, 0.5, 1)


def test_a_failed_trial_raises_on_both_ranks(server: Server, tmp_path: Path) -> None:
    ranks = train_on_two_ranks(server.url, target=max(SCORES), folder=tmp_path)
    assert [rank["error"] for rank in ranks] == ["ZeusBSOTrainFailError"] * WORLD_SIZE
    assert only_trial(server).state is TrialState.EXHAUSTED


def test_an_unreachable_server_raises_on_both_ranks_where_that_is_wanted(tmp_path: Path) -> None:
    url = f"http://127.0.0.1:{free_port()}"
    ranks = train_on_two_ranks(url, target=0.5, folder=tmp_path, scenario="raise")
    for rank in ranks:
        assert rank["error"] == "ZeusBSOServerUnreachableError"
        assert url in rank["message"]
        assert rank["sizes"] == []


def test_both_ranks_train_without_the_server(tmp_path: Path) -> None:
    ranks = train_on_two_ranks(f"http://127.0.0.1:{free_port()}", target=sum(SCORES) / 2, folder=tmp_path)
    for rank in ranks:
        assert (rank["converged"], rank["trial_number"]) == (True, None)
        assert rank["sizes"][0] == BATCH_SIZE // WORLD_SIZE


def test_memory_that_ran_out_on_the_second_rank_excludes_the_size(server: Server, tmp_path: Path) -> None:
    status, output = run_two_ranks(server.url, target=max(SCORES), folder=tmp_path, scenario="memory")
    assert status != 0
    assert "CUDA out of memory" in output
    trial = only_trial(server)
    assert trial.state is TrialState.INFEASIBLE
    assert "CUDA out of memory" in (trial.message or "")


def test_a_preempted_trial_goes_on_on_both_ranks(server: Server, tmp_path: Path) -> None:
    ranks = train_on_two_ranks(server.url, target=max(SCORES), folder=tmp_path, scenario="preempted")
    steps = -(-TRAIN_IMAGES // BATCH_SIZE)
    for rank in ranks:
        assert rank["error"] == "ZeusBSOTrainFailError"
        assert set(rank["sizes"]) == {24, 12}
        assert len(rank["sizes"]) == 2 * steps + 1  # the step that was interrupted
        assert rank["steps"] == 2 * steps
    trial = only_trial(server)
    assert (trial.state, trial.trial_number, trial.epochs) == (TrialState.EXHAUSTED, 1, 2)


def test_spawned_processes_share_one_trial(server: Server, tmp_path: Path) -> None:
    ranks = train_on_two_ranks(server.url, target=sum(SCORES) / 2, folder=tmp_path, scenario="spawn")
    for rank in ranks:
        assert rank == {"sizes": [24, 24, 24, 12], "steps": 4}
    assert only_trial(server).state is TrialState.COMPLETED
    # The callback that knows the trial ended with its process.
    assert "spawned processes" in json.loads((tmp_path / "parent.json").read_text())
