"""The five routes that Zeus 0.16's clients know, with its statuses, and the heartbeat beside them."""

from __future__ import annotations

from http import HTTPStatus

from litestar import Response, delete, get, patch, post

from bso_server.routes.parameters import IdempotencyKey, JobId
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


@post(Paths.JOBS)
async def register_job(data: JobRegistration, service: BatchSizeService) -> Response[JobRegistration]:
    """Register a job: 201 when new, 200 when it exists with the same configuration, 409 with another."""
    registration, created = await service.register(data)
    return Response(registration, status_code=HTTPStatus.CREATED if created else HTTPStatus.OK)


@get(Paths.BATCH_SIZE)
async def suggest(job_id: JobId, service: BatchSizeService, idempotency_key: IdempotencyKey = None) -> TrialDispatch:
    """Start a trial of the job and name its batch size; repeated with the same key, the same trial."""
    return await service.suggest(job_id, idempotency_key)


@post(Paths.REPORT, status_code=HTTPStatus.OK)
async def report(data: TrainingResult, service: BatchSizeService) -> ReportResponse:
    """Take the result of one evaluation and say whether the training goes on."""
    return await service.report(data)


@patch(Paths.TRIALS)
async def end_trial(data: TrialEnd, service: BatchSizeService) -> None:
    """End a trial; one that is still running has failed, unless the body says otherwise."""
    await service.end_trial(data)


@patch(Paths.HEARTBEAT)
async def heartbeat(data: TrialId, service: BatchSizeService) -> HeartbeatResponse:
    """Keep a trial alive."""
    return await service.heartbeat(data)


@delete(Paths.JOBS, status_code=HTTPStatus.OK)
async def delete_job(job_id: JobId, service: BatchSizeService) -> None:
    """Delete a job with all its trials."""
    await service.delete_job(job_id)
