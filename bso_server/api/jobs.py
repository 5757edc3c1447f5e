"""Routes that only read: jobs and their parts."""

from __future__ import annotations

from collections.abc import AsyncIterator
from http import HTTPStatus
from typing import Annotated, Any

from litestar import get
from litestar.exceptions import HTTPException
from litestar.openapi.datastructures import ResponseSpec
from litestar.params import QueryParameter
from litestar.response import Stream

from bso_server.api.errors import errors
from bso_server.api.requests import ID, LARGEST, Fleet, GroupedBy, JobInPath, Reader, Service, Since
from bso_server.service import reading
from bso_server.service.exports import MEDIA_TYPE
from bso_server.service.views import DEFAULT_PAGE, MAX_PAGE, FleetPage
from zeus_plugins.protocol import Explanation, JobList, JobView, Paths, Stage, TrialList, TrialState

_JOB = Paths.API_JOBS + "/{job_id:str}"
_ERRORS = errors(HTTPStatus.NOT_FOUND, HTTPStatus.UNPROCESSABLE_ENTITY)

_CURSOR: dict[str, Any] = {
    "name": "cursor",
    "description": "The next_cursor of the page before; absent: the first page.",
}
Limit = Annotated[int, QueryParameter(ge=1, le=MAX_PAGE, description="Length of the page.")]


@get(Paths.API_JOBS, summary="List jobs", responses=errors(HTTPStatus.UNPROCESSABLE_ENTITY))
async def list_jobs(
    reader: Reader,
    prefix: Annotated[
        str | None,
        QueryParameter(name="prefix", **ID, description="Only jobs that were registered with this job_id_prefix."),
    ] = None,
    stage: Annotated[Stage | None, QueryParameter(name="stage", description="Only jobs in this stage.")] = None,
    limit: Limit = DEFAULT_PAGE,
    cursor: Annotated[str | None, QueryParameter(**_CURSOR, **ID)] = None,
) -> JobList:
    """Return a page of jobs, ordered by id as the database orders text."""
    return await reader.read(reading.list_jobs, prefix=prefix, stage=stage, limit=limit, cursor=cursor)


@get(Paths.FLEET_REPORT, summary="Report on all jobs", responses=errors(HTTPStatus.UNPROCESSABLE_ENTITY))
async def fleet_report(fleet: Fleet, since: Since = "30d", by: GroupedBy = "owner") -> FleetPage:
    """Return what the jobs used in a period, and what they are shown to have saved."""
    return await fleet.read(since, by)


@get(_JOB, summary="Show a job", responses=_ERRORS)
async def show_job(
    job_id: JobInPath,
    reader: Reader,
    limit: Annotated[
        int, QueryParameter(name="limit", ge=0, le=MAX_PAGE, description="How many of the latest trials to show.")
    ] = DEFAULT_PAGE,
) -> JobView:
    """Return one job with its arms, the number of its trials in each state, and its latest trials."""
    return await reader.read(reading.show_job, job_id, limit=limit)


@get(_JOB + "/trials", summary="List trials", responses=_ERRORS)
async def list_trials(
    job_id: JobInPath,
    reader: Reader,
    in_state: Annotated[
        TrialState | None, QueryParameter(name="state", description="Only trials in this state.")
    ] = None,
    limit: Limit = DEFAULT_PAGE,
    cursor: Annotated[int, QueryParameter(**_CURSOR, ge=0, le=LARGEST)] = 0,
) -> TrialList:
    """Return a page of the job's trials, in order of dispatch."""
    return await reader.read(reading.list_trials, job_id, state=in_state, limit=limit, cursor=cursor)


@get(
    _JOB + "/explanation",
    summary="Explain a decision",
    responses=errors(HTTPStatus.NOT_FOUND, HTTPStatus.CONFLICT, HTTPStatus.UNPROCESSABLE_ENTITY),
)
async def explain(
    job_id: JobInPath,
    reader: Reader,
    service: Service,
    trial: Annotated[
        int | None,
        QueryParameter(
            name="trial_number",
            ge=1,
            le=LARGEST,
            description="The trial; without this number, the trial that would start next.",
        ),
    ] = None,
) -> Explanation:
    """Explain the batch size of a trial, or the one that would be chosen next, without starting a trial."""
    return await (service.explain_next(job_id) if trial is None else reader.read(reading.explain, job_id, trial))


_REMOVED = ("arms", "events", "power_profiles", "trials.csv", "trials/{trial_number:int}/epochs")


@get([f"{_JOB}/{part}" for part in _REMOVED], include_in_schema=False)
async def refuse_removed(job_id: JobInPath) -> None:
    """Name the routes that replace removed routes."""
    raise HTTPException(
        f"this route was removed: GET {Paths.API_JOBS}/{job_id} has the arms, its part /trials all fields of each "
        "trial, and its part /export the reports; measurements of power limits stay where the training runs",
        status_code=HTTPStatus.GONE,
    )


@get(
    _JOB + "/export",
    summary="Export a job",
    media_type=MEDIA_TYPE,
    responses={
        HTTPStatus.OK: ResponseSpec(str, description="The whole job.", media_type=MEDIA_TYPE, generate_examples=False),
        **_ERRORS,
    },
)
async def export_job(job_id: JobInPath, reader: Reader) -> Stream:
    """Export the whole job as JSON Lines: a `JobExport`, then a `TrialExport` for each trial."""
    pieces = reader.export(job_id)
    # Read the first piece before the answer begins, so that an unknown job is answered with 404.
    first = await anext(pieces)

    async def whole() -> AsyncIterator[bytes]:
        yield first
        async for piece in pieces:
            yield piece

    return Stream(whole(), media_type=MEDIA_TYPE)
