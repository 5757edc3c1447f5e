"""Routes for trainings: Zeus 0.16's, with its statuses, and heartbeats and offline trials."""

from __future__ import annotations

from http import HTTPStatus
from typing import Annotated

from litestar import Response, delete, get, patch, post, put
from litestar.exceptions import NotFoundException
from litestar.openapi.datastructures import ResponseSpec
from litestar.params import HeaderParameter, JSONBody

from bso_server.api.auth import CallerRequest, needs
from bso_server.api.errors import BODY, errors
from bso_server.api.requests import JobInQuery, Service
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
)

_IDEMPOTENCY_KEY = HeaderParameter(
    name="Idempotency-Key",
    pattern=r"^[\x21-\x7e]+$",
    min_length=1,
    max_length=255,
    description="Made for this request; the request repeated with it gets the same trial again.",
)
IdempotencyKey = Annotated[str | None, _IDEMPOTENCY_KEY]
RequiredIdempotencyKey = Annotated[str, _IDEMPOTENCY_KEY]

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
    """Start a trial of the job and return its batch size. A request with a known key gets the same trial again."""
    return await service.begin_trial(job_id, idempotency_key, request.user)


@post(Paths.TRIALS, summary="Record a trial that began without the server", opt=_TRAINING, responses=_ERRORS_OF_TRIAL)
async def receive_offline_trial(
    data: JSONBody[OfflineTrial], service: Service, request: CallerRequest, idempotency_key: RequiredIdempotencyKey
) -> TrialDispatch:
    """Record a trial whose batch size the training chose. A request with a known key gets the same trial again."""
    return await service.transact(service.commands.record_offline, data, idempotency_key, caller=request.user)


@patch(Paths.TRIALS, summary="End a trial", opt=_TRAINING, responses=_ERRORS_OF_TRIAL)
async def receive_trial_end(data: JSONBody[TrialEnd], service: Service, request: CallerRequest) -> None:
    """End a trial. A running trial becomes failed unless the body gives another outcome."""
    await service.transact(service.commands.end_trial, data, caller=request.user)


@post(
    Paths.REPORT, summary="Report an evaluation", status_code=HTTPStatus.OK, opt=_TRAINING, responses=_ERRORS_OF_TRIAL
)
async def receive_report(data: JSONBody[TrainingResult], service: Service, request: CallerRequest) -> ReportResponse:
    """Record the result of one evaluation; answer whether the training continues."""
    return await service.reports.record_report(data, request.user)


@patch(Paths.HEARTBEAT, summary="Keep a trial alive", opt=_TRAINING, responses=_ERRORS_OF_TRIAL)
async def receive_heartbeat(data: JSONBody[Heartbeat], service: Service, request: CallerRequest) -> HeartbeatResponse:
    """Renew the lease of a trial."""
    return await service.transact(service.commands.heartbeat, data, caller=request.user)


@put(["/trials/probe", "/trials/power_profile"], opt=_TRAINING, include_in_schema=False)
async def refuse_removed_messages() -> None:
    """Answer messages that only clients of earlier versions send; their trainings continue."""
    raise NotFoundException(
        "the server takes neither probes nor measurements of power limits any more: update zeus-plugins where the "
        "training runs"
    )


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
