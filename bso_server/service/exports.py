"""Exports: all stored facts about a job as JSON Lines, for an import elsewhere.

The first line is the job (`JobExport`), and each further line a trial (`TrialExport`), in order of dispatch. The import
derives arms, the cheapest trial and the policy's memory from these facts again. A job may have hundreds of thousands of
reports, so that neither the export nor the import holds a whole job in memory. A file may contain several exports.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import AsyncIterator, Iterable, Iterator, Sequence
from itertools import accumulate, groupby
from typing import Annotated, Literal

from pydantic import Field, StringConstraints

from bso_server.core.model import TrialRecord
from bso_server.errors import UnknownJobError
from bso_server.service.loading import known_job
from bso_server.service.views import EpochExport
from bso_server.storage import queries
from bso_server.storage.rows import StoredDecision, StoredEpoch, record_row, trial_row
from bso_server.storage.store import Store
from bso_server.storage.transaction import Transaction
from zeus_plugins.protocol import (
    BatchSize,
    CreatedJob,
    Decision,
    Epochs,
    Finite,
    Instant,
    Joules,
    NonNegativeFinite,
    NonNegativeInt,
    PositiveInt,
    Revision,
    Seconds,
    TrialFacts,
    WireMessage,
)

MEDIA_TYPE = "application/jsonl"

# Largest number of trials, and rough number of reports, that one transaction reads.
_TRIALS_AT_ONCE = 100
_REPORTS_AT_ONCE = 1000

# Only the line of a job has this key, because JSON escapes quotation marks in texts.
_BEGINS_EXPORT = re.compile(rb'"format"\s*:')

# An imported job has at most half of the 2^31 events of an integer column, so that it can have further ones.
EventNumber = Annotated[int, Field(gt=0, le=2**30)]


class JobExport(WireMessage):
    """First line of an export: the job.

    Attributes:
        format: Marks the line where a job begins.
        version: Version of the format.
        job: The job as registered; its `job_id` is required.
        created_at: When the job was registered (UTC).
        survivors: Batch sizes with which the bandit stage was entered, ascending, or None before that.
        rng_state: State of the job's random generator as JSON; None without a seed or before its first draw.
        owner: Id of the job's token, or None. A server without this token ignores it.
        shared: True if other tokens may run trials of the job, too.
        revisions: The job's revisions, in order.
        trials: Number of lines that follow, one for each trial.
    """

    format: Literal["zeus-bso-job"] = "zeus-bso-job"
    version: Literal[1] = 1
    job: CreatedJob
    created_at: Instant
    survivors: Annotated[tuple[BatchSize, ...], Field(min_length=1)] | None
    rng_state: Annotated[str, StringConstraints(max_length=1000)] | None
    owner: Annotated[str, StringConstraints(pattern="^[0-9a-f]{8}$")] | None = None
    shared: bool = False
    revisions: tuple[Revision, ...] = ()
    trials: NonNegativeInt


class TrialExport(TrialFacts):
    """A further line of an export: a trial, without its token and the client's key.

    Attributes:
        started_event: Event of the job at which the trial was dispatched.
        reported_at: When the last report arrived (UTC), or None.
        ended_event: Event of the job at which the trial ended, or None.
        epoch: Epochs trained by the last report, or None.
        report_count: Number of reports.
        longest_gap_s: Longest time between two reports, seconds.
        lease_expires_at: When the server abandons the silent trial (UTC); None after its end.
        heartbeats: True if the training sends heartbeats.
        lease_epoch: Number of runs of the training; more than 1 if it resumed from a checkpoint.
        first_epoch: Epochs trained by the first report, or None.
        first_time_s: Seconds until the first report, or None.
        first_energy_j: Joules until the first report, or None.
        deviations: The spread of the epochs' times (s²), energies (J²) and both together (J·s); None if unknown.
        confirmed: Number of the latest evaluations that reached the target, in a row.
        decision: The numbers behind the choice of the batch size; None if no policy chose it.
        epochs: The reports that are kept, in order, without a report that ended the trial.
    """

    started_event: EventNumber
    reported_at: Instant | None
    ended_event: EventNumber | None
    epoch: Epochs | None
    report_count: NonNegativeInt
    longest_gap_s: Annotated[float, Field(ge=0, le=1e10, allow_inf_nan=False)]
    lease_expires_at: Instant | None
    heartbeats: bool
    lease_epoch: PositiveInt = 1
    first_epoch: Epochs | None = None
    first_time_s: Seconds | None = None
    first_energy_j: Joules | None = None
    deviations: tuple[NonNegativeFinite, NonNegativeFinite, Finite] | None = None
    confirmed: NonNegativeInt = 0
    decision: Decision | None = None
    epochs: tuple[EpochExport, ...] = ()


def line_of(message: WireMessage) -> bytes:
    """Return a line of an export with its line feed; NaN and infinities become null."""
    return f"{message.model_dump_json()}\n".encode()


def split_exports(lines: Iterable[bytes]) -> Iterator[tuple[int, Iterator[bytes]]]:
    """Yield, for each export in a file, the number of its first line (from 1) and an iterator over its lines.

    The caller need not read an iterator to its end.
    """
    first = 1

    def first_line_of(numbered: tuple[int, bytes]) -> int:
        nonlocal first
        number, line = numbered
        if _BEGINS_EXPORT.search(line):
            first = number
        return first

    for first_line, numbered in groupby(enumerate(lines, 1), first_line_of):
        yield first_line, (line for _, line in numbered)


async def export(store: Store, job_id: str) -> AsyncIterator[bytes]:
    """Yield the text of a job's export: the first line, then several lines at a time.

    Each piece is read in its own transaction, so that no transaction stays open for a slow client. A trial and its
    reports are from one transaction. Trials that began after the first line was read are left out.

    Raises:
        UnknownJobError: No such job, or it was deleted during the export.
    """
    job = await store.read(_read_job, job_id)
    yield line_of(job)
    after = 0
    while after < job.trials:
        trials = await store.read(_read_trials, job_id, after, job.trials)
        yield await asyncio.to_thread(lambda found: b"".join(map(line_of, found)), trials)
        after = trials[-1].trial_number


def _read_job(transaction: Transaction, job_id: str) -> JobExport:
    stored = known_job(transaction, job_id)
    return JobExport(
        job=stored.registration,
        created_at=stored.created_at,
        survivors=stored.survivors,
        rng_state=stored.rng_state,
        owner=stored.owner,
        shared=stored.shared,
        revisions=transaction.revisions(job_id),
        trials=stored.trial_count,
    )


def _read_trials(transaction: Transaction, job_id: str, after: int, last: int) -> list[TrialExport]:
    """Return a few trials with numbers from `after` + 1 to `last`, or one trial with many reports."""
    found = queries.trials_page(transaction, job_id, state=None, after=after, limit=_TRIALS_AT_ONCE)
    sums = accumulate(trial.report_count for trial in found)
    few = [trial for trial, sum_ in zip(found, sums, strict=True) if sum_ <= _REPORTS_AT_ONCE] or found[:1]
    trials = [trial for trial in few if trial.trial_number <= last]
    if not trials:  # deleted since the first line was read
        raise UnknownJobError(job_id)
    first, last = trials[0].trial_number, trials[-1].trial_number
    epochs: dict[int, list[StoredEpoch]] = {}
    for epoch in queries.epochs_between(transaction, job_id, first, last):
        epochs.setdefault(epoch.trial_number, []).append(epoch)
    decisions = {each.trial_number: each for each in queries.decisions_of(transaction, job_id, first, last)}
    return [
        _trial_export(trial, epochs.get(number, ()), decisions.get(number))
        for number, trial in ((each.trial_number, each) for each in trials)
    ]


def _trial_export(trial: TrialRecord, epochs: Sequence[StoredEpoch], decision: StoredDecision | None) -> TrialExport:
    """Return a trial without validation, because an export shows the database as it is."""
    return TrialExport.model_construct(
        **trial_row(trial),
        decision=None if decision is None else decision.decision,
        epochs=tuple(EpochExport.model_construct(**record_row(epoch)) for epoch in epochs),
    )
