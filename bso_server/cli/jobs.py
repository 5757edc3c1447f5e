"""The ``bso-server jobs`` commands: each works on a database, or through a running server."""

from __future__ import annotations

import argparse
import os
import re
import sys
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from functools import partial
from http import HTTPStatus
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, TextIO, TypeVar
from urllib.parse import quote, urlencode

from pydantic import BaseModel, ValidationError

from bso_server.cli.common import TOKEN_VARIABLE, CommandError, Commands, add_command, settings_of, with_ready_store
from bso_server.cli.tables import explanation_text, job_list_text, job_text
from bso_server.errors import (
    InvalidImportError,
    InvalidJobError,
    JobConflictError,
    PolicyNotInstalledError,
    UnknownJobError,
)
from bso_server.service import queries, views
from bso_server.service.batch_size_service import BatchSizeService
from bso_server.service.json_stream import MalformedJsonError
from bso_server.service.messages import MAX_PAGE
from bso_server.service.page_views import Tariff
from bso_server.service.pages import Pages
from bso_server.service.queries import JobReader
from bso_server.service.transfer import END, ExportReader, beginning, exports_in, lines
from bso_server.settings import secret
from bso_server.storage.store import Store
from bso_server.storage.transaction import Transaction
from zeus_plugins.protocol import ErrorBody, Explanation, JobList, JobSummary, JobView, Paths, TrialPage, TrialView

if TYPE_CHECKING:
    import httpx

Message = TypeVar("Message", bound=BaseModel)
Page = TypeVar("Page", JobList, TrialPage)

# Whole jobs take a while to write and to read.
_TIMEOUT_S = 300.0

# Trials that a terminal shows unless told otherwise.
_LATEST = 20

# Bytes of a file that are read at a time.
_PIECE_BYTES = 65536

# User and password in a URL; a token may be the password, and is not to be printed.
_LOGIN = re.compile("//[^/]*@")


class _RefusedError(CommandError):
    """One job cannot be had or imported; another one perhaps can."""


class _UnknownError(_RefusedError):
    """The server has no such job."""


# By the answers about the job that was sent or asked for.
_ERRORS: dict[int, type[CommandError]] = {
    HTTPStatus.BAD_REQUEST: _RefusedError,
    HTTPStatus.NOT_FOUND: _UnknownError,
    HTTPStatus.CONFLICT: _RefusedError,
    HTTPStatus.UNPROCESSABLE_ENTITY: _RefusedError,
}


def add_jobs_commands(commands: Commands) -> Commands:
    """Add ``jobs`` with what can be done to them; others may be added to what is returned."""
    jobs = commands.add_parser("jobs", help="look after jobs").add_subparsers(required=True, metavar="WHAT")

    jobs_list = add_command(jobs, "list", "all jobs", _list, or_server=True)
    jobs_list.add_argument("--json", action="store_true", help="print JSON")

    show = add_command(jobs, "show", "one job with its arms and trials", _show, or_server=True)
    show.add_argument("job_id", metavar="JOB")
    form = show.add_mutually_exclusive_group()
    form.add_argument("--json", action="store_true", help="print JSON")
    form.add_argument("--verbose", action="store_true", help="print when and why each trial is stopped, too")
    show.add_argument(
        "--all", action="store_true", help=f"print all trials, as --json does, and not the latest {_LATEST} alone"
    )

    explain = add_command(jobs, "explain", "why a trial has its batch size, or the next one", _explain, or_server=True)
    explain.add_argument("job_id", metavar="JOB")
    explain.add_argument(
        "--at",
        dest="trial_number",
        metavar="TRIAL",
        type=int,
        help="what was believed when this trial began (default: what would be chosen next, without starting it)",
    )
    explain.add_argument("--json", action="store_true", help="print JSON")

    export_help = "everything about one job, or all of them, to keep or to take elsewhere"
    export = add_command(jobs, "export", export_help, _export, or_server=True)
    exported = export.add_mutually_exclusive_group(required=True)
    exported.add_argument("job_id", metavar="JOB", nargs="?")
    exported.add_argument("--all", action="store_true", help="all jobs, one after another, as JSON")
    export.add_argument(
        "--format",
        choices=["json", "csv"],
        default="json",
        help="json: all that is kept, which `jobs import` takes (default); csv: a table of its trials",
    )
    export.add_argument("--output", metavar="FILE", type=Path, help="where to write it (default: standard output)")

    report = add_command(jobs, "report", "a page about one job, as a file without scripts", _report, or_server=True)
    report.add_argument("job_id", metavar="JOB")
    report.add_argument("--output", metavar="FILE", type=Path, help="where to write it (default: standard output)")

    import_ = add_command(jobs, "import", "create the jobs that `jobs export` wrote", _import, or_server=True)
    import_.add_argument("file", metavar="FILE", type=Path)
    import_.add_argument("--job-id", metavar="NEW", help="give it this id, which starts with its job_id_prefix")

    discard = add_command(jobs, "discard", "set aside a trial that ended with wrong numbers", _discard, or_server=True)
    discard.add_argument("job_id", metavar="JOB")
    discard.add_argument("trial_number", metavar="TRIAL", type=int)

    share = add_command(jobs, "share", "let every token that may report run trials of a job", _share, or_server=True)
    share.add_argument("job_id", metavar="JOB")
    share.add_argument(
        "--stop", action="store_true", help="leave it to the token that it belongs to; what runs goes on"
    )

    delete = add_command(jobs, "delete", "delete a job with all that is known of it", _delete, or_server=True)
    delete.add_argument("job_id", metavar="JOB")
    return jobs


def read_jobs(options: argparse.Namespace) -> JobList:
    """All jobs of the database or server that the command line names."""
    if options.server_url is None:
        return with_ready_store(options, lambda store: store.read(queries.list_jobs, limit=None))
    pages = _pages(options, JobList, Paths.API_JOBS)
    return JobList(jobs=tuple(job for page in pages for job in page.jobs))


def _list(options: argparse.Namespace) -> None:
    jobs = read_jobs(options)
    print(jobs.model_dump_json(indent=2) if options.json else job_list_text(jobs))


def read_job(options: argparse.Namespace, *, limit: int | None = None) -> JobView:
    """The job that the command line names, with its latest trials, at most so many of them; None: all."""
    query = urlencode({"limit": MAX_PAGE if limit is None else limit})
    view = _read(options, JobView, f"?{query}", partial(queries.show_job, job_id=options.job_id, limit=limit))
    if limit is not None or view.trial_count is None or len(view.trials) >= view.trial_count:
        return view
    pages = _pages(options, TrialPage, f"{_path_of_job(options)}/trials")
    return view.model_copy(update={"trials": tuple(trial for page in pages for trial in page.trials)})


def _show(options: argparse.Namespace) -> None:
    job = read_job(options, limit=None if options.json or options.all else _LATEST)
    print(job.model_dump_json(indent=2) if options.json else job_text(job, verbose=options.verbose))


def _explain(options: argparse.Namespace) -> None:
    number = options.trial_number
    path = "/explanation" + ("" if number is None else f"?{urlencode({'trial_number': number})}")
    query = partial(queries.explain, job_id=options.job_id, trial_number=number)
    view = _read(options, Explanation, path, query)
    print(view.model_dump_json(indent=2) if options.json else explanation_text(view))


def _report(options: argparse.Namespace) -> None:
    if options.server_url is not None:
        text = _ask(options, "GET", f"/ui/jobs/{quote(options.job_id, safe='')}/report.html").decode()
    else:
        # Other commands need no templates.
        from bso_server.ui.pages import report_page

        query = Pages(Tariff.model_validate(settings_of(options), from_attributes=True)).report
        text = report_page(
            with_ready_store(options, lambda store: store.read(query, options.job_id)), datetime.now(UTC)
        )
    with _written(options.output) as file:
        file.write(text)


def _export(options: argparse.Namespace) -> None:
    if options.format == "csv":
        if options.all:
            raise CommandError("a table holds the trials of one job: name it, or leave out --format csv")
        with _written(options.output) as file:
            file.write(views.trials_csv(read_job(options).trials))
    elif options.server_url is not None:
        with _written(options.output) as file:
            _export_from_server(options, file)
    else:

        async def export(store: Store) -> None:
            reader = JobReader(store)
            with _written(options.output) as file:
                if not options.all:
                    await _write(file, reader.export(options.job_id))
                    return
                for job in (await store.read(queries.list_jobs, limit=None)).jobs:
                    pieces = reader.export(job.job_id)
                    try:
                        first = await anext(pieces)
                    except UnknownJobError:
                        continue  # deleted since it was listed
                    file.write(first.decode())
                    await _write(file, pieces)

        with_ready_store(options, export)


async def _write(file: TextIO, pieces: AsyncIterator[bytes]) -> None:
    async for piece in pieces:
        file.write(piece.decode())


def _export_from_server(options: argparse.Namespace, file: TextIO) -> None:
    ids = [options.job_id]
    if options.all:
        ids = [job.job_id for page in _pages(options, JobList, Paths.API_JOBS) for job in page.jobs]
    for job_id in ids:
        try:
            with _answered(options, "GET", f"{Paths.API_JOBS}/{quote(job_id, safe='')}/export") as answer:
                for piece in answer.iter_text():
                    file.write(piece)
        except _UnknownError:
            if not options.all:
                raise
            # Deleted since it was listed.


@contextmanager
def _written(output: Path | None) -> Iterator[TextIO]:
    """Standard output, or a file that is replaced when all is written."""
    if output is None:
        yield sys.stdout
        return
    is_special = output.exists() and not output.is_file()
    part = output if is_special else output.with_name(f"{output.name}.part")
    try:
        # Lines of CSV end as its standard says, on every system.
        with part.open("w", encoding="utf-8", newline="") as file:
            yield file
    except BaseException:
        if not is_special:
            part.unlink(missing_ok=True)
        raise
    part.replace(output)


def _import(options: argparse.Namespace) -> None:
    refused: list[_RefusedError] = []
    number = 0
    with options.file.open("rb") as file:
        for number, export in enumerate(exports_in(iter(partial(file.readline, _PIECE_BYTES), b"")), 1):
            if number > 1 and options.job_id is not None:
                raise CommandError(
                    f"{options.file} holds several jobs, and --job-id is for one: the first is dealt with, the others "
                    "are not"
                )
            try:
                job = _import_one(options, export)
            except _RefusedError as error:
                refused.append(error)
            else:
                print(f"job {job.job_id} is imported with {job.trials} trials")
    if number == 0:
        raise CommandError(f"{options.file} is no job that can be imported: it is empty")
    if number == 1 and refused:
        raise refused[0]
    for each in refused:
        print(f"bso-server: {each}", file=sys.stderr)
    if refused:
        raise CommandError(f"{len(refused)} of {number} jobs of {options.file} are not imported")


def _import_one(options: argparse.Namespace, export: Iterator[bytes]) -> JobSummary:
    """The job that was imported.

    Raises:
        _RefusedError: The job cannot be imported, and another one perhaps can.
    """
    try:
        is_checked = options.server_url is not None or options.job_id is not None
        return import_job(options, _checked(options, export) if is_checked else export)
    except (InvalidImportError, MalformedJsonError, ValidationError) as error:
        said = error.errors(include_url=False)[0]["msg"] if isinstance(error, ValidationError) else error
        raise _RefusedError(f"{options.file} is no job that can be imported: {said}") from error
    except (InvalidJobError, JobConflictError, PolicyNotInstalledError) as error:
        raise _RefusedError(str(error)) from error


def import_job(options: argparse.Namespace, pieces: Iterator[bytes]) -> JobSummary:
    """Create a job from the pieces of an export, where the command line says; errors as of `Imports.run`."""
    if options.server_url is not None:
        with _answered(options, "POST", Paths.IMPORT, content=pieces) as answer:
            return JobSummary.model_validate_json(answer.read())

    async def in_turn() -> AsyncIterator[bytes]:
        for piece in pieces:
            yield piece

    return with_ready_store(options, lambda store: BatchSizeService(store).import_job(in_turn()))


def _checked(options: argparse.Namespace, export: Iterator[bytes]) -> Iterator[bytes]:
    """An export, piece by piece, as it was understood here; perhaps with another id for the job."""
    reader, is_begun, is_first = ExportReader(), False, True
    for piece in chain(export, [b""]):
        trials = reader.feed(piece)
        if reader.head is not None and not is_begun:
            is_begun = True
            head = reader.head if options.job_id is None else reader.head.renamed(options.job_id)
            yield beginning(head).encode()
        if trials:
            yield lines(trials, is_first=is_first).encode()
            is_first = False
    yield END.encode()


def _discard(options: argparse.Namespace) -> None:
    job_id, number = options.job_id, options.trial_number
    if options.server_url is None:

        async def discard(store: Store) -> TrialView:
            service = BatchSizeService(store)
            return await service.run(service.commands.discard, job_id, number)

        with_ready_store(options, discard)
    else:
        _ask(options, "POST", f"{_path_of_job(options)}/trials/{number}/discard")
    print(f"trial {number} of job {job_id} is set aside")


def _share(options: argparse.Namespace) -> None:
    if options.server_url is None:

        async def share(store: Store) -> JobSummary:
            service = BatchSizeService(store)
            return await service.run(service.commands.share, options.job_id, shared=not options.stop)

        job = with_ready_store(options, share)
    else:
        answer = _ask(options, "DELETE" if options.stop else "PUT", f"{_path_of_job(options)}/share")
        job = JobSummary.model_validate_json(answer)
    if job.shared:
        print(f"job {job.job_id} is shared: every token with scope report may run trials of it")
    elif job.owner is None:
        print(f"job {job.job_id} is not shared, but it belongs to no token and so stays open to all of them")
    else:
        print(f"job {job.job_id} is not shared: only token {job.owner}, and administrators, begin trials of it")


def _delete(options: argparse.Namespace) -> None:
    if options.server_url is None:
        with_ready_store(options, lambda store: BatchSizeService(store).delete_job(options.job_id))
    else:
        _ask(options, "DELETE", f"{Paths.JOBS}?{urlencode({'job_id': options.job_id})}")
    print(f"job {options.job_id} is deleted")


def _read(
    options: argparse.Namespace, message: type[Message], path: str, query: Callable[[Transaction], Message]
) -> Message:
    """Ask the server for this part of the job if one is named, else read the database."""
    if options.server_url is not None:
        return message.model_validate_json(_ask(options, "GET", _path_of_job(options) + path))
    return with_ready_store(options, lambda store: store.read(query))


def _path_of_job(options: argparse.Namespace) -> str:
    return f"{Paths.API_JOBS}/{quote(options.job_id, safe='')}"


def _pages(options: argparse.Namespace, kind: type[Page], path: str) -> Iterator[Page]:
    """All pages of a list that the server holds."""
    query = {"limit": str(MAX_PAGE)}
    while True:
        page = kind.model_validate_json(_ask(options, "GET", f"{path}?{urlencode(query)}"))
        yield page
        if page.next_cursor is None:
            return
        query["cursor"] = str(page.next_cursor)


def _ask(options: argparse.Namespace, method: str, path: str) -> bytes:
    """One request to the server that the command line names."""
    with _answered(options, method, path) as answer:
        return answer.read()


@contextmanager
def _answered(
    options: argparse.Namespace, method: str, path: str, content: Iterator[bytes] | None = None
) -> Iterator[httpx.Response]:
    """The same with an answer that is yet to be read."""
    # Loaded where it is needed: a server starts without it.
    import httpx

    url = options.server_url.rstrip("/") + path
    token = (secret(TOKEN_VARIABLE, os.environ) or "").strip()
    headers = {"Content-Type": "application/json"} if content is not None else {}
    if token:
        headers["Authorization"] = f"Bearer {token}"
    shown = _LOGIN.sub("//", url)
    try:
        with httpx.stream(method, url, content=content, headers=headers, timeout=_TIMEOUT_S) as response:
            if response.is_error:
                response.read()
                said = f"{shown} answered {response.status_code}: {_message_in(response)}"
                raise _ERRORS.get(response.status_code, CommandError)(said)
            yield response
    except (httpx.HTTPError, httpx.InvalidURL) as error:
        raise CommandError(f"no answer from {shown}: {error}") from error


def _message_in(response: httpx.Response) -> str:
    try:
        return ErrorBody.model_validate_json(response.content).message
    except ValidationError:
        return response.text[:200]
