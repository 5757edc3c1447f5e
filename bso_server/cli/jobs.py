"""The ``bso-server jobs`` commands. Each works on a database or asks a running server."""

from __future__ import annotations

import argparse
import os
import re
import sys
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar
from urllib.parse import quote, urlencode

from pydantic import BaseModel, ValidationError

from bso_server.cli.common import (
    SERVER_URL_VARIABLE,
    TOKEN_VARIABLE,
    CommandError,
    Commands,
    RemovedOption,
    add_command,
    cell,
    table,
    table_of,
    with_store,
)
from bso_server.errors import (
    InvalidImportError,
    InvalidJobError,
    JobConflictError,
    PolicyNotInstalledError,
)
from bso_server.service import reading
from bso_server.service.commands import BatchSizeService
from bso_server.service.commands import Commands as Changes
from bso_server.service.exports import export, split_exports
from bso_server.service.imports import LONGEST_LINE_BYTES, import_job
from bso_server.service.views import MAX_PAGE
from bso_server.settings import secret
from bso_server.storage.store import Store
from bso_server.ui import words
from zeus_plugins.protocol import (
    ArmView,
    CreatedJob,
    ErrorBody,
    Explanation,
    JobList,
    JobSpecFromClient,
    JobSummary,
    JobView,
    MetricView,
    Paths,
    TrialList,
    TrialView,
    changes_in_words,
    printable,
    terms_between,
)

if TYPE_CHECKING:
    import httpx

Message = TypeVar("Message", bound=BaseModel)
Page = TypeVar("Page", JobList, TrialList)

# Long enough for the export of whole jobs.
_TIMEOUT_S = 300.0

OUTPUT = "the shell writes the file: bso-server … > FILE"
"""What to do instead of the option ``--output`` of earlier versions."""

_DATABASE_ALONE = "jobs import needs the database, so run it there, or name the database by --database-url"

# Trials that `jobs show` prints by default.
_LATEST = 20

# User and password in a URL, removed before printing because the password may be a token.
_LOGIN = re.compile("//[^/]*@")


# Errors of one import, after which the next job may succeed.
_REFUSALS = (InvalidImportError, InvalidJobError, JobConflictError, PolicyNotInstalledError)


def add_jobs_commands(commands: Commands) -> None:
    """Add ``jobs`` with its subcommands."""
    jobs = commands.add_parser("jobs", help="show and change jobs").add_subparsers(required=True, metavar="WHAT")

    def add(name: str, summary: str, run: Callable[[argparse.Namespace], None]) -> argparse.ArgumentParser:
        """Add a command about one job."""
        parser = add_command(jobs, name, summary, run, or_server=True)
        parser.add_argument("job_id", metavar="JOB")
        return parser

    jobs_list = add_command(jobs, "list", "all jobs", _list, or_server=True)
    jobs_list.add_argument("--json", action="store_true", help="print JSON")

    show = add("show", "show one job with its batch sizes and trials", _show)
    show.add_argument("--json", action="store_true", help="print JSON")
    show.add_argument(
        "--verbose",
        action=RemovedOption,
        instead="--json has the bound on each trial's epochs, and jobs explain its reason",
    )
    show.add_argument(
        "--all", action="store_true", help=f"print all trials, like --json, instead of the latest {_LATEST}"
    )

    explain = add("explain", "why a trial has its batch size, or the next one", _explain)
    explain.add_argument(
        "--at",
        dest="trial_number",
        metavar="TRIAL",
        type=int,
        help="explain the choice for this trial (default: the next choice, without starting a trial)",
    )
    explain.add_argument("--json", action="store_true", help="print JSON")

    export_help = "write all data of one job, or of all jobs, for archives or another server"
    export_ = add_command(jobs, "export", export_help, _export, or_server=True)
    exported = export_.add_mutually_exclusive_group(required=True)
    exported.add_argument("job_id", metavar="JOB", nargs="?")
    exported.add_argument("--all", action="store_true", help="export all jobs")
    export_.add_argument("--format", action=RemovedOption, instead="jobs show JOB --json has the fields of each trial")
    export_.add_argument("--output", action=RemovedOption, instead=OUTPUT)

    import_ = add_command(jobs, "import", "create the jobs of a file from `jobs export`", _import)
    import_.add_argument("file", metavar="FILE", type=Path)
    import_.add_argument("--server-url", action=RemovedOption, instead=_DATABASE_ALONE)
    # With a default, `ZEUS_SERVER_URL` counts: its database, or the error for a server.
    import_.set_defaults(server_url=None)
    import_.add_argument("--job-id", action=RemovedOption, instead="write the new id into the first line of the job")

    discard = add("discard", "set aside a trial that ended with wrong numbers", _discard)
    discard.add_argument("trial_number", metavar="TRIAL", type=int)

    revise = add("revise", "change the terms of a job, which keeps its trials", _revise)
    revise.add_argument("--eta", dest="eta_knob", metavar="ETA", type=float, help="weight of energy against time")
    revise.add_argument(
        "--beta", dest="beta_knob", metavar="BETA", type=_number_or_none, help="bound on a run's cost, or none"
    )
    revise.add_argument("--max-epochs", metavar="N", type=int, help="epochs after which a run ends without the target")
    revise.add_argument("--batch-sizes", metavar="SIZE", type=int, nargs="+", help="all sizes to choose from")
    revise.add_argument("--default", dest="default_batch_size", metavar="SIZE", type=int, help="the default size")
    revise.add_argument("--controls", metavar="SHARE", type=float, help="share of the job's cost; 0: no control runs")
    tags_help = "all tags of the job, for reports; without a value, none"
    revise.add_argument("--tags", metavar="NAME=VALUE", type=_tag, nargs="*", help=tags_help)
    revise.add_argument("--policy", help="policy that chooses the sizes")

    delete = add("delete", "delete a job with all its data", _delete)
    delete.add_argument("--yes", action="store_true", help="do not ask first")


def read_jobs(options: argparse.Namespace) -> JobList:
    """Return all jobs of the database or server."""
    if options.server_url is None:
        return with_store(options, lambda store: store.read(reading.list_jobs, limit=None))
    pages = _pages(options, JobList, Paths.API_JOBS)
    return JobList(jobs=tuple(job for page in pages for job in page.jobs))


def _list(options: argparse.Namespace) -> None:
    listed = read_jobs(options)
    if options.json:
        print(listed.model_dump_json(indent=2))
        return
    columns: dict[str, Callable[[JobSummary], object]] = {
        "JOB": lambda job: job.job_id,
        "POLICY": lambda job: job.policy,
        "TRIALS": lambda job: job.trials,
        "LOWEST COST J": lambda job: job.min_cost_j,
        "AT BATCH SIZE": lambda job: job.min_cost_batch_size,
    }
    # Without tokens the column would be empty.
    if any(job.owner for job in listed.jobs):
        columns["TOKEN"] = _owner
    print(table_of(columns, listed.jobs) if listed.jobs else "no jobs")


def read_job(options: argparse.Namespace, *, limit: int | None = None) -> JobView:
    """Return the job with its latest trials, at most `limit`; None means all trials."""
    path = f"{_path_of_job(options.job_id)}?{urlencode({'limit': MAX_PAGE if limit is None else limit})}"
    view = ask_or_read(
        options, "GET", path, JobView, lambda store: store.read(reading.show_job, options.job_id, limit=limit)
    )
    if limit is not None or view.trial_count is None or len(view.trials) >= view.trial_count:
        return view
    pages = _pages(options, TrialList, f"{_path_of_job(options.job_id)}/trials")
    return view.model_copy(update={"trials": tuple(trial for page in pages for trial in page.trials)})


def _show(options: argparse.Namespace) -> None:
    job = read_job(options, limit=None if options.json or options.all else _LATEST)
    print(job.model_dump_json(indent=2) if options.json else job_text(job))


def _explain(options: argparse.Namespace) -> None:
    job_id, number = options.job_id, options.trial_number
    path = f"{_path_of_job(job_id)}/explanation" + ("" if number is None else f"?{urlencode({'trial_number': number})}")
    view = ask_or_read(options, "GET", path, Explanation, lambda store: store.read(reading.explain, job_id, number))
    print(view.model_dump_json(indent=2) if options.json else explanation_text(view))


def _export(options: argparse.Namespace) -> None:
    ids = [job.job_id for job in read_jobs(options).jobs] if options.all else [options.job_id]
    if options.server_url is None:
        with_store(options, lambda store: _export_from_store(store, ids))
        return
    for job_id in ids:
        with _answered(options, "GET", f"{_path_of_job(job_id)}/export") as answer:
            for piece in answer.iter_text():
                sys.stdout.write(piece)


async def _export_from_store(store: Store, ids: list[str]) -> None:
    for job_id in ids:
        async for piece in export(store, job_id):
            sys.stdout.write(piece.decode())


def _import(options: argparse.Namespace) -> None:
    if options.server_url is not None:
        raise CommandError(f"{SERVER_URL_VARIABLE} names a server: {_DATABASE_ALONE}")
    refused: list[str] = []
    number = 0
    with options.file.open("rb") as file:
        # Read at most one byte more than a line may have, so that a longer line need not fit into memory.
        lines = iter(partial(file.readline, LONGEST_LINE_BYTES + 1), b"")
        for first_line, export in split_exports(lines):
            number += 1
            try:
                job = with_store(options, partial(import_job, lines=export, first_line=first_line), schema="prepared")
            except _REFUSALS as error:
                refused.append(f"{options.file}: {error}")
            else:
                print(f"job {job.job_id} is imported with {job.trials} trials")
    if number == 0:
        raise CommandError(f"{options.file} is no job that can be imported: it is empty")
    if number == 1 and refused:
        raise CommandError(refused[0])
    for each in refused:
        print(printable(f"bso-server: {each}"), file=sys.stderr)
    if refused:
        raise CommandError(f"{len(refused)} of {number} jobs of {options.file} are not imported")


def _discard(options: argparse.Namespace) -> None:
    job_id, number = options.job_id, options.trial_number
    path = f"{_path_of_job(job_id)}/trials/{number}/discard"
    ask_or_read(options, "POST", path, TrialView, lambda store: store.write(Changes().discard, job_id, number))
    print(f"trial {number} of job {job_id} is set aside")


_TERMS = ("eta_knob", "beta_knob", "max_epochs", "batch_sizes", "default_batch_size", "controls", "tags", "policy")


def _number_or_none(text: str) -> float | str:
    # Not None, because None means that the option is absent.
    return "none" if text == "none" else float(text)


def _tag(text: str) -> tuple[str, str]:
    name, equals, value = text.partition("=")
    if not equals:
        raise argparse.ArgumentTypeError(f"{text!r} is no tag: write team=ads")
    return name, value


def _revise(options: argparse.Namespace) -> None:
    stated = {name: value for name in _TERMS if (value := getattr(options, name)) is not None}
    if not stated:
        raise CommandError("state at least one term: --eta, --beta, --max-epochs, --batch-sizes, --default, …")
    if stated.get("beta_knob") == "none":
        stated["beta_knob"] = None
    if "tags" in stated:
        stated["tags"] = dict(stated["tags"])
    known = read_job(options, limit=1).job
    try:
        asked = JobSpecFromClient.model_validate({**known.model_dump(), **stated, "revise": True})
    except ValidationError as error:
        problems = (f"{line['loc'][0]}: {line['msg'].removeprefix('Value error, ')}" for line in error.errors())
        raise CommandError(f"job {known.job_id} is not revised, {'; '.join(problems)}") from error
    if options.server_url is None:
        revised, _ = with_store(options, lambda store: BatchSizeService(store).register(asked))
    else:
        with _answered(options, "POST", Paths.JOBS, content=asked.model_dump_json()) as answer:
            revised = CreatedJob.model_validate_json(answer.read())
    changes = changes_in_words(terms_between(known, revised))
    print(f"job {known.job_id} revised: {changes}" if changes else f"job {known.job_id} has these terms already")


def _delete(options: argparse.Namespace) -> None:
    if not options.yes:
        if not sys.stdin.isatty():
            raise CommandError(f"nothing is deleted: --yes deletes job {options.job_id} with all its runs")
        if input(f"Delete job {options.job_id} with all its runs? [y/N] ").lower() not in ("y", "yes"):
            raise CommandError("nothing is deleted")
    if options.server_url is None:
        with_store(options, lambda store: BatchSizeService(store).delete_job(options.job_id))
    else:
        _ask(options, "DELETE", f"{Paths.JOBS}?{urlencode({'job_id': options.job_id})}")
    print(f"job {options.job_id} is deleted")


def ask_or_read(
    options: argparse.Namespace,
    method: str,
    path: str,
    message: type[Message],
    on_store: Callable[[Store], Awaitable[Message]],
) -> Message:
    """Send the request if the command line names a server, otherwise use the database."""
    if options.server_url is not None:
        return message.model_validate_json(_ask(options, method, path))
    return with_store(options, on_store)


def _path_of_job(job_id: str) -> str:
    return f"{Paths.API_JOBS}/{quote(job_id, safe='')}"


def _pages(options: argparse.Namespace, kind: type[Page], path: str) -> Iterator[Page]:
    query = {"limit": str(MAX_PAGE)}
    while True:
        page = kind.model_validate_json(_ask(options, "GET", f"{path}?{urlencode(query)}"))
        yield page
        if page.next_cursor is None:
            return
        query["cursor"] = str(page.next_cursor)


def _ask(options: argparse.Namespace, method: str, path: str) -> bytes:
    with _answered(options, method, path) as answer:
        return answer.read()


@contextmanager
def _answered(
    options: argparse.Namespace, method: str, path: str, content: str | None = None
) -> Iterator[httpx.Response]:
    """Send a request to the server, with JSON as its body or none, and yield the answer before its body is read."""
    # Imported here, because the server starts faster without it.
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
                raise CommandError(said)
            yield response
    except (httpx.HTTPError, httpx.InvalidURL) as error:
        raise CommandError(f"no answer from {shown}: {error}") from error


def _message_in(response: httpx.Response) -> str:
    try:
        return ErrorBody.model_validate_json(response.content).message
    except ValidationError:
        return response.text[:200]


def job_text(view: JobView) -> str:
    """Format a job as a summary and tables of its arms and its trials.

    If energies of the view's trials are estimated, energies and costs are marked so, in the words of the job's page.
    """
    count = len(view.trials) if view.trial_count is None else view.trial_count
    states = ", ".join(f"{number} {state}" for state, number in view.trial_states.items())
    target = "" if view.job.target_runs is None else f", {view.job.target_in_words}"
    sources = sorted({printable(trial.energy_source) for trial in view.trials if trial.energy_source})
    estimated = words.estimated(sources)
    mark = f" ({estimated.upper()})" if estimated else ""
    head = printable(
        f"job {view.job.job_id}: {view.stage} stage, {count} trials{f' ({states})' if states else ''}, "
        f"{_best(view, estimated)}{target}{f', token {_owner(view)}' if view.owner else ''}"
        + "".join(f", {name}={value}" for name, value in (view.job.tags or {}).items())
    )
    arms: dict[str, Callable[[ArmView], object]] = {
        "BATCH SIZE": lambda arm: arm.batch_size,
        "TRIALS": lambda arm: arm.trials,
        "REACHED TARGET": lambda arm: arm.n,
        f"EXPECTED COST J{mark}": lambda arm: arm.expected_cost_j,
        "90 % BAND J": lambda arm: _band(arm.expected_low_j, arm.expected_high_j),
    }
    if view.job.warm_in_force is not None:
        head += f"\n{printable(f'warm start: {view.job.warm_in_force.in_words}')}"
    trials: dict[str, Callable[[TrialView], object]] = {
        "TRIAL": lambda trial: trial.trial_number,
        "BATCH SIZE": lambda trial: trial.batch_size,
        "STATE": lambda trial: trial.state,
        "ORIGIN": lambda trial: trial.origin,
        "EPOCHS": lambda trial: trial.epochs,
        "TIME S": lambda trial: trial.time_s,
        **({} if words.by_time(sources) else {f"ENERGY J{mark}": lambda trial: trial.energy_j}),
        f"COST J{mark}": lambda trial: trial.cost_j,
        "METRIC": lambda trial: trial.metric,
    }
    for name in sorted({name for trial in view.trials for name in trial.watched or ()}):
        trials[name] = lambda trial, name=name: (trial.watched or {}).get(name)  # type: ignore[misc]  # has a default
    if any(trial.startup_s is not None for trial in view.trials):
        trials["START-UP S"] = lambda trial: trial.startup_s
    if any(trial.power_limits for trial in view.trials):
        trials["POWER LIMIT W"] = lambda trial: (
            "-" if trial.power_limits is None else f"{cell(trial.power_limit_w)} of {trial.power_limits}"
        )
    if any(trial.owner for trial in view.trials):
        trials["TOKEN"] = lambda trial: trial.owner
    trials["WHY THIS SIZE"] = lambda trial: trial.reason
    latest = table_of(trials, view.trials)
    measured = f"energy by {', '.join(sources)}" if sources else "no energy reported yet"
    savings = view.savings.in_words + (f" Costs are {estimated}." if estimated else "")
    if len(view.trials) < count:
        latest += f"\nThe latest {len(view.trials)} of {count} trials; --all shows them all."
    revisions = "\n".join(
        printable(f"Revised before trial {each.trials + 1}, {cell(each.revised_at)}: {each.in_words}.")
        for each in view.revisions
    )
    tables = [table_of(arms, view.arms), *filter(None, [_quality(view), revisions]), latest]
    if view.stuck is not None:
        head += f"\n{printable(f'Stuck: {view.stuck}.')}"
    return "\n\n".join([head, savings, *tables, words.of_energy(sources) or measured])


def _quality(view: JobView) -> str:
    """Format the metrics at the end of the runs that reached the target, by size; empty without such runs."""
    columns: dict[str, Callable[[tuple[ArmView, MetricView]], object]] = {
        "METRIC": lambda row: row[1].name or "the target's",
        "BATCH SIZE": lambda row: row[0].batch_size,
        "RUNS": lambda row: row[1].runs,
        "MEAN": lambda row: row[1].mean,
        "STD": lambda row: row[1].std,
        "MINUS THE DEFAULT'S": lambda row: _band(row[1].low, row[1].high),
        "AGAINST THE DEFAULT": lambda row: row[1].in_words or "-",
    }
    rows = [(arm, metric) for arm in view.arms for metric in arm.metrics]
    # Group by metric; the metric of the target, which has no name, is first.
    rows.sort(key=lambda row: row[1].name or "")
    left_out = [printable(f"{arm.batch_size} is left out: {arm.left_out}.") for arm in view.arms if arm.left_out]
    return "\n".join([table_of(columns, rows), *left_out]) if rows else ""


def explanation_text(view: Explanation) -> str:
    """Format an explanation: a sentence, and a table of the beliefs about each size."""
    subject = "the next trial" if view.trial_number is None else f"trial {view.trial_number}"
    state = "" if view.state is None else f", {view.state}"
    head = f"job {view.job_id}, {subject}: batch size {view.batch_size} ({view.origin}{state})"
    decision, sentence = view.decision, printable(view.sentence)
    if decision is None:
        return f"{head}\n\n{sentence}\n\nNo numbers are kept of this decision."
    candidates = {each.batch_size: each for each in decision.candidates}
    rows = []
    for size in decision.sizes:
        known = candidates.get(size.batch_size)
        chance = "-" if size.chance_best is None else f"{100 * size.chance_best:.0f} %"
        row = [str(size.batch_size), cell(size.expected_cost_j), _band(size.low_j, size.high_j), chance]
        if candidates:
            row += map(cell, (None, None, None) if known is None else (known.value, known.loss, known.stop_epochs))
        noted = (("best so far", decision.incumbent), ("chosen", view.batch_size))
        rows.append([*row, ", ".join(note for note, noted_size in noted if noted_size == size.batch_size)])
    header = ["BATCH SIZE", "EXPECTED COST J", "90 % BAND J", "CHANCE TO BE BEST"]
    header += ["EXPECTED SAVING", "EXTRA COST", "STOP AFTER EPOCHS"] if candidates else []
    told = [head, sentence, table([*header, ""], rows)]
    if view.warm is not None:
        told.append(printable(f"Warm start: {view.warm.in_words}."))
    if candidates:
        told.append(
            "A trial is worth the expected saving of later runs by its result, less its extra cost; "
            f"both are in runs of {decision.incumbent}, the best size so far."
        )
    return "\n\n".join(told)


def _band(low: float | None, high: float | None) -> str:
    return "-" if low is None or high is None else f"{cell(low)} to {cell(high)}"


def _owner(job: JobSummary | JobView) -> str:
    return f"{cell(job.owner)}{' (shared)' if job.shared else ''}"


def _best(view: JobView, estimated: str) -> str:
    best = view.arm_of(view.best_batch_size)
    if best is None:
        return "no batch size has reached the target yet"
    return f"best batch size {best.batch_size}, {best.in_words}{f', {estimated}' if estimated else ''}"
