"""Bringing to the server what waits in the outbox."""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from http import HTTPStatus
from pathlib import Path

from zeus_plugins.client.outbox import Outbox, OutboxFile, OutboxFileBusyError, OutboxFileError, OutboxHeader
from zeus_plugins.client.port import ServerPort
from zeus_plugins.errors import ZeusBSOConfigError, ZeusBSOError, ZeusBSORuntimeError, ZeusBSOTokenError
from zeus_plugins.protocol import (
    FINAL,
    CreatedJob,
    Ending,
    HeartbeatResponse,
    JobSpecFromClient,
    OfflineTrial,
    PowerLimitChoice,
    RefusalReason,
    ReportResponse,
    TrainingResult,
    TrialId,
)

_logger = logging.getLogger("zeus_plugins")

# Two runs that resume at the same moment may each come in between the other's question and take-over.
_MOST_TAKE_OVERS = 10


def is_refusal(error: Exception) -> bool:
    """True if the server does not want what was sent, and never will.

    A server that is away, fails, or does not accept the token may take the same later; and what answers in its place
    with something else than expected (a proxy) may go away.
    """
    if isinstance(error, ZeusBSORuntimeError):
        return not (error.is_outage or error.is_foreign)
    # Without a status it is an error on this side, such as a server in this process that cannot run here.
    is_by_server = isinstance(error, ZeusBSOConfigError) and error.status is not None
    return is_by_server and not isinstance(error, ZeusBSOTokenError)


def registered_as(client: ServerPort, job: JobSpecFromClient, guessed: Collection[str]) -> CreatedJob:
    """Register a job, or find it with other values in place of those that were guessed.

    Args:
        client: Talks to the server.
        job: The job.
        guessed: Names of its fields that a registration under its id overrides.

    Returns:
        The job as the server has it.

    Raises:
        ZeusBSOConfigError: It is there, and differs in what was not guessed; or the server does not show in what.
        ZeusBSORuntimeError: As of `ServerPort.register`.
    """
    try:
        return client.register(job)
    except ZeusBSOConfigError as conflict:
        if conflict.status != HTTPStatus.CONFLICT or not guessed or job.job_id is None:
            raise
        try:
            known = client.show_job(job.job_id, limit=1).job
        except ZeusBSORuntimeError as error:
            if error.is_outage:
                raise
            raise conflict from None
    return client.register(job.model_copy(update={name: getattr(known, name) for name in guessed}))


def recorded(client: ServerPort, sender: OutboxHeader) -> TrialId:
    """Have the server record a trial that began without it, once however often it is called; return the trial."""
    registered = registered_as(client, sender.registration, sender.guessed)
    offline = OfflineTrial(job_id=registered.job_id, batch_size=sender.batch_size)
    return TrialId(**client.record_offline(offline, sender.key or "").model_dump())


def taken_over(client: ServerPort, trial: TrialId) -> tuple[TrialId, HeartbeatResponse]:
    """Have the server give a trial to this run of its training, which resumes: no earlier one may speak for it then.

    Return the trial with its new lease epoch, and where it stands. A trial that has ended stays as it is.
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
            # Others have resumed from the same checkpoint, or this was done, and its answer lost.
            known = known.model_copy(update={"lease_epoch": None})
        else:
            return known.model_copy(update={"lease_epoch": heard.lease_epoch}), heard
    raise ZeusBSORuntimeError(f"other runs of the training take trial {trial.trial_number} over again and again")


def deliver_power_limits(client: ServerPort, trial: TrialId, choice: PowerLimitChoice) -> None:
    """Have a trial's power limits kept. If the server refuses, that is a warning: no result of the trial needs them."""
    try:
        client.store_power_profile(trial, choice)
    except ZeusBSOError as error:
        if not is_refusal(error):
            raise
        _logger.warning(
            "the server does not keep the power limits of trial %d of job %s, and later trainings measure them again: "
            "%s",
            trial.trial_number,
            trial.job_id,
            error,
        )


def deliver(
    box: OutboxFile,
    client: ServerPort,
    *,
    lock: AbstractContextManager[object] | None = None,
    is_stopped: Callable[[], bool] = lambda: False,
) -> ReportResponse | None:
    """Have the box's trial recorded or taken over, if need be, and deliver what waits, in order.

    What was not delivered when this raises is still there.

    Args:
        box: The box.
        client: Talks to the server.
        lock: Held while the box is used, and not while the server is waited for.
        is_stopped: Asked before each request whether to leave the rest.

    Returns:
        The server's last verdict, or None when no evaluation was delivered.
    """
    lock = lock or nullcontext()
    verdict: ReportResponse | None = None
    while not is_stopped():
        with lock:
            item, trial, resumes = box.first, box.trial, box.resumes
        if trial is None or resumes:
            trial = trial or recorded(client, box.sender)
            if resumes:
                trial, _ = taken_over(client, trial)
            with lock:
                box.name(trial)
            continue
        if item is None:
            break
        is_last_word = False
        if isinstance(item, Ending):
            client.end_trial(trial, box.true_ending(item))
        elif isinstance(item, PowerLimitChoice):
            deliver_power_limits(client, trial, item)
        else:
            verdict = client.send_report(TrainingResult(**trial.model_dump(), **item.model_dump()))
            is_last_word = verdict.stop_train
        with lock:
            # A server that judged otherwise takes no result after its last word.
            (box.drop_all if is_last_word else box.drop_first)()
    return verdict


@dataclass(frozen=True)
class Delivered:
    """The fate of one file of the outbox: how many results were delivered, how many are left there, and why.

    Job and server are empty where the file cannot be read. A file that the server has refused is set aside, and so is
    one with damaged lines, without a problem, once all others were delivered. Where the problem is the token
    (`needs_token`), it is there for another one to deliver.
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

    @classmethod
    def of(cls, box: OutboxFile, *, problem: ZeusBSOError | str | None = None) -> Delivered:
        """Describe a file as it is now."""
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
    """Deliver what earlier trainings have left, file by file, oldest first; trainings that still run keep theirs.

    `client_of` gives the client for a server's URL, or None to leave that server's files alone. A `ZeusBSOError` of it
    is the problem of those files alone.
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
            problem_of[server_url] = str(unusable)
            client = None
        if server_url in problem_of:
            yield Delivered.of(box, problem=problem_of[server_url])
            box.close()
        elif client is None:
            box.close()
        else:
            file, error = _emptied(box, client)
            if isinstance(error, ZeusBSORuntimeError) and error.is_outage:
                # The server is away: its other files would only wait for another time-out each.
                problem_of[server_url] = str(error)
            yield file


def listed(outbox: Outbox) -> Iterator[Delivered]:
    """Describe the files that `deliver_waiting` would find, and leave them as they are."""
    for box in _opened(outbox):
        if isinstance(box, Delivered):
            yield box
        else:
            yield Delivered.of(box)
            box.close()


def _opened(outbox: Outbox) -> Iterator[OutboxFile | Delivered]:
    """Open each file that no process has; describe those that cannot be read."""
    for path in outbox.waiting():
        try:
            yield outbox.open(path)
        except (FileNotFoundError, OutboxFileBusyError):
            continue
        except (OutboxFileError, OSError) as error:
            yield Delivered(path, problem=str(error))


def _emptied(box: OutboxFile, client: ServerPort) -> tuple[Delivered, ZeusBSOError | None]:
    waiting, is_ended = len(box), box.has_ending
    problem: ZeusBSOError | None = None
    try:
        # A file without results leaves its trial as it is.
        verdict = deliver(box, client) if waiting else None
        if verdict is not None and not verdict.stop_train and not is_ended and box.trial is not None:
            _leave(client, box.trial)
    except ZeusBSOError as error:
        problem = error
    file = Delivered.of(box, problem=problem)
    aside = box.refuse() if problem is not None and is_refusal(problem) else box.close()
    return replace(file, delivered=waiting - file.left, set_aside=aside), problem


def _leave(client: ServerPort, trial: TrialId) -> None:
    """Have a trial abandoned soon: its training died without a word, and may come back from a checkpoint."""
    try:
        client.heartbeat(trial)
    except ZeusBSOError as error:
        _logger.debug("no heartbeat for trial %d of job %s: %s", trial.trial_number, trial.job_id, error)
