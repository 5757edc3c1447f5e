"""Delivery of results from the outbox to the server."""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass, replace
from http import HTTPStatus
from pathlib import Path
from typing import Any

from zeus_plugins.client.outbox import Outbox, OutboxFile, OutboxFileError, OutboxHeader
from zeus_plugins.client.port import NO_RETRIES, ServerPort
from zeus_plugins.errors import ZeusBSOConfigError, ZeusBSOError, ZeusBSORuntimeError, ZeusBSOTokenError
from zeus_plugins.files import FileBusyError
from zeus_plugins.protocol import (
    FINAL,
    FIXED_TERMS,
    CreatedJob,
    Evaluation,
    HeartbeatResponse,
    JobSpec,
    JobSpecFromClient,
    OfflineTrial,
    RefusalReason,
    ReportResponse,
    TrainingResult,
    TrialId,
    changes_in_words,
    terms_between,
)

_logger = logging.getLogger("zeus_plugins")

# Attempts to take a trial over: another run may do so between this run's two heartbeats, which read and take the lease.
_MOST_TAKE_OVERS = 10


def is_refusal(error: Exception) -> bool:
    """Return whether the server rejects the message permanently.

    A server that is away, fails or does not accept the token may accept the same message later. A foreign answer, such
    as a proxy's, is no rejection either.
    """
    if isinstance(error, ZeusBSORuntimeError):
        return not (error.is_outage or error.is_foreign)
    # An error without a status was raised on this side, for example if the server cannot run in this process.
    is_by_server = isinstance(error, ZeusBSOConfigError) and error.status is not None
    return is_by_server and not isinstance(error, ZeusBSOTokenError)


def registered_as(
    client: ServerPort, job: JobSpecFromClient, follows: Collection[str], *, revises: bool = False
) -> CreatedJob:
    """Register a job; if its id is taken, use the registered values of the fields in `follows`, and try again.

    With `revises`, other fields that differ revise the registered job, and a warning names the changes.

    Raises:
        ZeusBSOConfigError: The registered job differs in other fields, or the server does not show it.
        ZeusBSORuntimeError: As in `ServerPort.register`.
    """
    try:
        return client.register(job)
    except ZeusBSOConfigError as conflict:
        if conflict.status != HTTPStatus.CONFLICT or not (follows or revises) or job.job_id is None:
            raise
        try:
            known = client.show_job(job.job_id, limit=1).job
        except ZeusBSORuntimeError as error:
            if error.is_outage:
                raise
            raise conflict from None
    if revises and len(known.batch_sizes) == 1:
        # An earlier launch has pinned the size, and this launch does not: the pin ends.
        follows = frozenset(follows) - {"batch_sizes", "default_batch_size"}
    update: dict[str, Any] = {name: getattr(known, name) for name in follows} | {"revise": revises}
    # This launch may state sizes without the registered default, such as that of an earlier, pinned size.
    if "batch_sizes" not in update and update.get("default_batch_size") not in job.batch_sizes:
        update.pop("default_batch_size", None)
    registered = client.register(job.model_copy(update=update))
    changes = terms_between(known, registered)
    if changes:
        _logger.warning("job %s revised: %s", registered.job_id, changes_in_words(changes))
    return registered


def recorded(client: ServerPort, sender: OutboxHeader) -> TrialId:
    """Have the server record a trial that it did not dispatch, and return the trial; repeated calls record it once.

    If the job has been revised since, it keeps its revised terms: late results do not undo a revision.
    """
    follows = {"scaling", *sender.guessed, *(JobSpec.model_fields.keys() - FIXED_TERMS)}
    registered = registered_as(client, sender.registration, follows)
    offline = OfflineTrial(job_id=registered.job_id, batch_size=sender.batch_size, continues=sender.continues)
    return TrialId(**client.record_offline(offline, sender.key or "").model_dump())


def taken_over(client: ServerPort, trial: TrialId) -> tuple[TrialId, HeartbeatResponse]:
    """Take a trial over for this run, so that the server refuses further messages of earlier runs.

    Return the trial with its new lease epoch, and the server's answer with its state. An ended trial does not change.
    """
    known = trial
    for _ in range(_MOST_TAKE_OVERS):
        if known.lease_epoch is None:
            heard = client.heartbeat(known, regular=False)
            known = known.model_copy(update={"lease_epoch": heard.lease_epoch})
            if heard.state in FINAL:
                return known, heard
        try:
            heard = client.heartbeat(known, regular=False, resumes=True)
        except ZeusBSORuntimeError as error:
            if error.reason != RefusalReason.STALE_LEASE:
                raise
            # Another run has resumed from the same checkpoint, or the answer to an earlier take-over was lost.
            known = known.model_copy(update={"lease_epoch": None})
        else:
            return known.model_copy(update={"lease_epoch": heard.lease_epoch}), heard
    raise ZeusBSORuntimeError(f"other runs of the training take trial {trial.trial_number} over again and again")


def deliver(
    box: OutboxFile,
    client: ServerPort,
    *,
    is_stopped: Callable[[], bool] = lambda: False,
    take_verdict: Callable[[ReportResponse], None] = lambda _: None,
) -> None:
    """Have the box's trial recorded or taken over if necessary, and deliver its items in order.

    If a request raises, the items that were not delivered stay in the box. The box is locked, except during requests.
    Before each request, delivery ends if `is_stopped()` is true. `take_verdict` is called with each verdict, under the
    box's lock, before the evaluation leaves the box.
    """
    while not is_stopped():
        with box.lock:
            item, trial, resumes = box.first, box.trial, box.resumes
        if trial is None or resumes:
            trial = trial or recorded(client, box.sender)
            if resumes:
                trial, _ = taken_over(client, trial)
            with box.lock:
                box.name(trial)
        elif item is None:
            break
        elif isinstance(item, Evaluation):
            verdict = client.send_report(TrainingResult(**trial.model_dump(), **item.model_dump()))
            with box.lock:
                take_verdict(verdict)
                # After a verdict to stop, the server accepts no more evaluations.
                (box.drop_all if verdict.stop_train else box.drop_first)()
        else:
            client.end_trial(trial, box.true_ending(item))
            with box.lock:
                box.drop_first()


@dataclass(frozen=True)
class Delivered:
    """The outcome for one file of the outbox; job and server are empty if the file cannot be read.

    A file is set aside if the server refuses it, or, without a `problem`, when all lines except damaged lines have been
    delivered. If the file `needs_token`, the server did not accept the token, but may accept another token.
    """

    path: Path
    job_id: str = ""
    server_url: str = ""
    delivered: int = 0
    left: int = 0
    problem: str | None = None
    set_aside: Path | None = None
    damaged_lines: int = 0
    needs_token: bool = False

    @property
    def in_words(self) -> str:
        """The outcome, such as ``job nightly for http://bso: 3 delivered``."""
        what = f"job {self.job_id} for {self.server_url}" if self.server_url else str(self.path)
        if self.set_aside is not None and self.problem is not None:
            return f"{what}: refused ({self.problem}); set aside as {self.set_aside}"
        counts = ", ".join(
            f"{number} {word}" for number, word in ((self.delivered, "delivered"), (self.left, "waiting")) if number
        )
        damage = f"; {self.damaged_lines} lines cannot be read" if self.damaged_lines else ""
        aside = "" if self.set_aside is None else f"; set aside as {self.set_aside}"
        return f"{what}: {counts or 'nothing waits'}{damage}{aside}" + (f" ({self.problem})" if self.problem else "")

    @classmethod
    def of(cls, box: OutboxFile, *, problem: ZeusBSOError | str | None = None) -> Delivered:
        """Describe a file in its current state."""
        return cls(
            box.path,
            box.sender.registration.job_id,
            box.sender.server_url,
            left=len(box),
            problem=None if problem is None else str(problem),
            damaged_lines=box.damaged_lines,
            needs_token=isinstance(problem, ZeusBSOTokenError),
        )


def deliver_waiting(outbox: Outbox, client_of: Callable[[str], ServerPort | None]) -> Iterator[Delivered]:
    """Deliver results of earlier trainings, oldest file first, except files of trainings that still run.

    `client_of` returns the client for a server's URL, or None to skip that server's files. If `client_of` raises a
    `ZeusBSOError`, the error becomes the `problem` of that server's files.
    """
    problem_of: dict[str, str] = {}
    for box in _opened(outbox):
        if isinstance(box, Delivered):
            yield box
            continue
        server_url = box.sender.server_url
        try:
            client = None if server_url in problem_of else client_of(server_url)
        except ZeusBSOError as unusable:
            client, problem_of[server_url] = None, str(unusable)
        if client is not None:
            file, error = _emptied(box, client)
            if isinstance(error, ZeusBSORuntimeError) and error.is_outage:
                # Skip further files of a server that is away: each would wait for another time-out.
                problem_of[server_url] = str(error)
            yield file
            continue
        if server_url in problem_of:
            yield Delivered.of(box, problem=problem_of[server_url])
        box.close()


def deliver_earlier(outbox: Outbox, client: ServerPort) -> None:
    """Deliver results of earlier trainings to this server, and log the outcome of each file."""
    with client.with_retries(NO_RETRIES) as server:
        for file in deliver_waiting(outbox, lambda server_url: server if server_url == server.server_url else None):
            if not file.delivered and file.problem is None and file.set_aside is None:
                continue
            # Without a valid token, these results are never delivered, and only the user can provide a token.
            is_warning = file.set_aside is not None or file.needs_token
            _logger.log(
                logging.WARNING if is_warning else logging.INFO,
                "results that had waited in %s: %s",
                file.path,
                file.in_words,
            )


def listed(outbox: Outbox) -> Iterator[Delivered]:
    """Describe the files that `deliver_waiting` would deliver, and leave them unchanged."""
    for box in _opened(outbox):
        if isinstance(box, Delivered):
            yield box
        else:
            yield Delivered.of(box)
            box.close()


def _opened(outbox: Outbox) -> Iterator[OutboxFile | Delivered]:
    """Open each file that no other process has open; describe files that cannot be read."""
    for path in outbox.waiting():
        try:
            yield outbox.open(path)
        except (FileNotFoundError, FileBusyError):
            continue
        except (OutboxFileError, OSError) as error:
            yield Delivered(path, problem=str(error))


def _emptied(box: OutboxFile, client: ServerPort) -> tuple[Delivered, ZeusBSOError | None]:
    """Deliver a file, and close it or set it aside."""
    waiting = len(box)
    problem: ZeusBSOError | None = None
    try:
        if waiting:  # Without results to deliver, do not record or take over the trial.
            deliver(box, client)
    except ZeusBSOError as error:
        problem = error
    file = Delivered.of(box, problem=problem)
    aside = box.refuse() if problem is not None and is_refusal(problem) else box.close()
    return replace(file, delivered=waiting - file.left, set_aside=aside), problem
