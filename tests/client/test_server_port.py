"""Contract of `ServerPort`, tested over HTTP and with the embedded server."""

from __future__ import annotations

import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import get_args

import pytest

from bso_server.errors import STATUS_OF, BsoError
from tests.support.servers import serving
from zeus_plugins import JobSpec
from zeus_plugins.client import client_from_environment
from zeus_plugins.client.http import BsoClient
from zeus_plugins.client.local import LocalServer
from zeus_plugins.client.port import NO_RETRIES, ServerPort
from zeus_plugins.errors import ZeusBSOConfigError, ZeusBSORuntimeError
from zeus_plugins.protocol import (
    CreatedJob,
    Ending,
    Fingerprint,
    GpuConfig,
    JobSpecFromClient,
    OfflineTrial,
    Origin,
    RefusalReason,
    TrainingResult,
    TrialId,
    TrialState,
)

GPUS = GpuConfig(max_power=100.0, number_of_gpus=1, gpu_model="A40")


@pytest.fixture(scope="module", params=["http", "local"])
def url(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    folder = tmp_path_factory.mktemp(request.param)
    if request.param == "local":
        yield f"embedded://{folder / 'bso.sqlite3'}"
        return
    with serving(f"sqlite:///{folder / 'bso.sqlite3'}", folder) as server:
        yield server.url


@pytest.fixture
def port(url: str) -> Iterator[ServerPort]:
    with client_from_environment(url).with_retries(NO_RETRIES) as port:
        yield port


@pytest.fixture
def job(port: ServerPort) -> CreatedJob:
    spec = JobSpec(
        job_id=f"job-{uuid.uuid4().hex}", job_id_prefix="job", batch_sizes=(8, 16), default_batch_size=8, max_epochs=3
    )
    return port.register(JobSpecFromClient.of(spec, GPUS))


@pytest.fixture
def trial(port: ServerPort, job: CreatedJob) -> TrialId:
    return name_of(port.request_trial(job.job_id, "first"))


def name_of(trial: TrialId) -> TrialId:
    return TrialId(**trial.model_dump(include=set(TrialId.model_fields)))


def result(trial: TrialId, *, epoch: float = 1, metric: float = 0.1, energy: float = 10.0) -> TrainingResult:
    return TrainingResult(**trial.model_dump(), time=epoch, energy=energy * epoch, metric=metric, current_epoch=epoch)


def messages(port: ServerPort, trial: TrialId) -> list[Callable[[], object]]:
    """Return one call for each kind of message about a trial."""
    return [
        lambda: port.send_report(result(trial)),
        lambda: port.end_trial(trial),
        lambda: port.heartbeat(trial),
    ]


@contextmanager
def refused(
    status: int, match: str | None = None, *, reason: RefusalReason | None = None, kind: type[Exception] | None = None
) -> Iterator[pytest.ExceptionInfo[Exception]]:
    """Assert that the server refuses every request inside the block with this status."""
    with pytest.raises(kind or (ZeusBSOConfigError if status == 422 else ZeusBSORuntimeError), match=match) as caught:
        yield caught
    assert getattr(caught.value, "status", None) == status
    assert getattr(caught.value, "reason", None) == reason
    assert not getattr(caught.value, "is_outage", False)
    assert not getattr(caught.value, "is_foreign", False)


def test_repeated_registration_finds_the_job_and_a_different_registration_conflicts(
    port: ServerPort, job: CreatedJob
) -> None:
    assert port.register(job) == job
    with refused(409, r"max_epochs is 3, not 9\. Use another job_id", kind=ZeusBSOConfigError) as caught:
        port.register(job.model_copy(update={"max_epochs": 9}))
    assert str(caught.value).endswith(f"or revise the job: bso-server jobs revise {job.job_id}")
    with refused(422, r"max_epochs: .*greater"):
        port.register(job.model_copy(update={"max_epochs": -9}))


def test_first_fingerprint_is_kept_and_is_not_part_of_the_configuration(port: ServerPort, job: CreatedJob) -> None:
    def told(**parts: str) -> Fingerprint | None:
        again = port.register(job.model_copy(update={"fingerprint": Fingerprint(**parts) if parts else None}))
        assert port.show_job(job.job_id).job == again
        return again.fingerprint

    assert told() is None
    assert told(model="Net") == Fingerprint(model="Net")
    assert told(model="Other", optimizer="SGD") == Fingerprint(model="Net", optimizer="SGD")
    assert told() == Fingerprint(model="Net", optimizer="SGD")
    port.end_trial(name_of(port.request_trial(job.job_id)))  # later writes of the job's row keep the fingerprint
    assert told() == Fingerprint(model="Net", optimizer="SGD")


def test_job_is_shown_with_all_or_the_latest_trials(port: ServerPort, job: CreatedJob) -> None:
    job_id = job.job_id
    for _ in range(3):
        port.request_trial(job_id)
    assert port.show_job(job_id).job == job
    assert (port.show_job(job_id).owner, port.show_job(job_id).shared) == (None, False)  # the server requires no token
    assert [trial.trial_number for trial in port.show_job(job_id).trials] == [1, 2, 3]
    assert [trial.trial_number for trial in port.show_job(job_id, limit=2).trials] == [2, 3]


def test_suggestion_with_the_same_key_is_the_same_trial(port: ServerPort, trial: TrialId) -> None:
    assert name_of(port.request_trial(trial.job_id, "first")) == trial
    assert port.request_trial(trial.job_id).trial_number == 2
    port.end_trial(trial)
    with refused(409, "which has ended"):
        port.request_trial(trial.job_id, "first")


def test_repeated_report_gets_the_same_answer_and_a_late_report_conflicts(port: ServerPort, trial: TrialId) -> None:
    first = port.send_report(result(trial))
    assert (first.stop_train, port.send_report(result(trial))) == (False, first)
    last = port.send_report(result(trial, epoch=2, metric=0.9))
    assert (last.stop_train, last.converged) == (True, True)
    assert port.send_report(result(trial, epoch=2, metric=0.9)) == last
    with refused(409, "already reported"):
        port.send_report(result(trial, epoch=3))


@pytest.mark.parametrize("outcome", get_args(Ending.model_fields["outcome"].annotation))
def test_ending_is_stored_and_may_be_repeated(port: ServerPort, trial: TrialId, outcome: TrialState) -> None:
    for _ in range(2):
        port.end_trial(trial, Ending(outcome=outcome, detail="as told"))
    beat = port.heartbeat(trial, regular=False)
    # A heartbeat revives a suspended trial.
    assert beat.state == (TrialState.RUNNING if outcome is TrialState.SUSPENDED else outcome)


def test_heartbeat_returns_the_state_of_the_trial(port: ServerPort, trial: TrialId) -> None:
    port.send_report(result(trial))
    beat = port.heartbeat(trial)
    assert (beat.state, beat.time_s, beat.energy_j, beat.epochs) == (TrialState.RUNNING, 1.0, 10.0, 1.0)
    assert (beat.interval_s, beat.lease_s) == (60.0, 360.0)


def test_resuming_run_takes_over_and_messages_of_the_former_run_change_nothing(
    port: ServerPort, trial: TrialId
) -> None:
    port.send_report(result(trial))
    taken = port.heartbeat(trial, regular=False, resumes=True)
    assert (trial.lease_epoch, taken.lease_epoch, taken.epochs) == (1, 2, 1.0)
    before = port.show_job(trial.job_id)
    for say in (
        *messages(port, trial),
        lambda: port.send_report(result(trial, epoch=2, metric=0.9)),
        lambda: port.heartbeat(trial, regular=False, resumes=True),
    ):
        with refused(409, "by another run of its training", reason=RefusalReason.STALE_LEASE):
            say()
    assert port.show_job(trial.job_id) == before
    assert port.request_trial(trial.job_id, "first").lease_epoch == 1
    # Clients without lease epochs are not checked.
    port.send_report(result(trial.model_copy(update={"lease_epoch": None}), epoch=2))
    assert port.send_report(result(trial.model_copy(update={"lease_epoch": 2}), epoch=3, metric=0.9)).converged


def test_results_of_a_deleted_and_recreated_job_are_refused(port: ServerPort, job: CreatedJob, trial: TrialId) -> None:
    assert isinstance(port, BsoClient | LocalServer)
    port.delete_job(trial.job_id)
    again = port.register(job)
    assert again.registration_id not in (None, job.registration_id)
    assert again == job.model_copy(update={"registration_id": again.registration_id})
    anew = name_of(port.request_trial(trial.job_id, "first"))
    assert anew == trial.model_copy(update={"registration_id": again.registration_id})
    before = port.show_job(trial.job_id)
    for say in messages(port, trial):
        problem = "was deleted and registered again after trial 1 began"
        with refused(409, problem, reason=RefusalReason.OTHER_REGISTRATION):
            say()
    assert port.show_job(trial.job_id) == before
    port.send_report(result(trial.model_copy(update={"registration_id": None})))


def test_offline_trial_is_recorded_once_even_after_the_end(port: ServerPort, job: CreatedJob) -> None:
    offline = OfflineTrial(job_id=job.job_id, batch_size=16)
    recorded = port.record_offline(offline, "key")
    assert recorded.origin is Origin.OFFLINE
    assert port.send_report(result(name_of(recorded), metric=0.9)).converged
    assert port.record_offline(offline, "key").trial_number == recorded.trial_number
    for wrong in (offline.model_copy(update={"batch_size": 17}), offline.model_copy(update={"batch_size": 8})):
        with refused(422):
            port.record_offline(wrong, "key" if wrong.batch_size == 8 else "other")


def test_power_limit_of_a_report_or_an_ending_is_kept(port: ServerPort, job: CreatedJob) -> None:
    reported, ended = (name_of(port.request_trial(job.job_id)) for _ in range(2))
    limit = {"power_limit_w": 80.0, "power_limits": 4}
    port.send_report(result(reported).model_copy(update=limit))
    port.end_trial(ended, Ending(**limit))
    kept = [(each.power_limit_w, each.power_limits) for each in port.show_job(job.job_id).trials]
    assert kept == [(80.0, 4)] * 2


def test_port_can_be_used_after_closing(port: ServerPort, trial: TrialId) -> None:
    port.close()
    assert port.heartbeat(trial).state is TrialState.RUNNING


def test_every_domain_error_has_a_status() -> None:
    assert set(STATUS_OF) == set(BsoError.__subclasses__())
