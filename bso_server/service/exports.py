"""Exports: everything that is kept of a job as JSON Lines, to be imported elsewhere.

The first line is the job (`JobExport`), and each further line one of its trials (`TrialExport`), in order of dispatch.
An export holds facts only: what follows from them (arms, the cheapest trial, the policy's memory) is made anew by the
import. A job may have hundreds of thousands of reports, so neither side ever holds all of it. Several exports may stand
one after another in a file.
"""

from __future__ import annotations

import asyncio
import math
import re
from collections.abc import AsyncIterator, Iterable, Iterator, Sequence
from itertools import accumulate, groupby
from typing import Annotated, Any, Literal, NamedTuple

from pydantic import Field, StringConstraints

from bso_server.core.model import TrialRecord
from bso_server.errors import UnknownJobError
from bso_server.service.loading import known_job
from bso_server.service.views import EpochExport, PowerProfileExport
from bso_server.storage import queries
from bso_server.storage.rows import StoredDecision, StoredEpoch, StoredPowerProfile, record_row, trial_row
from bso_server.storage.store import Store
from bso_server.storage.transaction import Transaction
from zeus_plugins.protocol import (
    BatchSize,
    CreatedJob,
    Decision,
    Epochs,
    Instant,
    Joules,
    NonNegativeInt,
    PositiveInt,
    TrialFacts,
    WireMessage,
)

MEDIA_TYPE = "application/jsonl"
"""The media type of an export."""

# Trials, and roughly reports, that one transaction reads.
_TRIALS_AT_ONCE = 100
_REPORTS_AT_ONCE = 1000

# Only the line of a job has this key: within a JSON text, quotation marks are escaped.
_BEGINS_EXPORT = re.compile(rb'"format"\s*:')

# Leaves an imported job room for as many events again.
EventNumber = Annotated[int, Field(gt=0, le=2**30)]


class JobExport(WireMessage):
    """First line of an export: the job.

    Attributes:
        format: Says what this is, and that a job begins here.
        version: Version of the format.
        job: The job as registered; its `job_id` is required.
        created_at: When it was registered (UTC).
        survivors: Batch sizes with which the bandit stage was entered, ascending, or None before that.
        rng_state: State of the job's random generator as JSON, or None for one without a seed or before its first draw.
        owner: Id of the token that it belongs to, or None. It means something to a server that has this token.
        shared: Whether other tokens may run trials of it, too.
        trials: Number of the lines that follow, one for each trial.
    """

    format: Literal["zeus-bso-job"] = "zeus-bso-job"
    version: Literal[1] = 1
    job: CreatedJob
    created_at: Instant
    survivors: Annotated[tuple[BatchSize, ...], Field(min_length=1)] | None
    rng_state: Annotated[str, StringConstraints(max_length=1000)] | None
    owner: Annotated[str, StringConstraints(pattern="^[0-9a-f]{8}$")] | None = None
    shared: bool = False
    trials: NonNegativeInt


class TrialExport(TrialFacts):
    """A further line of an export: a trial without its token and the client's key, which mean nothing elsewhere.

    Attributes:
        started_event: Event of the job at which it was dispatched.
        reported_at: When its last report was taken (UTC), or None.
        ended_event: Event of the job at which it ended, or None.
        epoch: Epochs trained as of its last report, or None.
        report_count: Reports taken.
        longest_gap_s: Longest time between two of them, seconds.
        lease_expires_at: When it counts as abandoned if nothing more is heard of it (UTC); None for one that has ended.
        heartbeats: Whether its training sends heartbeats.
        lease_epoch: Counts the runs of its training; more than 1 where one has resumed from a checkpoint.
        first_epoch: Epochs trained as of its first report, or None.
        first_cost_j: Its cost in joules by then, or None.
        cost_deviations_j2: The spread of its epochs' costs, as `TrialRecord` has it; None where that is not known.
        decision: The numbers behind the choice of its batch size; None where no policy chose it.
        power_profile: What it measured of its power limits, if that was new to the job and is kept, or None.
        epochs: Its reports that are kept beside it, in order. The one that ended it stands in the fields above alone.
        not_finite: Fields that are null because the database has NaN or an infinity there, which JSON cannot hold: such
            as ``metric`` or ``epochs.0.metric``. A server refuses such numbers, so an import does, too.
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
    first_cost_j: Joules | None = None
    cost_deviations_j2: Annotated[float, Field(ge=0, allow_inf_nan=False)] | None = None
    decision: Decision | None = None
    power_profile: PowerProfileExport | None = None
    epochs: tuple[EpochExport, ...] = ()
    not_finite: tuple[str, ...] = ()


def line_of(message: WireMessage) -> bytes:
    """Return a line of an export with its end; NaN and infinities are written as null."""
    return f"{message.model_dump_json()}\n".encode()


def split_exports(lines: Iterable[bytes]) -> Iterator[tuple[int, Iterator[bytes]]]:
    """Split a file into the exports that it holds.

    Yields:
        The number of an export's first line in the file, from 1, and its lines. They may be left unread.
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
    """Yield the text of a job's export: the first line, then some lines at a time.

    Each piece is read in a transaction of its own, so that none stays open while a slow client takes it. Trials that
    began after the first line was read are left out; each of the others is of one moment, with its reports.

    Raises:
        UnknownJobError: There is no such job, or it was deleted meanwhile.
    """
    job = await store.read(_read_job, job_id)
    yield line_of(job)
    after = 0
    while after < job.trials:
        rows = await store.read(_read_trials, job_id, after, job.trials)
        yield await asyncio.to_thread(_lines, rows)
        after = rows.trials[-1].trial_number


class _Rows(NamedTuple):
    """Some trials of a job, and everything that is kept of them in other tables."""

    trials: Sequence[TrialRecord]
    epochs: Sequence[StoredEpoch]
    power_profiles: Sequence[StoredPowerProfile]
    decisions: Sequence[StoredDecision]


def _read_job(transaction: Transaction, job_id: str) -> JobExport:
    stored = known_job(transaction, job_id)
    return JobExport(
        job=stored.registration,
        created_at=stored.created_at,
        survivors=stored.survivors,
        rng_state=stored.rng_state,
        owner=stored.owner,
        shared=stored.shared,
        trials=stored.trial_count,
    )


def _read_trials(transaction: Transaction, job_id: str, after: int, last: int) -> _Rows:
    """Read a few trials with numbers above `after` and up to `last`, or one trial with many reports.

    Raises:
        UnknownJobError: The job was deleted meanwhile.
    """
    found = queries.trials_page(transaction, job_id, state=None, after=after, limit=_TRIALS_AT_ONCE)
    sums = accumulate(trial.report_count for trial in found)
    few = [trial for trial, sum_ in zip(found, sums, strict=True) if sum_ <= _REPORTS_AT_ONCE] or found[:1]
    trials = [trial for trial in few if trial.trial_number <= last]
    if not trials:
        raise UnknownJobError(job_id)
    first, last = trials[0].trial_number, trials[-1].trial_number
    return _Rows(
        trials,
        queries.epochs_between(transaction, job_id, first, last),
        queries.power_profiles_of(transaction, job_id, first, last),
        queries.decisions_of(transaction, job_id, first, last),
    )


def _lines(rows: _Rows) -> bytes:
    profile_of = {each.trial_number: each for each in rows.power_profiles}
    decision_of = {each.trial_number: each.decision for each in rows.decisions}
    epochs_of: dict[int, list[dict[str, Any]]] = {}
    for epoch in rows.epochs:
        epochs_of.setdefault(epoch.trial_number, []).append(record_row(epoch))
    return b"".join(
        _line_of_trial(
            trial_row(trial),
            epochs_of.get(trial.trial_number, ()),
            profile_of.get(trial.trial_number),
            decision_of.get(trial.trial_number),
        )
        for trial in rows.trials
    )


def _line_of_trial(
    values: dict[str, Any],
    epochs: Sequence[dict[str, Any]],
    power_profile: StoredPowerProfile | None,
    decision: Decision | None,
) -> bytes:
    """Return the line of a trial. It is not validated: an export tells what the database has, whatever that is."""
    profile = None if power_profile is None else PowerProfileExport.model_validate(power_profile, from_attributes=True)
    not_finite = [*_not_finite(values)]
    for index, epoch in enumerate(epochs):
        not_finite += [f"epochs.{index}.{name}" for name in _not_finite(epoch)]
    trial = TrialExport.model_construct(
        **values,
        decision=decision,
        power_profile=profile,
        epochs=tuple(EpochExport.model_construct(**epoch) for epoch in epochs),
        not_finite=tuple(not_finite),
    )
    return line_of(trial)


def _not_finite(values: dict[str, Any]) -> Iterator[str]:
    return (name for name, value in values.items() if isinstance(value, float) and not math.isfinite(value))
