"""The dashboard's pages below ``/ui/``, and their figures as JSON.

All links in pages are relative, so that pages work below any path at which a proxy serves them.
"""

from __future__ import annotations

import gzip
from collections.abc import Awaitable, Callable
from datetime import UTC, datetime
from functools import partial
from http import HTTPStatus
from typing import Annotated, Any, NamedTuple

from litestar import Request, Response, Router
from litestar.di import NamedDependency
from litestar.exceptions import HTTPException, NotFoundException
from litestar.params import PathParameter, QueryParameter

from bso_server.api import errors
from bso_server.api.auth import PAGE, needs, readable
from bso_server.api.requests import ID, LARGEST, Fleet, GroupedBy, Since
from bso_server.errors import UnauthenticatedError
from bso_server.service.pages import Found, Pages, View, digest
from bso_server.service.reading import JobReader
from bso_server.ui import html
from zeus_plugins.protocol import MAX_ID_LENGTH

AnyRequest = Request[Any, Any, Any]


class JobPages(NamedTuple):
    """The dependencies of job pages in one object, because Litestar would create a task for each of several.

    `update` updates the stored verdicts.
    """

    reader: JobReader
    pages: Pages
    update: Callable[[], Awaitable[int]]


Source = NamedDependency[JobPages]

_JSON = ".json"

# The JSON twin of a page has the page's name with the suffix ``.json``, so a name may be longer by this suffix.
_NAME = Annotated[str, PathParameter(pattern=ID["pattern"], max_length=MAX_ID_LENGTH + len(_JSON))]
_TRIAL_NAME = Annotated[str, PathParameter(pattern=r"^[0-9]{1,10}(\.json)?(?!\n)$")]
_Containing = Annotated[str | None, QueryParameter(name="q", max_length=MAX_ID_LENGTH)]
_At = Annotated[int | None, QueryParameter(name="at", ge=1, le=LARGEST)]
_After = Annotated[str | None, QueryParameter(name="after", max_length=MAX_ID_LENGTH + 1)]
_HEADERS = {
    "Content-Security-Policy": html.POLICY,
    "Referrer-Policy": "same-origin",
    "X-Content-Type-Options": "nosniff",
}

# Pages of earlier versions, each with what to do instead.
_INSTEAD = {
    "health": "GET /health/ready says whether requests can be served; GET /version and GET /metrics say the rest",
    "tokens": "bso-server token makes, lists and revokes tokens, where the server's database can be reached",
    "report.html": "print or save the page of the job; its suffix .json has all figures",
    "whatif": "bso-server simulate --job {job} --eta 0.9 replays the job",
}

# Bytes; a shorter answer fits one packet uncompressed.
_WORTH_PACKING = 1400


@readable(["/", "/jobs.json"], opt=PAGE)
async def jobs(
    request: AnyRequest, source: Source, containing: _Containing = None, after: _After = None
) -> Response[bytes]:
    """Show the list of jobs."""
    await source.update()
    return await _Tag(request).shown(source, source.pages.jobs, containing=containing or None, cursor=after)


@readable("/", opt=needs(None), include_in_schema=False)
async def home() -> Response[bytes]:
    """Redirect the server's root to its pages."""
    return Response(b"", status_code=HTTPStatus.SEE_OTHER, headers={**_HEADERS, "Location": "./ui/"})


@readable("/jobs/{name:str}", opt=PAGE)
async def job(request: AnyRequest, name: _NAME, source: Source, at: _At = None) -> Response[bytes]:
    """Show a job; with `at`, as in addresses of earlier versions, redirect to the page of this trial.

    The answer is JSON if `name` ends with ``.json`` without a slash after it; a slash makes the suffix part of the id.
    """
    tag = _Tag(request, is_twin=name.endswith(_JSON) and not _has_slash(request))
    job_id = name.removesuffix(_JSON) if tag.is_twin else name
    if at is not None:
        location = f"{_reader_of(request).root}jobs/{job_id}/trials/{at}{_JSON if tag.is_twin else ''}"
        return Response(b"", status_code=HTTPStatus.SEE_OTHER, headers={**_HEADERS, "Location": location})
    return await tag.shown(source, source.pages.job, job_id)


@readable("/jobs/{name:str}/trials/{number:str}", opt=PAGE)
async def trial(request: AnyRequest, name: _NAME, number: _TRIAL_NAME, source: Source) -> Response[bytes]:
    """Show a trial; return it as JSON if `number` ends with ``.json``."""
    trial_number = min(int(number.removesuffix(_JSON)), LARGEST)
    return await _Tag(request).shown(source, source.pages.trial, name, trial_number)


@readable(["/report", "/report.json"], opt=PAGE)
async def fleet_report(
    request: AnyRequest, fleet: Fleet, since: Since = "30d", by: GroupedBy = "owner"
) -> Response[bytes]:
    """Show the report on all jobs."""
    page = await fleet.read(since, by)
    return _Tag(request).answer((digest([page]), page))


@readable(
    [
        "/health",
        "/health.json",
        "/tokens",
        "/tokens.json",
        "/jobs/{name:str}/whatif",
        "/jobs/{name:str}/whatif.json",
        "/jobs/{name:str}/report.html",
    ],
    opt=PAGE,
    include_in_schema=False,
)
async def removed(request: AnyRequest) -> Response[bytes]:
    """Name what replaces a removed page."""
    page = request.url.path.rstrip("/").rpartition("/")[2].removesuffix(_JSON)
    instead = _INSTEAD[page].format(job=request.path_params.get("name"))
    raise HTTPException(f"this page was removed: {instead}", status_code=HTTPStatus.GONE)


@readable("/static/{name:str}", opt=needs(None))
async def static(request: AnyRequest, name: _NAME) -> Response[bytes]:
    """Return a static file of the pages. Its address changes with its contents."""
    if name not in html.MEDIA_TYPES:
        raise NotFoundException
    return _packed(request, html.static_file(name), html.MEDIA_TYPES[name], "public, max-age=31536000, immutable")


def refused(
    answer_of: Callable[[AnyRequest, Any], Response[Any]], request: AnyRequest, error: Exception
) -> Response[Any]:
    """Answer an error: for a page with a page, for a JSON twin with the API's answer, `answer_of(request, error)`."""
    answer = answer_of(request, error)
    if isinstance(error, UnauthenticatedError):
        # Browsers ask their user for the token, as a password, if this scheme is the only one.
        answer.headers["WWW-Authenticate"] = 'Basic realm="zeus-bso", charset="UTF-8"'
    if request.url.path.endswith(_JSON):
        return answer
    body, reader = answer.content, _reader_of(request)
    message: str = body.message
    if isinstance(error, UnauthenticatedError):
        message += ". To read this page, load it again, and enter the token as the password, with any user name"
    page = _page(request, html.error_page(reader, body.status, body.title, message), HTTPStatus(body.status))
    page.headers.update(answer.headers)
    return page


class _Tag:
    """The ``ETag`` of an answer, for readers that poll.

    It covers everything that the answer depends on, and is weak because the answer may be sent compressed.
    """

    def __init__(self, request: AnyRequest, *, is_twin: bool | None = None) -> None:
        self._request = request
        self.is_twin = request.url.path.rstrip("/").endswith(_JSON) if is_twin is None else is_twin
        self._prefix = f'W/"{html.build()}.{"json" if self.is_twin else "html"}.'
        shown = request.headers.get("if-none-match", "")
        self.known = shown[len(self._prefix) : -1] if shown.startswith(self._prefix) else None

    async def shown(
        self, source: JobPages, query: Callable[..., Found[View]], *args: object, **kwargs: object
    ) -> Response[bytes]:
        """Run one of the queries of `Pages`, and return the HTTP answer."""
        return self.answer(await source.reader.read(query, *args, known=self.known, **kwargs))

    def answer(self, found: Found[View]) -> Response[bytes]:
        """Return the page or its JSON twin; 304 if the reader has this version."""
        version, view = found
        tag = f'{self._prefix}{version}"'
        if view is None:
            headers = {"ETag": tag, "Cache-Control": "no-cache"}
            return Response(b"", status_code=HTTPStatus.NOT_MODIFIED, headers=headers)
        if self.is_twin:
            content, media_type = view.model_dump_json().encode(), "application/json"
        else:
            content, media_type = html.page(view, _reader_of(self._request, tag)).encode(), "text/html"
        answer = _packed(self._request, content, media_type, "private, no-cache")
        answer.headers["ETag"] = tag
        return answer


def _has_slash(request: AnyRequest) -> bool:
    return request.scope["raw_path"].endswith(b"/")


def _reader_of(request: AnyRequest, tag: str = "") -> html.Reader:
    """Return the reader of the requested page."""
    page = request.url.path.partition("/ui")[2].strip("/")
    # Relative links begin at the last slash, which on /ui itself may be missing.
    root = "../" * (page.count("/") + _has_slash(request)) or "./"
    if not page:
        root = "./" if _has_slash(request) else "ui/"
    return html.Reader(root=root, now=datetime.now(UTC), tag=tag)


def _page(request: AnyRequest, page: str, status: HTTPStatus = HTTPStatus.OK) -> Response[bytes]:
    return _packed(request, page.encode(), "text/html", "no-store", status)


def _packed(
    request: AnyRequest, content: bytes, media_type: str, cached: str, status: HTTPStatus = HTTPStatus.OK
) -> Response[bytes]:
    headers = {**_HEADERS, "Cache-Control": cached, "Vary": "Accept-Encoding"}
    if len(content) > _WORTH_PACKING and "gzip" in request.headers.get("accept-encoding", ""):
        content = gzip.compress(content, compresslevel=4, mtime=0)
        headers["Content-Encoding"] = "gzip"
    return Response(content, status_code=status, media_type=media_type, headers=headers)


PAGES = Router(
    "/ui",
    route_handlers=[
        jobs,
        job,
        fleet_report,
        trial,
        removed,
        static,
    ],
    # One handler for each class that the API handles, because Litestar prefers the handler of the nearest class.
    exception_handlers={kind: partial(refused, answer_of) for kind, answer_of in errors.EXCEPTION_HANDLERS.items()},
    include_in_schema=False,
)
