"""The routes that Zeus 0.16's clients know, with its statuses; beside them heartbeats, offline trials, power limits."""

from __future__ import annotations

from http import HTTPStatus

from litestar import Response, delete, get, patch, post, put
from litestar.openapi.datastructures import ResponseSpec
from litestar.params import JSONBody

from bso_server.api.auth import CallerRequest, needs
from bso_server.api.errors import BODY, errors
from bso_server.api.parameters import IdempotencyKey, JobInQuery, RequiredIdempotencyKey, Service
from bso_server.core.access import Scope
from zeus_plugins.protocol import (
    CreatedJob,
    Heartbeat,
    HeartbeatResponse,
    JobSpecFromClient,
    OfflineTrial,
    Paths,
    ReportResponse,
    TrainingResult,
    TrialDispatch,
    TrialEnd,
    TrialPowerProfile,
)

_TRAINING = needs(Scope.REPORT)
_ERRORS_OF_TRIAL = errors(HTTPStatus.NOT_FOUND, HTTPStatus.CONFLICT, *BODY)


@post(
    Paths.JOBS,
    summary="Register a job",
    opt=_TRAINING,
    responses={
        HTTPStatus.OK: ResponseSpec(
            CreatedJob, description="The job exists with the same configuration.", generate_examples=False
        ),
        **errors(HTTPStatus.CONFLICT, *BODY),
    },
)
async def receive_job(
    data: JSONBody[JobSpecFromClient], service: Service, request: CallerRequest
) -> Response[CreatedJob]:
    """Register a job: 201 when new, 200 when it exists with the same configuration, 409 with another."""
    registration, created = await service.register(data, request.user)
    return Response(registration, status_code=HTTPStatus.CREATED if created else HTTPStatus.OK)


@get(
    Paths.BATCH_SIZE,
    summary="Start a trial",
    opt=_TRAINING,
    responses=errors(HTTPStatus.NOT_FOUND, HTTPStatus.CONFLICT, HTTPStatus.UNPROCESSABLE_ENTITY),
)
async def receive_trial_request(
    job_id: JobInQuery, service: Service, request: CallerRequest, idempotency_key: IdempotencyKey = None
) -> TrialDispatch:
    """Start a trial of the job and name its batch size; repeated with the same key, the same trial."""
    return await service.transact(service.commands.begin_trial, job_id, idempotency_key, caller=request.user)


@post(Paths.TRIALS, summary="Record a trial that began without the server", opt=_TRAINING, responses=_ERRORS_OF_TRIAL)
async def receive_offline_trial(
    data: JSONBody[OfflineTrial], service: Service, request: CallerRequest, idempotency_key: RequiredIdempotencyKey
) -> TrialDispatch:
    """Start a trial with a batch size that the training chose itself; repeated with the same key, the same trial."""
    return await service.transact(service.commands.record_offline, data, idempotency_key, caller=request.user)


@patch(
    Paths.TRIALS,
    summary="End a trial",
    opt=_TRAINING,
    responses=errors(HTTPStatus.NOT_FOUND, HTTPStatus.CONFLICT, *BODY),
)
async def receive_trial_end(data: JSONBody[TrialEnd], service: Service, request: CallerRequest) -> None:
    """End a trial; one that is still running has failed, unless the body says otherwise."""
    await service.transact(service.commands.end_trial, data, caller=request.user)


@post(
    Paths.REPORT, summary="Report an evaluation", status_code=HTTPStatus.OK, opt=_TRAINING, responses=_ERRORS_OF_TRIAL
)
async def receive_report(data: JSONBody[TrainingResult], service: Service, request: CallerRequest) -> ReportResponse:
    """Record the result of one evaluation; answer whether the training continues."""
    return await service.reports.record_report(data, request.user)


@patch(Paths.HEARTBEAT, summary="Keep a trial alive", opt=_TRAINING, responses=_ERRORS_OF_TRIAL)
async def receive_heartbeat(data: JSONBody[Heartbeat], service: Service, request: CallerRequest) -> HeartbeatResponse:
    """Keep a trial alive."""
    return await service.transact(service.commands.heartbeat, data, caller=request.user)


@put(Paths.POWER_PROFILE, summary="Store a trial's power limits", opt=_TRAINING, responses=_ERRORS_OF_TRIAL)
async def receive_power_profile(data: JSONBody[TrialPowerProfile], service: Service, request: CallerRequest) -> None:
    """Keep what a trial's training knows of its power limits; later trials of its batch size get it when they begin."""
    await service.transact(service.commands.store_power_profile, data, caller=request.user)


@delete(
    Paths.JOBS,
    summary="Delete a job",
    status_code=HTTPStatus.OK,
    opt=needs(Scope.ADMIN),
    responses=errors(HTTPStatus.NOT_FOUND, HTTPStatus.UNPROCESSABLE_ENTITY),
)
async def receive_deletion(job_id: JobInQuery, service: Service) -> None:
    """Delete a job with all its trials."""
    await service.delete_job(job_id)
