"""Routes that only read."""

from __future__ import annotations

from litestar import get

from bso_server.routes.parameters import JobId
from bso_server.service import BatchSizeService
from zeus_plugins.protocol import JobList, JobView, Paths


@get(Paths.API_JOBS)
async def list_jobs(service: BatchSizeService) -> JobList:
    """All jobs."""
    return await service.list_jobs()


@get(Paths.API_JOBS + "/{job_id:str}")
async def show_job(job_id: JobId, service: BatchSizeService) -> JobView:
    """One job with its arms and trials."""
    return await service.show_job(job_id)


@get(Paths.HEALTH)
async def health() -> dict[str, str]:
    """Say that the process is up."""
    return {"status": "ok"}
