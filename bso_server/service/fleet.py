"""The report on all jobs of a period: what they used, and what they are shown to have saved."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextvars import Context
from datetime import datetime, timedelta
from operator import attrgetter

from bso_server.core.savings import UNSPENT, Amounts, is_whole_run, spent_on
from bso_server.core.verdict import LEAST_CONTROLS, SMALL, Saved, Verdict, total
from bso_server.service.commands import utc_now
from bso_server.service.loading import best_size, load_history
from bso_server.service.reading import stuck_advice
from bso_server.service.savings import saved_since
from bso_server.service.views import FleetJob, FleetPage, FleetSum, Tariff
from bso_server.storage import queries
from bso_server.storage.rows import StoredJob
from bso_server.storage.store import Store
from bso_server.storage.transaction import Transaction
from zeus_plugins.protocol import CreatedJob, Origin, SavingsWord

GROUP = "^[A-Za-z0-9._-]{1,64}$"
"""Pattern of names of groups: the names of tags, and owner, model, gpu and job."""

PERIOD = r"^[0-9]{1,4}[hdw]$"
"""A length of time: hours, days or weeks."""

# Number of jobs that one transaction reads, so that other requests get their turn in between.
_JOBS_AT_ONCE = 20
_MOST_GROUPS = 100
_MOST_JOBS = 20

_SUMS = ("jobs", "saves", "loses", "runs", "energy_j", "estimated_j", "time_s", "cost_j")
_SAVED = dict(zip(Amounts._fields, ("cost_saved_j", "energy_saved_j", "time_saved_s"), strict=True))


def length_of(text: str) -> timedelta:
    """Return a length of time, at most 9999 days; raise `ValueError` if `text` does not match `PERIOD`."""
    if re.fullmatch(PERIOD, text) is None:
        raise ValueError(f"{text!r} is no time: write hours, days or weeks as 12h, 30d or 8w")
    return min(timedelta(hours=int(text[:-1]) * {"h": 1, "d": 24, "w": 7 * 24}[text[-1]]), timedelta(days=9999))


class FleetReader:
    """Reader of the report, one period at a time; `clock` returns the present instant."""

    def __init__(self, store: Store, tariff: Tariff, clock: Callable[[], datetime] = utc_now) -> None:
        # Patient, because learning thousands of runs of a job takes seconds.
        self._store = store.patient()
        self._tariff = tariff
        self._clock = clock
        self._turn = asyncio.Lock()
        self._readings: dict[str, asyncio.Task[tuple[datetime, list[FleetJob]]]] = {}

    async def read(self, since: str, by: str) -> FleetPage:
        """Return the report on the trials that ended within a length of time until now; raise as `Store.read`.

        `by` is ``owner``, ``model``, ``gpu``, ``job`` or the name of a tag. Several transactions read the jobs.
        Simultaneous requests for a period share one reading.
        """
        length = length_of(since)
        if since not in self._readings:
            # A new context: this request's deadline must not end the reading.
            self._readings[since] = asyncio.create_task(self._read(length), context=Context())
            self._readings[since].add_done_callback(lambda _: self._readings.pop(since))
        until, jobs = await asyncio.shield(self._readings[since])
        return fleet_page(jobs, by, until - length, until, self._tariff)

    async def _read(self, length: timedelta) -> tuple[datetime, list[FleetJob]]:
        async with self._turn:
            until, jobs = self._clock(), list[FleetJob]()
            after: str | None = ""
            while after is not None:
                found, after = await self._store.read(_page, after, until - length)
                jobs += found
            return until, jobs


def fleet_page(jobs: Sequence[FleetJob], by: str, since: datetime, until: datetime, tariff: Tariff) -> FleetPage:
    """Put the report on these jobs together."""
    jobs = sorted(jobs, key=lambda each: (-each.energy_j, each.key))
    grouped: dict[str, list[FleetSum]] = {}
    for job in jobs:
        known = {
            "owner": job.owner or "no token",
            "model": job.model or "unknown",
            "gpu": job.gpu_model,
            "job": job.key,
        }
        grouped.setdefault(known.get(by) or job.tags.get(by, f"no tag {by}"), []).append(job)
    groups = sorted((_sum_of(key, each) for key, each in grouped.items()), key=attrgetter("energy_j"), reverse=True)
    if len(groups) > _MOST_GROUPS:
        rest = groups[_MOST_GROUPS - 1 :]
        groups[_MOST_GROUPS - 1 :] = [_sum_of(f"{len(rest)} others", rest)]
    idle, stuck = [job for job in jobs if job.advice], [job for job in jobs if job.stuck]
    return FleetPage(
        since=since,
        until=until,
        by=by,
        total=_sum_of("total", jobs),
        saving=_sum_of("saves", [job for job in jobs if job.saves]),
        losing=_sum_of("loses", [job for job in jobs if job.loses]),
        groups=tuple(groups),
        costliest=tuple(jobs[:_MOST_JOBS]),
        idle=tuple(idle[:_MOST_JOBS]),
        idle_jobs=len(idle),
        stuck=tuple(stuck[:_MOST_JOBS]),
        stuck_jobs=len(stuck),
        tariff=tariff,
    )


def _sum_of(key: str, parts: Iterable[FleetSum]) -> FleetSum:
    parts = list(parts)
    sums = {name: sum(getattr(part, name) for part in parts) for name in _SUMS}
    saved = {name: total(getattr(part, name) for part in parts) for name in _SAVED.values()}
    return FleetSum(key=key, **sums, **saved)


def _page(transaction: Transaction, after: str, since: datetime) -> tuple[list[FleetJob], str | None]:
    """Return the jobs of the next page that had trials since then, and the last id of the page, or None at the end."""
    page = queries.jobs_page(transaction, prefix=None, stage=None, after=after, limit=_JOBS_AT_ONCE)
    recent = queries.recent_tallies(transaction, [stored.job_id for stored in page], since)
    owners = {stored.owner: transaction.token(stored.owner) for stored in page if stored.owner is not None}
    names = {owner: owner if token is None else f"{token.name} ({owner})" for owner, token in owners.items()}
    found = [_job(transaction, stored, names, recent.get(stored.job_id, [])) for stored in page]
    return [job for job in found if job.runs], page[-1].job_id if len(page) == _JOBS_AT_ONCE else None


def _job(
    transaction: Transaction, stored: StoredJob, names: Mapping[str, str], recent: Sequence[queries.Recent]
) -> FleetJob:
    job, recent = stored.registration, [each for each in recent if each.tally.state not in UNSPENT]
    tallies, runs = [each.tally for each in recent], sum(each.tally.trials for each in recent)
    saved, verdict, advice, stuck = dict[str, Saved | None](), None, None, None
    if runs:
        whole = [each for each in recent if is_whole_run(each.tally) and not each.tally.other_gpus]
        # Besides the first run, only these runs can be evidence at the default. With too few of them, no verdict can
        # be shown, so none is computed.
        at_default = sum(
            each.all_trials
            for each in whole
            if each.tally.batch_size == job.default_batch_size and each.tally.origin is not Origin.EXPLORATION
        )
        if at_default >= LEAST_CONTROLS - 1 and (best := best_size(transaction, stored)) is not None:
            if best != job.default_batch_size:
                saved, verdict = saved_since(transaction, stored, recent, best)
            advice = _advice(job, best, verdict)
        elif not whole:
            stuck = stuck_advice(transaction, load_history(transaction, stored))
    word = SavingsWord.NOT_SHOWN if verdict is None else verdict.word
    took = spent_on(job, tallies)
    return FleetJob(
        key=job.job_id,
        jobs=1,
        saves=int(word is SavingsWord.SAVES),
        loses=int(word is SavingsWord.LOSES),
        runs=runs,
        energy_j=took.energy_j,
        estimated_j=sum(each.estimated_j for each in recent),
        time_s=took.time_s,
        cost_j=took.cost_j,
        **{_SAVED[name]: each for name, each in saved.items()},
        word=word,
        owner=None if stored.owner is None else names[stored.owner],
        model=None if job.fingerprint is None else job.fingerprint.model,
        gpu_model=job.gpu_model,
        tags=job.tags or {},
        advice=advice,
        stuck=stuck,
    )


def _advice(job: CreatedJob, best: int, verdict: Verdict | None) -> str | None:
    """Return why a job saves nothing and what to do, in words; None if it saves, or may still be shown to."""
    default = job.default_batch_size
    if verdict is None:
        why = f"the default, {default}, is the best batch size"
    elif verdict.word is SavingsWord.LOSES and verdict.now is not None:
        why = f"{best} costs {verdict.now.in_words} more than the default, {default}"
    elif verdict.cause is not None and verdict.cause.startswith(SMALL):
        why = verdict.cause
    else:
        return None
    command = f"bso-server jobs revise {job.job_id} --batch-sizes {default}"
    return f"{why}: train at {default} alone ({command}), or offer other sizes"
