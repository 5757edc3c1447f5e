"""The report on all jobs of a period: what they used, and what they are shown to have saved."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from datetime import datetime, timedelta
from operator import attrgetter
from typing import Any

from bso_server.core.savings import UNSPENT, saved_since, spent_on
from bso_server.core.verdict import total
from bso_server.service.commands import utc_now
from bso_server.service.verdicts import judged_jobs, update
from bso_server.service.views import FleetJob, FleetPage, FleetSum, Tariff
from bso_server.storage.queries import Judged
from bso_server.storage.store import Store
from bso_server.storage.transaction import Transaction
from zeus_plugins.protocol import Fingerprint, SavingsWord

GROUP = "^[A-Za-z0-9._-]{1,64}$"
"""Pattern of names of groups: the names of tags, and owner, model, gpu and job."""

PERIOD = r"^[0-9]{1,4}[hdw]$"
"""A length of time: hours, days or weeks."""

_MOST_GROUPS = 100
_MOST_JOBS = 20

_SUMS = ("jobs", "saves", "loses", "runs", "energy_j", "estimated_j", "time_s", "cost_j")
_SAVED = "cost_saved_j", "energy_saved_j", "time_saved_s"


def length_of(text: str) -> timedelta:
    """Return a length of time, at most 9999 days; raise `ValueError` if `text` does not match `PERIOD`."""
    if re.fullmatch(PERIOD, text) is None:
        raise ValueError(f"{text!r} is no time: write hours, days or weeks as 12h, 30d or 8w")
    return min(timedelta(hours=int(text[:-1]) * {"h": 1, "d": 24, "w": 7 * 24}[text[-1]]), timedelta(days=9999))


class FleetReader:
    """Reader of the report; `clock` returns the present instant."""

    def __init__(self, store: Store, tariff: Tariff, clock: Callable[[], datetime] = utc_now) -> None:
        # Patient, because the trials of thousands of jobs are read.
        self._store = store.patient()
        self._tariff = tariff
        self._clock = clock

    async def read(self, since: str, by: str) -> FleetPage:
        """Return the report on the trials that ended within a length of time until now; raise as `Store.read`.

        `by` is ``owner``, ``model``, ``gpu``, ``job`` or the name of a tag. Several transactions read the jobs.
        """
        length, outdated = length_of(since), await update(self._store)
        until, jobs = self._clock(), list[FleetJob]()
        tokens = await self._store.read(Transaction.all_tokens)
        owners = {token.token_id: f"{token.name} ({token.token_id})" for token in tokens}
        async for page in judged_jobs(self._store, until - length):
            # In threads, so that the event loop serves other requests.
            jobs += await asyncio.to_thread(_jobs_of, page, owners)
        return await asyncio.to_thread(fleet_page, jobs, by, until - length, until, outdated, self._tariff)


def fleet_page(
    jobs: Sequence[FleetJob], by: str, since: datetime, until: datetime, outdated: int, tariff: Tariff
) -> FleetPage:
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
        outdated=outdated,
        tariff=tariff,
    )


def _sum_of(key: str, parts: Iterable[FleetSum]) -> FleetSum:
    parts = list(parts)
    sums: dict[str, Any] = {name: sum(getattr(part, name) for part in parts) for name in _SUMS}
    sums |= {name: total(getattr(part, name) for part in parts) for name in _SAVED}
    return FleetSum(key=key, **sums)


def _jobs_of(page: Iterable[Judged], owners: Mapping[str, str]) -> list[FleetJob]:
    """Return the jobs of a page with ended trials; `owners` are the names of owners by token id."""
    found = []
    for row in page:
        tallies = [tally for tally in row.tallies if tally.state not in UNSPENT]
        if not tallies:
            continue
        job, verdict = row.job, row.verdict
        word, known = verdict.savings.word, Fingerprint.model_validate_json(row.fingerprint or "{}")
        saved, took = saved_since(job, tallies, verdict), spent_on(job, tallies)
        found.append(
            FleetJob(
                key=job.job_id,
                jobs=1,
                saves=int(word is SavingsWord.SAVES),
                loses=int(word is SavingsWord.LOSES),
                runs=sum(tally.trials for tally in tallies),
                energy_j=took.energy_j,
                estimated_j=sum(tally.estimated_j for tally in tallies),
                time_s=took.time_s,
                cost_j=took.cost_j,
                cost_saved_j=saved["cost_j"],
                energy_saved_j=saved["energy_j"],
                time_saved_s=saved["time_s"],
                word=word,
                owner=row.owner and owners.get(row.owner, row.owner),
                model=known.model,
                gpu_model=job.gpu_model,
                tags=job.tags or {},
                advice=verdict.advice,
                stuck=verdict.stuck,
            )
        )
    return found
