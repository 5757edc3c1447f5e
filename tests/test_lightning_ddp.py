"""Two processes train together: one asks the server, both obey."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.support.ddp_training import BATCH_SIZE, SCORES, WORLD_SIZE
from tests.support.lightning_models import TRAIN_IMAGES, USERS_SIZE
from tests.support.servers import Server, free_port
from tests.support.two_ranks import JOB_ID, run_script, run_two_ranks
from zeus_plugins.client.http import BsoClient
from zeus_plugins.protocol import TrialState, TrialView

Run = Callable[[str, float, Path, str], tuple[bool, str]]
Train = Callable[..., list[dict[str, Any]]]


@pytest.fixture(params=[run_two_ranks, pytest.param(run_script, marks=pytest.mark.slow)], ids=["ranks", "script"])
def run(request: pytest.FixtureRequest) -> Run:
    """Starts both ranks, in one way after the other."""
    start: Run = request.param
    return start


@pytest.fixture
def train(run: Run, tmp_path: Path) -> Train:
    """Trains on both ranks; what each saw."""

    def on_two_ranks(server_url: str, target: float, scenario: str = "plain") -> list[dict[str, Any]]:
        went_well, output = run(server_url, target, tmp_path, scenario)
        assert went_well, output
        return [json.loads((tmp_path / f"rank{rank}.json").read_text()) for rank in range(WORLD_SIZE)]

    return on_two_ranks


def only_trial(server: Server) -> TrialView:
    with BsoClient(server.url) as client:
        (trial,) = client.show_job(JOB_ID).trials
    return trial


def test_both_ranks_share_one_trial_and_report_the_mean(server: Server, train: Train) -> None:
    ranks = train(server.url, target=sum(SCORES) / 2)
    per_rank = BATCH_SIZE // WORLD_SIZE
    full, rest = divmod(TRAIN_IMAGES // WORLD_SIZE, per_rank)
    for rank in ranks:
        assert (rank["converged"], rank["trial_number"]) == (True, 1)
        assert rank["sizes"] == [per_rank] * full + [rest]
        assert rank["steps"] == full + 1
        assert rank["estimated_steps"] == 2 * (full + 1)
    # What was reported is the mean, and what other callbacks see stays each rank's own.
    assert tuple(rank["score"] for rank in ranks) == SCORES
    trial = only_trial(server)
    assert (trial.state, trial.metric, trial.epochs) == (TrialState.COMPLETED, 0.5, 1)


def test_a_job_is_read_from_a_training_on_two_ranks(server: Server, train: Train) -> None:
    for rank in train(server.url, target=sum(SCORES) / 2, scenario="guessed"):
        assert (rank["converged"], set(rank["sizes"][:-1])) == (True, {USERS_SIZE})
    with BsoClient(server.url) as client:
        job = client.show_job(JOB_ID).job
    # The script's own size is that of a step over all ranks; the others are those of as many samples for each rank.
    assert (job.default_batch_size, job.max_epochs) == (WORLD_SIZE * USERS_SIZE, 2)
    assert job.batch_sizes == (4, 8, 16, 32, 64, 128)
    assert only_trial(server).state is TrialState.COMPLETED


def test_a_failed_trial_raises_on_both_ranks(server: Server, train: Train) -> None:
    ranks = train(server.url, target=max(SCORES))
    assert [rank["error"] for rank in ranks] == ["ZeusBSOTrainFailError"] * WORLD_SIZE
    assert only_trial(server).state is TrialState.EXHAUSTED


def test_an_unreachable_server_raises_on_both_ranks_where_that_is_wanted(train: Train) -> None:
    url = f"http://127.0.0.1:{free_port()}"
    ranks = train(url, target=0.5, scenario="raise")
    for rank in ranks:
        assert rank["error"] == "ZeusBSOServerUnreachableError"
        assert url in rank["message"]
        assert rank["sizes"] == []


def test_both_ranks_train_without_the_server(train: Train) -> None:
    ranks = train(f"http://127.0.0.1:{free_port()}", target=sum(SCORES) / 2)
    for rank in ranks:
        assert (rank["converged"], rank["trial_number"]) == (True, None)
        assert rank["sizes"][0] == BATCH_SIZE // WORLD_SIZE


def test_memory_that_ran_out_on_the_second_rank_excludes_the_size(server: Server, run: Run, tmp_path: Path) -> None:
    went_well, output = run(server.url, max(SCORES), tmp_path, "memory")
    assert not went_well
    assert "CUDA out of memory" in output
    trial = only_trial(server)
    assert trial.state is TrialState.INFEASIBLE
    assert "CUDA out of memory" in (trial.message or "")


def test_a_preempted_trial_goes_on_on_both_ranks(server: Server, train: Train) -> None:
    ranks = train(server.url, target=max(SCORES), scenario="preempted")
    steps = -(-TRAIN_IMAGES // BATCH_SIZE)
    for rank in ranks:
        assert rank["error"] == "ZeusBSOTrainFailError"
        assert set(rank["sizes"]) == {24, 12}
        assert len(rank["sizes"]) == 2 * steps + 1  # the step that was interrupted
        assert rank["steps"] == 2 * steps
    trial = only_trial(server)
    assert (trial.state, trial.trial_number, trial.epochs) == (TrialState.EXHAUSTED, 1, 2)


@pytest.mark.slow
def test_spawned_processes_share_one_trial(server: Server, tmp_path: Path) -> None:
    went_well, output = run_script(server.url, sum(SCORES) / 2, tmp_path, "spawn")
    assert went_well, output
    for rank in range(WORLD_SIZE):
        assert json.loads((tmp_path / f"rank{rank}.json").read_text()) == {"sizes": [24, 24, 24, 12], "steps": 4}
    assert only_trial(server).state is TrialState.COMPLETED
    # The callback that knows the trial ended with its process.
    assert "spawned processes" in json.loads((tmp_path / "parent.json").read_text())
