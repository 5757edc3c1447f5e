"""The five routes that Zeus 0.16's clients know, with its statuses, and the heartbeat beside them."""

from __future__ import annotations

from http import HTTPStatus

from litestar import MediaType, Response, delete, get, patch, post
from litestar.openapi.datastructures import ResponseSpec
from litestar.response.base import ASGIResponse

from bso_server.routes.access import CallerRequest, needs
from bso_server.routes.parameters import IdempotencyKey, JobId
from bso_server.routes.responses import errors
from bso_server.security import Scope
from bso_server.service import BatchSizeService
from zeus_plugins.protocol import (
    HeartbeatResponse,
    JobRegistration,
    Paths,
    ReportResponse,
    TrainingResult,
    TrialDispatch,
    TrialEnd,
    TrialId,
)

_BODY = (HTTPStatus.REQUEST_ENTITY_TOO_LARGE, HTTPStatus.UNPROCESSABLE_ENTITY)


@post(
    Paths.JOBS,
    summary="Register a job",
    opt=needs(Scope.REPORT),
    responses={
        HTTPStatus.OK: ResponseSpec(
            JobRegistration, description="The job exists with the same configuration.", generate_examples=False
        ),
        **errors(HTTPStatus.CONFLICT, *_BODY),
    },
)
async def register_job(data: JobRegistration, service: BatchSizeService) -> Response[JobRegistration]:
    """Register a job: 201 when new, 200 when it exists with the same configuration, 409 with another."""
    registration, created = await service.register(data)
    return Response(registration, status_code=HTTPStatus.CREATED if created else HTTPStatus.OK)


@get(
    Paths.BATCH_SIZE,
    summary="Start a trial",
    opt=needs(Scope.REPORT),
    responses=errors(HTTPStatus.NOT_FOUND, HTTPStatus.CONFLICT, HTTPStatus.UNPROCESSABLE_ENTITY),
)
async def suggest(
    job_id: JobId, service: BatchSizeService, request: CallerRequest, idempotency_key: IdempotencyKey = None
) -> TrialDispatch:
    """Start a trial of the job and name its batch size; repeated with the same key, the same trial."""
    return await service.suggest(job_id, idempotency_key, caller=request.user)


@post(
    Paths.REPORT,
    summary="Report an evaluation",
    status_code=HTTPStatus.OK,
    opt=needs(Scope.REPORT),
    responses={
        HTTPStatus.OK: ResponseSpec(ReportResponse, description="Go on or stop.", generate_examples=False),
        **errors(HTTPStatus.NOT_FOUND, HTTPStatus.CONFLICT, *_BODY),
    },
)
async def report(data: TrainingResult, service: BatchSizeService, request: CallerRequest) -> ASGIResponse:
    """Take the result of one evaluation and say whether the training goes on."""
    answer = await service.report(data, caller=request.user)
    # Encoded here rather than by Litestar, whose way there is longer: no other route is called as often.
    return ASGIResponse(body=answer.model_dump_json().encode(), media_type=MediaType.JSON)


@patch(
    Paths.TRIALS,
    summary="End a trial",
    opt=needs(Scope.REPORT),
    responses=errors(HTTPStatus.NOT_FOUND, HTTPStatus.CONFLICT, *_BODY),
)
async def end_trial(data: TrialEnd, service: BatchSizeService, request: CallerRequest) -> None:
    """End a trial; one that is still running has failed, unless the body says otherwise."""
    await service.end_trial(data, caller=request.user)


@patch(
    Paths.HEARTBEAT,
    summary="Keep a trial alive",
    opt=needs(Scope.REPORT),
    responses=errors(HTTPStatus.NOT_FOUND, *_BODY),
)
async def heartbeat(data: TrialId, service: BatchSizeService, request: CallerRequest) -> HeartbeatResponse:
    """Keep a trial alive."""
    return await service.heartbeat(data, caller=request.user)


@delete(
    Paths.JOBS,
    summary="Delete a job",
    status_code=HTTPStatus.OK,
    opt=needs(Scope.ADMIN),
    responses=errors(HTTPStatus.NOT_FOUND, HTTPStatus.UNPROCESSABLE_ENTITY),
)
async def delete_job(job_id: JobId, service: BatchSizeService) -> None:
    """Delete a job with all its trials."""
    await service.delete_job(job_id)
