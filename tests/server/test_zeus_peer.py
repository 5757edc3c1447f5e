"""Interoperation with an unmodified Zeus 0.16: its client with our server, our client with its server."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import count, repeat
from typing import Any

import pytest

from tests.support.replay import ReplayMonitor
from tests.support.servers import ServerProcess
from tests.support.service import trial_id
from tests.support.tokens import make_token
from tests.zeus_peer.peer import Launch, Peer
from zeus_plugins import BatchSizeOptimizer, JobSpec
from zeus_plugins.client.http import BsoClient
from zeus_plugins.energy import Measurement
from zeus_plugins.errors import ZeusBSOConfigError, ZeusBSORuntimeError, ZeusBSOTrainFailError
from zeus_plugins.protocol import (
    ZEUS,
    EndReason,
    GpuConfig,
    JobSpecFromClient,
    Origin,
    TrainingResult,
    TrialDispatch,
    TrialState,
)

pytestmark = [pytest.mark.slow, pytest.mark.zeus_peer]

JOB: dict[str, Any] = {
    "job_id_prefix": "peer",
    "job_id": "peer",
    "batch_sizes": [8, 16, 32],
    "default_batch_size": 16,
    "eta_knob": 1.0,
    "target_metric": 0.9,
    "max_epochs": 5,
    "num_pruning_rounds": 1,
    "mab_num_explorations": 1,
    "mab_seed": 7,
}
# Epochs to the target; 8 never reaches it. Each epoch costs the joules that tests/zeus_peer/fake counts.
EPOCHS = {8: 99, 16: 2, 32: 1}
EPOCH_J = 200.0
# 16 costs 400 J. 8 has not reached the target at 1000 J, above twice 400 J. 32 costs 200 J and wins every draw.
SIZES = [16, 8, 32, 32]
GPUS = GpuConfig(max_power=600, number_of_gpus=2, gpu_model="Tesla V100-SXM2-32GB")


@pytest.fixture(scope="module")
def zeus_server(peer: Peer, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """URL of Zeus's server, shared by the tests of this module, each with a separate job."""
    with peer.server(tmp_path_factory.mktemp("zeus")) as url:
        yield url


@pytest.fixture
def job(request: pytest.FixtureRequest) -> JobSpec:
    """A job used by a single test."""
    return JobSpec(**{**JOB, "job_id": f"peer-{request.function.__name__}"})


def with_token(server: ServerProcess) -> str:
    """Return the URL of our server for a Zeus client, with a token, which the server requires from now on."""
    return server.url.replace("http://", f"http://zeus:{make_token(server.database_url, 'report')}@")


def test_zeus_client_recurs_on_our_server(peer: Peer, server: ServerProcess) -> None:
    """In Zeus's data-parallel loop, rank 0 asks for the size, every rank reports every epoch, and all ranks stop."""
    url_for_zeus, ranks = with_token(server), 4
    launches = [peer.train(url_for_zeus, JOB, EPOCHS, "--ranks", str(ranks)) for _ in SIZES]

    assert [launch.batch_size for launch in launches] == SIZES
    ends = ["finished", "ZeusBSOTrainFailError", "finished", "finished"]
    assert [launch.ended.split() for launch in launches] == [[end] * ranks for end in ends]
    with BsoClient(url_for_zeus) as client:
        shown = client.show_job("peer")
    assert [(trial.state, trial.origin, trial.energy_j, trial.epochs) for trial in shown.trials] == [
        (TrialState.COMPLETED, Origin.EXPLORATION, 2 * EPOCH_J, 2),
        (TrialState.EARLY_STOPPED, Origin.EXPLORATION, 5 * EPOCH_J, 5),
        (TrialState.COMPLETED, Origin.EXPLORATION, EPOCH_J, 1),
        (TrialState.COMPLETED, Origin.BANDIT, EPOCH_J, 1),
    ]
    assert shown.min_cost_j == EPOCH_J
    registered = JobSpecFromClient.of(JobSpec(**JOB, policy=ZEUS), GPUS)
    registration_id = shown.job.registration_id
    assert shown.job == registered.named("peer").model_copy(update={"registration_id": registration_id})


def test_leaving_zeus_client_ends_the_trial(peer: Peer, server: ServerProcess) -> None:
    url_for_zeus = with_token(server)
    left = peer.train(url_for_zeus, JOB, EPOCHS, "--leave-after", "1")
    assert left == Launch(batch_size=16, ended="left", message=None)
    again = peer.train(url_for_zeus, JOB, EPOCHS)
    assert (again.batch_size, again.ended) == (16, "finished")

    with BsoClient(url_for_zeus) as client:
        trials = client.show_job("peer").trials
    assert [(trial.state, trial.end_reason) for trial in trials] == [
        (TrialState.FAILED, EndReason.CRASHED),
        (TrialState.COMPLETED, EndReason.TARGET_REACHED),
    ]


def test_zeus_client_reads_our_refusals(peer: Peer, server: ServerProcess) -> None:
    assert peer.train(server.url, JOB, EPOCHS).ended == "finished"
    other = peer.train(server.url, {**JOB, "max_epochs": 6}, EPOCHS)
    assert other.ended == "ZeusBSORuntimError"
    assert "max_epochs is 5, not 6" in (other.message or "")


def test_zeus_client_without_a_token_gets_a_clear_refusal(peer: Peer, server: ServerProcess) -> None:
    make_token(server.database_url, "report")
    refused = peer.train(server.url, JOB, EPOCHS)
    assert refused.ended == "ZeusBSORuntimError"
    assert "this server needs a token" in (refused.message or "")


def train_on(server_url: str, job: JobSpec, *, leave_after: int | None = None) -> tuple[int, str]:
    """Launch a training with our optimizer once; return its batch size and outcome: finished, failed or left."""
    epochs = repeat(Measurement(time_s=1, energy_j=EPOCH_J, source="replay"))
    with BatchSizeOptimizer(ReplayMonitor(epochs, GPUS), server_url, job) as optimizer:
        batch_size = optimizer.get_batch_size()
        optimizer.on_train_begin()
        for epoch in count(1) if leave_after is None else range(1, leave_after + 1):
            try:
                optimizer.on_evaluate(0.95 if epoch >= EPOCHS[batch_size] else 0.5)
            except ZeusBSOTrainFailError:
                return batch_size, "failed"
            if optimizer.training_finished:
                return batch_size, "finished"
    return batch_size, "left"


def test_optimizer_recurs_on_a_zeus_server(zeus_server: str, job: JobSpec) -> None:
    launches = [train_on(zeus_server, job) for _ in SIZES]
    assert launches == [(16, "finished"), (8, "failed"), (32, "finished"), (32, "finished")]


def test_leaving_optimizer_ends_the_trial_on_a_zeus_server(zeus_server: str, job: JobSpec) -> None:
    assert train_on(zeus_server, job, leave_after=1) == (16, "left")
    trial = TrialDispatch(job_id=str(job.job_id), batch_size=16, trial_number=1)
    with BsoClient(zeus_server) as client, pytest.raises(ZeusBSORuntimeError, match="already reported") as caught:
        client.send_report(_result(trial, epoch=2, metric=0.95))
    assert caught.value.status == 400


def test_client_calls_every_route_of_a_zeus_server(zeus_server: str, job: JobSpec) -> None:
    # A Zeus server sends no policy and uses its own.
    registration = JobSpecFromClient.of(job.model_copy(update={"policy": ZEUS}), GPUS)
    with BsoClient(zeus_server) as client:
        assert client.register(registration) == registration.named(str(job.job_id))
        assert client.register(registration) == registration.named(str(job.job_id))
        unnamed = client.register(registration.model_copy(update={"job_id": None}))
        assert unnamed == registration.named(unnamed.job_id)
        trial = client.request_trial(str(job.job_id))
        assert trial == TrialDispatch(job_id=str(job.job_id), batch_size=16, trial_number=1)

        going_on = client.send_report(_result(trial, epoch=1, metric=0.5))
        assert (going_on.stop_train, going_on.converged) == (False, False)
        reached = client.send_report(_result(trial, epoch=2, metric=0.95))
        assert (reached.stop_train, reached.converged) == (True, True)
        client.end_trial(trial)

        client.delete_job(str(job.job_id))
        with pytest.raises(ZeusBSORuntimeError, match="No job was deleted"):
            client.delete_job(str(job.job_id))


def test_client_reads_the_refusals_of_a_zeus_server(zeus_server: str, job: JobSpec) -> None:
    registration = JobSpecFromClient.of(job, GPUS)
    with BsoClient(zeus_server) as client:
        client.register(registration)
        with pytest.raises(ZeusBSOConfigError, match=r"409.*JobSpec doesn't match"):
            client.register(registration.model_copy(update={"max_epochs": 6}))
        with pytest.raises(ZeusBSOConfigError, match=r"422.*Default BS\(99\) not in batch_sizes"):
            client.register(registration.model_copy(update={"default_batch_size": 99}))
        with pytest.raises(ZeusBSORuntimeError, match="Unknown job") as unknown_job:
            client.request_trial("nobody")
        trial = client.request_trial(str(job.job_id)).model_copy(update={"trial_number": 99})
        with pytest.raises(ZeusBSORuntimeError, match="Unknown trial") as unknown_trial:
            client.send_report(_result(trial, epoch=1, metric=0.5))
        with pytest.raises(ZeusBSORuntimeError, match="Could not find the trial") as not_there:
            client.end_trial(trial)
        with pytest.raises(ZeusBSORuntimeError, match="Not Found") as ours_alone:
            client.show_job(str(job.job_id))
    refusals = (unknown_job, unknown_trial, not_there, ours_alone)
    assert [refusal.value.status for refusal in refusals] == [400, 400, 404, 404]


def _result(trial: TrialDispatch, *, epoch: int, metric: float) -> TrainingResult:
    measured = {"time": epoch, "energy": epoch * EPOCH_J, "metric": metric, "current_epoch": epoch}
    return TrainingResult(**trial_id(trial).model_dump(), **measured)
