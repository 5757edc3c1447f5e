"""The ``bso-server jobs`` commands: each works on a database, or through a running server."""

from __future__ import annotations

import argparse
import os
import re
import sys
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import contextmanager
from functools import partial
from itertools import chain
from pathlib import Path
from typing import TextIO, TypeVar
from urllib.parse import quote, urlencode

import httpx
from pydantic import BaseModel, ValidationError

from bso_server.cli.common import TOKEN_VARIABLE, CommandError, Commands, add_command, with_ready_store
from bso_server.cli.tables import job_list_text, job_text
from bso_server.errors import InvalidImportError
from bso_server.service import queries, views
from bso_server.service.batch_size_service import BatchSizeService
from bso_server.service.json_stream import MalformedJsonError
from bso_server.service.messages import MAX_PAGE
from bso_server.service.queries import JobReader
from bso_server.service.transfer import END, ExportReader, beginning, lines
from bso_server.storage.store import Store
from bso_server.storage.transaction import Transaction
from zeus_plugins.protocol import ErrorBody, JobList, JobSummary, JobView, Paths, TrialPage, TrialView

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


def add_jobs_commands(commands: Commands) -> None:
    """Add ``jobs`` with what can be done to them."""
    jobs = commands.add_parser("jobs", help="look after jobs").add_subparsers(required=True, metavar="WHAT")

    jobs_list = add_command(jobs, "list", "all jobs", _list, or_server=True)
    jobs_list.add_argument("--json", action="store_true", help="print JSON")

    show = add_command(jobs, "show", "one job with its arms and trials", _show, or_server=True)
    show.add_argument("job_id", metavar="JOB")
    form = show.add_mutually_exclusive_group()
    form.add_argument("--json", action="store_true", help="print JSON")
    form.add_argument("--verbose", action="store_true", help="print the numbers behind each decision, too")
    show.add_argument(
        "--all", action="store_true", help=f"print all trials, as --json does, and not the latest {_LATEST} alone"
    )

    export_help = "everything about one job, to keep or to take elsewhere"
    export = add_command(jobs, "export", export_help, _export, or_server=True)
    export.add_argument("job_id", metavar="JOB")
    export.add_argument(
        "--format",
        choices=["json", "csv"],
        default="json",
        help="json: all that is kept, which `jobs import` takes (default); csv: a table of its trials",
    )
    export.add_argument("--output", metavar="FILE", type=Path, help="where to write it (default: standard output)")

    import_ = add_command(jobs, "import", "create a job from what `jobs export` wrote", _import, or_server=True)
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


def _list(options: argparse.Namespace) -> None:
    if options.server_url is None:
        jobs = with_ready_store(options, lambda store: store.read(queries.list_jobs, limit=None))
    else:
        pages = _pages(options, JobList, Paths.API_JOBS)
        jobs = JobList(jobs=tuple(job for page in pages for job in page.jobs))
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


def _export(options: argparse.Namespace) -> None:
    if options.format == "csv":
        with _written(options.output) as file:
            file.write(views.trials_csv(read_job(options).trials))
    elif options.server_url is not None:
        with _written(options.output) as file, _answered(options, "GET", f"{_path_of_job(options)}/export") as answer:
            for piece in answer.iter_text():
                file.write(piece)
    else:

        async def export(store: Store) -> None:
            with _written(options.output) as file:
                async for piece in JobReader(store).export(options.job_id):
                    file.write(piece.decode())

        with_ready_store(options, export)


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
    try:
        if options.server_url is None:

            async def pieces() -> AsyncIterator[bytes]:
                for piece in _read_file(options.file) if options.job_id is None else _checked(options):
                    yield piece

            job = with_ready_store(options, lambda store: BatchSizeService(store).import_job(pieces()))
        else:
            with _answered(options, "POST", Paths.IMPORT, content=_checked(options)) as answer:
                job = JobSummary.model_validate_json(answer.read())
    except (InvalidImportError, MalformedJsonError, ValidationError) as error:
        said = error.errors(include_url=False)[0]["msg"] if isinstance(error, ValidationError) else error
        raise CommandError(f"{options.file} is no job that can be imported: {said}") from error
    print(f"job {job.job_id} is imported with {job.trials} trials")


def _read_file(file: Path) -> Iterator[bytes]:
    with file.open("rb") as opened:
        yield from iter(partial(opened.read, _PIECE_BYTES), b"")


def _checked(options: argparse.Namespace) -> Iterator[bytes]:
    """The contents of the file, piece by piece, as they were understood here; perhaps with another id for the job."""
    reader, is_begun, is_first = ExportReader(), False, True
    for piece in chain(_read_file(options.file), [b""]):
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
    url = options.server_url.rstrip("/") + path
    token = os.environ.get(TOKEN_VARIABLE, "").strip()
    headers = {"Content-Type": "application/json"} if content is not None else {}
    if token:
        headers["Authorization"] = f"Bearer {token}"
    shown = _LOGIN.sub("//", url)
    try:
        with httpx.stream(method, url, content=content, headers=headers, timeout=_TIMEOUT_S) as response:
            if response.is_error:
                response.read()
                raise CommandError(f"{shown} answered {response.status_code}: {_message_in(response)}")
            yield response
    except (httpx.HTTPError, httpx.InvalidURL) as error:
        raise CommandError(f"no answer from {shown}: {error}") from error


def _message_in(response: httpx.Response) -> str:
    try:
        return ErrorBody.model_validate_json(response.content).message
    except ValidationError:
        return response.text[:200]
